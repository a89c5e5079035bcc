"""One optimizer step being measured: its micro-batches, until they go to the host in one copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradstats._factors import Segments
from gradstats._warnings import warn
from gradstats.capture._selection import quoted, select_parameters
from gradstats.capture._tracker import Tracker
from gradstats.capture.uses._uses import Settings
from gradstats.errors import TrackingError
from gradstats.monitor._arguments import optimizers_of
from gradstats.monitor._layers import Layers
from gradstats.monitor._measured import AGREEMENT, H_SCALE, Options, Pending
from gradstats.monitor._ranks import check_divisors, gather, gradient_sqnorms, processes_with
from gradstats.statistics._arguments import check_workspace
from gradstats.statistics._loss import loss_scale
from gradstats.statistics._norms import within_batch


class Collector:
    """Collects the micro-batches of one optimizer step on the device.

    Args:
        model: the model, as its optimizer step is run.
        options: what to measure.
        optimizer: whose learning rates weigh the self-influence: one, a list of them, or None.
        scaler: the GradScaler, or None.
        group: the process group of the step, None if alone.
        single: no other micro-batch will follow.
    """

    def __init__(self, model: nn.Module, options: Options, optimizer, scaler, group, single: bool):
        self.model, self.options, self.scaler, self.group = model, options, scaler, group
        self._optimizers = optimizers_of(optimizer)
        # A micro-batch had no backward. Of several processes each has to learn it from the others.
        self.skipped = False
        # Σ_i ⟨c_i, G⟩ is ‖G‖² where G is all in one context: then the gradients need not be read.
        self.reads_gradients = not (single and group is None and options.alignment)
        self.names: list[str] = []
        self.layers = Layers((), None)
        self._parameters: list[nn.Parameter] = []
        self._batches: list[list[Tensor]] = []
        self._gradient: Tensor | None = None
        self._scale: Tensor | float = 1.0
        self._rates: Tensor | None = None
        self._groups: np.ndarray | None = None
        self._stale: Tensor | None = None
        # ‖G_p‖² where a backward left it, and which the next one found to be something else.
        self._left: Tensor | None = None
        self._changed: Tensor | None = None
        self._used: set[str] = set()
        self._without: set[str] = set()
        self._scalar: Tensor | None = None

    def open(self, batch_size: int, segments: Segments | None) -> Tracker:
        """Return the tracking context for one micro-batch, opened.

        Args:
            batch_size: its examples.
            segments: whose its rows are, where examples are packed into one row.
        """
        options = self.options
        tracker = Tracker(
            self.model,
            batch_size=batch_size,
            batch_dim=0,
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
        tracker.listener = self
        names = [root.name for root in tracker.roots]
        if self.names:
            self._check_same(names)
        else:
            self.names = names
            self._parameters = [root.parameter for root in tracker.roots]
            self.layers = Layers(self.names, options.layers)
            if self.reads_gradients:
                self._warn_of_hooks()
            if self.group is not None:
                check_divisors(self.model, torch.distributed.get_world_size(self.group))
            if self._optimizers:
                self._warn_of_optimizer()
        tracker.open()
        return tracker

    def before_backward(
        self,
        losses: Sequence[Tensor],
        start: Sequence[Tensor | None],
        inputs: Sequence[Tensor] | None,
    ) -> None:
        """Note the start of the backward: the optimizer may step before the context closes."""
        if inputs is not None:
            self._check_inputs(inputs)
        held = gradient_sqnorms(self._parameters)
        if self._scalar is None:
            self._stale = held
        else:
            self._note_changes(held)
        device = losses[0].device
        self._scalar = torch.zeros((), dtype=torch.float64, device=device)
        for loss, gradient in zip(losses, start, strict=True):
            if gradient is not None:
                self._scalar += (loss.detach().double() * gradient).sum().to(device)
        self._scale = loss_scale(self.scaler, device)
        if self._optimizers:
            self._rates, self._groups = self._learning_rates()

    def after_backward(self) -> None:
        """Read the gradients before anything clips them."""
        if not self.reads_gradients:
            return
        self._gradient = self._left = gradient_sqnorms(self._parameters)
        named = zip(self.names, self._parameters, strict=True)
        self._without = {name for name, parameter in named if parameter.grad is None}

    def _note_changes(self, held: Tensor | None) -> None:
        """Note which gradients are not as the backward before left them.

        Args:
            held: (P,) squared norms of the gradients that are there; None if there are none.
        """
        if held is None and self._left is None:
            return
        present = self._left if held is None else held
        assert present is not None
        left, held = (torch.zeros_like(present) if g is None else g for g in (self._left, held))
        changed = ~torch.isclose(held, left, rtol=AGREEMENT, atol=0, equal_nan=True)
        self._changed = changed if self._changed is None else self._changed | changed

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
        sqnorm = tracker.reports.sqnorm_by_parameter()
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
        within: Any = tracker.settings.consumer
        if self.options.gram:
            parts.append(_gram_statistics(within.pairs, weight))
        if self.options.alignment:
            unused = sqnorm.new_zeros(batch_size)
            along = [within.with_sum.get(name, unused).to(device) for name in self.names]
            parts.append(torch.stack(along))
        parts.append(sqnorm)
        self._batches.append([_column(part, device) for part in parts])
        self._used |= {root.name for root in tracker.roots if root.result is not None}

    def finish(self) -> Pending:
        """Return the step, gathered from all processes, still on the device."""
        self.skipped = self.skipped or not self._batches
        vector = self._of_nothing() if self.skipped else self._vector()
        vectors = [vector] if self.group is None else gather(vector, self.group)
        shared = None
        if self.group is not None:
            ranks = torch.distributed.get_world_size(self.group)
            shared = [processes_with(parameter, ranks) for parameter in self._parameters]
        lost = [name for name in self.names if name in self._used & self._without]
        return Pending(vectors, self.options, self.layers, self.names, shared, self._groups, lost)

    def _of_nothing(self) -> Tensor:
        """Return the beginning of a header that has no micro-batch."""
        options = self.options
        measured = select_parameters(self.model, options.parameters, options.exclude)
        # Where other processes, which may have opened a context, have what they collected.
        device = next(iter(measured.values())).device
        return torch.zeros(1, dtype=torch.float64, device=device)

    def _vector(self) -> Tensor:
        """Return what this process measured, as ``_measured`` has it."""
        device = self._batches[0][0].device
        flags = [len(self._batches), 1, self._gradient is not None]
        header = torch.tensor(flags, dtype=torch.float64).to(device)
        header[H_SCALE] = self._scale
        nothing = header.new_zeros(len(self.names))
        read = (self._gradient, self._stale, self._changed)
        pieces = [header, *(_column(nothing if r is None else r, device) for r in read)]
        if self._rates is not None:
            pieces.append(_column(self._rates, device))
        return torch.cat([*pieces, *(part for batch in self._batches for part in batch)])

    def _check_same(self, names: list[str]) -> None:
        """Raise unless a micro-batch measures the parameters that those before it measured."""
        changed = sorted(set(names) ^ set(self.names))
        if changed:
            raise TrackingError(
                f"{quoted(changed)} began or ceased to require grad between the micro-batches of "
                "one optimizer step. Expected the same parameters in all of them: freeze and "
                "unfreeze between steps."
            )

    def _check_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Raise where the backward leaves measured parameters without their gradient."""
        asked = set(map(id, inputs))
        named = zip(self.names, self._parameters, strict=True)
        left = [name for name, parameter in named if id(parameter) not in asked]
        if left:
            raise TrackingError(
                f"the backward's inputs= leaves out {quoted(left)} of the measured parameters, "
                "so that they have no part in the gradient of this step. Expected all of them "
                "there: measure the others alone, with parameters= or exclude=."
            )

    def _warn_of_hooks(self) -> None:
        """Warn of gradients that hooks may change before they are read."""
        named = zip(self.names, self._parameters, strict=True)
        hooked = [
            name
            for name, parameter in named
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        ]
        if hooked:
            warn(
                f"hooks on {quoted(hooked)} may change gradients before gradstats.Monitor reads "
                "them: then grad_norm is that of the changed gradient, and what compares it with "
                "the examples' own (noise scale, coherence, diversity, norm test) has no meaning. "
                "Hooks that only look do no harm. Otherwise remove them while measuring; or "
                "measure with alignment=True, one micro-batch on one process, where the gradient "
                "is taken before hooks.",
            )

    def _warn_of_optimizer(self) -> None:
        """Warn if the optimizer has none of the measured parameters."""
        moved = {id(each) for group in self._moved_groups() for each in group["params"]}
        if moved.isdisjoint(map(id, self._parameters)):
            warn(
                "the optimizer that gradstats.Monitor was given holds none of the measured "
                "parameters, so that their self-influence is zero. Expected the optimizer of this "
                "model, made of the parameters that it has now.",
            )

    def _moved_groups(self) -> list[dict[str, Any]]:
        """Return the groups of parameters of all optimizers, as they stand."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _learning_rates(self) -> tuple[Tensor, np.ndarray]:
        """Return (G,) the learning rates as they stand, and (G, P) whose parameters they move."""
        groups = self._moved_groups()
        members = [set(map(id, group["params"])) for group in groups]
        moves = np.array([[id(p) in group for p in self._parameters] for group in members])
        # Adafactor has None where it makes its own.
        known = (group.get("lr") for group in groups)
        rates = [math.nan if rate is None else rate for rate in known]
        if not any(isinstance(rate, Tensor) for rate in rates):
            return torch.tensor(rates, dtype=torch.float64), moves
        device = next(rate.device for rate in rates if isinstance(rate, Tensor))
        # A copy: schedulers write into rates that are tensors.
        columns = [_column(torch.as_tensor(r, dtype=torch.float64), device) for r in rates]
        return torch.cat(columns), moves


def _column(part: Tensor, device: torch.device) -> Tensor:
    return part.to(device, torch.float64).reshape(-1)


def _gram_statistics(gram: Tensor, weight: Tensor | float) -> Tensor:
    """Return what ``_measured`` keeps of the pairs; all NaN where a product is not finite.

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
