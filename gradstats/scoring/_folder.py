"""A folder of results that calls can resume: its manifest, and its checkpoints' tiles."""

from __future__ import annotations

import errno
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradstats._warnings import warn
from gradstats.errors import StoreError
from gradstats.scoring._tiles import DAMAGED, Tiles, Tiling, cannot_write

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MANIFEST = "manifest.json"
FORMAT = 2
# The kind of a folder that holds lists and no matrix.
STRONGEST = "strongest influence"
# Kinds of results, as manifests call them: what writes them, and what reads them.
KINDS = {
    "influence": ("gs.influence(out=...)", "gs.InfluenceScores.load"),
    STRONGEST: ("gs.influence(top_k=..., out=...)", "gs.TopScores.load"),
    "self-influence": ("gs.self_influence(out=...)", "gs.SelfInfluence.load"),
}


def versions() -> dict[str, str]:
    """Return the versions that the bits of a result depend on."""
    import gradstats

    return {
        "gradstats": gradstats.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


class Folder:
    """A folder of results with a manifest."""

    def __init__(self, path: Path):
        self.path = path

    def begin(
        self, description: dict[str, Any], ids: Mapping[str, np.ndarray], resume: bool
    ) -> None:
        """Make the folder, or check that what it holds belongs to a call.

        Args:
            description: what the results belong to; the manifest must hold the same.
            ids: file name → ids, written beside the manifest.
            resume: whether to continue with results that are there.

        Raises:
            StoreError: if the folder holds something else, with the differences.
        """
        path, description = self.path, {"format": FORMAT, **json.loads(json.dumps(description))}
        try:
            path.mkdir(parents=True, exist_ok=True)
            temporary = (_lock(path).name, _draft(path / MANIFEST).name)
            files = [each.name for each in path.iterdir() if each.name not in temporary]
            # Asked after listing: another process that makes the folder writes its manifest first.
            if files and not (path / MANIFEST).exists():
                raise StoreError(
                    f"{path} is not empty and has no {MANIFEST}, so it holds something other than "
                    "scores. Name another folder with out=."
                )
            with locked(path):
                if (path / MANIFEST).exists():
                    self._check(description, resume)
                else:
                    self._write({**description, "checkpoints": {}})
                # Also where the manifest exists: a kill may have come before the ids were written,
                # and their files may have been damaged. Its hashes cover the ids.
                for name, values in ids.items():
                    if not _holds(path / f"{name}.npy", values):
                        write_whole(path / f"{name}.npy", partial(np.save, arr=values))
        except OSError as error:
            raise StoreError(
                f"{path} cannot be used: {error.strerror}. Name a folder that can be written."
            ) from error

    def prepare(
        self, entry: dict[str, Any], circumstances: dict[str, str], tiling: Tiling
    ) -> Tiles:
        """Return the tiles of a checkpoint, made or checked; one process does this for all.

        Args:
            entry: name, weights, query_weights, rates, first_losses.
            circumstances: what the bits of tiles depend on; the same for all of a checkpoint.
            tiling: how the arrays divide into tiles.
        """
        entry = json.loads(json.dumps(entry))
        name, folder = entry["name"], f"checkpoint-{entry['weights'][:12]}"
        with locked(self.path):
            manifest = read_manifest(self.path)
            known = manifest["checkpoints"]
            if folder in known:
                held = {key: known[folder].get(key) for key in entry if key != "name"}
                self._refuse(_differences(held, {key: entry[key] for key in held}), name)
            tiles = Tiles(self.path / folder, tiling)
            tiles.create_or_check()
            if folder in known and tiles.done.any():
                if not tiles.done.all():
                    self.check_circumstances(known[folder]["circumstances"], circumstances, name)
            else:
                names = [each["name"] for key, each in known.items() if key != folder]
                if name in names and Path(name).is_file():
                    warn(
                        f"{self.path} also holds scores of {name} at other weights, which the file "
                        "had before, and load() adds up both. Name another folder with out= if "
                        "only one of them counts.",
                    )
                # These circumstances count: no tile was computed under those of an earlier call.
                known[folder] = {**entry, "circumstances": circumstances}
                self._write(manifest)
        return tiles

    def check_circumstances(self, held: dict[str, str], now: dict[str, str], what: str) -> None:
        """Raise if unfinished results were computed under other circumstances."""
        self._refuse(_differences(held, now), what)

    def _check(self, description: dict[str, Any], resume: bool) -> None:
        held = read_manifest(self.path)
        del held["checkpoints"]
        # Results of another kind differ in everything: their kind says enough.
        of_kind = _differences(held.get("kind"), description.get("kind"), "kind")
        self._refuse(of_kind or _differences(held, description), "this call")
        if not resume:
            raise StoreError(
                f"{self.path} already holds results of this call, and resume=False. Pass "
                "resume=True to continue with them, or name another folder with out=."
            )

    def _refuse(self, differences: list[str], what: str) -> None:
        if differences:
            listed = "\n  ".join(differences)
            raise StoreError(
                f"{self.path} holds results that do not belong to {what}:\n  {listed}\nNothing was "
                "changed. Name another folder with out=, or call with the same data (a hash is of "
                "their contents), model and options as before."
            )

    def _write(self, manifest: dict[str, Any]) -> None:
        text = json.dumps(manifest, indent=2) + "\n"
        write_whole(self.path / MANIFEST, lambda file: file.write(text.encode()))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time change a folder; a killed one releases its lock.

    Where a file system has no such locks (Windows, some networks), everything else works, and a
    warning asks for one process at a time.
    """
    try:
        file = _lock(path).open("ab")
    except OSError as error:
        raise cannot_write(_lock(path), error) from error
    with file:
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            warn(
                f"{path} cannot be locked here ({error.strerror}): let only one process at a time "
                "add to this folder.",
            )
        yield


def read_manifest(path: Path) -> dict[str, Any]:
    """Return what a folder's manifest says."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise StoreError(
                f"{path} was written by another version of gradstats (format "
                f"{manifest['format']!r}, expected {FORMAT}). Nothing was changed. Name another "
                "folder with out=, or use that version."
            )
        for entry in manifest["checkpoints"].values():
            if not isinstance(entry["name"], str):
                raise ValueError(f"a checkpoint is called {entry['name']!r}, expected a string")
    except (FileNotFoundError, NotADirectoryError) as error:
        found = f"holds no {MANIFEST}" if path.exists() else "does not exist"
        raise StoreError(
            f"{path} {found}. Expected the folder that gs.influence or gs.self_influence was given "
            "as out=."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{path / MANIFEST} is damaged ({error}). Nothing was changed. Restore it, or name "
            "another folder with out=."
        ) from error
    return manifest


