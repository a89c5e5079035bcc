"""Graphs of ``torch.compile`` that run inside contexts.

The compiler sees nothing of a context: it records the computation as the user wrote it. But its
backend is given a single call to compile, which runs the recorded operations inside a context of
their own (see ``_followed``). So the backend traces what eager code would run, including the
contractions in the backward, and the graph reports through the gradient of a probe. What is known
about the results from tracing is noted on them after every run of the graph.

A graph that cannot be traced this way, or is called with operands of other kinds than it was traced
with, runs operation by operation, followed like eager code.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch.utils.weak import WeakIdKeyDictionary

from gradstats.capture._context import Context
from gradstats.capture._reports import SHARED_IN_GRAPHS, GraphReport
from gradstats.capture.compiled._followed import (
    CONSTANT,
    DATA,
    PARAMETER,
    Followed,
    NotTracedError,
    by_operation,
    is_hidden,
    restore_getters,
)
from gradstats.capture.following._notes import is_unusual
from gradstats.capture.operations._modes import innermost_mode, is_of_context
from gradstats.capture.parameters._nodes import Node, Root
from gradstats.capture.parameters._tensors import node_of
from gradstats.errors import UnsupportedOperationError

LOG = logging.getLogger(__name__)

# Number of forms of contexts (batch size, what is tracked, the model's mode) for each of which a
# model's graphs are recorded. By default the compiler records a function eight times; steps outside
# of contexts need the rest, without which they would run eagerly too.
MOST_FORMS = 4

# The forms for which graphs have been recorded, by the model's first parameter.
FORMS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def admits(parameter: Tensor, form: str) -> bool:
    """Whether graphs are recorded for contexts of a form; without, the model runs eagerly there.

    Args:
        parameter: the model's first.
        form: the form of a context.
    """
    forms = FORMS.setdefault(parameter, set())
    if len(forms) < MOST_FORMS:
        forms.add(form)
    elif form not in forms:
        LOG.info("a model runs eagerly: its graphs serve contexts of %d other forms", MOST_FORMS)
        return False
    return True


class Graph:
    """What the compiler calls in place of a graph that it recorded inside a context.

    Attributes:
        reason: why it runs operation by operation; None if it was compiled.
    """

    def __init__(
        self,
        recorded: fx.GraphModule,
        operands: Sequence[Any],
        backend: Callable[..., Any],
        tracker: Context,
    ):
        """Have the backend compile the graph.

        Args:
            recorded: what the compiler recorded.
            operands: the compiler's examples of operands, of the kinds that the graph will serve.
            backend: what the compiler calls with a graph and its operands.
            tracker: the context in which the graph was recorded.
        """
        self.reason: str | None = None
        self._form = tracker.form
        restore_getters(recorded)
        self._recorded = recorded
        self._run = torch.compiler.disable(by_operation(recorded))
        self._kinds: list[Any] = []
        try:
            check_sizes()
            self._kinds = kinds_of(tracker, operands)
            with warnings.catch_warnings():
                # The engine warns of errors in the traced backward.
                warnings.filterwarnings("ignore", "Error detected in")
                self._compile(operands, backend, tracker)
        except torch._dynamo.exc.RestartAnalysis:
            raise
        except Exception as error:
            self.reason = _said_by(error)
            LOG.info("a compiled graph runs operation by operation: %s", self.reason)

    def _compile(
        self, operands: Sequence[Any], backend: Callable[..., Any], tracker: Context
    ) -> None:
        # In the model's order, in which the graph then reports.
        position = {root: number for number, root in enumerate(tracker.roots)}
        found = [place for place, kind in enumerate(self._kinds) if kind is PARAMETER]
        self._places = sorted(found, key=lambda place: position[operands[place]._gradstats])
        roots = self._roots_among(operands)
        names = [root.name for root in roots]
        self._followed = Followed(self._recorded, self._kinds, self._places, names, tracker)
        nothing = [None] * len(roots)
        probes = [GraphReport(roots, nothing, tracker.batch_size).probe] if roots else []
        whole = _calling(self._followed, self._recorded, probes)
        try:
            self._compiled = backend(whole, [*operands, *probes])
        finally:
            self._followed.finish()

    def __call__(self, *operands: Any) -> Any:
        mode = innermost_mode()
        if mode is not None and self.reason is None and self._serves(mode.tracker, operands):
            roots, probes = self._roots_among(operands), []
            if roots:
                report = mode.tracker.reports.of_graph(roots, self._followed.reporting)
                probes = [report.probe]
            try:
                # Modes must not see the compiler's code before and after its graph.
                with torch._C.DisableTorchFunction() if roots else nullcontext():
                    results = self._compiled(*operands, *probes)
            except NotTracedError as error:
                self.reason = str(error)  # the backend calls the graph without tracing it
            else:
                self._followed.note(mode.tracker.marks, results)
                return results
        try:
            # Modes and subclasses are off while a graph runs.
            with torch._C._EnableTorchFunction():
                return self._run(*operands)
        except NotTracedError as error:
            raise UnsupportedOperationError(
                f"a compiled graph cannot be followed: {_said_by(error)} of data or of parameters. "
                "Expected code that runs eagerly inside a context: call "
                "torch.compiler.set_stance('force_eager') there."
            ) from None

    def _roots_among(self, operands: Sequence[Any]) -> list[Root]:
        return [operands[place]._gradstats for place in self._places]

    def _serves(self, tracker: Context, operands: Sequence[Any]) -> bool:
        """Whether everything that was assumed in tracing the graph holds for these operands."""
        if tracker.form != self._form:
            return False
        try:
            return kinds_of(tracker, operands) == self._kinds
        except NotTracedError:
            return False


def _said_by(error: Exception) -> str:
    """Return the first line of an error, without the compiler's traceback."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def kinds_of(tracker: Context, operands: Sequence[Any]) -> list[Any]:
    """Return the kind of each operand of a graph, or raise if it cannot be traced with one.

    Returns:
        PARAMETER, DATA or CONSTANT for each tensor, None for anything else.
    """
    kinds: list[Any] = []
    roots: set[Node] = set()
    for item in operands:
        if not isinstance(item, Tensor):
            kinds.append(None)
            continue
        node = node_of(item)
        if node is not None:
            if not isinstance(node, Root) or node.tracker is not tracker:
                raise NotTracedError(f"it takes {node.describe()}")
            if SHARED_IN_GRAPHS and node.parameter in SHARED_IN_GRAPHS:
                raise NotTracedError(f"{node.describe()} is used elsewhere too")
            if node in roots:
                raise NotTracedError(f"it takes {node.describe()} twice")
            roots.add(node)
            kinds.append(PARAMETER)
        elif not tracker.marks.is_data(item):
            kinds.append(CONSTANT)
        elif is_unusual(tracker.marks, item):
            raise NotTracedError("its data are written to, or lie elsewhere than along batch_dim")
        else:
            kinds.append(DATA)
    return kinds


