"""The monitor: gradient statistics of every so many steps of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradstats._warnings import warn
from gradstats.capture._selection import anatomy_of
from gradstats.errors import TrackingError
from gradstats.monitor._arguments import check_monitor, checked_accumulation
from gradstats.monitor._context import MonitorStep
from gradstats.monitor._layers import check_layers
from gradstats.monitor._measured import Options, Pending
from gradstats.monitor._ranks import group_of
from gradstats.monitor._records import ExampleRecord, RunningSelfInfluence, Spike
from gradstats.monitor._run import Run
from gradstats.monitor._step import Collector


class Monitor:
    """Per-example gradient norms, noise scale, diversity, coherence and alignment while training.

        monitor = gs.Monitor(model, every=50)
        for x, y in loader:
            optimizer.zero_grad()
            with monitor.step(batch_size=len(x)):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
            optimizer.step()
            logger.log(monitor.metrics())

    The optimizer steps 0, ``every``, 2 · ``every``, … are measured. In all others the context does
    nothing: no hook, no change to the model, and ``metrics()`` is empty. Norms, loss scale and
    learning rates are those at the backward, before clipping and whatever else runs in the context
    after it. Gradients are the same as without the monitor: bit for bit with ``fused=False``, else
    up to the rounding of a reordered sum. For N examples with n_i = ‖∇ℓ_i‖², ḡ = (1/N) Σ ∇ℓ_i,
    Ḡ² = ‖ḡ‖², p_i = ⟨∇ℓ_i, ḡ⟩ and N̄ = (1/N) Σ n_i, ``metrics()`` has

        grad_norm                    norm of the whole step's gradient, over measured parameters
        example_grad_norm/mean       mean of √n_i over the examples where it is finite; likewise
                                     ``p05``, ``p50``, ``p95`` and ``max``
        gns/tr_sigma                 Ŝ = N/(N−1) (N̄ − Ḡ²), unbiased: the trace of the covariance
        gns/g2                       Ĝ² = (N Ḡ² − N̄)/(N−1), unbiased: the true gradient, squared
        gns/b_simple                 average of Ŝ / average of Ĝ² over measured steps, weighted
                                     by N: the noise scale; NaN while the average of Ĝ² is ≤ 0
        gns/b_simple_se              its standard error
        gns/undefined                how many measured steps ended with b_simple NaN
        coherence/alpha              average of Ĝ² / average of N̄, in the same way
        coherence/alpha_se           its standard error
        gradient_diversity           Δ = N̄ / (N Ḡ²)
        gradient_diversity/batch_bound   N Δ
        m_coherence                  1/Δ
        norm_test/theta              √(Ŝ / (N Ḡ²))
        nonfinite/examples           examples whose norm is not finite
        nonfinite/steps              measured steps with such examples, so far
        batch_loss                   the step's loss: the (weighted) mean of its ℓ_i
        spike                        1 if a norm stood out, else 0
        cabs                         learning rate · Ŝ / loss; with ``optimizer=``
        clip/frac                    share of the finite √n_i that exceed ``clip``; with ``clip=``

    with ``alignment=True``, the default,

        align/mean_cos_to_mean       mean of the cosines p_i / (√n_i Ḡ)
        align/mean_cos_to_mean_se    its standard error
        align/fraction_negative      share of examples with ⟨∇ℓ_i, mean of the others⟩ < 0
        inner_test/theta             √(Var_i(p_i) / (N Ḡ⁴))
        ortho_test/nu                √((1/N) Σ (n_i − p_i²/Ḡ²) / ((N−1) Ḡ²))

    with ``gram=True``, over pairs i ≠ j

        stiffness/cos                mean cosine of ∇ℓ_i and ∇ℓ_j
        stiffness/sign               mean sign of ⟨∇ℓ_i, ∇ℓ_j⟩
        confusion/min                least ⟨∇ℓ_i, ∇ℓ_j⟩
        confusion/fraction_negative  share of pairs with ⟨∇ℓ_i, ∇ℓ_j⟩ < 0

    and, with ``layers=``, ``grad_norm/<layer>``, ``example_grad_norm/<layer>/mean`` and
    ``gns/<layer>/{tr_sigma,g2,b_simple,b_simple_se}`` for each layer.

    With gradient accumulation or several processes, p_i and the metrics that follow from it are
    computed within each micro-batch, with that micro-batch's mean: the fewer examples it has, the
    larger are the cosines. If examples have different weights (``weights=``, micro-batches of
    different sizes), ḡ, N̄ and the sums in the tests are weighted means, Σ w_i … with Σ w_i = 1;
    N is 1 / Σ w_i², Ĝ² the weighted mean of ⟨∇ℓ_i, ∇ℓ_j⟩ over i ≠ j, and Ŝ = N̄ − Ĝ². Stiffness is
    averaged over pairs in which neither gradient is zero. If an example's gradient is not finite,
    metrics over all examples or pairs of the step are NaN, and averages over steps leave that step
    out.

    ``gns/b_simple`` is a number of examples. If the loss has the same curvature in all directions,
    a step over N examples, at its best step size, makes N / (N + B_simple) of the progress of a
    step along the true gradient. So if N is far smaller, a step on twice the batch is worth nearly
    two steps; if N is far larger, hardly more than one. The noise scale mostly grows during
    training. ``cabs`` is the batch size that Balles et al. would choose. The tests ask for a larger
    batch if θ or ν exceeds a bound that you choose; for θ, choose it below 1.

    Hooks on parameters (``register_hook``) may change gradients; n_i and p_i are taken before them.
    So are ḡ and ``grad_norm`` with ``alignment=True``, one micro-batch and one process; otherwise
    these are read from ``.grad``, after the hooks, and a warning says so.

    Args:
        model: any module, also in DistributedDataParallel or sharded by ``fully_shard``.
        every: interval of the measured optimizer steps, the first included.
        loss_reduction: how the scalar is formed, which defines ℓ_i and cannot be detected. "mean":
            (1/B) Σ ℓ_i over the micro-batch, divided by K if K are accumulated. "sum": Σ ℓ_i,
            divided likewise. "step_mean": the scalars, summed over the micro-batches of the
            optimizer step and averaged over its R processes, give (1/N) Σ ℓ_i over all its N
            examples; each scalar is (R/N) Σ ℓ_i over its micro-batch. An example is a mean over the
            tokens of the whole step: ℓ_i is N / #tokens times the sum of its token losses.
        optimizer: the optimizer, or a list of those that step together, such as Muon and AdamW.
            The learning rate of each parameter weights its part of ``self_influence``. Steps where
            one is unknown (None in Adafactor; Prodigy, D-Adaptation) do not count there, and
            ``cabs`` is NaN, as where rates differ.
        scaler: the torch.amp.GradScaler, whose scale is divided out. In float32, norm · scale must
            stay below 1.8e19, where squares overflow; beyond, a norm counts as not finite.
        alignment: measure p_i too. Compiled models then run eagerly in measured steps.
        gram: measure all inner products within each micro-batch.
        layers: patterns over module paths: one layer per matching path. Path components are matched
            one by one, from the first: ``"blocks.*"`` makes a layer of ``blocks.0``, but
            ``"*.layers.*"`` makes none of ``model.decoder.layers.0``.
        decay: of the exponential averages over measured steps, in [0, 1).
        spike: a norm stands out if it is more than this many times its median over the last 100
            measured steps (at least 5 are needed).
        top: how many examples of largest norm, and of largest alignment, a spike records.
        clip: threshold of ``clip/frac``.
        fused: compute weight gradients in the same pass over the data as the norms.
        parameters, exclude: fnmatch patterns over parameter names.
        workspace: bytes of scratch memory; 256 MiB by default.
        process_group: the processes that share the optimizer step: the backward averages gradients
            over them. By default those of a DistributedDataParallel or sharded model.

    Attributes:
        steps: number of optimizer steps completed.

    Raises:
        TrackingError: an argument of the wrong type or value; in ``step``, as from ``gs.track``.
        CoverageError: a pattern of ``layers``, ``parameters`` or ``exclude`` matches nothing.

    Cost:
        A measured step costs as much as ``gs.track``, and one copy from the device to the host (two
        with several processes). Other steps cost nothing.

    Source:
        McCandlish et al., arXiv 1812.06162 (noise scale); Yin et al., arXiv 1706.05699 (diversity);
        Chatterjee and Zielinski, arXiv 2008.01217 (coherence); Byrd et al. 2012 (norm test);
        Bollapragada et al., arXiv 1710.11258 (inner product and orthogonality test); Balles et al.,
        arXiv 1612.05086 (CABS); Fort et al., arXiv 1901.09491 (stiffness); Sankararaman et al.,
        arXiv 1904.06963 (confusion); Pruthi et al., arXiv 2002.08484 (self-influence).
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        *,
        loss_reduction: str = "mean",
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        alignment: bool = True,
        gram: bool = False,
        layers: Sequence[str] | str | None = None,
        decay: float = 0.95,
        spike: float = 5.0,
        top: int = 8,
        clip: float | None = None,
        fused: bool = True,
        parameters: Sequence[str] | str | None = None,
        exclude: Sequence[str] | str = (),
        workspace: int | None = None,
        process_group: Any = None,
    ):
        check_monitor(
            model, every, loss_reduction, optimizer, scaler, decay, spike, top, clip, workspace,
            process_group, alignment=alignment, gram=gram, fused=fused,
        )  # fmt: skip
        self.model, self.every = model, int(every)
        self.optimizer, self.scaler = optimizer, scaler
        self._options = Options(
            loss_reduction, alignment, gram, layers, fused, parameters, exclude, workspace
        )
        # Patterns that match nothing are refused here, not at the first measured step.
        anatomy = anatomy_of(model)
        selected = anatomy.select(parameters, exclude)
        named = anatomy.named().items()
        # Frozen parameters may be trained later.
        check_layers([n for n, each in named if n in selected or not each.requires_grad], layers)
        self.process_group = process_group
        self.steps = 0
        # As Python's floats: a float32 decay would make averages float32, and states may not hold
        # NumPy's numbers.
        self._choices = float(decay), float(spike), top, clip
        self._run = Run(*self._choices)
        self._metrics: dict[str, float] = {}
        # The current optimizer step, None if not measured, and its next micro-batch, None if any.
        self._collector: Collector | None = None
        self._next: int | None = 0
        self._pending: Pending | None = None  # the last measured step, until it is read

    def __repr__(self) -> str:
        # The pending step is counted without reading it, which would wait for the device.
        pending = self._pending is not None and not self._pending.skipped
        measured = len(self._run.history.get("step", ())) + pending
        return f"{type(self).__name__}(every={self.every}, steps={self.steps}, measured={measured})"

    def step(
        self,
        batch_size: int,
        ids: Sequence[int] | np.ndarray | Tensor | None = None,
        *,
        weights: Tensor | None = None,
        accumulation: tuple[int, int] | None = None,
        batch_dim: int = 0,
        cu_seqlens: Tensor | None = None,
    ) -> MonitorStep:
        """Return the context for one forward and backward.

        Args:
            batch_size: number of examples B of this micro-batch, on this process.
            ids: (B,) integers that name these examples, for ``examples``, ``spikes`` and
                ``nonfinite`` and, if the monitor was given the optimizer, ``self_influence``.
            weights: (B,) positive, if the scalar is Σ weights_i ℓ_i rather than ``loss_reduction``.
            accumulation: (k, K): this is micro-batch k = 0, …, K − 1 of the K that make one
                optimizer step, and its scalar is divided by K; (0, 1) by default.
            batch_dim: the example axis of the data.
            cu_seqlens: (B + 1,) bounds of examples packed into one row; see per_example_norms.

        Returns:
            MonitorStep: a context manager, in which you run forward and backward yourself; its
            ``measured`` says whether this step is measured.

        Raises:
            TrackingError: micro-batches are out of order, or ``accumulation`` is missing although
                accelerate's optimizer accumulates several. When the context opens on a measured
                step: ids are not (B,) integers, or weights are negative.
            LossShapeError, ExampleAxisError: when the context opens on a measured step: weights are
                zero or of another shape; an invalid ``batch_size``, ``batch_dim`` or
                ``cu_seqlens``.
        """
        index, count = checked_accumulation(accumulation, self.optimizer)
        if self._next is not None and index not in (0, self._next):
            raise TrackingError(
                f"accumulation is {accumulation!r} where micro-batch {self._next} was expected: "
                "the micro-batches of one optimizer step come in order, counted from 0."
            )
        if index == 0 and self._next:
            warn(
                f"an optimizer step began when micro-batch {self._next} of the last one was "
                "expected, so the last one is neither measured nor counted. If it was shorter, as "
                "at the end of an epoch, pass accumulation=(k, K) with the K that it has, and "
                "divide its losses by that K."
            )
        return MonitorStep(
            self, batch_size, ids, weights, cu_seqlens, batch_dim,
            first=index == 0, last=index == count - 1, divisor=count,
        )  # fmt: skip

    @property
    def self_influence(self) -> RunningSelfInfluence:
        """Running self-influence by id, Σ_t η_t ‖∇ℓ_i(w_t)‖² over measured steps with ids.

        Its ``ids``, ``values`` and ``visits`` are arrays (N,), and ``top(k)`` lists (id, value).
        With ``every`` > 1, how often an example is measured is random: compare ``values / visits``.
        It is empty without ``optimizer=``, whose learning rates weight it; ``top`` then raises.
        """
        self._settle()
        return self._run.self_influence

    @property
    def spikes(self) -> list[Spike]:
        """The last 200 steps at which a norm stood out.

        Of consecutive measured steps with a norm that is not finite, only the first is listed.
        """
        self._settle()
        return list(self._run.spikes)

    @property
    def nonfinite(self) -> list[tuple[int, int]]:
        """(step, id or position) of the last 1000 examples whose gradient was not finite."""
        self._settle()
        return list(self._run.nonfinite)

    @property
    def history(self) -> dict[str, list[float]]:
        """Metric → its values at all measured steps; "step" has the steps' numbers.

        A value is NaN where a metric was not measured, because options or layers were different.
        Empty before the first measured step.
        """
        self._settle()
        return {name: list(values) for name, values in self._run.history.items()}

    def metrics(self) -> dict[str, float]:
        """Return the last step's metrics.

        Returns:
            Name → number; empty if the step was not measured. The monitor of a trainer's callback
            does not see such steps, and keeps the metrics of the last measured one.

        Raises:
            TrackingError: the step's gradient is unknown; the message says why.
        """
        self._settle()
        return dict(self._metrics)

    def histograms(self) -> dict[str, np.ndarray]:
        """Return the last measured step's distributions over examples, for TensorBoard or W&B.

        Returns:
            ``example_grad_norm`` (N,), and with ``alignment=True`` ``align/cos_to_mean`` (N,):
            the finite values. Empty before the first measured step.
        """
        self._settle()
        return self._run.histograms()

    def examples(self, k: int = 8, by: str = "norm") -> list[ExampleRecord]:
        """Return the k examples of the last measured step with the largest norm or alignment.

        Args:
            k: how many.
            by: "norm" or "alignment".

        Returns:
            list of ExampleRecord, the largest first; empty before the first measured step.

        Raises:
            TrackingError: ``k`` is not a number of examples, ``by`` is neither of these names, or
                alignments were not measured.
        """
        self._settle()
        return self._run.examples(k, by)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, for ``load_state_dict``.

        Returns:
            Nested dicts and lists of numbers, strings and tensors only.
        """
        self._settle()
        return self._run.state_dict(self.steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, which replaces what was measured before.

        Metrics that the state lacks, because it was saved with other options, start afresh.

        Args:
            state: what ``state_dict`` returned.

        Raises:
            TrackingError: ``state`` is something else, or from another version of gradstats.
        """
        run = Run(*self._choices)
        # Assigned last: if the state is damaged, nothing is lost.
        self._run, self.steps = run, run.load_state_dict(state)
        self._collector, self._pending, self._metrics, self._next = None, None, {}, 0

    def _begin(self, *, single: bool) -> None:
        """Start an optimizer step, of one micro-batch or of several."""
        self._settle()
        self._metrics, self._collector, self._next = {}, None, 0
        if self.steps % self.every:
            return
        group = group_of(self.model) if self.process_group is None else self.process_group
        self._collector = Collector(
            self.model, self._options, self.optimizer, self.scaler, group, single
        )

    def _end(self, last: bool | None) -> None:
        """End a micro-batch, and with the last one its optimizer step."""
        if not last:
            self._next = None if self._next is None else self._next + 1
            return
        self._next = 0
        if self._collector is not None:
            collector, self._collector = self._collector, None
            self._pending = collector.finish(self.steps)
        self.steps += 1

    def _settle(self) -> None:
        """Fetch the last measured step, if its numbers are still on the device."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            measured = pending.read()
        except TrackingError as error:
            # With the step's number: the call that reads it may be in a later step.
            raise TrackingError(f"at optimizer step {pending.number}, {error}") from None
        if measured is None:
            if not pending.skipped:
                warn(
                    f"optimizer step {pending.number} was not measured by gradstats.Monitor: "
                    "another process ran no backward in it.",
                )
            return
        self._metrics = self._run.add(pending.number, measured)
