"""Learning rates of checkpoints: one for all parameters, or one for each parameter."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradstats._values import is_real, unlike_numbers
from gradstats.capture._selection import clean_name, matching_names, quoted, wrapper_prefix
from gradstats.errors import CheckpointError

# One learning rate, or one for each parameter by name.
Rates = float | dict[str, float]

REMEDY = (
    "Pass lr= a number, a list with one entry for each checkpoint, a mapping from patterns over "
    'parameter names to numbers, or lr="optimizer" where the files hold the optimizer\'s state.'
)


@dataclass(frozen=True)
class ParameterGroup:
    """One parameter group of an optimizer's state.

    Attributes:
        rate: its learning rate when the checkpoint was written.
        count: how many parameters it holds.
        names: their names; None if the optimizer was not given named parameters.
    """

    rate: float
    count: int
    names: tuple[str, ...] | None


def check_rate(rate, of: str) -> float:
    """Return a learning rate as a float, or raise."""
    kind = unlike_numbers(rate) if isinstance(rate, Tensor) else None
    if kind is None and isinstance(rate, (Tensor, np.ndarray)) and rate.ndim == 0:
        rate = rate.item()
    if not is_real(rate):
        shown = kind or reprlib.repr(rate)
        raise CheckpointError(f"the learning rate of {of} is {shown}, expected a number. {REMEDY}")
    number = float(rate)
    if not math.isfinite(number) or number < 0:
        raise CheckpointError(
            f"the learning rate of {of} is {number}, expected a finite number, zero or larger."
        )
    return number


def from_patterns(
    patterns: Mapping[str, float], model: nn.Module, names: Sequence[str], checkpoint: str
) -> Rates:
    """Return the rate of each parameter, by the one pattern that matches its name.

    Different patterns may match the names of a tied parameter, if they give it the same rate.

    Args:
        patterns: pattern → rate, as ``check_rate`` returns it; each must match some parameter of
            the model, measured or not.
        model: whose names the patterns match.
        names: the measured parameters.
        checkpoint: its name in messages.
    """
    prefix, names_of = wrapper_prefix(model), dict[int, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(clean_name(name, prefix))
    aliases = {name: each for each in names_of.values() for name in each}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in aliases):
            raise CheckpointError(
                f"{checkpoint}: the pattern {pattern!r} of lr matches no parameter. Expected a "
                f"pattern that matches a whole name, such as one of {[*aliases][:8]}"
                f"{' …' if len(aliases) > 8 else ''}."
            )
    rates = {}
    for name in names:
        by_name = [
            [pattern for pattern in patterns if fnmatchcase(alias, pattern)]
            for alias in aliases[name]
        ]
        matching = list(dict.fromkeys(chain.from_iterable(by_name)))
        found = {patterns[each] for each in matching}
        if len(found) != 1 or max(map(len, by_name)) > 1:
            tied = f", tied as {aliases[name]}," if len(aliases[name]) > 1 else ""
            raise CheckpointError(
                f"{checkpoint}: {len(matching)} patterns of lr match the parameter {name!r}{tied} "
                f"({matching or list(patterns)}), expected exactly one. Give each parameter its "
                "rate, 0 for one that was not trained, or leave the parameter out with exclude=."
            )
        (rates[name],) = found
    return simplify(rates)


def from_optimizer(
    optimizers: Sequence[Any], model: nn.Module, names: Sequence[str], checkpoint: str
) -> Rates:
    """Return the rates in an optimizer's state, or raise where it does not tell them."""
    groups = _parameter_groups(optimizers, checkpoint)
    if all(group.names is not None for group in groups):
        saved = {name: group.rate for group in groups for name in group.names or ()}
        own_names = matching_names(saved, names)
        rates = {own_names[name]: rate for name, rate in saved.items()}
        missing = [name for name in names if name not in rates]
        if missing:
            raise CheckpointError(
                f"{checkpoint}: the optimizer does not hold {quoted(missing)}, only "
                f"{quoted([*rates])}, so their learning rate is not known. Leave them out with "
                "exclude=, pass lr={pattern: rate}, or pass the module whose names these are."
            )
        return simplify({name: rates[name] for name in names})
    if len({group.rate for group in groups}) > 1:
        raise CheckpointError(
            f"{checkpoint}: the optimizer's {len(groups)} parameter groups have different learning "
            f"rates ({[group.rate for group in groups]}) and no parameter names, so which rate "
            "belongs to which parameter is not known. Build the optimizer from "
            "model.named_parameters(), or pass lr={pattern: rate}."
        )
    count = sum(group.count for group in groups)
    every = len(list(model.parameters()))
    trainable = sum(parameter.requires_grad for parameter in model.parameters())
    if count not in (every, trainable):
        raise CheckpointError(
            f"{checkpoint}: the optimizer holds {count} parameters without names, the model has "
            f"{trainable} that require grad, so which were trained is not known. Build the "
            "optimizer from model.named_parameters(), or pass lr={pattern: rate}."
        )
    return groups[0].rate