def check_sizes() -> None:
    """Raise if the user's code marked a size in the graph that is being recorded as dynamic."""
    mode = TracingContext.get().fake_mode
    assert mode is not None
    for fake in getattr(mode.shape_env, "tracked_fakes", None) or ():
        sizes = getattr(fake.symbolic_context, "constraint_sizes", None) or ()
        # The compiler's own constraints, on sizes that it saw change, only warn.
        if any(size is not None and not getattr(size, "warn_only", False) for size in sizes):
            raise NotTracedError("its sizes were marked dynamic, but it would serve one batch size")


def _calling(
    followed: Followed, recorded: fx.GraphModule, probes: Sequence[Tensor]
) -> fx.GraphModule:
    """Return a graph of a single call of ``followed.trace``, with all operands and any probe.

    Backends do not know that function, and so do not look the graph up in a cache.
    """
    graph = fx.Graph()
    operands = []
    for node in recorded.graph.find_nodes(op="placeholder"):
        operand = graph.placeholder(node.target)
        operand.meta.update(node.meta)
        operand._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
        operands.append(operand)
    mode = TracingContext.get().fake_mode
    assert mode is not None
    for number, probe in enumerate(probes):
        operand = graph.placeholder(f"probe_{number}")
        operand.meta["example_value"] = mode.from_tensor(probe, static_shapes=True)
        operand._dynamo_source = None  # type: ignore[attr-defined]
        operands.append(operand)
    call = graph.call_function(followed.trace, tuple(operands))
    (output,) = recorded.graph.find_nodes(op="output")
    places = range(len(output.args[0]))
    graph.output(tuple(graph.call_function(operator.getitem, (call, n)) for n in places))
    module = fx.GraphModule({}, graph)
    # These attributes tell a backend that the graph comes from the compiler.
    module.meta.update(recorded.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(recorded, name):
            setattr(module, name, getattr(recorded, name))
    return module


@cache
def replace_call_of_backend() -> None:
    """From now on, have the compiler call a ``Graph`` for each that it records inside contexts."""
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.output_graph import OutputGraph

    native = OutputGraph.call_user_compiler

    def call_user_compiler(self, recorded, operands):
        modes = [mode for mode in self.torch_function_mode_stack if is_of_context(mode)]
        if not modes or modes[-1].tracker.closed:
            return native(self, recorded, operands)
        backend, tracker, graphs = self.compiler_fn, modes[-1].tracker, []

        def followed(recorded, operands):
            graphs.append(Graph(recorded, operands, backend, tracker))
            return graphs[0]

        self.compiler_fn = followed
        try:
            compiled = native(self, recorded, operands)
        finally:
            self.compiler_fn = backend
        reason = graphs[0].reason
        if reason is not None and is_hidden(recorded):
            # Less of it can be followed operation by operation than as the user wrote it.
            raise Unsupported(
                f"a compiled graph cannot be followed: {reason}. Compile without fullgraph=True, "
                "so that this part runs eagerly inside a context."
            )
        return compiled

    OutputGraph.call_user_compiler = call_user_compiler  # type: ignore[method-assign]
