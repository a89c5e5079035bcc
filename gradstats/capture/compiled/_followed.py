"""The operations of a recorded graph, followed while its backend traces them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch._subclasses.functional_tensor import FunctionalTensor

from gradstats.capture._context import Context
from gradstats.capture._coverage import check_coverage
from gradstats.capture._mode import FollowingMode
from gradstats.capture._reports import Reports
from gradstats.capture.following._examples import Examples
from gradstats.capture.following._flex_attention import FLEX_ATTENTION
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._notes import Note, is_unusual, note_as, note_of
from gradstats.capture.operations._modes import innermost_mode
from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._nested import operands_of, tensors_in
from gradstats.capture.parameters._nodes import Root
from gradstats.capture.parameters._tensors import DerivedTensor, node_of
from gradstats.capture.parameters._transforms import transform_level

# Kinds of operands of a graph.
PARAMETER, DATA, CONSTANT = "parameter", "data", "constant"

# Modules of functions that function modes do not see: the transforms of torch.func.
HIDDEN_IN = ("torch._functorch.", "torch._C._functorch")

# What the compiler records for getters; from PyTorch 2.14 on also for those that transpose.
GETTERS: dict[Any, str] = {
    torch._C._autograd._get_data_attr: "data",  # type: ignore[attr-defined]
    torch.ops.aten.numpy_T: "T",
    torch.ops.aten.mT: "mT",
    torch.ops.aten.matrix_H: "H",
    torch.ops.aten.mH: "mH",
}


class NotTracedError(Exception):
    """A graph cannot be followed while it is traced."""


@torch.library.custom_op("gradstats::stack_rows", mutates_args=())
def stack_rows(rows: list[Tensor]) -> Tensor:
    """Stack vectors in one kernel; backends would copy each in one of its own."""
    return torch.stack(rows)


@stack_rows.register_fake
def _(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows)


class Rows(torch.autograd.Function):
    """The rows of a probe (parameters, 2, B), whose gradient stacks those of the rows."""

    @staticmethod
    def forward(ctx, probe):
        ctx.set_materialize_grads(False)
        ctx.shape = probe.shape
        return probe.flatten(0, 1).unbind()

    @staticmethod
    def backward(ctx, *rows):
        given = next(row for row in rows if row is not None)
        zero = torch.zeros_like(given) if any(row is None for row in rows) else None
        return stack_rows([zero if row is None else row for row in rows]).view(ctx.shape)


class Anchor(torch.autograd.Function):
    """A parameter as its uses in a graph read it. Its backward, which follows theirs, reports."""

    @staticmethod
    def forward(ctx, parameter, value, bound, root):
        ctx.set_materialize_grads(False)
        ctx.root = root
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, grad):
        root = ctx.root
        if root.postponed:
            root.contract()
        if root.expected > 0:
            raise NotTracedError(f"its backward does not reach all uses of {root.describe()}")
        found, report = root.result, (None, None)
        if found is not None:
            # An error bound that is relative to the value is computed on demand.
            relative = found.relative is not None
            second = found.value if relative else found.whole_bound(root.parameter.shape)
            report = found.value, second
        return grad if root.tracker.settings.weight_gradients else None, *report, None


class Operand(Root):
    """A parameter among the operands of a graph, whose uses read what the anchor returns."""

    @property
    def value(self) -> Tensor:
        return self.parameter


class GraphContext(Context):
    """The context of a graph, which contains all uses of the parameters among its operands."""

    def __init__(self, tracker: Context, names: Sequence[str], leaves, probe):
        """Start following the parameters.

        Args:
            tracker: the user's context.
            names: the parameters' names.
            leaves, probe: the parameters and the probe as the backend traces them.
        """
        super().__init__(tracker.batch_size, tracker.batch_dim, None, tracker.settings)
        self.marks.doubtful_are_data = tracker.marks.doubtful_are_data
        self.roots = []
        rows = Rows.apply(probe) if names else ()
        places = zip(names, leaves, rows[::2], rows[1::2], strict=True)
        for name, leaf, value, bound in places:
            root = Operand(self, name, leaf)
            root.parameter = Anchor.apply(leaf, value, bound, root)
            leaf._gradstats = root.parameter._gradstats = root  # type: ignore[attr-defined]
            node = root.parameter.grad_fn
            if node is not None:
                root.alias_nodes = (node,)
                self.shown[node.next_functions[0][0]] = root
            self.roots.append(root)
        self.reports = Reports(self.roots, self.settings, self.batch_size)
        self._mode = GraphMode(self)

    def watching(self) -> GraphMode:
        """Return the context's mode."""
        return self._mode

    def is_backward_of_losses(self) -> bool:
        return True  # no other backward is traced

    def note_training(self, tensor: Tensor, trained: bool) -> None:
        raise NotTracedError("it freezes a parameter or unfreezes one")

    def note_on(self, result: Tensor) -> Note:
        """Return what is known about a result of the graph; raise if a run could not repeat it."""
        node = node_of(result)
        if node is not None:
            raise NotTracedError(f"it returns {node.describe()}")
        if result.requires_grad and result._is_view() and not result._base.requires_grad:  # type: ignore[union-attr]
            raise NotTracedError("it returns a view that would be taken anew, without its gradient")
        note = note_of(self.marks, result)
        if note is None:
            raise NotTracedError("it returns a tensor whose values alone tell whose its rows are")
        if isinstance(note.place, Examples) and not isinstance(note.place.fold, int):
            raise NotTracedError("it returns examples whose number of rows is not fixed")
        return note


