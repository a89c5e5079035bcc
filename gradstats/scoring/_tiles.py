"""Arrays on disk, filled tile by tile; a tile either is there, with its checksum, or is not.

Every array is a plain .npy file of its full size. ``done.npy`` holds one number for each tile: 0
until the tile is written, then its CRC-32 plus 2³². The number is written after the tile, so a
process that is killed leaves at most one tile that does not count. Tiles that a crash of the
machine or a damaged file has changed fail their checksum and are computed again.
"""

from __future__ import annotations

import errno
import math
import os
import tokenize
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from gradstats.errors import StoreError

DONE = 1 << 32

# What NumPy raises for an .npy file with a damaged header, which it parses as a Python literal.
DAMAGED = (ValueError, EOFError, SyntaxError, tokenize.TokenError)


@dataclass(frozen=True)
class Array:
    """One array of a store.

    Attributes:
        axes: "row" or "column" for each axis.
        dtype: of the elements.
    """

    axes: tuple[str, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class Tiling:
    """How some arrays divide into tiles.

    Attributes:
        arrays: name → Array.
        rows, columns: the spans of the tiles along each kind of axis.
    """

    arrays: Mapping[str, Array]
    rows: Sequence[slice]
    columns: Sequence[slice]

    @property
    def grid(self) -> tuple[int, int]:
        """The number of tiles along rows, and along columns."""
        return len(self.rows), len(self.columns)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays when complete."""
        return sum(
            math.prod(self.shape(name)) * array.dtype.itemsize
            for name, array in self.arrays.items()
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array."""
        ends = {"row": self.rows[-1].stop, "column": self.columns[-1].stop}
        return tuple(ends[axis] for axis in self.arrays[name].axes)

    def slices(self, name: str, row: int, column: int) -> tuple[slice, ...]:
        """Return where a tile lies in an array."""
        spans = {"row": self.rows[row], "column": self.columns[column]}
        return tuple(spans[axis] for axis in self.arrays[name].axes)


class Tiles:
    """The arrays of one folder.

    Attributes:
        damaged: one line for each file or tile that was found damaged.
    """

    def __init__(self, folder: Path, tiling: Tiling):
        self.folder = folder
        self._tiling = tiling
        self.damaged: list[str] = []
        self._files: dict[str, FileIO] = {}
        self._starts: dict[str, int] = {}
        self._written = np.zeros(tiling.grid, dtype=bool)

    def create_or_check(self) -> None:
        """Make missing files, at full size, and check every tile; the files are closed again."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            fresh = not self._path("done").exists()
            for name, array in self._tiling.arrays.items():
                self._make(self._path(name), self._tiling.shape(name), array.dtype, fresh)
            self._make(self._path("done"), self._tiling.grid, np.dtype(np.uint64), fresh)
            self.open()
            with closing(self):
                self._drop_damaged()
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def _drop_damaged(self) -> None:
        """Mark tiles that fail their checksum as not written."""
        marks = np.array(self.view("done"))
        views = {name: self.view(name) for name in self._tiling.arrays}
        for row, column in np.argwhere(marks != 0):
            if int(marks[row, column]) != DONE + self._checksum(views, row, column):
                self.damaged.append(f"{self.folder}: tile {row}, {column} fails its checksum")
                self._mark(row, column, 0)
        self._written = self.done

    def open(self) -> None:
        """Open the existing files for writing."""
        files = {}
        with ExitStack() as opened:
            for name in [*self._tiling.arrays, "done"]:
                files[name] = opened.enter_context(self._path(name).open("r+b", buffering=0))
                _header(files[name])
                self._starts[name] = files[name].tell()
            self._written = self.done
            opened.pop_all()
        self._files = files

    @property
    def done(self) -> np.ndarray:
        """(row spans, column spans) bool, which tiles are there."""
        return np.array(self.view("done")) != 0

    def close(self) -> None:
        """Write everything out to the disk and close the files."""
        files = list(self._files.values())
        self._files.clear()
        try:
            for file in files:
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(self.folder, error) from error
        finally:
            for file in files:
                file.close()

    def write(self, row: int, column: int, values: Mapping[str, np.ndarray]) -> None:
        """Write one tile; it counts as done when this returns.

        A row or column of tiles shares its part of an array with one axis, which enters the
        checksum of each. So what an earlier tile wrote there stays.
        """
        checksum = 0
        try:
            for name, array in self._tiling.arrays.items():
                value = np.asarray(values[name], dtype=array.dtype)
                if self._is_shared(array.axes, row, column):
                    value = self.view(name)[self._tiling.slices(name, row, column)]
                else:
                    self._put(name, row, column, value)
                checksum = zlib.crc32(value.tobytes("F"), checksum)
            self._mark(row, column, DONE + checksum)
        except OSError as error:
            raise cannot_write(self.folder, error) from error
        self._written[row, column] = True

    def view(self, name: str) -> np.ndarray:
        """Return an array as a read-only memory map."""
        return np.load(self._path(name), mmap_mode="r", allow_pickle=False)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.npy"

    def _make(self, path: Path, shape: tuple[int, ...], dtype: np.dtype, fresh: bool) -> None:
        """Give a file its header and its full size, keeping its data if its header is good."""
        good = False
        if path.exists():
            with path.open("rb") as file:
                try:
                    good = _header(file) == (shape, True, dtype)
                except DAMAGED:
                    pass
                size = file.tell() + math.prod(shape) * dtype.itemsize
                if good and path.stat().st_size == size:
                    return
        if not fresh:
            state = "truncated" if good else "not readable" if path.exists() else "missing"
            self.damaged.append(f"{path} is {state}")
        with path.open("r+b" if good else "wb") as file:
            header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": True, "shape": shape}
            npy.write_array_header_1_0(file, header)
            file.flush()
            _reserve(file.fileno(), file.tell() + math.prod(shape) * dtype.itemsize)

    def _is_shared(self, axes: tuple[str, ...], row: int, column: int) -> bool:
        if len(axes) > 1:
            return False
        tiles = self._written[row] if axes == ("row",) else self._written[:, column]
        return bool(tiles.any())

    def _put(self, name: str, row: int, column: int, value: np.ndarray) -> None:
        """Write one tile of one array, column by column: arrays are stored in Fortran order."""
        spans = self._tiling.slices(name, row, column)
        size = value.dtype.itemsize
        if len(spans) == 1:
            self._write(name, spans[0].start * size, value.tobytes())
            return
        height = self._tiling.shape(name)[0]
        for number in range(value.shape[1]):
            offset = (spans[1].start + number) * height + spans[0].start
            self._write(name, offset * size, np.ascontiguousarray(value[:, number]).tobytes())

    def _write(self, name: str, offset: int, data: bytes) -> None:
        """Write bytes into an array; in a memory map, a full disk would kill the process."""
        file = self._files[name]
        file.seek(self._starts[name] + offset)
        while data:
            data = data[put(file, data) :]

    def _mark(self, row: int, column: int, mark: int) -> None:
        place = column * self._tiling.grid[0] + row
        self._write("done", place * 8, np.uint64(mark).tobytes())

    def _checksum(self, views: Mapping[str, np.ndarray], row: int, column: int) -> int:
        checksum = 0
        for name, view in views.items():
            value = view[self._tiling.slices(name, row, column)]
            checksum = zlib.crc32(value.tobytes("F"), checksum)
        return checksum


class MemoryTiles:
    """The same arrays in memory; under torch.distributed each process fills its own tiles."""

    def __init__(self, tiling: Tiling):
        self._tiling = tiling
        self._held = {
            name: np.zeros(tiling.shape(name), array.dtype, order="F")
            for name, array in tiling.arrays.items()
        }

    def write(self, row: int, column: int, values: Mapping[str, np.ndarray]) -> None:
        for name, array in self._held.items():
            array[self._tiling.slices(name, row, column)] = values[name]

    def view(self, name: str) -> np.ndarray:
        return self._held[name]

    def close(self) -> None:
        """Do nothing: no file is open."""


AnyTiles = Tiles | MemoryTiles


def cannot_write(path: Path, error: OSError) -> StoreError:
    """Return the error for a file or folder that cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    # NumPy gives no error number when fewer bytes were written than it asked for.
    code = errno.errorcode.get(error.errno or 0)
    reason = "the disk is full" if full else error.strerror or f"{error} bytes, is the disk full?"
    remedy = "Make room" if full or code is None else "Resolve this"
    return StoreError(
        f"{path} cannot be written: {reason}{f' (error {code})' if code else ''}. {remedy}, and "
        "call again with the same arguments to continue: finished work is kept."
    )


def put(file: FileIO, data: bytes) -> int:
    """Write bytes at a file's position, and return how many were written."""
    return file.write(data)


def _header(file) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = npy.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"format version {version}, expected (1, 0)")
    return npy.read_array_header_1_0(file)


def _reserve(descriptor: int, size: int) -> None:
    """Set a file's size; reserve its blocks where possible, so that a full disk shows now."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    os.ftruncate(descriptor, size)
