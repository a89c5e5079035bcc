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
from gradstats.capture.operations._nested import tensors_in
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
    """The model and batch on which plain autograd is run.

    Attributes:
        model, batch: float64 copies, or the user's own.
        loss_fn: the user's.
        dtype: the lowest precision among the parameters.
        description: of model and batch, for the report.
        beside: other modules that the loss uses.
    """

    model: nn.Module
    batch: Any
    loss_fn: LossFunction
    dtype: torch.dtype
    description: str
    beside: list[nn.Module]

    def __post_init__(self):
        self.state = State(self.model, self.beside, tensors_in(self.batch))

    def losses(self, batch: Any, *, same_numbers: bool = True) -> Any:
        """Return what the loss function returns for a batch, starting from the initial state.

        Args:
            batch: for the loss function.
            same_numbers: whether the random generators start from that state too.
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
    """Return a float64 copy of model and batch if one can be made and run, else the model itself.

    Args:
        model, batch, loss_fn: the user's.
        state: of model and batch, restored after the forward that tries out the copy.
        beside: other modules that the loss uses.
    """
    # The copy is not compiled: the runs on the model itself check compiled code.
    inner = getattr(model, "_orig_mod", model)
    reason = too_large(inner)
    if reason is None:
        try:
            subject = Subject(
                model_to_float64(inner), to_float64(batch), loss_fn, torch.float64,
                "float64 on a copy of the model", beside,
            )  # fmt: skip
            given, copied = (select_parameters(each, None, ()) for each in (inner, subject.model))
            alike = copied.keys() == given.keys() and all(
                same_bits(copied[name].detach(), each.detach().to(copied[name].dtype))
                for name, each in given.items()
            )
            with differentiable(subject.model):
                losses = loss_fn(subject.model, subject.batch)
                reached = torch.autograd.grad(
                    losses.sum(), list(copied.values()), allow_unused=True
                )
            if not alike:
                reason = "a copy of the model has other parameters"  # Keras models, for example
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
    "the examples depend on each other, so per-example gradients do not exist, or take the other "
    "examples as given. If batch normalisation is in training mode, call model.eval(). Is the loss "
    "taken over pairs, or are values normalised over the batch? Are the losses in another order "
    "than the batch? Does a tensor in the batch have as many entries as examples by accident? Use "
    "one loss for each example, which depends on that example alone, in the batch's order"
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
        """Free the gradient, keeping its norms."""
        self._gradients = []

    def difference(
        self, other: Example, tolerance: float, where: str, reason: str = COUPLED
    ) -> str | None:
        """Return how an example differs elsewhere, and why; None if it does not.

        Args:
            other: the same example elsewhere.
            tolerance: the relative difference up to which losses and gradients are the same.
            where: describes ``other``.
            reason: what to say of a difference that explains itself in no other way.
        """
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
                f"{found}: NaN or infinity of another example reaches it. Find that example with "
                'nonfinite="keep", and leave it out'
            )
        if same_gradient and isfinite(gap):
            return (
                f"{found}: the gradient is the same, so the norms are right. Is a quantity of the "
                "whole batch added to the loss?"
            )
        # The cosine of a small angle is 1 − angle² / 2.
        if product >= (1 - tolerance**2 / 2) * size * size_there > 0:
            return (
                f"{found}: the gradient has the same direction and {size / size_there:.6g} times "
                "the length. Is the loss divided by a quantity of the whole batch? The norms are "
                "those of the losses as they are; to compare examples, divide by a quantity of "
                "each example"
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
