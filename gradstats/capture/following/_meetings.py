"""Operations in which trained values of different examples met."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node as GraphNode

from gradstats.capture.following._examples import IF_A_CONSTANT, IF_KNOWN
from gradstats.capture.operations._graph import nodes_behind
from gradstats.capture.operations._memory import storage_of
from gradstats.errors import CoupledExamplesError

MEETS = "combines trained values of different examples"
NO_SUM = "makes more than a sum of the values of several examples"
BROUGHT_BACK = (
    "brings what was computed over all examples (a sum, a mean, a norm or a maximum along their "
    "axis) back to each of them"
)

EXCHANGED = "gives each process what was computed from the examples of others"


class Meetings:
    """What a context notes about operations in which examples met.

    Attributes:
        coupled: autograd nodes that combine several examples, each with a description of how; no
            loss may depend on them.
        added: autograd nodes that add values of several examples, or such sums, each with a
            description; a loss over all examples may depend on them, but not a loss of one.
        roots_of_sums: nodes that compute the square root of such a sum; a loss over all examples
            may be its square, but not the root itself.
        weighed: nodes in which trained weights, zero there, meet values of other examples: a loss
            may depend on them, but not on a derivative of them.
        beside: nodes of operations that combine each row of constants with the example's in whose
            place it is, and with no other; each with whether the result is a constant as well.
        crossed: autograd nodes, one for each operation in which trained values may have been taken
            for those of other examples, or of none; only losses of one example each tell whose the
            results are.
        supposed: autograd nodes, one for each tensor of whose rows some, which are nobody's, were
            supposed to belong to examples: rows of constants, or that nothing was written to. That
            matters to what uses parameters afterwards.
    """

    def __init__(self, batch_size: int):
        self._batch_size = batch_size
        self.coupled: dict[Any, str] = {}
        self.added: dict[Any, str] = {}
        self.roots_of_sums: set[Any] = set()
        self.weighed: set[Any] = set()
        self.beside: dict[Any, bool] = {}
        self.crossed: list[GraphNode | None] = []
        self.supposed: list[GraphNode | None] = []

    def note(self, result: Tensor) -> None:
        """Note that trained values of one example meet those of another."""
        if result.requires_grad and self._batch_size > 1:
            self.couple(result, MEETS)

    def couple(self, result: Tensor, how: str) -> None:
        """Note that examples meet in the operation that made a tensor: no loss may depend on it."""
        self.coupled[result.grad_fn] = how

    def couple_base(self, result: Tensor, operands: Iterable[Tensor]) -> None:
        """Do the same for the tensor that a result is a view of, if the same operation made it.

        A change in place gives a view another autograd node, with that tensor's behind it.

        Args:
            result: of an operation, coupled or not.
            operands: the operation's; what is a view of them shows what others made.
        """
        how, base = self.coupled.get(result.grad_fn), result._base
        if how is None or base is None:
            return
        storage = storage_of(base)
        if all(storage_of(operand) is not storage for operand in operands):
            self.coupled[base.grad_fn] = how

    def cross(self, result: Tensor) -> None:
        """Note that values may have been taken for others' in the operation that made a tensor."""
        self.crossed.append(_lasting_node(result))

    def is_crossed(self, nodes: Container[GraphNode | None]) -> bool:
        """Whether there are such operations among the nodes of losses' graphs, or may be."""
        return any(node is None or node in nodes for node in self.crossed)

    def suppose(self, tensor: Tensor) -> None:
        """Note that rows of a tensor that are nobody's were supposed to belong to examples."""
        self.supposed.append(_lasting_node(tensor))

    def is_supposed(self, nodes: Container[GraphNode | None], before: float = math.inf) -> bool:
        """Whether there are such tensors among those that nodes made, or may be.

        Args:
            nodes: of losses' graphs.
            before: the number of a node in the graph; only tensors that were made earlier count.
        """
        return any(
            node is None or (node in nodes and node._sequence_nr() < before)  # type: ignore[attr-defined]
            for node in self.supposed
        )

    def supposes_behind(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed from such ones, or may have been."""
        return bool(self.supposed) and (
            tensor.grad_fn is None or self.is_supposed({*nodes_behind(tensor)})
        )

    def is_coupled(self, result: Tensor) -> bool:
        """Whether several examples are known to meet in the operation that made a tensor."""
        return result.grad_fn in self.coupled

    def how_met(self, node: GraphNode) -> str | None:
        """Return how an autograd node combines several examples; None if it is not known to."""
        return self.coupled.get(node, self.added.get(node))

    def behind(self, tensor: Tensor) -> GraphNode | None:
        """Return an autograd node behind a tensor that combines several examples, if any does."""
        found = (node for node in nodes_behind(tensor) if self.how_met(node) is not None)
        return next(found, None)

    def refusal(self, node: GraphNode) -> CoupledExamplesError:
        """Return the error about losses that depend on a node in which examples met."""
        how = self.how_met(node)
        if how == NO_SUM:
            return CoupledExamplesError(
                f"{node.name()} {how}: what it gives belongs to no example, and neither does any "
                "part of its gradient. Expected losses of one example each, or a sum, a mean or a "
                "weighted sum of them: the mean squared error, not its root; x.square().sum(), not "
                "x.norm() ** 2; the mean of the examples' Dice losses, not that of all their "
                "pixels. Detach normalisers and weights."
            )
        return CoupledExamplesError(
            f"{node.name()} {how}: each loss depends on several examples, and their "
            "gradients cannot be told apart: a contrastive loss has none of one example. Expected "
            "losses that depend on one example each: detach what comes from the others, or combine "
            "each example with its own values alone, as (x * y).sum(-1) does. "
            f"{IF_A_CONSTANT} {IF_KNOWN}"
        )


def _lasting_node(tensor: Tensor) -> GraphNode | None:
    """Return an autograd node behind all that a tensor is used for."""
    # Writing through a view gives it a new node at each use; what was written is its base's.
    whole = tensor._base if tensor._is_view() else tensor  # type: ignore[union-attr]
    return whole.grad_fn  # type: ignore[union-attr]