def _parameter_groups(optimizers: Sequence[Any], checkpoint: str) -> list[ParameterGroup]:
    """Return the parameter groups of the one optimizer whose state a checkpoint holds."""
    if not optimizers:
        raise CheckpointError(
            f'{checkpoint} holds no optimizer state, from which lr="optimizer" reads the learning '
            "rate. Pass the learning rates: lr=0.1, or one for each checkpoint; or save "
            "{'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, or the latter as "
            "optimizer.pt in a folder with these weights alone."
        )
    states = [
        state[0] if isinstance(state, Sequence) and len(state) == 1 else state
        for state in optimizers
    ]
    saved = states[0].get("param_groups") if isinstance(states[0], Mapping) else None
    if len(states) > 1 or not isinstance(saved, Sequence) or not all(map(_is_group, saved)):
        raise CheckpointError(
            f"{checkpoint} holds an optimizer state that is not that of one "
            "torch.optim.Optimizer. Pass the learning rates: lr=0.1, or one for each checkpoint."
        )
    groups = []
    for number, group in enumerate(saved):
        if "lr" not in group:
            raise CheckpointError(
                f"{checkpoint}: parameter group {number} of the optimizer has no 'lr', expected "
                "one. Pass the learning rates: lr=0.1, or one for each checkpoint."
            )
        if group.get("maximize"):
            raise CheckpointError(
                f"{checkpoint}: parameter group {number} of the optimizer has maximize=True, and "
                "it is not known whether it raised the losses of loss_fn or their negatives. Pass "
                "lr= numbers, with a loss_fn that returns what training lowered."
            )
        if "d" in group:
            raise CheckpointError(
                f"{checkpoint}: parameter group {number} of the optimizer has 'd', an estimate by "
                "which its steps are multiplied too, as Prodigy and D-Adaptation have it. Pass the "
                "learning rates as numbers: lr=[group['lr'] * group['d'], ...]."
            )
        names = group.get("param_names")
        groups.append(
            ParameterGroup(
                rate=check_rate(group["lr"], f"parameter group {number} in {checkpoint}"),
                count=len(group["params"]),
                names=None if names is None else tuple(names),
            )
        )
    return groups


def _is_group(saved: Any) -> bool:
    if not (isinstance(saved, Mapping) and isinstance(saved.get("params"), Sequence)):
        return False
    names = saved.get("param_names")
    return names is None or all(isinstance(name, str) for name in names)


def weighed(rates: Rates, whole: Tensor, parts: Mapping[str, Tensor] | None) -> np.ndarray:
    """Return Σ_p η_p x_p, float64 on the host.

    Args:
        rates: η.
        whole: Σ_p x_p.
        parts: name → x_p; needed if the rates of parameters differ.
    """
    if not isinstance(rates, dict):
        return rates * as_numpy(whole)
    assert parts is not None
    return reduce(np.add, (rate * as_numpy(parts[name]) for name, rate in rates.items()))


def as_numpy(tensor: Tensor) -> np.ndarray:
    """Return a tensor's values as float64 on the host."""
    return tensor.detach().to("cpu", torch.float64).numpy()


def simplify(rates: dict[str, float]) -> Rates:
    """Return one number if all parameters have the same rate."""
    values = set(rates.values())
    return values.pop() if len(values) == 1 else rates
