"""What contractions return, and how inaccurate results are found and recomputed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats._cost import GUARD_TOLERANCE
from gradstats._factors import Factor
from gradstats.contractions._rounding import SMALLEST, relative_bound, row_norms


@dataclass
class Contraction:
    """Squared norms with bounds on their rounding errors.

    Attributes:
        value: (B,) float64.
        bound: (B,) float64, absolute: how far ``value`` may be from the squared norm of the
            gradient as the accumulation dtype forms it. Direct forms add a few roundings to that;
            the Gram form may lose all digits where its terms cancel, which the bound tells.
    """

    value: Tensor
    bound: Tensor

    @property
    def relative(self) -> float | None:
        """The bound divided by the value, if that is the same for all examples; else None."""
        return None

    def whole_bound(self, shape: Sequence[int]) -> Tensor:
        """Return a bound that includes underflow, (B,).

        Excepted is what is lost once for each element, which ``relative_error`` adds.

        Args:
            shape: of the gradient.
        """
        return self.bound

    def split(self, count: int) -> list[Contraction]:
        """Return the results of ``count`` batches that were contracted together."""
        both = (each.view(count, -1).unbind() for each in (self.value, self.bound))
        return [Contraction(*each) for each in zip(*both, strict=True)]


class WellConditioned(Contraction):
    """A sum of squares, whose rounding error is relative to itself.

    The value is computed when it is first read; ``stack`` computes those of a whole model at once.

    Attributes:
        dtype: the accumulation dtype.
        norms: one or two tensors (B,) of this dtype, whose product squared is the value; empty if
            the value was given.
    """

    def __init__(
        self, dtype: torch.dtype, norms: tuple[Tensor, ...] = (), value: Tensor | None = None
    ):
        self.dtype = dtype
        self.norms = norms
        self._value = value

    def first(self) -> WellConditioned:
        """Return the square of the first norm alone."""
        return WellConditioned(self.dtype, self.norms[:1])

    def split(self, count: int) -> list[Contraction]:
        if self._value is not None:
            values = self._value.view(count, -1).unbind()
            return [WellConditioned(self.dtype, value=value) for value in values]
        sides = zip(*(norm.view(count, -1).unbind() for norm in self.norms), strict=True)
        return [WellConditioned(self.dtype, norms) for norms in sides]

    @property
    def value(self) -> Tensor:  # type: ignore[override]
        if self._value is None:
            product = self.norms[0].double()
            for norm in self.norms[1:]:
                product = product * norm
            self._value = product.square()
        return self._value

    @property
    def relative(self) -> float | None:
        return relative_bound(self.dtype) if len(self.norms) < 2 else None

    @property
    def bound(self) -> Tensor:  # type: ignore[override]
        return relative_bound(self.dtype) * self.value

    def whole_bound(self, shape: Sequence[int]) -> Tensor:
        if len(self.norms) < 2:
            return self.bound
        # What underflow takes from one squared norm is multiplied by the other.
        factors = self.norms[0].double().square() + self.norms[1].double().square()
        return self.bound + widest_of(shape) * SMALLEST[self.dtype] * factors


class Reported(Contraction):
    """One parameter's results in a report on several parameters.

    Attributes:
        report: (parameters, 2, B) float64, the values and, up to a factor, the bounds.
        row: the parameter's row in the report.
        factor: multiplies the reported bound.
    """

    def __init__(self, report: Tensor, row: int, factor: float):
        self.report = report
        self.row = row
        self.factor = factor

    @property
    def value(self) -> Tensor:  # type: ignore[override]
        return self.report[self.row, 0]

    @property
    def bound(self) -> Tensor:  # type: ignore[override]
        return self.factor * self.report[self.row, 1]


def stack(results: Sequence[Contraction | None], batch: int, device: torch.device) -> Tensor:
    """Return the values of several results, (len(results), B) float64.

    Args:
        results: None stands for zeros.
        batch: number of examples B.
        device: of the values to return.
    """
    whole = _report_of(results, device)
    if whole is not None:
        return whole[:, 0]
    parts = [each.norms if isinstance(each, WellConditioned) else () for each in results]
    firsts = [each[0] for each in parts if each]
    if firsts:
        # One operation for the first and the second norms of all results.
        sides = firsts
        if max(map(len, parts)) == 2:
            one = ones((batch,), firsts[0].dtype, device)
            sides = firsts + [each[1] if len(each) == 2 else one for each in parts if each]
        if any([side.device != device for side in firsts]):
            sides = [side.to(device) for side in sides]
        value = torch.stack(sides).double()
        if len(sides) > len(firsts):
            first, second = value.chunk(2)
            value = first * second
        value.mul_(value)
        if len(firsts) == len(results):
            return value
        # Not by an index tensor, which would first be copied to the device.
        squares = iter(value.unbind())
    rows = []
    for part, result in zip(parts, results, strict=True):
        if part:
            rows.append(next(squares))
        elif result is None:
            rows.append(torch.zeros(batch, dtype=torch.float64, device=device))
        else:
            value = result.value
            rows.append(value if value.device == device else value.to(device))
    return torch.stack(rows)


def _report_of(results: Sequence[Contraction | None], device: torch.device) -> Tensor | None:
    """Return the report whose rows are exactly these results, in this order; None if none is."""
    first = next((each for each in results if each is not None), None)
    if not isinstance(first, Reported) or first.report.device != device:
        return None
    report = first.report
    if len(report) != len(results):
        return None
    for row, each in enumerate(results):
        # The rows of parameters that a graph does not report are zero.
        if each is not None and not (
            isinstance(each, Reported) and each.report is report and each.row == row
        ):
            return None
    return report


def ones(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ones, which must not be written to; cached on CPUs to save the call."""
    if device.type == "cpu" and not is_compiling():
        return _kept_ones(shape, dtype)
    # A tensor made while a CUDA graph is recorded has values, and memory, only in replays.
    return torch.ones(shape, dtype=dtype, device=device)


