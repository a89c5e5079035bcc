"""One optimizer step being measured: its micro-batches, until they go to the host in one copy.

Everything stays on the model's device in one float64 vector:

    header      format of the rest, the loss scale, flags, ‖G‖² and one entry for each layer
    batches     a row for each micro-batch
    examples    a row for each example
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from gradstats.errors import TrackingError
from gradstats.monitor._layers import Layers
from gradstats.monitor._ranks import gather, gradient_sqnorms
from gradstats.statistics._norms import track
from gradstats.statistics._training import StepGradients

# Columns of a micro-batch's row.
B_SIZE, B_DIVISOR, B_LOSS, B_GRAM = 0, 1, 2, 3
GRAM_COLUMNS, LEAST = 4, 2
# Columns of an example's row; the layers' norms and alignments follow.
E_SQNORM, E_ALIGNMENT, E_WEIGHT, E_ID, E_LAYER, E_SHARE, E_INFLUENCE, E_LAYERS = range(8)
# Entries of the header.
H_BATCHES, H_SCALE, H_STALE, H_TWICE, H_MEASURED, H_SQNORM = range(6)

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
        layer, share: (N,) the layer of largest share of n_i, and its share.
        influence: (N,) Σ_p η_p ‖g_i,p‖² over parameters p, or None without an optimizer.
        gram: stiffness and confusion, averaged over micro-batches, or None.
    """

    step: StepGradients
    layers: dict[str, StepGradients]
    total_weight: float
    loss: float
    ids: np.ndarray | None
    layer: list[str]
    share: np.ndarray
    influence: np.ndarray | None
    gram: np.ndarray | None


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
        self.ranks = 1 if group is None else torch.distributed.get_world_size(group)
        # Σ_i ⟨c_i, G⟩ is ‖G‖² where G is all in one context: then the gradients need not be read.
        self.reads_gradients = not (single and group is None and options.alignment)
        self.names: list[str] = []
        self.layers: Layers | None = None
        self._parameters: list[nn.Parameter] = []
        self._batches: list[Tensor] = []
        self._examples: list[Tensor] = []
        self._gradient: Tensor | None = None
        self._stale: Tensor | float = 0.0
        self._twice: Tensor | float = 0.0
        self._scalar: Tensor | None = None
        self._started = False
        self._last = True

    def open(self, batch_size: int, weights, last: bool) -> track:
        """Return the tracking context for one micro-batch, opened.

        Args:
            batch_size: its examples.
            weights: (B,) or None.
            last: whether the step may end with this micro-batch.
        """
        self._last = last
        options = self.options
        reduction = "sum" if options.loss_reduction == "sum" else "mean"
        context = track(
            self.model,
            batch_size=batch_size,
            loss_reduction=reduction,
            weights=weights,
            fused=options.fused,
            parameters=options.parameters,
            exclude=options.exclude,
            workspace=options.workspace,
            alignment=options.alignment,
            gram=options.gram,
        )
        tracker = context._tracker
        tracker.listener = self
        context.__enter__()
        if self.layers is None:
            self.names = [root.name for root in tracker.roots]
            self._parameters = [root.parameter for root in tracker.roots]
            self.layers = Layers(self.names, options.layers)
        return context

    def before_backward(self, losses: Sequence[Tensor]) -> None:
        """Note the scalar, and whether an earlier gradient would mix with this step's."""
        self._scalar = losses[0].detach().double().sum()
        if self.reads_gradients and not self._started:
            self._stale = self._sqnorms()[0]
        self._started = True

    def after_backward(self) -> None:
        """Read the gradients before anything clips them."""
        if self.reads_gradients and self._last:
            self._gradient = self._sqnorms()

    def _sqnorms(self) -> Tensor:
        assert self.layers is not None
        count = len(self.layers.names)
        return gradient_sqnorms(self._parameters, self.layers.index, count, self.ranks)

    def add(self, context: track, batch_size: int, ids, weights, divisor: float) -> None:
        """Take the statistics of a micro-batch whose context has closed."""
        assert self.layers is not None
        stats, device = context.stats, context.stats.sqnorm.device
        by_parameter = stats.rows.double()
        share, layer = self._largest(by_parameter)
        unit = {"mean": 1 / batch_size, "sum": 1.0, "step_mean": 1 / batch_size}
        weight = torch.full((batch_size,), unit[self.options.loss_reduction], dtype=torch.float64)
        if weights is not None:
            weight = torch.as_tensor(weights, dtype=torch.float64).detach()
        unknown = torch.full((batch_size,), torch.nan, dtype=torch.float64, device=device)
        columns: list[Tensor | None] = [
            stats.sqnorm.double(),
            None if stats.alignment is None else stats.alignment.double(),
            weight.to(device),
            self._ids(ids, batch_size, device),
            layer.double(),
            share,
            self._influence(by_parameter),
            *self._by_layer(by_parameter),
        ]
        if stats.alignment_by_parameter is not None:
            rows = [stats.alignment_by_parameter[name] for name in self.names]
            columns += self._by_layer(torch.stack(rows).double())
        known = [unknown if column is None else column for column in columns]
        self._examples.append(torch.stack(known, 1))
        size = torch.tensor([batch_size, divisor], dtype=torch.float64).to(device)
        assert self._scalar is not None
        gram = size.new_empty(0) if stats.gram is None else _gram_statistics(stats.gram)
        self._batches.append(torch.cat([size, self._scalar.to(device)[None], gram]))
        self._twice = self._twice + context._tracker.reported_twice

    def finish(self) -> Pending:
        """Return the step, gathered from all processes, still on the device."""
        assert self.layers is not None
        device = self._examples[0].device
        scale = torch.ones((), dtype=torch.float64, device=device)
        if self.scaler is not None and self.scaler.is_enabled():
            # Not get_scale(), which waits for the device.
            scale = self.scaler.scale(torch.ones((), device=device)).double()
        measured, gradient = self._gradient is not None, self._gradient
        if gradient is None:
            gradient = scale.new_zeros(1 + len(self.layers.names))
        flags = [float(len(self._batches)), scale, self._stale, self._twice, float(measured)]
        header = torch.stack([torch.as_tensor(f, device=device).double() for f in flags])
        batches = torch.stack(self._batches)
        vector = torch.cat(
            [header, gradient.to(device), batches.flatten(), torch.cat(self._examples).flatten()]
        )
        vectors = [vector] if self.group is None else gather(vector, self.group)
        return Pending(vectors, self.options, self.layers, self.names, self.optimizer is not None)

    def _largest(self, by_parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest share of each example's squared norm and whose it is, (B,) each."""
        assert self.layers is not None
        rows = torch.stack(self._by_layer(by_parameter)) if self.layers.names else by_parameter
        largest, index = rows.max(0)
        return largest / by_parameter.sum(0), index

    def _by_layer(self, by_parameter: Tensor) -> list[Tensor]:
        assert self.layers is not None
        totals: list[Tensor] = []
        for number in range(len(self.layers.names)):
            rows = [place for place, layer in enumerate(self.layers.index) if layer == number]
            totals.append(by_parameter[rows].sum(0))
        return totals

    def _influence(self, by_parameter: Tensor) -> Tensor | None:
        if self.optimizer is None:
            return None
        rates = {
            id(parameter): group["lr"]
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }
        # A parameter that no optimizer moves has learning rate zero.
        weights = [rates.get(id(parameter), 0.0) for parameter in self._parameters]
        if any(isinstance(weight, Tensor) for weight in weights):
            column = torch.stack([torch.as_tensor(weight).to(by_parameter) for weight in weights])
        else:
            column = torch.tensor(weights, dtype=by_parameter.dtype).to(by_parameter.device)
        return column @ by_parameter

    def _ids(self, ids, batch_size: int, device) -> Tensor | None:
        if ids is None:
            return None
        ids = torch.as_tensor(ids)
        if tuple(ids.shape) != (batch_size,) or ids.is_floating_point() or ids.is_complex():
            raise TrackingError(
                f"ids have shape {tuple(ids.shape)} and dtype {ids.dtype}, expected "
                f"({batch_size},) integers: one for each example."
            )
        if ids.device.type == "cpu" and np.abs(ids.numpy()).max() >= MAX_ID:
            raise TrackingError(f"ids must lie between -2⁵³ and 2⁵³, got {ids.tolist()}.")
        return ids.to(device).double()


class Pending:
    """A measured step whose numbers may still be on the device."""

    def __init__(
        self,
        vectors: list[Tensor],
        options: Options,
        layers: Layers,
        names: list[str],
        has_influence: bool,
    ):
        self._vectors = vectors
        self._options, self._layers, self._names = options, layers, names
        self._has_influence = has_influence

    def read(self) -> Measured:
        """Copy everything to the host at once, and give it its units."""
        lengths = [len(vector) for vector in self._vectors]
        whole = torch.cat(self._vectors) if len(self._vectors) > 1 else self._vectors[0]
        flat = whole.cpu().numpy()
        layers, options = self._layers.names, self._options
        headers, batch_rows, example_rows, numbers = [], [], [], []
        width = E_LAYERS + len(layers) * (2 if options.alignment else 1)
        batch_width = B_GRAM + (GRAM_COLUMNS if options.gram else 0)
        count = 0
        for vector in np.split(flat, np.cumsum(lengths)[:-1]):
            header, rest = np.split(vector, [H_SQNORM + 1 + len(layers)])
            batches = int(header[H_BATCHES])
            rows, rest = np.split(rest, [batches * batch_width])
            rows = rows.reshape(batches, batch_width)
            headers.append(header)
            batch_rows.append(rows)
            example_rows.append(rest.reshape(-1, width))
            numbers.append(count + np.repeat(np.arange(batches), rows[:, B_SIZE].astype(int)))
            count += batches
        headers_table, batches_table = np.stack(headers), np.concatenate(batch_rows)
        self._check(headers_table)
        return self._measured(
            headers_table, batches_table, np.concatenate(example_rows), np.concatenate(numbers)
        )

    def _check(self, headers: np.ndarray) -> None:
        if (headers[:, H_TWICE] > 0).any():
            raise TrackingError(
                "a parameter contributed more than once to a compiled graph, so its per-example "
                "norms are not known. Run measured steps without torch.compile."
            )
        if (headers[:, H_STALE] > 0).any():
            raise TrackingError(
                "the parameters held a gradient when the first micro-batch's backward started, so "
                "that the gradient of this step is not known. Call optimizer.zero_grad() before "
                "it; to accumulate gradients, say so with accumulation=(k, K)."
            )

    def _measured(
        self, headers: np.ndarray, batches: np.ndarray, rows: np.ndarray, number: np.ndarray
    ) -> Measured:
        options, layers = self._options, self._layers.names
        ranks, total = len(headers), len(rows)
        scale = headers[0, H_SCALE]
        # The scalars differentiated were Σ_i unit_i ℓ'_i; in truth each is Σ_i weight_i ℓ_i.
        unit = rows[:, E_WEIGHT]
        if options.loss_reduction == "step_mean":
            weight = np.full(total, ranks / total)
        else:
            weight = unit / batches[number, B_DIVISOR]
        factor = (unit / weight) ** 2 / scale**2
        whole = weight.sum() / ranks
        in_batch = np.zeros(len(batches))
        np.add.at(in_batch, number, weight)
        along = unit / weight / in_batch[number] / scale**2

        def gradients(sqnorm: np.ndarray, alignment: np.ndarray | None, entry: int):
            if headers[0, H_MEASURED]:
                raw = headers[:, H_SQNORM + entry].sum() / scale**2
            else:
                assert alignment is not None
                raw = float(unit @ alignment) / scale**2
            known = None if alignment is None else alignment * along
            return StepGradients(
                sqnorm * factor, weight / weight.sum(), float(raw / whole**2), number, known
            )

        with np.errstate(invalid="ignore", over="ignore"):
            alignment = rows[:, E_ALIGNMENT] if options.alignment else None
            step = gradients(rows[:, E_SQNORM], alignment, 0)
            by_layer = {}
            for index, name in enumerate(layers):
                column = E_LAYERS + index
                along_layer = rows[:, column + len(layers)] if options.alignment else None
                by_layer[name] = gradients(rows[:, column], along_layer, 1 + index)
            influence = rows[:, E_INFLUENCE] * factor if self._has_influence else None
            loss = batches[:, B_LOSS].sum() / scale / ranks / whole
        gram = None
        if options.gram:
            gram = batches[:, B_GRAM:].mean(0)
            first = np.searchsorted(number, np.arange(len(batches)))
            gram[LEAST] = (batches[:, B_GRAM + LEAST] * factor[first]).min()
        ids = rows[:, E_ID]
        names = layers or self._names
        return Measured(
            step=step,
            layers=by_layer,
            total_weight=float(whole),
            loss=float(loss),
            ids=ids.astype(np.int64) if np.isfinite(ids).all() else None,
            layer=[names[int(index)] for index in rows[:, E_LAYER]],
            share=rows[:, E_SHARE],
            influence=influence,
            gram=gram,
        )


def _gram_statistics(gram: Tensor) -> Tensor:
    """Return (4,): over pairs i ≠ j the mean cosine, mean sign, least product, share below zero."""
    gram = gram.double()
    size = len(gram)
    if size < 2:
        return gram.new_full((GRAM_COLUMNS,), torch.nan)
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