class GraphMode(FollowingMode):
    """The function mode of a graph's context, where all tensors have one class, tracked or not."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tracked = any([node_of(item) is not None for item in operands_of(args, kwargs)])
        return self.handle(func, (DerivedTensor,) if tracked else (), args, kwargs)


class Followed:
    """A graph whose operations run inside a context of their own.

    Attributes:
        reporting: what each parameter's reported error bound has to be multiplied by; None for a
            parameter that the backward does not report.
    """

    def __init__(
        self,
        recorded: fx.GraphModule,
        kinds: list[Any],
        places: list[int],
        names: list[str],
        tracker: Context,
    ):
        """Describe the graph.

        Args:
            recorded: the graph.
            kinds: of its operands, as ``kinds_of`` returns them.
            places, names: of the parameters among the operands, in the order in which they report.
            tracker: the user's context.
        """
        if [*recorded.parameters(), *recorded.buffers()]:
            raise NotTracedError("it holds tensors of its own")
        self._run = by_operation(recorded)
        self._kinds, self._places, self._names = kinds, places, names
        self._tracker: Context | None = tracker
        self._notes: list[Note | None] = []
        self._taken: Any = None
        self._traced: list[GraphContext] = []
        self.reporting: list[float | None] = []

    def trace(self, *inputs: Any) -> Any:
        """Run the operations, and note what is known about the results.

        Args:
            inputs: the graph's operands, and a probe if there are parameters among them.
        """
        tracker = self._tracker
        operands, probe = inputs[: len(self._kinds)], inputs[-1]
        tensors = [item for item in operands if isinstance(item, Tensor)]
        if tracker is None or not all(isinstance(item, FunctionalTensor) for item in tensors):
            raise NotTracedError("its backend does not trace it with AOTAutograd")
        pairs = list(zip(operands, self._kinds, strict=True))
        leaves = [operands[place] for place in self._places]
        context = GraphContext(tracker, self._names, leaves, probe)
        for item, kind in pairs:
            if kind is CONSTANT:
                context.marks.mark_constant(item)
        with context.watching():
            results = self._run(*operands)
        if any(context.marks.is_data(item) for item, kind in pairs if kind is CONSTANT):
            raise NotTracedError("it writes data into a constant")
        if any(is_unusual(context.marks, item) for item, kind in pairs if kind is DATA):
            raise NotTracedError("it moves the examples of its operands")
        if context.marks.meetings.crossed:
            # A loss over all examples has to know this, and notes on results do not say it.
            raise NotTracedError("only losses of one example each tell whose its results are")
        # Values written into operands leave the graph as well.
        left = [item for item in (*results, *operands) if isinstance(item, Tensor)]
        ends = dict.fromkeys(item.grad_fn for item in left if item.grad_fn is not None)
        check_coverage(context, list(ends))
        self._notes = [
            context.note_on(item) if isinstance(item, Tensor) else None for item in results
        ]
        self._taken = context.marks.taken
        self._traced.append(context)
        return results

    def finish(self) -> None:
        """Let go of all contexts when everything has been traced."""
        traced = [context.roots for context in self._traced]
        for place in range(len(self._names)):
            results = [roots[place].result for roots in traced]
            found = next((result for result in results if result is not None), None)
            self.reporting.append(None if found is None else found.relative or 1.0)
        self._tracker = None
        self._traced.clear()

    def note(self, marks: Marks, results: Sequence[Any]) -> None:
        """Note on the results of a run what is known from tracing the graph."""
        for item, note in zip(results, self._notes, strict=True):
            if note is not None:
                note_as(marks, item, note)
        if self._taken is not None:
            marks.taken = self._taken


def is_hidden(recorded: fx.GraphModule) -> bool:
    """Whether a graph holds what modes do not see: bodies of operators, torch.func transforms."""
    return any(map(_is_hidden, recorded.graph.nodes))


def _is_hidden(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    target = node.target
    module = getattr(target, "__module__", None) or ""
    body = isinstance(target, HigherOrderOperator) and target is not FLEX_ATTENTION
    return body or module.startswith(HIDDEN_IN)


def restore_getters(recorded: fx.GraphModule) -> None:
    """Replace what the compiler recorded for getters, which modes do not see, by the getters."""
    found = [node for node in recorded.graph.nodes if node.target in GETTERS]
    for node in found:
        node.target, node.args = getattr, (*node.args, GETTERS[node.target])
    if found:
        recorded.recompile()


def by_operation(recorded: fx.GraphModule) -> Callable[..., Any]:
    """Return a function that runs a graph such that active modes see each operation."""
    return _run_showing(recorded) if is_hidden(recorded) else recorded.forward


def _run_showing(recorded: fx.GraphModule) -> Callable[..., Any]:
    def run(*operands: Any) -> Any:
        level = transform_level() or 0
        try:
            return _Showing(recorded).run(*operands)
        finally:
            while (transform_level() or 0) > level:  # an error has left a transform open
                torch._C._functorch._vmap_decrement_nesting()

    return run


class _Showing(fx.Interpreter):
    """Runs a graph whose transforms map nothing but constants, such as positions of a mask."""

    def run_node(self, node: fx.Node) -> Any:
        mapped = transform_level() is not None
        result = super().run_node(node)
        mode = innermost_mode()
        # There is no mode where a loader fetches inside the context.
        if mode is None or node.op in ("placeholder", "output"):
            return result
        if not (mapped or _is_hidden(node)):
            return result
        tracker, target = mode.tracker, node.target
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        operands = operands_of(args, kwargs)
        tracked = any(node_of(item) is not None for item in operands)
        if isinstance(target, HigherOrderOperator) or tracked or tracker.marks.data_among(operands):
            name = target if isinstance(target, str) else function_name(target)
            raise NotTracedError(f"it contains {name}")
        for item in tensors_in(result):
            tracker.marks.mark_constant(item)
        return result
