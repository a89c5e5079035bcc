"""What all uses of parameters have in common: their roots, and how factors reach these.

The autograd Functions at which a parameter meets data keep their ``Use`` in ``ctx.use``, where the
walk over the graph finds it, and deliver factors to the roots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats._factors import Factor, Lookup, Outer, Ragged
from gradstats.capture.operations._graph import INNERMOST
from gradstats.capture.parameters._consumers import Consumer
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._lineage import Pulled, pull_back
from gradstats.capture.parameters._nodes import Node, Root, closed_before, unique_roots
from gradstats.capture.parameters._slices import as_slices
from gradstats.capture.parameters._transforms import HiddenError, transform_level
from gradstats.contractions import Contraction, Fused, lean, sqnorm, sqnorm_and_sum
from gradstats.contractions._precision import without_autocast
from gradstats.errors import UnsupportedOperationError

# The key of a ``Use`` in the metadata of an autograd node that is not its own.
KEY = "gradstats"


@dataclass(frozen=True)
class Settings:
    """What a context asks of its uses.

    Attributes:
        weight_gradients: whether training gradients are wanted too.
        fused: whether weight gradients may come from gradstats' own pass over the data.
        workspace: bytes of scratch memory that a contraction may allocate at once.
        consumer: what else is done with the factors of each parameter; None for norms alone.
    """

    weight_gradients: bool
    fused: bool
    workspace: int
    consumer: Consumer | None = None

    @cached_property
    def exact(self) -> bool:
        """Whether the training gradients are to be PyTorch's own, to the bit."""
        return self.weight_gradients and not self.fused


