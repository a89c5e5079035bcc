"""What the parameters of a context report: from the factors of their uses to squared norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradstats._factors import Factor, Outer, Ragged, Rows
from gradstats.capture._consumers import Arrival
from gradstats.capture._lineage import Pulled, pulled_sqnorm
from gradstats.capture._nodes import BOUND, COUNT, VALUE, Root
from gradstats.capture._uses import Settings
from gradstats.contractions import (
    Contraction,
    Fused,
    Projected,
    fold,
    on_chip,
    project,
    relative_error,
    sqnorm,
    stack,
    tied_sqnorm,
)
from gradstats.errors import CoverageError, TrackingError

# Parameters that were found to be used in several compiled graphs, or in one and outside of it.
SHARED_IN_GRAPHS: WeakIdKeyDictionary = WeakIdKeyDictionary()

ONE_OF_SEVERAL = (
    "Where contexts of several models are open at once, the innermost takes every backward: track "
    "one torch.nn.ModuleList of the models instead."
)


class SharedInGraphError(CoverageError):
    """Several uses of a parameter reported separately, one of them in a compiled graph."""


class Reports:
    """What one backward reports about the parameters.

    Attributes:
        roots: the parameters.
        order: (B,) the example of each loss; None where they stand in the batch's order.
        twice: whether a parameter was found to be used in several compiled graphs, or in one and
            outside of it; a tensor on the device until it has been waited for.
    """

    def __init__(
        self, roots: Sequence[Root], settings: Settings, batch_size: int, *, runs_graphs: bool
    ):
        """Keep what does not depend on the backward.

        Args:
            roots, settings: the context's.
            batch_size: number of examples B.
            runs_graphs: whether compiled graphs may report.
        """
        self.roots = roots
        self.order: Tensor | None = None
        self.twice: Tensor | bool = False
        # (B,) what the reports of compiled graphs may be off by, together.
        self._compiled_bound: Tensor | None = None
        self._settings = settings
        self._batch_size = batch_size
        self._device = roots[0].parameter.device
        self._runs_graphs = runs_graphs

    @property
    def any(self) -> bool:
        """Whether a backward has reached any tracked parameter."""
        return any(r.result is not None or r.compiled_report is not None for r in self.roots)

    def contract(self, root: Root, delivered: Sequence[Factor | Fused | Projected]) -> Contraction:
        """Return the squared norms of the sum of one root's factors, and pass the factors on."""
        consumer, fused = self._settings.consumer, delivered[0]
        if not root.parameter.numel():
            consumer = None  # without elements it adds nothing, like a parameter without a use
        projected = next((item for item in delivered if isinstance(item, Projected)), None)
        if projected is not None:
            rows = [item for item in delivered if isinstance(item, Rows)]
            known = all(factor.lookup in projected.gathered for factor in rows)
            if len(rows) != len(delivered) - 1 or not known:
                raise CoverageError(
                    f"{root.describe()} has a further use that showed only in the backward, when "
                    "what its cross term with the others needs was no longer there. Expected all "
                    "uses in the graph of the losses: use torch.utils.checkpoint.checkpoint rather "
                    "than another library's, or leave the parameter out by name with "
                    f"exclude=[{root.name!r}]."
                )
            return tied_sqnorm(projected, rows, self._settings.workspace)
        factors: list[Factor] = [
            item.factor if isinstance(item, Fused) else item  # type: ignore[misc]
            for item in delivered
        ]
        total = None
        if isinstance(fused, Fused) and len(delivered) == 1:
            norms, total = fused.norms, fused.total
        elif consumer is None:
            norms = self._sqnorm(factors)
        elif consumer.needs_norms:
            if not any(map(on_chip, factors)):
                # Gradients smaller than their factors are formed once for both, norms and products.
                factors = fold(factors)
            norms = self._sqnorm(factors)
        else:
            nothing = torch.zeros((), dtype=torch.float64, device=self._device)
            norms = Contraction(*2 * [nothing.expand(self._batch_size)])
        if consumer is not None:
            consumer.take(Arrival(root.name, factors, norms.value, total, self._settings.workspace))
        return norms

    def shrink(self, root: Root, factor: Factor | Fused) -> Factor | Fused | Projected:
        """Return what must be kept of a factor until the parameter's look-ups have delivered."""
        whole = factor.factor if isinstance(factor, Fused) else factor
        if self._settings.consumer is not None or not isinstance(whole, (Outer, Ragged)):
            return factor
        if not whole.spans_rows:
            return factor
        workspace = self._settings.workspace
        norms = factor.norms if isinstance(factor, Fused) else sqnorm([whole], workspace)
        return project(whole, norms, root.lookups, workspace)

    def _sqnorm(self, factors: list[Factor]) -> Contraction:
        workspace = self._settings.workspace
        if len(factors) == 1 and isinstance(factors[0], Pulled):
            return pulled_sqnorm(factors[0], workspace)
        return sqnorm(factors, workspace)

    @property
    def sqnorm(self) -> Tensor:
        """The squared norms over all parameters, (B,) float64."""
        return self.sqnorm_by_parameter().sum(0)

    def sqnorm_by_parameter(self, *, wait: bool = True) -> Tensor:
        """Return the squared norms, (parameters, B) float64, zero for what was not used.

        Args:
            wait: wait for the device to tell whether a parameter is used in several compiled
                graphs, or in one and outside of it, and raise an error if so. Otherwise ``twice``
                tells later.
        """
        if not self.any:
            raise TrackingError(
                "no backward reached the tracked parameters; what torch.autograd.grad returns is "
                "not measured. Run tracker.backward(losses), or your own loss.backward(), inside "
                "the context, on losses computed inside it. "
                f"{ONE_OF_SEVERAL}"
            )
        values = stack([root.result for root in self.roots], self._batch_size, self._device)
        compiled = self._compiled_reports()
        if compiled is not None:
            self._check_compiled(compiled[:, COUNT], wait)
            values = values + compiled[:, VALUE]
            self._compiled_bound = compiled[:, BOUND].sum(0)
        return values if self.order is None else values[:, self.order]

    def error_bound(
        self, sqnorm: Tensor, total: Tensor, unit: Tensor | float
    ) -> Callable[[], Tensor]:
        """Return a function that computes a bound on the rounding errors of ``total``: (B,).

        The bound is relative to the sum. It is computed on demand, since most callers do without.

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
            more=self._compiled_bound,
            unit=unit,
        )

    def _compiled_reports(self) -> Tensor | None:
        """Return what compiled graphs reported, (parameters, 3, B); None if there are none."""
        if not self._runs_graphs:
            return None
        grads = [root.compiled_report for root in self.roots]
        if all(grad is None for grad in grads):
            return None
        unused = torch.zeros(3, self._batch_size, dtype=torch.float64, device=self._device)
        return torch.stack([unused if g is None else g.to(self._device) for g in grads])

    def _check_compiled(self, count: Tensor, wait: bool) -> None:
        """Raise where a parameter reported more than once.

        Args:
            count: (parameters, B) how often each parameter reported from compiled graphs.
            wait: as ``sqnorm_by_parameter`` takes it.
        """
        count = count.amax(1)
        eagerly = [float(root.result is not None) for root in self.roots]
        if any(eagerly):  # or else nothing need be copied to the device
            count = count + torch.tensor(eagerly).to(count)
        self.twice = (count > 1).any()
        if wait and bool(self.twice):
            counts = count.tolist()
            shared = [root for root, n in zip(self.roots, counts, strict=True) if n > 1]
            for root in shared:
                SHARED_IN_GRAPHS[root.parameter] = True
            raise SharedInGraphError(
                f"{', '.join(repr(root.name) for root in shared)} contributed more than once: to "
                "several compiled graphs, or to one and outside of it. All uses of a parameter "
                "have to be added up before their norm is taken. Contexts opened from now on run "
                "these graphs operation by operation: run the step again, or begin with "
                "torch.compiler.set_stance('force_eager')."
            )
