"""Where the examples of a loader's batches lie: a slice for each, or all packed into one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradstats.errors import LoaderError
from gradstats.scoring._batches import Source, look_up
from gradstats.statistics._arguments import Options
from gradstats.statistics._division import Division
from gradstats.statistics._loss import check_batch_dim, checked_bounds, infer_batch_size


@dataclass(frozen=True)
class BatchLayout:
    """Where the examples of all batches of a call lie.

    Attributes:
        batch_dim: the axis of their slices, or of packed rows.
        cu_seqlens: where a batch holds the bounds of packed examples; None where each has a slice.
    """

    batch_dim: int = 0
    cu_seqlens: Source = None

    def __post_init__(self):
        check_batch_dim(self.batch_dim)
        source = self.cu_seqlens
        if not (source is None or isinstance(source, (str, int)) or callable(source)):
            raise LoaderError(
                f"cu_seqlens is {type(source).__name__}, expected where each batch holds "
                "the bounds of its own examples: a key of the batch, a position in it, or a "
                "function of it."
            )

    @property
    def packed(self) -> bool:
        """Whether examples are packed."""
        return self.cu_seqlens is not None

    def bounds(self, batch: Any) -> Tensor | None:
        """Return the rows at which a batch's examples begin, and their number; None if unpacked."""
        found = self._found(batch)
        return None if found is None else checked_bounds(found)

    def count(self, batch: Any) -> int:
        """Return the number of a batch's examples."""
        bounds = self.bounds(batch)
        return infer_batch_size(batch, self.batch_dim) if bounds is None else len(bounds) - 1

    def options(self, batch: Any) -> Options:
        """Return where a batch's examples lie, as options of the core's calls, which check them."""
        return {"batch_dim": self.batch_dim, "cu_seqlens": self._found(batch)}

    def part(self, batch: Any, start: int, stop: int, size: int) -> Any:
        """Return some examples of a batch of so many, or raise where it cannot be divided."""
        bounds = self.bounds(batch)
        division = Division(
            size, self.batch_dim, None if bounds is None else tuple(bounds.tolist())
        )
        obstacle = division.obstacle(batch) or division.doubt(batch)
        if obstacle is not None:
            packed = "" if bounds is None else "packed "
            raise LoaderError(
                f"a batch of {size} {packed}examples cannot be divided: {obstacle}. Let the loader "
                "give smaller batches."
            )
        return division.take(batch, list(range(start, stop)))

    def _found(self, batch: Any) -> Any:
        """Return what a batch holds for its bounds; None where examples are not packed."""
        if self.cu_seqlens is None:
            return None
        return look_up(batch, self.cu_seqlens, "cu_seqlens")
