"""What all scoring calls have in common: the model, its losses and the options of the call."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from tqdm import tqdm

from gradstats._complex import any_double
from gradstats.capture._selection import data_parallel_in, select_parameters
from gradstats.capture._sharded import is_sharded
from gradstats.contractions._triton import BACKEND_VARIABLE
from gradstats.errors import (
    CheckpointError,
    LoaderError,
    NonFiniteGradientError,
    StoreError,
    UnsupportedOperationError,
)
from gradstats.scoring import _ranks
from gradstats.scoring._batches import BatchLayout, Source, to_device
from gradstats.scoring._checkpoints import Checkpoints
from gradstats.scoring._folder import Folder, path_of, versions
from gradstats.scoring._loaders import Data
from gradstats.scoring._memory import Halving
from gradstats.scoring._renewal import Renewal
from gradstats.scoring._tiles import AnyTiles, MemoryTiles, Tiles, Tiling
from gradstats.scoring._usage import Usage
from gradstats.scoring._weights import architecture_hash
from gradstats.statistics._arguments import (
    LossFunction,
    Options,
    check_call,
    check_choice,
    check_flags,
)
from gradstats.statistics._batches import on_a_copy
from gradstats.statistics._loss import check_batch_dim, check_losses, order_here
from gradstats.statistics._state import random_numbers_kept


@dataclass(frozen=True)
class Work:
    """A model, its loss and checkpoints, and the options of a call.

    Attributes:
        model: without its DistributedDataParallel wrapper, whose collectives would wait for
            processes with fewer batches.
        checkpoints: with their learning rates.
        names: the measured parameters.
        layout: where the examples of batches lie.
        options: parameters, exclude and workspace, for the core's calls.
        device: of the parameters.
        nonfinite: "raise" or "keep".
        progress: whether to report.
        out: the folder of the results; None for results in memory.
        resume: whether to continue with results that are there.
        renewal: renews what the model caches from its weights.
        usage: whether batches use any of the measured parameters.
    """

    model: nn.Module
    loss_fn: LossFunction
    checkpoints: Checkpoints
    names: tuple[str, ...]
    layout: BatchLayout
    options: Options
    device: torch.device
    nonfinite: str
    progress: bool
    out: Path | None
    resume: bool
    renewal: Renewal = field(default_factory=Renewal)
    usage: Usage = field(default_factory=Usage)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        loss_fn: LossFunction,
        checkpoints: Any,
        *,
        out: Any,
        resume: bool,
        nonfinite: str,
        progress: bool,
        batch_dim: int,
        cu_seqlens: Source,
        parameters: Sequence[str] | str | None,
        exclude: Sequence[str] | str,
        workspace: int | None,
    ) -> Work:
        """Return the work of a call, its options checked."""
        _check_checkpoints(checkpoints)
        check_flags(resume=resume, progress=progress)
        check_call(model, loss_fn)
        parallel = data_parallel_in(model)
        if parallel is not None:
            model = parallel.module
        _check_whole(model)
        check_choice("nonfinite", nonfinite, ("raise", "keep"))
        selected = select_parameters(model, parameters, exclude)
        options: Options = {"parameters": parameters, "exclude": exclude, "workspace": workspace}
        device = next(iter(selected.values())).device
        layout = BatchLayout(check_batch_dim(batch_dim), cu_seqlens)
        folder = None if out is None else path_of(out, "out")
        return cls(
            model, loss_fn, checkpoints, tuple(selected), layout, options, device, nonfinite,
            progress, folder, resume,
        )  # fmt: skip

    @property
    def dtype(self) -> np.dtype:
        """The dtype of results: float64 for float64 models, else float32."""
        return np.dtype(np.float64 if any_double(self.model.parameters()) else np.float32)

    def unordered_losses(
        self, model: nn.Module, batch: Any, watch: AbstractContextManager | None = None
    ) -> Tensor:
        """Return what the loss function returns, run inside ``watch``, with renewed caches."""
        self.renewal.renew(model)
        with watch or nullcontext():
            return self.loss_fn(model, batch)

    def losses(
        self, model: nn.Module, batch: Any, watch: AbstractContextManager | None = None
    ) -> Tensor:
        """Return the losses in the order of the batch, and so of its ids."""
        losses = self.unordered_losses(model, batch, watch)
        if not isinstance(losses, Tensor):
            return losses  # the core raises the error
        order = order_here(losses)
        return losses if order is None else losses[order.argsort()]

    def first_losses(self, data: Data, check: bool) -> Callable[[], Tensor]:
        """Return a function that computes the losses of the first batch, read at its first call.

        Args:
            data: whose first batch.
            check: whether to raise if the losses cannot be scored.
        """
        halving = Halving("training examples", self.layout)

        @cache
        def first() -> Any:
            ((_, batch),) = data.read([0])
            return to_device(batch, self.device)

        def part(batch: Any) -> Tensor:
            with torch.enable_grad():
                losses = on_a_copy(self.unordered_losses)(self.model, batch)
            return (check_losses(losses, self.layout.count(batch)) if check else losses).detach()

        def losses() -> Tensor:
            with random_numbers_kept(self.device):
                return torch.cat(halving.run(part, first(), int(data.sizes[0])))

        return losses

    def options_of(self, batch: Any) -> Options:
        """Return the options for the core's calls with a batch."""
        return {**self.options, **self.layout.options(batch)}

    def description(self) -> dict[str, Any]:
        """Return what the results depend on, for a manifest."""
        loss = self.loss_fn
        return {
            "model": architecture_hash(self.model),
            "loss": getattr(loss, "__qualname__", type(loss).__qualname__),
            "parameters": list(self.names),
            "batch_dim": self.layout.batch_dim,
            "dtype": str(self.dtype),
        }

    def circumstances(self) -> dict[str, str]:
        """Return what the bits of the results depend on."""
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return {
            **versions(),
            "device": torch.cuda.get_device_name(self.device) if kind == "cuda" else kind,
            "float32 products": _float32_products(kind),
            "autocast": str(autocast),
            "backend": os.environ.get(BACKEND_VARIABLE, ""),
            "workspace": str(self.options["workspace"]),
        }

    def check_finite(self, sqnorm: np.ndarray, ids: np.ndarray, checkpoint: str, role: str) -> None:
        """Raise if some squared norms are not finite and ``nonfinite`` is "raise"."""
        bad = ~np.isfinite(sqnorm)
        if self.nonfinite == "raise" and bad.any():
            raise NonFiniteGradientError(
                f"{checkpoint}: the gradients of the {role} examples with ids "
                f"{ids[bad][:8].tolist()}{' …' if bad.sum() > 8 else ''} are not finite. Check "
                'these examples and their losses, or pass nonfinite="keep".'
            )

    def check_held(
        self, sqnorm: np.ndarray, done: ArrayLike, data: Data, checkpoint: str, role: str
    ) -> None:
        """``check_finite`` for the squared norms that an earlier call left on disk.

        Args:
            sqnorm: (N,) of all examples.
            done: (batches,) bool, the batches that are on disk.
            data, checkpoint, role: of the examples.
        """
        held = np.repeat(done, data.sizes)
        self.check_finite(sqnorm[held], data.ids[held], checkpoint, role)

    def narrowed(self, scores: np.ndarray, checkpoint: str) -> np.ndarray:
        """Return scores in the dtype of results; raise if they overflow it, unless "keep"."""
        with np.errstate(over="ignore"):
            narrow = scores.astype(self.dtype)
        if self.nonfinite == "raise" and not np.isfinite(narrow).all():
            raise NonFiniteGradientError(
                f"{checkpoint}: a score is {np.abs(scores).max():.3g}, which {self.dtype} cannot "
                "hold. Divide the losses by a constant, use model.double(), or pass "
                'nonfinite="keep".'
            )
        return narrow

    @property
    def reports(self) -> bool:
        """Whether this process reports progress; only the first one does."""
        return self.progress and _ranks.rank() == 0

    def say(self, line: str) -> None:
        """Print a line above the progress bar, in the first process."""
        if self.reports:
            tqdm.write(line, file=sys.stderr)

    def bar(self, total: int, what: str, unit: str = "tile", delay: float = 0) -> tqdm:
        """Return a progress bar, shown in the first process after ``delay`` seconds."""
        return tqdm(total=total, desc=what, unit=unit, disable=not self.reports, delay=delay)