class Use:
    """One operation's use of some tracked tensors.

    Attributes:
        nodes: the tracked tensors.
        roots: the parameters that they are computed from.
        direct: whether the nodes are parameters, all of them different.
        tracker, settings: the context, and what it asks of its uses.
        lookup: the look-up, if this is one; it decides what is kept for cross terms.
        times: for each root, how often its values had been moved (by .data = ...) at the time of
            the use; empty if none had.
    """

    lookup: Lookup | None = None
    times: tuple[int, ...] = ()

    def __init__(self, nodes: Sequence[Node]):
        self.nodes = tuple(nodes)
        self.roots = unique_roots(self.nodes)
        self.direct = self.roots == self.nodes
        self.tracker = nodes[0].tracker
        self.settings: Settings = self.tracker.settings
        for root in self.roots:
            root.registered += 1
            if root.places:
                self.times = tuple([len(each.places) for each in self.roots])

    @property
    def names(self) -> list[str]:
        """The names of the roots."""
        return [root.name for root in self.roots]

    def describe(self) -> str:
        """Describe the use for error messages."""
        return f"an operation on {', '.join(node.describe() for node in self.nodes)}"

    def is_sole(self, position: int) -> bool:
        """Whether the node at a position is a parameter that is used here alone, and only once."""
        node = self.nodes[position]
        if not (isinstance(node, Root) and node.has_one_use):
            return False
        return self.direct or sum(node in each.roots for each in self.nodes) == 1

    @property
    def all_sole(self) -> bool:
        """Whether all nodes are parameters that are used here alone."""
        if self.direct:
            for root in self.roots:  # asked in each backward: a loop is faster than all()
                if not root.has_one_use:
                    return False
            return True
        return all(map(self.is_sole, range(len(self.nodes))))

    def is_tied(self, factor: Factor) -> bool:
        """Whether the first node is a parameter whose other uses are all look-ups of its rows.

        Then only the norms of this use's factor, and its products with the look-ups, are kept.
        """
        node = self.nodes[0]
        if not (isinstance(node, Root) and self.direct and node.is_projection):
            return False
        return isinstance(factor, (Outer, Ragged)) and factor.spans_rows

    def check_numbers(self) -> None:
        """Raise if a parameter no longer has the values that it was used with."""
        for index, root in enumerate(self.roots):
            if root.places and not root.is_at(self.times[index] if self.times else 0):
                remedy = "put them back, or use others by torch.func.functional_call"
                raise given_others(root.describe(), remedy)

    def expect(self) -> None:
        """Count this use, which the backward that is about to run will reach."""
        for root in self.roots:
            root.counted += 1
            root.expected += 1
            if self.lookup is not None:
                root.lookups = (*root.lookups, self.lookup)

    def is_due(self) -> bool:
        """Whether the running backward is that of the losses, not of an inner autograd.grad."""
        if self.tracker.closed:
            raise closed_before(self.nodes[0])
        return self.tracker.is_backward_of_losses()

    def finish(self, norms: Sequence[Contraction]) -> None:
        """Hand the roots, which are used here alone, their squared norms."""
        for root, result in zip(self.roots, norms, strict=True):
            root.expected -= 1
            root.finish(result)

    def deliver(self, factors: Sequence[Factor | Fused | None]) -> None:
        """Hand the roots the factors of all nodes, unless an inner autograd.grad runs."""
        if self.is_due():
            self.take(factors)

    def take(self, factors: Sequence[Factor | Fused | None]) -> None:
        """Hand the roots the factors of all nodes, in the backward of the losses.

        ``Fused`` stands for a factor whose norms have been computed already (for the only use of a
        parameter, or of a cast or reshape of one), None for a node that no gradient reached.
        """
        if torch._C._is_any_autocast_enabled():
            with without_autocast():  # a graph's backward is traced under its forward's autocast
                return self.take(factors)
        if not (self.direct or (len(factors) == 1 and isinstance(factors[0], Fused))):
            self._take_pulled_back(factors)
            return
        settings = self.settings
        for root, factor in zip(self.roots, factors, strict=True):
            if factor is not None and settings.consumer is None and root.has_one_use:
                root.expected -= 1
                root.finish(
                    factor.norms
                    if isinstance(factor, Fused)
                    else sqnorm([factor], settings.workspace)
                )
                continue
            if factor is not None:
                root.deliver(_held(factor, root))
            root.settle()

    def _take_pulled_back(self, factors: Sequence[Factor | Fused | None]) -> None:
        """Hand the roots the factors of nodes of which some are derived from them, or repeat."""
        for node, factor in zip(self.nodes, factors, strict=True):
            if factor is None:
                continue
            found: Mapping[Root, Sequence[Factor | Fused]]
            if isinstance(node, Root):
                found = {node: [factor]}
            else:
                assert not isinstance(factor, Fused)  # which only roots get here
                assert isinstance(node, Derived)
                found = pull_back(factor, node, node.roots)
                if any([isinstance(term, Pulled) for terms in found.values() for term in terms]):
                    found = as_slices(factor, node) or found
            for root, terms in found.items():
                parts = max(len(terms), sum([root in each.roots for each in self.nodes]))
                for term in terms:
                    root.deliver(_held(term, root), parts)
        # Count down all roots first: contracting one may serve others that are complete too.
        for root in self.roots:
            root.expected -= 1
        for root in self.roots:
            if root.is_complete:
                root.contract()


def given_others(what: str, remedy: str) -> UnsupportedOperationError:
    """Return the error for a tensor that was given other values between forward and backward.

    PyTorch's backward may use either, depending on whether an operation saved the tensor or a view.
    """
    return UnsupportedOperationError(
        f"{what} was given other numbers (by .data = ...) after the losses' forward had used it, "
        "so that the backward may compute with these instead of the forward's. Expected the "
        f"numbers of the forward: {remedy}."
    )


def _held(factor: Factor | Fused, root: Root) -> Factor | Fused:
    """Return a factor, in lean form if it has to wait for other uses."""
    return factor if root.has_one_use or isinstance(factor, Fused) else lean(factor)


