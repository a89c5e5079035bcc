"""What the calls of gradstats return."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from gradstats._complex import any_double
from gradstats.capture._selection import quoted
from gradstats.capture._tracker import Tracker
from gradstats.capture.parameters._consumers import WithinBatch
from gradstats.errors import NonFiniteGradientError


# Results compare by identity: comparing their tensors would give no bool.
@dataclass(frozen=True, eq=False)
class GradientNorms:
    """Per-example gradient norms of one batch, ‖∇ℓ_i(w)‖ over all tracked parameters.

    Squares are accumulated in float32 (float64 for float64 models) and added up in float64. Norms
    from about 1e-19 to 1e19 therefore have full precision, if the activations and output gradients
    that they are products of lie in that range too. Squares of smaller norms lose digits and then
    vanish (``error_bound`` tells, except for norms that became zero); squares of larger ones
    overflow.

    Attributes:
        norm: (B,) norms, in units of loss. They are rounded once, from float64, so they may exceed
            what ``sqnorm``'s dtype can hold squared.
        sqnorm: (B,) squared norms, float32 (float64 for float64 models), in units of loss².
        loss: (B,) the losses; None if you ran the backward of your own scalar.
        by_parameter: name → (B,) squared norms; zeros for parameters that the loss did not use.
        error_bound: (B,) bound on the relative error of ``sqnorm`` (``norm`` has about half of it)
            against the gradient ∇ℓ_i as float32 (float64) sums form it. It covers rounding and
            underflow in the contractions, but not the rounding of those sums over positions and
            uses, which is large where terms cancel and which a weight gradient has too, nor that of
            forward and backward. Zero for norms of zero, NaN for NaN and infinity.
        names: of the parameters, in the model's order.
        rows: (parameters, B) the values of ``by_parameter`` as one matrix.
        alignment: (B,) inner products ⟨∇ℓ_i, Ḡ⟩ with the gradient of the training loss, Ḡ = Σ_j
            weight_j ∇ℓ_j (the mean gradient without weights). This and all that follows is None
            unless you asked for it.
        alignment_by_parameter: name → (B,) the parameter's part of ``alignment``.
        mean_sqnorm: () float64, ‖Ḡ‖².
        cosine: (B,) ⟨∇ℓ_i, Ḡ⟩ / (‖∇ℓ_i‖ ‖Ḡ‖); NaN where a gradient is zero.
        gram: (B, B) inner products ⟨∇ℓ_i, ∇ℓ_j⟩.
    """

    norm: Tensor
    sqnorm: Tensor
    loss: Tensor | None
    _error_bound: Callable[[], Tensor]
    names: tuple[str, ...]
    _rows: Tensor
    alignment: Tensor | None = None
    alignment_by_parameter: Mapping[str, Tensor] | None = None
    mean_sqnorm: Tensor | None = None
    gram: Tensor | None = None

    @cached_property
    def rows(self) -> Tensor:
        """(parameters, B) squared norms."""
        return self._rows.to(self.sqnorm.dtype)

    @cached_property
    def by_parameter(self) -> dict[str, Tensor]:
        """Name → (B,) squared norms."""
        return dict(zip(self.names, self.rows, strict=True))

    @cached_property
    def cosine(self) -> Tensor | None:
        """(B,) cosines between each example's gradient and Ḡ; None unless alignment was asked for.

        ⟨∇ℓ_i, Ḡ⟩ / (‖∇ℓ_i‖ ‖Ḡ‖), NaN where a gradient is zero.
        """
        if self.alignment is None or self.mean_sqnorm is None:
            return None
        sizes = self.norm.double() * self.mean_sqnorm.sqrt()
        return (self.alignment.double() / sizes).to(self.alignment.dtype)

    @cached_property
    def error_bound(self) -> Tensor:
        """(B,) relative bound on the rounding error of ``sqnorm``."""
        return self._error_bound().to(self.sqnorm.dtype)

    def __repr__(self) -> str:
        norm = self.norm
        return (
            f"GradientNorms(examples={len(norm)}, parameters={len(self.names)}, "
            f"norm={norm.min().item():.4g}…{norm.max().item():.4g})"
        )


def statistics_of(
    tracker: Tracker,
    loss: Tensor | None,
    weights: Tensor | float,
    nonfinite: str,
    scale: Tensor | float = 1.0,
    divisor: int = 1,
) -> GradientNorms:
    """Return the statistics that a tracker's backward reported.

    Args:
        tracker: the context after its backward.
        loss: (B,) losses or None.
        weights: the weight of each loss in the training loss, which defines Ḡ; divided out.
        nonfinite: "raise" or "keep".
        scale: the factor by which the training loss was multiplied before its backward, a number or
            a () float64 tensor; divided out.
        divisor: Ḡ is Σ_j weights_j ∇ℓ_j divided by this.
    """
    values = tracker.reports.sqnorm_by_parameter()
    total = values.sum(0)
    device = values.device
    weight: Tensor | float = weights
    if isinstance(weights, Tensor):
        weight = weights.to(device, torch.float64)
    square = (weight * scale) ** 2
    relative = tracker.reports.error_bound(values, total, square)
    names = [root.name for root in tracker.roots]
    wide = any_double([root.parameter for root in tracker.roots])
    if isinstance(square, Tensor) or square != 1:
        values, total = values / square, total / square
    norms = summarise(names, values, total, relative, loss, nonfinite, wide)
    dtype = norms.sqnorm.dtype
    within = tracker.settings.consumer
    if not isinstance(within, WithinBatch):
        return norms
    if within.pairs is not None:
        gram = within.pairs.to(device) / scale**2
        gram = gram / (weight[:, None] * weight if isinstance(weight, Tensor) else weight**2)
        norms = replace(norms, gram=gram.to(dtype))
    if within.with_sum:
        unused = torch.zeros_like(total)
        factor = weight * scale**2 * divisor
        parts = [within.with_sum.get(name, unused).to(device) / factor for name in names]
        sqnorms = [value.to(device) for value in within.sum_sqnorm.values()]
        norms = replace(
            norms,
            alignment=torch.stack(parts).sum(0).to(dtype),
            alignment_by_parameter={
                name: part.to(dtype) for name, part in zip(names, parts, strict=True)
            },
            mean_sqnorm=torch.stack(sqnorms).sum() / (scale * divisor) ** 2,
        )
    return norms


def summarise(
    names: Sequence[str],
    values: Tensor,
    total: Tensor,
    relative: Callable[[], Tensor],
    loss: Tensor | None,
    nonfinite: str,
    wide: bool,
) -> GradientNorms:
    """Return the statistics of one batch from its parts.

    Args:
        names: of the parameters.
        values: (parameters, B) squared norms, float64.
        total: (B,) their sum.
        relative: returns (B,) bounds on the rounding errors of ``total``, relative to it.
        loss: (B,) losses or None.
        nonfinite: "raise" or "keep".
        wide: whether results are float64, as for a float64 model; else float32.
    """
    rounded = Tensor.double if wide else Tensor.float
    sqnorm = rounded(total)
    if nonfinite == "raise":
        check_total(names, values, sqnorm)
    return GradientNorms(
        rounded(total.sqrt()),
        sqnorm,
        None if loss is None else loss.detach(),
        relative,
        tuple(names),
        values,
    )


def result_dtype(*models: nn.Module) -> torch.dtype:
    """Return float64 if any of the models has a float64 parameter, else float32."""
    wide = any(any_double(model.parameters()) for model in models)
    return torch.float64 if wide else torch.float32


def finite_sqnorms(tracker: Tracker, nonfinite: str) -> Tensor:
    """Return the squared norms that a tracker's backward reported, (parameters, B) float64.

    Raise if one is not finite, unless ``nonfinite`` is "keep".
    """
    values = tracker.reports.sqnorm_by_parameter()
    if nonfinite == "raise":
        check_total([root.name for root in tracker.roots], values, values.sum(0))
    return values


def examples_named(values: Tensor) -> str:
    """Name, for a message, the examples whose value (B,) is not finite."""
    bad = (~values.isfinite()).nonzero().squeeze(1).tolist()
    return f"example {bad[0]}" if len(bad) == 1 else f"examples {bad}"


def check_total(names: Sequence[str], values: Tensor, total: Tensor) -> None:
    """Raise if an example's sum over the parameters is not finite; arguments as ``summarise``."""
    # The sum over the examples is finite only if all are: usually, one number is read back.
    if math.isfinite(total.sum().item()) or bool(total.isfinite().all()):
        return
    finite = values.to(total.dtype).isfinite().all(1).tolist()
    spoilt = [name for name, good in zip(names, finite, strict=True) if not good]
    where = "the sum over all parameters"
    if spoilt:
        where = f"{len(spoilt)} of {len(names)} parameters ({quoted(spoilt)})"
    if bool((total[~total.isfinite()] == torch.inf).all()):
        raise NonFiniteGradientError(
            f"the squared norm of {examples_named(total)} is infinite in {where}: the gradient is "
            "infinite, or its square overflowed float32, as for norms above 1.8e19. Look at the "
            "losses of these examples. If they are finite, divide all losses by a constant or use "
            'model.double(). Or pass nonfinite="keep" to get the values as they are.'
        )
    raise NonFiniteGradientError(
        f"the gradient of {examples_named(total)} is not finite in {where}. Look at these examples "
        'and their losses, or pass nonfinite="keep" to get the values as they are.'
    )