def _float32_products(kind: str) -> str:
    """Return in which precision a kind of device multiplies, convolves and recurs in float32."""
    backends: Any = torch.backends
    products = backends.cuda.matmul if kind == "cuda" else backends.mkldnn.matmul
    layers = backends.cudnn if kind == "cuda" else backends.mkldnn
    used = (each.fp32_precision for each in (products, layers.conv, layers.rnn))
    names = ["ieee" if name == "none" else name for name in used]
    return names[0] if len({*names}) == 1 else ", ".join(names)


def _check_whole(model: nn.Module) -> None:
    """Raise if parameters are sharded: their forward needs all processes at the same batch."""
    sharded = [name for name, each in model.named_parameters() if is_sharded(each)]
    if sharded:
        raise UnsupportedOperationError(
            f"the parameters {sharded[:3]} are sharded over processes, but each process scores "
            "batches of its own. Expected a whole model in each: make one without fully_shard, and "
            "checkpoints of whole tensors (torch.distributed.checkpoint.state_dict, "
            "full_state_dict=True)."
        )


def _check_checkpoints(checkpoints: Any) -> None:
    """Raise unless they are gs.Checkpoints."""
    if not isinstance(checkpoints, Checkpoints):
        raise CheckpointError(
            f"checkpoints is {type(checkpoints).__name__}, expected gs.Checkpoints with learning "
            "rates. For the weights that the model has now pass "
            "gs.Checkpoints([model.state_dict()], lr=...)."
        )


