"""The gradients that backwards leave in ``.grad`` during one optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradstats._complex import as_real
from gradstats._warnings import warn
from gradstats.capture._selection import quoted

# Squared norms that differ by more than this share are of different gradients: rounding changes a
# gradient that is read twice, or on two processes, by less.
AGREEMENT = 1e-3


class Gradients:
    """Reads the gradients of the measured parameters before and after each backward of a step.

    Args:
        parameters: name → parameter.
        read: whether the norms after the backwards are wanted too.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], read: bool):
        self.read = read
        self._names, self._parameters = list(parameters), list(parameters.values())
        # (P,) ‖G_p‖² after the last backward; None without gradients.
        self._left: Tensor | None = None
        self._missing: set[str] = set()
        # For each backward, (P,) whether a gradient had changed since the one before; None if none.
        self._disturbed: list[Tensor | None] = []
        if read:
            self._warn_of_hooks()

    def before_backward(self) -> None:
        """Note which gradients have changed since the last backward, or exist before the first."""
        held, left = squared_norms(self._parameters), self._left
        present = left if held is None else held
        if present is None:
            self._disturbed.append(None)
            return
        held, left = (torch.zeros_like(present) if each is None else each for each in (held, left))
        same = torch.isclose(held, left, rtol=AGREEMENT, atol=0, equal_nan=True)
        self._disturbed.append(~same)

    def after_backward(self) -> None:
        """Read the gradients, before anything clips them."""
        if self.read:
            self._left = squared_norms(self._parameters)
            named = zip(self._names, self._parameters, strict=True)
            self._missing = {name for name, parameter in named if parameter.grad is None}

    def seen(self) -> list[Tensor]:
        """Return what was seen of the parameters, three times (P,).

        The squared norm of each gradient, zero if there is none or it was not wanted; whether there
        was a gradient before the first backward; whether it was changed between two backwards.
        """
        first, *later = self._disturbed
        changed = [each for each in later if each is not None]
        rows = (self._left, first, torch.stack(changed).any(0) if changed else None)
        zeros = torch.zeros(len(self._parameters), device=self._parameters[0].device)
        return [zeros if row is None else row for row in rows]

    def lost(self, used: Iterable[str]) -> list[str]:
        """Return which of the parameters that the losses used had no gradient to read."""
        return [name for name in self._names if name in self._missing.intersection(used)]

    def _warn_of_hooks(self) -> None:
        """Warn of gradients that hooks may change before they are read."""
        named = zip(self._names, self._parameters, strict=True)
        hooked = [
            name
            for name, parameter in named
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        ]
        if hooked:
            warn(
                f"hooks on {quoted(hooked)} may change gradients before gradstats.Monitor reads "
                "them. If they do, grad_norm is that of the changed gradient, and metrics that "
                "compare it with the examples' gradients (noise scale, coherence, diversity, norm "
                "test) have no meaning: remove the hooks while measuring; or measure with "
                "alignment=True, one micro-batch on one process, which reads the gradient before "
                "hooks.",
            )


def squared_norms(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Return the squared norms of the parameters' gradients, (P,) float64; None without gradients.

    Of a sharded gradient, it is that of this process' shard.
    """
    gradients: list[Any] = [parameter.grad for parameter in parameters]
    if all(gradient is None for gradient in gradients):
        return None
    device = parameters[0].device
    rows = []
    for gradient in gradients:
        if gradient is None:
            rows.append(torch.zeros(1, device=device))
            continue
        if hasattr(gradient, "to_local"):
            gradient = gradient.to_local()
        gradient = gradient.detach()
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()  # an embedding's rows may occur repeatedly
        gradient = as_real(gradient)
        if gradient.dim() > 1:
            # First row by row: a single float32 sum over all elements would lose digits.
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            gradient = torch.linalg.vector_norm(gradient.flatten(0, -2), dim=1, dtype=dtype)
        rows.append(gradient)
    norms = torch._foreach_norm(rows, 2, dtype=torch.float64)
    return torch.stack([norm.to(device) for norm in norms]).square_()
