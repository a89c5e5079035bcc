"""Grouped products: each expert multiplies the rows that were routed to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._factors import Experts, Ragged
from gradstats.capture.following._examples import Examples
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import first_node, node_of, value_of
from gradstats.capture.rules._common import locate
from gradstats.capture.uses._tap import Factors, tap

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def grouped_mm(tracker: Context, func, mat_a, mat_b, *, offs=None, bias=None, out_dtype=None):
    """x_r W_e for the rows offs[e - 1] ≤ r < offs[e] of each expert e.

    As in PyTorch, rows behind the last expert's belong to none.
    """
    node = first_node(mat_a, mat_b, bias)
    of_rows = node_of(mat_a) is None and offs is not None and (mat_a.dim(), mat_b.dim()) == (2, 3)
    if not of_rows or bias is not None:
        refuse(func, node, "of anything but rows of data, offsets and tracked experts has no rule")
    examples = locate(tracker, func, node, mat_a, axis=0, folds=True, trailing=1)
    result = func(mat_a, value_of(mat_b), offs=offs, out_dtype=out_dtype)
    factors = ExpertFactors(examples, tuple(mat_b.shape))
    return tap([node], result, factors, mat_a, offs)


@dataclass(frozen=True)
class ExpertFactors(Factors):
    """The factor of the experts' weights (E, d_in, d_out).

    Attributes:
        examples: where the examples lie in the rows of all experts.
        shape: of the weights.
    """

    examples: Examples
    shape: tuple[int, ...]

    def __call__(self, grad: Tensor, x: Tensor, ends: Tensor) -> list[Experts]:
        # Sort each expert's rows by their examples, and count how many each example has.
        rows, batch, number = int(ends[-1]), self.examples.batch, len(ends)
        counts = ends.diff(prepend=ends.new_zeros(1))
        expert = torch.arange(number, device=x.device).repeat_interleave(counts, output_size=rows)
        pair = expert * batch + self.examples.owner(x.device)[:rows]
        order = pair.argsort(stable=True)
        ends_of_pairs = torch.bincount(pair, minlength=number * batch).cumsum(0)
        offsets = (0, *ends_of_pairs.tolist())
        return [Experts(Ragged(x[order], grad[order], offsets, self.shape[1:]), batch, self.shape)]


RULES: dict[Any, Any] = dict.fromkeys((functional.grouped_mm, torch._grouped_mm), grouped_mm)
