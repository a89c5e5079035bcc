"""The reference that gs.verify compares with: plain autograd, one example's loss at a time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from gradstats._comparison import same_bits
from gradstats._complex import as_real
from gradstats.capture._selection import select_parameters
from gradstats.capture.operations._formats import SettledFormats
from gradstats.statistics._arguments import LossFunction
from gradstats.statistics._batches import model_to_float64, to_float64
from gradstats.statistics._differentiable import differentiable
from gradstats.statistics._fallback import sqnorm_of
from gradstats.statistics._state import State
from gradstats.statistics._verify_report import summary

# Relative errors that rounding explains, by the precision of the reference.
TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.float16: 5e-2,
    torch.bfloat16: 1e-1,
}


@dataclass
class Subject:
    """What is compared with plain autograd.

    Attributes:
        model, batch: a float64 copy, or the user's own.
        loss_fn: the user's.
        dtype: the lowest precision among the parameters.
        description: of the two, for the report.
        beside: other modules that the loss uses.
    """

    model: nn.Module
    batch: Any
    loss_fn: LossFunction
    dtype: torch.dtype
    description: str
    beside: list[nn.Module]

    def __post_init__(self):
        self.state = State(self.model, self.beside)

    def losses(self, batch: Any, *, same_numbers: bool = True) -> Any:
        """Return what the loss function gives for a batch, with the first state again.

        Args:
            batch: for the loss function.
            same_numbers: whether it draws the same random numbers again, too.
        """
        self.state.restore(generators=same_numbers)
        with SettledFormats():
            return self.loss_fn(self.model, batch)

    def parameters(self, names: list[str]) -> list[nn.Parameter]:
        """Return the named parameters."""
        every = select_parameters(self.model, None, ())
        return [every[name] for name in names]


def choose_subject(
    model: nn.Module, batch: Any, loss_fn: LossFunction, state: State, beside: list[nn.Module]
) -> Subject:
    """Return a float64 copy of model and batch where that works, else the model itself.

    Args:
        model, batch, loss_fn: the user's.
        state: of the model; what a forward changes of it is put back.
        beside: other modules that the loss uses.
    """
    # Compiled code is checked by the runs on the model itself.
    inner = getattr(model, "_orig_mod", model)
    reason = too_large(inner)
    if reason is None:
        try:
            subject = Subject(
                model_to_float64(inner), to_float64(batch), loss_fn, torch.float64,
                "float64 on a copy of the model", beside,
            )  # fmt: skip
            own, copied = (select_parameters(each, None, ()) for each in (inner, subject.model))
            alike = copied.keys() == own.keys() and all(
                same_bits(copied[name].detach(), each.detach().to(copied[name].dtype))
                for name, each in own.items()
            )
            with differentiable(subject.model):
                losses = loss_fn(subject.model, subject.batch)
                reached = torch.autograd.grad(
                    losses.sum(), list(copied.values()), allow_unused=True
                )
            if not alike:
                reason = "a copy of the model has other parameters"  # as Keras makes them
            elif any(gradient is not None for gradient in reached):
                subject.state.restore()
                return subject
            else:
                reason = "loss_fn does not use the model that it is given"
        except Exception as error:
            reason = f"a float64 copy failed with {summary(error)}"
        finally:
            state.restore()
    dtype = lowest_precision(model)
    name = str(dtype).removeprefix("torch.")
    description = f"{name} on the model itself, because {reason}"
    return Subject(model, batch, loss_fn, dtype, description, beside)


def lowest_precision(model: nn.Module) -> torch.dtype:
    """Return the coarsest floating-point dtype among a model's parameters."""
    dtypes = {parameter.dtype.to_real() for parameter in model.parameters()}
    return max(dtypes & TOLERANCE.keys(), key=TOLERANCE.__getitem__, default=torch.float32)


COUPLED = (
    "the examples depend on each other (batch normalisation in training mode? a loss over pairs? "
    "values normalised over the batch? a batch tensor with as many entries as examples by "
    "accident?), so per-example gradients do not exist, or take the others' values as given, or "
    "the losses stand in another order than the batch. Call model.eval(), or use losses of one "
    "example each, in the batch's order"
)


class Example:
    """One example's loss and gradient by plain autograd, zeros where it uses no parameter.

    Attributes:
        number: of the example.
        loss: 0-dim.
        reached: whether each parameter has a gradient.
        sqnorms: squared norm of each parameter's gradient.
    """

    def __init__(self, number: int, loss: Tensor, parameters: list[nn.Parameter]):
        self.number, self.loss = number, loss.detach()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        self.reached = [gradient is not None for gradient in gradients]
        self._gradients: list[Tensor] = [
            as_real(torch.zeros_like(parameter) if gradient is None else gradient).detach()
            for gradient, parameter in zip(gradients, parameters, strict=True)
        ]
        self.sqnorms = [sqnorm_of(gradient).item() for gradient in self._gradients]

    def release(self) -> None:
        """Let go of the gradient and keep its norms."""
        self._gradients = []

    def difference(
        self, other: Example, tolerance: float, where: str, reason: str = COUPLED
    ) -> str | None:
        """Return how the example differs elsewhere, and a reason; None if it does not differ."""
        here, there = self.loss.item(), other.loss.item()
        size, size_there = sum(self.sqnorms) ** 0.5, sum(other.sqnorms) ** 0.5
        pairs = list(zip(self._gradients, other._gradients, strict=True))
        gap = sum(sqnorm_of(a.double() - b.double()).item() for a, b in pairs) ** 0.5
        product = sum((a.double() * b.double()).sum().item() for a, b in pairs)
        largest = max(size, size_there)
        same_loss = abs(here - there) <= tolerance * (abs(here) + abs(there) + tolerance)
        same_gradient = gap <= tolerance * largest or not (isfinite(size) or isfinite(size_there))
        if (same_loss or not (isfinite(here) or isfinite(there))) and same_gradient:
            return None
        found = (
            f"example {self.number} has loss {here:.6g} and gradient norm {size:.6g} in its batch, "
            f"but {there:.6g} and {size_there:.6g} {where}"
        )
        if isfinite(size_there) and not isfinite(size):
            return (
                f"{found}: another example's values that are not finite reach it. Look at the "
                'gradients with nonfinite="keep", and leave that example out'
            )
        if same_gradient and isfinite(gap):
            return (
                f"{found}: the same gradient, so that the norms are right. Is something of the "
                "whole batch added to the loss?"
            )
        # Of vectors at a small angle the cosine is 1 − angle² / 2.
        if product >= (1 - tolerance**2 / 2) * size * size_there > 0:
            return (
                f"{found}: the same direction, {size / size_there:.6g} times as long. Is the loss "
                "divided by something of the whole batch? The norms are those of the losses as "
                "they stand; divide by what belongs to each example alone to compare examples"
            )
        if isfinite(gap):
            apart = gap / largest if largest else 0.0
            found += f", gradients that differ by {apart:.1e} of the larger"
        return f"{found}: {reason}"


def too_large(model: nn.Module) -> str | None:
    """Return why a float64 copy and two gradients do not fit in memory, None if they do."""
    tensors = [*model.parameters(), *model.buffers()]
    needed = 3 * 8 * sum(tensor.numel() for tensor in tensors)
    device = tensors[0].device
    if device.type == "cpu":
        try:
            available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError, AttributeError):
            return None
    elif device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    else:
        return None
    if needed > 0.8 * available:
        return f"a float64 copy needs {needed / 2**30:.3g} GiB of {available / 2**30:.3g} free"
    return None
