"""Self-influence of every example of a data set, with the cheap scores that rival it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from tqdm import tqdm

from gradstats._compiler import in_python
from gradstats.scoring import _ranks
from gradstats.scoring._batches import Source, to_device
from gradstats.scoring._borrowed import borrowed
from gradstats.scoring._checkpoints import Checkpoint, Checkpoints
from gradstats.scoring._confidence import CrossEntropyWatch
from gradstats.scoring._loaders import Data
from gradstats.scoring._memory import Halving
from gradstats.scoring._rates import Rates, as_numpy, weighed
from gradstats.scoring._recognition import Recognition
from gradstats.scoring._table import FIELDS, SQNORM, SelfInfluence
from gradstats.scoring._tiles import AnyTiles, Array, Tiling
from gradstats.scoring._weights import load_weights
from gradstats.scoring._work import (
    Work,
    amount,
    duration,
    open_folder,
    open_tiles,
    plural,
    read_data,
)
from gradstats.statistics._arguments import LossFunction
from gradstats.statistics._norms import per_example_norms
from gradstats.statistics._result import GradientNorms
from gradstats.statistics._state import random_numbers_kept

# A trial that takes this many seconds is not repeated.
LONG_TRIAL = 1.0


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
        model: any module; scored in eval mode; its weights, buffers and mode are restored.
        loader: a DataLoader that does not shuffle, or a list of batches. Every pass must yield the
            same batches, which is checked. Under torch.distributed every process passes the whole
            data, which is checked too; each scores its share and returns the whole table.
        loss_fn: ``loss_fn(model, batch) -> (B,)`` unreduced losses. Margin and EL2N are computed
            from the arguments of its one call of ``cross_entropy`` or ``nll_loss``, or of a
            ``binary_cross_entropy``, which is taken for two classes.
        checkpoints: gs.Checkpoints, each loaded once.
        ids: where a batch holds the ids of its examples: a key, a position, or a function of the
            batch. This takes one more pass over the data, shared with ``out``, and allows
            shuffling. By default an example's position is its id: a ``collate_fn`` that reorders a
            batch, such as by length, goes unnoticed and needs ids.
        out: a folder for the results. With ``resume``, a call that was killed continues there, and
            calls with further checkpoints add to the folder. Data, model and loss are identified as
            in gs.influence, which takes one more pass over the data.
        resume: False refuses a folder that holds results.
        batch_dim: the example axis of the data.
        cu_seqlens: where a batch holds the bounds of examples packed into one row (see
            per_example_norms): a key, a position, or a function of the batch, such as
            ``lambda batch: batch.ptr`` for graphs. This takes one more pass over the data.
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
        For each checkpoint, one forward and backward of every example without weight gradients, and
        8 stored numbers per example. Batches that do not fit into memory are halved, including
        those that are lists with an entry for each example.

    Source:
        TracIn: Pruthi et al., arXiv 2002.08484. EL2N, GraNd: Paul et al., arXiv 2107.07075.
    """
    work = _ranks.together(
        Work.of, model, loss_fn, checkpoints, out=out, resume=resume, nonfinite=nonfinite,
        progress=progress, batch_dim=batch_dim, cu_seqlens=cu_seqlens, parameters=parameters,
        exclude=exclude, workspace=workspace,
    )  # fmt: skip
    with random_numbers_kept(work.device):
        return _Scoring(work, read_data(work, loader, "training", ids)).table()


