"""What the callback needs from Hugging Face's Trainer, and how it is saved."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from gradstats._requirements import require
from gradstats.errors import TrackingError

with require("transformers"):
    from transformers import Trainer

# What is added where examples turn out to depend on each other, and each row was taken for one.
PAIRS = (
    "If each example has several rows in the batch, as in TRL's trainers on pairs (DPOTrainer, "
    "RewardTrainer), say so: GradStatsCallback(rows_per_example=2)."
)


class Hook:
    """A hook of the model that copies of it do not have: an average of its weights, say.

    A copied method would have a callback of its own, with a copy of all that it refers to.
    """

    def __init__(self, call: Callable[..., None], close: Callable[[], None]):
        self._call, self.close = call, close

    def __call__(self, *args) -> None:
        self._call(*args)

    def __reduce__(self):
        return Hook, (nothing, nothing)


def nothing(*args) -> None:
    """Do nothing."""


def bounds_in(inputs: dict[str, Any]) -> Tensor | None:
    """Return the bounds of examples that a collator has packed into one row; None for a plain row.

    Args:
        inputs: of the model, by name.
    """
    bounds = inputs.get("cu_seq_lens_q")
    if isinstance(bounds, Tensor):
        return bounds
    positions = inputs.get("position_ids")
    # Beside a mask the models attend to whole rows, wherever positions begin: in padding, perhaps.
    masked = inputs.get("attention_mask") is not None
    if masked or not isinstance(positions, Tensor) or positions.dim() != 2:
        return None
    starts = (positions[0] == 0).nonzero()[:, 0]
    if len(starts) < 2 or starts[0] != 0:
        return None
    return torch.cat([starts, starts.new_tensor([positions.shape[1]])])


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
    """Return nested dicts and lists with each tensor as its bytes in base64."""
    if isinstance(item, Tensor):
        content = base64.b64encode(item.numpy().tobytes()).decode("ascii")
        return {"tensor": content, "dtype": str(item.dtype).removeprefix("torch.")}
    if isinstance(item, dict):
        return {key: to_json(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [to_json(value) for value in item]
    return item


def from_json(item: Any) -> Any:
    if isinstance(item, dict):
        if item.keys() == {"tensor", "dtype"}:
            content = bytearray(base64.b64decode(item["tensor"]))
            dtype = getattr(torch, item["dtype"])
            return torch.frombuffer(content, dtype=dtype) if content else torch.zeros(0).to(dtype)
        return {key: from_json(value) for key, value in item.items()}
    if isinstance(item, list):
        return [from_json(value) for value in item]
    return item