@lru_cache(maxsize=16)
def _kept_ones(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.ones(shape, dtype=dtype, device="cpu")


def relative_error(
    results: Sequence[Contraction | None],
    values: Tensor,
    total: Tensor,
    *,
    shapes: Sequence[Sequence[int]],
    order: Tensor | None,
    unit: Tensor | float,
) -> Tensor:
    """Return a bound on the rounding errors of a sum of results, relative to it: (B,).

    Zero where the sum is zero, NaN where it is not finite. Squares below the normal numbers keep
    few digits or none. That loss is counted once for each element of a gradient or, where two norms
    are multiplied, once for each row or column of the matrix, times the other squared norm.

    Args:
        results: None stands for zeros.
        values: what ``stack`` returned for the results, with the examples in ``order``.
        total: (B,) the sum of ``values``.
        shapes: of the gradients that the results are squared norms of.
        order: (B,) the example of each column of ``values``; None if they are in order.
        unit: what the sum is divided by before it is rounded to the accumulation dtype.
    """
    rows: dict[torch.dtype, list[int]] = {}
    absolute: list[Tensor] = []
    products: list[Tensor] = []
    # One square for the rounding of the sum itself.
    widest, squares = 0, 1.0 * unit
    for row, (result, shape) in enumerate(zip(results, shapes, strict=True)):
        count = math.prod(shape)
        if isinstance(result, WellConditioned):
            rows.setdefault(result.dtype, []).append(row)
            if len(result.norms) == 2:
                products += result.norms
                widest = max(widest, widest_of(shape))
                continue
        elif result is not None:
            absolute.append(result.bound.to(values.device))
        squares = squares + count
    smallest = SMALLEST[torch.float64 if set(rows) == {torch.float64} else torch.float32]
    lost = squares * smallest
    if products:
        sides = torch.stack([norm.to(values.device) for norm in products])
        factors = torch.linalg.vector_norm(sides, dim=0, dtype=torch.float64).square_()
        lost = (factors if order is None else factors[order]).mul_(widest * smallest).add_(lost)
    if not absolute and len(rows) == 1:
        (dtype,) = rows
        return torch.where(total != 0, (lost + relative_bound(dtype) * total) / total, 0.0)
    bound = torch.zeros_like(total)
    each_row = values.unbind()
    for dtype, chosen in rows.items():
        bound += relative_bound(dtype) * torch.stack([each_row[row] for row in chosen]).sum(0)
    if absolute:
        more = torch.stack(absolute).sum(0)
        bound += more if order is None else more[order]
    return torch.where(total != 0, (bound + lost) / total, 0.0)


def widest_of(shape: Sequence[int]) -> int:
    """Return the larger of a matrix's number of rows and of columns."""
    first = shape[0] if shape else 1
    return max(first, math.prod(shape) // max(1, first))


@dataclass(eq=False)
class Fused:
    """A factor whose squared norms were computed where it was made, with its sum over examples.

    Attributes:
        factor: the factor; None if it is not needed any more.
        norms: its squared norms.
        total: Σ_i F[i] in the parameter's shape; None if not wanted.
    """

    factor: Factor | None
    norms: Contraction
    total: Tensor | None


def concatenated(parts: Sequence[Contraction]) -> Contraction:
    """Concatenate the results of consecutive examples."""
    if len(parts) == 1:
        return parts[0]
    return Contraction(torch.cat([p.value for p in parts]), torch.cat([p.bound for p in parts]))


def sum_of_parts(
    parts: Sequence[Contraction], crosses: Sequence[Tensor], dtype: torch.dtype
) -> Contraction:
    """Return ‖Σ_u F_u[i]‖² from all ‖F_u[i]‖² and, for u < v, ⟨F_u[i], F_v[i]⟩, (B,) float64.

    ``dtype`` is the one in which these were summed.
    """
    squares = reduce(torch.add, [part.value for part in parts])
    value, size = squares, squares
    for cross in crosses:
        value = value + 2 * cross
        size = size + 2 * cross.abs()
    # Where the parts cancel, errors relative to the size of each remain.
    bound = reduce(torch.add, [part.bound for part in parts])
    return Contraction(value, bound + relative_bound(dtype) * size)


def squared_norms(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ‖tensor[i]‖² in float64, for any number of axes after the first.

    The last axis is reduced in the accumulation dtype and everything before it in float64: a single
    float32 reduction over a million elements would be off by 1e-5.
    """
    squares = row_norms(tensor, dtype).double().square()
    return squares.flatten(1).sum(1) if squares.dim() > 1 else squares


def recompute_suspects(result: Contraction, again: Callable[[Tensor], Contraction]) -> Contraction:
    """Recompute the results whose error bound is too large, calling ``again`` with their examples.

    These are in ascending order. While a graph is traced there are no numbers to decide by, and the
    results stay as they are, with their bounds.
    """
    if is_compiling():
        return result
    suspect = result.bound > GUARD_TOLERANCE * result.value
    if bool(suspect.any()):
        rows = suspect.nonzero().squeeze(1)
        better = again(rows)
        result.value[rows] = better.value
        result.bound[rows] = better.bound
    return result
