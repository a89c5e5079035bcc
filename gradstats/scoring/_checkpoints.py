"""Checkpoints of one training run: their weights, one at a time, and their learning rates."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from gradstats._values import unlike_numbers
from gradstats._warnings import warn
from gradstats.errors import CheckpointError
from gradstats.scoring._checkpoint_files import (
    Content,
    find_files,
    parse,
    read_file,
    read_optimizer_beside,
)
from gradstats.scoring._rates import (
    REMEDY,
    Rates,
    check_rate,
    from_optimizer,
    from_patterns,
)
from gradstats.scoring._renamed import in_own_names


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, loaded.

    Attributes:
        name: its file, or its position in the list.
        weights: name → value.
        rates: its learning rates; None on the query side, which needs none.
    """

    name: str
    weights: Mapping[str, Any] = field(repr=False)
    rates: Rates | None


class Checkpoints:
    """The checkpoints of a training run with their learning rates, loaded one at a time.

        gs.Checkpoints("run/epoch-*.pt", lr="optimizer")
        gs.Checkpoints([early, late], lr=[0.1, 0.01])          # state dicts in memory
        gs.Checkpoints("run/*.safetensors", lr={"head.*": 0.1, "body.*": 0.01})
        gs.Checkpoints("run/checkpoint-*/model.safetensors", lr="optimizer")   # transformers
        gs.Checkpoints("run/checkpoint-*/adapter_model.safetensors", lr="optimizer")   # and peft
        gs.Checkpoints([{**model.state_dict(), **load_file(f)} for f in saved], lr=1e-4)

    Each checkpoint must hold the model's whole state dict; only adapters of peft may stand alone,
    if nothing else is trained. The last line takes what was neither trained nor saved from the
    model itself, which needs no memory; the saved names must be the model's.

    Args:
        sources: a glob (matches in natural order: epoch-2 before epoch-10), a file, a state dict,
            or a list of these. Files are safetensors, or torch files of tensors and plain values
            (read with ``weights_only=True``: nothing is unpickled), or, for weights in several
            files, the index that lists them (``*.index.json``). Weights may be at the top level or
            under "model", "model_state_dict" or "state_dict"; the optimizer's state under
            "optimizer", "optimizer_state_dict" or "optimizer_states", or in a separate file of the
            same folder, ``optimizer.pt`` (transformers) or ``optimizer.bin`` (accelerate). A folder
            with such a file must hold no other checkpoint: none in the list, and none whose file
            name differs only in numbers.
        lr: the learning rates η_c. A number; a list with one entry per checkpoint; a mapping
            {fnmatch pattern over parameter names: number} in place of a number; or "optimizer",
            which reads the rate of each parameter group from the optimizer's state in the
            checkpoint. If the rates of groups differ, build the optimizer from
            ``model.named_parameters()``; otherwise it is not known which group a parameter is in.
            An optimizer with ``maximize=True`` is refused: whether it raised the losses or their
            negatives is not known; so is one that scales its steps by an estimate (Prodigy,
            D-Adaptation). A checkpoint whose rates are all zero gives a warning.

    Raises:
        CheckpointError: no file matches, a file is listed twice, or a learning rate is missing.
            When a checkpoint is loaded: it cannot be read, does not fit the model, lacks a learning
            rate, or holds the same weights as another in the list and would count twice; or the
            rates of all checkpoints are zero.

    Cost:
        A file is read into host memory each time its checkpoint is needed, and not before. State
        dicts are kept as they are.

    Source:
        The sum over checkpoints weighted by learning rates: Pruthi et al., arXiv 2002.08484.
    """

    def __init__(self, sources: Any, *, lr: Any = None):
        self.names, self._sources = zip(*_listed(sources), strict=True)
        _check_once(self.names, self._sources)
        if lr is None:
            raise CheckpointError(f"the checkpoints have no learning rates (lr=None). {REMEDY}")
        self._rates = _rates_of(lr, self.names)

    def __len__(self) -> int:
        return len(self._sources)

    def __repr__(self) -> str:
        pairs = [f"{name}: {rate}" for name, rate in zip(self.names, self._rates, strict=True)]
        if len(pairs) > 5:
            pairs[2:-2] = [f"{len(pairs) - 4} more"]
        return f"Checkpoints({', '.join(pairs)})"

    def load(self, index: int, model: nn.Module, names: Sequence[str]) -> Checkpoint:
        """Return one checkpoint with the rates of the named parameters of a model.

        Args:
            index: position of the checkpoint.
            model: the model that the weights are for.
            names: the parameters whose rates are needed.

        Returns:
            Checkpoint: ``name``, ``weights`` and ``rates``.

        Raises:
            CheckpointError: see the class.
        """
        name, content = self.names[index], _read(self._sources[index])
        rates = self._rates_at(index, content, model, names)
        if rates == 0:
            every = (
                self._rates_at(each, _read(source), model, names)
                for each, source in enumerate(self._sources)
            )
            if all(each == 0 for each in every):
                raise _all_zero()
            warn(
                f"the learning rate of every parameter is zero in {name}, so it adds nothing to "
                "any score. Leave it out, or pass the rates of the steps before it with lr=.",
            )
        return Checkpoint(name, in_own_names(model, content.weights), rates)

    def _rates_at(
        self, index: int, content: Content, model: nn.Module, names: Sequence[str]
    ) -> Rates:
        name, rate = self.names[index], self._rates[index]
        if rate == "optimizer":
            optimizers = content.optimizers or self._optimizers_beside(index)
            return from_optimizer(optimizers, model, names, name)
        if isinstance(rate, Mapping):
            return from_patterns(rate, model, names, name)
        return rate

    def _optimizers_beside(self, index: int) -> tuple[Any, ...]:
        """Return the optimizers' states in the weights' folder, if it holds no other checkpoint."""
        folders = [each.parent if isinstance(each, Path) else None for each in self._sources]
        file = self._sources[index]
        if not isinstance(file, Path) or folders.count(file.parent) > 1 or _is_of_several(file):
            return ()
        return read_optimizer_beside(file)


