"""Linear layers that have one row for each example: PyTorch's own operation, with a hook.

The gradient of such an example is one outer product, and nothing on the way to the training
gradient helps to find its norm. So the operation and its backward stay PyTorch's, and a hook that
runs before the backward reports: an autograd Function around them takes longer than a small layer.

No carrier leads to these operations. A backward that is told what to reach is told of their nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gradstats.capture._layout import Examples
from gradstats.capture._linear import LinearFactors, data_gradient
from gradstats.capture._nodes import Node, Root
from gradstats.capture._uses import Settings, Use, check_derivatives
from gradstats.contractions import Fused, one_position

# Where an operation's node keeps its hook's ``OneRow``.
KEY = "gradstats"


class Place(NamedTuple):
    """Where the node that PyTorch makes for a linear layer has its data.

    Attributes:
        saved: the attribute that holds x.
        edge: the position of the edge to what computed x.
    """

    saved: str
    edge: int


def _places() -> dict[type, Place]:
    with torch.enable_grad():
        weight = torch.zeros(1, 1, requires_grad=True)
        with_bias = functional.linear(weight, weight, torch.zeros(1))
        without = functional.linear(weight, weight)
    return {
        type(with_bias.grad_fn): Place("_saved_mat1", 1),
        type(without.grad_fn): Place("_saved_self", 0),
    }


PLACES = _places()


class OneRow:
    """One use of a weight, and of a bias, by a linear layer whose rows are the examples.

    Attributes:
        use, place: of the operation.
    """

    __slots__ = ("factors", "place", "settings", "use")

    def __init__(self, use: Use, place: Place, settings: Settings, factors: LinearFactors):
        self.use = use
        self.place = place
        self.settings = settings
        self.factors = factors

    def before_backward(self, grads: tuple[Tensor | None, ...]) -> None:
        """Report what the gradient of the result says."""
        (grad,) = grads
        use = self.use
        node = torch._C._current_autograd_node()
        if torch.is_grad_enabled():
            check_derivatives(use, self.settings)
            self._derive(node)
            return
        if grad is None:
            use.deliver([None for _ in use.nodes])
            return
        x = getattr(node, self.place.saved)
        with torch._C.DisableTorchFunction():
            if not use.all_sole:
                use.deliver(self.factors(grad, x))
                return
            norms = one_position(grad, x)
            reports = [Fused(None, norms, None)]
            if self.factors.bias:
                # The gradient of an example's bias is the row whose norm the weight's needed too.
                reports.append(Fused(None, norms.first(), None))
            use.deliver(reports)

    def _derive(self, node: torch.autograd.graph.Node) -> None:
        """Have a use of its own compute the gradient of x: it becomes part of the loss."""
        edge = self.place.edge

        def replace(grads: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]):
            handle.remove()
            if grads[edge] is None or given[0] is None:
                return None
            weight, examples = self.use.nodes[0], self.factors.examples
            gradient = data_gradient(weight, self.settings, examples, given[0])
            return (*grads[:edge], gradient, *grads[edge + 1 :])

        handle = node.register_hook(replace)


def serves(
    settings: Settings, nodes: Sequence[Node], examples: Examples, x: Tensor, bias: Tensor | None
) -> bool:
    """Whether a linear layer is one that PyTorch may run while a hook reports.

    Args:
        settings: of the context. Who takes inner products takes factors and the training gradient.
        nodes: the tracked operands.
        examples: where the examples lie in x.
        x, bias: the data, and the bias if there is one.
    """
    return (
        x.dim() == 2
        and examples.plain
        and x.is_cpu
        and settings.consumer is None
        and len(nodes) == (1 if bias is None else 2)
        and all(isinstance(node, Root) for node in nodes)
        and not torch.compiler.is_compiling()
        # Who packs saved tensors may unpack each but once, as checkpoints do.
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


def linear(
    settings: Settings,
    nodes: Sequence[Node],
    examples: Examples,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor | None:
    """Return x Wᵀ + b as PyTorch computes it; None where it does so in an unknown way."""
    result = functional.linear(x, weight, bias)
    node = result.grad_fn
    place = PLACES.get(type(node))
    if place is None:
        return None
    factors = LinearFactors(True, bias is not None, examples, tuple(weight.shape))
    row = OneRow(Use(nodes), place, settings, factors)
    node.metadata[KEY] = row
    node.register_prehook(row.before_backward)
    return result


def one_row_of(node: torch.autograd.graph.Node) -> OneRow | None:
    """Return the use that the hook of an operation's node reports; None for all other nodes."""
    return node.metadata.get(KEY) if type(node) in PLACES else None
