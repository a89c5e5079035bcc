"""Lending the user's model to a computation: other weights for a while, then as it was."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from gradstats._comparison import same_bits
from gradstats.capture._attributes import STANDARD_ATTRIBUTES, kept_by, tensors_kept
from gradstats.capture._memory import parts_of, wraps_others
from gradstats.capture._selection import clean_name, matching_names, wrapper_prefix
from gradstats.errors import CheckpointError
from gradstats.scoring._checkpoint_files import index_of
from gradstats.scoring._checkpoints import Checkpoint
from gradstats.scoring._content import ContentHash
from gradstats.scoring._renewal import Renewal


@contextmanager
def borrowed(model: nn.Module, renewal: Renewal) -> Iterator[None]:
    """Put the model into eval mode, and give it back with its weights, state, attributes and mode.

    The user's tensors keep their memory, and nothing is written to it: the model is given other
    memory in the meantime. So a state dict of the model as it was still says what it said. What
    modules keep in plain attributes may be computed from a checkpoint's weights: it goes with them.

    Args:
        model: the user's.
        renewal: is told of the model.

    Raises:
        CheckpointError: if eval mode changes weights, as layers do that merge their adapters then:
            a checkpoint's weights would not be computed with as they were.
    """
    modes = [(module, module.training) for module in model.modules()]
    overridden = _overrides_modes(model)
    # A forward may assign or register others. Modules of TorchScript hold what they hold elsewhere.
    ordinary = [each for each in model.modules() if not isinstance(each, torch.jit.ScriptModule)]
    buffers = [
        (module, dict(module._buffers), set(module._non_persistent_buffers_set))
        for module in ordinary
    ]
    attributes = [(module, _attributes(module)) for module in ordinary]
    # Copies: a module may hand out what it goes on to change.
    states = [
        (module, copy.deepcopy(module.get_extra_state()))
        for module in model.modules()
        if _has_extra_state(module)
    ]
    _replace_sparse(ordinary)
    tensors = _tensors(model)
    memory = [tensor.data for tensor in tensors]
    # Autograd may have saved them in a graph of the user's, and counts what is written elsewhere.
    counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
    with _unsafe_preserve_version_counter(counted):
        try:
            # Code of the user's that changes the mode may write to all; else parameters move when
            # a checkpoint is loaded.
            _move(tensors, set(map(id, tensors if overridden else _written(model))))
            model.eval()
            if overridden:
                _check_unchanged(model, tensors, memory)
                renewal.try_out(model, zip(tensors, memory, strict=True))
            yield
        finally:
            try:
                # From the outside in: what a module sets for its parts, they set anew.
                for module, training in modes:
                    if module.training != training:
                        module.train(training)
            finally:
                for tensor, own in zip(tensors, memory, strict=True):
                    tensor.data = own
                for module, named, transient in buffers:
                    for name in module._buffers.keys() - named.keys():
                        del module._buffers[name]
                    module._buffers.update(named)
                    module._non_persistent_buffers_set.clear()
                    module._non_persistent_buffers_set.update(transient)
                for module, kept in attributes:
                    for name in _attributes(module).keys() - kept.keys():
                        del vars(module)[name]
                    vars(module).update(kept)
                # Last, since a forward may have changed what an attribute holds.
                for module, state in states:
                    module.set_extra_state(state)


def _replace_sparse(modules: Sequence[nn.Module]) -> None:
    """Give modules copies of their sparse buffers, which cannot be given other memory."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.layout != torch.strided:
                module._buffers[name] = buffer.clone()


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module: no parameters, buffers, modules, modes or hooks."""
    return {name: value for name, value in vars(module).items() if name not in STANDARD_ATTRIBUTES}


def _written(model: nn.Module) -> list[Tensor]:
    """Return what a forward writes to: buffers, and tables whose rows it shortens to max_norm."""
    tables = [
        module.weight
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    ]
    return [part for each in (*model.buffers(), *tables) for part in parts_of(each)]


def _overrides_modes(model: nn.Module) -> bool:
    """Whether code of the user's runs where the mode is set: it may write to anything."""
    kinds = {type(module) for module in model.modules()}
    return any(
        kind.train is not nn.Module.train or kind.eval is not nn.Module.eval for kind in kinds
    )


