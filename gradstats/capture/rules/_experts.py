"""Grouped products: experts each of which multiplies the rows that were sent to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradstats._factors import Ragged
from gradstats.capture._dispatch import derive, refuse
from gradstats.capture._examples import Examples
from gradstats.capture._tensors import first_node, node_of
from gradstats.capture._uses import tap
from gradstats.capture.rules._common import locate, plain


def grouped_mm(tracker, func, mat_a, mat_b, *, offs=None, bias=None, out_dtype=None):
    """Rows offs[e - 1] … offs[e] of ``mat_a`` (rows, d_in) times W_e of ``mat_b`` (E, d_in, d_out).

    Each expert is a slice of the parameter of its own, with a factor of its own rows.
    """
    node = first_node(mat_a, mat_b, bias)
    of_rows = node_of(mat_a) is None and offs is not None and (mat_a.dim(), mat_b.dim()) == (2, 3)
    if not of_rows or bias is not None:
        refuse(
            func, node, "with other than rows of data, offsets and weights of experts has no rule"
        )
    examples = locate(tracker, func, node, mat_a, axis=0, folds=True, trailing=1)
    experts = derive(tracker, Tensor.unbind, (mat_b,), {})
    result = func(mat_a, plain(mat_b), offs=offs, out_dtype=out_dtype)
    factors = ExpertFactors(examples, tuple(mat_b.shape[1:]))
    return tap(tracker, [first_node(expert) for expert in experts], result, factors, mat_a, offs)


@dataclass(frozen=True, eq=False)
class ExpertFactors:
    """The factors of experts' weights, (d_in, d_out) each.

    Attributes:
        examples: where the examples lie in the rows of all experts.
        shape: of one expert's weight.
    """

    examples: Examples
    shape: tuple[int, ...]

    def __call__(self, grad: Tensor, x: Tensor, ends: Tensor) -> list[Ragged]:
        # The rows of an expert in the order of their examples, and how many each example has there.
        rows, batch, number = int(ends[-1]), self.examples.batch, len(ends)
        counts = ends.diff(prepend=ends.new_zeros(1))
        expert = torch.arange(number, device=x.device).repeat_interleave(counts, output_size=rows)
        place = expert * batch + self.examples.owner(x.device)[:rows]
        order = place.argsort(stable=True)
        own = torch.bincount(place, minlength=number * batch)
        bounds = [0, *own.cumsum(0).tolist()]
        x, grad = x[order], grad[order]
        factors = []
        for first in range(0, number * batch, batch):
            offsets = bounds[first : first + batch + 1]
            start, end = offsets[0], offsets[-1]
            relative = tuple(bound - start for bound in offsets)
            factors.append(Ragged(x[start:end], grad[start:end], relative, self.shape))
        return factors


RULES = {
    function: grouped_mm
    for function in (getattr(torch.nn.functional, "grouped_mm", None), torch._grouped_mm)
    if function is not None
}
