"""The monitor: gradient statistics of every so many steps of a training run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradstats.capture._selection import select_parameters
from gradstats.errors import TrackingError
from gradstats.monitor._arguments import check_monitor, checked_accumulation, is_count
from gradstats.monitor._context import MonitorStep
from gradstats.monitor._layers import Layers
from gradstats.monitor._measured import Measured, Options, Pending
from gradstats.monitor._metrics import step_metrics
from gradstats.monitor._ranks import group_of
from gradstats.monitor._records import ExampleRecord, RunningSelfInfluence, Spike
from gradstats.monitor._step import Collector
from gradstats.statistics._training import RunningRatio, cosines_to_mean

# Quantities that spikes are looked for in, and how many measured steps their median is taken over.
WATCHED = ("grad_norm", "example_grad_norm/max")
WINDOW, FEWEST = 100, 5
# How many spikes, and how many examples whose gradient was not finite, are remembered.
SPIKES, NONFINITE = 200, 1000
STATE_VERSION = 1


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

    Measured are the optimizer steps 0, ``every``, 2 · ``every``, …; in all others the context does
    nothing: no hook, no change to the model, and ``metrics()`` is empty. Norms are those before
    clipping, loss scale and learning rates those at the backward, whatever runs inside the context
    after it. Gradients are what they are
    without the monitor: to the bit with ``fused=False``, else up to the rounding of a reordered
    sum. Of N examples with n_i = ‖∇ℓ_i‖², ḡ = (1/N) Σ ∇ℓ_i, Ḡ² = ‖ḡ‖², p_i = ⟨∇ℓ_i, ḡ⟩ and
    N̄ = (1/N) Σ n_i, ``metrics()`` has

        grad_norm                         norm of the whole step's gradient, measured parameters
        example_grad_norm/{mean,p05,p50,p95,max}   of √n_i, over the examples where it is finite
        gns/tr_sigma, gns/g2              Ŝ = N/(N−1) (N̄ − Ḡ²), Ĝ² = (N Ḡ² − N̄)/(N−1): unbiased
        gns/b_simple, gns/b_simple_se     average of Ŝ / average of Ĝ² over measured steps, and its
                                          standard error; NaN while the average of Ĝ² is ≤ 0
        gns/undefined                     how many measured steps ended with that NaN
        coherence/alpha, coherence/alpha_se    average of Ĝ² / average of N̄, in the same way
        m_coherence, gradient_diversity, gradient_diversity/batch_bound   N Ḡ²/N̄, its inverse Δ, N Δ
        norm_test/theta                   √(Ŝ / (N Ḡ²))
        nonfinite/examples, nonfinite/steps    examples whose norm is not finite, and measured steps
                                          that had any, so far
        align/mean_cos_to_mean, align/mean_cos_to_mean_se, align/fraction_negative
        inner_test/theta, ortho_test/nu   with ``alignment=True``
        stiffness/{cos,sign}, confusion/{min,fraction_negative}   with ``gram=True``
        batch_loss, cabs                  the step's loss; lr · Ŝ / loss, with ``optimizer=``
        clip/frac                         share of examples with √n_i > ``clip``
        spike                             1 if a norm stood out, else 0

    and, with ``layers=``, ``grad_norm/<layer>``, ``example_grad_norm/<layer>/mean``,
    ``gns/<layer>/{tr_sigma,g2,b_simple,b_simple_se}`` for each layer. Where gradients are
    accumulated, p_i and what follows from it are taken within each micro-batch. Where examples
    weigh differently (``weights=``, micro-batches of different sizes), ḡ, N̄ and the sums in the
    tests are weighted means, Σ w_i … with Σ w_i = 1, N is 1 / Σ w_i², and Ĝ² the weighted mean of
    ⟨∇ℓ_i, ∇ℓ_j⟩ over i ≠ j. Stiffness is averaged over pairs of which neither gradient is zero.
    Where an example's gradient is not finite, what takes all examples or pairs of the step together
    is NaN, and the averages over steps leave the step out.

    Hooks on parameters (``register_hook``) may change gradients; n_i and p_i are those before them.
    So are ḡ and ``grad_norm`` with ``alignment=True``, one micro-batch and one process; otherwise
    these are read from ``.grad``, after the hooks, and a warning says so.

    Args:
        model: any module; wrapped in DistributedDataParallel or sharded by ``fully_shard`` too.
        every: measure one step in so many.
        loss_reduction: how the scalar is formed, which defines ℓ_i and cannot be detected. "mean":
            (1/B) Σ ℓ_i over the micro-batch, divided by K where K are accumulated. "sum": Σ ℓ_i,
            divided likewise. "step_mean": the scalars, added up over the micro-batches of the
            optimizer step and averaged over its R processes, give the (1/N) Σ ℓ_i of all its N
            examples; each is (R/N) Σ ℓ_i over its own examples (a mean over the tokens of the whole
            step: ℓ_i is N / #tokens times the sum of its token losses).
        optimizer: the optimizer; its learning rates weigh ``self_influence``.
        scaler: the torch.amp.GradScaler; its scale is divided out.
        alignment: measure p_i too.
        gram: measure all inner products within each micro-batch.
        layers: patterns over module paths, ``"blocks.*"``: one layer for each path that matches.
        decay: of the averages over measured steps.
        spike: a norm stands out when it exceeds so many times its median over the last 100 measured
            steps (of at least 5).
        top: how many examples of largest norm, and of largest alignment, a spike records.
        clip: threshold of ``clip/frac``.
        fused: let weight gradients come from the same pass over the data as the norms.
        parameters, exclude: fnmatch patterns over parameter names.
        workspace: bytes of scratch memory; 256 MiB by default.
        process_group: the processes that share the optimizer step. By default those of a
            DistributedDataParallel or sharded model.

    Attributes:
        steps: how many optimizer steps have ended.

    Cost:
        A measured step costs what ``gs.track`` costs, and one copy from the device to the host
        (two over several processes). Other steps cost nothing.

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
        optimizer: torch.optim.Optimizer | None = None,
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
            model, every, loss_reduction, optimizer, scaler, decay, spike, top, clip, workspace
        )
        self.model, self.every = model, every
        self.optimizer, self.scaler = optimizer, scaler
        self._options = Options(
            loss_reduction, alignment, gram, layers, fused, parameters, exclude, workspace
        )
        Layers(list(select_parameters(model, parameters, exclude)), layers)
        self._spike_factor, self._top, self._clip = spike, top, clip
        self.process_group = process_group
        self.steps = 0
        self._spikes: deque[Spike] = deque(maxlen=SPIKES)
        self._self_influence = RunningSelfInfluence()
        self._nonfinite: deque[tuple[int, int]] = deque(maxlen=NONFINITE)
        self._history: dict[str, list[float]] = {}
        self._decay = decay
        self._ratios: dict[str, RunningRatio] = {}
        self._undefined = self._nonfinite_steps = 0
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in WATCHED}
        self._collector: Collector | None = None
        self._next = 0
        self._pending: tuple[int, Pending] | None = None
        self._measured: Measured | None = None
        self._metrics: dict[str, float] = {}

    def step(
        self,
        batch_size: int,
        ids: Sequence[int] | Tensor | None = None,
        *,
        weights: Tensor | None = None,
        accumulation: tuple[int, int] = (0, 1),
    ) -> MonitorStep:
        """Return the context for one forward and backward.

        Args:
            batch_size: number of examples B of this micro-batch, on this process.
            ids: (B,) integers that say which examples these are, in any order: for ``examples``,
                ``spikes`` and ``nonfinite``, and, if the monitor was given the optimizer, for
                ``self_influence``.
            weights: (B,) positive, if the scalar is Σ weights_i ℓ_i rather than ``loss_reduction``.
            accumulation: (k, K): this is micro-batch k = 0, …, K − 1 of the K that make one
                optimizer step, and its scalar is divided by K.
        """
        index, count = checked_accumulation(accumulation)
        if index not in (0, self._next):
            raise TrackingError(
                f"accumulation is {accumulation!r} where micro-batch {self._next} was expected: "
                "the micro-batches of one optimizer step come in order."
            )
        return MonitorStep(
            self, batch_size, ids, weights, index == 0, index == count - 1, count, count == 1
        )

    @property
    def self_influence(self) -> RunningSelfInfluence:
        """Running self-influence by id, of the measured steps that were given ids.

        Empty without ``optimizer=``, whose learning rates weigh it.
        """
        self._settle()
        return self._self_influence

    @property
    def spikes(self) -> list[Spike]:
        """The steps at which a norm stood out, the last 200 of them.

        Of steps at which a norm was not finite, one after the other, the first.
        """
        self._settle()
        return list(self._spikes)

    @property
    def nonfinite(self) -> deque[tuple[int, int]]:
        """(step, id or position) of examples whose gradient was not finite, the last 1000."""
        self._settle()
        return self._nonfinite

    @property
    def history(self) -> dict[str, list[float]]:
        """Metric → its values at all measured steps, whose numbers are under "step".

        NaN where a metric was not among those measured: other options, other layers.
        """
        self._settle()
        return self._history

    def metrics(self) -> dict[str, float]:
        """Return the last step's metrics, name → number; empty if it was not measured."""
        self._settle()
        return dict(self._metrics)

    def histograms(self) -> dict[str, np.ndarray]:
        """Return the last measured step's distributions over examples, for TensorBoard or W&B.

        Returns:
            ``example_grad_norm`` (N,), and with alignments ``align/cos_to_mean`` (N,): finite
            values; empty while no step was measured.
        """
        self._settle()
        if self._measured is None:
            return {}
        step = self._measured.step
        columns = {"example_grad_norm": np.sqrt(step.sqnorm)}
        if step.alignment is not None:
            columns["align/cos_to_mean"] = cosines_to_mean(step)
        return {name: column[np.isfinite(column)] for name, column in columns.items()}

    def examples(self, k: int = 8, by: str = "norm") -> list[ExampleRecord]:
        """Return the k examples of the last measured step with the largest norm or alignment.

        Args:
            k: how many.
            by: "norm" or "alignment".
        """
        self._settle()
        if not is_count(k):
            raise TrackingError(f"k is {k!r}, expected a number of examples.")
        if by not in ("norm", "alignment"):
            raise TrackingError(f'by is {by!r}, expected "norm" or "alignment".')
        if self._measured is None:
            return []
        key = self._measured.step.sqnorm
        if by == "alignment":
            if self._measured.step.alignment is None:
                raise TrackingError("alignments were not measured: pass alignment=True.")
            key = self._measured.step.alignment
        # Not finite counts as largest: such an example is what one is looking for.
        order = np.argsort(-np.where(np.isfinite(key), key, np.inf), kind="stable")
        return [self._record(position) for position in order[:k]]

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs: numbers, strings and tensors only."""
        self._settle()
        return {
            "version": STATE_VERSION,
            "steps": self.steps,
            "undefined": self._undefined,
            "nonfinite_steps": self._nonfinite_steps,
            "nonfinite": [list(item) for item in self._nonfinite],
            "ratios": {name: ratio.state_dict() for name, ratio in self._ratios.items()},
            "recent": {name: list(values) for name, values in self._recent.items()},
            "spikes": [spike.state_dict() for spike in self._spikes],
            "history": {
                name: torch.tensor(values, dtype=torch.float64)
                for name, values in self._history.items()
            },
            "self_influence": self._self_influence.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; what was measured before is replaced.

        What another choice of options left out of it starts anew.
        """
        if not isinstance(state, Mapping):
            raise TrackingError(
                f"state is {type(state).__name__}, expected what monitor.state_dict() returned."
            )
        if state.get("version") != STATE_VERSION:
            raise TrackingError(
                f"the monitor's state has version {state.get('version')!r}, expected "
                f"{STATE_VERSION}: it was saved by another version of gradstats. Start without it."
            )
        ratios = {name: RunningRatio(self._decay) for name in state["ratios"]}
        for name, saved in state["ratios"].items():
            ratios[name].load_state_dict(saved)
        self_influence = RunningSelfInfluence()
        self_influence.load_state_dict(state["self_influence"])
        recent = {name: deque(state["recent"][name], maxlen=WINDOW) for name in WATCHED}
        spikes = deque(map(Spike.from_state, state["spikes"]), maxlen=SPIKES)
        history = {n: torch.as_tensor(v).tolist() for n, v in state["history"].items()}
        nonfinite = deque((tuple(item) for item in state["nonfinite"]), maxlen=NONFINITE)
        counts = state["steps"], state["undefined"], state["nonfinite_steps"]
        # All of it was there: nothing is lost to a state that is not whole.
        self.steps, self._undefined, self._nonfinite_steps = counts
        self._ratios, self._recent, self._self_influence = ratios, recent, self_influence
        self._spikes, self._history, self._nonfinite = spikes, history, nonfinite
        self._collector = self._pending = self._measured = None
        self._metrics, self._next = {}, 0

    def continue_in(self, optimizer, scaler, process_group) -> None:
        """Measure another run of the same model: all that was measured stays.

        Args:
            optimizer, scaler, process_group: those of that run, as for a new monitor.
        """
        self.optimizer, self.scaler, self.process_group = optimizer, scaler, process_group

    def begin(self, single: bool) -> bool:
        """Start an optimizer step; return whether it is measured."""
        self._settle()
        self._metrics, self._collector = {}, None
        if self.steps % self.every:
            return False
        group = self.process_group
        if group is None:
            group = group_of(self.model)
        self._collector = Collector(
            self.model, self._options, self.optimizer, self.scaler, group, single
        )
        return True

    def end(self) -> None:
        """End an optimizer step."""
        if self._collector is not None:
            self._pending = (self.steps, self._collector.finish())
            self._collector = None
        self.steps += 1

    def _settle(self) -> None:
        """Take in the last measured step, if its numbers are still on the device."""
        if self._pending is None:
            return
        (number, pending), self._pending = self._pending, None
        measured = self._measured = pending.read()
        step = measured.step
        if measured.ids is not None and measured.influence is not None:
            self._self_influence.add(measured.ids, measured.influence)
        wrong = np.flatnonzero(~np.isfinite(step.sqnorm))
        self._nonfinite_steps += bool(len(wrong))
        names = wrong if measured.ids is None else measured.ids[wrong]
        self._nonfinite.extend((number, int(name)) for name in names)
        metrics = step_metrics(measured, self._clip)
        for prefix, gradients in {"": step, **measured.layers}.items():
            path = f"gns/{prefix}/" if prefix else "gns/"
            spread, gradient = gradients.noise_scale
            ratio = self._ratio(f"{path}b_simple")
            ratio.add(spread, gradient)
            metrics[f"{path}tr_sigma"], metrics[f"{path}g2"] = spread, gradient
            metrics[f"{path}b_simple"] = ratio.value
            metrics[f"{path}b_simple_se"] = ratio.standard_error
        self._undefined += math.isnan(metrics["gns/b_simple"])
        coherence = self._ratio("coherence/alpha")
        coherence.add(metrics["gns/g2"], step.mean_of_sqnorms)
        metrics["coherence/alpha"] = coherence.value
        metrics["coherence/alpha_se"] = coherence.standard_error
        metrics["gns/undefined"] = float(self._undefined)
        metrics["nonfinite/steps"] = float(self._nonfinite_steps)
        metrics["spike"] = float(self._look_for_spikes(number, metrics))
        self._metrics = metrics
        row = {"step": number, **metrics}
        before = len(self._history.get("step", ()))
        for name in {**self._history, **row}:
            values = self._history.setdefault(name, [math.nan] * before)
            values.append(float(row.get(name, math.nan)))

    def _look_for_spikes(self, number: int, metrics: dict[str, float]) -> bool:
        found = False
        for name in WATCHED:
            recent, value = self._recent[name], metrics[name]
            typical = median(recent) if len(recent) >= FEWEST else math.nan
            if not math.isfinite(value) or value > self._spike_factor * typical:
                found = True
                before = self._history.get(name, [0.0])[-1]
                if not (math.isfinite(value) or math.isfinite(before)):
                    continue
                examples = self.examples(self._top)
                if self._options.alignment:
                    examples += self.examples(self._top, by="alignment")
                distinct = {record.position: record for record in examples}
                ordered = sorted(distinct.values(), key=lambda record: -record.norm)
                self._spikes.append(Spike(number, name, value, typical, tuple(ordered)))
            if math.isfinite(value):
                recent.append(value)
        return found

    def _record(self, position: int) -> ExampleRecord:
        measured = self._measured
        assert measured is not None
        step = measured.step
        alignment = math.nan
        if step.alignment is not None:
            along = step.batch == step.batch[position]
            square = np.average(step.alignment[along], weights=step.weight[along])
            if 0 < square < math.inf:
                alignment = float(step.alignment[position] / math.sqrt(square))
        layer, share = measured.largest_part(position)
        return ExampleRecord(
            id=None if measured.ids is None else int(measured.ids[position]),
            position=int(position),
            norm=float(np.sqrt(step.sqnorm[position])),
            alignment=alignment,
            layer=layer,
            share=share,
        )

    def _ratio(self, name: str) -> RunningRatio:
        return self._ratios.setdefault(name, RunningRatio(self._decay))
