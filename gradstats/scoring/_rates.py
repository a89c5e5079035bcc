"""Learning rates of checkpoints: one for all parameters, or one for each parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Real

from torch import nn

from gradstats.capture._selection import clean_name
from gradstats.errors import CheckpointError
from gradstats.scoring._checkpoint_files import ParameterGroup

# One learning rate, or one for each parameter by name.
Rates = float | dict[str, float]

REMEDY = (
    "Pass lr= a number, a list with one entry for each checkpoint, a mapping from patterns over "
    'parameter names to numbers, or lr="optimizer" where the files hold the optimizer\'s state.'
)


def check_rate(rate, of: str) -> float:
    """Return a learning rate as a float, or raise."""
    if not isinstance(rate, Real) or isinstance(rate, bool):
        raise CheckpointError(f"the learning rate of {of} is {rate!r}, expected a number. {REMEDY}")
    if not math.isfinite(rate) or rate < 0:
        raise CheckpointError(
            f"the learning rate of {of} is {rate}, expected a finite number, zero or larger."
        )
    return float(rate)


def from_patterns(patterns: Mapping[str, float], names: Sequence[str], checkpoint: str) -> Rates:
    """Return the rate of each parameter, by the one pattern that matches its name."""
    rates = {}
    for name in names:
        matching = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        if len(matching) != 1:
            raise CheckpointError(
                f"{checkpoint}: {len(matching)} patterns of lr match the parameter {name!r} "
                f"({matching or list(patterns)}), expected exactly one. Give each parameter its "
                "rate, 0 for one that was not trained, or leave the parameter out with exclude=."
            )
        rates[name] = check_rate(patterns[matching[0]], f"{name!r} in {checkpoint}")
    return simplify(rates)


def from_groups(
    groups: Sequence[ParameterGroup] | None, model: nn.Module, names: Sequence[str], checkpoint: str
) -> Rates:
    """Return the rates that an optimizer's parameter groups say, or raise where they do not."""
    if groups is None:
        raise CheckpointError(
            f'{checkpoint} holds no optimizer state, and lr="optimizer" asks for the learning rate '
            "in it. Save {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, or "
            "pass the learning rates: lr=0.1, or one for each checkpoint."
        )
    for number, group in enumerate(groups):
        check_rate(group.rate, f"parameter group {number} in {checkpoint}")
    if all(group.names is not None for group in groups):
        rates = {
            clean_name(name): group.rate
            for group in groups
            for name in group.names  # type: ignore[union-attr]
        }
        missing = [name for name in names if name not in rates]
        if missing:
            raise CheckpointError(
                f"{checkpoint}: the optimizer does not hold {missing[:4]}"
                f"{' …' if len(missing) > 4 else ''}, so their learning rate is not known. Leave "
                "them out with exclude=, or pass lr={pattern: rate}."
            )
        return simplify({name: rates[name] for name in names})
    if len({group.rate for group in groups}) > 1:
        raise CheckpointError(
            f"{checkpoint}: the optimizer's {len(groups)} parameter groups have different learning "
            f"rates ({[group.rate for group in groups]}) and no parameter names, so which rate "
            "belongs to which parameter is not known. Build the optimizer from "
            "model.named_parameters(), or pass lr={pattern: rate}."
        )
    held = sum(group.count for group in groups)
    every = len(list(model.parameters()))
    trainable = sum(parameter.requires_grad for parameter in model.parameters())
    if held not in (every, trainable):
        raise CheckpointError(
            f"{checkpoint}: the optimizer holds {held} parameters without names, the model has "
            f"{trainable} that require grad, so which were trained is not known. Build the "
            "optimizer from model.named_parameters(), or pass lr={pattern: rate}."
        )
    return groups[0].rate


def simplify(rates: dict[str, float]) -> Rates:
    """Return one number where all parameters share it."""
    values = set(rates.values())
    return values.pop() if len(values) == 1 else rates


def is_zero(rates: Rates) -> bool:
    """Whether no parameter has a rate above zero."""
    return not any(rates.values()) if isinstance(rates, dict) else rates == 0
