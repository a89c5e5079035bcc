"""A checkpoint's weights: matched to a model, loaded into it, and identified by a hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradstats._comparison import same_bits
from gradstats.capture._selection import (
    clean_name,
    is_adapted,
    matching_names,
    quoted,
    wrapper_prefix,
)
from gradstats.capture.operations._memory import parts_of, wraps_others
from gradstats.errors import CheckpointError
from gradstats.scoring._borrowed import memory_of, model_tensors, move, overrides_modes
from gradstats.scoring._checkpoint_files import index_of
from gradstats.scoring._checkpoints import Checkpoint
from gradstats.scoring._content import ContentHash
from gradstats.scoring._renewal import Renewal


def load_weights(model: nn.Module, checkpoint: Checkpoint, renewal: Renewal) -> None:
    """Give the borrowed model a checkpoint's weights; names, shapes and ties must agree.

    Whatever the model has computed from other weights, in forwards or when they were loaded, is
    undone before.
    """
    if not any(_changed(model.state_dict(), fitted(model, checkpoint))):
        return
    renewal.begin_anew()
    state, entries = model.state_dict(), fitted(model, checkpoint)
    target = {**state, **entries}
    # Entries that stay the same are not loaded: with adapters these are nearly all, and what
    # quantised layers hold beside their weights often cannot be loaded.
    changed = list(_changed(state, entries))
    some, plain = _with_neighbours(changed, target, state), _loads_plainly(model)
    try:
        try:
            # Loading hooks may expect all entries, and may write to other tensors too.
            _load(model, some if plain else target, state, plain)
        except RuntimeError:
            if plain:
                raise
            _load(model, some, state, plain)
    except RuntimeError as error:
        raise CheckpointError(
            f"{checkpoint.name} does not fit the model: {_misfit(model, target) or error}"
        ) from error
    _check_shared(model, target, checkpoint.name)
    if overrides_modes(model):
        model.eval()  # may drop what was computed from other weights


def _changed(state: Mapping[str, Any], entries: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a checkpoint's entries that may differ from the model's."""
    return (name for name, value in entries.items() if not _same(value, state[name]))


