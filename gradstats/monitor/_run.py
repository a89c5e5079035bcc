"""The averages, spikes and history that a monitor keeps over its measured steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from gradstats._values import integer
from gradstats.errors import TrackingError
from gradstats.monitor._measured import Measured
from gradstats.monitor._metrics import step_metrics
from gradstats.monitor._records import ExampleRecord, RunningSelfInfluence, Spike
from gradstats.statistics._training import RunningRatio, cosines_to_mean, lengths_along_mean

STATE_VERSION = 1

# Metrics that may spike, and how many measured steps their median is over: at most, at least.
WATCHED = ("grad_norm", "example_grad_norm/max")
WINDOW, FEWEST = 100, 5
# How many spikes, and how many examples with a gradient that is not finite, are kept.
SPIKES, NONFINITE = 200, 1000


class Run:
    """The last measured step, and averages, spikes and history over all of them.

    Args:
        decay, spike, top, clip: as for ``Monitor``.

    Attributes:
        measured: the last measured step, None before the first.
        history, spikes, nonfinite, self_influence: as ``Monitor`` shows them.
    """

    def __init__(self, decay: float, spike: float, top: int, clip: float | None):
        self._decay, self._spike_factor, self._top, self._clip = decay, spike, top, clip
        self.measured: Measured | None = None
        self.history: dict[str, list[float]] = {}
        self.spikes: deque[Spike] = deque(maxlen=SPIKES)
        self.nonfinite: deque[tuple[int, int]] = deque(maxlen=NONFINITE)
        self.self_influence = RunningSelfInfluence()
        self._ratios: dict[str, RunningRatio] = {}
        self._undefined = self._nonfinite_steps = 0
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in WATCHED}

    def add(self, number: int, measured: Measured) -> dict[str, float]:
        """Take in a measured optimizer step, and return its metrics."""
        self.measured = measured
        step = measured.step
        self.self_influence.add(measured.ids, measured.influence)
        positions = np.flatnonzero(~np.isfinite(step.sqnorm))
        self._nonfinite_steps += bool(len(positions))
        ids = positions if measured.ids is None else measured.ids[positions]
        self.nonfinite.extend((number, int(each)) for each in ids)
        metrics = step_metrics(measured, self._clip)
        for prefix, gradients in {"": step, **measured.layers}.items():
            path = f"gns/{prefix}/" if prefix else "gns/"
            spread, gradient = gradients.noise_scale
            ratio = self._ratio(f"{path}b_simple")
            ratio.add(spread, gradient, gradients.effective_batch)
            metrics[f"{path}tr_sigma"], metrics[f"{path}g2"] = spread, gradient
            metrics[f"{path}b_simple"] = ratio.value
            metrics[f"{path}b_simple_se"] = ratio.standard_error
        self._undefined += math.isnan(metrics["gns/b_simple"])
        coherence = self._ratio("coherence/alpha")
        coherence.add(metrics["gns/g2"], step.mean_of_sqnorms, step.effective_batch)
        metrics["coherence/alpha"] = coherence.value
        metrics["coherence/alpha_se"] = coherence.standard_error
        metrics["gns/undefined"] = float(self._undefined)
        metrics["nonfinite/steps"] = float(self._nonfinite_steps)
        metrics["spike"] = float(self._look_for_spikes(number, measured, metrics))
        row = {"step": number, **metrics}
        earlier = len(self.history.get("step", ()))
        for name in {**self.history, **row}:
            values = self.history.setdefault(name, [math.nan] * earlier)
            values.append(float(row.get(name, math.nan)))
        return metrics

    def histograms(self) -> dict[str, np.ndarray]:
        """Return the last measured step's distributions; see ``Monitor.histograms``."""
        if self.measured is None:
            return {}
        step = self.measured.step
        columns = {"example_grad_norm": np.sqrt(step.sqnorm)}
        if step.alignment is not None:
            columns["align/cos_to_mean"] = cosines_to_mean(step)
        return {name: column[np.isfinite(column)] for name, column in columns.items()}

    def examples(self, k: int, by: str = "norm") -> list[ExampleRecord]:
        """Return the k largest examples of the last measured step; see ``Monitor.examples``."""
        if integer(k, 0) is None:
            raise TrackingError(f"k is {k!r}, expected a number of examples.")
        if not isinstance(by, str) or by not in ("norm", "alignment"):
            raise TrackingError(f'by is {by!r}, expected "norm" or "alignment".')
        measured = self.measured
        if measured is None:
            return []
        step = measured.step
        value, key = step.sqnorm, step.sqnorm
        if by == "alignment":
            if step.alignment is None:
                raise TrackingError("alignments were not measured: pass alignment=True.")
            # Along a mean of zero, lengths are NaN: they count as zero.
            value, key = step.alignment, np.nan_to_num(lengths_along_mean(step))
        # An example that is not finite comes first: it is what one is looking for.
        order = np.argsort(-np.where(np.isfinite(value), key, np.inf), kind="stable")
        return [_record(measured, position) for position in order[:k]]

    def state_dict(self, steps: int) -> dict[str, Any]:
        """Return everything but the last measured step, as numbers, strings and tensors.

        Args:
            steps: number of optimizer steps completed.
        """
        return {
            "version": STATE_VERSION,
            "steps": steps,
            "undefined": self._undefined,
            "nonfinite_steps": self._nonfinite_steps,
            "nonfinite": [list(item) for item in self.nonfinite],
            "ratios": {name: ratio.state_dict() for name, ratio in self._ratios.items()},
            "recent": {name: list(values) for name, values in self._recent.items()},
            "spikes": [asdict(spike) for spike in self.spikes],
            "history": {
                name: torch.tensor(values, dtype=torch.float64)
                for name, values in self.history.items()
            },
            "self_influence": self.self_influence.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> int:
        """Load what ``state_dict`` returned into a new run, and return ``steps``.

        Raises:
            TrackingError: it is something else, or from another version of gradstats.
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
        try:
            self._undefined = int(state["undefined"])
            self._nonfinite_steps = int(state["nonfinite_steps"])
            self.nonfinite.extend((step, name) for step, name in state["nonfinite"])
            for name, saved in state["ratios"].items():
                self._ratio(name).load_state_dict(saved)
            for name, recent in self._recent.items():
                recent.extend(state["recent"][name])
            self.spikes.extend(map(Spike.from_state, state["spikes"]))
            self.history = {
                name: torch.as_tensor(values).tolist() for name, values in state["history"].items()
            }
            self.self_influence.load_state_dict(state["self_influence"])
            return int(state["steps"])
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
            RuntimeError,
        ) as error:
            raise TrackingError(
                f"the monitor's state is damaged ({type(error).__name__}: {error}), expected what "
                "monitor.state_dict() returned. Start without it."
            ) from error

    def _look_for_spikes(self, number: int, measured: Measured, metrics: dict[str, float]) -> bool:
        found = False
        for name in WATCHED:
            recent, value = self._recent[name], metrics[name]
            typical = float(np.median(recent)) if len(recent) >= FEWEST else math.nan
            if not math.isfinite(value) or value > self._spike_factor * typical:
                found = True
                last = self.history.get(name, [0.0])[-1]
                if not (math.isfinite(value) or math.isfinite(last)):
                    continue  # only the first of consecutive steps
                examples = self.examples(self._top)
                if measured.step.alignment is not None:
                    examples += self.examples(self._top, by="alignment")
                distinct = {record.position: record for record in examples}
                ordered = sorted(distinct.values(), key=lambda record: -record.norm)
                self.spikes.append(Spike(number, name, value, typical, tuple(ordered)))
            if math.isfinite(value):
                recent.append(value)
        return found

    def _ratio(self, name: str) -> RunningRatio:
        return self._ratios.setdefault(name, RunningRatio(self._decay))


def _record(measured: Measured, position: int) -> ExampleRecord:
    step = measured.step
    alignment = math.nan
    if step.alignment is not None:
        alignment = float(lengths_along_mean(step)[position])
    layer, share = measured.largest_part(position)
    return ExampleRecord(
        id=None if measured.ids is None else int(measured.ids[position]),
        position=int(position),
        norm=float(np.sqrt(step.sqnorm[position])),
        alignment=alignment,
        layer=layer,
        share=share,
    )
