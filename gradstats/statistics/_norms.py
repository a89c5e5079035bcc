"""Per-example gradient norms: of a batch, and inside a training step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradstats._compiler import in_python
from gradstats.capture._reports import SharedInGraphError
from gradstats.capture._tracker import Tracker
from gradstats.capture.compiled._used import runs_graphs
from gradstats.capture.following._taken import explain
from gradstats.capture.operations._nested import tensors_in
from gradstats.capture.parameters._consumers import WithinBatch
from gradstats.capture.uses._uses import Settings
from gradstats.errors import TrackingError, UnsupportedOperationError
from gradstats.statistics._arguments import (
    LossFunction,
    check_call,
    check_choice,
    check_flags,
    check_model,
    check_recording,
    check_scaler,
    check_workspace,
)
from gradstats.statistics._backward import run_examples
from gradstats.statistics._batches import on_a_copy
from gradstats.statistics._fallback import Fallback
from gradstats.statistics._loss import (
    check_batch_dim,
    check_batch_size,
    check_losses,
    examples_in,
    loss_scale,
    loss_weights,
    packed_segments,
)
from gradstats.statistics._result import GradientNorms, statistics_of
from gradstats.statistics._state import State


@in_python
def per_example_norms(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    *,
    batch_dim: int = 0,
    cu_seqlens: Tensor | None = None,
    parameters: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    workspace: int | None = None,
    nonfinite: str = "raise",
    fallback: str | None = None,
    alignment: bool = False,
    gram: bool = False,
) -> GradientNorms:
    """Return the exact norm of every example's gradient, ‖∇ℓ_i(w)‖, without forming the gradients.

    ∇ℓ_i is the gradient before any hook on a parameter changes it (``register_hook``, or a hook on
    an autograd node or a module that changes what reaches parameters); such hooks may not be called
    at all. Hooks that change the gradients of activations are part of the backward: they are
    assumed to act linearly, on each example separately.

    Args:
        model: any module. It is left unchanged, training mode included, except for buffers that its
            own forward writes to.
        batch: whatever ``loss_fn`` takes: a tensor, or nested tuples, lists and mappings of
            tensors. A list may hold one entry for each example (detection targets, say), in order.
        loss_fn: ``loss_fn(model, batch) -> (B,)`` unreduced losses. It may be called several times:
            with ``fallback``, for some compiled models, and if a tensor that the forward makes from
            values (``torch.tensor([...])``) or finds in a closure or global was taken for data and
            turns out to be a constant.
        batch_dim: the example axis of the data.
        cu_seqlens: (B + 1,) integers, for examples of different lengths packed into one row as in
            padding-free training. Example i has rows cu_seqlens[i] to cu_seqlens[i + 1] (exclusive)
            of data of shape (rows, *) or (1, rows, *), and one loss. The model must not mix rows of
            different examples; attention masks and weights of products over rows are read to check
            this. Several graphs in one batch are packed examples too: their rows are nodes, and
            torch_geometric has their bounds in ``batch.ptr``. For edge features see
            ``assign_rows``.
        parameters: fnmatch patterns over parameter names; all that require grad by default.
        exclude: fnmatch patterns over the names of parameters to leave out.
        workspace: bytes of scratch memory on top of what the step itself uses; 256 MiB by default.
        nonfinite: "raise" an error for gradients with NaN or infinity, or "keep" them.
        fallback: "vmap" forms the per-example gradients of parameters without a rule by
            torch.func.vmap, as many examples at a time as the workspace allows, or one at a time
            where vmap fails. One more forward and backward of the whole batch checks that they add
            up to its gradient. Cannot be combined with ``alignment`` or ``gram``. By default, a
            parameter without a rule is an error.
        alignment: also return ⟨∇ℓ_i, Ḡ⟩ and ‖Ḡ‖² for the mean gradient Ḡ = (1/B) Σ_j ∇ℓ_j. This
            costs the weight gradients and about one more forward pass.
        gram: also return the (B, B) inner products ⟨∇ℓ_i, ∇ℓ_j⟩.

    Returns:
        GradientNorms: ``norm``, ``sqnorm``, ``loss`` (B,) each, and ``by_parameter``.

    Raises:
        LossShapeError, ExampleAxisError, CoupledExamplesError, UnsupportedOperationError,
        CoverageError, NonFiniteGradientError: see gradstats.errors.
        TrackingError: an argument has the wrong type or value, or the losses use none of the
            parameters.

    Cost:
        One forward and one backward without weight gradients, plus at most the cost of the weight
        gradients. Memory: that of the plain step and the workspace; for parameters that are
        transformed before use by more than views and casts, also one example's gradient of them.

    Source:
        Goodfellow, arXiv 1510.01799; Rochette et al., arXiv 1912.06015; Li et al., arXiv
        2110.05679.
    """
    check_call(model, loss_fn)
    check_choice("nonfinite", nonfinite, ("raise", "keep"))
    check_choice("fallback", fallback, (None, "vmap"))
    check_flags(alignment=alignment, gram=gram)
    batch_dim = check_batch_dim(batch_dim)
    batch_size, segments = examples_in(batch, batch_dim, cu_seqlens, model)
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "batch_dim": batch_dim,
        "segments": segments,
        "parameters": parameters,
        "exclude": exclude,
    }
    scratch = check_workspace(workspace)
    compiled = runs_graphs(model, loss_fn)
    if compiled or fallback is not None:
        loss_fn = on_a_copy(loss_fn)  # it may be called again

    def lean(**options: Any) -> tuple[GradientNorms, Tensor | None]:
        """Return the norms, and which example each loss is of if the model reordered them."""
        consumer = within_batch(alignment, gram)
        run = partial(run_examples, model, batch, loss_fn, consumer, scratch, **options)
        before = State(model, batch=tensors_in(batch)) if compiled else None
        try:
            tracker, losses = run()
        except SharedInGraphError:
            if before is None:
                raise
            before.restore()
            tracker, losses = run()
        stats = statistics_of(tracker, losses, 1.0, nonfinite, divisor=batch_size)
        return stats, tracker.reports.order

    if fallback is None:
        return lean(**options)[0]
    for name, wanted in (("alignment", alignment), ("gram", gram)):
        if wanted:
            raise UnsupportedOperationError(
                f"fallback={fallback!r} was given together with {name}=True, which it does not "
                f"support. Leave out {name}, or exclude the parameters without a rule instead."
            )
    return Fallback(model, batch, loss_fn, options, scratch).norms(lean, nonfinite)


class _ScaleAtBackward:
    """Reads the loss scale when the backward starts: it may change before the context closes."""

    def __init__(self, scaler: torch.amp.GradScaler | None, device: torch.device):
        self._scaler, self._device = scaler, device
        self.value: Tensor | float = 1.0

    def before_backward(self, losses, start, inputs) -> None:
        self.value = loss_scale(self._scaler, self._device)

    def after_backward(self) -> None:
        """Do nothing: only the scale is of interest."""


class track:
    """Measure per-example gradient norms ‖∇ℓ_i(w)‖ inside your own training step.

    ``param.grad`` is the same as without tracking: bit for bit with ``fused=False``, and up to the
    rounding of a reordered sum by default.

        with gs.track(model, batch_size=len(x)) as tracker:
            tracker.backward(F.cross_entropy(model(x), y, reduction="none"))
        tracker.stats.norm

    Args:
        model: any module; it is unchanged once the context has closed.
        batch_size: number of examples B.
        batch_dim: the example axis of the data.
        cu_seqlens: (B + 1,) bounds of packed examples; see per_example_norms.
        loss_reduction: how you formed the scalar, if you run ``loss.backward()`` yourself. "mean"
            means scalar = (1/B) Σ ℓ_i, which *defines* ℓ_i. So for a mean over the N tokens of the
            batch, ℓ_i is B/N times the sum of its token losses; if accelerate's ``backward``
            divides by the number of accumulated steps, ℓ_i is divided too; and a penalty added to
            the scalar is part of every ℓ_i. "sum" means scalar = Σ ℓ_i. Your word is trusted, but a
            scalar that is not known to be a sum over the examples is refused. What a custom
            autograd Function or a TorchScript function computes from a loss is taken for such a
            sum.
        weights: (B,) in place of ``loss_reduction``: scalar = Σ weights_i ℓ_i, in the order of the
            batch, or of the losses that ``tracker.backward`` is given.
        scaler: the torch.amp.GradScaler of the step; its scale is divided out of the statistics.
            ``tracker.backward`` applies the scale itself, so pass it unscaled losses. If you run
            the backward yourself, scale as usual: ``scaler.scale(loss).backward()``.
        fused: compute weight gradients in the same pass over the data as the norms, with whichever
            of PyTorch's libraries is faster. With False, losses that contain derivatives of the
            network, torch.vmap and some forms of attention are refused.
        parameters, exclude: fnmatch patterns over parameter names.
        workspace: bytes of scratch memory; 256 MiB by default.
        nonfinite: "keep" gradients with NaN or infinity (the default here, since a scaled step may
            overflow), or "raise" an error when the context closes.
        alignment: also measure ⟨∇ℓ_i, Ḡ⟩ and ‖Ḡ‖² for Ḡ = Σ_j weight_j ∇ℓ_j, the gradient of this
            context's training loss, before any scaling or averaging over processes. This costs
            about one more forward pass.
        gram: also measure the (B, B) inner products ⟨∇ℓ_i, ∇ℓ_j⟩. With ``alignment`` or ``gram``, a
            compiled model runs eagerly inside the context.

    Attributes:
        stats: GradientNorms, once the context has closed. Examples are in the order of the losses
            that ``tracker.backward`` was given, or in the order of the batch if you ran
            ``loss.backward()``.

    Raises:
        LossShapeError, ExampleAxisError, CoupledExamplesError, UnsupportedOperationError,
        CoverageError, NonFiniteGradientError: see gradstats.errors.
        TrackingError: an argument has the wrong type or value; a second backward or batch in one
            context; a backward after the context has closed; or the backward of the sum of the
            losses (``losses.backward(torch.ones(B))``) where that of their mean was announced.

    Cost:
        The plain step, plus for each weight the cheaper of two: squaring per-example tiles on the
        way to the weight gradient, or products between pairs of positions. Memory: that of the
        plain step and the workspace; for parameters that are transformed before use by more than
        views and casts, also one example's gradient of them.

    Source:
        As for per_example_norms.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int,
        batch_dim: int = 0,
        cu_seqlens: Tensor | None = None,
        loss_reduction: str = "mean",
        weights: Tensor | None = None,
        scaler: torch.amp.GradScaler | None = None,
        fused: bool = True,
        parameters: Sequence[str] | str | None = None,
        exclude: Sequence[str] | str = (),
        workspace: int | None = None,
        nonfinite: str = "keep",
        alignment: bool = False,
        gram: bool = False,
    ):
        check_model(model)
        check_scaler(scaler)
        check_flags(fused=fused, alignment=alignment, gram=gram)
        self._batch_size = batch_size = check_batch_size(batch_size)
        self._weights = loss_weights(loss_reduction, weights, batch_size)
        self._scaler = scaler
        self._nonfinite = check_choice("nonfinite", nonfinite, ("raise", "keep"))
        self._losses: Tensor | None = None
        self._stats: GradientNorms | None = None
        self._opened = False
        segments = None
        if cu_seqlens is not None:
            segments = packed_segments(cu_seqlens, model, batch_size)
        self._tracker = Tracker(
            model,
            batch_size=batch_size,
            batch_dim=check_batch_dim(batch_dim),
            segments=segments,
            settings=Settings(
                weight_gradients=True,
                fused=fused,
                workspace=check_workspace(workspace),
                consumer=within_batch(alignment, gram),
            ),
            parameters=parameters,
            exclude=exclude,
        )
        self._tracker.weight = None if isinstance(self._weights, Tensor) else self._weights
        self._scale = _ScaleAtBackward(scaler, self._tracker.device)
        if scaler is not None:
            self._tracker.listener = self._scale

    def __repr__(self) -> str:
        return f"track(batch_size={self._batch_size}, stats={self._stats})"

    def __enter__(self) -> track:
        if self._opened or self._tracker.closed:
            raise TrackingError(
                "this tracking context is open already, or has been used. One context serves one "
                "batch: call gs.track again for the next."
            )
        check_recording()
        try:
            self._tracker.open()
            self._opened = True
        except BaseException:
            self._tracker.close()
            raise
        return self

    def __exit__(self, kind, value, traceback) -> None:
        try:
            explain(self._tracker.marks, value)
        finally:
            self._tracker.close()
        if kind is None and self._tracker.reports.any:
            self._stats = statistics_of(
                self._tracker, self._losses, self._weights, self._nonfinite, self._scale.value
            )

    def backward(self, losses: Tensor) -> None:
        """Run the backward of the mean of ``losses``, or of Σ weights_i losses_i with weights.

        With a scaler, the scalar is first multiplied by its scale.

        Args:
            losses: (B,) unreduced losses, one for each example, not scaled.

        Raises:
            LossShapeError: the losses are not (B,) differentiable numbers.
            ExampleAxisError, CoupledExamplesError: a loss depends on examples other than its own.
            TrackingError: the call is outside the context.
        """
        if not self._opened or self._tracker.closed:
            raise TrackingError(
                "tracker.backward was called outside its context. Call it inside the with block."
            )
        self._tracker.visibility.check_backward()
        with torch._C.DisableTorchFunction():
            losses = check_losses(losses, self._batch_size)
            self._tracker.note_losses(losses)
            # The weights are divided out as the losses' dtype rounds them.
            if isinstance(self._weights, Tensor):
                factors = self._weights.to(losses)
                total = (losses * factors).sum()
                self._weights = factors.double()
            else:
                total = losses.mean()
                self._weights = 1 / self._batch_size
                if losses.dtype.itemsize < 4:
                    self._weights = torch.tensor(self._weights, dtype=losses.dtype).item()
            self._losses = losses.detach()
        if self._scaler is not None:
            total = self._scaler.scale(total)
        total.backward()

    @property
    def stats(self) -> GradientNorms:
        """The statistics of the step that ran inside the context."""
        if self._stats is None:
            self._tracker.reports.sqnorm_by_parameter()
            raise TrackingError(
                "the statistics are complete once the context has closed without an exception: "
                "read tracker.stats after the with block."
            )
        return self._stats


def within_batch(alignment: bool, gram: bool) -> WithinBatch | None:
    """Return the consumer that computes the requested products; None for norms alone."""
    return WithinBatch(alignment=alignment, gram=gram) if alignment or gram else None
