"""Linear layers that have one row for each example: PyTorch's own operation, with a hook.

The gradient of such an example is one outer product, and nothing on the way to the training
gradient helps to find its norm. So the operation and its backward stay PyTorch's, and a hook that
runs after the backward reports: an autograd Function around them takes longer than a small layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gradstats.capture._examples import Examples
from gradstats.capture._graph import ADDMM, MM
from gradstats.capture._linear import LinearFactors
from gradstats.capture._nodes import Root
from gradstats.capture._uses import Settings, Use, check_derivatives
from gradstats.contractions import one_position

Gradients = tuple[Tensor | None, ...]

# Where an operation's node keeps its ``OneRow``.
KEY = "gradstats"


class Place(NamedTuple):
    """Where the node that PyTorch makes for a linear layer has its data.

    Attributes:
        saved: the attribute that holds x.
        edge: the position of the edge to what computed x.
    """

    saved: str
    edge: int


PLACES = {ADDMM: Place("_saved_mat1", 1), MM: Place("_saved_self", 0)}


class OneRow(Use):
    """The use of a weight, and of a bias, by a linear layer whose rows are the examples.

    Attributes:
        place: where the operation's node has its data.
        layer: its factors.
    """

    def __init__(
        self, nodes: Sequence[Root], place: Place, settings: Settings, layer: LinearFactors
    ):
        super().__init__(nodes)
        self.place = place
        self.settings = settings
        self.layer = layer

    def after_backward(self, grads: Gradients, given: Gradients) -> Gradients | None:
        """Report what the gradient of the result says; replace that of x where it is in the loss.

        Args:
            grads: of the operation's operands.
            given: the result's, after hooks of the user's, in a tuple.
        """
        (grad,) = given
        if torch.is_grad_enabled():
            check_derivatives(self, self.settings)
            return self._with_tracked(grads, grad)
        if self.is_due():
            if grad is None:
                self.deliver([None for _ in self.nodes])
            else:
                x = getattr(torch._C._current_autograd_node(), self.place.saved)
                with torch._C.DisableTorchFunction():
                    self._report(grad, x)
        return None

    def _report(self, grad: Tensor, x: Tensor) -> None:
        roots = self.roots
        biased = len(roots) == 2
        if not (roots[0].has_one_use and (not biased or roots[1].has_one_use)):
            self.deliver(self.layer(grad, x))
            return
        norms = one_position(grad, x)
        roots[0].settle_alone(norms)
        if biased:
            # The gradient of an example's bias is the row whose norm the weight's needed too.
            roots[1].settle_alone(norms.first())

    def _with_tracked(self, grads: Gradients, grad: Tensor | None) -> Gradients | None:
        """Return the gradients with that of x from an operation that uses the weight once more."""
        edge = self.place.edge
        if grads[edge] is None or grad is None:
            return None
        again = self.layer.data_gradient(self.nodes[0], self.settings, grad)
        return (*grads[:edge], again, *grads[edge + 1 :])


def serves(settings: Settings, examples: Examples, x: Tensor) -> bool:
    """Whether data are such that PyTorch may run a linear layer on them while a hook reports.

    Args:
        settings: of the context. Who takes inner products takes factors and the training gradient.
        examples: where the examples lie in x.
        x: the data.
    """
    return (
        x.dim() == 2
        and examples.plain
        and x.is_cpu
        and settings.consumer is None
        and not torch.compiler.is_compiling()
        # Who packs saved tensors may unpack each but once, as checkpoints do.
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


def linear(
    settings: Settings, layer: LinearFactors, x: Tensor, weight: Root, bias: Root | None = None
) -> Tensor | None:
    """Return what PyTorch computes for a layer; None where it does so in an unknown way."""
    matrix, shift = weight.parameter, None if bias is None else bias.parameter
    if not layer.inputs_first:
        result = functional.linear(x, matrix, shift)
    else:
        result = torch.mm(x, matrix) if shift is None else torch.addmm(shift, x, matrix)
    node: Any = result.grad_fn  # whose metadata PyTorch's annotations take for a method
    place = PLACES.get(type(node))
    if place is None:
        return None
    use = OneRow((weight,) if bias is None else (weight, bias), place, settings, layer)
    node.metadata[KEY] = use
    node.register_hook(use.after_backward)
    return result


def one_row_of(node: Any) -> OneRow | None:
    """Return the use that the hook of an operation's node reports; None for all other nodes."""
    return node.metadata.get(KEY) if type(node) in PLACES else None
