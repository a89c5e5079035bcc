"""One optimizer step being measured: its micro-batches, until they go to the host in one copy.

Everything stays on the model's device until the copy, in one float64 vector:

    header          how many micro-batches, the loss scale, flags
    parameters      ‖G_p‖² of the gradient
    optimizer       the learning rate of each of its groups
    micro-batches   size and divisor; the scalar; weights and ids, where given; inner products,
                    where asked for; ‖∇ℓ_i,p‖² of every example and parameter, times weight²

What is made of it is computed on the host: between the large products of a training step each small
operation of PyTorch costs tens of microseconds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradstats.capture._tracker import Tracker
from gradstats.capture._uses import Settings
from gradstats.errors import TrackingError
from gradstats.monitor._layers import Layers
from gradstats.monitor._ranks import gather, gradient_sqnorms, processes_with
from gradstats.statistics._loss import loss_scale
from gradstats.statistics._norms import check_workspace, together_for
from gradstats.statistics._training import StepGradients

# Entries of the header, and of what stands before the examples of a micro-batch.
H_BATCHES, H_MEASURED, H_SCALE, H_STALE, H_TWICE = range(5)
B_SIZE, B_DIVISOR, B_WEIGHT, B_HAS_IDS, B_LOSS = range(5)
GRAM_STATISTICS, LEAST = 4, 2

# What the micro-batches' scalars add up to, with N examples in the whole step:
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
        parts, names: (K, N) the squared norms n_i of each layer, of each parameter where no layers
            were asked for; and what these are called.
        influence: (N,) Σ_p η_p ‖g_i,p‖² over parameters p, or None without an optimizer.
        learning_rate: that of all groups of the optimizer, NaN if they differ or there are none.
        gram: stiffness and confusion, averaged over micro-batches, or None.
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


class Collector:
    """Collects the micro-batches of one optimizer step on the device.

    Args:
        model: the model, as its optimizer step is run.
        options: what to measure.
        optimizer: whose learning rates weigh the self-influence, or None.
        scaler: the GradScaler, or None.
        group: the process group of the step, None if alone.
        single: no other micro-batch will follow.
    """

    def __init__(self, model: nn.Module, options: Options, optimizer, scaler, group, single: bool):
        self.model, self.options, self.scaler, self.group = model, options, scaler, group
        self.optimizer = optimizer
        # Σ_i ⟨c_i, G⟩ is ‖G‖² where G is all in one context: then the gradients need not be read.
        self.reads_gradients = not (single and group is None and options.alignment)
        self.names: list[str] = []
        self.layers: Layers | None = None
        self._parameters: list[nn.Parameter] = []
        self._batches: list[list[Tensor]] = []
        self._gradient: Tensor | None = None
        self._scale: Tensor | float = 1.0
        self._rates: Tensor | None = None
        self._groups: np.ndarray | None = None
        self._stale: Tensor | float = 0.0
        self._used: set[str] = set()
        self._without: set[str] = set()
        self._twice: Tensor | float = 0.0
        self._scalar: Tensor | None = None
        self._started = False
        self._last = True

    def open(self, batch_size: int, last: bool) -> Tracker:
        """Return the tracking context for one micro-batch, opened.

        Args:
            batch_size: its examples.
            last: whether the step may end with this micro-batch.
        """
        self._last = last
        options = self.options
        tracker = Tracker(
            self.model,
            batch_size=batch_size,
            batch_dim=0,
            settings=Settings(
                weight_gradients=True,
                fused=options.fused,
                workspace=check_workspace(options.workspace),
                consumer=together_for(options.alignment, options.gram),
            ),
            parameters=options.parameters,
            exclude=options.exclude,
        )
        tracker.listener = self
        if self.layers is None:
            self.names = [root.name for root in tracker.roots]
            self._parameters = [root.parameter for root in tracker.roots]
            self.layers = Layers(self.names, options.layers)
            if self.reads_gradients:
                self._warn_of_hooks()
        tracker.open()
        return tracker

    def before_backward(self, losses: Sequence[Tensor]) -> None:
        """Note what the backward starts from: the optimizer may step before the context closes."""
        self._scalar = losses[0].detach().sum(dtype=torch.float64)
        self._scale = loss_scale(self.scaler, losses[0].device)
        if self.optimizer is not None:
            self._rates, self._groups = self._learning_rates(self.optimizer.param_groups)
        if not self._started:
            earlier = gradient_sqnorms(self._parameters)
            self._stale = 0.0 if earlier is None else earlier.sum()
        self._started = True

    def after_backward(self) -> None:
        """Read the gradients before anything clips them."""
        if self.reads_gradients and self._last:
            self._gradient = gradient_sqnorms(self._parameters)
            named = zip(self.names, self._parameters, strict=True)
            self._without = {name for name, parameter in named if parameter.grad is None}

    def add(
        self,
        tracker: Tracker,
        batch_size: int,
        ids: Tensor | None,
        weights: Tensor | None,
        divisor: float,
    ) -> None:
        """Take the statistics of a micro-batch whose context has closed.

        Args:
            tracker: the context.
            batch_size, ids, weights: of the micro-batch, as its ``MonitorStep`` has checked them.
            divisor: of its scalar.
        """
        sqnorm = tracker.sqnorm_by_parameter()
        device = sqnorm.device
        weight: Any = 1.0 if self.options.loss_reduction == "sum" else 1 / batch_size
        sizes = [batch_size, divisor, weight if weights is None else math.nan, ids is not None]
        assert self._scalar is not None
        parts = [torch.tensor(sizes, dtype=torch.float64), self._scalar]
        if weights is not None:
            weight = weights
            parts.append(weights)
        if ids is not None:
            parts.append(ids)
        together: Any = tracker.settings.consumer
        if self.options.gram:
            parts.append(_gram_statistics(together.pairs, weight))
        if self.options.alignment:
            unused = sqnorm.new_zeros(batch_size)
            along = [together.with_sum.get(name, unused).to(device) for name in self.names]
            parts.append(torch.stack(along))
        parts.append(sqnorm)
        self._batches.append([_column(part, device) for part in parts])
        self._twice = self._twice + tracker.reported_twice
        reports = ((root.name, root.result, root.compiled_report) for root in tracker.roots)
        self._used |= {name for name, *results in reports if any(r is not None for r in results)}

    def finish(self) -> Pending:
        """Return the step, gathered from all processes, still on the device."""
        assert self.layers is not None
        device = self._batches[0][0].device
        gradient = self._gradient
        measured = float(gradient is not None)
        flags = [len(self._batches), measured, self._scale, self._stale, self._twice]
        if any(isinstance(flag, Tensor) for flag in flags):
            header = torch.cat(
                [_column(torch.as_tensor(flag, dtype=torch.float64), device) for flag in flags]
            )
        else:
            header = torch.tensor(flags, dtype=torch.float64).to(device)
        if gradient is None:
            gradient = header.new_zeros(len(self.names))
        pieces = [header, gradient.to(device)]
        if self._rates is not None:
            pieces.append(_column(self._rates, device))
        vector = torch.cat([*pieces, *(part for batch in self._batches for part in batch)])
        vectors = [vector] if self.group is None else gather(vector, self.group)
        shared = None
        if self.group is not None:
            ranks = torch.distributed.get_world_size(self.group)
            shared = [processes_with(parameter, ranks) for parameter in self._parameters]
        lost = [name for name in self.names if name in self._used & self._without]
        return Pending(vectors, self.options, self.layers, self.names, shared, self._groups, lost)

    def _warn_of_hooks(self) -> None:
        """Say which gradients may be changed before they are read."""
        named = zip(self.names, self._parameters, strict=True)
        hooked = [
            name
            for name, parameter in named
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        ]
        if hooked:
            warnings.warn(
                f"hooks on {_listed(hooked)} may change gradients before gradstats.Monitor reads "
                "them: then grad_norm is that of the changed gradient, and what compares it with "
                "the examples' own (noise scale, coherence, diversity, norm test) has no meaning. "
                "Hooks that only look do no harm. Otherwise remove them while measuring; or "
                "measure with alignment=True, one micro-batch on one process, where the gradient "
                "is taken before hooks.",
                stacklevel=4,
            )

    def _learning_rates(self, groups: Sequence[dict[str, Any]]) -> tuple[Tensor, np.ndarray]:
        """Return (G,) the learning rates as they stand, and (G, P) whose parameters they move.

        Args:
            groups: of the optimizer.
        """
        members = [set(map(id, group["params"])) for group in groups]
        moves = np.array([[id(p) in group for p in self._parameters] for group in members])
        rates = [group["lr"] for group in groups]
        if not any(isinstance(rate, Tensor) for rate in rates):
            return torch.tensor(rates, dtype=torch.float64), moves
        device = next(rate.device for rate in rates if isinstance(rate, Tensor))
        # A copy: schedulers write into rates that are tensors.
        columns = [_column(torch.as_tensor(r, dtype=torch.float64), device) for r in rates]
        return torch.cat(columns), moves


def _column(part: Tensor, device: torch.device) -> Tensor:
    return part.to(device, torch.float64).reshape(-1)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the host: what the collector wrote of it.

    Attributes:
        sizes: B, the divisor, and what else stands before the examples.
        weight: (B,), None where all examples have the same.
        ids: (B,) or None.
        gram: the statistics of inner products, empty unless asked for.
        along: (P, B) products with the gradient of this micro-batch, (0, B) unless asked for.
        sqnorm: (P, B).
    """

    sizes: np.ndarray
    weight: np.ndarray | None
    ids: np.ndarray | None
    gram: np.ndarray
    along: np.ndarray
    sqnorm: np.ndarray


