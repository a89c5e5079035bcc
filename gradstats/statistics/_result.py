"""What the calls of gradstats return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradstats.capture._nodes import BOUND, VALUE
from gradstats.capture._tracker import Tracker
from gradstats.errors import NonFiniteGradientError


@dataclass(frozen=True)
class GradientNorms:
    """Per-example gradient norms of one batch, ‖∇ℓ_i(w)‖ over all tracked parameters.

    Attributes:
        sqnorm: (B,) squared norms, float32 (float64 for float64 models), in units of loss².
        loss: (B,) the losses; None where the caller ran the backward of a scalar of their own.
        by_parameter: name → (B,) squared norms; zeros for parameters that the loss did not use.
        error_bound: (B,) relative bound on what rounding in the contractions may have done to
            ``sqnorm``.
    """

    sqnorm: Tensor
    loss: Tensor | None
    by_parameter: Mapping[str, Tensor]
    error_bound: Tensor

    @property
    def norm(self) -> Tensor:
        """(B,) norms."""
        return self.sqnorm.sqrt()

    def __repr__(self) -> str:
        norm = self.norm
        return (
            f"GradientNorms(examples={len(norm)}, parameters={len(self.by_parameter)}, "
            f"norm={norm.min().item():.4g}…{norm.max().item():.4g})"
        )


def gather(
    tracker: Tracker, loss: Tensor | None, weights: Tensor | float, nonfinite: str
) -> GradientNorms:
    """Return the statistics that a tracker's backward reported.

    Args:
        tracker: the context after its backward.
        loss: (B,) losses or None.
        weights: what multiplied each loss in the scalar that was differentiated; divided out.
        nonfinite: "raise" or "keep".
    """
    reports = tracker.reports()
    scale = torch.as_tensor(weights, dtype=torch.float64, device=reports.device).square()
    values = reports[:, VALUE] / scale
    bound = reports[:, BOUND].sum(0) / scale
    by_parameter = {root.name: row for root, row in zip(tracker.roots, values, strict=True)}
    wide = any(root.parameter.dtype == torch.float64 for root in tracker.roots)
    return summarise(by_parameter, bound, loss, nonfinite, wide)


def summarise(
    by_parameter: Mapping[str, Tensor],
    bound: Tensor,
    loss: Tensor | None,
    nonfinite: str,
    wide: bool,
) -> GradientNorms:
    """Return the statistics of one batch from its parts.

    Args:
        by_parameter: name → (B,) squared norms, float64.
        bound: (B,) absolute bound on the rounding error of their sum.
        loss: (B,) losses or None.
        nonfinite: "raise" or "keep".
        wide: the model is in float64, and so are the results.
    """
    total = torch.stack(list(by_parameter.values())).sum(0)
    if nonfinite == "raise" and not bool(total.isfinite().all()):
        bad = (~total.isfinite()).nonzero().squeeze(1).tolist()
        names = [name for name, row in by_parameter.items() if not bool(row.isfinite().all())]
        listed = ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")
        raise NonFiniteGradientError(
            f"the gradient of example{'s' if len(bad) > 1 else ''} {bad} is not finite, in "
            f"{len(names)} of {len(by_parameter)} parameters ({listed}). Look at these examples "
            "and their losses, or "
            'pass nonfinite="keep" to have the values returned.'
        )
    dtype = torch.float64 if wide else torch.float32
    relative = torch.where(bound > 0, bound / total, torch.zeros_like(bound))
    return GradientNorms(
        total.to(dtype),
        None if loss is None else loss.detach(),
        {name: row.to(dtype) for name, row in by_parameter.items()},
        relative.to(dtype),
    )
