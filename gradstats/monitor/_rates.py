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
    """Return the current parameter groups of all optimizers."""
    return [group for each in optimizers_of(optimizer) for group in each.param_groups]


def learning_rates(
    groups: Sequence[dict[str, Any]], parameters: Sequence[nn.Parameter]
) -> tuple[Tensor, np.ndarray]:
    """Return the current learning rates of the groups that move some of the parameters.

    Returns:
        (G,) the rates, NaN where unknown; (G, P) bool, which group moves which parameter.
    """
    members = [set(map(id, group["params"])) for group in groups]
    moves = np.array([[id(p) in group for p in parameters] for group in members])
    moving = np.flatnonzero(moves.any(1)).tolist()
    # Unknown: None in Adafactor, which may choose the rate itself, and rates that Prodigy and
    # D-Adaptation multiply by an estimate, d.
    moved_by = [groups[place] for place in moving]
    given = (None if "d" in group else group.get("lr") for group in moved_by)
    rates = [math.nan if rate is None else rate for rate in given]
    if not any(isinstance(rate, Tensor) for rate in rates):
        return torch.tensor(rates, dtype=torch.float64), moves[moving]
    device = next(rate.device for rate in rates if isinstance(rate, Tensor))
    # A copy, because schedulers write into rates that are tensors.
    columns = [torch.as_tensor(r).detach().to(device, torch.float64).reshape(-1) for r in rates]
    return torch.cat(columns), moves[moving]


def warn_of_another_model(
    groups: Sequence[dict[str, Any]], parameters: Sequence[nn.Parameter]
) -> None:
    """Warn if the optimizers hold none of the measured parameters."""
    moved = {id(each) for group in groups for each in group["params"]}
    if moved.isdisjoint(map(id, parameters)):
        warn(
            "the optimizer that gradstats.Monitor was given holds none of the measured "
            "parameters, so their self-influence is zero. Expected the optimizer of this model, "
            "made from its current parameters.",
        )
