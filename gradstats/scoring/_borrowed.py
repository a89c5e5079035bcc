"""Lending the user's model to a computation: other memory for a while, then restored."""

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
    """Put the model into eval mode, and give it back with its weights, state, attributes and mode.

    The user's tensors keep their memory, and nothing is written to it: the model is given other
    memory in the meantime. So a state dict of the model as it was still says what it said. What
    modules keep in plain attributes may be computed from a checkpoint's weights: it goes with them.

    Args:
        renewal: is told of the model.
        losses: computes those of a batch, for what the user's code does as it sets the mode.

    Raises:
        CheckpointError: if eval mode changes weights, as layers do that merge their adapters then
            (or have merged): a checkpoint's would not be computed with as they were; or if it is
            not known whether what the model holds is of its weights.
    """
    modes = [(module, module.training) for module in model.modules()]
    overridden = overrides_modes(model)
    surroundings = Surroundings(model)
    # Copies: a module may hand out what it goes on to change.
    states = [
        (module, copy.deepcopy(module.get_extra_state()))
        for module in model.modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
        and type(module).set_extra_state is not nn.Module.set_extra_state
    ]
    _replace_sparse(model)
    tensors = model_tensors(model)
    memory = [tensor.data for tensor in tensors]
    # Autograd may have saved them in a graph of the user's, and counts what is written elsewhere.
    counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
    with _unsafe_preserve_version_counter(counted):
        try:
            # Code of the user's that changes the mode may write to all; else parameters move when
            # a checkpoint is loaded.
            move(tensors, set(map(id, tensors if overridden else _written(model))))
            model.eval()
            if overridden:
                held = [*zip(tensors, memory, strict=True)]
                changed = [each for each, own in held if not same_bits(each.detach(), own)]
                if changed:
                    raise merging(model, changed)
                _ranks.together(renewal.try_out, model, held, losses)
            renewal.begin(Surroundings(model))
            yield
        finally:
            try:
                renewal.renew(model)  # objects of its own may hold what is of other weights
                # From the outside in: what a module sets for its parts, they set anew.
                for module, training in modes:
                    if module.training != training:
                        module.train(training)
            finally:
                for tensor, own in zip(tensors, memory, strict=True):
                    tensor.data = own
                surroundings.restore()
                # Last, since a forward may have changed what an attribute holds.
                for module, state in states:
                    module.set_extra_state(state)


def _replace_sparse(model: nn.Module) -> None:
    """Give modules copies of their sparse buffers, which cannot be given other memory."""
    for module in ordinary_modules(model):
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.layout != torch.strided:
                module._buffers[name] = buffer.clone()


def _written(model: nn.Module) -> list[Tensor]:
    """Return what a forward writes to: buffers, and tables whose rows it shortens."""
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
    own = [part for each in (*model.parameters(), *model.buffers()) for part in parts_of(each)]
    places = {memory_of(tensor) for tensor in own}
    held = (each for module in model.modules() for each in kept_by(module).values())
    others = (tensor for attribute in held for tensor in tensors_kept(attribute))
    return [*own, *(tensor for tensor in others if memory_of(tensor) in places)]


def memory_of(tensor: Tensor) -> int:
    """Return an identifier of a tensor's memory; of the tensor itself if it has none."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return tensor.untyped_storage()._cdata


def move(tensors: Sequence[Tensor], chosen: set[int]) -> None:
    """Copy the memory of the chosen tensors; tensors that share memory still do afterwards.

    Sparse ones stay where they are: see ``_replace_sparse``.
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
