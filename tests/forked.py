"""Several processes that are forks of a new one, which imports what they need once for all."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch


def run(function: Callable[..., None], *arguments: Any, count: int = 2) -> None:
    """Run ``function(rank, *arguments)``, which can be pickled, in processes; raise their errors.

    A fork of this process would share the threads that PyTorch and pytest-xdist have started in it.
    """
    torch.multiprocessing.spawn(_fork, (function, arguments, count), nprocs=1)


def _fork(_: int, function: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    importlib.import_module("torch._dynamo")  # which PyTorch imports where it is first needed
    torch.multiprocessing.start_processes(function, arguments, count, start_method="fork")