def _with_neighbours(
    changed: Sequence[str], target: Mapping[str, Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the changed entries with those of the same module or the same memory.

    All names of tied weights must be loaded: the last one that is loaded counts.
    """
    owners = {name.rpartition(".")[0] for name in changed}
    memory = {each for name in changed for each in _storages(state[name])}
    return {
        name: value
        for name, value in target.items()
        if name.rpartition(".")[0] in owners or not memory.isdisjoint(_storages(state[name]))
    }


def _load(
    model: nn.Module, entries: Mapping[str, Any], state: Mapping[str, Any], plain: bool
) -> None:
    """Load entries of a state dict into memory that is not the user's.

    Args:
        model: borrowed.
        entries: what to load.
        state: the model's own state dict.
        plain: see ``_loads_plainly``.
    """
    tensors = model_tensors(model)
    known = {memory_of(tensor) for tensor in tensors}
    written = [_storages(state[name]) for name in entries]
    # A state dict may hold tensors made from the model's: then it is not known which are written.
    is_known = plain and all(each and each <= known for each in written)
    memory = set().union(*written) if is_known else known
    move(tensors, {id(tensor) for tensor in tensors if memory_of(tensor) in memory})
    lost = model.load_state_dict(entries, strict=False).unexpected_keys
    if lost:
        raise RuntimeError(f"the model has no way to take {quoted(lost)}")


def _loads_plainly(model: nn.Module) -> bool:
    """Whether loading an entry writes to the tensor that the state dict holds, and to no other."""
    return not any(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or not type(module)._load_from_state_dict.__module__.startswith("torch.nn.")
        for module in model.modules()
    )


def _misfit(model: nn.Module, target: dict[str, Any]) -> str | None:
    """Return which values have other shapes than the model's tensors; None if none has."""
    prefix = wrapper_prefix(model)
    shapes = {
        clean_name(name, prefix): (tuple(target[name].shape), tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor) and isinstance(target[name], Tensor)
    }
    misfits = [
        f"{name!r} has shape {got}, expected {expected}"
        for name, (got, expected) in shapes.items()
        if got != expected
    ]
    if not misfits:
        return None
    more = f"; and {len(misfits) - 3} more" if len(misfits) > 3 else ""
    return f"{'; '.join(misfits[:3])}{more}. Pass a model of the architecture that was trained."


def _check_shared(model: nn.Module, target: dict[str, Any], checkpoint: str) -> None:
    """Raise if names that share memory in the model have different values in a checkpoint."""
    sharing: dict[int, dict[str, Tensor]] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and value.layout == torch.strided:
            sharing.setdefault(memory_of(value), {})[name] = value
    for group in (group for group in sharing.values() if len(group) > 1):
        for name, value in group.items():
            if same_bits(value, target[name].to(value)):
                continue
            prefix = wrapper_prefix(model)
            tied = quoted([clean_name(other, prefix) for other in group if other != name])
            raise CheckpointError(
                f"{checkpoint} holds other values for {clean_name(name, prefix)!r} than for "
                f"{tied}, which share memory in the model. Expected equal values: pass a model "
                "that ties the same weights as the one that was trained."
            )


def fitted(model: nn.Module, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint's values by the names of the model's state dict, or raise.

    One name of tied weights is enough, as in safetensors files. Values that belong to a wrapper
    around the model are left out.
    """
    prefix = wrapper_prefix(model)
    state = {name: own for name, own in model.state_dict().items() if name.startswith(prefix)}
    own = {name: clean_name(name, prefix) for name in state}
    known = set(own.values())
    # AveragedModel keeps the count of its updates beside the weights.
    counts = {"n_averaged"} - known
    weights = {name: value for name, value in checkpoint.weights.items() if name not in counts}
    given = matching_names(weights, known)
    values = {given[name]: value for name, value in weights.items()}
    shards = [name for name, value in values.items() if hasattr(value, "to_local")]
    if shards:
        raise CheckpointError(
            f"{checkpoint.name} holds one process' shards of {quoted(shards)}, expected whole "
            "tensors: save them by torch.distributed.checkpoint.state_dict with "
            "full_state_dict=True."
        )
    held = {name: values[bare] for name, bare in own.items() if bare in values}
    _check_floating(model, state, held, checkpoint.name)
    shared = {_place(state[name]): value for name, value in held.items()}
    places = {name: _place(state[name]) for name in state if name not in held}
    held |= {name: shared[place] for name, place in places.items() if place in shared}
    missing = [own[name] for name in state if name not in held]
    unexpected = [name for name in values if name not in known]
    if missing or unexpected:
        raise _unfitting(model, checkpoint.name, missing, unexpected)
    return {name: held[name] for name in state}


def _check_floating(
    model: nn.Module, state: Mapping[str, Any], held: Mapping[str, Any], checkpoint: str
) -> None:
    """Raise if a parameter would be given integers, such as quantised weights without a scale."""
    if not _loads_plainly(model):
        return  # the model's own loading may know what they stand for
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in held.items():
        own = state[name]
        if name not in parameters or not isinstance(value, Tensor):
            continue
        inexact = own.is_floating_point() or own.is_complex()
        fits = value.is_floating_point() or (own.is_complex() and value.is_complex())
        if inexact and not fits:
            raise CheckpointError(
                f"{checkpoint} does not fit the model: {clean_name(name, wrapper_prefix(model))!r} "
                f"has dtype {value.dtype}, expected {own.dtype}: converting it may give other "
                "weights. Pass the weights in floating point."
            )


def _unfitting(
    model: nn.Module, checkpoint: str, missing: list[str], unexpected: list[str]
) -> CheckpointError:
    """Return the error for names that a checkpoint lacks, or that the model does not have."""
    lacks = [f"it lacks {quoted(missing)}"] * bool(missing)
    holds = [f"it holds {quoted(unexpected)}, which the model does not have"] * bool(unexpected)
    remedy = ""
    adapted = is_adapted(model.modules())
    if unexpected and not adapted and all(name.startswith("base_model.") for name in unexpected):
        remedy = (
            " These are adapters of peft, which the model lacks: pass the model with them, as it "
            "was trained, or peft.PeftModel.from_pretrained(model, folder, is_trainable=True)."
        )
    elif (index := index_of(checkpoint)) is not None:
        remedy = f" It is one file of several: pass their index, {index}."
    elif prefix := _before_each(missing, unexpected):
        remedy = (
            f" Its names are the model's with {prefix!r} before them: pass state dicts without "
            "that prefix, or the module that was saved, with a loss_fn that calls it."
        )
    elif prefix := _before_each(unexpected, missing):
        remedy = (
            f" Its names are the model's without {prefix!r} before them: pass "
            f"model.{prefix.rstrip('.')}, with a loss_fn that calls it."
        )
    elif missing:
        remedy = (
            " If these were not saved because they were not trained, pass "
            "gs.Checkpoints([{**model.state_dict(), **saved}, ...], lr=...), where saved has the "
            "names of model.state_dict()."
        )
    if adapted:
        remedy += (
            " If adapters of peft are all that is trained, pass peft's files unchanged. Otherwise "
            "load them with peft.set_peft_model_state_dict(model, saved) and pass "
            "model.state_dict()."
        )
    return CheckpointError(
        f"{checkpoint} does not fit the model: {', and '.join(lacks + holds)}. Expected the state "
        f"dict of a model of the same architecture.{remedy}"
    )


def _before_each(names: Sequence[str], longer: Sequence[str]) -> str:
    """Return the prefix that turns all names into names of another list; '' if there is none."""
    for name in longer if names else ():
        prefix = name.removesuffix(names[0])
        if prefix.endswith(".") and {prefix + n for n in names} <= {*longer}:
            return prefix
    return ""


def _storages(value: Any) -> set[int]:
    """Return identifiers of the memory that an entry of a state dict lies in."""
    return {memory_of(part) for part in parts_of(value)} if isinstance(value, Tensor) else set()


def _place(value: Any) -> tuple:
    """Return what identifies a view of memory; a value without memory identifies itself."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return (id(value),)
    return tuple(
        (part.data_ptr(), part.dtype, part.shape, part.stride(), part.device)
        for part in parts_of(value)
    )


def _same(value: Any, own: Any) -> bool:
    """Whether a checkpoint's value is known to equal the model's."""
    if _place(value) == _place(own):
        return True
    if not (isinstance(value, Tensor) and isinstance(own, Tensor)) or value.device != own.device:
        return False
    wrapped = wraps_others(value) or wraps_others(own)
    return not wrapped and same_bits(value.detach(), own.detach())


def weights_hash(model: nn.Module, checkpoint: Checkpoint) -> str:
    """Return a SHA-256 over names, shapes, dtypes and values of a checkpoint of a model."""
    content = ContentHash()
    prefix = wrapper_prefix(model)
    values = {clean_name(name, prefix): v for name, v in fitted(model, checkpoint).items()}
    content.add(dict(sorted(values.items())))
    return content.hexdigest()


def architecture_hash(model: nn.Module) -> str:
    """Return a SHA-256 over the model's modules and the shapes and dtypes of its tensors."""
    digest, prefix = hashlib.sha256(), wrapper_prefix(model)
    for name, module in model.named_modules():
        digest.update(f"{clean_name(name, prefix)} {type(module).__qualname__}".encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{clean_name(name, prefix)} {tuple(tensor.shape)} {tensor.dtype}".encode())
    return digest.hexdigest()
