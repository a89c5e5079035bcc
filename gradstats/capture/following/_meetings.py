"""Operations in which trained values of different examples met."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node as GraphNode

from gradstats.capture.following._examples import IF_A_CONSTANT, MORE_IF_COUPLED
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
    """What a context notes about operations in which examples met: their autograd nodes.

    Attributes:
        coupled: nodes that combine several examples, each with a description of how; no loss may
            depend on them.
        added: nodes that add values of several examples, or such sums, each with a description; a
            loss over all examples may depend on them, but not a loss of one.
        roots_of_sums: nodes that compute a root of such a sum, each with which one; a loss over all
            examples may depend on this power of it, but not on the root itself.
        weighed: nodes in which values of other examples meet trained weights that are zero; a loss
            may depend on these nodes, but not on a derivative of them.
        beside: nodes of operations that combine each row of constants with the row of the example
            in the same place, and with no other; each with whether the result is constant too.
        crossed: nodes of operations in which trained values may have been taken for those of other
            examples, or of none; only losses of one example each tell whose the results are.
        supposed: nodes that made tensors with rows that are nobody's (rows of constants, or rows
            that nothing was written to) but were supposed to belong to examples. This matters where
            such tensors meet parameters afterwards.
    """

    def __init__(self, batch_size: int):
        self._batch_size = batch_size
        self.coupled: dict[Any, str] = {}
        self.added: dict[Any, str] = {}
        self.roots_of_sums: dict[Any, float] = {}
        self.weighed: set[Any] = set()
        self.beside: dict[Any, bool] = {}
        self.crossed: list[GraphNode | None] = []
        self.supposed: list[GraphNode | None] = []

    def note(self, result: Tensor) -> None:
        """Note that trained values of different examples meet in the operation behind a result."""
        if result.requires_grad and self._batch_size > 1:
            self.couple(result, MEETS)

    def couple(self, result: Tensor, how: str) -> None:
        """Note how examples meet in the operation that made a tensor: no loss may depend on it."""
        self.coupled[result.grad_fn] = how

    def couple_base(self, result: Tensor, operands: Iterable[Tensor]) -> None:
        """Do the same for the tensor that a result is a view of, if the same operation made both.

        A later change in place gives the view a new autograd node, behind which is the node of that
        tensor.

        Args:
            result: of an operation, coupled or not.
            operands: of the operation; views of them show memory that other operations made.
        """
        how, base = self.coupled.get(result.grad_fn), result._base
        if how is None or base is None:
            return
        storage = storage_of(base)
        if all(storage_of(operand) is not storage for operand in operands):
            self.coupled[base.grad_fn] = how

    def cross(self, result: Tensor) -> None:
        """Note that the operation that made a tensor may have taken values for other examples'."""
        self.crossed.append(_lasting_node(result))

    def is_crossed(self, nodes: Container[GraphNode | None]) -> bool:
        """Whether such operations are, or may be, among the nodes of losses' graphs."""
        return any(node is None or node in nodes for node in self.crossed)

    def suppose(self, tensor: Tensor) -> None:
        """Note that rows of a tensor were supposed to belong to examples, but are nobody's."""
        self.supposed.append(_lasting_node(tensor))

    def is_supposed(self, nodes: Container[GraphNode | None], before: float = math.inf) -> bool:
        """Whether such tensors are, or may be, among those that the nodes of losses' graphs made.

        Args:
            nodes: of the losses' graphs.
            before: the sequence number of a node; only tensors that were made earlier count.
        """
        return any(
            node is None or (node in nodes and node._sequence_nr() < before)  # type: ignore[attr-defined]
            for node in self.supposed
        )

    def supposes_behind(self, tensor: Tensor) -> bool:
        """Whether a tensor was, or may have been, computed from such tensors."""
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
        """Return an autograd node behind a tensor that combines several examples, if any."""
        found = (node for node in nodes_behind(tensor) if self.how_met(node) is not None)
        return next(found, None)

    def refusal(self, node: GraphNode) -> CoupledExamplesError:
        """Return the error about losses that depend on a node in which examples met."""
        how = self.how_met(node)
        if how == NO_SUM:
            return CoupledExamplesError(
                f"{node.name()} {how}: its result belongs to no example, and neither does any part "
                "of its gradient. Expected losses of one example each, or a sum, a mean or a "
                "weighted sum of them: the mean squared error, not its root; the mean of the "
                "examples' Dice losses, not the Dice loss of all their pixels. Detach normalisers "
                "and weights."
            )
        return CoupledExamplesError(
            f"{node.name()} {how}: each loss depends on several examples, so that their gradients "
            "cannot be told apart, as those of a contrastive loss. Expected losses that depend on "
            "one example each: combine each example with its own values alone, as (x * y).sum(-1) "
            f"does, or detach what comes from other examples. {IF_A_CONSTANT} {MORE_IF_COUPLED}"
        )


def _lasting_node(tensor: Tensor) -> GraphNode | None:
    """Return a tensor's autograd node, or its base's: it stays when views are written through."""
    # Writing through a view gives the view a new node at each use; what was written is the base's.
    whole = tensor._base if tensor._is_view() else tensor  # type: ignore[union-attr]
    return whole.grad_fn  # type: ignore[union-attr]
