"""Operations written as compositions of others that have rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._factors import Distances
from gradstats.capture.following._examples import Examples
from gradstats.capture.operations._einsum import parse_equation
from gradstats.capture.operations._operations import solves_vector, variants
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import first_node, node_of, value_of
from gradstats.capture.rules import _products
from gradstats.capture.rules._common import lined_up, locate
from gradstats.capture.rules._per_example import per_example
from gradstats.capture.uses._grafted import Composed, Grafted
from gradstats.capture.uses._tap import Factors, tap
from gradstats.contractions._precision import without_autocast

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """⟨x₁, x₂⟩ / (max(‖x₁‖, ε) max(‖x₂‖, ε)) along ``dim`` of both, broadcast."""
    dims = max(x1.dim(), x2.dim())
    dim = dim % dims - dims
    dtype = torch.result_type(x1, x2)
    x1, x2 = (x if x.dtype == dtype else x.to(dtype) for x in (x1, x2))  # perhaps integers
    sizes = [x.shape[dim] if x.dim() >= -dim else 1 for x in (x1, x2)]
    if sizes[0] != sizes[1]:
        # PyTorch takes the norms after broadcasting.
        x1, x2 = torch.broadcast_tensors(x1, x2)
    first, second = (x / _norm_of_at_least(x, dim, eps) for x in (x1, x2))
    return (first * second).sum(dim)


def _norm_of_at_least(x: Tensor, dim: int, eps: float) -> Tensor:
    """max(‖x‖, ε), but with the gradient of ‖x‖ everywhere, as in PyTorch."""
    norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
    return norm + (norm.clamp_min(eps) - norm).detach()


def pairwise_distance(
    x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    """‖x₁ - x₂ + ε‖_p over the last axis."""
    return torch.linalg.vector_norm(x1 - x2 + eps, ord=p, dim=-1, keepdim=keepdim)


def rows_apart(x1: Tensor, x2: Tensor, fold: int, **kwargs) -> Tensor:
    """Distances of rows that hold the examples, with a batch of its own for each example.

    Args:
        x1: rows whose examples lie along the last axis but one.
        x2: the points.
        fold: how many rows each example has.
    """
    rows = x1.unflatten(-2, (-1, fold))
    points = x2 if x2.dim() == 2 else x2.unsqueeze(-3)
    return torch.cdist(rows, points, **kwargs).flatten(-3, -2)


def cdist(
    tracker: Context, func, x1, x2, p=2.0, compute_mode="use_mm_for_euclid_dist_if_necessary"
):
    """Distances between rows of data and of a tracked tensor, such as prototypes or a codebook."""
    kwargs = {"p": p, "compute_mode": compute_mode}
    node = node_of(x2)
    if node is None:
        return Composed(_cdist_exchanged)(tracker, func, x1, x2, **kwargs)
    examples = locate(tracker, func, node, x1, folds=True, trailing=1)
    if examples.axis < x1.dim() - 2:
        layout = lined_up(tracker, func, node, (x1, x2))
        return per_example(tracker, func, layout, (x1, x2), kwargs)
    if p == 2 and examples.segments is None and x1.dim() == x2.dim() == 2:
        return _euclidean(tracker, func, x1, x2, examples, kwargs)
    fold = examples.fold if examples.segments is None else 1
    return Composed(partial(rows_apart, fold=fold))(tracker, func, x1, x2, **kwargs)


def _cdist_exchanged(x1: Tensor, x2: Tensor, **kwargs) -> Tensor:
    return torch.cdist(x2, x1, **kwargs).mT.contiguous()


def _euclidean(tracker: Context, func, x, points, examples: Examples, kwargs) -> Tensor:
    """Distances of two matrices, each row of data from all rows of the tracked one."""
    distances = func(x, value_of(points), **kwargs)
    saved = x, distances.detach(), value_of(points).detach()
    # PyTorch's backward needs its result unchanged, and a tap marks its operand as changed.
    result = torch.ops.aten._unsafe_view(distances, distances.shape)
    result = tap([first_node(points)], result, DistanceFactors(examples), *saved)
    tracker.note_followed(result, examples)
    return result


@dataclass(frozen=True)
class DistanceFactors(Factors):
    """The factor of the points in distances between data and points.

    Attributes:
        examples: where the examples lie in the rows of data.
    """

    examples: Examples

    def __call__(self, grad: Tensor, x: Tensor, distances: Tensor, points: Tensor) -> list:
        fold = self.examples.fold
        grad, distances, rows = (
            side.unflatten(0, (-1, fold)) for side in (grad, distances, x.detach())
        )
        return [Distances(grad, distances, rows, points)]


# What an equation of torch.einsum contains besides indices, deleted.
NO_INDICES = str.maketrans("", "", " .")


def einsum(tracker: Context, func, equation, *operands):
    """A contraction of any number of operands, two at a time.

    PyTorch shows the call only after it has turned lists of indices into an equation. The operator
    takes all operands in one list.
    """
    if isinstance(operands[0], list):
        (operands,) = operands
    terms = equation.partition("->")[0].translate(NO_INDICES).split(",")
    if any(len(set(indices)) < len(indices) for indices in terms):
        remedy = "Take the diagonal first: x.diagonal(dim1=1, dim2=2)."
        refuse(func, first_node(*operands), "with an index that repeats has no rule", remedy)
    if len(operands) > 2:
        return Composed(by_pairs)(tracker, func, equation, *operands)
    return _products.einsum(tracker, func, equation, *operands)


def by_pairs(equation: str, *operands: Tensor) -> Tensor:
    """Contract two operands at a time, in PyTorch's order."""
    inputs, out = parse_equation(equation, operands)
    waiting = list(zip(inputs, operands, strict=True))
    for places in _order(",".join(map("".join, inputs)) + "->" + "".join(out), operands):
        (one, first), (other, second) = (waiting[place] for place in places)
        waiting = [each for place, each in enumerate(waiting) if place not in places]
        wanted = {*out, *(index for spec, _ in waiting for index in spec)}
        both = dict.fromkeys((*one, *other))
        kept = [index for index in both if index in wanted] if waiting else out
        terms = map("".join, (one, other, kept))
        waiting.append((kept, torch.einsum("{},{}->{}".format(*terms), first, second)))
    return waiting[0][1]


