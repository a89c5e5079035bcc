"""Borrowing the user's model: it is given other memory for a while, then restored."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from gradstats._comparison import same_bits
from gradstats.capture.operations._memory import parts_of
from gradstats.capture.parameters._attributes import kept_by, tensors_kept
from gradstats.scoring import _ranks
from gradstats.scoring._renewal import Renewal, merging
from gradstats.statistics._state import shortened_tables
from gradstats.statistics._surroundings import Surroundings, ordinary_modules


@contextmanager
def borrowed(model: nn.Module, renewal: Renewal, losses: Callable[[], Tensor]) -> Iterator[None]:
    """Put the model into eval mode, and restore its weights, state, attributes and mode.

    Nothing is written to the user's memory: meanwhile the tensors are given other memory, so state
    dicts taken before keep their values. Plain attributes may hold what modules computed from a
    checkpoint's weights; they are restored as well.

    Args:
        renewal: tries out whether setting the mode renews caches, if it runs the user's code.
        losses: computes the losses of a batch, for that trial.

    Raises:
        CheckpointError: if eval mode changes weights, as layers do that merge adapters into them:
            a checkpoint's weights would be changed too; or if it is not known whether something
            that the model holds was computed from its weights.
    """
    modes = [(module, module.training) for module in model.modules()]
    overridden = overrides_modes(model)
    surroundings = Surroundings(model)
    # Copies: a module may return an object that it changes later.
    states = [
        (module, copy.deepcopy(module.get_extra_state()))
        for module in model.modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
        and type(module).set_extra_state is not nn.Module.set_extra_state
    ]
    _replace_sparse(model)
    tensors = model_tensors(model)
    memory = [tensor.data for tensor in tensors]
    # A graph of the user's may have saved these tensors: writes to other memory must not count.
    counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
    with _unsafe_preserve_version_counter(counted):
        try:
            # The user's code that sets the mode may write to any tensor. Without such code,
            # parameters are moved only when a checkpoint is loaded.
            move(tensors, set(map(id, tensors if overridden else _written(model))))
            model.eval()
            if overridden:
                pairs = [*zip(tensors, memory, strict=True)]
                changed = [each for each, before in pairs if not same_bits(each.detach(), before)]
                if changed:
                    raise merging(model, changed)
                _ranks.together(renewal.try_out, model, pairs, losses)
            renewal.begin(Surroundings(model))
            yield
        finally:
            try:
                renewal.renew(model)  # the user's objects may hold caches of other weights
                # From the outside in: setting a module's mode also sets that of its parts.
                for module, training in modes:
                    if module.training != training:
                        module.train(training)
            finally:
                for tensor, before in zip(tensors, memory, strict=True):
                    tensor.data = before
                surroundings.restore()
                # Last, since a forward may have changed an object that an attribute holds.
                for module, state in states:
                    module.set_extra_state(state)


def _replace_sparse(model: nn.Module) -> None:
    """Replace sparse buffers by copies, since they cannot be given other memory."""
    for module in ordinary_modules(model):
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.layout != torch.strided:
                module._buffers[name] = buffer.clone()


def _written(model: nn.Module) -> list[Tensor]:
    """Return the tensors that a forward may write to: buffers, and tables with ``max_norm``."""
    written = (*model.buffers(), *shortened_tables(model.modules()))
    return [part for each in written for part in parts_of(each)]


def overrides_modes(model: nn.Module) -> bool:
    """Whether setting the mode runs the user's code, which may write to anything."""
    kinds = {type(module) for module in model.modules()}
    return any(
        kind.train is not nn.Module.train or kind.eval is not nn.Module.eval for kind in kinds
    )


def model_tensors(model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers, and the tensors in attributes that share their memory."""
    registered = (*model.parameters(), *model.buffers())
    tensors = [part for each in registered for part in parts_of(each)]
    memory = {memory_of(tensor) for tensor in tensors}
    attributes = (each for module in model.modules() for each in kept_by(module).values())
    kept = (tensor for attribute in attributes for tensor in tensors_kept(attribute))
    return [*tensors, *(tensor for tensor in kept if memory_of(tensor) in memory)]


def memory_of(tensor: Tensor) -> int:
    """Return an identifier of a tensor's memory, or of a tensor that has no memory of its own."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return tensor.untyped_storage()._cdata


def move(tensors: Sequence[Tensor], chosen: set[int]) -> None:
    """Give the chosen tensors copies of their memory; tensors that share memory still share it.

    Sparse tensors are left alone: see ``_replace_sparse``.
    """
    sharing: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        sharing.setdefault(memory_of(tensor), []).append(tensor)
    for group in sharing.values():
        if chosen.isdisjoint(map(id, group)) or group[0].layout != torch.strided:
            continue
        places = [(each.size(), each.stride(), each.storage_offset()) for each in group]
        whole = torch.empty(0, dtype=torch.uint8, device=group[0].device)
        memory = whole.set_(group[0].untyped_storage()).clone().untyped_storage()
        for tensor, (size, stride, offset) in zip(group, places, strict=True):
            tensor.data = tensor.new_empty(0).set_(memory, offset, size, stride)
