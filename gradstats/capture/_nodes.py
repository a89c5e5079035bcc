"""Tracked tensors: roots (parameters) and derived tensors (computed from parameters alone).

The statistic of a root is a gradient: every use of the root receives the root's *carrier*, a tensor
that nobody reads in the forward pass, and returns its contribution as the carrier's gradient. The
carrier is a view of the root's probe, and its autograd node is the root's hub: the engine reaches
it exactly when every use in the graph has delivered, so it does the counting.

    sole use     the use contracts its factor itself and returns the result
    shared       each use delivers its factor to the root; the hub contracts their sum, cross terms
                 included, once all have arrived; so it is for every parameter of a context that
                 does more with the factors than norms
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradstats._factors import Factor, Lookup
from gradstats.contractions import Contraction, Fused, Projected
from gradstats.errors import CoverageError, TrackingError, UnsupportedOperationError

if TYPE_CHECKING:
    from gradstats.capture._tracker import Tracker

# Rows of a report: squared norm, absolute error bound, number of times the root reported.
VALUE, BOUND, COUNT = range(3)


class Node:
    """A tracked tensor.

    Attributes:
        tracker: the context it belongs to.
        roots: the parameters it is computed from; a root is its own.
    """

    tracker: Tracker
    roots: tuple[Root, ...]

    @property
    def value(self) -> Tensor:
        """The plain tensor to compute with, connected to the roots in the autograd graph."""
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    def describe(self) -> str:
        """Return how messages call this tensor."""
        raise NotImplementedError


class Closed:
    """Stands for the context once it has closed, so that parameters' nodes do not keep it alive."""

    closed = True


CLOSED = Closed()


