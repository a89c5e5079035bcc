"""One measured optimizer step on the host: one vector, unpacked and rescaled.

All measurements stay on the model's device until one copy to the host, in one float64 vector:

    header          number of micro-batches, loss scale, whether the gradient was read; for a
                    skipped step only 0
    parameters      ‖G_p‖² of the gradient; whether .grad held one before; whether it was changed
                    between micro-batches
    optimizer       the learning rate of each of its groups that moves measured parameters
    micro-batches   size, divisor, …; the scalar; weights and ids, if given; inner products, if
                    asked for; ‖∇ℓ_i,p‖² of every example and parameter, times weight²

Metrics are computed from it on the host: between the large products of a training step, each small
operation of PyTorch costs tens of microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradstats.capture._selection import quoted
from gradstats.errors import TrackingError
from gradstats.monitor._gradients import AGREEMENT
from gradstats.monitor._layers import layers_of
from gradstats.statistics._training import StepGradients

# Entries of the header, and of the fixed part of a micro-batch. B_WEIGHT is the weight of all its
# examples; NaN if weights follow.
H_BATCHES, H_SCALE, H_READ = range(3)
B_SIZE, B_DIVISOR, B_WEIGHT, B_HAS_IDS, B_LOSS = range(5)
# Over the pairs i ≠ j of a micro-batch: the sums of cosines and of signs where neither gradient is
# zero, the number of these pairs, the least product, and the number of negative products.
GRAM_COSINES, GRAM_SIGNS, GRAM_KNOWN, GRAM_LEAST, GRAM_NEGATIVE = range(5)
GRAM_STATISTICS = GRAM_NEGATIVE + 1

# How the scalar of a micro-batch is formed; ``Monitor`` has the formulas.
REDUCTIONS = ("mean", "sum", "step_mean")
MAX_ID = 2**53


@dataclass(frozen=True)
class Options:
    """What a monitor measures, and how."""

    loss_reduction: str
    alignment: bool
    gram: bool
    layers: Sequence[str] | str | None
    fused: bool
    parameters: Sequence[str] | str | None
    exclude: Sequence[str] | str
    workspace: int | None


@dataclass(frozen=True)
class Measured:
    """One optimizer step on the host, over all processes.

    Attributes:
        step: all parameters together.
        layers: the same for each layer.
        total_weight: W in G = W ḡ, where G is the gradient that the optimizer is given.
        loss: Σ w_i ℓ_i.
        ids: (N,) int64, or None.
        parts, names: (K, N) the squared norms n_i of each layer, or of each parameter without
            layers; and the names of these.
        influence: (N,) Σ_p η_p ‖g_i,p‖² over parameters p; None without an optimizer.
        learning_rate: of all groups that move measured parameters; NaN if they differ, or without
            any.
        gram: the four metrics of stiffness and confusion, or None.
    """

    step: StepGradients
    layers: dict[str, StepGradients]
    total_weight: float
    loss: float
    ids: np.ndarray | None
    parts: np.ndarray
    names: Sequence[str]
    influence: np.ndarray | None
    learning_rate: float
    gram: np.ndarray | None

    def largest_part(self, position: int) -> tuple[str, float]:
        """Return the part with the largest share of an example's squared norm, and that share."""
        index = int(self.parts[:, position].argmax())
        with np.errstate(invalid="ignore", divide="ignore"):
            share = self.parts[index, position] / self.step.sqnorm[position]
        return self.names[index], float(share)


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the host, as the collector wrote it.

    Attributes:
        sizes: the fixed part: size, divisor, weight, whether ids follow, scalar.
        weight: (B,); None if all examples have the same weight.
        ids: (B,) or None.
        gram: statistics of inner products, empty unless asked for.
        along: (P, B) products with this micro-batch's gradient, (0, B) unless asked for.
        sqnorm: (P, B) squared norms of weighted gradients.
    """

    sizes: np.ndarray
    weight: np.ndarray | None
    ids: np.ndarray | None
    gram: np.ndarray
    along: np.ndarray
    sqnorm: np.ndarray


@dataclass(frozen=True)
class Pending:
    """A measured step whose numbers may still be on the device.

    Attributes:
        number: the optimizer step's.
        skipped: whether this process skipped it.
        vectors: every process' vector.
        options: the monitor's.
        names: the parameters'.
        shared: (P,) how many processes hold each element of a gradient; None if there is one.
        groups: (G, P) which group of the optimizer moves which parameter; None without groups.
        lost: names of the parameters whose gradients were gone when they should have been read.
    """

    number: int
    skipped: bool
    vectors: list[Tensor]
    options: Options
    names: list[str]
    shared: list[float] | None
    groups: np.ndarray | None
    lost: list[str]

    def read(self) -> Measured | None:
        """Copy everything to the host at once, and rescale it; None for a skipped step."""
        whole = torch.cat(self.vectors) if len(self.vectors) > 1 else self.vectors[0]
        ends = np.cumsum([len(vector) for vector in self.vectors])
        ranks = np.split(whole.cpu().numpy(), ends[:-1])
        if not all(rank[H_BATCHES] for rank in ranks):
            return None
        seen, rates = [], None
        batches: list[Batch] = []
        for reader in map(_Reader, ranks):
            header = reader.take(H_READ + 1)
            seen.append(reader.take(3, len(self.names)))
            if self.groups is not None:
                rates = reader.take(len(self.groups))
            batches += [self._batch(reader) for _ in range(int(header[H_BATCHES]))]
        gradients, held, changed = np.stack(seen, axis=1)
        self._check(held.any(0), changed.any(0), gradients, batches)
        gradient: np.ndarray | None = None
        if header[H_READ]:
            gradient = gradients.sum(0)
            if self.shared is not None:
                gradient = gradient / self.shared
        return self._measured(header[H_SCALE], len(ranks), gradient, rates, batches)

    def _batch(self, reader: _Reader) -> Batch:
        sizes = reader.take(B_LOSS + 1)
        size, parameters = int(sizes[B_SIZE]), len(self.names)
        return Batch(
            sizes=sizes,
            weight=reader.take(size) if math.isnan(sizes[B_WEIGHT]) else None,
            ids=reader.take(size) if sizes[B_HAS_IDS] else None,
            gram=reader.take(GRAM_STATISTICS if self.options.gram else 0),
            along=reader.take(parameters if self.options.alignment else 0, size),
            sqnorm=reader.take(parameters, size),
        )

    def _check(
        self,
        held: np.ndarray,
        changed: np.ndarray,
        gradients: np.ndarray,
        batches: Sequence[Batch],
    ) -> None:
        stale = self._where(held)
        if stale:
            raise TrackingError(
                "the parameters held a gradient when the first micro-batch's backward started "
                f"({quoted(stale)}), so the gradient of this step is not known. Call "
                "optimizer.zero_grad() before it, or model.zero_grad() if the optimizer does not "
                "hold them all; to accumulate gradients, pass accumulation=(k, K)."
            )
        touched = self._where(changed)
        if touched:
            raise TrackingError(
                f"the gradient of {quoted(touched)} was changed between the micro-batches of the "
                "step, so it is not the sum over its examples. Expected that only backwards add to "
                "it: clip, scale or clear gradients after the last backward; or take each "
                "micro-batch as an optimizer step, without accumulation=."
            )
        if self.lost:
            raise TrackingError(
                f"the gradient of {quoted(self.lost)} was gone when the backward had ended, so "
                "the gradient of this step is not known. Expected it in .grad: let hooks leave it "
                "there; or measure with alignment=True, one micro-batch on one process, which need "
                "not read it."
            )
        if self.shared is not None:
            whole = np.equal(self.shared, len(gradients))
            agree = np.isclose(gradients, gradients[0], rtol=AGREEMENT, atol=0, equal_nan=True)
            apart = self._where(whole & ~agree.all(0))
            if apart:
                raise TrackingError(
                    f"the gradient of {quoted(apart)} was not the same on all processes when the "
                    "backward had ended, so the gradient of this step is not known. Expected "
                    "backwards that average it over the processes, as DistributedDataParallel does "
                    "without no_sync() and for parameters that it does not ignore. If your loop "
                    "averages gradients itself, measure each process alone, without "
                    "process_group=."
                )
        for batch in batches:
            if batch.ids is not None and max(batch.ids.max(), -batch.ids.min()) >= MAX_ID:
                raise TrackingError(
                    f"ids must lie between -2⁵³ and 2⁵³, got {[*map(int, batch.ids)]}."
                )

    def _where(self, which: np.ndarray) -> list[str]:
        """Return the names of the parameters where (P,) ``which`` holds."""
        return [self.names[p] for p in np.flatnonzero(which)]

    def _measured(
        self,
        scale: float,
        ranks: int,
        gradient: np.ndarray | None,
        rates: np.ndarray | None,
        batches: Sequence[Batch],
    ) -> Measured:
        """Return the step in units of the losses.

        Args:
            scale: of the loss.
            ranks: number of processes.
            gradient: (P,) squared norms of the gradient; None if they follow from ``along``.
            rates: (G,) learning rates, or None.
            batches: of all processes, in order.
        """
        sizes = np.stack([batch.sizes for batch in batches])
        number = np.repeat(np.arange(len(batches)), sizes[:, B_SIZE].astype(int))
        # The collector took each scalar for Σ_i unit_i ℓ_i; in truth it is Σ_i weight_i ℓ_i.
        unit = sizes[number, B_WEIGHT]
        for index, batch in enumerate(batches):
            if batch.weight is not None:
                unit[number == index] = batch.weight
        weight = unit / sizes[number, B_DIVISOR]
        if self.options.loss_reduction == "step_mean":
            plain = np.array([batch.weight is None for batch in batches])
            weight[plain[number]] = ranks / len(unit)
        total = weight.sum()
        whole = total / ranks
        with np.errstate(invalid="ignore", over="ignore"):
            sqnorm = np.concatenate([batch.sqnorm for batch in batches], 1) / (weight * scale) ** 2
            along: np.ndarray | None = None
            if self.options.alignment:
                along = np.concatenate([batch.along for batch in batches], 1) / scale**2
            if gradient is None:
                assert along is not None
                gradient = along.sum(1)
            else:
                gradient = gradient / scale**2
            gradient = gradient / whole**2
            if along is not None:
                along /= weight * np.bincount(number, weight)[number]

            def gradients_of(parameters: slice | list[int]) -> StepGradients:
                return StepGradients(
                    sqnorm[parameters].sum(0),
                    weight / total,
                    float(gradient[parameters].sum()),
                    number,
                    None if along is None else along[parameters].sum(0),
                )

            step = gradients_of(slice(None))
            members = layers_of(self.names, self.options.layers)
            layers = {name: gradients_of(places) for name, places in members.items()}
            parts = np.stack([each.sqnorm for each in layers.values()]) if layers else sqnorm
            influence, learning_rate = None, math.nan
            if rates is not None:
                influence = rates @ self.groups @ sqnorm
                if not math.isfinite(step.mean_sqnorm):
                    influence[:] = math.nan  # GradScaler skips such a step, or the loop does
                if len(set(rates.tolist())) == 1:
                    learning_rate = float(rates[0])
            loss = sizes[:, B_LOSS].sum() / scale / ranks / whole
        ids = [batch.ids for batch in batches if batch.ids is not None]
        return Measured(
            step=step,
            layers=layers,
            total_weight=float(whole),
            loss=float(loss),
            ids=np.concatenate(ids).astype(np.int64) if len(ids) == len(batches) else None,
            parts=parts,
            names=list(layers) or self.names,
            influence=influence,
            learning_rate=learning_rate,
            gram=_over_pairs(batches, number, unit / weight / scale) if self.options.gram else None,
        )


def _over_pairs(batches: Sequence[Batch], number: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Return stiffness and confusion over the pairs that share a micro-batch; NaN without pairs.

    Args:
        batches: of all processes, in order.
        number: (N,) which of them each example belongs to.
        factor: (N,) what collected gradients are multiplied by to be ∇ℓ_i, the same within each
            micro-batch; it matters only for the least product.
    """
    statistics = np.stack([batch.gram for batch in batches])
    whole = statistics.sum(0)
    first = np.searchsorted(number, np.arange(len(batches)))
    least = (statistics[:, GRAM_LEAST] * factor[first] ** 2).min()
    size = np.bincount(number)
    pairs = size @ (size - 1)
    with np.errstate(invalid="ignore"):
        return np.array([
            whole[GRAM_COSINES] / whole[GRAM_KNOWN],
            whole[GRAM_SIGNS] / whole[GRAM_KNOWN],
            least if pairs else math.nan,
            whole[GRAM_NEGATIVE] / pairs,
        ])  # fmt: skip


class _Reader:
    """Reads a vector from its beginning."""

    def __init__(self, vector: np.ndarray):
        self._left = vector

    def take(self, *shape: int) -> np.ndarray:
        """Return the next numbers, as an array of this shape."""
        size = math.prod(shape)
        taken, self._left = self._left[:size], self._left[size:]
        return taken.reshape(shape)
