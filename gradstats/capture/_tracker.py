"""One tracking context: entering and leaving it, what it knows, and what it collects."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.weak import WeakIdKeyDictionary

from gradstats._factors import Factor, Outer, Ragged, Rows, Segments
from gradstats.capture._constants import ConstantTracking, run_backward
from gradstats.capture._consumers import Arrival
from gradstats.capture._dispatch import dispatch
from gradstats.capture._layout import (
    CHANGES,
    JOINS,
    PRODUCTS,
    REINDEXES,
    WRITES,
    Examples,
    follow,
    joined,
    same_rows,
)
from gradstats.capture._lineage import Pulled, pulled_sqnorm
from gradstats.capture._nodes import COUNT, VALUE, Root
from gradstats.capture._sharded import ShardedParameters, is_sharded
from gradstats.capture._tensors import DerivedTensor, TrackedParameter, node_of, unwrap
from gradstats.capture._uses import Settings
from gradstats.capture.rules import RULES
from gradstats.contractions import (
    Contraction,
    Fused,
    Projected,
    project,
    sqnorm,
    tied_sqnorm,
)
from gradstats.errors import (
    CoverageError,
    ExampleAxisError,
    TrackingError,
    UnsupportedOperationError,
)

# Parameters of which a compiled graph was seen to hold several uses.
SHARED_IN_GRAPHS: WeakIdKeyDictionary = WeakIdKeyDictionary()

DEFAULT_WORKSPACE = 256 * 1024 * 1024

# Prefixes that wrappers (DistributedDataParallel, torch.compile) put before parameter names.
WRAPPER_PREFIXES = ("module.", "_orig_mod.")

SERIALS = itertools.count()

ACCUMULATE_GRAD = type(
    torch.autograd.graph.get_gradient_edge(torch.zeros(1, requires_grad=True)).node
)


REENTRANT_CHECKPOINT = CheckpointFunction._backward_cls  # type: ignore[attr-defined]


class BackwardListener(Protocol):
    """What wants to know when the backward of a context starts and when it has ended."""

    def before_backward(self, losses: Sequence[Tensor]) -> None: ...

    def after_backward(self) -> None: ...


class SharedInGraphError(CoverageError):
    """Several uses of a parameter met in no hub, since a compiled graph held them."""


class Tracker:
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
        # Tensors are marked with this number: they may be copied, and may outlive the context.
        self.serial = next(SERIALS)
        self.batch_size = batch_size
        self.batch_dim = batch_dim
        self.settings = settings
        self._contract = Examples(batch_size, batch_dim, 1, segments)
        # Set once any tensor has a layout of its own, so that most models pay nothing for it.
        self.follows_layouts = False
        self.closed = False
        # Told before and after the backward, while the gradients are as the backward left them.
        self.listener: BackwardListener | None = None
        self.reported_twice = torch.zeros((), dtype=torch.bool)
        self._backward_ran = False
        # The example of each loss; None where they stand in the batch's order.
        self._loss_order: Tensor | None = None
        self._mode = ConstantTracking(self)
        self._eagerly = ExitStack()
        self._tied = has_tied_parameters(model)
        self._compiled = is_compiled(model)
        self._reentrant = False
        self._parameters = list(model.parameters())
        named = select_parameters(model, parameters, exclude)
        self.roots = [
            Root(self, name, parameter, _probe(batch_size, parameter.device))
            for name, parameter in named.items()
        ]
        device = self.roots[0].probe.device
        # What uses report beside their numbers: that they reported, or that their root will.
        self.once = torch.ones(batch_size, dtype=torch.float64, device=device)
        self.nothing = torch.zeros((), dtype=torch.float64, device=device).expand(3, batch_size)
        tracked = {id(parameter) for parameter in named.values()}
        # What a module keeps belongs to no example: buffers, parameters that are not tracked, and
        # tensors in plain attributes.
        attributes = [item for module in model.modules() for item in vars(module).values()]
        self._constant_ids = {
            id(tensor)
            for tensor in [*model.parameters(), *model.buffers(), *attributes]
            if isinstance(tensor, Tensor) and id(tensor) not in tracked
        }
        self._classes: list[tuple[nn.Parameter, type]] = []
        self._modules = list(model.modules())
        self._sharded = ShardedParameters(model, self.roots, self._track_whole, self._ignore_whole)

    def open(self) -> None:
        """Give the parameters their tracked class and start following constants."""
        whole = [root for root in self.roots if not is_sharded(root.parameter)]
        for root in whole:
            check_trackable(root)
        for root in whole:
            self._track(root)
        self._sharded.open()
        # A compiled graph has no place for a consumer, nor for a hub where uses of one parameter
        # meet. Without the compiler nothing is compiled.
        shared = any(root.parameter in SHARED_IN_GRAPHS for root in self.roots)
        if (self.settings.consumer is not None or self._tied or shared) and compiler_is_loaded():
            self._eagerly.enter_context(torch.compiler.set_stance("force_eager"))
        self._mode.__enter__()

    def _track(self, root: Root) -> None:
        self._classes.append((root.parameter, type(root.parameter)))
        root.parameter.__class__ = TrackedParameter
        root.parameter._gradstats = root  # type: ignore[attr-defined]

    def _track_whole(self, root: Root, parameter: nn.Parameter) -> None:
        root.parameter = parameter
        check_trackable(root)
        self._track(root)

    def _ignore_whole(self, parameter: nn.Parameter) -> None:
        self._constant_ids.add(id(parameter))

    def close(self) -> None:
        """Give the parameters back as they were; nothing of the context is left on them."""
        self._mode.__exit__(None, None, None)
        self._sharded.close()
        self._eagerly.close()
        for parameter, original in self._classes:
            del parameter._gradstats  # type: ignore[attr-defined]
            parameter.__class__ = original
        self._classes.clear()
        for module in self._modules:
            restore_attributes(module)
        for root in self.roots:
            root.release()
        self.closed = True

    def watching(self) -> ConstantTracking:
        """Return the mode that follows constants, for code that runs while it is set aside."""
        return self._mode

    def dispatch(self, func, args: tuple[Any, ...], kwargs: dict[str, Any]):
        """Run one operation on a tensor that this context tracks."""
        return dispatch(self, RULES, func, args, kwargs)

    def is_data(self, tensor: Tensor) -> bool:
        """Whether a plain tensor may carry examples: it is not known to be constant."""
        if torch.compiler.is_compiling():
            return True
        if id(tensor) in self._constant_ids or isinstance(tensor, nn.Parameter):
            return False  # a parameter that a forward makes holds no examples either
        return getattr(tensor, "_gradstats_constant", None) != self.serial

    def has_example_axis(self, tensor: Tensor) -> bool:
        """Whether a tensor's example axis has the size of the batch."""
        return self.by_contract(tensor) is not None

    def by_contract(self, tensor: Tensor) -> Examples | None:
        """Return where the examples of data lie that nothing else is known of."""
        axis, rows = self.batch_dim, self._contract.rows
        if tensor.dim() > axis and tensor.shape[axis] == rows:
            return self._contract
        if self._contract.segments is not None and tensor.dim() > axis + 1:
            # Packed examples often keep a batch axis of size 1.
            if tensor.shape[axis] == 1 and tensor.shape[axis + 1] == rows:
                return self._contract.along(axis + 1)
        return None

    def mark_constant(self, tensor: Tensor) -> None:
        """Remember that a tensor was computed without data."""
        if id(tensor) in self._constant_ids:
            return
        tensor._gradstats_constant = self.serial  # type: ignore[attr-defined]

    def mark_data(self, tensor: Tensor) -> None:
        """Remember that data were written into a tensor."""
        if getattr(tensor, "_gradstats_constant", None) == self.serial:
            del tensor._gradstats_constant  # type: ignore[attr-defined]
        self._constant_ids.discard(id(tensor))

    def layout_of(self, tensor: Tensor) -> Examples | None:
        """Return where the examples of a tensor of data lie, None where that is not known."""
        if not torch.compiler.is_compiling():
            owner, layout = getattr(tensor, "_gradstats_layout", (None, None))
            if owner == self.serial:
                return layout
        return self.by_contract(tensor)

    def place(self, tensor: Tensor, layout: Examples | None) -> None:
        """Note where the examples of a tensor of data lie; None for what nobody knows."""
        if layout != self.by_contract(tensor):
            tensor._gradstats_layout = (self.serial, layout)  # type: ignore[attr-defined]
            self.follows_layouts = True

    def follow_layout(
        self, func, args: tuple[Any, ...], kwargs: dict[str, Any], data: list[Tensor], result
    ) -> None:
        """Note where the examples lie in the result of an operation on some tensors of data."""
        if func in JOINS:
            after = self._joined(func, args, kwargs, result)
        elif func in PRODUCTS and self.follows_layouts:
            after = self._multiplied(args, result)
        else:
            changes = func in CHANGES
            if func in REINDEXES:
                # What is indexed decides. A constant indexed by data lies as its indices do; rows
                # of data written into a constant lie where the contract says.
                changes = any(tensor is args[0] for tensor in data)
                data = [args[0]] if changes else data
                if not changes and func in WRITES:
                    return
            source, layout = self._deciding(data)
            if not self._is_marked(source) and (not changes or layout is None):
                return
            if func in REINDEXES and not changes:
                func = None
            after = follow(func, args, kwargs, source, layout, result)
            if after is None and layout is not None and func not in REINDEXES:
                # Where nothing else has the batch's size, shape can decide after all.
                alone = sum(size == self.batch_size for size in source.shape) == 1
                if alone and layout.plain and self.has_example_axis(result):
                    return
        if after != self.by_contract(result):
            result._gradstats_layout = (self.serial, after)  # type: ignore[attr-defined]
            self.follows_layouts = True

    def _is_marked(self, tensor: Tensor) -> bool:
        return getattr(tensor, "_gradstats_layout", (None, None))[0] == self.serial

    def _deciding(self, data: list[Tensor]) -> tuple[Tensor, Examples | None]:
        """Return the operand whose layout the result has, and that layout.

        Where operands disagree, those that depend on parameters decide: an example is what one
        loss depends on, and inputs of other examples may enter it.
        """
        if len(data) == 1 or not self.follows_layouts:
            return data[0], self.layout_of(data[0])
        layouts = [(tensor, self.layout_of(tensor)) for tensor in data]
        known = [(tensor, layout) for tensor, layout in layouts if layout is not None]
        trained = [(tensor, layout) for tensor, layout in known if tensor.requires_grad]
        deciding = trained or known
        first = next((item for item in layouts if self._is_marked(item[0])), layouts[0])
        if all(same_rows(deciding[0][1], layout) for _, layout in deciding[1:]):
            agreed = any(first[0] is tensor for tensor, _ in deciding) or not deciding
            return first if agreed else deciding[0]
        if not trained:
            # Inputs of several examples meet: by contract the batch's own order says whose it is.
            return next((item for item in known if item[1].plain), first)
        return first[0], None

    def _multiplied(self, args: tuple[Any, ...], result: Tensor) -> Examples | None:
        """Return the layout of a matrix product: rows of the first operand stay where they are."""
        for tensor, summed in zip(args, (-1, -2), strict=False):
            if node_of(tensor) is not None or tensor.dim() < 2 or not self.is_data(tensor):
                continue
            layout = self.layout_of(tensor)
            if layout is not None and layout.axis != tensor.dim() + summed:
                return layout.along(layout.axis + result.dim() - tensor.dim())
            if self._is_marked(tensor):
                return None
        return self.by_contract(result)

    def _joined(self, func, args, kwargs, result: Tensor) -> Examples | None:
        tensors = list(args[0] if args else kwargs["tensors"])
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % result.dim()
        layouts = [
            self.layout_of(t) if node_of(t) is None and self.is_data(t) else None for t in tensors
        ]
        known = [layout for layout in layouts if layout is not None]
        if not known:
            return self.by_contract(result)
        if func is torch.stack:
            shifted = [layout.along(layout.axis + (dim <= layout.axis)) for layout in known]
            return joined(shifted, -1, result.device)
        if dim != known[0].axis:
            # Along other axes constants may stand beside the data.
            return joined(known, dim, result.device)
        return joined(layouts, dim, result.device)

    def note_losses(self, losses: Tensor) -> None:
        """Remember whose each loss is, where the model put the examples in another order."""
        layout = self.layout_of(losses)
        moved = self._is_marked(losses) and not (layout is not None and layout.plain)
        if self._contract.segments is not None or not moved:
            return
        if layout is None:
            raise ExampleAxisError(
                "which loss belongs to which example was lost on the way: the losses were moved "
                "along the example axis by an operation that is not followed. Expected losses in "
                "the order of the batch: reduce each example's own rows, or put rows back by "
                "indexing."
            )
        owner = layout.owner(losses.device)
        if owner.numel() != self.batch_size or owner.unique().numel() != self.batch_size:
            raise ExampleAxisError(
                f"the losses belong to the examples {owner.tolist()}, as followed through the "
                f"model: expected one loss for each of {self.batch_size} examples. Sum the losses "
                "of each example."
            )
        if self.settings.consumer is not None:
            raise ExampleAxisError(
                f"the losses stand in another order than the batch, {owner.tolist()[:8]}…, which "
                "inner products do not follow. Put the losses back in the batch's order."
            )
        self._loss_order = owner

    @property
    def reported(self) -> bool:
        """Whether a backward has reached any tracked parameter."""
        return any(root.probe.grad is not None for root in self.roots)

    def backward_without_gradients(self, total: Tensor) -> None:
        """Run a backward that computes the reports and nothing else: no weight gradient."""
        self.before_backward([total], create_graph=False)
        probes = [root.probe for root in self.roots]
        if not self._reentrant:
            run_backward((total,), (torch.ones_like(total),), inputs=tuple(probes))
            return
        # A reentrant checkpoint refuses to be told what to compute: what its backward adds to
        # other gradients is taken back.
        own = {id(probe) for probe in probes}
        leaves = [leaf for leaf in (*self._parameters, *leaves_of(total)) if id(leaf) not in own]
        grads = [(leaf, leaf.grad) for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            run_backward((total,), (torch.ones_like(total),))
        finally:
            for leaf, grad in grads:
                leaf.grad = grad

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
        elif consumer is None or consumer.needs_norms:
            norms = self._sqnorm(factors)
        else:
            norms = Contraction(self.nothing[0], self.nothing[0])
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

    def before_backward(self, losses: Sequence[Tensor], create_graph: bool) -> None:
        """Check, before a backward changes anything, that it can be accounted for."""
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
                "micro-batch."
            )
        self.check_coverage([loss.grad_fn for loss in losses if loss.grad_fn is not None])
        self._backward_ran = True
        if self.listener is not None and not nested:
            self.listener.before_backward(losses)

    def after_backward(self) -> None:
        """Let the listener see the gradients before anything else can change them."""
        # Inside a reentrant checkpoint the backward as a whole is still running.
        if self.listener is not None and torch._C._current_graph_task_id() == -1:
            self.listener.after_backward()

    def check_coverage(self, start: list) -> None:
        """Raise if the graph from ``start`` uses a tracked parameter in a way that was not seen.

        Operations that PyTorch does not report (a custom autograd Function that takes a parameter)
        show in the autograd graph as an edge to the parameter that does not come from its alias.
        """
        roots = {id(root.parameter): root for root in self.roots}
        # Tracked uses lead to an alias or a carrier; there the walk can stop.
        known = {root.alias_node for root in self.roots} | {root.hub_node for root in self.roots}
        stack = list(start)
        seen = set(start)
        while stack:
            node = stack.pop()
            self._reentrant |= type(node) is REENTRANT_CHECKPOINT
            for child, _ in node.next_functions:
                if child is None or child in known or child in seen:
                    continue
                if type(child) is not ACCUMULATE_GRAD:
                    seen.add(child)
                    stack.append(child)
                    continue
                self._sharded.check_known(child.variable)  # type: ignore[attr-defined]
                root = roots.get(id(child.variable))  # type: ignore[attr-defined]
                if root is not None and not _reports_inside(node, root):
                    raise UnsupportedOperationError(
                        f"{node.name()} uses {root.describe()} without passing through a PyTorch "
                        "operation that can be tracked (a custom autograd Function?), so its "
                        "per-example gradient is not known. Add a rule for it with "
                        "gs.register_rule, write the operation with PyTorch's own, have "
                        'per_example_norms compute it one example at a time with fallback="vmap", '
                        f"or exclude the parameter by name with exclude=[{root.name!r}].",
                        [root.name],
                    )

    @property
    def sqnorm(self) -> Tensor:
        """The squared norms over all parameters that the backward reported, (B,) float64."""
        return self.reports()[:, VALUE].sum(0)

    def reports(self) -> Tensor:
        """Return what the backward reported, (parameters, 3, B) float64; zeros for unused ones."""
        if not self.reported:
            raise TrackingError(
                "no backward reached the tracked parameters. Run tracker.backward(losses), or your "
                "own loss.backward(), inside the context, on losses computed inside it."
            )
        device = self.roots[0].probe.device
        unused = torch.zeros(3, self.batch_size, dtype=torch.float64, device=device)
        grads = [root.probe.grad for root in self.roots]
        reports = torch.stack([unused if grad is None else grad.to(device) for grad in grads])
        self.reported_twice = (reports[:, COUNT] > 1).any()
        # Looking waits for the device: who listens looks at a time of its own.
        now = self.listener is None or self._compiled
        if now and bool(self.reported_twice):
            counts = reports[:, COUNT].amax(1).tolist()
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
        return reports if self._loss_order is None else reports[..., self._loss_order]