def _has_extra_state(module: nn.Module) -> bool:
    """Whether a state dict holds of a module what is no parameter and no buffer."""
    kind, plain = type(module), nn.Module
    return (
        kind.get_extra_state is not plain.get_extra_state
        and kind.set_extra_state is not plain.set_extra_state
    )


def _check_unchanged(model: nn.Module, tensors: Sequence[Tensor], memory: Sequence[Tensor]) -> None:
    """Raise where tensors are not what they were, each in its memory then."""
    named = (*model.named_parameters(), *model.named_buffers())
    names = [name for name, tensor in named for _ in parts_of(tensor)]
    pairs = zip(names, tensors, memory, strict=False)  # what shares their memory comes after them
    changed = [name for name, tensor, own in pairs if not same_bits(tensor.detach(), own)]
    if changed:
        raise CheckpointError(
            f"model.eval() changes {_some(changed)}, so that a checkpoint's weights would not be "
            "computed with as they were. Expected weights that do not depend on the mode: have "
            "adapters not merged into them (loralib: merge_weights=False)."
        )


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Give the borrowed model a checkpoint's weights; names, shapes and ties must agree."""
    state = model.state_dict()
    held = {**state, **fitted(model, checkpoint)}
    # What stays the same is not loaded: below adapters that is nearly all, and what quantised
    # layers hold beside their weights can often not be.
    changed = [name for name, value in held.items() if not _same(value, state[name])]
    if not changed:
        return
    some, alone = _with_neighbours(changed, held, state), _loads_entries_alone(model)
    try:
        try:
            # Hooks may look for all entries, and write to more than these show.
            _load(model, some if alone else held, state, alone)
        except RuntimeError:
            if alone:
                raise
            _load(model, some, state, alone)
    except RuntimeError as error:
        raise CheckpointError(
            f"{checkpoint.name} does not fit the model: {_misfit(model, held) or error}"
        ) from error
    _check_shared(model, held, checkpoint.name)
    if _overrides_modes(model):
        model.eval()  # what was computed from other weights may be dropped there