def _is_of_several(file: Path) -> bool:
    """Whether a file beside a checkpoint differs from it only in the numbers of its name."""
    names = [each.name for each in file.parent.iterdir() if each.name != file.name]
    return _unnumbered(file.name) in map(_unnumbered, names)


def _unnumbered(name: str) -> str:
    """Return a name without its numbers: model_1.safetensors becomes model.safetensors."""
    return re.sub(r"[-_]?\d+", "", name)


class WeightsOnly:
    """The query side's checkpoints, whose learning rates play no part.

    Args:
        sources: as for ``Checkpoints``, or a ``Checkpoints``.
        train: the train side's; each goes with the one at the same position.
    """

    def __init__(self, sources: Any, train: Checkpoints):
        if isinstance(sources, Checkpoints):
            self.names, self._sources = sources.names, sources._sources
        else:
            self.names, self._sources = zip(*_listed(sources), strict=True)
        if len(self._sources) != len(train):
            raise CheckpointError(
                f"there are {len(train)} checkpoints and {len(self._sources)} query checkpoints, "
                "expected equal numbers: each query checkpoint goes with the checkpoint at its "
                "position."
            )

    def load(self, index: int, model: nn.Module) -> Checkpoint:
        """Return one checkpoint for a model."""
        weights = in_own_names(model, _read(self._sources[index]).weights)
        return Checkpoint(self.names[index], weights, None)


def _read(source: Path | Content) -> Content:
    """Return the content of a file, or of a state dict in memory."""
    return read_file(source) if isinstance(source, Path) else source


def _listed(sources: Any) -> list[tuple[str, Path | Content]]:
    """Return (name, file or content) for each checkpoint."""
    _check_ordered(sources, "the list of checkpoints")
    entries = _one_by_one(sources)
    listed: list[tuple[str, Path | Content]] = []
    for number, source in enumerate([sources] if entries is None else entries):
        if isinstance(source, Mapping):
            name = f"state dict {number}"
            listed.append((name, parse(source, name)))
        elif isinstance(source, (str, Path)):
            # Absolute: the working directory may change before a file is read.
            listed.extend((str(path), path.absolute()) for path in find_files(source))
        else:
            raise CheckpointError(
                f"checkpoint {number} is {type(source).__name__}, expected a file, a glob or a "
                "state dict. For the weights that a model has now pass [model.state_dict()]."
            )
    if not listed:
        raise CheckpointError(
            "there are no checkpoints: the list is empty. Expected at least one, such as "
            "[model.state_dict()] for the weights that a model has now."
        )
    return listed


def _one_by_one(given: Any) -> list[Any] | None:
    """Return the entries of an iterable argument; None if it is a single source or rate."""
    # Iterating over a tensor may fail, and gives no checkpoints.
    if isinstance(given, (str, bytes, Path, Mapping, Tensor)):
        return None
    try:
        entries = iter(given)
    except TypeError:
        return None
    return list(entries)


def _check_ordered(given: Any, what: str) -> None:
    """Raise for sets: the order says which rate or query checkpoint goes with a checkpoint."""
    if isinstance(given, (set, frozenset)):
        raise CheckpointError(
            f"{what} is a {type(given).__name__}, which has no order, expected a list: each "
            "learning rate goes with the checkpoint at its position."
        )


def _check_once(names: Sequence[str], sources: Sequence[Path | Content]) -> None:
    """Raise where a file is listed twice."""
    seen: dict[Path, str] = {}
    for name, source in zip(names, sources, strict=True):
        if isinstance(source, Path):
            file = source.resolve()
            if file in seen:
                also = "" if seen[file] == name else f", also as {seen[file]}"
                raise CheckpointError(
                    f"the checkpoint {name} is listed more than once{also}, so it would count more "
                    "than once. List each file once, with globs that do not overlap."
                )
            seen[file] = name


def _rates_of(lr: Any, names: Sequence[str]) -> list[Any]:
    """Return one entry for each checkpoint: a float, a mapping, or "optimizer"."""
    _check_ordered(lr, "lr")
    if isinstance(lr, Tensor) and (found := unlike_numbers(lr)) is not None:
        raise CheckpointError(f"lr is {found}, expected numbers. {REMEDY}")
    if isinstance(lr, (Tensor, np.ndarray)):
        lr = lr.tolist()
    entries = _one_by_one(lr)
    if entries is None:
        entries = [lr] * len(names)
    if len(entries) != len(names):
        raise CheckpointError(
            f"lr lists {len(entries)} learning rates, expected one for each of the {len(names)} "
            f"checkpoints: {', '.join(names[:6])}{' …' if len(names) > 6 else ''}."
        )
    checked: list[Any] = []
    for entry, name in zip(entries, names, strict=True):
        if isinstance(entry, Mapping):
            for key in entry:
                if not isinstance(key, str):
                    raise CheckpointError(
                        f"lr holds {reprlib.repr(key)}, expected fnmatch patterns over parameter "
                        "names: {pattern: rate}."
                    )
            checked.append({key: check_rate(rate, f"{key!r}") for key, rate in entry.items()})
        elif isinstance(entry, str) and entry == "optimizer":
            checked.append(entry)
        else:
            checked.append(check_rate(entry, name))
    if all(rate == 0 for rate in checked):
        raise _all_zero()
    return checked


def _all_zero() -> CheckpointError:
    return CheckpointError(f"every learning rate is zero, so every score would be too. {REMEDY}")
