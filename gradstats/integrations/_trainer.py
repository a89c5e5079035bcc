"""Finding Hugging Face's Trainer, and saving the callback's state as JSON."""

from __future__ import annotations

import base64
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from gradstats._requirements import require
from gradstats.errors import TrackingError

with require("transformers"):
    from transformers import Trainer

# Added to the error for coupled examples, if each row was taken for an example.
PAIRS = (
    "If each example has several rows in the batch, as in TRL's trainers on pairs (DPOTrainer, "
    "RewardTrainer), say so: GradStatsCallback(rows_per_example=2)."
)


def calling_trainer() -> Trainer:
    """Return the Trainer that is calling this callback."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise TrackingError(
        "GradStatsCallback was not called by a transformers.Trainer: pass it to one with "
        "callbacks=[...]; in a loop of your own use gs.Monitor."
    )


def refuse_what_cannot_be_measured(args) -> None:
    """Raise for training arguments with which the model cannot be measured."""
    for name, uses in (
        ("DataParallel (several GPUs in one process; start one process for each)", args.n_gpu > 1),
        ("DeepSpeed", bool(args.deepspeed)),
    ):
        if uses:
            raise TrackingError(
                f"GradStatsCallback cannot measure a Trainer that uses {name}. Train without it, "
                "or without this callback."
            )


def to_json(item: Any) -> Any:
    """Return nested dicts and lists with each tensor as base64 of its bytes."""
    if isinstance(item, Tensor):
        content = base64.b64encode(item.numpy().tobytes()).decode("ascii")
        return {"tensor": content, "dtype": str(item.dtype).removeprefix("torch.")}
    if isinstance(item, dict):
        return {key: to_json(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [to_json(value) for value in item]
    return item


def from_json(item: Any) -> Any:
    """Return what ``to_json`` was given."""
    if isinstance(item, dict):
        if item.keys() == {"tensor", "dtype"}:
            content = bytearray(base64.b64decode(item["tensor"]))
            dtype = getattr(torch, item["dtype"])
            return torch.frombuffer(content, dtype=dtype) if content else torch.zeros(0).to(dtype)
        return {key: from_json(value) for key, value in item.items()}
    if isinstance(item, list):
        return [from_json(value) for value in item]
    return item