def _order(equation: str, operands: Sequence[Tensor]) -> Sequence[tuple[int, ...]]:
    """Return the places of the operands of each step, which puts its result behind the others."""
    optimizer = torch.backends.opt_einsum
    if optimizer.enabled and optimizer.is_available():
        shapes = [tuple(operand.shape) for operand in operands]
        path = optimizer.get_opt_einsum().contract_path
        found = path(equation, *shapes, shapes=True, optimize=optimizer.strategy)[0]
        return [tuple(sorted(places)) for places in found]
    return [(0, 1), *((left, 0) for left in range(len(operands) - 2, 0, -1))]


def multi_dot(tensors: Sequence[Tensor]) -> Tensor:
    """The product of matrices, of which the first and the last may be vectors."""
    return reduce(torch.matmul, tensors)


def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """The elements at indices along an axis, both broadcast along all others."""
    if dim is None:
        return input.flatten()[indices.flatten()]
    where: list[Tensor] = []
    along = range(input.dim())[dim]
    for axis, (size, places) in enumerate(zip(input.shape, indices.shape, strict=True)):
        if axis == along:
            where.append(indices)
        else:  # each place itself; the only one if the input is broadcast
            at = torch.arange(size) if size > 1 else torch.zeros(places, dtype=torch.long)
            where.append(at.to(indices.device).view(-1, *[1] * (input.dim() - 1 - axis)))
    return input[tuple(where)]


def vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor:
    """Σ conj(x) y along an axis of both, broadcast."""
    return (x.conj() * y).sum(dim)


def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """The solutions of A X = B, or X A = B, as products with the inverse."""
    inverse = torch.linalg.inv(A)
    if solves_vector(torch.linalg.solve, (A, B)):
        return _times(inverse, B.unsqueeze(-1)).squeeze(-1)
    return _by_columns(_times(inverse, B)) if left else _times(B, inverse)


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of matrices without autocast, which does not apply to solvers."""
    dtype = torch.promote_types(left.dtype, right.dtype)
    with without_autocast():
        return left.to(dtype) @ right.to(dtype)


def _by_columns(matrices: Tensor) -> Tensor:
    """Return matrices stored by columns, as PyTorch's solvers return them.

    A later ``view`` may depend on it.
    """
    return matrices.mT.contiguous().mT


def solve_triangular(input: Tensor, B: Tensor, *, left: bool = True, **triangle: bool) -> Tensor:
    """The solutions for a triangular matrix A, PyTorch's ``input``."""
    one = torch.eye(input.shape[-1], dtype=input.dtype, device=input.device)
    inverse = torch.linalg.solve_triangular(input, one.expand_as(input), **triangle)
    return _by_columns(_times(inverse, B) if left else _times(B, inverse))


def cholesky_solve(input: Tensor, input2: Tensor, upper: bool = False) -> Tensor:
    """The solutions for A = L Lᵀ, where ``input2`` is L and ``input`` the right-hand side."""
    return _by_columns(_times(torch.cholesky_inverse(input2, upper=upper), input))


def masked_select(input: Tensor, mask: Tensor) -> Tensor:
    """The elements of the input where the mask is true, both broadcast."""
    input, mask = torch.broadcast_tensors(input, mask)
    return input[mask]


def masked_fill(input: Tensor, mask: Tensor, value: Tensor | float) -> Tensor:
    """The value where the mask is true, and the input elsewhere."""
    return torch.where(mask, value, input)


RULES = {
    torch.cdist: cdist,
    functional.cosine_similarity: Composed(cosine_similarity),
    functional.pairwise_distance: Composed(pairwise_distance),
    torch.linalg.multi_dot: Grafted(multi_dot),
    **dict.fromkeys(variants("take_along_dim"), Composed(take_along_dim)),
    torch.linalg.vecdot: Composed(vecdot, rounds=True),
    torch.linalg.solve: Composed(solve, rounds=True),
    torch.linalg.solve_triangular: Composed(solve_triangular, rounds=True),
    **dict.fromkeys(variants("cholesky_solve"), Composed(cholesky_solve, rounds=True)),
    **dict.fromkeys(variants("masked_select"), Composed(masked_select)),
    **dict.fromkeys(variants("masked_fill"), Composed(masked_fill)),
    torch.einsum: einsum,
}