def _with_neighbours(
    changed: Sequence[str], held: Mapping[str, Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return entries of a state dict with those that have to be loaded together with them."""
    owners = {name.rpartition(".")[0] for name in changed}
    # Of tied weights the one that is loaded last counts.
    places = {place for name in changed for place in _storages(state[name])}
    return {
        name: value
        for name, value in held.items()
        if name.rpartition(".")[0] in owners or not places.isdisjoint(_storages(state[name]))
    }


def _load(
    model: nn.Module, entries: Mapping[str, Any], state: Mapping[str, Any], alone: bool
) -> None:
    """Load entries of a state dict into memory that is not the user's.

    Args:
        model: borrowed.
        entries: what to load.
        state: the model's own state dict.
        alone: whether nothing is written to but the tensors that the entries show.
    """
    tensors = _tensors(model)
    known = {_storage(tensor) for tensor in tensors}
    written = [_storages(state[name]) for name in entries]
    # An entry that shows none of the model's tensors was made of some of them.
    shown = alone and all(each and each <= known for each in written)
    places = set().union(*written) if shown else known
    _move(tensors, {id(tensor) for tensor in tensors if _storage(tensor) in places})
    lost = model.load_state_dict(entries, strict=False).unexpected_keys
    if lost:
        raise RuntimeError(f"the model has no way to take {_some(lost)}")


def _loads_entries_alone(model: nn.Module) -> bool:
    """Whether loading writes to the tensors that entries of a state dict show, and no others."""
    return not any(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or not type(module)._load_from_state_dict.__module__.startswith("torch.nn.")
        for module in model.modules()
    )


def _misfit(model: nn.Module, held: dict[str, Any]) -> str | None:
    """Return which values have other shapes than the model's tensors, None if none has."""
    prefix = wrapper_prefix(model)
    shapes = {
        clean_name(name, prefix): (tuple(held[name].shape), tuple(own.shape))
        for name, own in model.state_dict().items()
        if isinstance(own, Tensor) and isinstance(held[name], Tensor)
    }
    misfits = [
        f"{name!r} has shape {got}, expected {expected}"
        for name, (got, expected) in shapes.items()
        if got != expected
    ]
    if not misfits:
        return None
    more = f"; and {len(misfits) - 3} more" if len(misfits) > 3 else ""
    return (
        f"{'; '.join(misfits[:3])}{more}. Pass a model of the architecture that was trained, or "
        "its checkpoints."
    )


def _check_shared(model: nn.Module, held: dict[str, Any], checkpoint: str) -> None:
    """Raise where what was loaded under one name was overwritten by what another name holds."""
    sharing: dict[int, dict[str, Tensor]] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and value.layout == torch.strided:
            sharing.setdefault(_storage(value), {})[name] = value
    for group in (group for group in sharing.values() if len(group) > 1):
        for name, value in group.items():
            if same_bits(value, held[name].to(value)):
                continue
            prefix = wrapper_prefix(model)
            others = _some([clean_name(other, prefix) for other in group if other != name])
            raise CheckpointError(
                f"{checkpoint} holds other values for {clean_name(name, prefix)!r} than for "
                f"{others}, which share memory in the model. Expected equal values: pass a model "
                "that ties its weights as the one that was trained does."
            )


def fitted(model: nn.Module, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint's values by the names of the model's state dict, or raise.

    A name may be missing where the model's tensor is another name's too: safetensors files hold
    tied weights once. What wrappers hold beside the model is left out.
    """
    prefix = wrapper_prefix(model)
    state = {name: own for name, own in model.state_dict().items() if name.startswith(prefix)}
    own = {name: clean_name(name, prefix) for name in state}
    known = set(own.values())
    weights = _without_count(checkpoint.weights)
    given = matching_names(weights, known)
    values = {given[name]: value for name, value in weights.items()}
    shards = [name for name, value in values.items() if hasattr(value, "to_local")]
    if shards:
        raise CheckpointError(
            f"{checkpoint.name} holds one process' shards of {_some(shards)}, expected whole "
            "tensors: torch.distributed.checkpoint.state_dict gives them with full_state_dict=True."
        )
    held = {name: values[bare] for name, bare in own.items() if bare in values}
    places = {_place(state[name]): name for name in held}
    missing = []
    for name in state:
        if name not in held:
            other = places.get(_place(state[name]))
            if other is None:
                missing.append(own[name])
            else:
                held[name] = held[other]
    unexpected = [name for name in values if name not in known]
    if missing or unexpected:
        lacks = [f"it lacks {_some(missing)}"] * bool(missing)
        holds = [f"it holds {_some(unexpected)}, which the model does not have"] * bool(unexpected)
        index = index_of(checkpoint.name)
        remedy = ""
        if index is not None:
            remedy = f" It is one file of several: pass their index, {index}."
        elif missing:
            remedy = (
                " What was never trained and therefore not saved, such as the weights below "
                "adapters, is not filled in by guessing: pass gs.Checkpoints("
                "[{**model.state_dict(), **saved}, ...], lr=...), where saved has the names of "
                "model.state_dict()."
            )
        if unexpected and any(hasattr(module, "peft_config") for module in model.modules()):
            remedy += (
                " peft saves adapters under names without the adapter's own: "
                "peft.set_peft_model_state_dict(model, saved) gives them to the model, whose "
                "state dict has the names, as help(gs.Checkpoints) shows."
            )
        raise CheckpointError(
            f"{checkpoint.name} does not fit the model: {', and '.join(lacks + holds)}. Expected "
            f"the state dict of a model of the same architecture.{remedy}"
        )
    return {name: held[name] for name in state}


def _without_count(weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return weights without the number of updates that AveragedModel keeps beside them."""
    others = {name: value for name, value in weights.items() if name != "n_averaged"}
    return others if all(name.startswith("module.") for name in others) else weights


def _tensors(model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers, and the tensors in attributes that share their memory."""
    own = [part for each in (*model.parameters(), *model.buffers()) for part in parts_of(each)]
    known = set(map(id, own))
    places = {_storage(tensor) for tensor in own}
    for module in model.modules():
        for name in kept_by(module):
            for tensor in tensors_kept(vars(module)[name]):
                if id(tensor) not in known and _storage(tensor) in places:
                    known.add(id(tensor))
                    own.append(tensor)
    return own


def _storages(value: Any) -> set[int]:
    """Return what memory an entry of a state dict lies in."""
    return {_storage(part) for part in parts_of(value)} if isinstance(value, Tensor) else set()


def _storage(tensor: Tensor) -> int:
    """Return what memory a tensor lies in; one that has none of its own stands for itself."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return tensor.untyped_storage()._cdata


def _place(value: Any) -> tuple:
    """Return which view of which memory a tensor is; what has no memory is a place of its own."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return (id(value),)
    places = [
        (part.data_ptr(), part.dtype, part.shape, part.stride(), part.device)
        for part in parts_of(value)
    ]
    return (id(value),) if any(address == 0 for address, *_ in places) else tuple(places)


def _same(value: Any, own: Any) -> bool:
    """Whether what a checkpoint holds is known to be what the model holds already."""
    if _place(value) == _place(own):
        return True
    if not (isinstance(value, Tensor) and isinstance(own, Tensor)) or value.device != own.device:
        return False
    wrapped = wraps_others(value) or wraps_others(own)
    return not wrapped and same_bits(value.detach(), own.detach())


def _move(tensors: Sequence[Tensor], chosen: set[int]) -> None:
    """Copy the memory of the chosen tensors; tensors that share memory still do afterwards.

    Sparse ones stay where they are: see ``_replace_sparse``.
    """
    sharing: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        sharing.setdefault(_storage(tensor), []).append(tensor)
    for group in sharing.values():
        if chosen.isdisjoint(map(id, group)) or group[0].layout != torch.strided:
            continue
        places = [(each.size(), each.stride(), each.storage_offset()) for each in group]
        whole = torch.empty(0, dtype=torch.uint8, device=group[0].device)
        memory = whole.set_(group[0].untyped_storage()).clone().untyped_storage()
        for tensor, (size, stride, offset) in zip(group, places, strict=True):
            tensor.data = tensor.new_empty(0).set_(memory, offset, size, stride)


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" * (len(names) > 4))


def weights_hash(model: nn.Module, checkpoint: Checkpoint) -> str:
    """Return a SHA-256 over names, shapes, dtypes and values of a checkpoint of a model."""
    content = ContentHash()
    prefix = wrapper_prefix(model)
    held = {clean_name(name, prefix): v for name, v in fitted(model, checkpoint).items()}
    content.add(dict(sorted(held.items())))
    return content.hexdigest()


def architecture_hash(model: nn.Module) -> str:
    """Return a SHA-256 over the model's modules and the shapes and dtypes of its tensors."""
    digest, prefix = hashlib.sha256(), wrapper_prefix(model)
    for name, module in model.named_modules():
        digest.update(f"{clean_name(name, prefix)} {type(module).__qualname__}".encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{clean_name(name, prefix)} {tuple(tensor.shape)} {tensor.dtype}".encode())
    return digest.hexdigest()
