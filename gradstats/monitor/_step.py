"""One optimizer step being measured: its micro-batches, until one copy takes them to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradstats._factors import Segments
from gradstats.capture._selection import has_processes, quoted, select_parameters
from gradstats.capture._tracker import Tracker
from gradstats.capture.uses._uses import Settings
from gradstats.errors import TrackingError
from gradstats.monitor._gradients import Gradients
from gradstats.monitor._measured import H_SCALE, Options, Pending
from gradstats.monitor._ranks import check_divisors, gather, processes_with, refuse_to_be_alone
from gradstats.monitor._rates import groups_of, learning_rates, warn_of_another_model
from gradstats.statistics._arguments import check_workspace
from gradstats.statistics._loss import loss_scale
from gradstats.statistics._norms import within_batch


class Collector:
    """Collects the micro-batches of one optimizer step on the device.

    Args:
        model: the model.
        options: what to measure.
        optimizer: whose learning rates weight the self-influence: one, a list of them, or None.
        scaler: the GradScaler, or None.
        group: the process group of the step; None for one process.
        single: whether the step has one micro-batch.

    Attributes:
        skipped: whether a micro-batch of this process had no backward; then no process measures the
            step.
    """

    def __init__(self, model: nn.Module, options: Options, optimizer, scaler, group, single: bool):
        self.skipped = False
        self._model, self._options, self._group = model, options, group
        self._optimizer, self._scaler = optimizer, scaler
        selected = select_parameters(model, options.parameters, options.exclude)
        self._names, self._parameters = list(selected), list(selected.values())
        # If one context has all of G, Σ_i ⟨g_i, G⟩ is ‖G‖², and .grad need not be read.
        read = not (single and group is None and options.alignment)
        self._gradients = Gradients(selected, read)
        self._batches: list[list[Tensor]] = []
        self._scalar = torch.zeros(())
        self._scale: Tensor | float = 1.0
        self._rates: Tensor | None = None
        self._groups: np.ndarray | None = None
        self._used: set[str] = set()
        if group is not None:
            check_divisors(model, torch.distributed.get_world_size(group))
        if groups := groups_of(optimizer):
            warn_of_another_model(groups, self._parameters)

    def open(self, batch_size: int, batch_dim: int, segments: Segments | None) -> Tracker:
        """Return the tracking context for one micro-batch, opened.

        Args:
            batch_size, batch_dim: the number of its examples, and their axis.
            segments: which example each row belongs to, if examples are packed into one row.
        """
        options = self._options
        tracker = Tracker(
            self._model,
            batch_size=batch_size,
            batch_dim=batch_dim,
            segments=segments,
            settings=Settings(
                weight_gradients=True,
                fused=options.fused,
                workspace=check_workspace(options.workspace),
                consumer=within_batch(options.alignment, options.gram),
            ),
            parameters=options.parameters,
            exclude=options.exclude,
        )
        changed = {root.name for root in tracker.roots}.symmetric_difference(self._names)
        if changed:
            raise TrackingError(
                f"{quoted(sorted(changed))} began or ceased to require grad between the "
                "micro-batches of one optimizer step. Expected the same parameters in all: freeze "
                "and unfreeze between steps."
            )
        tracker.listener = self
        tracker.weight = 1.0 if options.loss_reduction == "sum" else 1 / batch_size
        if self._group is None and has_processes():
            refuse_to_be_alone()
            tracker.until_closed(self._model.register_forward_pre_hook(refuse_to_be_alone))
        tracker.open()
        return tracker

    def before_backward(
        self,
        losses: Sequence[Tensor],
        start: Sequence[Tensor | None],
        inputs: Sequence[Tensor] | None,
    ) -> None:
        """Read scalar, scale and rates: the optimizer may step before the context closes."""
        if inputs is not None:
            self._check_inputs(inputs)
        self._gradients.before_backward()
        device = losses[0].device
        self._scalar = torch.zeros((), dtype=torch.float64, device=device)
        for loss, gradient in zip(losses, start, strict=True):
            if gradient is not None:
                self._scalar += (loss.detach().double() * gradient).sum().to(device)
        self._scale = loss_scale(self._scaler, device)
        if groups := groups_of(self._optimizer):
            self._rates, self._groups = learning_rates(groups, self._parameters)

    def after_backward(self) -> None:
        """Read the gradients."""
        self._gradients.after_backward()

    def add(
        self,
        tracker: Tracker,
        batch_size: int,
        ids: Tensor | None,
        weights: Tensor | None,
        divisor: float,
    ) -> None:
        """Add the statistics of a micro-batch whose context has closed.

        Args:
            tracker: the context.
            batch_size, ids, weights: of the micro-batch, checked by its ``MonitorStep``.
            divisor: of its scalar.
        """
        sqnorm = tracker.reports.sqnorm_by_parameter()
        device = sqnorm.device
        weight: Any = tracker.weight
        sizes = [batch_size, divisor, weight if weights is None else math.nan, ids is not None]
        parts = [torch.tensor(sizes, dtype=torch.float64), self._scalar]
        if weights is not None:
            weight = weights
            parts.append(weights)
        if ids is not None:
            parts.append(ids)
        within: Any = tracker.settings.consumer
        if self._options.gram:
            parts.append(_gram_statistics(within.pairs, weight))
        if self._options.alignment:
            unused = sqnorm.new_zeros(batch_size)
            along = [within.with_sum.get(name, unused).to(device) for name in self._names]
            parts.append(torch.stack(along))
        parts.append(sqnorm)
        self._batches.append([_column(part, device) for part in parts])
        self._used |= {root.name for root in tracker.roots if root.result is not None}

    def finish(self, number: int) -> Pending:
        """Return optimizer step ``number``, gathered from all processes, still on the device."""
        self.skipped = self.skipped or not self._batches
        vector, shared = self._vector(), None
        vectors = [vector]
        if self._group is not None:
            vectors = gather(vector, self._group)
            ranks = torch.distributed.get_world_size(self._group)
            shared = [processes_with(parameter, ranks) for parameter in self._parameters]
        return Pending(
            number, self.skipped, vectors, self._options, self._names, shared, self._groups,
            self._gradients.lost(self._used),
        )  # fmt: skip

    def _vector(self) -> Tensor:
        """Return this process' measurements in the form that ``_measured`` describes."""
        device = self._parameters[0].device
        if self.skipped:
            return torch.zeros(1, dtype=torch.float64, device=device)
        header = torch.tensor([len(self._batches), 1, self._gradients.read], dtype=torch.float64)
        header = header.to(device)
        header[H_SCALE] = self._scale
        pieces = [header, *(_column(row, device) for row in self._gradients.seen())]
        if self._rates is not None:
            pieces.append(_column(self._rates, device))
        return torch.cat([*pieces, *(part for batch in self._batches for part in batch)])

    def _check_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Raise if a backward's ``inputs`` lack measured parameters."""
        asked = set(map(id, inputs))
        named = zip(self._names, self._parameters, strict=True)
        missing = [name for name, parameter in named if id(parameter) not in asked]
        if missing:
            raise TrackingError(
                f"the backward's inputs= leaves out {quoted(missing)} of the measured parameters, "
                "which then have no gradient in this step. Expected all of them: list them in "
                "inputs=, or leave them out of the monitor too, with parameters= or exclude=."
            )


def _column(part: Tensor, device: torch.device) -> Tensor:
    return part.to(device, torch.float64).reshape(-1)


def _gram_statistics(gram: Tensor, weight: Tensor | float) -> Tensor:
    """Return the statistics of pairs that ``_measured`` lists; all NaN if a product is not finite.

    Args:
        gram: (B, B) products of weighted gradients.
        weight: (B,), or one number for all.
    """
    weight = torch.as_tensor(weight, dtype=torch.float64, device=gram.device).expand(len(gram))
    gram = gram.double() / (weight[:, None] * weight)
    apart = ~torch.eye(len(gram), dtype=torch.bool, device=gram.device)
    norm = gram.diagonal().sqrt()
    lengths = norm[:, None] * norm
    known = apart & (lengths > 0)
    statistics = torch.stack(
        [
            (gram / lengths).where(known, 0).sum(),
            gram.sign().where(known, 0).sum(),
            known.sum(dtype=torch.float64),
            gram.where(apart, torch.inf).min(),
            (apart & (gram < 0)).sum(dtype=torch.float64),
        ]
    )
    return statistics.where(gram.isfinite().all(), torch.nan)
