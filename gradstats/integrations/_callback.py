"""What the callbacks of all trainers share."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from gradstats.monitor._arguments import check_monitor
from gradstats.monitor._monitor import Monitor

PATTERNS = ("layers", "parameters", "exclude")


def check_options(every: int, options: Mapping[str, Any]) -> None:
    """Raise for options that no monitor would accept: now, not when training starts."""
    signature = inspect.signature(Monitor)
    known = list(signature.parameters)[2:]
    for name in options:
        if name not in known:
            raise TypeError(
                f"GradStatsCallback has no option {name!r}, expected one of its own or of "
                f"gs.Monitor: {', '.join(known)}."
            )
    given = signature.bind(nn.Identity(), every, **options)
    given.apply_defaults()
    check_monitor(**{name: each for name, each in given.arguments.items() if name not in PATTERNS})


def monitor_of_run(
    before: Monitor | None,
    model: nn.Module,
    every: int,
    *,
    optimizer: Any,
    scaler: Any,
    process_group: Any,
    **options: Any,
) -> Monitor:
    """Return the monitor of the previous run, if its model is the same, or a new one.

    Args:
        before: the monitor of the previous run, if any.
        model, every, optimizer, scaler, process_group, options: as for ``gs.Monitor``.
    """
    if before is not None and before.model is model:
        before.optimizer, before.scaler, before.process_group = optimizer, scaler, process_group
        return before
    return Monitor(
        model, every, optimizer=optimizer, scaler=scaler, process_group=process_group, **options
    )
