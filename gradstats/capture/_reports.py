"""From the factors of all uses of a context's parameters to their squared norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradstats._factors import Factor, Outer, Ragged, Rows
from gradstats.capture.parameters._consumers import Arrival
from gradstats.capture.parameters._lineage import Pulled, pulled_sqnorm
from gradstats.capture.parameters._nodes import Root, closed_before
from gradstats.capture.parameters._parts import merge_uses, parts_sqnorm
from gradstats.capture.uses._uses import Settings
from gradstats.contractions import (
    Contraction,
    Fused,
    Projected,
    Reported,
    fold,
    on_chip,
    project,
    relative_error,
    sqnorm,
    stack,
    tied_sqnorm,
)
from gradstats.errors import CoverageError, TrackingError

# Parameters found to be used in several compiled graphs, or both inside and outside of one.
SHARED_IN_GRAPHS: WeakIdKeyDictionary = WeakIdKeyDictionary()

ONE_OF_SEVERAL = (
    "If contexts of several models are open, the innermost takes every backward: track one "
    "torch.nn.ModuleList of the models instead."
)


class SharedInGraphError(CoverageError):
    """Several uses of a parameter would report separately, at least one in a compiled graph."""


class GraphReport:
    """What one run of a compiled graph reports, through the gradient of a probe.

    Attributes:
        probe: (parameters, 2, B) float64, a leaf of arbitrary values. Its gradient is the report:
            the squared norms, and their error bounds up to a factor.
        roots: the parameters that the graph takes.
        reporting: each parameter on which the results depend → its row in the report, and the
            factor of its error bound.
    """

    def __init__(self, roots: Sequence[Root], reporting: Sequence[float | None], batch_size: int):
        """Make the probe.

        Args:
            roots: the parameters that the graph takes.
            reporting: the factor of each parameter's error bound; None for parameters on which the
                results do not depend.
            batch_size: number of examples B.
        """
        self.roots = roots
        rows = enumerate(zip(roots, reporting, strict=True))
        self.reporting = {root: (row, factor) for row, (root, factor) in rows if factor is not None}
        shape = len(roots), 2, batch_size
        with torch._C.DisableTorchFunction():
            device = roots[0].parameter.device
            self.probe = torch.empty(shape, dtype=torch.float64, device=device, requires_grad=True)

    def expect(self) -> list[Root]:
        """Note that the losses' graph contains this run; return roots that another reports too."""
        again = [root for root in self.reporting if root.graph not in (None, self)]
        for root in self.reporting:
            root.graph = self
        return again

    def deliver(self) -> None:
        """Pass the report of the backward on to the parameters."""
        if self.probe.grad is None:
            return
        # The next run of a CUDA graph overwrites its results.
        found, self.probe.grad = self.probe.grad.clone(), None
        for root, (row, factor) in self.reporting.items():
            root.finish(Reported(found, row, factor))


def _check_open(root: Root, gradient: Tensor) -> None:
    """Raise if the context is closed: its graph forms no weight gradients for a later backward."""
    if root.tracker.closed:
        raise closed_before(root)


def shared_in_graphs(roots: Sequence[Root]) -> SharedInGraphError:
    """Return the error for parameters whose uses report separately."""
    for root in roots:
        SHARED_IN_GRAPHS[root.parameter] = True
    return SharedInGraphError(
        "several compiled graphs, or a graph and code outside it, use "
        f"{', '.join(repr(root.name) for root in roots)}: their uses cannot be added up before the "
        "norm is taken. Run the step again: contexts opened from now on run these graphs eagerly. "
        "Or call torch.compiler.set_stance('force_eager') before the first step."
    )