@cache
def attach(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a function that applies an autograd Function that takes a ``Use``.

    It skips PyTorch's support for torch.func transforms, inside which there are no uses.
    """
    return INNERMOST.__get__(None, function)


def fuse(
    factor: Factor, settings: Settings, want_sum: bool, dtype: torch.dtype | None = None
) -> Fused:
    """Return a parameter's only factor with its norms, and its sum if one pass gives both.

    Args:
        want_sum: whether the weight gradient is wanted.
        dtype: the preferred dtype of the weight gradient; None for any.
    """
    if want_sum and settings.fused:
        return Fused(factor, *sqnorm_and_sum(factor, settings.workspace, dtype))
    return Fused(factor, sqnorm([factor], settings.workspace), None)


def unseen(again):
    """Turn a function of (ctx, grad, *saved) into a backward whose operations modes do not see.

    Saved tensors are read first: that makes a checkpoint run its part of the forward again, which
    modes have to see.

    Args:
        again: called as again(ctx, grad, *saved) instead of the function if grad mode is on, that
            is inside a ``torch.autograd.grad(..., create_graph=True)`` whose result becomes part of
            the loss. It reports nothing. It computes the gradients of the data by tracked
            operations, which use the parameters once more, and returns the position and gradient
            of each input that is data.
    """

    def decorate(backward):
        def run(ctx, grad):
            saved = ctx.saved_tensors
            if is_compiling():
                with without_autocast():  # the backward is traced under the forward's autocast
                    return backward(ctx, grad, *saved)
            if torch.is_grad_enabled():
                gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
                check_derivatives(ctx.use)
                for position, gradient in again(ctx, grad, *saved):
                    gradients[position] = gradient
                return tuple(gradients)
            with torch._C.DisableTorchFunction():
                return backward(ctx, grad, *saved)

        return run

    return decorate


def check_derivatives(use: Use) -> None:
    """Raise if the context does not support losses that contain derivatives of the network."""
    if use.tracker.closed:
        raise closed_before(use.nodes[0])
    if transform_level() is not None:
        raise HiddenError(
            "torch.autograd.grad(..., create_graph=True) inside a torch.func transform (vmap, "
            f"grad, jvp …) ran through {use.nodes[0].describe()}: the transform hides how the "
            "derivatives depend on it. Expected torch.autograd.grad outside of transforms; for "
            "several vectors at once, pass is_grads_batched=True.",
            use.names,
        )
    if use.settings.exact:
        raise UnsupportedOperationError(
            "the loss contains derivatives of the network (torch.autograd.grad with "
            f"create_graph=True ran through {use.nodes[0].describe()}). With fused=False gradients "
            "are PyTorch's own to the bit, so that such derivatives cannot be told apart by "
            "example. Use fused=True."
        )


def refuse_derivatives(nodes: Sequence[Node]) -> NoReturn:
    """Raise for derivatives of the network through an operation that does not support them."""
    names = [root.name for root in unique_roots(nodes)]
    raise UnsupportedOperationError(
        "the loss contains derivatives of the network (torch.autograd.grad with create_graph=True "
        f"ran through an operation on {nodes[0].describe()}), and how they depend on the "
        "parameter is not known for this operation. Expected linear layers, convolutions, "
        "normalisation layers, products, or operations that broadcast: write it with these, have "
        'per_example_norms compute one example at a time with fallback="vmap", or leave the '
        f"parameter out by name with exclude={names!r}."
    )


def derived(node: Node, function, *args) -> Derived:
    """Return the node of ``function(node, *args)``, a tensor that belongs to no example."""
    with torch._C.DisableTorchFunctionSubclass():
        value = function(node.value, *args)
    return Derived(node.tracker, value, function, (node, *args), {}, None)


def free_of_views(tensor: Tensor) -> Tensor:
    """Return a new result as an ordinary tensor even if autograd takes it for a view.

    A view that is marked as changed passes on its gradient through a copy with the strides of its
    base, so that sums over it are rounded differently.
    """
    if not tensor._is_view():
        return tensor
    return torch.ops.aten._unsafe_view(tensor, tensor.shape)
