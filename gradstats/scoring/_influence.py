"""Influence of every training example on every query, over the checkpoints of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from gradstats._compiler import in_python
from gradstats._values import integer
from gradstats.errors import ScoreError
from gradstats.scoring import _ranks
from gradstats.scoring._batches import Source
from gradstats.scoring._borrowed import borrowed
from gradstats.scoring._checkpoints import Checkpoints, WeightsOnly
from gradstats.scoring._passes import Passes
from gradstats.scoring._rankings import check_k
from gradstats.scoring._scores import InfluenceScores, check_normalize
from gradstats.scoring._top import TopScores
from gradstats.scoring._work import Work, read_data
from gradstats.statistics._arguments import Choices, LossFunction
from gradstats.statistics._state import random_numbers_kept

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_BUDGET = 1024**3


class InfluenceOptions(Choices, total=False):
    """The options that both overloads of ``influence`` take; its docstring explains them."""

    query_checkpoints: Any
    normalize: str | None
    out: str | Path | None
    resume: bool
    train_ids: Source
    query_ids: Source
    budget: int
    cu_seqlens: Source
    nonfinite: str
    progress: bool


@overload
def influence(
    model: nn.Module,
    train_loader: Any,
    query_loader: Any,
    loss_fn: LossFunction,
    checkpoints: Checkpoints,
    *,
    top_k: None = None,
    **options: Unpack[InfluenceOptions],
) -> InfluenceScores: ...


@overload
def influence(
    model: nn.Module,
    train_loader: Any,
    query_loader: Any,
    loss_fn: LossFunction,
    checkpoints: Checkpoints,
    *,
    top_k: int,
    **options: Unpack[InfluenceOptions],
) -> TopScores: ...


@in_python
def influence(
    model: nn.Module,
    train_loader: Any,
    query_loader: Any,
    loss_fn: LossFunction,
    checkpoints: Checkpoints,
    *,
    query_checkpoints: Any = None,
    normalize: str | None = None,
    out: str | Path | None = None,
    resume: bool = True,
    top_k: int | None = None,
    train_ids: Source = None,
    query_ids: Source = None,
    budget: int = DEFAULT_BUDGET,
    batch_dim: int = 0,
    cu_seqlens: Source = None,
    parameters: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    workspace: int | None = None,
    nonfinite: str = "raise",
    progress: bool = True,
) -> InfluenceScores | TopScores:
    """Return Σ_c η_c ⟨∇ℓ_i(w_c), ∇ℓ_j(w_c)⟩ for every training example i and query j.

    A positive score says that steps on i lowered the loss of j (i is a proponent), a negative one
    that they raised it (an opponent). With ``normalize="cosine"``, each checkpoint's product is
    divided by both norms before the sum, Σ_c η_c ⟨∇ℓ_i, ∇ℓ_j⟩ / (‖∇ℓ_i‖‖∇ℓ_j‖); otherwise examples
    with large gradients, such as mislabelled ones, top every query's list. One pass computes both
    forms: ``scores.raw`` and ``scores.cosine``. With a learning rate per parameter, η_c⟨·,·⟩ is
    Σ_p η_cp ⟨∇_p ℓ_i, ∇_p ℓ_j⟩, and the norms are unweighted.

    Args:
        model: any module; scored in eval mode; its weights, buffers and mode are restored.
        train_loader, query_loader: DataLoaders that do not shuffle, or lists of batches. Every pass
            must yield the same batches, which is checked. Under torch.distributed every process
            passes the whole data, which is checked; the processes divide the train side, and each
            returns the whole result.
        loss_fn: ``loss_fn(model, batch) -> (B,)`` unreduced losses.
        checkpoints: gs.Checkpoints, with the learning rates.
        query_checkpoints: weights for the query side, as many as ``checkpoints``: gs.Checkpoints
            (their rates are ignored), or files or state dicts, which may repeat. Scores are then
            Σ_c η_c ⟨∇ℓ_i(w_c), ∇ℓ_j(w'_c)⟩.
        normalize: None or "cosine": the form that the result shows first. In float32, squares of
            norms below 1e-19, and products times a learning rate below 1e-38, underflow: such
            scores lose digits or become zero. Use ``model.double()`` for these.
        out: a folder for the matrix: one plain .npy file per checkpoint, written in tiles of a
            train batch by a query batch. With ``resume``, a call that was killed continues there,
            and calls with further checkpoints, also several at once, add to the folder. A resumed
            result is bit-identical, given the same versions, device, precision and workspace (a
            half-done checkpoint or list is refused with others) and, on a CPU, the same processor
            and number of threads (not checked). Other data, models or options are refused with the
            difference. Data are identified by their sizes and a hash of their contents, which takes
            one more pass over them (``load`` reads no data). Model and loss are identified by their
            names and shapes and, at checkpoints already in the folder, by the losses of the first
            training batch, up to rounding (√eps): a change that keeps these losses, or that affects
            only a further checkpoint, goes unnoticed.
        resume: False refuses a folder that holds results.
        top_k: keep only this many proponents and opponents for every query, and never form the
            matrix. With ``out`` their lists are written after each chunk of training data.
        train_ids, query_ids: where a batch holds the ids of its examples: a key, a position, or a
            function of the batch. This takes one more pass over the data, shared with ``out``, and
            allows shuffling. By default an example's position is its id: a ``collate_fn`` that
            reorders a batch, such as by length, goes unnoticed and needs ids.
        budget: bytes of query gradients, kept as factors, and of scores with ``top_k``; 1 GiB by
            default. Each time the query gradients fill it, the training data are read once more.
        batch_dim: the example axis of the data.
        cu_seqlens: where a batch, of either side, holds the bounds of examples packed into one row
            (see per_example_norms): a key, a position, or a function of the batch, such as
            ``lambda batch: batch.ptr`` for graphs. This takes one more pass over the data.
        parameters, exclude: fnmatch patterns over parameter names.
        workspace: bytes of scratch memory; 256 MiB by default.
        nonfinite: "raise" for gradients with NaN or infinity, or "keep" to return what they give.
        progress: print an estimate of the work and show a progress bar, on standard error.

    Returns:
        InfluenceScores (N, Q), float64 sums of terms in the model's precision: in memory both
        forms, 16 bytes per score; on disk one matrix per checkpoint, in the model's precision.
        TopScores with ``top_k``. Both have ``proponents``, ``opponents``, ``to_pandas`` and
        ``plot``.

    Raises:
        CheckpointError, LoaderError, StoreError, NonFiniteGradientError, and what
        gs.inner_products raises.
        ScoreError: ``normalize``, ``top_k`` or ``budget`` is invalid.

    Cost:
        At each checkpoint, a forward and backward of every query, once, and of every training
        example, each time the budget is full, without weight gradients; and the products, as in
        gs.inner_products. Batches that do not fit into memory are halved, including those that are
        lists with an entry for each example. With ``top_k``, checkpoints are loaded once beforehand
        and once for each chunk of training data whose scores fit the budget; with ``out``, each
        takes one more forward of the first training batch. Memory: the factors of the kept queries,
        which fit the budget, and of one training batch; a tile of gradients; and, unless the
        checkpoint is the model's own state dict, a second copy of the weights on their device.

    Source:
        TracIn: Pruthi et al., arXiv 2002.08484. Renormalised influence (the cosine form):
        Hammoudeh and Lowd, arXiv 2201.10055.
    """

    def checked() -> tuple[Work, WeightsOnly | None, int, int | None]:
        check_normalize(normalize)
        number = integer(budget, 1)
        if number is None:
            raise ScoreError(f"budget is {budget!r}, expected a positive number of bytes.")
        k = None if top_k is None else check_k(top_k, "top_k")
        work = Work.of(
            model, loss_fn, checkpoints, out=out, resume=resume, nonfinite=nonfinite,
            progress=progress, batch_dim=batch_dim, cu_seqlens=cu_seqlens, parameters=parameters,
            exclude=exclude, workspace=workspace,
        )  # fmt: skip
        queries = None if query_checkpoints is None else WeightsOnly(query_checkpoints, checkpoints)
        return work, queries, number, k

    work, queries, number, k = _ranks.together(checked)
    scores: InfluenceScores | TopScores
    with random_numbers_kept(work.device):
        train = read_data(work, train_loader, "train", train_ids)
        query = read_data(work, query_loader, "query", query_ids, shared=False)
        passes = Passes(work, queries, train, query, number)
        about = (train.ids, query.ids, normalize, checkpoints.names, (train, query))
        with borrowed(work.model, work.renewal, work.first_losses(train, check=False)):
            if k is None:
                scores = InfluenceScores(passes.matrix(), *about)
            else:
                scores = TopScores(passes.lists(k), *about)
        work.usage.check()
    if _ranks.rank() == 0:
        scores.warn_if_alike(10 if k is None else min(k, 10))
    return scores
