"""The learning rates with which optimizers move the measured parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradstats._warnings import warn


def optimizers_of(optimizer: Any) -> list[Any]:
    """Return the optimizers that take a step together: none, one, or those of a list."""
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the groups of parameters of all optimizers, as they stand."""
    return [group for each in optimizers_of(optimizer) for group in each.param_groups]


def learning_rates(
    groups: Sequence[dict[str, Any]], parameters: Sequence[nn.Parameter]
) -> tuple[Tensor, np.ndarray]:
    """Return the learning rates as they stand of the groups that move some of the parameters.

    Returns:
        (G,) the rates; (G, P) whose parameters they move.
    """
    members = [set(map(id, group["params"])) for group in groups]
    moves = np.array([[id(p) in group for p in parameters] for group in members])
    moving = np.flatnonzero(moves.any(1)).tolist()
    # Adafactor has None where it makes its own.
    known = (groups[place].get("lr") for place in moving)
    rates = [math.nan if rate is None else rate for rate in known]
    if not any(isinstance(rate, Tensor) for rate in rates):
        return torch.tensor(rates, dtype=torch.float64), moves[moving]
    device = next(rate.device for rate in rates if isinstance(rate, Tensor))
    # A copy: schedulers write into rates that are tensors.
    columns = [torch.as_tensor(r).detach().to(device, torch.float64).reshape(-1) for r in rates]
    return torch.cat(columns), moves[moving]


def warn_of_another_model(
    groups: Sequence[dict[str, Any]], parameters: Sequence[nn.Parameter]
) -> None:
    """Warn if optimizers have none of the measured parameters."""
    moved = {id(each) for group in groups for each in group["params"]}
    if moved.isdisjoint(map(id, parameters)):
        warn(
            "the optimizer that gradstats.Monitor was given holds none of the measured "
            "parameters, so that their self-influence is zero. Expected the optimizer of this "
            "model, made of the parameters that it has now.",
        )