class _Scoring:
    """Scores all examples at all checkpoints, for one call."""

    def __init__(self, work: Work, data: Data):
        self._work, self._data = work, data
        self._watch = CrossEntropyWatch()
        self._losses = partial(work.losses, watch=self._watch)
        self._halving = Halving("examples", work.layout)
        arrays = {"values": Array(("row", "column"), np.dtype(np.float64))}
        self._tiling = Tiling(arrays, data.spans, [slice(0, len(FIELDS))])

    def table(self) -> SelfInfluence:
        """Return the results, some of which an earlier call may have left on disk."""
        work, data, count = self._work, self._data, len(self._work.checkpoints)
        folder = None
        if work.out is not None:
            description = {
                "kind": "self-influence",
                "settings": work.description(),
                "data": data.description(),
            }
            folder = open_folder(work, description, {"ids": data.ids})
        recognition = Recognition(work, data)
        values = np.zeros((count, data.examples, len(FIELDS)))
        bar = work.bar(count * data.batches, "self-influence", "batch")
        with borrowed(work.model, work.renewal, work.first_losses(data, check=False)), bar:
            for number, rows in enumerate(values):
                checkpoint = _ranks.together(self._move_to, number)
                entry = recognition.entry(checkpoint, checkpoint)
                tiles, done = open_tiles(folder, self._tiling, entry, work)
                if done.any():
                    work.usage.note_used("training")
                pending = np.flatnonzero(~done[:, 0]).tolist()
                with closing(tiles):
                    sqnorms = tiles.view("values")[:, SQNORM]
                    work.check_held(sqnorms, done[:, 0], data, checkpoint.name, "training")
                    if number == 0:
                        _ranks.together(self._announce, pending, checkpoint)
                    bar.update(data.batches - len(pending))
                    _ranks.together(self._fill, pending, checkpoint, tiles, bar)
                rows[:] = tiles.view("values")
                if folder is None:
                    _ranks.add_up(rows)
        work.usage.check()
        return SelfInfluence(data.ids, work.checkpoints.names, values, self._watch.reason)

    def _move_to(self, number: int) -> Checkpoint:
        """Load a checkpoint and give the model its weights."""
        work = self._work
        checkpoint = work.checkpoints.load(number, work.model, work.names)
        load_weights(work.model, checkpoint, work.renewal)
        return checkpoint

    def _announce(self, pending: list[int], checkpoint: Checkpoint) -> None:
        """Print how much there is to do, after a trial of one batch."""
        work, data, count = self._work, self._data, len(self._work.checkpoints)
        if not work.reports:
            return
        expected = "nothing left to compute at the first checkpoint"
        if pending:
            once = self._trial(pending[0], checkpoint)
            left = once * (len(pending) + (count - 1) * data.batches) / _ranks.size()
            expected = f"about {duration(left)}"
        where = "in memory" if work.out is None else f"in {work.out}"
        work.say(
            f"self-influence of {plural(data.examples, 'example')} at "
            f"{plural(count, 'checkpoint')}: {amount(self._tiling.nbytes * count)} {where}, "
            f"{expected}"
        )

    def _trial(self, number: int, checkpoint: Checkpoint) -> float:
        """Return the seconds that a batch takes, not counting what only the first has to do."""
        spent: list[float] = []
        while not spent or (len(spent) == 1 and spent[0] < LONG_TRIAL):
            start = time.perf_counter()
            ((_, batch),) = self._data.read([number])
            if self._data.workers:
                start = time.perf_counter()  # once started, workers read while this one computes
            self._measured(batch, int(self._data.sizes[number]), checkpoint)
            spent.append(time.perf_counter() - start)
        return spent[-1]

    def _fill(self, pending: list[int], checkpoint: Checkpoint, tiles: AnyTiles, bar: tqdm) -> None:
        """Measure this process's share of some batches."""
        work, data = self._work, self._data
        for number, batch in data.read(_ranks.share(pending)):
            rows = self._measured(batch, int(data.sizes[number]), checkpoint)
            ids = data.ids[data.spans[number]]
            work.check_finite(rows[:, SQNORM], ids, checkpoint.name, "training")
            tiles.write(number, 0, {"values": rows})
            bar.update(min(_ranks.size(), bar.total - bar.n))

    def _measured(self, batch: Any, size: int, checkpoint: Checkpoint) -> np.ndarray:
        """Return one row of FIELDS for each example, at the weights that the model has."""
        work = self._work

        def part(batch: Any) -> np.ndarray:
            def measure() -> np.ndarray:
                stats = per_example_norms(
                    work.model, batch, self._losses, nonfinite="keep", **work.options_of(batch)
                )
                return self._rows(stats.loss, stats, checkpoint.rates)

            return work.usage.measured("training", measure, self._rows)

        batch = to_device(batch, work.device)
        return np.concatenate(self._halving.run(part, batch, size))

    def _rows(
        self, losses: Tensor | None, stats: GradientNorms | None = None, rates: Rates | None = None
    ) -> np.ndarray:
        """Return one row of FIELDS for each example; without ``stats`` the gradients are zero."""
        assert losses is not None
        size = len(losses)
        columns = {name: np.zeros(size) for name in ("weighted", "sqnorm")}
        if stats is not None:
            assert rates is not None
            columns["weighted"] = weighed(rates, stats.sqnorm, stats.by_parameter)
            columns["sqnorm"] = as_numpy(stats.sqnorm)
        columns["loss"] = as_numpy(losses)
        columns |= self._watch.columns(size)
        unknown = np.full(size, np.nan)
        return np.stack([columns.get(name, unknown) for name in FIELDS], axis=1)