def read_data(work: Work, loader: Any, role: str, ids: Source, *, shared: bool = True) -> Data:
    """Return the data of a call, or raise in every process unless they are the same in all.

    If results are kept on disk, every batch must be identified, which reads all data once more.

    Args:
        loader, role, ids: the loader, its name in messages, and where a batch holds ids.
        shared: whether the processes divide this pass; if not, each reads all data.
    """
    data = _ranks.together(Data, loader, role, ids, work.layout)
    if work.out is not None and (numbers := data.uncovered()):
        own = _ranks.share(numbers) if shared else numbers

        def contents() -> list[tuple[int, str, set[str]]]:
            found = []
            with work.bar(len(own), f"hash of the {role} data", "batch", delay=5) as bar:
                for each in data.contents(own):
                    found.append(each)
                    bar.update()
            return found

        found = _ranks.together(contents)
        data.cover(chain.from_iterable(_ranks.gather(found)) if shared else found)
    if len(set(_ranks.gather(data.fingerprint))) > 1:
        raise LoaderError(
            f"the {role} loader gives different data in different processes, so it is not known "
            "which examples scores are of. Expected the whole data in the same order in each, "
            "which takes its share: pass a loader without DistributedSampler that was not prepared "
            "for several processes."
        )
    return data


def open_folder(work: Work, description: dict[str, Any], ids: dict[str, np.ndarray]) -> Folder:
    """Return the folder of a call with ``out``, begun or checked by the first process."""
    assert work.out is not None
    folder = Folder(work.out)
    _ranks.on_first(folder.begin, description, ids, work.resume)
    return folder


def open_tiles(
    folder: Folder | None, tiling: Tiling, entry: dict[str, Any], work: Work
) -> tuple[AnyTiles, np.ndarray]:
    """Return a checkpoint's tiles, and which of them are done: the same in every process.

    Args:
        folder: the call's; None for tiles in memory, each process's own.
        tiling: how the arrays divide into tiles.
        entry: the checkpoint's, for the manifest.
        work: of the call.
    """
    if folder is None:
        return MemoryTiles(tiling), np.zeros(tiling.grid, dtype=bool)

    def prepare() -> tuple[str, list[str], np.ndarray]:
        prepared = folder.prepare(entry, work.circumstances(), tiling)
        return prepared.folder.name, prepared.damaged, prepared.done

    name, damaged, done = _ranks.on_first(prepare)
    for line in damaged:
        work.say(f"{line}: computing it again")
    tiles = Tiles(folder.path / name, tiling)

    def open_here() -> None:
        try:
            tiles.open()
        except OSError as error:
            raise StoreError(
                f"{tiles.folder} cannot be opened ({error.strerror}). Expected a folder that every "
                "process can write to: name one on a shared disk with out=."
            ) from error

    _ranks.together(open_here)
    return tiles, done


def amount(nbytes: float) -> str:
    """Format a number of bytes, to three digits."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def duration(value: float) -> str:
    """Format a number of seconds."""
    for unit, length in (("s", 60.0), ("min", 60.0), ("h", 48.0)):
        if value < length:
            return f"{value:.2g} {unit}" if value < 10 else f"{value:.0f} {unit}"
        value /= length if unit != "h" else 24
    return f"{value:.0f} days"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
