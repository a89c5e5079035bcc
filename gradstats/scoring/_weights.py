"""Lending the user's model to a computation: other weights for a while, then as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradstats.capture._selection import clean_name
from gradstats.errors import CheckpointError
from gradstats.scoring._checkpoints import Checkpoint


@contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode, and give it back with its weights, buffers and mode."""
    modes = [(module, module.training) for module in model.modules()]
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    try:
        model.eval()
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for module, training in modes:
            module.training = training


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint's weights into the model; every name and shape must agree."""
    held = {clean_name(name): value for name, value in checkpoint.weights.items()}
    own = {clean_name(name): name for name in model.state_dict()}
    missing = [name for name in own if name not in held]
    unexpected = [name for name in held if name not in own]
    if missing or unexpected:
        raise CheckpointError(
            f"{checkpoint.name} does not fit the model: it lacks {_some(missing)}, and holds "
            f"{_some(unexpected)}, which the model does not have. Expected the state dict of a "
            "model of the same architecture."
        )
    try:
        model.load_state_dict({own[name]: held[name] for name in own})
    except RuntimeError as error:
        raise CheckpointError(f"{checkpoint.name} does not fit the model: {error}") from error


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" * (len(names) > 4))


def weights_hash(weights: Mapping[str, Any]) -> str:
    """Return a SHA-256 over names, shapes, dtypes and values."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(clean_name(name).encode())
        update(digest, weights[name])
    return digest.hexdigest()


def update(digest, value: Any) -> None:
    """Feed a tensor, or a plain value, to a hash."""
    if isinstance(value, Tensor):
        digest.update(f"{tuple(value.shape)} {value.dtype}".encode())
        flat = value.detach().to("cpu").contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    elif isinstance(value, (str, int, float, bool, bytes, type(None))):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__name__.encode())


def architecture_hash(model: nn.Module) -> str:
    """Return a SHA-256 over the model's modules and the shapes and dtypes of its tensors."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        digest.update(f"{clean_name(name)} {type(module).__qualname__}".encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{clean_name(name)} {tuple(tensor.shape)} {tensor.dtype}".encode())
    return digest.hexdigest()
