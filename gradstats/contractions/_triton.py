"""The CUDA backend of contractions: registered operators that launch Triton kernels.

Results agree with the PyTorch backend's; nothing of size (B, d) or (B, T, T) is written to memory.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import cache, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from gradstats._factors import Elementwise, Outer, Patches, Ragged, Rows
from gradstats.contractions._result import Contraction, unit_roundoff, well_conditioned
from gradstats.errors import BackendError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Set to "torch" to contract with PyTorch's own operations on CUDA too.
BACKEND_VARIABLE = "GRADSTATS_BACKEND"


def serves(*factors: Outer | Ragged) -> bool:
    """Whether the kernels contract these factors; the PyTorch backend contracts every other."""
    first = factors[0].left
    for factor in factors:
        if not (runs(first, factor.left) and runs(first, factor.right)):
            return False
    return True


def runs(first: Tensor, second: Tensor) -> bool:
    """Whether the kernels take these two operands."""
    if not (first.is_cuda and second.is_cuda):
        return False
    if first.dtype != second.dtype or first.dtype not in DTYPES:
        return False
    if os.environ.get(BACKEND_VARIABLE) == "torch":
        return False
    require_triton()
    return True


def streams(*operands: Tensor | None) -> bool:
    """Whether the kernels that multiply no matrices take these operands, each of its own dtype."""
    return all(runs(operand, operand) for operand in operands if operand is not None)


def convolves(*factors: Patches) -> bool:
    """Whether the kernels contract these convolutions, alone or with each other."""
    first = factors[0]
    return len(first.geometry.stride) <= 3 and all(
        factor.geometry == first.geometry and runs(first.input, side)
        for factor in factors
        for side in (factor.input, factor.grad)
    )


@cache
def require_triton() -> None:
    """Raise unless Triton can be imported."""
    if importlib.util.find_spec("triton") is None:
        raise BackendError(
            "the model is on CUDA, where gradstats contracts with Triton kernels, but triton is "
            "not installed. Install triton>=3.6, or set the environment variable "
            f"{BACKEND_VARIABLE}=torch to contract with PyTorch's own operations, more slowly."
        )


def rank_one(factor: Outer) -> Contraction:
    """Return ‖left‖²‖right‖² in one pass over both operands."""
    from gradstats.kernels import operators

    a, g = _operands(factor)
    value, _ = operators.rank_one_sqnorm(a.squeeze(1), g.squeeze(1))
    return well_conditioned(_over_groups(value, factor), torch.float32)


def gram(factor: Outer) -> Contraction:
    """Return Σ_{t,s} (left_t·left_s)(right_t·right_s) with its error bound."""
    from gradstats.kernels import operators

    value, *sizes = operators.gram_sqnorm(*_operands(factor))
    bound = _over_groups(_gram_bound(*sizes), factor)
    return Contraction(_over_groups(value, factor), bound)


def _gram_bound(magnitude: Tensor, size: Tensor) -> Tensor:
    """Return how far a Gram form may be off, float64.

    Adding the terms rounds by their magnitudes. An inner product of two rows rounds by the product
    of their norms, however small it comes out, and all terms together by (Σ_t ‖left_t‖‖right_t‖)².

    Args:
        magnitude: Σ|terms|.
        size: Σ_t ‖left_t‖‖right_t‖.
    """
    return unit_roundoff(torch.float32) * (4 * magnitude.double() + size.double().square())


def direct(factor: Outer) -> Contraction:
    """Return the squares of gradient tiles that never leave the chip."""
    from gradstats.kernels import operators

    value = operators.direct_sqnorm(*_operands(factor))
    return well_conditioned(_over_groups(value, factor), torch.float32)


def direct_and_sum(factor: Outer) -> tuple[Contraction, Tensor]:
    """Return squared norms and Σ_i G_i (1, p, q) from one kernel; for factors of one group."""
    from gradstats.kernels import operators

    gradient, value = operators.weight_gradient_sqnorm(*_operands(factor))
    return well_conditioned(value.double(), torch.float32), gradient.unsqueeze(0)


def ragged_gram(factor: Ragged, longest: int) -> Contraction:
    """Return the Gram form of packed examples, the longest of which has ``longest`` rows."""
    from gradstats.kernels import operators

    value, *sizes = operators.gram_sqnorm(*_packed(factor), max_seqlen=longest)
    return Contraction(value.double(), _gram_bound(*sizes))


def ragged_direct(factor: Ragged, longest: int) -> Contraction:
    """Return the squares of gradient tiles of packed examples."""
    from gradstats.kernels import operators

    value = operators.direct_sqnorm(*_packed(factor), max_seqlen=longest)
    return well_conditioned(value.double(), torch.float32)


def ragged_and_sum(factor: Ragged, longest: int) -> tuple[Contraction, Tensor]:
    """Return squared norms and Σ_i G_i (p, q) of packed examples from one kernel."""
    from gradstats.kernels import operators

    gradient, value = operators.weight_gradient_sqnorm(*_packed(factor), max_seqlen=longest)
    return well_conditioned(value.double(), torch.float32), gradient.reshape(factor.shape)


def _packed(factor: Ragged) -> tuple[Tensor, Tensor, Tensor]:
    """Return a, g and the bounds of the examples as the kernels take them."""
    return factor.right, factor.left, torch.tensor(factor.offsets)


def _both_packed(first: Ragged, second: Ragged) -> tuple:
    (a1, g1, bounds1), (a2, g2, bounds2) = _packed(first), _packed(second)
    return a1, g1, a2, g2, bounds1, bounds2


def ragged_gram_pairs(first: Ragged, second: Ragged) -> Tensor:
    """Return all pairs' products of packed examples through products of rows, (B, B') float64."""
    from gradstats.kernels import operators

    return operators.pairwise_gram(*_both_packed(first, second)).double()


def ragged_direct_pairs(first: Ragged, second: Ragged, workspace: int) -> Tensor:
    """Return the same from gradients formed chunk by chunk, (B, B') float64."""
    from gradstats.kernels import operators

    operands = _both_packed(first, second)
    return operators.pairwise_direct(*operands, workspace=workspace).double()


def ragged_gram_diagonal(first: Ragged, second: Ragged) -> Tensor:
    """Return the products of equal indices through products of rows, (B,) float64."""
    from gradstats.kernels import operators

    value, _ = operators.diagonal_gram(*_both_packed(first, second))
    return value.double()


def ragged_direct_diagonal(first: Ragged, second: Ragged) -> Tensor:
    """Return the same from gradient tiles that never leave the chip, (B,) float64."""
    from gradstats.kernels import operators

    return operators.direct_inner(*_both_packed(first, second)).double()


def gram_pairs(first: Outer, second: Outer) -> Tensor:
    """Return Σ_{t,s} (left_t·left'_s)(right_t·right'_s) for all pairs, (B, B') float64."""
    from gradstats.kernels import operators

    products = (operators.pairwise_gram(*both) for both in _groups(first, second))
    return reduce(torch.add, (part.double() for part in products))


def direct_pairs(first: Outer, second: Outer, workspace: int) -> Tensor:
    """Return all pairs' products of gradients formed chunk by chunk, (B, B') float64."""
    from gradstats.kernels import operators

    products = (
        operators.pairwise_direct(*both, workspace=workspace) for both in _groups(first, second)
    )
    return reduce(torch.add, (part.double() for part in products))


def gram_diagonal(first: Outer, second: Outer) -> Tensor:
    """Return Σ_{t,s} (left_t·left'_s)(right_t·right'_s) of each example, (B,) float64."""
    from gradstats.kernels import operators

    value, _ = operators.diagonal_gram(*_operands(first), *_operands(second))
    return _over_groups(value, first)


def direct_diagonal(first: Outer, second: Outer) -> Tensor:
    """Return the products of gradient tiles that never leave the chip, (B,) float64."""
    from gradstats.kernels import operators

    value = operators.direct_inner(*_operands(first), *_operands(second))
    return _over_groups(value, first)


def direction(factor: Outer, direction: Tensor) -> Tensor:
    """Return Σ_k Σ_t left_tᵀ V_k right_t of each example, (B,) float64.

    Args:
        factor: what is contracted.
        direction: V (K, p, q).
    """
    from gradstats.kernels import operators

    direction = _narrow(direction, factor.left)
    a, g = factor.right.transpose(0, 1), factor.left.transpose(0, 1)  # (K, B, T, ·)
    products = map(operators.direction_inner, a, g, direction)
    return reduce(torch.add, (part.double() for part in products))


def ragged_direction(factor: Ragged, direction: Tensor) -> Tensor:
    """Return Σ_t left_tᵀ V right_t of packed examples, (B,) float64, for V (p, q)."""
    from gradstats.kernels import operators

    a, g, bounds = _packed(factor)
    return operators.direction_inner(
        a, g, _narrow(direction, a), cu_seqlens=bounds, max_seqlen=max([1, *factor.lengths])
    ).double()


def _groups(first: Outer, second: Outer) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return a, g of both factors for each group: examples of different groups never meet."""
    operands = (first.right, first.left, second.right, second.left)
    groups = [tuple(operand[:, k] for operand in operands) for k in range(first.left.shape[1])]
    if first is second:
        return [(a, g, a, g) for a, g, _, _ in groups]
    return groups  # type: ignore[return-value]


def convolution(factor: Patches) -> Contraction:
    """Return the squares of gradient tiles, patches addressed and never unfolded."""
    from gradstats.kernels import operators

    value = operators.convolution_sqnorm(factor.input, factor.grad, *_layer(factor))
    return well_conditioned(value.double(), torch.float32)


def convolution_gram(factor: Patches) -> Contraction:
    """Return Σ_{t,s} (patch_t·patch_s)(grad_t·grad_s) with its error bound."""
    from gradstats.kernels import operators

    operands = (factor.input, factor.grad)
    value, *sizes = operators.convolution_gram_sqnorm(*operands, *_layer(factor))
    return Contraction(value.double(), _gram_bound(*sizes))


def convolution_and_sum(factor: Patches) -> tuple[Contraction, Tensor]:
    """Return squared norms and Σ_i G_i from one kernel."""
    from gradstats.kernels import operators

    gradient, value = operators.convolution_weight_gradient_sqnorm(
        factor.input, factor.grad, *_layer(factor)
    )
    gradient = gradient.reshape(factor.shape)
    return well_conditioned(value.double(), torch.float32), gradient


def convolution_pairs(first: Patches, second: Patches, workspace: int) -> Tensor:
    """Return all pairs' products of gradients formed chunk by chunk, (B, B') float64."""
    from gradstats.kernels import operators

    operands = (first.input, first.grad, second.input, second.grad)
    return operators.pairwise_convolution(*operands, *_layer(first), workspace=workspace).double()


def convolution_diagonal(first: Patches, second: Patches, workspace: int) -> Tensor:
    """Return the products of gradient tiles that never leave the chip, (B,) float64."""
    from gradstats.kernels import operators

    if first.input.shape != second.input.shape:
        # one kernel forms both sides' tiles, of images of one size
        rows = [slice(row, row + 1) for row in range(first.batch)]
        each = (convolution_pairs(first.select(row), second.select(row), workspace) for row in rows)
        return torch.cat([first.grad.new_empty((0,), dtype=torch.float64), *map(torch.ravel, each)])
    operands = (first.input, first.grad, second.input, second.grad)
    return operators.convolution_inner(*operands, *_layer(first)).double()


def convolution_gram_pairs(first: Patches, second: Patches) -> Tensor:
    """Return Σ_{t,s} (patch_t·patch'_s)(grad_t·grad'_s) for all pairs, (B, B') float64."""
    from gradstats.kernels import operators

    operands = (first.input, first.grad, second.input, second.grad)
    return operators.pairwise_convolution_gram(*operands, *_layer(first)).double()


def convolution_gram_diagonal(first: Patches, second: Patches) -> Tensor:
    """Return the same of each example with its partner, (B,) float64."""
    from gradstats.kernels import operators

    operands = (first.input, first.grad, second.input, second.grad)
    value, _ = operators.convolution_inner_gram(*operands, *_layer(first))
    return value.double()


def convolution_direction(factor: Patches, direction: Tensor) -> Tensor:
    """Return Σ_t grad_tᵀ V patch_t of each example, (B,) float64, for V like the weight."""
    from gradstats.kernels import operators

    direction = _narrow(direction, factor.grad)
    value = operators.convolution_direction(factor.input, factor.grad, direction, *_layer(factor))
    return value.double()


def _narrow(direction: Tensor, operand: Tensor) -> Tensor:
    """Return a direction in a dtype that the kernels multiply with an operand."""
    return direction if direction.dtype == operand.dtype else direction.float()


def _layer(factor: Patches) -> tuple:
    geometry = factor.geometry
    return (
        factor.kernel,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        geometry.groups,
    )


def rows_sqnorm(factor: Rows) -> Contraction:
    """Return Σ_v ‖Σ_{n: ids[n] = v} grad[n]‖², equal ids grouped without a table."""
    from gradstats.kernels import operators

    value = operators.rows_sqnorm(*_rows(factor))
    return well_conditioned(value.double(), torch.float32)


def rows_pairs(first: Rows, second: Rows) -> Tensor:
    """Return Σ_v ⟨Σ_{n: id v} grad[n], Σ_{m: id v} grad'[m]⟩ of all pairs, (B, B') float64."""
    from gradstats.kernels import operators

    return operators.pairwise_rows(*_both_rows(first, second)).double()


def rows_diagonal(first: Rows, second: Rows) -> Tensor:
    """Return the same of each example with its partner, (B,) float64."""
    from gradstats.kernels import operators

    return operators.rows_inner(*_both_rows(first, second)).double()


def rows_direction(factor: Rows, table: Tensor) -> Tensor:
    """Return Σ_n grad[n]·V[ids[n]] of each example, (B,) float64, for V (rows, width)."""
    from gradstats.kernels import operators

    ids, grad, bounds, longest = _rows(factor)
    table = _narrow(table, grad)
    return operators.rows_direction(ids, grad, table, bounds, longest).double()


def inner_with_rows(outer: Outer, rows: Rows) -> Tensor:
    """Return the cross term of an embedding and a projection that share a table, (B,) float64."""
    from gradstats.kernels import operators

    a, g = _operands(outer)
    ids, grad, bounds, longest = _rows(rows)
    if bounds is None:
        return operators.tied_inner(a, g, ids, grad).double()
    batch, positions = a.shape[:2]
    own = torch.arange(batch + 1, device=a.device) * positions
    value = operators.tied_inner(
        a.flatten(0, 1), g.flatten(0, 1), ids, grad, own, bounds, positions, longest
    )
    return value.double()


def _rows(factor: Rows) -> tuple[Tensor, Tensor, Tensor | None, int | None]:
    """Return (ids, grad, bounds, longest): (B, T) where all examples have T rows, else packed."""
    count, longest = factor.ids.numel(), factor.longest
    if longest is not None and factor.examples * longest == count and count > 0:
        shape = (factor.examples, longest)
        return factor.ids.view(shape), factor.grad.view(*shape, -1), None, None
    return factor.ids, factor.grad, *_bounds(factor)


def _bounds(factor: Rows) -> tuple[Tensor, int]:
    """Return where each example's rows begin and end, and how many one has at most."""
    numbers = torch.arange(factor.examples + 1, device=factor.example.device)
    longest = factor.ids.numel() if factor.longest is None else factor.longest
    return torch.searchsorted(factor.example, numbers), longest


def _both_rows(first: Rows, second: Rows) -> tuple:
    """Return the operands of two factors, of which both are packed where one has to be."""
    (ids, grad, bounds, longest), (ids2, grad2, bounds2, longest2) = _rows(first), _rows(second)
    if (bounds is None) != (bounds2 is None):
        ids, grad, ids2, grad2 = first.ids, first.grad, second.ids, second.grad
        (bounds, longest), (bounds2, longest2) = _bounds(first), _bounds(second)
    return ids, grad, ids2, grad2, bounds, bounds2, longest, longest2


def layer_norm_sum(
    x: Tensor, g: Tensor, eps: float, rms: bool, offsets: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """Return Σ_t g·x̂ and Σ_t g (B, D) of rows (B, T, D), or packed (N, D), normalised over D."""
    from gradstats.kernels import operators

    bounds = None if offsets is None else torch.tensor(offsets)
    return operators.layer_norm_sum(x, g, eps, rms, bounds)


def group_norm_sum(x: Tensor, g: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return Σ_t g·x̂ and Σ_t g (B, C) of channels (B, T, C) normalised by groups."""
    from gradstats.kernels import operators

    return operators.group_norm_sum(x, g, groups, eps)


class NormGradients(NamedTuple):
    """The backward of a normalisation layer.

    Attributes:
        input: its gradient, in the shape that the kernels took; None where it was not wanted.
        scale, shift: Σ_i of the examples' gradients, (features,) float32; None where not wanted.
        scale_norms, shift_norms: squared norms of the examples' gradients.
    """

    input: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    scale_norms: Contraction
    shift_norms: Contraction


def layer_norm_backward(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    eps: float,
    rms: bool,
    offsets: Sequence[int] | None,
    wanted: tuple[bool, bool],
) -> NormGradients:
    """Return the backward of rows (B, T, D), or packed (N, D), normalised over D.

    Args:
        x, g: inputs and output gradients.
        weight: the scale (D,); None for 1.
        eps: what the layer adds to the variance.
        rms: the layer is an RMSNorm.
        offsets: where the examples of packed rows begin and end; None for dense rows.
        wanted: whether the input's gradient and the parameters' are wanted.
    """
    from gradstats.kernels import operators

    bounds = None if offsets is None else torch.tensor(offsets)
    if not any(wanted):
        return _norms_alone(*operators.layer_norm_sqnorm(x, g, eps, rms, bounds))
    result = operators.layer_norm_backward(x, g, weight, eps, rms, wanted[1], bounds)
    return _norm_gradients(result, wanted[1])


def group_norm_backward(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    groups: int,
    eps: float,
    wanted: tuple[bool, bool],
) -> NormGradients:
    """Return the backward of channels (B, T, C) normalised by groups; as `layer_norm_backward`."""
    from gradstats.kernels import operators

    if not any(wanted):
        return _norms_alone(*operators.group_norm_sqnorm(x, g, groups, eps))
    result = operators.group_norm_backward(x, g, weight, groups, eps, wanted[1])
    return _norm_gradients(result, wanted[1])


def _norms_alone(scale: Tensor, shift: Tensor) -> NormGradients:
    norms = [well_conditioned(value.double(), torch.float32) for value in (scale, shift)]
    return NormGradients(None, None, None, *norms)


def _norm_gradients(result: tuple[Tensor, ...], sums: bool) -> NormGradients:
    gradient, scale, shift, *squares = result
    norms = [well_conditioned(value.double(), torch.float32) for value in squares]
    return NormGradients(gradient, *((scale, shift) if sums else (None, None)), *norms)


def scale_sum(
    x: Tensor, g: Tensor, mean: Tensor | None = None, rstd: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return Σ_t g·x̂ and Σ_t g (B, C) of channels (B, T, C) with the statistics (C,)."""
    from gradstats.kernels import operators

    return operators.scale_sum(x, g, mean, rstd)


def scale_backward(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    wanted: tuple[bool, bool],
) -> NormGradients:
    """Return the backward of channels (B, T, C) with the statistics (C,); `layer_norm_backward`."""
    from gradstats.kernels import operators

    result = operators.scale_backward(g, x, weight, mean, rstd, True, *wanted)
    gradients = _norm_gradients(result, wanted[1])
    return gradients if wanted[0] else gradients._replace(input=None)


def elementwise(
    factor: Elementwise, weight: Tensor | None, wanted: tuple[bool, bool]
) -> tuple[Contraction, Tensor | None, Tensor | None]:
    """Return squared norms, Σ_i G_i and grad ∘ weight, the last two as far as wanted.

    Args:
        factor: of a parameter that channels do not share, if an input's gradient is wanted.
        weight: (C,).
        wanted: whether the input's gradient and the sum are wanted.
    """
    from gradstats.kernels import operators

    g, x, bounds = factor.grad, factor.input, _offsets(factor)
    if factor.shared:
        assert not wanted[0]
        values = operators.scale_direction(g, x, _ones(factor), bounds).double()
        total = values.sum().float().reshape(factor.shape) if wanted[1] else None
        return well_conditioned(values.square(), torch.float32), total, None
    if x is None and not wanted[1]:
        value = operators.vector_sqnorm(g, bounds)
        return well_conditioned(value.double(), torch.float32), None, None
    options = (x is None, *wanted, bounds)
    gradient, *both = operators.scale_backward(g, x, weight, None, None, *options)
    kind = int(x is None)  # of scale and shift
    total, value = both[kind], both[2 + kind]
    return (
        well_conditioned(value.double(), torch.float32),
        total.reshape(factor.shape) if wanted[1] else None,
        gradient if wanted[0] else None,
    )


def elementwise_sums(factor: Elementwise) -> Tensor:
    """Return the gradients (B, *shape) float32 of each example."""
    from gradstats.kernels import operators

    g, x, bounds = factor.grad, factor.input, _offsets(factor)
    if factor.shared:
        sums = operators.scale_direction(g, x, _ones(factor), bounds)
    elif x is not None:
        sums, _ = operators.scale_sum(x, g, None, None, bounds)
    else:
        sums = operators.vector_sum(g, bounds)
    return sums.reshape(factor.batch, *factor.shape)


def elementwise_direction(factor: Elementwise, direction: Tensor) -> Tensor:
    """Return Σ_t ⟨input_t ∘ grad_t, V⟩ of each example, (B,) float64, for V like the parameter."""
    from gradstats.kernels import operators

    direction = direction.reshape(-1).float()
    if factor.shared:
        direction = direction.expand(factor.grad.shape[-1])
    operands = factor.grad, factor.input, direction
    return operators.scale_direction(*operands, _offsets(factor)).double()


def _offsets(factor: Elementwise) -> Tensor | None:
    return None if factor.offsets is None else torch.tensor(factor.offsets)


def _ones(factor: Elementwise) -> Tensor:
    return factor.grad.new_ones(factor.grad.shape[-1], dtype=torch.float32)


def _operands(factor: Outer) -> tuple[Tensor, Tensor]:
    """Return a and g of (B·K, T, ·) as the kernels name them: G = Σ_t g_t a_tᵀ."""
    return factor.right.flatten(0, 1), factor.left.flatten(0, 1)


def _over_groups(values: Tensor, factor: Outer) -> Tensor:
    return values.double().view(factor.batch, -1).sum(1)
