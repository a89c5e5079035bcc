"""Tracked tensors: what they have in common, and parameters, which are their roots.

A backward must know when a parameter's last use has delivered its factor, since the factors of
several uses are contracted together, cross terms included. Before it starts, the graph of the
losses is walked and the uses in it are counted (see ``_coverage``); every use that the backward
reaches delivers, and the last one contracts their sum.
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

# PyTorch's own, before it is replaced by what shows it to contexts.
AS_SUBCLASS = Tensor.as_subclass

# The message for a second contraction of one root within one context.
ARRIVED_TWICE = (
    "the gradient of {} arrived in two backwards within one context. One context serves one batch "
    "and one backward: open one context for each micro-batch. If the parameter is shared between "
    "checkpoints of another library, use torch.utils.checkpoint.checkpoint."
)


class Node:
    """A tracked tensor.

    Attributes:
        tracker: the context it belongs to.
        roots: the parameters it is computed from; a root is its own.
        paths: how many ways lead from each of them to here through the computation.
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


# Replaces a closed context in the nodes of parameters, which would keep it alive.
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
        expected: number of these that have not delivered yet.
        postponed: whether the graph may contain more uses than were counted, so that factors can
            only be contracted when the backward has ended.
        of_slices: whether gradients of slices of it were delivered (see ``_slices``), which are
            pulled back together when the backward has ended.
        lookups: the counted uses that are look-ups.
        places: the parameter's memory before it was given other values through ``.data``, and after
            each time; empty if that has not happened.
        delivered: what uses have delivered and is not contracted yet.
        result: the squared norms, once all uses have delivered.
    """

    # Without slots, all of a model's roots would have dictionaries as soon as uses are counted.
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

    # Computed: a root that held itself would only be freed by the garbage collector.
    @property
    def roots(self) -> tuple[Root, ...]:  # type: ignore[override]
        return (self,)

    @property
    def paths(self) -> dict[Root, int]:  # type: ignore[override]
        return {self: 1}

    @property
    def value(self) -> Tensor:
        # Every tracked use reads this alias, so that the autograd graph shows uses that were not
        # seen: as edges to the parameter that do not come through the alias.
        alias = self.alias
        if alias is None or self._is_outdated(alias, self._alias_version):
            return self._renewed()
        return alias

    def _renewed(self) -> Tensor:
        # If the parameter has its first values again, its uses continue with the first alias, so
        # that their gradients are added up in PyTorch's order.
        first = self._first
        if first is None or self._is_outdated(*first):
            alias = AS_SUBCLASS(self.parameter, Tensor)
            if alias.grad_fn is None:  # no gradient is recorded here, but may be later
                with torch.enable_grad():
                    alias = AS_SUBCLASS(self.parameter, Tensor)
            self.alias_nodes = (*self.alias_nodes, alias.grad_fn)
            version = alias._version
        else:
            alias, version = first
        self._first = first or (alias, version)
        self.alias, self._alias_version = alias, version
        return alias

    def _is_outdated(self, alias: Tensor, version: int) -> bool:
        # The parameter was given other memory, as by ``parameter.data = ...``. The backward of
        # earlier computations needs the earlier values.
        if _place(alias) != _place(self.parameter):
            return True
        # After an in-place change of a view, PyTorch replaces its node by that of a strided view,
        # which takes no sparse gradients.
        return alias._version != version

    def note_place(self, numbers: Tensor) -> None:
        """Note that the parameter is about to get other values, by ``parameter.data = ...``."""
        self.places = (*(self.places or (_place(self.parameter),)), _place(numbers))

    def is_at(self, time: int) -> bool:
        """Whether the parameter has the values that it had when there were so many places."""
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
        others = self.counted - len(self.lookups)
        return bool(self.lookups) and others == 1 and not self.postponed

    def deliver(self, factor: Factor | Fused, parts: int = 1) -> None:
        """Take one of the ``parts`` factors that a use contributes."""
        kept: Factor | Fused | Projected = factor
        if parts == 1 and self.is_projection:
            kept = self.tracker.reports.shrink(self, factor)
        before = self.delivered
        last = before[-1] if before else None
        if isinstance(kept, Vector) and isinstance(last, Vector) and adds_to(last, kept):
            # The sum takes no more memory than one: a bias may be used once for each example.
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
    """Return a tensor's place in memory, without an operation that a mode would see."""
    if tensor.layout != torch.strided:
        return ()
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def same_storage(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors share their memory."""
    if not first.layout == second.layout == torch.strided:
        return False
    one, other = first.untyped_storage(), second.untyped_storage()
    if one._cdata == other._cdata:
        return True
    # Two storages may have one address; while a graph is traced none has any.
    return not is_compiling() and one.data_ptr() == other.data_ptr()


def same_form(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors agree in shape, strides and dtype."""
    return (first.shape, first.stride(), first.dtype) == (
        second.shape,
        second.stride(),
        second.dtype,
    )


def unique_roots(nodes: Sequence[Node]) -> tuple[Root, ...]:
    """Return the roots of several nodes, each once, in order."""
    if len(nodes) == 1:
        return nodes[0].roots
    if len(nodes) == 2 and isinstance(nodes[0], Root) and isinstance(nodes[1], Root):
        return nodes[0].roots if nodes[0] is nodes[1] else tuple(nodes)  # type: ignore[arg-type]
    return tuple(dict.fromkeys([root for node in nodes for root in node.roots]))
