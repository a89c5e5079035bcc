"""Influence of every training example on every query, over the checkpoints of a training run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, overload

import numpy as np
from torch import Tensor, nn
from tqdm import tqdm

from gradstats.errors import CheckpointError, ScoreError
from gradstats.scoring import _ranks
from gradstats.scoring._checkpoints import Checkpoint, Checkpoints, WeightsOnly
from gradstats.scoring._loaders import Data, IdSource
from gradstats.scoring._recognition import Recognition
from gradstats.scoring._scores import (
    PARTS,
    InfluenceScores,
    Partial,
    TopScores,
    check_k,
    check_normalize,
)
from gradstats.scoring._stream import Stream
from gradstats.scoring._tiles import Array, Tiles
from gradstats.scoring._top import Chunk, TopLists, chunks, fill_lists
from gradstats.scoring._weights import borrowed
from gradstats.scoring._work import (
    Work,
    amount,
    check_checkpoints,
    duration,
    folder_path,
    open_folder,
    open_tiles,
    plural,
    seconds,
)

DEFAULT_BUDGET = 1024**3


@overload
def influence(
    model: nn.Module,
    train_loader: Any,
    query_loader: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    checkpoints: Checkpoints,
    *,
    query_checkpoints: Any = None,
    normalize: str | None = None,
    out: str | Path | None = None,
    resume: bool = True,
    top_k: None = None,
    train_ids: IdSource = None,
    query_ids: IdSource = None,
    budget: int = DEFAULT_BUDGET,
    batch_dim: int = 0,
    parameters: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    workspace: int | None = None,
    nonfinite: str = "raise",
    progress: bool = True,
) -> InfluenceScores: ...


@overload
def influence(
    model: nn.Module,
    train_loader: Any,
    query_loader: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    checkpoints: Checkpoints,
    *,
    query_checkpoints: Any = None,
    normalize: str | None = None,
    out: str | Path | None = None,
    resume: bool = True,
    top_k: int,
    train_ids: IdSource = None,
    query_ids: IdSource = None,
    budget: int = DEFAULT_BUDGET,
    batch_dim: int = 0,
    parameters: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    workspace: int | None = None,
    nonfinite: str = "raise",
    progress: bool = True,
) -> TopScores: ...


def influence(
    model: nn.Module,
    train_loader: Any,
    query_loader: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    checkpoints: Checkpoints,
    *,
    query_checkpoints: Any = None,
    normalize: str | None = None,
    out: str | Path | None = None,
    resume: bool = True,
    top_k: int | None = None,
    train_ids: IdSource = None,
    query_ids: IdSource = None,
    budget: int = DEFAULT_BUDGET,
    batch_dim: int = 0,
    parameters: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    workspace: int | None = None,
    nonfinite: str = "raise",
    progress: bool = True,
) -> InfluenceScores | TopScores:
    """Return Σ_c η_c ⟨∇ℓ_i(w_c), ∇ℓ_j(w_c)⟩ for every training example i and query j.

    A score above zero says that steps on i lowered the loss of j (a proponent), below that they
    raised it (an opponent). With ``normalize="cosine"`` each checkpoint's product is divided by
    both norms before the sum, Σ_c η_c ⟨∇ℓ_i, ∇ℓ_j⟩ / (‖∇ℓ_i‖‖∇ℓ_j‖): examples with large gradients,
    mislabelled ones among them, are otherwise on top of every query's list. Both forms come from
    one pass: ``scores.raw`` and ``scores.cosine``. With a learning rate for each parameter η_c⟨·,·⟩
    is Σ_p η_cp ⟨∇_p ℓ_i, ∇_p ℓ_j⟩, and the norms stay plain.

    Args:
        model: any module; scored in eval mode, and given back with its weights, buffers and mode.
        train_loader, query_loader: DataLoaders in the order of their data sets, or lists of
            batches; the same batches in each pass, which is checked. Under torch.distributed every
            process passes the whole data; the train side is divided between them and the result is
            the same.
        loss_fn: ``loss_fn(model, batch) -> (B,)`` unreduced losses.
        checkpoints: gs.Checkpoints, with the learning rates.
        query_checkpoints: weights for the query side, as many as ``checkpoints``: gs.Checkpoints
            (their rates play no part), or files or state dicts, which may repeat. Scores are then
            Σ_c η_c ⟨∇ℓ_i(w_c), ∇ℓ_j(w'_c)⟩.
        normalize: None or "cosine": which form the result shows first.
        out: a folder for the matrix: one plain .npy file for each checkpoint, in tiles of a train
            batch by a query batch. A call that was killed goes on there with ``resume``, to the
            same bits, in the circumstances on which these depend (versions, device, precision,
            workspace: a half-done checkpoint is refused in others); further checkpoints add to what
            is there, also from several calls at once; other data, models or options are refused
            with the difference. Data are recognised by their sizes and a hash of their contents; of
            a DataLoader whose data set is no TensorDataset the hash covers the first, the middle
            and the last batch. Model and loss are recognised by their names and shapes and, at
            checkpoints that are there, by the losses of the first training batch up to rounding
            (√eps): a difference that leaves these as they are is not seen, nor one by which only a
            further checkpoint differs.
        resume: False refuses a folder that holds results.
        top_k: keep only so many proponents and opponents of every query, and never form the
            matrix. With ``out`` their lists are written after each chunk of training data.
        train_ids, query_ids: where a batch holds the ids of its examples: a key, a position, or a
            function of the batch; one more pass over the data. Positions by default.
        budget: bytes of query gradients kept at once, and of scores with ``top_k``. Each time the
            query side fills it, the training data are passed once more.
        batch_dim: the example axis of the data.
        parameters, exclude: fnmatch patterns over parameter names.
        workspace: bytes of scratch memory; 256 MiB by default.
        nonfinite: "raise" for gradients with NaN or infinity, or "keep" to return what they give;
            the same for each call on one folder with ``top_k``.
        progress: print an estimate of the work and show a progress bar, on standard error.

    Returns:
        InfluenceScores (N, Q), float64 sums of parts in the model's precision; in memory both
        forms, 16 bytes for each score, on disk one matrix of the model's precision for each
        checkpoint. TopScores with ``top_k``.

    Raises:
        CheckpointError, LoaderError, StoreError, NonFiniteGradientError, and what
        gs.inner_products raises.

    Cost:
        For each checkpoint and each time the budget is full, a forward and a backward of every
        training example without weight gradients; the products as in gs.inner_products. Batches
        that do not fit into memory are halved. With ``top_k``, checkpoints are loaded once
        beforehand and once for each chunk of training data whose scores fit the budget; with
        ``out``, each has a forward of the first training batch more. Memory: the factors of the
        kept queries, which fit the budget, and of one training batch; a tile of gradients; and,
        unless the checkpoint is the model's own state dict, a second copy of the weights on their
        device.

    Source:
        TracIn: Pruthi et al., arXiv 2002.08484. Renormalised influence (the cosine form):
        Hammoudeh and Lowd, arXiv 2201.10055.
    """
    check_checkpoints(checkpoints)
    check_normalize(normalize)
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise ScoreError(f"budget is {budget!r}, expected a positive number of bytes.")
    k = None if top_k is None else check_k(top_k)
    work = Work.of(
        model, loss_fn, nonfinite=nonfinite, progress=progress,
        batch_dim=batch_dim, parameters=parameters, exclude=exclude, workspace=workspace,
    )  # fmt: skip
    folder = folder_path(out)
    pairs = _Pairs(checkpoints, query_checkpoints, work)
    train = Data(train_loader, "train", train_ids, batch_dim)
    query = Data(query_loader, "query", query_ids, batch_dim)
    run = _Run(work, pairs, train, query, budget, folder, resume)
    scores: InfluenceScores | TopScores
    with borrowed(work.model):
        if k is None:
            source = run.in_memory() if folder is None else run.on_disk(folder)
            scores = InfluenceScores(
                source, train.ids, query.ids, normalize, checkpoints.names, (train, query)
            )
        else:
            scores = TopScores(
                run.top(k), train.ids, query.ids, normalize, checkpoints.names, (train, query)
            )
    if _ranks.rank() == 0:
        scores.warn_if_alike(10 if k is None else min(k, 10))
    return scores


class _Pairs:
    """The checkpoints of the two sides, loaded together."""

    def __init__(self, checkpoints: Checkpoints, query_checkpoints: Any, work: Work):
        self.names = checkpoints.names
        self._train = checkpoints
        self._query = None if query_checkpoints is None else WeightsOnly(query_checkpoints)
        self.two_sided = self._query is not None
        self._work = work
        if self._query is not None and len(self._query) != len(checkpoints):
            raise CheckpointError(
                f"there are {len(checkpoints)} checkpoints and {len(self._query)} query "
                "checkpoints, expected as many: the c-th of one goes with the c-th of the other."
            )

    def __len__(self) -> int:
        return len(self._train)

    def load(self, number: int) -> tuple[Checkpoint, Checkpoint | None]:
        """Return the checkpoints of both sides; None where the query side's is the train side's."""
        train = self._train.load(number, self._work.model, self._work.names)
        return train, None if self._query is None else self._query.load(number)


class _Run:
    """One call: where its results go, and the way there."""

    def __init__(
        self,
        work: Work,
        pairs: _Pairs,
        train: Data,
        query: Data,
        budget: int,
        out: Path | None,
        resume: bool,
    ):
        self.work, self.pairs, self.train, self.query = work, pairs, train, query
        self.budget, self.out, self.resume = budget, out, resume
        self.stream = Stream(work, train, query, budget)
        self.recognition = Recognition(work, None if out is None else train)

    def in_memory(self) -> dict[str | None, np.ndarray]:
        """Compute the whole matrix, added up in place, and return both forms."""
        sums = Chunk(slice(0, self.train.examples), self.query.examples, *self._spans)
        everything = np.ones((self.train.batches, self.query.batches), dtype=bool)
        with self._bar() as bar:
            for number in range(len(self.pairs)):
                pair = self._move_to(number)
                self.recognition.entry(*pair)
                if number == 0:
                    announce = partial(self._announce, everything, sums.nbytes, "in memory")
                    _ranks.together(announce)
                _ranks.together(partial(self.stream.fill, everything, sums.write, bar))
        return sums.scores()

    def on_disk(self, out: Path) -> list[Partial]:
        """Compute what is missing of the whole matrix, and return where its parts are."""
        folder = open_folder(out, self._description("influence"), self._ids(), self.resume)
        arrays = {
            "products": Array(("row", "column"), self.work.dtype),
            "train_sqnorm": Array(("row",), np.dtype(np.float64)),
            "query_sqnorm": Array(("column",), np.dtype(np.float64)),
        }
        parts: list[Partial] = []
        with self._bar() as bar:
            for number in range(len(self.pairs)):
                pair = self._move_to(number)
                tiles, done = open_tiles(
                    folder,
                    lambda kind, path: kind(path, arrays, *self._spans),
                    self.recognition.entry(*pair),
                    self.work,
                )
                with closing(tiles):
                    self._check_held(tiles, done, *pair)
                    if number == 0:
                        size = tiles.nbytes * len(self.pairs)
                        _ranks.together(partial(self._announce, ~done, size, f"in {out}"))
                    bar.update(int(done.sum()))
                    _ranks.together(partial(self.stream.fill, ~done, tiles.write, bar))
                parts.append(Partial(*map(tiles.view, PARTS)))
        return parts

    def _move_to(self, number: int) -> tuple[Checkpoint, Checkpoint | None]:
        """Load the checkpoints of both sides, and give the model the train side's."""
        pair = self.pairs.load(number)
        self.stream.move_to(*pair)
        return pair

    @property
    def _spans(self) -> tuple[list[slice], list[slice]]:
        """The rows of the train batches and the columns of the query batches."""
        return self.train.spans, self.query.spans

    def _bar(self) -> tqdm:
        tiles = self.train.batches * self.query.batches
        return self.work.bar(len(self.pairs) * tiles, "influence")

    def top(self, k: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Compute the lists of the strongest examples without the matrix."""
        lists = TopLists(self.query.examples, k)
        # Checkpoints are met again in every chunk, so they are told apart beforehand.
        entries = {}
        for number in range(len(self.pairs)):
            entries[str(number)] = self.recognition.entry(*self._move_to(number))
            del entries[str(number)]["name"]
        if self.out is not None:
            description = self._description("strongest influence")
            description["top_k"] = k
            # Lists do not say which gradients were not finite.
            description["nonfinite"] = self.work.nonfinite
            description["summed"] = entries
            open_folder(self.out, description, self._ids(), self.resume)
            problem = lists.restore(self.out)
            if problem is not None:
                self.work.say(f"{problem}: computing it again")
        left = list(chunks(self.train.sizes, self.query.examples, self.budget, lists.next_batch))
        only = self.pairs.load(0) if len(self.pairs) == 1 else None
        announced = False

        def compute(part: range, chunk: Chunk) -> None:
            nonlocal announced
            pending = np.zeros((self.train.batches, self.query.batches), dtype=bool)
            pending[part.start : part.stop] = True
            for number in range(len(self.pairs)):
                self.stream.move_to(*(only or self.pairs.load(number)))
                if not announced:
                    whole = np.zeros_like(pending)
                    whole[lists.next_batch :] = True
                    self._announce(whole, self.query.examples * k * 64, "for the lists")
                    announced = True
                self.stream.fill(pending, chunk.write, bar)

        with self._bar() as bar:
            bar.update(len(self.pairs) * lists.next_batch * self.query.batches)
            fill_lists(lists, k, self._spans, iter(left), compute, self.out)
        return lists.lists

    def _check_held(
        self, tiles: Tiles, done: np.ndarray, train: Checkpoint, query: Checkpoint | None
    ) -> None:
        """Raise where an earlier call has left squared norms that this one would not."""
        sides = (
            ("train_sqnorm", self.train, 1, train, "training"),
            ("query_sqnorm", self.query, 0, query or train, "query"),
        )
        for name, data, axis, checkpoint, role in sides:
            held = np.repeat(done.any(axis), data.sizes)
            norms = tiles.view(name)[held]
            self.work.check_finite(norms, data.ids[held], checkpoint.name, role)

    def _ids(self) -> dict[str, np.ndarray]:
        return {"train_ids": self.train.ids, "query_ids": self.query.ids}

    def _description(self, kind: str) -> dict[str, Any]:
        return {
            "kind": kind,
            "settings": self.work.description(),
            "train": self.train.description(),
            "query": self.query.description(),
            "query_checkpoints": self.pairs.two_sided,
        }

    def _announce(self, pending: np.ndarray, stored: int, where: str) -> None:
        """Print size, memory and time of what there is to do, after a trial of one tile."""
        if not self.work.progress or _ranks.rank() != 0:
            return
        count = len(self.pairs)
        lines = [
            f"influence of {plural(self.train.examples, 'training example')} on "
            f"{plural(self.query.examples, 'query example')} at {plural(count, 'checkpoint')}"
        ]
        if pending.any():
            row, column = np.argwhere(pending)[0]
            first, second = self.stream.trial(int(row), int(column))
            held = 0

            def keep() -> None:
                nonlocal held
                held = first()

            keeping, passing = seconds(keep), seconds(second)
            sizes = self.query.sizes
            every = held / sizes[column] * self.query.examples
            blocks = min(self.query.batches, math.ceil(every / self.budget))
            alone = keeping * self.train.sizes[row] / sizes[column]
            beside = max(0.0, passing - alone) / (self.train.sizes[row] * sizes[column])
            rows = float(self.train.sizes[pending.any(1)].sum())
            whole = self.train.examples
            time = 0.0
            for examples in (rows, *[whole] * (count - 1)):
                each = min(passing, alone) / self.train.sizes[row] * blocks
                each += beside * self.query.examples
                time += each * examples / _ranks.size()
                time += keeping / sizes[column] * self.query.examples
            lines.append(
                f"  {amount(stored)} {where}; query gradients take {amount(every)}, "
                f"{amount(min(every, max(self.budget, held)))} at once in "
                f"{plural(blocks, 'block')}; about {duration(time)}"
            )
        else:
            lines.append(f"  {amount(stored)} {where}; the first checkpoint is there already")
        self.work.say("\n".join(lines))