class Pending:
    """A measured step whose numbers may still be on the device.

    Args:
        vectors: what every process collected.
        options, layers, names: of the monitor, and of the parameters.
        shared: how many processes hold each element of a parameter's gradient; None if alone.
        groups: (G, P) which group of the optimizer moves which parameter; None without one.
        lost: names of the parameters whose gradients were gone when they were to be read.
    """

    def __init__(
        self,
        vectors: list[Tensor],
        options: Options,
        layers: Layers,
        names: list[str],
        shared: list[float] | None,
        groups: np.ndarray | None,
        lost: list[str],
    ):
        self._vectors, self._options = vectors, options
        self._layers, self._names, self._shared = layers, names, shared
        self._groups, self._lost = groups, lost

    def read(self) -> Measured:
        """Copy everything to the host at once, and give it its units."""
        lengths = [len(vector) for vector in self._vectors]
        whole = torch.cat(self._vectors) if len(self._vectors) > 1 else self._vectors[0]
        flat = whole.cpu().numpy()
        headers, gradients, batches = [], [], []
        rates = None
        end = 0
        for length in lengths:
            reader = _Reader(flat[end : end + length])
            end += length
            header = reader.take(H_TWICE + 1)
            headers.append(header)
            gradients.append(reader.take(len(self._names)))
            if self._groups is not None:
                rates = reader.take(len(self._groups))
            batches += [self._batch(reader) for _ in range(int(header[H_BATCHES]))]
        self._check(headers, batches)
        gradient: np.ndarray | None = None
        if headers[0][H_MEASURED]:
            gradient = sum(gradients[1:], gradients[0])
            if self._shared is not None:
                gradient = gradient / self._shared
        return self._measured(headers[0][H_SCALE], len(lengths), gradient, rates, batches)

    def _batch(self, reader: _Reader) -> Batch:
        sizes = reader.take(B_LOSS + 1)
        size, parameters = int(sizes[B_SIZE]), len(self._names)
        return Batch(
            sizes=sizes,
            weight=reader.take(size) if math.isnan(sizes[B_WEIGHT]) else None,
            ids=reader.take(size) if sizes[B_HAS_IDS] else None,
            gram=reader.take(GRAM_STATISTICS if self._options.gram else 0),
            along=reader.take(parameters if self._options.alignment else 0, size),
            sqnorm=reader.take(parameters, size),
        )

    def _check(self, headers: Sequence[np.ndarray], batches: Sequence[Batch]) -> None:
        if any(header[H_TWICE] > 0 for header in headers):
            raise TrackingError(
                "a parameter contributed more than once to a compiled graph, so its per-example "
                "norms are not known. Run measured steps without torch.compile."
            )
        if any(header[H_STALE] != 0 for header in headers):
            raise TrackingError(
                "the parameters held a gradient when the first micro-batch's backward started, so "
                "that the gradient of this step is not known. Call optimizer.zero_grad() before "
                "it; to accumulate gradients, say so with accumulation=(k, K)."
            )
        if self._lost:
            raise TrackingError(
                f"the gradient of {_listed(self._lost)} was gone when the backward had ended, so "
                "that the gradient of this step is not known. Expected it in .grad: let hooks "
                "leave it there; or measure with alignment=True, one micro-batch on one process, "
                "where it need not be read."
            )
        for batch in batches:
            if batch.ids is not None and max(batch.ids.max(), -batch.ids.min()) >= MAX_ID:
                raise TrackingError(
                    f"ids must lie between -2⁵³ and 2⁵³, got {batch.ids.astype(int).tolist()}."
                )

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
            gradient: (P,) squared norms of the gradient, None where they follow from ``along``.
            rates: (G,) learning rates, or None.
            batches: of all processes, in order.
        """
        sizes = np.stack([batch.sizes for batch in batches])
        number = np.repeat(np.arange(len(batches)), sizes[:, B_SIZE].astype(int))
        # The scalars differentiated were Σ_i unit_i ℓ_i; in truth each is Σ_i weight_i ℓ_i.
        unit = sizes[number, B_WEIGHT]
        for index, batch in enumerate(batches):
            if batch.weight is not None:
                unit[number == index] = batch.weight
        if self._options.loss_reduction == "step_mean":
            weight = np.full(len(unit), ranks / len(unit))
        else:
            weight = unit / sizes[number, B_DIVISOR]
        total = weight.sum()
        whole = total / ranks
        in_batch = np.bincount(number, weight)
        names, numbers = self._layers.names, self._layers.index

        def of_layer(layer: int, by_parameter: np.ndarray) -> np.ndarray:
            return by_parameter[[place for place, its in enumerate(numbers) if its == layer]].sum(0)

        with np.errstate(invalid="ignore", over="ignore"):
            sqnorm = np.concatenate([batch.sqnorm for batch in batches], 1) / (weight * scale) ** 2
            along = None
            if self._options.alignment:
                along = np.concatenate([batch.along for batch in batches], 1) / scale**2
            if gradient is None:
                assert along is not None
                gradient = along.sum(1)
            else:
                gradient = gradient / scale**2
            gradient = gradient / whole**2
            if along is not None:
                along /= weight * in_batch[number]
            parts = sqnorm
            if names:
                parts = np.stack([of_layer(layer, sqnorm) for layer in range(len(names))])
            share = weight / total
            step = StepGradients(
                sqnorm.sum(0),
                share,
                float(gradient.sum()),
                number,
                None if along is None else along.sum(0),
            )
            layers = {
                name: StepGradients(
                    parts[layer],
                    share,
                    float(of_layer(layer, gradient)),
                    number,
                    None if along is None else of_layer(layer, along),
                )
                for layer, name in enumerate(names)
            }
            influence, learning_rate = None, math.nan
            if rates is not None:
                influence = rates @ self._groups @ sqnorm
                learning_rate = float(rates[0]) if (rates == rates[0]).all() else math.nan
            loss = sizes[:, B_LOSS].sum() / scale / ranks / whole
        gram = None
        if self._options.gram:
            statistics = np.stack([batch.gram for batch in batches])
            gram = statistics.mean(0)
            first = np.searchsorted(number, np.arange(len(batches)))
            factor = (unit[first] / weight[first] / scale) ** 2
            gram[LEAST] = (statistics[:, LEAST] * factor).min()
        ids = [batch.ids for batch in batches if batch.ids is not None]
        return Measured(
            step=step,
            layers=layers,
            total_weight=float(whole),
            loss=float(loss),
            ids=np.concatenate(ids).astype(np.int64) if len(ids) == len(batches) else None,
            parts=parts,
            names=names or self._names,
            influence=influence,
            learning_rate=learning_rate,
            gram=gram,
        )


class _Reader:
    """Takes a vector apart from its beginning."""

    def __init__(self, vector: np.ndarray):
        self._vector, self._place = vector, 0

    def take(self, rows: int, columns: int | None = None) -> np.ndarray:
        """Return the next (rows,) or (rows, columns) numbers."""
        begin = self._place
        self._place = begin + rows * (1 if columns is None else columns)
        taken = self._vector[begin : self._place]
        return taken if columns is None else taken.reshape(rows, columns)


def _gram_statistics(gram: Tensor, weight: Tensor | float) -> Tensor:
    """Return (4,): over pairs i ≠ j the mean cosine, mean sign, least product, share below zero.

    Args:
        gram: (B, B) products of weighted gradients.
        weight: (B,), or one number for all.
    """
    weight = torch.as_tensor(weight, dtype=torch.float64, device=gram.device).expand(len(gram))
    gram = gram.double() / (weight[:, None] * weight)
    size = len(gram)
    if size < 2:
        return gram.new_full((GRAM_STATISTICS,), torch.nan)
    apart = ~torch.eye(size, dtype=torch.bool, device=gram.device)
    norm = gram.diagonal().sqrt()
    pairs = gram.masked_fill(~apart, 0)
    count = size * (size - 1)
    return torch.stack(
        [
            (pairs / (norm[:, None] * norm)).nansum() / count,
            pairs.sign().sum() / count,
            gram.masked_fill(~apart, torch.inf).min(),
            (pairs < 0).double().sum() / count,
        ]
    )