class Root(Node):
    """One parameter of the model for the duration of one context."""

    def __init__(self, tracker: Tracker, name: str, parameter: torch.nn.Parameter, probe: Tensor):
        self.tracker = tracker
        self.roots = (self,)
        self.name = name
        self.parameter = parameter
        self.probe = probe
        self.uses = 0
        self.reported = False
        self._alias: Tensor | None = None
        self._carrier: Tensor | None = None
        # Look-ups of this parameter that the forward pass made, in order.
        self.lookups: list[Lookup] = []
        self._delivered: list[tuple[int, Factor | Fused | Projected]] = []

    @property
    def value(self) -> Tensor:
        # Every tracked use reads this alias, so that in the autograd graph a use that was not seen
        # stands out: it is an edge to the parameter that does not come through the alias.
        if self._alias is None:
            self._alias = self.parameter.view_as(self.parameter)
        return self._alias

    @property
    def alias_node(self):
        """The autograd node of the alias, None if the parameter was not used."""
        return None if self._alias is None else self._alias.grad_fn

    @property
    def hub_node(self):
        """The autograd node of the hub, None if the parameter was not used."""
        return None if self._carrier is None else self._carrier.grad_fn

    def describe(self) -> str:
        module = self.name.rpartition(".")[0]
        return f"parameter {self.name!r} (of {f'module {module!r}' if module else 'the model'})"

    def register_use(self) -> Tensor:
        """Count one more use and return the carrier it must pass through its Function."""
        if torch._C._functorch.maybe_current_level() is not None:
            raise UnsupportedOperationError(
                f"{self.describe()} is used inside a torch.func transform (vmap, grad, jacrev, jvp "
                "…), which hides the examples. Expected plain autograd: write derivatives of the "
                "network with torch.autograd.grad(..., create_graph=True) on the whole batch, or "
                f"leave the parameter out by name with exclude=[{self.name!r}]."
            )
        self.uses += 1
        if self._carrier is None:
            self._carrier = self.probe.view_as(self.probe)
            self._carrier.register_hook(self.settle)
        return self._carrier

    def release(self) -> None:
        """Let go of the graph when the context closes."""
        self.tracker = CLOSED  # type: ignore[assignment]
        self._alias = self._carrier = None
        self._delivered.clear()
        self.lookups.clear()

    def deliver(self, factor: Factor | Fused) -> None:
        """Keep the factor of one use until the hub of the running backward asks for it."""
        kept: Factor | Fused | Projected = factor
        if self.lookups and self.uses == 1 + len(self.lookups):
            kept = self.tracker.shrink(self, factor)
        # An inner torch.autograd.grad runs the uses' backward too, but not the hub's: its
        # deliveries carry another task's number and are dropped.
        self._delivered.append((torch._C._current_graph_task_id(), kept))

    def check_open(self) -> None:
        """Raise if the context has closed."""
        if self.tracker.closed:
            raise TrackingError(
                f"a backward reached {self.describe()} after its tracking context was closed; run "
                "the backward inside the context."
            )

    def settle(self, report: Tensor) -> Tensor:
        """Return the final report; called once all uses in the graph have delivered."""
        # Nothing that a contraction computes has to be followed.
        with torch._C.DisableTorchFunction():
            return self._settle(report)

    def _settle(self, report: Tensor) -> Tensor:
        self.check_open()
        if self.reported:
            raise CoverageError(
                f"the gradient of {self.describe()} arrived in two backwards within one context. "
                "One context serves one batch and one backward: open one context for each "
                "micro-batch. If the parameter is shared between reentrant checkpoints, use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        self.reported = True
        task = torch._C._current_graph_task_id()
        factors = [factor for owner, factor in self._delivered if owner == task]
        self._delivered.clear()
        if factors:
            # The uses that delivered these reported zeros, so that the parameter counts once.
            report = report + make_report(self.tracker.contract(self, factors), self.tracker.once)
        return report


class Derived(Node):
    """A tensor computed from parameters and constants only, with how it was computed.

    Attributes:
        function, args, kwargs: the operation; tracked operands stand as their nodes.
        index: which of the operation's outputs this is; None for a single output.
    """

    def __init__(
        self,
        tracker: Tracker,
        value: Tensor,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        index: int | None,
    ):
        self.tracker = tracker
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.index = index
        self.parents = tuple(node for node in flatten((args, kwargs)) if isinstance(node, Node))
        self.roots = tuple(dict.fromkeys(root for node in self.parents for root in node.roots))
        self._value = value
        device = value.device.type
        self._autocast = (
            (device, torch.get_autocast_dtype(device))
            if torch.is_autocast_enabled(device)
            else None
        )

    @property
    def value(self) -> Tensor:
        return self._value

    def describe(self) -> str:
        name = function_name(self.function)
        return f"a tensor derived by {name} from " + ", ".join(r.describe() for r in self.roots)

    def replay(self, leaves: dict[Node, Tensor], copies: bool = False) -> Tensor:
        """Compute this tensor again from the given values of some of the nodes it depends on.

        Args:
            leaves: node → value.
            copies: take copies of everything else, which may change later.
        """

        def resolve(item):
            if not isinstance(item, Node):
                return item.clone() if copies and isinstance(item, Tensor) else item
            if item in leaves:
                return leaves[item]
            if isinstance(item, Derived):
                return item.replay(leaves, copies)
            value = item.value.detach()
            return value.clone() if copies else value

        args, kwargs = rebuild(self.args, resolve), rebuild(self.kwargs, resolve)
        if self._autocast is None:
            result = self.function(*args, **kwargs)
        else:
            device, dtype = self._autocast
            with torch.autocast(device, dtype=dtype, cache_enabled=False):
                result = self.function(*args, **kwargs)
        return result if self.index is None else result[self.index]

    def replay_from(self, root: Root, copies: bool = False) -> tuple[Tensor, Tensor]:
        """Return a fresh leaf with the root's value and this tensor computed from it."""
        with torch.enable_grad():
            value = root.parameter.detach()
            leaf = (value.clone() if copies else value).requires_grad_()
            again = self.replay({root: leaf}, copies)
        if not torch.equal(again.detach(), self._value.detach()):
            raise UnsupportedOperationError(
                f"{self.describe()} cannot be computed again with the same result, so per-example "
                "gradients cannot be pulled back through it. Is the operation random, or was one "
                "of its inputs changed in place? Exclude the parameter, or compute the tensor "
                "without randomness."
            )
        return leaf, again


def make_report(result: Contraction, count: Tensor | None = None) -> Tensor:
    """Return what a use sends back through its carrier: (3, B) float64."""
    if count is None:
        count = torch.ones_like(result.value)
    return torch.stack((result.value, result.bound, count))


def flatten(items) -> list[Any]:
    """Return the leaves of nested tuples, lists and dicts, in order."""
    leaves: list[Any] = []
    for item in items.values() if type(items) is dict else items:
        if isinstance(item, (tuple, list, dict)):
            leaves.extend(flatten(item))
        else:
            leaves.append(item)
    return leaves


def operands_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among an operation's arguments, in order."""
    items = flatten(args)
    if kwargs:
        items += flatten(kwargs)
    return [item for item in items if isinstance(item, Tensor)]


def rebuild(items, change: Callable[[Any], Any]):
    """Return nested tuples, lists and dicts with every leaf replaced by ``change(leaf)``."""
    if isinstance(items, dict):
        return {key: rebuild(item, change) for key, item in items.items()}
    if isinstance(items, (tuple, list)):
        changed = [rebuild(item, change) for item in items]
        if isinstance(items, tuple) and hasattr(items, "_fields"):
            return type(items)(*changed)
        return type(items)(changed) if type(items) in (tuple, list) else tuple(changed)
    return change(items)


def function_name(function: Callable[..., Any]) -> str:
    """Return the name under which a user knows an operation."""
    name = getattr(function, "__name__", repr(function))
    if name in ("__get__", "__set__"):
        owner = getattr(function, "__self__", None)
        return f"Tensor.{getattr(owner, '__name__', name)}"
    module = getattr(function, "__module__", None) or ""
    if module == "torch._C._nn":
        module = "torch.nn.functional"
    if isinstance(function, type(torch.Tensor.add)):
        module = "Tensor"
    return f"{module}.{name}" if module and not module.startswith("torch._") else name


def unique_roots(nodes: Sequence[Node]) -> tuple[Root, ...]:
    """Return the roots of several nodes, each once, in order."""
    return tuple(dict.fromkeys(root for node in nodes for root in node.roots))