class Reports:
    """What one backward reports about the parameters.

    Attributes:
        roots: the parameters.
        order: (B,) the example of each loss; None if the losses are in the batch's order.
        of_graphs: id of a probe → what that run of a compiled graph reports.
    """

    def __init__(self, roots: Sequence[Root], settings: Settings, batch_size: int):
        """Prepare for a context's parameters and settings, and B examples."""
        self.roots = roots
        self.order: Tensor | None = None
        self.of_graphs: dict[int, GraphReport] = {}
        self._settings = settings
        self._batch_size = batch_size

    @property
    def _device(self) -> torch.device:
        return self.roots[0].parameter.device

    @property
    def any(self) -> bool:
        """Whether a backward has reached any tracked parameter."""
        return any(root.result is not None for root in self.roots)

    def of_graph(self, roots: Sequence[Root], reporting: Sequence[float | None]) -> GraphReport:
        """Return a new ``GraphReport`` for one run of a compiled graph."""
        report = GraphReport(roots, reporting, self._batch_size)
        if not self._settings.weight_gradients:
            with torch._C.DisableTorchFunction():
                report.probe.register_hook(partial(_check_open, roots[0]))
        self.of_graphs[id(report.probe)] = report
        return report

    def deliver(self) -> None:
        """Pass on what compiled graphs have reported, once the backward has ended."""
        for report in self.of_graphs.values():
            report.deliver()

    def contract(self, root: Root, delivered: Sequence[Factor | Fused | Projected]) -> Contraction:
        """Return the squared norms of the sum of a root's factors; pass these to the consumer."""
        consumer, fused = self._settings.consumer, delivered[0]
        projected = next((item for item in delivered if isinstance(item, Projected)), None)
        if projected is not None:
            return self._tied(root, projected, delivered)
        factors: list[Factor] = [
            item.factor if isinstance(item, Fused) else item  # type: ignore[misc]
            for item in delivered
        ]
        if len(factors) > 1:
            factors = merge_uses(factors)
        total = None
        if isinstance(fused, Fused) and len(delivered) == 1:
            norms, total = fused.norms, fused.total
        elif consumer is None:
            parts = parts_sqnorm(root, delivered, self._settings.workspace)
            norms = self._sqnorm(factors) if parts is None else parts
        elif consumer.needs_norms:
            if not any(map(on_chip, factors)):
                # Gradients smaller than their factors are formed once, for norms and products.
                factors = fold(factors)
            norms = self._sqnorm(factors)
        else:
            nothing = torch.zeros((), dtype=torch.float64, device=root.parameter.device)
            norms = Contraction(*2 * [nothing.expand(self._batch_size)])
        if consumer is not None:
            sqnorm = norms.value
            if self.order is not None:
                order = self.order.cpu()  # parameters may be on several devices
                factors = [factor.select(order) for factor in factors]
                sqnorm = sqnorm[order]
            consumer.take(Arrival(root.name, factors, sqnorm, total, self._settings.workspace))
        return norms

    def _tied(self, root: Root, projected: Projected, delivered: Sequence) -> Contraction:
        """Return the squared norms of a projection and the look-ups tied to it."""
        rows = [item for item in delivered if isinstance(item, Rows)]
        known = all(factor.lookup in projected.gathered for factor in rows)
        if len(rows) != len(delivered) - 1 or not known:
            raise CoverageError(
                f"{root.describe()} has a use that appeared only in the backward, too late to "
                "compute its cross term with the other uses. Expected all uses in the graph of the "
                "losses: use torch.utils.checkpoint.checkpoint rather than another library's, or "
                f"leave the parameter out by name with exclude=[{root.name!r}]."
            )
        return tied_sqnorm(projected, rows, self._settings.workspace)

    def shrink(self, root: Root, factor: Factor | Fused) -> Factor | Fused | Projected:
        """Return what to keep of a factor until look-ups of the same parameter have delivered."""
        whole = factor.factor if isinstance(factor, Fused) else factor
        if self._settings.consumer is not None or not isinstance(whole, (Outer, Ragged)):
            return factor
        if not whole.spans_rows:
            return factor
        norms = factor.norms if isinstance(factor, Fused) else self._sqnorm([whole])
        return project(whole, norms, root.lookups, self._settings.workspace)

    def _sqnorm(self, factors: list[Factor]) -> Contraction:
        workspace = self._settings.workspace
        if len(factors) == 1 and isinstance(factors[0], Pulled):
            return pulled_sqnorm(factors[0], workspace)
        return sqnorm(factors, workspace)

    def sqnorm_by_parameter(self) -> Tensor:
        """Return the squared norms, (parameters, B) float64, zeros for unused parameters."""
        if not self.any:
            raise TrackingError(
                "no backward reached the tracked parameters. Run tracker.backward(losses), or your "
                "own loss.backward(), inside the context, on losses computed inside it; what "
                f"torch.autograd.grad returns is not measured. {ONE_OF_SEVERAL}"
            )
        values = stack([root.result for root in self.roots], self._batch_size, self._device)
        return values if self.order is None else values[:, self.order]

    def error_bound(
        self, sqnorm: Tensor, total: Tensor, unit: Tensor | float
    ) -> Callable[[], Tensor]:
        """Return a function that computes a bound on the rounding errors of ``total``: (B,).

        The bound is relative to the sum. It is computed on demand, since most callers do not need
        it.

        Args:
            sqnorm: what ``sqnorm_by_parameter`` returned, (parameters, B).
            total: (B,) their sum.
            unit: what both are divided by before they are rounded.
        """
        return partial(
            relative_error,
            [root.result for root in self.roots],
            sqnorm,
            total,
            shapes=[root.parameter.shape for root in self.roots],
            order=self.order,
            unit=unit,
        )
