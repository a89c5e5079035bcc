"""Samples of images between their points: grid_sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from gradstats.capture.following._examples import Examples
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import first_node, node_of, value_of
from gradstats.capture.rules._common import as_data, locate, rows_along, run
from gradstats.capture.rules._embedding import table_rows
from gradstats.capture.uses._tap import Factors, tap
from gradstats.capture.uses._uses import free_of_views

if TYPE_CHECKING:
    from gradstats.capture._context import Context

# The slope of PyTorch's cubic kernel one point away from its centre.
SLOPE = -0.75


def grid_sample(
    tracker: Context, func, input, grid, mode="bilinear", padding_mode="zeros", align_corners=None
):
    """Samples at tracked places or of tracked images: one for each example, or one for all.

    One image for all is a table, in which a sample looks up the points around it.
    """
    node, options = first_node(input, grid), (mode, padding_mode, align_corners)
    if node_of(input) is not None:
        examples = locate(tracker, func, node, grid, folds=True, trailing=1)
        if examples.axis != 0:
            return _of_one_image(tracker, func, input, grid, examples, *options)
    examples = rows_along(tracker, func, node, (input, grid), 0)
    operands = (as_data(tracker, func, node, item, examples) for item in (input, grid))
    return func(*operands, *options)


def _of_one_image(tracker: Context, func, input, grid, examples, mode, padding_mode, align_corners):
    if padding_mode == "reflection":
        reason = f"of one image for all examples, with {mode=} and {padding_mode=}, has no rule"
        remedy = 'Use padding_mode="border".'
        refuse(func, first_node(input), reason, remedy)
    result = func(value_of(input), grid, mode, padding_mode, align_corners)
    table = run(tracker, Tensor.flatten, run(tracker, Tensor.movedim, input, 1, -1), 0, -2)
    sizes = (input.shape[0], *input.shape[2:])
    shape = (*table.shape,)
    factors = SampleFactors(examples, sizes, shape, mode, padding_mode, bool(align_corners))
    result = tap([first_node(table)], free_of_views(result), factors, grid)
    # The result has an axis of channels in front of those of the grid.
    tracker.marks.place(result, examples.along(examples.axis + 1))
    tracker.followed = result
    return result


@dataclass(frozen=True)
class SampleFactors(Factors):
    """The factor of an image that was sampled for all examples, as a table of its points.

    Attributes:
        examples: where the examples lie in the grid.
        sizes: the number of images, and of points along each of their axes.
        shape: of the table, (all points, channels).
        mode, padding_mode, align_corners: as ``grid_sample`` takes them.
    """

    examples: Examples
    sizes: tuple[int, ...]
    shape: tuple[int, int]
    mode: str
    padding_mode: str
    align_corners: bool

    def __call__(self, grad: Tensor, grid: Tensor) -> list:
        found = list(self._found(grid.detach()))
        ids = torch.stack([number for number, _ in found], -1)
        shares = torch.stack([share for _, share in found], -1)
        of_points = grad.movedim(1, -1).unsqueeze(-2) * shares.unsqueeze(-1).to(grad.dtype)
        return [table_rows(self.examples, ids, of_points, self.shape, None)]

    def _found(self, grid: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each neighbour of the places, its number and its share in the sample."""
        count, *points = self.sizes
        # The last coordinate is that along the first axis of the image.
        along = [
            self._neighbours(place, size)
            for place, size in zip(reversed(grid.unbind(-1)), points, strict=True)
        ]
        image = torch.arange(count, device=grid.device).view(-1, *(1 for _ in points))
        for corner in product(*along):
            number, share = image, torch.ones_like(grid[..., 0])
            for (point, weight), size in zip(corner, points, strict=True):
                inside = (point >= 0) & (point < size)
                share = torch.where(inside, share * weight, 0)
                number = number * size + point.long().clamp(0, size - 1)
            yield number, share

    def _neighbours(self, place: Tensor, size: int) -> Sequence[tuple[Tensor, Tensor]]:
        """Return the points next to places along one axis, with their shares."""
        place = (place + 1) / 2 * (size - 1) if self.align_corners else ((place + 1) * size - 1) / 2
        if self.mode == "bicubic":
            return self._cubic(place, size)
        if self.padding_mode == "border":
            place = place.clamp(0, size - 1)
        if self.mode == "nearest":
            return [(place.round(), torch.ones_like(place))]
        first = place.floor()
        return [(first, first + 1 - place), (first + 1, place - first)]

    def _cubic(self, place: Tensor, size: int) -> Sequence[tuple[Tensor, Tensor]]:
        """Return the same for cubic convolution (Keys, 1981); borders clamp points, not places."""
        first, a = place.floor(), SLOPE
        found = []
        for step in (-1, 0, 1, 2):
            point, x = first + step, (place - first - step).abs()
            near, far = ((a + 2) * x - (a + 3)) * x * x + 1, a * (((x - 5) * x + 8) * x - 4)
            point = point.clamp(0, size - 1) if self.padding_mode == "border" else point
            found.append((point, near if step in (0, 1) else far))
        return found


RULES = {functional.grid_sample: grid_sample}
