"""The walk over the autograd graph of the losses, which finds uses that were not seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node as GraphNode
from torch.utils.checkpoint import CheckpointFunction

from gradstats.capture._context import Context
from gradstats.capture._reports import GraphReport, shared_in_graphs
from gradstats.capture.following._losses import check_sum
from gradstats.capture.operations._graph import (
    ACCUMULATE_GRAD,
    COPY_SLICES,
    free_in_order,
    nodes_behind,
)
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._differentiated import hook_in_transform
from gradstats.capture.parameters._nodes import Node, Root
from gradstats.capture.parameters._tensors import node_of
from gradstats.capture.parameters._watched import Watched, has_hooks, watch_derived
from gradstats.capture.uses._hooked import KINDS, Hooked, hooked_on, use_at
from gradstats.capture.uses._uses import Use, given_others
from gradstats.errors import ExampleAxisError, TrackingError, UnsupportedOperationError

# The type of node of a reentrant checkpoint, which a context that sees it runs as another kind.
REENTRANT: type = CheckpointFunction._backward_cls  # type: ignore[attr-defined]

# Types of nodes seen so far that are PyTorch's own, not those of autograd Functions in Python.
NATIVE: set[type] = set()


def check_data(losses: Iterable[Tensor]) -> None:
    """Raise for a loss that belongs to no example."""
    for loss in losses:
        node = node_of(loss)
        if isinstance(node, Derived):
            raise ExampleAxisError(
                f"a loss was computed without any data: it is {node.describe()}, made of "
                "parameters, buffers and constants alone. Expected losses of the examples. Create "
                "the batch outside the context and pass it to the model, so that it counts as "
                "data. If the loss is a penalty on the weights, which belongs to no example, add "
                "it to the unreduced losses, (losses + penalty), reduced as before, or run its own "
                "backward once the context has closed.",
                node.names,
            )


def check_coverage(tracker: Context, start: list, losses: Sequence[Tensor] = ()) -> list[GraphNode]:
    """Walk the graph from ``start`` and return the nodes that report uses.

    Raise for a use that was not tracked, if the losses depend on an operation that mixed examples,
    or if they may be something other than sums over the examples.

    A use that PyTorch does not show (in a custom autograd Function of data and a parameter) appears
    in the graph as an edge to the parameter that does not come from its alias, or as an edge to the
    tensor that the user's code holds in place of a derived one.
    """
    # Tracked uses lead to aliases, where the walk can stop.
    seen = {*start, *(node for root in tracker.roots for node in root.alias_nodes)}
    try:
        reporting = _walk(tracker, start, losses, seen)
        if tracker.shows_graph and _watch_hooks(tracker, seen, reporting):
            tracker.trains = True
        return reporting
    finally:
        free_in_order(seen)


def _watch_hooks(tracker: Context, nodes: set[GraphNode], reporting: list[GraphNode]) -> bool:
    """Make the backward raise if a hook changes a gradient that factors do not see.

    Args:
        tracker: the context.
        nodes: of the losses' graph.
        reporting: those of them that report uses.

    Returns:
        Whether any hook might.
    """
    for node in tracker.transformed_nodes:
        if has_hooks(node, set_by_context=hooked_on(node) is not None):
            raise hook_in_transform()
    uses = {node: use for node in reporting if (use := use_at(node)) is not None}
    of_graphs = tracker.reports.of_graphs
    graphs = {
        node: roots
        for node in (nodes if of_graphs else ())
        if (roots := _roots_in_graph(node.next_functions, of_graphs))
    }
    hooked = watch_derived(nodes, uses.keys() | graphs.keys(), tracker.roots)
    for node, roots in graphs.items():
        watched = Watched("a compiled graph", sorted(root.name for root in roots))
        hooked |= watched.begin(node.register_hook)
    for node, use in uses.items():
        # Here hooks change what the use is given, before its factors are made.
        seen = isinstance(use, Hooked)
        hooked |= Watched(use.describe(), use.names).begin(node.register_hook, seen)
    return hooked


def _walk(
    tracker: Context, start: list, losses: Sequence[Tensor], seen: set[GraphNode]
) -> list[GraphNode]:
    """Do what ``check_coverage`` says, adding the nodes of the graph to ``seen``."""
    stack = list(start)
    uses, hidden = [], False
    reporting: list[GraphNode] = []
    others: list[Tensor] = []
    marks, meetings = tracker.marks, tracker.marks.meetings
    suspects = bool(meetings.coupled or meetings.added or tracker.renumbered)
    shown_nodes, roots = tracker.shown, {*tracker.roots}
    noted = marks.noted_nodes if tracker.batch_size > 1 else None
    of_graphs = tracker.reports.of_graphs
    reports: list[GraphReport] = []
    while stack:
        node = stack.pop()
        kind = type(node)
        partial = kind is COPY_SLICES
        if partial:
            hidden = True
        use: Any = hooked_on(node) if kind in KINDS else None
        edges: Any
        if use is not None:
            edges = use.edges_to_data(node)
        else:
            edges = node.next_functions
            if kind not in NATIVE:
                if kind is REENTRANT and _runs_inside(tracker, node):
                    raise unseen_checkpoint()
                if issubclass(kind, BackwardCFunction):
                    use = getattr(node, "use", None)
                else:
                    NATIVE.add(kind)
        # A user's Function may have an attribute of this name.
        tracked = use is not None and isinstance(use, Use)
        if tracked:
            uses.append(use)
        if tracked or partial:
            reporting.append(node)
        if suspects:
            _check_node(tracker, node)
        if noted and not tracked and isinstance(node, BackwardCFunction):
            _check_place(node, noted)
        inside: set[Root] | None = None
        for child, _ in edges:
            if child is None or child in seen:
                continue
            shown = shown_nodes.get(child) if shown_nodes else None
            if shown is not None and not roots.isdisjoint(shown.roots):
                raise _unseen(node, shown)
            if type(child) is not ACCUMULATE_GRAD:
                seen.add(child)
                stack.append(child)
                continue
            leaf = child.variable  # type: ignore[attr-defined]
            root = node_of(leaf)
            if tracked and root in use.roots:
                continue
            if inside is None:
                inside = _roots_in_graph(edges, of_graphs) if of_graphs else set()
            if inside and root in inside:
                continue
            if id(leaf) in of_graphs:
                reports.append(of_graphs[id(leaf)])
                continue
            if isinstance(root, Root) and root in roots:
                raise _unseen(node, root)
            others.append(leaf)  # not tracked, or not by this context
    tracker.check_known(others)
    crossed = meetings.is_crossed(seen)
    # Uses in compiled graphs, and in the backwards of Functions, have no nodes in this graph.
    elsewhere = bool(reports or tracker.functions.inside)
    last = math.inf if elsewhere else max([use._sequence_nr() for use in reporting], default=0)
    supposed = meetings.is_supposed(seen, last)
    for loss in losses:
        check_sum(marks, loss, crossed=crossed, supposed=supposed)
    _expect(tracker, uses, reports)
    if hidden:
        for root in tracker.roots:
            root.postponed |= root.registered > root.counted
    return reporting


def _expect(tracker: Context, uses: Sequence[Use], reports: Sequence[GraphReport]) -> None:
    """Announce the uses and reports that the backward will reach; raise if it cannot reach them.

    Args:
        uses: those in the losses' graph.
        reports: those of the compiled graphs in it.
    """
    if any([root.places for root in tracker.roots]):
        for use in uses:
            use.check_numbers()
    shared = [root for report in reports for root in report.expect()]
    for use in uses:
        use.expect()
    if tracker.reports.of_graphs:
        shared += [root for root in tracker.roots if root.graph is not None and root.counted]
    if shared:
        for root in tracker.roots:
            root.graph = None  # nothing has run: the same context may try again eagerly
        raise shared_in_graphs(shared)


def _check_node(tracker: Context, node: Any) -> None:
    """Raise if examples met in an operation, or a tensor had other values in the forward."""
    meetings, renumbered = tracker.marks.meetings, tracker.renumbered
    if node in meetings.coupled:
        raise meetings.refusal(node)
    if meetings.added and node not in meetings.added:
        for child, _ in node.next_functions:
            if child in meetings.added:  # an operation other than a sum used a sum over examples
                raise meetings.refusal(child)
    for edge in node.next_functions if renumbered else ():
        if node._sequence_nr() < renumbered.get(edge, 0):
            made = f"a tensor that {edge[0].name()} made"
            raise given_others(made, "keep others in a tensor of their own")


def _check_place(node: BackwardCFunction, noted: set[int]) -> None:
    """Raise if a Function that was not seen took data whose examples do not lie on the usual axis.

    Its results were assumed to have their examples there.

    Args:
        node: of a Function.
        noted: the sequence numbers of the nodes that made such data.
    """
    function: Any = node._forward_cls  # type: ignore[attr-defined]
    if hasattr(node, "was_shown") or function.__module__.startswith(("torch.", "gradstats.")):
        return
    edges: Any = node.next_functions
    if any(child is not None and child._sequence_nr() in noted for child, _ in edges):
        name = function.__name__
        raise UnsupportedOperationError(
            f"the autograd Function {name} was given values whose examples do not lie along the "
            "example axis, or of several examples together, and its call was not seen, so it is "
            f"not known to which examples its result belongs. Write {name}.apply where it is "
            "used: an apply that was kept in a variable before the first context is hidden."
        )


def _runs_inside(tracker: Context, node: GraphNode) -> bool:
    """Whether a checkpoint ran while the context was open, or was given a result from inside.

    Another thread counts its nodes from zero, so that a checkpoint there may seem to be from before
    the context; if it was given none from inside, its own backward tells if parameters are in it.
    """
    nodes: Any = [node, *(child for child, _ in node.next_functions if child is not None)]
    return any(
        type(each) is not ACCUMULATE_GRAD and each._sequence_nr() >= tracker.first_node
        for each in nodes
    )


def is_in_unseen_checkpoint() -> bool:
    """Whether the running backward is one that such a checkpoint runs for its own part."""
    return type(torch._C._current_autograd_node()) is REENTRANT


def unseen_checkpoint() -> TrackingError:
    """Return the error about a reentrant checkpoint that the context did not see."""
    return TrackingError(
        "a reentrant checkpoint (torch.utils.checkpoint with use_reentrant=True) ran where the "
        "context does not see it: before the context opened, in another thread than the one that "
        "opened it, or under torch._C.DisableTorchFunction. Its backward runs a part of the "
        "forward again, on new tensors of which it is not known which rows are whose. Expected a "
        "forward inside the context, in its thread: run it there, or leave the checkpoint out."
    )


def _unseen(node, used: Node) -> UnsupportedOperationError:
    if node.name().startswith("Sparse"):
        return UnsupportedOperationError(
            f"{node.name()} makes a sparse tensor of {used.describe()}, so its per-example "
            "gradient is not known. Expected a dense one: torch.zeros(size).index_put(indices, "
            'values). Or call per_example_norms with fallback="vmap", or leave the parameter out '
            f"by name with exclude={used.names!r}.",
            used.names,
        )
    function = getattr(node, "_forward_cls", None)  # of a Function defined in Python
    if function is not None and not function.__module__.startswith("torch."):
        name = function.__name__
        remedy = (
            f"{name} is a custom autograd Function: if it takes data beside a parameter, register "
            f"a rule with gs.register_rule({name}, ...), or write it with PyTorch's own "
            "operations. If it was called before the context was opened, or its apply was kept in "
            f"a variable before the first context, call {name}.apply inside, where it is used."
        )
    else:
        remedy = (
            "If a part of the losses was computed before the context was opened, or by a "
            "TorchScript module, compute all of them inside the context, with the model as it was "
            "before torch.jit. If the model keeps a result from an earlier forward in eval mode, "
            "drop it: most do in model.train(); then call model.eval() again. For a custom "
            "operation, register a rule with gs.register_rule."
        )
    return UnsupportedOperationError(
        f"{node.name()} uses {used.describe()} without passing through a PyTorch operation that "
        f"can be tracked, so its per-example gradient is not known. {remedy} Or call "
        'per_example_norms with fallback="vmap", or leave the parameter out by name with '
        f"exclude={used.names!r}.",
        used.names,
    )


def _roots_in_graph(edges: Any, of_graphs: dict[int, GraphReport]) -> set[Root]:
    """Return the parameters that a compiled graph's node reports; none for any other node.

    A compiled graph takes the parameters themselves, not their aliases, since the uses inside were
    tracked when it was traced. A graph without a probe has a use that tracing could not see.

    Args:
        edges: the node's ``next_functions``.
        of_graphs: what compiled graphs report, by the ids of their probes.
    """
    leaves = [child.variable for child, _ in edges if type(child) is ACCUMULATE_GRAD]  # type: ignore[attr-defined]
    reports = [of_graphs[id(leaf)] for leaf in leaves if id(leaf) in of_graphs]
    return {root for report in reports for root in report.roots}


def leaves_of(total: Tensor) -> list[Tensor]:
    """Return the tensors that a backward from ``total`` would add gradients to."""
    return [
        node.variable  # type: ignore[attr-defined]
        for node in nodes_behind(total)
        if type(node) is ACCUMULATE_GRAD
    ]
