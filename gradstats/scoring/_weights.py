"""Lending the user's model to a computation: other weights for a while, then as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradstats.capture._selection import clean_name
from gradstats.errors import CheckpointError
from gradstats.scoring._checkpoints import Checkpoint
from gradstats.scoring._content import ContentHash


@contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode, and give it back with its weights, buffers and mode.

    The user's tensors keep their memory, and nothing is written to it: the model is given other
    memory in the meantime. So a state dict of the model as it was still says what it said.
    """
    modes = [(module, module.training) for module in model.modules()]
    tensors = _tensors(model)
    memory = [tensor.data for tensor in tensors]
    try:
        model.eval()
        # What a forward writes are buffers; parameters move when a checkpoint is loaded.
        _move(tensors, {id(_local(buffer)) for buffer in model.buffers()})
        yield
    finally:
        for tensor, own in zip(tensors, memory, strict=True):
            tensor.data = own
        for module, training in modes:
            module.training = training


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Give the borrowed model a checkpoint's weights; every name and shape must agree."""
    held = {clean_name(name): value for name, value in checkpoint.weights.items()}
    state = model.state_dict()
    own = {clean_name(name): name for name in state}
    missing = [name for name in own if name not in held]
    unexpected = [name for name in held if name not in own]
    if missing or unexpected:
        raise CheckpointError(
            f"{checkpoint.name} does not fit the model: it lacks {_some(missing)}, and holds "
            f"{_some(unexpected)}, which the model does not have. Expected the state dict of a "
            "model of the same architecture."
        )
    if all(_same(held[name], state[own[name]]) for name in own):
        return
    tensors = _tensors(model)
    _move(tensors, {id(tensor) for tensor in tensors})
    try:
        model.load_state_dict({own[name]: held[name] for name in own})
    except RuntimeError as error:
        raise CheckpointError(f"{checkpoint.name} does not fit the model: {error}") from error


def _tensors(model: nn.Module) -> list[Tensor]:
    return [_local(tensor) for tensor in (*model.parameters(), *model.buffers())]


def _local(tensor: Tensor) -> Tensor:
    """Return the tensor that holds the memory: of a sharded one, this process' shard."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[no-any-return]


def _same(held: Any, own: Any) -> bool:
    """Whether both are one view of one memory."""
    if not isinstance(held, Tensor) or not isinstance(own, Tensor) or held.dtype != own.dtype:
        return False
    held, own = _local(held), _local(own)
    return held.is_set_to(own) if held.layout == own.layout == torch.strided else False


def _move(tensors: Sequence[Tensor], chosen: set[int]) -> None:
    """Copy the memory of the chosen tensors; tensors that share memory still do afterwards."""
    sharing: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        sharing.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    for group in sharing.values():
        if chosen.isdisjoint(map(id, group)):
            continue
        places = [(each.size(), each.stride(), each.storage_offset()) for each in group]
        whole = torch.empty(0, dtype=torch.uint8, device=group[0].device)
        memory = whole.set_(group[0].untyped_storage()).clone().untyped_storage()
        for tensor, (size, stride, offset) in zip(group, places, strict=True):
            tensor.data = tensor.new_empty(0).set_(memory, offset, size, stride)


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" * (len(names) > 4))


def weights_hash(weights: Mapping[str, Any]) -> str:
    """Return a SHA-256 over names, shapes, dtypes and values."""
    content = ContentHash()
    content.add({clean_name(name): weights[name] for name in sorted(weights)})
    return content.hexdigest()


def architecture_hash(model: nn.Module) -> str:
    """Return a SHA-256 over the model's modules and the shapes and dtypes of its tensors."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        digest.update(f"{clean_name(name)} {type(module).__qualname__}".encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{clean_name(name)} {tuple(tensor.shape)} {tensor.dtype}".encode())
    return digest.hexdigest()
