"""Checks of the arguments of every function that measures gradients."""

from __future__ import annotations

import glob
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.loss import _Loss

from gradstats._complex import real_shape
from gradstats._values import integer
from gradstats.capture._selection import patterns_of, select_parameters
from gradstats.capture._tracker import DEFAULT_WORKSPACE
from gradstats.errors import TrackingError

# Takes a model and a batch, whose types are the caller's own.
LossFunction = Callable[[Any, Any], Tensor]


class Choices(TypedDict, total=False):
    """Arguments of all functions that run a loss function; see per_example_norms."""

    batch_dim: int
    parameters: Sequence[str] | str | None
    exclude: Sequence[str] | str
    workspace: int | None


class Options(Choices, total=False):
    """Arguments of all functions that run a loss function on one batch."""

    cu_seqlens: Tensor | None


def shapes_of(model: nn.Module, options: Options) -> dict[str, tuple[int, ...]]:
    """Return name → shape of every parameter to track; complex ones end in an axis of two."""
    selected = select_parameters(model, options.get("parameters"), options.get("exclude", ()))
    return {name: real_shape(parameter) for name, parameter in selected.items()}


def excluding(exclude: Sequence[str] | str, names: Iterable[str]) -> list[str]:
    """Return the patterns of ``exclude`` and those of further names."""
    return [*patterns_of("exclude", exclude), *map(glob.escape, names)]


def check_call(model: Any, loss_fn: Any) -> None:
    """Raise unless a loss function's gradients can be measured on a model here."""
    check_model(model)
    check_loss_function(loss_fn)
    check_recording()


def check_model(model: Any, name: str = "model") -> None:
    """Raise unless it is a module."""
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        if not isinstance(model, (str, Path, Mapping)):
            raise TrackingError(f"{name} is {got}, expected a torch.nn.Module.")
        raise TrackingError(
            f"{name} is {got}, expected a torch.nn.Module. For a checkpoint, pass a copy of the "
            "model that holds its weights: other = copy.deepcopy(model), "
            "other.load_state_dict(torch.load(...))."
        )


def check_loss_function(loss_fn: Any) -> None:
    """Raise unless it can be called with a model and a batch."""
    # PyTorch's losses take outputs and targets. A user's subclass of one may take something else.
    native = getattr(loss_fn, "__module__", None) == functional.__name__
    if not callable(loss_fn) or type(loss_fn).__module__ == _Loss.__module__ or native:
        got = f"torch.nn.functional.{loss_fn.__name__}" if native else type(loss_fn).__name__
        raise TrackingError(
            f"loss_fn is {got}, expected a function that runs the model and returns (B,) unreduced "
            "losses: loss_fn(model, batch), such as lambda model, batch: "
            'cross_entropy(model(batch[0]), batch[1], reduction="none").'
        )


def check_recording() -> None:
    """Raise if PyTorch does not record gradients here."""
    if torch.is_inference_mode_enabled():
        raise TrackingError(
            "the call is under torch.inference_mode(), where PyTorch records no gradients. Call "
            "from outside it. (Under torch.no_grad(), functions that run the forward themselves "
            "work.)"
        )


def check_scaler(scaler: Any) -> None:
    """Raise unless a scaler is None or an instance that scales losses."""
    if scaler is not None and (isinstance(scaler, type) or not hasattr(scaler, "scale")):
        raise TrackingError(f"scaler is {scaler!r}, expected a torch.amp.GradScaler instance.")


def check_choice(name: str, value: Any, choices: tuple[str | None, ...]) -> Any:
    """Return one of several choices, or raise."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise TrackingError(f"{name} is {value!r}, expected one of {choices}.")
    return value


def check_flags(**flags: Any) -> None:
    """Raise unless these are all True or False."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TrackingError(f"{name} is {reprlib.repr(value)}, expected True or False.")


def check_workspace(workspace: Any) -> int:
    """Return a number of bytes, the default for None, or raise."""
    if workspace is None:
        return DEFAULT_WORKSPACE
    number = integer(workspace, 1)
    if number is None:
        raise TrackingError(
            f"workspace is {workspace!r}, expected a positive integer: a number of bytes."
        )
    return number
