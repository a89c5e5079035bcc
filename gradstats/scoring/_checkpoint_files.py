"""Reading untrusted checkpoints: tensors and plain values, never pickled objects."""

from __future__ import annotations

import glob
import json
import pickle
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from gradstats.errors import CheckpointError

# The files beside the weights in which the Trainer of transformers and accelerate's save_state keep
# optimizers' states; accelerate numbers them from the second on.
OPTIMIZER_FILE = re.compile(r"optimizer(_\d+)?\.(pt|bin)")

# Weights in several files, as large models have them: model-00001-of-00004.safetensors, …, and
# model.safetensors.index.json, which lists them.
INDEX_SUFFIX = ".index.json"
PART = re.compile(r"-\d{5}-of-\d{5}(?=\.[a-z]+$)")

# The usual names of files of weights.
WEIGHTS_FILES = ("model.safetensors", f"model.safetensors{INDEX_SUFFIX}", "pytorch_model.bin")

# Where training loops keep the weights and the optimizer's state in one file.
WEIGHTS_KEYS = ("model", "model_state_dict", "state_dict")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optimizer_states")


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds.

    Attributes:
        weights: name → value, as a model's ``state_dict()`` gives them.
        optimizers: the states of optimizers, unchecked.
    """

    weights: Mapping[str, Any]
    optimizers: tuple[Any, ...] = ()


def find_files(pattern: str | Path) -> list[Path]:
    """Return the files that a path or a glob names, in natural order."""
    if Path(pattern).is_file():
        return [Path(pattern)]
    paths = [Path(path) for path in glob.glob(str(pattern), recursive=True)]
    files = sorted((path for path in paths if path.is_file()), key=_natural)
    if Path(pattern).is_dir() or (paths and not files):
        if sharded := next((path for path in paths if any(path.glob("*.distcp"))), None):
            raise CheckpointError(
                f"{sharded} is a folder of torch.distributed.checkpoint, expected a file of whole "
                "tensors. Make one of it with dcp_to_torch_save(folder, file) of "
                "torch.distributed.checkpoint.format_utils."
            )
        # Weights lie in the folder itself, or, where a run has a folder per checkpoint, one below.
        usual = (*WEIGHTS_FILES, "*.safetensors", *(f"*/{name}" for name in WEIGHTS_FILES))
        known = (name for name in usual if any(any(path.glob(name)) for path in paths))
        raise CheckpointError(
            f"{pattern} matches folders only, expected files. Pass a glob, such as "
            f"'{Path(pattern) / next(known, '*.pt')}'."
        )
    if not files:
        raise CheckpointError(
            f"no checkpoint matches {str(pattern)!r}, looking from {Path.cwd()}. Expected a file, "
            "or a glob that matches at least one."
        )
    beside = [path for path in files if OPTIMIZER_FILE.fullmatch(path.name)]
    if beside and len(beside) < len(files):
        weights = (name for name in WEIGHTS_FILES if (beside[0].parent / name).is_file())
        raise CheckpointError(
            f"{pattern} also matches {beside[0]}, which holds an optimizer's state, expected files "
            "of weights only. Pass a glob that matches only these, such as "
            f"'{Path(pattern).parent / next(weights, '*.safetensors')}'."
        )
    return files


def _natural(path: Path) -> list[tuple[int, int | str]]:
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts]


def read_file(path: Path) -> Content:
    """Return what a safetensors or torch file holds, without unpickling objects."""
    if path.name.endswith(INDEX_SUFFIX):
        weights: dict[str, Any] = {}
        for part in _parts(path):
            weights.update(read_file(part).weights)
        return Content(weights)
    try:
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, framework="pt") as file:
                return Content({name: file.get_tensor(name) for name in file.keys()})
    except Exception as error:
        raise _unreadable(path, error) from error
    return parse(_load(path), str(path))


def index_of(path: str) -> Path | None:
    """Return the index of the checkpoint that a file is one part of; None if it is whole."""
    whole = PART.sub("", path)
    index = Path(f"{whole}.index.json")
    return index if whole != path and index.is_file() else None


def _parts(index: Path) -> list[Path]:
    """Return the files that an index lists, all in its own folder."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        parts = sorted(index.with_name(name) for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not the index of a checkpoint in several files ({type(error).__name__}: "
            f"{error}), expected the names of files in its folder under 'weight_map'."
        ) from error
    missing = [p.name for p in parts if p.name.endswith(INDEX_SUFFIX) or not p.is_file()]
    if missing or not parts:
        raise CheckpointError(
            f"{index} lists {missing[:4] or 'no files'}, expected files of weights beside it. Copy "
            "all parts of the checkpoint into one folder."
        )
    return parts


def read_optimizer_beside(path: Path) -> tuple[Any, ...]:
    """Return the optimizers' states in the files beside a checkpoint's weights."""
    beside = (file for file in path.parent.iterdir() if OPTIMIZER_FILE.fullmatch(file.name))
    # Memory mapped: moments and the like, which are as large as the weights, are never read.
    return tuple(_load(file, mmap=True) for file in beside)


def _load(path: Path, **options: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, **options)
    except Exception as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {type(error).__name__}: {_reason(error)}\n"
        "Expected a safetensors file, or a torch file of tensors and plain values; other objects "
        "are not unpickled, because that may run code. Save model.state_dict() and "
        "optimizer.state_dict(), or read a file that you trust yourself: "
        "gs.Checkpoints([torch.load(path, weights_only=False), ...], lr=...)."
    )


def _reason(error: Exception) -> str:
    """Return the first line of an error's message."""
    # torch.load wraps the reason in advice to read the file with weights_only=False.
    reason = error.__context__ if isinstance(error, pickle.UnpicklingError) else None
    return next(iter(str(reason or error).strip().splitlines()), "")


def parse(content: Any, name: str) -> Content:
    """Return the content of a state dict, or of a dict with one and perhaps an optimizer's."""
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{name} holds {type(content).__name__}, expected a state dict, or a dict with one "
            f"under one of {WEIGHTS_KEYS}."
        )
    held = [key for key in WEIGHTS_KEYS if isinstance(content.get(key), Mapping)]
    if len(held) > 1:
        raise CheckpointError(
            f"{name} holds weights under each of {held}, expected one of these. Pass the state "
            "dict that you mean: gs.Checkpoints([torch.load(path, weights_only=True)[key], ...], "
            "lr=...)."
        )
    weights = content[held[0]] if held else content
    if not any(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(
            f"{name} holds no weights: its keys are {list(content)[:8]}, expected parameter names, "
            f"or a state dict under one of {WEIGHTS_KEYS}. If weights and optimizer have other "
            "keys, load the file with torch.load(path, weights_only=True) and pass "
            "gs.Checkpoints([{'model': ..., 'optimizer': ...}, ...], lr=\"optimizer\")."
        )
    for key in weights:
        if not isinstance(key, str):
            raise CheckpointError(
                f"{name} has the key {reprlib.repr(key)} beside its weights, expected only names "
                "of parameters and buffers, as in model.state_dict()."
            )
    if not held:
        return Content(weights)
    states = (content.get(key) for key in OPTIMIZER_KEYS)
    return Content(weights, tuple(state for state in states if state is not None))
