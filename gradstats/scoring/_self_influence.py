"""Self-influence of every example of a data set, with the cheap scores that rival it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from gradstats._compiler import in_python
from gradstats.scoring import _ranks
from gradstats.scoring._batches import Source, to_device
from gradstats.scoring._borrowed import borrowed
from gradstats.scoring._checkpoints import Checkpoint, Checkpoints
from gradstats.scoring._confidence import (
    CrossEntropyWatch,
    el2n,
    margin,
    watched,
)
from gradstats.scoring._layout import BatchLayout
from gradstats.scoring._loaders import Data
from gradstats.scoring._memory import Halving
from gradstats.scoring._rates import Rates, as_numpy, weighed
from gradstats.scoring._recognition import Recognition
from gradstats.scoring._table import FIELDS, SQNORM, SelfInfluence
from gradstats.scoring._tiles import Array, MemoryTiles, Tiles, Tiling
from gradstats.scoring._weights import load_weights
from gradstats.scoring._work import (
    Work,
    amount,
    check_checkpoints,
    duration,
    folder_path,
    open_folder,
    open_tiles,
    plural,
    read_data,
)
from gradstats.statistics._arguments import LossFunction, check_flags
from gradstats.statistics._norms import per_example_norms
from gradstats.statistics._result import GradientNorms
from gradstats.statistics._state import random_numbers_kept


@in_python
def self_influence(
    model: nn.Module,
    loader: Any,
    loss_fn: LossFunction,
    checkpoints: Checkpoints,
    *,
    ids: Source = None,
    out: str | Path | None = None,
    resume: bool = True,
    batch_dim: int = 0,
    cu_seqlens: Source = None,
    parameters: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    workspace: int | None = None,
    nonfinite: str = "raise",
    progress: bool = True,
) -> SelfInfluence:
    """Return Σ_c η_c ‖∇ℓ_i(w_c)‖² for every example, beside its loss, margin and EL2N.

    With a learning rate for each parameter, ‖·‖² is Σ_p η_cp ‖∇_p ℓ_i(w_c)‖².

    Args:
        model: any module; scored in eval mode, and given back with its weights, buffers and mode.
        loader: a DataLoader in the order of its data set, or a list of batches; the same batches in
            each pass, which is checked. Under torch.distributed every process passes the whole
            data, which is checked too, and takes its share of it.
        loss_fn: ``loss_fn(model, batch) -> (B,)`` unreduced losses. Margin and EL2N are read from
            the logits that its cross-entropy (or nll_loss) sees.
        checkpoints: gs.Checkpoints, each loaded once.
        ids: where a batch holds the ids of its examples: a key, a position, or a function of the
            batch; one more pass over the data, the same as that for ``out``. By default an
            example's position is its id.
        out: a folder to keep results in; with ``resume`` a call that was killed goes on there,
            and further checkpoints add to what is there. What belongs to a folder is recognised as
            by gs.influence, with one more pass over the data.
        resume: False refuses a folder that holds results.
        batch_dim: the example axis of the data.
        cu_seqlens: where a batch holds the bounds of examples packed into one row (see
            per_example_norms): a key, a position, or a function of the batch, such as
            ``lambda batch: batch.ptr`` for graphs; one more pass over the data.
        parameters, exclude: fnmatch patterns over parameter names.
        workspace: bytes of scratch memory; 256 MiB by default.
        nonfinite: "raise" for gradients with NaN or infinity, or "keep" to return them.
        progress: print an estimate of the work and show a progress bar, on standard error.

    Returns:
        SelfInfluence: a table of N rows, with ``top``, ``report``, ``to_pandas`` and ``plot``.

    Raises:
        CheckpointError, LoaderError, StoreError, NonFiniteGradientError, and what
        gs.per_example_norms raises.

    Cost:
        For each checkpoint one forward and backward of every example without weight gradients, and
        8 numbers for each example. Batches that do not fit into memory are halved, lists with an
        entry for each example too.

    Source:
        TracIn: Pruthi et al., arXiv 2002.08484. EL2N: Paul et al., arXiv 2107.07075.
    """

    def checked() -> tuple[Work, Path | None]:
        check_checkpoints(checkpoints)
        check_flags(resume=resume, progress=progress)
        work = Work.of(
            model, loss_fn, nonfinite=nonfinite, progress=progress,
            layout=BatchLayout(batch_dim, cu_seqlens), parameters=parameters, exclude=exclude,
            workspace=workspace,
        )  # fmt: skip
        return work, folder_path(out)

    work, path = _ranks.together(checked)
    with random_numbers_kept(work.device):
        return _scored(work, loader, ids, checkpoints, path, resume)


def _scored(
    work: Work, loader: Any, ids: Source, checkpoints: Checkpoints, path: Path | None, resume: bool
) -> SelfInfluence:
    """Measure all examples at all checkpoints."""
    data = read_data(work, loader, "training", ids, kept=path is not None)
    folder = None
    if path is not None:
        description = {
            "kind": "self-influence",
            "settings": work.description(),
            "data": data.description(),
        }
        folder = open_folder(path, description, {"ids": data.ids}, resume)
    watch = CrossEntropyWatch()
    measure = _Measurement(work, watch, Halving("examples", work.layout))
    values = np.zeros((len(checkpoints), data.examples, len(FIELDS)))
    arrays = {"values": Array(("row", "column"), np.dtype(np.float64))}
    tiling = Tiling(arrays, data.spans, [slice(0, len(FIELDS))])
    recognition = Recognition(work, None if path is None else data)
    bar = work.bar(len(checkpoints) * data.batches, "self-influence")
    with borrowed(work.model, work.renewal), bar:
        for number in range(len(checkpoints)):
            checkpoint = _ranks.together(partial(_moved_to, work, checkpoints, number))
            entry = recognition.entry(checkpoint, None)
            tiles: Tiles | MemoryTiles = MemoryTiles(tiling)
            done = np.zeros(tiling.grid, dtype=bool)
            if folder is not None:
                tiles, done = open_tiles(folder, tiling, entry, work)
            pending = np.flatnonzero(~done[:, 0]).tolist()

            def fill(pending=pending, checkpoint=checkpoint, tiles=tiles):
                for batch_number, batch in data.read(_ranks.share(pending)):
                    rows = measure(batch, int(data.sizes[batch_number]), checkpoint)
                    span = data.spans[batch_number]
                    work.check_finite(rows[:, SQNORM], data.ids[span], checkpoint.name, "training")
                    tiles.write(batch_number, 0, {"values": rows})
                    bar.update(min(_ranks.size(), bar.total - bar.n))

            with closing(tiles):
                held = np.repeat(done[:, 0], data.sizes)
                sqnorms = tiles.view("values")[held, SQNORM]
                work.check_finite(sqnorms, data.ids[held], checkpoint.name, "training")
                if number == 0:
                    where = "in memory" if path is None else f"in {path}"
                    stored = f"{amount(tiling.nbytes * len(checkpoints))} {where}"
                    trial = partial(measure, checkpoint=checkpoint)
                    _ranks.together(
                        partial(_announce, work, data, len(checkpoints), stored, pending, trial)
                    )
                bar.update(data.batches - len(pending))
                _ranks.together(fill)
            values[number] = tiles.view("values")
            if folder is None:
                _ranks.add_up(values[number])
    return SelfInfluence(data.ids, tuple(checkpoints.names), values, watch.reason)


def _moved_to(work: Work, checkpoints: Checkpoints, number: int) -> Checkpoint:
    """Load a checkpoint and give the model its weights."""
    checkpoint = checkpoints.load(number, work.model, work.names)
    load_weights(work.model, checkpoint, work.renewal)
    return checkpoint


class _Measurement:
    """Measures one batch at the weights that the model has."""

    def __init__(self, work: Work, watch: CrossEntropyWatch, halving: Halving):
        self._work, self._watch, self._halving = work, watch, halving
        self._loss_fn = watched(work.losses, watch)

    def __call__(self, batch: Any, size: int, checkpoint: Checkpoint) -> np.ndarray:
        """Return one row of FIELDS for each example."""

        def part(batch: Any) -> np.ndarray:
            options = self._work.options_of(batch)
            stats = per_example_norms(
                self._work.model, batch, self._loss_fn, nonfinite="keep", **options
            )
            return self._rows(stats, checkpoint.rates)

        batch = to_device(batch, self._work.device)
        return np.concatenate(self._halving.run(part, batch, size))

    def _rows(self, stats: GradientNorms, rates: Rates | None) -> np.ndarray:
        assert rates is not None and stats.loss is not None
        columns = {
            "weighted": weighed(rates, stats.sqnorm, stats.by_parameter),
            "sqnorm": as_numpy(stats.sqnorm),
            "loss": as_numpy(stats.loss),
        }
        prediction = self._watch.prediction(len(stats.sqnorm))
        if prediction is not None:
            probability, label = prediction.probability, prediction.label
            columns |= {
                "margin": margin(probability, label),
                "el2n": el2n(probability, label),
                "label": label,
                "predicted": probability.argmax(1),
                "classes": np.full(len(label), probability.shape[1]),
            }
        unknown = np.full(len(stats.sqnorm), np.nan)
        return np.stack([columns.get(name, unknown) for name in FIELDS], axis=1)


def _announce(
    work: Work,
    data: Data,
    checkpoints: int,
    stored: str,
    pending: list[int],
    measure: Callable[[Any, int], object],
) -> None:
    """Print how much there is to do, after a trial of one batch."""
    if not work.progress or _ranks.rank() != 0:
        return
    expected = "nothing left to compute at the first checkpoint"
    if pending:
        ((number, batch),) = data.read(pending[:1])
        start = time.perf_counter()
        measure(batch, int(data.sizes[number]))
        once = time.perf_counter() - start
        left = once * (len(pending) + (checkpoints - 1) * data.batches) / _ranks.size()
        expected = f"about {duration(left)}"
    work.say(
        f"self-influence of {plural(data.examples, 'example')} at "
        f"{plural(checkpoints, 'checkpoint')}: {stored}, {expected}"
    )
