"""What backwards leave in ``.grad`` during one optimizer step, and what else changes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradstats._complex import as_real
from gradstats._warnings import warn
from gradstats.capture._selection import quoted

# Relative to a squared norm, more than rounding makes of one gradient that is read twice, or on two
# processes.
AGREEMENT = 1e-3


class Gradients:
    """Looks at the gradients of the measured parameters around each backward of a step.

    Args:
        parameters: name → parameter.
        read: whether their norms are wanted; else only what was there before is looked at.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], read: bool):
        self.read = read
        self._names, self._parameters = list(parameters), list(parameters.values())
        # ‖G_p‖² where the last backward left it; None where there are no gradients.
        self._left: Tensor | None = None
        self._missing: set[str] = set()
        # For each backward, which gradients were not what the one before had left; None for none.
        self._disturbed: list[Tensor | None] = []
        if read:
            self._warn_of_hooks()

    def before_backward(self) -> None:
        """Note which gradients are not as the backward before, if any, left them."""
        held, left = squared_norms(self._parameters), self._left
        present = left if held is None else held
        if present is None:
            self._disturbed.append(None)
            return
        held, left = (torch.zeros_like(present) if each is None else each for each in (held, left))
        same = torch.isclose(held, left, rtol=AGREEMENT, atol=0, equal_nan=True)
        self._disturbed.append(~same)

    def after_backward(self) -> None:
        """Read the gradients before anything clips them."""
        if self.read:
            self._left = squared_norms(self._parameters)
            named = zip(self._names, self._parameters, strict=True)
            self._missing = {name for name, parameter in named if parameter.grad is None}

    def seen(self) -> list[Tensor]:
        """Return what was seen of each parameter, (P,) each.

        The squared norm of its gradient, zero where there is none or it was not wanted; whether it
        held one before the first backward; whether it was changed between two.
        """
        first, *others = self._disturbed
        changed = [each for each in others if each is not None]
        rows = (self._left, first, torch.stack(changed).any(0) if changed else None)
        nothing = torch.zeros(len(self._parameters), device=self._parameters[0].device)
        return [nothing if row is None else row for row in rows]

    def lost(self, used: Iterable[str]) -> list[str]:
        """Return which of the parameters that losses used had no gradient to be read."""
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
                "them: then grad_norm is that of the changed gradient, and what compares it with "
                "the examples' own (noise scale, coherence, diversity, norm test) has no meaning. "
                "Hooks that only look do no harm. Otherwise remove them while measuring; or "
                "measure with alignment=True, one micro-batch on one process, where the gradient "
                "is taken before hooks.",
            )


def squared_norms(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Return the squared norms of the gradients that this process holds, (P,) float64.

    Of a sharded gradient that is its shard, of any other the whole. None where there are none.

    Args:
        parameters: whose ``grad`` is read.
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
            # As embeddings with sparse=True leave it: a row may stand there several times.
            gradient = gradient.coalesce().values()
        gradient = as_real(gradient)
        if gradient.dim() > 1:
            # Row by row: one float32 sum over all elements would lose digits.
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            gradient = torch.linalg.vector_norm(gradient.flatten(0, -2), dim=1, dtype=dtype)
        rows.append(gradient)
    norms = torch._foreach_norm(rows, 2, dtype=torch.float64)
    return torch.stack([norm.to(device) for norm in norms]).square_()
