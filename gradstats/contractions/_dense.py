"""Squared norms by definition: a few examples' gradients at a time, squared and summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradstats import _cost
from gradstats._factors import elements_of, tensors_of
from gradstats.contractions._result import Contraction, squared_norms
from gradstats.contractions._rounding import relative_bound
from gradstats.contractions._tiles import dtype_of


def sqnorm(factor, workspace: int) -> Contraction:
    """Return ‖F[i]‖² from the per-example gradients of chunks of examples."""
    return sqnorm_of_sum([factor], workspace)


def sqnorm_of_sum(factors: Sequence, workspace: int) -> Contraction:
    """Return ‖Σ_u F_u[i]‖² from the per-example gradients of chunks of examples.

    Cost: the products that form the gradients; scratch of two gradients for each example of a chunk
    (three with several factors), and of one example at least.
    """
    batch = factors[0].batch
    held = (2 if len(factors) == 1 else 3) * dtype_of(factors).itemsize
    held *= max(map(elements_of, factors))
    launched = tensors_of(factors[0])[0].is_cuda
    chunk = _cost.direct_chunk(held, batch, workspace, launched=launched)
    values, bounds = [], []
    for start in range(0, batch, chunk):
        rows = slice(start, start + chunk)
        total = factors[0].select(rows).dense()
        dtype = total.dtype
        size = rows_squared_norms(total).sqrt()
        for factor in factors[1:]:
            part = factor.select(rows).dense()
            size = size + rows_squared_norms(part).sqrt()
            total = total + part
        value = rows_squared_norms(total)
        values.append(value)
        # If the uses cancel each other, the rest is rounded relative to their sizes.
        bounds.append(relative_bound(dtype) * size * value.sqrt())
    return Contraction(torch.cat(values), torch.cat(bounds))


def rows_squared_norms(gradients: Tensor) -> Tensor:
    """Return the squared norms of gradients (B, *), float64."""
    width = gradients.shape[-1] if gradients.dim() > 1 else 1
    rows = gradients.reshape(gradients.shape[0], -1, max(1, width))
    return squared_norms(rows, rows.dtype)
