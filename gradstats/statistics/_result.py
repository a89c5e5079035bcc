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


# Tensors cannot be compared for a bool: two results are equal where they are one.
@dataclass(frozen=True, eq=False)
class GradientNorms:
    """Per-example gradient norms of one batch, ‖∇ℓ_i(w)‖ over all tracked parameters.

    Squares are accumulated in float32 (float64 for float64 models) and added up in float64: norms
    from about 1e-19 to 1e19 have full precision, where the activations and output gradients that
    they are products of have such norms too. Below, squares lose digits and then vanish, which
    ``error_bound`` reflects for all that are not zero; above, they overflow.

    Attributes:
        norm: (B,) norms, in units of loss; rounded once, and not limited to the range of
            ``sqnorm``'s dtype.
        sqnorm: (B,) squared norms, float32 (float64 for float64 models), in units of loss².
        loss: (B,) the losses; None if you ran the backward of your own scalar.
        by_parameter: name → (B,) squared norms; zeros for parameters that the loss did not use.
        error_bound: (B,) bound on the relative error of ``sqnorm`` (about half of it for
            ``norm``) from rounding and underflow in the contractions, compared with the gradient
            ∇ℓ_i as float32 (float64) sums form it. It does not include the rounding of those sums
            over positions and uses, which is large where terms cancel and which a weight gradient
            has too, nor that of forward and backward. Zero for norms of zero, NaN for NaN and
            infinity.
        names: of the parameters, in the model's order.
        rows: (parameters, B) the values of ``by_parameter`` as one matrix.
        alignment: (B,) ⟨∇ℓ_i, Ḡ⟩, inner products with the gradient of the training loss of this
            context, Ḡ = Σ_j weight_j ∇ℓ_j (the mean gradient without weights). None unless
            requested, as is everything below.
        alignment_by_parameter: name → (B,) the parameter's part of ``alignment``.
        mean_sqnorm: () float64, ‖Ḡ‖².
        cosine: (B,) ⟨∇ℓ_i, Ḡ⟩ / (‖∇ℓ_i‖ ‖Ḡ‖).
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
        weights: what multiplied each loss in the training loss, which defines Ḡ; divided out.
        nonfinite: "raise" or "keep".
        scale: what multiplied the training loss before it was differentiated, a number or a tensor
            () float64; divided out.
        divisor: what Σ_j weights_j ∇ℓ_j is divided by to give Ḡ.
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
        own = weight * scale**2 * divisor
        parts = [within.with_sum.get(name, unused).to(device) / own for name in names]
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
        relative: finds (B,) a bound on its rounding error, relative to it.
        loss: (B,) losses or None.
        nonfinite: "raise" or "keep".
        wide: the model is in float64, and so are the results.
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
    """Return float64 where a model has a float64 parameter, else float32."""
    wide = any(any_double(model.parameters()) for model in models)
    return torch.float64 if wide else torch.float32


def finite_sqnorms(tracker: Tracker, nonfinite: str) -> Tensor:
    """Return the squared norms that a tracker's backward reported, (parameters, B) float64.

    Raise where an example's is not finite, unless ``nonfinite`` is "keep".
    """
    values = tracker.reports.sqnorm_by_parameter()
    if nonfinite == "raise":
        check_total([root.name for root in tracker.roots], values, values.sum(0))
    return values


def examples_named(values: Tensor) -> str:
    """Return which examples have a value (B,) that is not finite, for a message."""
    bad = (~values.isfinite()).nonzero().squeeze(1).tolist()
    return f"example {bad[0]}" if len(bad) == 1 else f"examples {bad}"


def check_total(names: Sequence[str], values: Tensor, total: Tensor) -> None:
    """Raise where a sum over parameters is not finite; given what ``summarise`` is given."""
    # Of what is not finite nor is the sum, and one number is soon looked at.
    if math.isfinite(total.sum().item()) or bool(total.isfinite().all()):
        return
    finite = values.to(total.dtype).isfinite().all(1).tolist()
    spoilt = [name for name, good in zip(names, finite, strict=True) if not good]
    where = "the sum over all parameters"
    if spoilt:
        where = f"{len(spoilt)} of {len(names)} parameters ({quoted(spoilt)})"
    if bool((total[~total.isfinite()] == torch.inf).all()):
        raise NonFiniteGradientError(
            f"the squared norm of {examples_named(total)} is infinite: it overflowed float32, in "
            "which squares are accumulated (norms above 1.8e19 do), or the gradient itself is "
            f"infinite. It came to infinity in {where}. Divide the losses by a constant, use "
            "model.double(), look at these examples and their losses, or pass "
            'nonfinite="keep" to have the values returned.'
        )
    raise NonFiniteGradientError(
        f"the gradient of {examples_named(total)} is not finite, in {where}. Look at these "
        'examples and their losses, or pass nonfinite="keep" to have the values returned.'
    )
