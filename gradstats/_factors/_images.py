"""Convolutions of examples whose images differ in number or size, or come from several uses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradstats._factors._factor import Factor, compute_dtype, selected
from gradstats._factors._patches import Patches, convolved


@dataclass(frozen=True)
class Images:
    """G_i = the sum of the gradients of example i's pieces; nothing is copied or padded.

    Attributes:
        pieces: at least one; their batch axes count images.
        owners: the example that each piece belongs to.
        batch: number of examples B.
    """

    pieces: tuple[Patches, ...]
    owners: tuple[int, ...]
    batch: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pieces[0].shape

    def select(self, rows) -> Images:
        place = {example: n for n, example in enumerate(selected(rows, self.batch).tolist())}
        kept = [
            (piece, place[owner])
            for piece, owner in zip(self.pieces, self.owners, strict=True)
            if owner in place
        ]
        pieces, owners = zip(*kept or [(self.pieces[0].select(slice(0)), 0)], strict=True)
        return Images(pieces, owners, len(place))

    def dense(self) -> Tensor:
        dtype = compute_dtype(*(side for piece in self.pieces for side in piece.sides))
        gradient = self.pieces[0].grad.new_zeros(self.batch, *self.shape, dtype=dtype)
        for examples, parts in self.alike():
            for part in parts:
                gradient[examples] += part.dense()
        return gradient

    @property
    def granule(self) -> int:
        return math.lcm(*(piece.granule for piece in self.pieces))

    def narrow(self, start: int, stop: int) -> Images:
        return replace(self, pieces=tuple(piece.narrow(start, stop) for piece in self.pieces))

    def alike(self, budget: float = math.inf) -> Iterator[tuple[list[int], list[Factor]]]:
        """Yield groups of examples whose images have the same sizes, and their factors.

        The factors of a group add up to its gradients.

        Args:
            budget: bytes of images that may be concatenated at once.
        """
        images: dict[int, dict[tuple, list[Patches]]] = {}
        for piece, owner in zip(self.pieces, self.owners, strict=True):
            if piece.batch:
                images.setdefault(owner, {}).setdefault(piece.form, []).append(piece)
        groups: dict[tuple, list[int]] = {}
        for example, by_form in images.items():
            counts = (sum(piece.batch for piece in pieces) for pieces in by_form.values())
            groups.setdefault((*zip(by_form, counts, strict=True),), []).append(example)
        for forms, examples in groups.items():
            first = [piece for pieces in images[examples[0]].values() for piece in pieces]
            size = sum(side.nbytes for piece in first for side in piece.sides)
            step = int(max(1, min(len(examples), budget // max(1, size))))
            for start in range(0, len(examples), step):
                here, parts = sorted(examples[start : start + step]), []
                for form, count in forms:
                    parts += _together([each for e in here for each in images[e][form]], count)
                yield here, parts


def _together(pieces: Sequence[Patches], count: int) -> list[Factor]:
    """Return the factors of examples with ``count`` images each, given example by example."""
    x, grad = (
        torch.cat(sides).unflatten(0, (-1, count))
        for sides in zip(*(piece.sides for piece in pieces), strict=True)
    )
    shape, geometry = pieces[0].shape, pieces[0].geometry
    sides = zip(x.unbind(1), grad.unbind(1), strict=True) if len(shape) == 5 else [(x, grad)]
    return [convolved(*each, shape, geometry) for each in sides]
