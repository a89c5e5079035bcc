"""Influence of every training example on every query, over the checkpoints of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from gradstats._compiler import in_python
from gradstats.errors import ScoreError
from gradstats.scoring import _ranks
from gradstats.scoring._batches import Source
from gradstats.scoring._borrowed import borrowed
from gradstats.scoring._checkpoints import Checkpoints
from gradstats.scoring._layout import BatchLayout
from gradstats.scoring._passes import Pairs, Passes
from gradstats.scoring._rankings import check_k
from gradstats.scoring._scores import InfluenceScores, check_normalize
from gradstats.scoring._top import TopScores
from gradstats.scoring._work import Work, check_checkpoints, folder_path, read_data
from gradstats.statistics._arguments import Choices, LossFunction, check_flags, integer
from gradstats.statistics._state import random_numbers_kept

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_BUDGET = 1024**3


class InfluenceOptions(Choices, total=False):
    """What ``influence`` takes in either of its forms; it says what each means."""

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
            process passes the whole data, which is checked; the train side is divided between them
            and the result is the same.
        loss_fn: ``loss_fn(model, batch) -> (B,)`` unreduced losses.
        checkpoints: gs.Checkpoints, with the learning rates.
        query_checkpoints: weights for the query side, as many as ``checkpoints``: gs.Checkpoints
            (their rates play no part), or files or state dicts, which may repeat. Scores are then
            Σ_c η_c ⟨∇ℓ_i(w_c), ∇ℓ_j(w'_c)⟩.
        normalize: None or "cosine": which form the result shows first. Gradients of float32 whose
            norms are below 1e-19 have cosines of fewer digits, or zero: their squares vanish (see
            GradientNorms), as products times a learning rate below 1e-38 do; for these use
            ``model.double()``.
        out: a folder for the matrix: one plain .npy file for each checkpoint, in tiles of a train
            batch by a query batch. A call that was killed goes on there with ``resume``, to the
            same bits, in the circumstances on which these depend (versions, device, precision,
            workspace: half-done checkpoints and lists are refused in others; on a CPU also its kind
            and the number of threads, which are not compared); further checkpoints add to what is
            there, also from several calls at once; other data, models or options are refused with
            the difference. Data are recognised by their sizes and a hash of their contents, for
            which they are read once more (``load`` of the results reads no data). Model and loss
            are recognised by their names and shapes and, at checkpoints that are there, by the
            losses of the first training batch up to rounding (√eps): a difference that leaves these
            as they are is not seen, nor one by which only a further checkpoint differs.
        resume: False refuses a folder that holds results.
        top_k: keep only so many proponents and opponents of every query, and never form the
            matrix. With ``out`` their lists are written after each chunk of training data.
        train_ids, query_ids: where a batch holds the ids of its examples: a key, a position, or a
            function of the batch; one more pass over the data, the same as that for ``out``.
            Positions by default.
        budget: bytes of query gradients kept at once, and of scores with ``top_k``. Each time the
            query side fills it, the training data are passed once more.
        batch_dim: the example axis of the data.
        cu_seqlens: where a batch, of either side, holds the bounds of examples packed into one row
            (see per_example_norms): a key, a position, or a function of the batch, such as
            ``lambda batch: batch.ptr`` for graphs; one more pass over the data.
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
        that do not fit into memory are halved, lists with an entry for each example too. With
        ``top_k``, checkpoints are loaded once beforehand and once for each chunk of training data
        whose scores fit the budget; with ``out``, each has a forward of the first training batch
        more. Memory: the factors of the kept queries, which fit the budget, and of one training
        batch; a tile of gradients; and, unless the checkpoint is the model's own state dict, a
        second copy of the weights on their device.

    Source:
        TracIn: Pruthi et al., arXiv 2002.08484. Renormalised influence (the cosine form):
        Hammoudeh and Lowd, arXiv 2201.10055.
    """

    def checked() -> tuple[Work, Pairs, int, int | None, Path | None]:
        check_checkpoints(checkpoints)
        check_normalize(normalize)
        check_flags(resume=resume, progress=progress)
        number = integer(budget)
        if number is None or number < 1:
            raise ScoreError(f"budget is {budget!r}, expected a positive number of bytes.")
        k = None if top_k is None else check_k(top_k)
        work = Work.of(
            model, loss_fn, nonfinite=nonfinite, progress=progress,
            layout=BatchLayout(batch_dim, cu_seqlens), parameters=parameters, exclude=exclude,
            workspace=workspace,
        )  # fmt: skip
        return work, Pairs(checkpoints, query_checkpoints, work), number, k, folder_path(out)

    work, pairs, number, k, folder = _ranks.together(checked)
    scores: InfluenceScores | TopScores
    with random_numbers_kept(work.device):
        train = read_data(work, train_loader, "train", train_ids, kept=folder is not None)
        query = read_data(
            work, query_loader, "query", query_ids, kept=folder is not None, shared=False
        )
        passes = Passes(work, pairs, train, query, number, folder, resume)
        about = (train.ids, query.ids, normalize, checkpoints.names, (train, query))
        with borrowed(work.model, work.renewal):
            if k is None:
                scores = InfluenceScores(passes.matrix(), *about)
            else:
                scores = TopScores(passes.lists(k), *about)
    if _ranks.rank() == 0:
        scores.warn_if_alike(10 if k is None else min(k, 10))
    return scores