def _reports_inside(node, root: Root) -> bool:
    """Whether a node is a compiled graph that takes a parameter and reports its use as well.

    Such a graph takes the parameter itself: uses inside it were tracked when it was traced, save
    those that tracing could not see. They leave the graph without the parameter's probe.
    """
    inputs = (child for child, _ in node.next_functions if child is not None)
    return node.name() == "CompiledFunctionBackward" and any(
        child is root.hub_node or getattr(child, "variable", None) is root.probe for child in inputs
    )


def leaves_of(total: Tensor) -> list[Tensor]:
    """Return the tensors that a backward from ``total`` would add gradients to."""
    stack = [total.grad_fn]
    seen = set(stack)
    leaves = []
    while stack:
        node = stack.pop()
        if type(node) is ACCUMULATE_GRAD:
            leaves.append(node.variable)  # type: ignore[attr-defined]
        for child, _ in node.next_functions if node is not None else ():
            if child not in seen:
                seen.add(child)
                stack.append(child)
    return leaves


def has_tied_parameters(model: nn.Module) -> bool:
    """Whether a trained parameter has several names in the model."""
    seen: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and id(parameter) in seen:
            return True
        seen.add(id(parameter))
    return False


def compiler_is_loaded() -> bool:
    return "torch._dynamo" in sys.modules


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it was given to torch.compile."""
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )


def restore_attributes(module: nn.Module) -> None:
    """Leave plain tensors where a forward left derived ones, as hooks that compute weights do."""
    for name, item in vars(module).items():
        if isinstance(item, DerivedTensor):
            vars(module)[name] = unwrap(item)
        elif type(item) is list and any(isinstance(entry, DerivedTensor) for entry in item):
            item[:] = map(unwrap, item)


def _probe(batch_size: int, device: torch.device) -> Tensor:
    return torch.zeros(3, batch_size, dtype=torch.float64, device=device, requires_grad=True)


def select_parameters(
    model: nn.Module, parameters: Sequence[str] | str | None, exclude: Sequence[str] | str
) -> dict[str, nn.Parameter]:
    """Return the parameters to track by name, in the model's order, each under its first name."""
    trainable = {
        clean_name(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    if not trainable:
        raise CoverageError(
            "the model has no parameter that requires grad, so there is no gradient to measure. "
            "Set requires_grad on the parameters whose gradients you want."
        )
    include = _patterns(parameters) if parameters is not None else ("*",)
    leave_out = _patterns(exclude)
    for pattern in (*include, *leave_out):
        if not any(fnmatchcase(name, pattern) for name in trainable):
            raise CoverageError(
                f"the pattern {pattern!r} matches no parameter that requires grad. Expected a "
                f"pattern of one of {list(trainable)[:8]}{' …' if len(trainable) > 8 else ''}."
            )
    selected = {
        name: parameter
        for name, parameter in trainable.items()
        if _matches(name, include) and not _matches(name, leave_out)
    }
    if not selected:
        raise CoverageError(
            f"parameters={parameters!r} and exclude={exclude!r} leave no parameter to measure."
        )
    return selected


def clean_name(name: str) -> str:
    """Return a parameter's name as the unwrapped model knows it."""
    for prefix in WRAPPER_PREFIXES:
        if name.startswith(prefix):
            return clean_name(name[len(prefix) :])
    return name.replace("._orig_mod.", ".")


def check_trackable(root: Root) -> None:
    """Raise for parameters whose class cannot be changed for the duration of a context."""
    parameter = root.parameter
    if type(parameter) is TrackedParameter:
        raise TrackingError(
            f"{root.describe()} is already tracked by another open context. Close that one first."
        )
    if type(parameter) is not nn.Parameter:
        raise UnsupportedOperationError(
            f"{root.describe()} is a {type(parameter).__name__}, expected a plain "
            "torch.nn.Parameter: a subclass may compute with hidden values. If it is a lazy "
            f"parameter, run one forward first; otherwise exclude it by name with "
            f"exclude=[{root.name!r}].",
            [root.name],
        )
    if not parameter.is_floating_point():
        raise UnsupportedOperationError(
            f"{root.describe()} has dtype {parameter.dtype}, expected a real floating-point dtype. "
            f"Exclude it by name with exclude=[{root.name!r}].",
            [root.name],
        )


def _patterns(patterns: Sequence[str] | str) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