def path_of(folder: Any, name: str = "folder") -> Path:
    """Return an argument as the path of a folder, or raise."""
    if not isinstance(folder, (str, os.PathLike)):
        raise StoreError(f"{name} is {folder!r}, expected the path of a folder.")
    return Path(folder)


def read_manifest_of(path: Path, kind: str) -> dict[str, Any]:
    """Return the manifest of a folder of one kind of results, or raise."""
    manifest = read_manifest(path)
    found = manifest.get("kind")
    if found != kind:
        reader = KINDS[found][1] if isinstance(found, str) and found in KINDS else None
        read = f", which {reader} reads" if reader else ""
        raise StoreError(f"{path} holds {found}{read}; expected what {KINDS[kind][0]} writes.")
    return manifest


def read_results(
    path: Path, kind: str, ids: Sequence[str], arrays: Sequence[str]
) -> tuple[tuple[str, ...], list[np.ndarray], list[list[np.ndarray]]]:
    """Return the names of a folder's checkpoints, its ids, and the arrays of each, memory mapped.

    Args:
        kind: of results, as the manifest calls them.
        ids, arrays: names of the files.

    Raises:
        StoreError: if the folder holds something else, or a checkpoint that is not complete.
    """
    manifest = read_manifest_of(path, kind)
    again = f"Call {KINDS[kind][0].partition('(')[0]} with the same arguments again to"
    if not manifest["checkpoints"]:
        raise StoreError(f"{path} holds no checkpoint yet. {again} continue.")
    try:
        found = []
        for name in manifest["checkpoints"]:
            if not bool((_array(path / name / "done.npy") != 0).all()):
                raise StoreError(f"{path / name} is not complete. {again} continue.")
            found.append([_array(path / name / f"{array}.npy", mmap_mode="r") for array in arrays])
        id_arrays = [_array(path / f"{name}.npy") for name in ids]
        shape = tuple(map(len, id_arrays))
        for first, *_ in found:
            if first.shape[: len(shape)] != shape:
                raise ValueError(f"its ids are of {shape} examples, its arrays of {first.shape}")
    except (OSError, *DAMAGED) as error:
        raise StoreError(f"{path} cannot be read: {error}. {again} repair it.") from error
    names = tuple(entry["name"] for entry in manifest["checkpoints"].values())
    return names, id_arrays, found


def _array(path: Path, **options: Any) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False, **options)
    except DAMAGED as error:
        raise ValueError(f"{path.name} is damaged") from error


def _holds(path: Path, values: np.ndarray) -> bool:
    """Whether a file exists and holds an array, undamaged."""
    try:
        return np.array_equal(np.load(path, allow_pickle=False), values)
    except (OSError, *DAMAGED):
        return False


def write_whole(path: Path, write: Callable[[Any], Any]) -> None:
    """Write a file so that a kill leaves the old one or the new one, never a part."""
    draft = _draft(path)
    try:
        with draft.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error


def _lock(path: Path) -> Path:
    return path / f".{MANIFEST}.lock"


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _differences(held: Any, now: Any, place: str = "") -> list[str]:
    """Return one line for each value that differs, with its path in the manifest."""
    if isinstance(held, dict) and isinstance(now, dict):
        if "tolerance" in held and "tolerance" in now:
            return _measured_differences(held, now, place)
        return [
            line
            for key in dict.fromkeys([*held, *now])
            for line in _differences(held.get(key), now.get(key), f"{place}.{key}".lstrip("."))
        ]
    if held == now:
        return []
    return [f"{place}: on disk {_shortened(held)}, now {_shortened(now)}"]


def _measured_differences(held: dict, now: dict, place: str) -> list[str]:
    """Return one line if losses differ by more than rounding, none if they agree.

    Args:
        held, now: ``tolerance``, relative to the largest loss, and ``values``, the losses as text.
        place: their path in the manifest.
    """
    try:
        both = np.array([each["values"].split() for each in (held, now)], dtype=np.float64)
    except (KeyError, AttributeError, ValueError) as error:
        return [f"{place}: on disk no list of as many numbers ({error})"]
    before, after = both
    finite = np.abs(both)[np.isfinite(both)]
    bound = max(held["tolerance"], now["tolerance"]) * finite.max(initial=0.0)
    differ = np.flatnonzero(~np.isclose(before, after, rtol=0, atol=bound, equal_nan=True))
    if not len(differ):
        return []
    first = differ[0]
    return [
        f"{place}: on disk {before[first]:.9g}, now {after[first]:.9g}, for example {first} and "
        f"{len(differ) - 1} others of the first training batch"
    ]


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
