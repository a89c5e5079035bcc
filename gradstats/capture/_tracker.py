"""One tracking context: entering and leaving it, what it knows, and what it collects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.autograd.graph import Node as GraphNode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import WeakIdKeyDictionary

from gradstats._factors import Factor, Outer, Ragged, Rows, Segments
from gradstats.capture._constants import ConstantTracking, run_backward
from gradstats.capture._consumers import Arrival
from gradstats.capture._coverage import check_coverage, leaves_of
from gradstats.capture._data import Data
from gradstats.capture._dispatch import dispatch
from gradstats.capture._functions import show_functions
from gradstats.capture._grafted import Grafted
from gradstats.capture._lineage import Pulled, pulled_sqnorm
from gradstats.capture._nodes import (
    BOUND,
    COUNT,
    VALUE,
    Derived,
    Root,
    rebuild,
    tensors_in,
)
from gradstats.capture._selection import (
    anatomy_of,
    check_trackable,
    compiler_is_used,
)
from gradstats.capture._sharded import ShardedParameters
from gradstats.capture._tensors import DerivedTensor, TrackedParameter, unwrap
from gradstats.capture._uses import Settings
from gradstats.capture.rules import RULES
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
from gradstats.contractions._precision import without_autocast
from gradstats.errors import (
    CoverageError,
    ExampleAxisError,
    TrackingError,
    UnsupportedOperationError,
)

# Parameters of which a compiled graph was seen to hold several uses.
SHARED_IN_GRAPHS: WeakIdKeyDictionary = WeakIdKeyDictionary()

# What every module has.
STANDARD_ATTRIBUTES = frozenset(vars(nn.Module()))

# What fills long containers that hold no tensors, as vocabularies do.
PLAIN_TYPES = frozenset({int, float, str, bool, type(None)})

ONE_OF_SEVERAL = (
    "Where contexts of several models are open at once, the innermost takes every backward: track "
    "one torch.nn.ModuleList of the models instead."
)

DEFAULT_WORKSPACE = 256 * 1024 * 1024


class BackwardListener(Protocol):
    """What wants to know when the backward of a context starts and when it has ended."""

    def before_backward(self, losses: Sequence[Tensor]) -> None: ...

    def after_backward(self) -> None: ...


class SharedInGraphError(CoverageError):
    """Several uses of a parameter reported apart, since a compiled graph held them."""


class Tracker(Data):
    """Follows the uses of a model's parameters for the duration of one batch."""

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int,
        batch_dim: int,
        segments: Segments | None = None,
        settings: Settings,
        parameters: Sequence[str] | str | None,
        exclude: Sequence[str] | str,
    ):
        super().__init__(batch_size, batch_dim, segments)
        self.settings = settings
        self.closed = False
        # Told before and after the backward, while the gradients are as the backward left them.
        self.listener: BackwardListener | None = None
        # Whether any tensor was derived from parameters.
        self.derived = False
        # The autograd nodes of derived tensors as the user's code has them.
        self.shown: dict[GraphNode | None, Derived] = {}
        # Whether a compiled graph held several uses of a parameter; on the device once it reported.
        self.reported_twice: Tensor | bool = False
        self._backward_ran = False
        self._undo = ExitStack()
        anatomy = anatomy_of(model)
        self._tied, self._compiled = anatomy.tied, anatomy.compiled
        self._compiler = anatomy.compiled or compiler_is_used()
        self._reentrant = False
        self._modules = [module for _, module in anatomy.modules]
        self._parameters = list(anatomy.parameters.values())
        named = anatomy.select(parameters, exclude)
        self.device = device = next(iter(named.values())).device
        self.roots = [Root(self, name, parameter) for name, parameter in named.items()]
        if self._compiler:
            for root in self.roots:
                root.probe = torch.zeros(
                    3, batch_size, dtype=torch.float64, device=device, requires_grad=True
                )
        self._mode = ConstantTracking(self)
        self._tasks: set[int] = set()
        # What a module keeps belongs to no example: buffers, parameters that are not tracked, and
        # tensors in plain attributes.
        kept: list[Tensor] = []
        attributes: list[Tensor] = []
        if len(named) < len(self._parameters):
            tracked = {id(parameter) for parameter in named.values()}
            kept += [p for p in self._parameters if id(p) not in tracked]
        for module in self._modules:
            for name in vars(module).keys() - STANDARD_ATTRIBUTES:
                attributes += tensors_kept(vars(module)[name])
            if module._buffers:
                kept += [item for item in module._buffers.values() if isinstance(item, Tensor)]
        self.keep_constant((*kept, *attributes))
        # A model may keep what it saw last: the module whose arguments tell, where sizes allow it.
        self._model = model if any(map(self.has_example_axis, attributes)) else None
        self._tracked: list[nn.Parameter] = []
        self.sharded = ShardedParameters(anatomy, self.roots, self._track_whole, self._ignore_whole)

    def open(self) -> None:
        """Give the parameters their tracked class and start following constants."""
        whole = [root for root in self.roots if not self.sharded.holds(root)]
        for root in whole:
            check_trackable(root)
        for root in whole:
            self._track(root)
        self.sharded.open()
        # A compiled graph has no place for a consumer, nor one where uses of one parameter meet.
        # Without the compiler nothing is compiled.
        if self._compiler:
            shared = any(root.parameter in SHARED_IN_GRAPHS for root in self.roots)
            if self.settings.consumer is not None or self._tied or shared:
                self._undo.enter_context(torch.compiler.set_stance("force_eager"))
            else:
                self.mark_kept()
        if self._model is not None and not self._compiled:
            hook = self._model.register_forward_pre_hook(self._take_data, with_kwargs=True)
            self._undo.enter_context(hook)
        show_functions()
        self._mode.__enter__()

    def _take_data(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What the model is called with is data, also where it keeps the same from before."""
        self.keep_data(tensors_in((args, kwargs)))

    def _track(self, root: Root) -> None:
        self._tracked.append(root.parameter)
        root.parameter.__class__ = TrackedParameter
        root.parameter._gradstats = root  # type: ignore[attr-defined]

    def take_back_count(self, running_mean: Tensor | None) -> None:
        """Have a layer forget the batch that it counted before its statistics were refused."""
        for module in self._modules:
            if isinstance(module, _BatchNorm) and module.training:
                if module.running_mean is running_mean and module.num_batches_tracked is not None:
                    module.num_batches_tracked.sub_(1)

    def _track_whole(self, root: Root, parameter: nn.Parameter) -> None:
        root.parameter = parameter
        check_trackable(root)
        self._track(root)

    def _ignore_whole(self, parameter: nn.Parameter) -> None:
        self.keep_constant([parameter])

    def close(self) -> None:
        """Give the parameters back as they were; nothing of the context is left on them."""
        self._mode.__exit__(None, None, None)
        self.sharded.close()
        self._undo.close()
        for parameter in self._tracked:
            del parameter._gradstats  # type: ignore[attr-defined]
            parameter.__class__ = nn.Parameter  # what it was: see check_trackable
        self._tracked.clear()
        if self.derived:
            for module in self._modules:
                restore_attributes(module)
        self.coupled.clear()
        self.shown.clear()
        self.forget_marks()
        self.followed = None
        for root in self.roots:
            root.release()
        # No reference leads back here: what the context held is freed with its last user.
        del self._mode, self.sharded, self._model
        self.closed = True

    def watching(self) -> ConstantTracking:
        """Return the mode that follows constants, for code that runs while it is set aside."""
        return self._mode

    def registered(self, func) -> Grafted | None:
        """Return the rule that a user registered for an operation."""
        rule = RULES.get(func)
        return rule if isinstance(rule, Grafted) else None

    def dispatch(
        self, func, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[Tensor]
    ):
        """Run one operation of whose operands, all of which are given, this context tracks one."""
        return dispatch(self, RULES, func, args, kwargs, operands)

    def note_losses(self, losses: Tensor) -> None:
        """Remember whose each loss is, where the model put the examples in another order."""
        super().note_losses(losses)
        if self.settings.consumer is not None and self.loss_order is not None:
            raise ExampleAxisError(
                "the losses stand in another order than the batch, "
                f"{self.loss_order.tolist()[:8]}…, which inner products do not follow. Put the "
                "losses back in the batch's order."
            )

    @property
    def reported(self) -> bool:
        """Whether a backward has reached any tracked parameter."""
        return any(r.result is not None or r.compiled_report is not None for r in self.roots)

    @property
    def probes(self) -> tuple[Tensor, ...]:
        """The leaves whose gradients compiled graphs report."""
        return tuple(root.probe for root in self.roots if root.probe is not None)

    def targets(self, reporting: Sequence[GraphNode]) -> tuple:
        """Return what a backward must be told to reach where it is told what to reach.

        Args:
            reporting: the nodes of the graph that report uses.
        """
        return (*self.probes, *(GradientEdge(node, 0) for node in reporting))

    def alias_nodes(self) -> list[GraphNode | None]:
        """Return the autograd nodes of the parameters' aliases."""
        return [root.alias.grad_fn for root in self.roots if root.alias is not None]

    def is_backward_of_losses(self) -> bool:
        """Whether the running backward is that of the losses, not of an inner autograd.grad."""
        return torch._C._current_graph_task_id() in self._tasks

    def backward_without_gradients(self, total: Tensor) -> None:
        """Run a backward that computes the reports and nothing else: no weight gradient."""
        with torch._C.DisableTorchFunction():
            reporting = self.before_backward([total], create_graph=False)
            one = torch.ones_like(total)
        if not self._reentrant:
            targets = self.targets(reporting)
            if targets:  # with none to reach, the engine would reach every leaf
                with without_autocast():
                    run_backward((total,), (one,), inputs=targets)
            self.after_backward()
            return
        # A reentrant checkpoint refuses to be told what to compute: what its backward adds to
        # other gradients is taken back.
        own = {id(probe) for probe in self.probes}
        leaves = [leaf for leaf in (*self._parameters, *leaves_of(total)) if id(leaf) not in own]
        grads = [(leaf, leaf.grad) for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            with without_autocast():
                run_backward((total,), (one,))
        finally:
            for leaf, grad in grads:
                leaf.grad = grad
        self.after_backward()

    def contract(self, root: Root, delivered: Sequence[Factor | Fused | Projected]) -> Contraction:
        """Return the squared norms of the sum of one root's factors, and pass the factors on."""
        consumer, fused = self.settings.consumer, delivered[0]
        projected = next((item for item in delivered if isinstance(item, Projected)), None)
        if projected is not None:
            rows = [item for item in delivered if isinstance(item, Rows)]
            known = all(factor.lookup in projected.gathered for factor in rows)
            if len(rows) != len(delivered) - 1 or not known:
                raise CoverageError(
                    f"{root.describe()} is used by a product and then, seen only in the backward, "
                    "in another way, so their cross term is lost. Use "
                    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or leave the "
                    f"parameter out by name with exclude=[{root.name!r}]."
                )
            return tied_sqnorm(projected, rows, self.settings.workspace)
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
                # Gradients smaller than their factors are formed once, for norms and products.
                factors = fold(factors)
            norms = self._sqnorm(factors)
        else:
            nothing = torch.zeros((), dtype=torch.float64, device=self.device)
            norms = Contraction(*2 * [nothing.expand(self.batch_size)])
        if consumer is not None:
            consumer.take(Arrival(root.name, factors, norms.value, total, self.settings.workspace))
        return norms

    def shrink(self, root: Root, factor: Factor | Fused) -> Factor | Fused | Projected:
        """Return what must be kept of a factor until the look-ups tied to it deliver."""
        if self.settings.consumer is not None or not isinstance(factor, (Outer, Ragged)):
            return factor
        if isinstance(factor, Ragged) or factor.spans_rows:
            norms = sqnorm([factor], self.settings.workspace)
            return project(factor, norms, root.lookups, self.settings.workspace)
        return factor

    def _sqnorm(self, factors: list[Factor]) -> Contraction:
        workspace = self.settings.workspace
        if len(factors) == 1 and isinstance(factors[0], Pulled):
            return pulled_sqnorm(factors[0], workspace)
        return sqnorm(factors, workspace)

    def before_backward(self, losses: Sequence[Tensor], create_graph: bool) -> list[GraphNode]:
        """Check, before a backward changes anything, that it can be accounted for.

        Returns:
            The nodes of the graph that report uses.
        """
        if create_graph:
            raise UnsupportedOperationError(
                "the backward of a tracking context was asked to create a graph, so that the "
                "training gradient can be differentiated: expected create_graph=False, since what "
                "is computed from the training gradient mixes the examples. Run that backward "
                "outside the context."
            )
        nested = torch._C._current_graph_task_id() != -1
        if self._backward_ran and not nested:
            raise TrackingError(
                "a second backward was started in one tracking context. One context serves one "
                "batch and one backward; to accumulate gradients, open one context for each "
                f"micro-batch. {ONE_OF_SEVERAL}"
            )
        nodes = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
        coverage = check_coverage(self, nodes)
        self._reentrant |= coverage.reentrant
        self._backward_ran = True
        tasks = self._tasks

        def begin(_) -> None:
            tasks.add(torch._C._current_graph_task_id())

        for node in nodes:
            node.register_prehook(begin)
        if self.listener is not None and not nested:
            with torch._C.DisableTorchFunction():
                self.listener.before_backward(losses)
        return coverage.reporting

    def after_backward(self) -> None:
        """Contract what waited; let the listener see the gradients before others change them."""
        # Inside a reentrant checkpoint the backward as a whole is still running.
        if torch._C._current_graph_task_id() != -1:
            return
        for root in self.roots:
            if root.expected > 0:
                raise CoverageError(
                    f"the backward did not reach {root.expected} of the {root.counted} uses of "
                    f"{root.describe()} that the graph of the losses holds, so its gradient would "
                    "be incomplete. Expected a backward of the whole graph."
                )
        waiting = [root for root in self.roots if root.postponed]
        if waiting:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                for root in waiting:
                    root.contract()
        if self.listener is not None:
            with torch._C.DisableTorchFunction():
                self.listener.after_backward()

    @property
    def sqnorm(self) -> Tensor:
        """The squared norms over all parameters that the backward reported, (B,) float64."""
        return self.sqnorm_by_parameter().sum(0)

    def sqnorm_by_parameter(self) -> Tensor:
        """Return the squared norms that the backward reported, (parameters, B) float64.

        They are zero for what was not used.
        """
        if not self.reported:
            raise TrackingError(
                "no backward reached the tracked parameters. Run tracker.backward(losses), or your "
                "own loss.backward(), inside the context, on losses computed inside it. "
                f"{ONE_OF_SEVERAL}"
            )
        values = stack([root.result for root in self.roots], self.batch_size, self.device)
        compiled = self._compiled_reports()
        if compiled is not None:
            self._check_compiled(compiled[:, COUNT])
            values = values + compiled[:, VALUE]
        return values if self.loss_order is None else values[:, self.loss_order]

    def error_bound(
        self, sqnorm: Tensor, total: Tensor, unit: Tensor | float
    ) -> Callable[[], Tensor]:
        """Return what finds a bound on the rounding errors of the sum over parameters: (B,).

        It is relative to the sum, and found when somebody asks: every small operation counts.

        Args:
            sqnorm: (parameters, B), as reported.
            total: (B,) their sum.
            unit: what both are divided by, before they are rounded.
        """
        compiled = self._compiled_reports()
        return partial(
            relative_error,
            [root.result for root in self.roots],
            sqnorm,
            total,
            shapes=[root.parameter.shape for root in self.roots],
            order=self.loss_order,
            more=None if compiled is None else compiled[:, BOUND].sum(0),
            unit=unit,
        )

    def _compiled_reports(self) -> Tensor | None:
        """Return what compiled graphs reported, (parameters, 3, B); None if there are none."""
        if not self._compiler:
            return None
        grads = [root.compiled_report for root in self.roots]
        if all(grad is None for grad in grads):
            return None
        unused = torch.zeros(3, self.batch_size, dtype=torch.float64, device=self.device)
        return torch.stack([unused if g is None else g.to(self.device) for g in grads])

    def _check_compiled(self, count: Tensor) -> None:
        """Raise where a parameter reported more than once.

        Args:
            count: (parameters, B) how often each did from compiled graphs.
        """
        eagerly = [float(root.result is not None) for root in self.roots]
        count = count.amax(1) + torch.tensor(eagerly).to(count)
        self.reported_twice = (count > 1).any()
        # Looking waits for the device: who listens looks at a time of its own.
        now = self.listener is None or self._compiled
        if now and bool(self.reported_twice):
            counts = count.tolist()
            shared = [root for root, n in zip(self.roots, counts, strict=True) if n > 1]
            for root in shared:
                SHARED_IN_GRAPHS[root.parameter] = True
            raise SharedInGraphError(
                f"{', '.join(repr(root.name) for root in shared)} contributed more than once to a "
                "compiled graph: a shared parameter's uses must meet before their norm is taken, "
                "which a compiled graph cannot do. Contexts opened from now on run this model "
                "without its compiled graphs: run the step again, or begin with "
                "torch.compiler.set_stance('force_eager')."
            )


def tensors_kept(item: Any) -> list[Tensor]:
    """Return the tensors of an attribute: itself, or what it holds in lists, tuples and dicts."""
    if isinstance(item, Tensor):
        return [] if isinstance(item, nn.Parameter) else [item]
    if not isinstance(item, (list, tuple, dict)):
        return []
    entries = item.values() if isinstance(item, dict) else item
    if PLAIN_TYPES.issuperset(map(type, entries)):
        return []
    return [tensor for entry in entries for tensor in tensors_kept(entry)]


def restore_attributes(module: nn.Module) -> None:
    """Leave plain tensors where a forward left derived ones, as hooks that compute weights do."""
    own = vars(module)
    for name in own.keys() - STANDARD_ATTRIBUTES:
        if any(isinstance(leaf, DerivedTensor) for leaf in tensors_kept(own[name])):
            own[name] = _unwrapped(own[name])


def _unwrapped(item):
    """Return an attribute with plain tensors for derived ones; lists and dicts stay the same."""
    if isinstance(item, list):
        item[:] = map(_unwrapped, item)
    elif isinstance(item, dict):
        item.update({key: _unwrapped(value) for key, value in item.items()})
    elif isinstance(item, tuple):
        return rebuild(item, unwrap)
    return unwrap(item)
