"""The nodes of tracked tensors, and among them the roots, which are parameters.

The factors of all uses of a parameter are contracted together, cross terms included, so the
backward must know which use delivers last. Before it starts, ``_coverage`` counts the uses in the
graph of the losses. Each use delivers when the backward reaches it; the last one contracts the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats._factors import Factor, Lookup, Vector
from gradstats.contractions import Contraction, Fused, Projected, add_vectors, adds_to
from gradstats.errors import CoverageError, TrackingError

if TYPE_CHECKING:
    from gradstats.capture._context import Context
    from gradstats.capture._reports import GraphReport

# PyTorch's own method: contexts replace it, so that they see its calls.
AS_SUBCLASS = Tensor.as_subclass

# Raised when a root is contracted twice within one context.
ARRIVED_TWICE = (
    "the gradient of {} arrived in two backwards within one context. One context serves one batch "
    "and one backward: open one context for each micro-batch. If the parameter is shared between "
    "checkpoints of another library, use torch.utils.checkpoint.checkpoint."
)


class Node:
    """A tracked tensor.

    Attributes:
        tracker: the context it belongs to.
        roots: the parameters it is computed from; of a root, itself.
        paths: for each root, the number of ways through the computation from it to here.
    """

    __slots__ = ()

    tracker: Context
    roots: tuple[Root, ...]
    paths: dict[Root, int]

    @property
    def value(self) -> Tensor:
        """The plain tensor for computations, connected to the roots in the autograd graph."""
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def names(self) -> list[str]:
        """The names of the roots."""
        return [root.name for root in self.roots]

    def describe(self) -> str:
        """Describe this tensor for error messages."""
        raise NotImplementedError


def closed_before(node: Node) -> TrackingError:
    """Return the error for a backward that reaches a tensor of a closed context."""
    return TrackingError(
        f"a backward reached {node.describe()} after its tracking context was closed. Run the "
        "backward inside the context; for a second one, as clipping by the norms needs, run the "
        "forward again outside of it."
    )


# Takes the place of a context in its roots when it closes: they would keep it alive.
CLOSED = SimpleNamespace(closed=True)


class Root(Node):
    """One parameter of the model for the duration of one context.

    Attributes:
        name, parameter: as the model has them.
        graph: the report of the compiled graph that uses it; None if the losses' graph has none.
        alias: the parameter as a plain tensor, which operations read; None before the first use.
        alias_nodes: the autograd nodes of all its aliases so far.
        registered: number of uses in the forward.
        counted: number of uses in the graph of the losses.
        expected: number of counted uses that have not delivered yet.
        postponed: whether the graph may contain more uses than were counted. Then factors are
            contracted after the backward.
        of_slices: whether uses delivered gradients of slices (see ``_slices``), which are pulled
            back together after the backward.
        lookups: the counted uses that are look-ups.
        places: the parameter's place in memory before the first assignment to its ``.data`` and
            after each one; empty without any.
        delivered: factors that uses have delivered and that are not contracted yet.
        result: the squared norms, once all uses have delivered.
    """

    # Without slots, counting uses would give each of a model's roots a dictionary.
    __slots__ = (
        "_alias_version", "_first", "alias", "alias_nodes", "counted", "delivered", "expected",
        "graph", "lookups", "name", "of_slices", "parameter", "places", "postponed", "registered",
        "result", "tracker",
    )  # fmt: skip

    def __init__(self, tracker: Context, name: str, parameter: torch.nn.Parameter):
        self.tracker = tracker
        self.name = name
        self.parameter = parameter
        self.graph: GraphReport | None = None
        self.alias: Tensor | None = None
        self.alias_nodes: tuple[Any, ...] = ()
        self._alias_version = 0
        self._first: tuple[Tensor, int] | None = None
        self.registered = self.counted = self.expected = 0
        self.postponed = self.of_slices = False
        self.lookups: tuple[Lookup, ...] = ()
        self.places: tuple[Any, ...] = ()
        self.result: Contraction | None = None
        self.delivered: tuple[Factor | Fused | Projected, ...] = ()

    # Computed, not stored: only the garbage collector would free a root that holds itself.
    @property
    def roots(self) -> tuple[Root, ...]:  # type: ignore[override]
        return (self,)

    @property
    def paths(self) -> dict[Root, int]:  # type: ignore[override]
        return {self: 1}

    @property
    def value(self) -> Tensor:
        # All tracked uses read this alias, so any other edge to the parameter in the autograd graph
        # is a use that was not seen.
        alias = self.alias
        if alias is None or self._is_outdated(alias, self._alias_version):
            return self._renewed()
        return alias

    def _renewed(self) -> Tensor:
        # When the parameter has its first values again, its uses continue with the first alias, so
        # that autograd adds up their gradients in the same order as without a context.
        first = self._first
        if first is None or self._is_outdated(*first):
            alias = AS_SUBCLASS(self.parameter, Tensor)
            if alias.grad_fn is None:  # grad mode is off here, but later uses may need the graph
                with torch.enable_grad():
                    alias = AS_SUBCLASS(self.parameter, Tensor)
            if alias.grad_fn is None:
                return alias  # inside an operator, or of a frozen parameter: for this use alone
            self.alias_nodes = (*self.alias_nodes, alias.grad_fn)
            version = alias._version
        else:
            alias, version = first
        self._first = first or (alias, version)
        self.alias, self._alias_version = alias, version
        return alias

    def _is_outdated(self, alias: Tensor, version: int) -> bool:
        # ``parameter.data = ...`` gave the parameter other memory. The backward of earlier uses
        # needs the earlier values.
        if _place(alias) != _place(self.parameter):
            return True
        # When a view was changed in place, PyTorch replaces its node by that of a strided view,
        # which takes no sparse gradients.
        return alias._version != version

    def note_place(self, numbers: Tensor) -> None:
        """Note that ``parameter.data = numbers`` is about to run."""
        self.places = (*(self.places or (_place(self.parameter),)), _place(numbers))

    def is_at(self, time: int) -> bool:
        """Whether the parameter is where it was when ``places`` had ``time`` entries."""
        return self.places[max(time - 1, 0)] == _place(self.parameter)

    def describe(self) -> str:
        module = self.name.rpartition(".")[0]
        return f"parameter {self.name!r} (of {f'module {module!r}' if module else 'the model'})"

    @property
    def has_one_use(self) -> bool:
        """Whether the graph of the losses contains exactly one use."""
        return self.counted == 1 and not self.postponed

    @property
    def is_projection(self) -> bool:
        """Whether the graph of the losses contains look-ups and exactly one other use."""
        other_uses = self.counted - len(self.lookups)
        return bool(self.lookups) and other_uses == 1 and not self.postponed

    def deliver(self, factor: Factor | Fused, parts: int = 1) -> None:
        """Take a factor of a use, which delivers ``parts`` of them."""
        kept: Factor | Fused | Projected = factor
        if parts == 1 and self.is_projection:
            kept = self.tracker.reports.shrink(self, factor)
        before = self.delivered
        last = before[-1] if before else None
        if isinstance(kept, Vector) and isinstance(last, Vector) and adds_to(last, kept):
            # Their sum takes the memory of one: a bias may be used once for each example.
            kept, before = add_vectors([last, kept]), before[:-1]
        self.delivered = (*before, kept)

    def settle(self) -> None:
        """Note that a use has delivered; contract if it was the last one."""
        self.expected -= 1
        if self.is_complete:
            self.contract()

    @property
    def is_complete(self) -> bool:
        """Whether all uses have delivered, and their factors may be contracted."""
        return self.expected <= 0 and not (self.postponed or self.of_slices)

    def contract(self) -> None:
        """Contract the delivered factors."""
        if self.delivered:
            delivered, self.delivered = self.delivered, ()
            self.finish(self.tracker.reports.contract(self, delivered))

    def finish(self, result: Contraction) -> None:
        """Take the squared norms of all uses together."""
        if self.result is not None:
            raise CoverageError(ARRIVED_TWICE.format(self.describe()))
        self.result = result

    def release(self) -> None:
        """Drop all references to the graph and the context when it closes."""
        self.tracker = CLOSED  # type: ignore[assignment]
        self.alias = self._first = None
        self.alias_nodes = ()
        self.graph = None
        self.lookups = self.delivered = ()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return where a tensor lies in memory, without an operation that a mode would see."""
    if tensor.layout != torch.strided:
        return ()
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def same_storage(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors share their memory."""
    if not first.layout == second.layout == torch.strided:
        return False
    storages = first.untyped_storage(), second.untyped_storage()
    if storages[0]._cdata == storages[1]._cdata:
        return True
    # Two storages may share an address; while a graph is traced they have none.
    return not is_compiling() and storages[0].data_ptr() == storages[1].data_ptr()


def same_form(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors agree in shape, strides and dtype."""
    alike = first.dtype == second.dtype and first.shape == second.shape
    return alike and first.stride() == second.stride()


def unique_roots(nodes: Sequence[Node]) -> tuple[Root, ...]:
    """Return the roots of several nodes, each once, in order."""
    if len(nodes) == 1:
        return nodes[0].roots
    if len(nodes) == 2 and isinstance(nodes[0], Root) and isinstance(nodes[1], Root):
        return nodes[0].roots if nodes[0] is nodes[1] else tuple(nodes)  # type: ignore[arg-type]
    return tuple(dict.fromkeys([root for node in nodes for root in node.roots]))
