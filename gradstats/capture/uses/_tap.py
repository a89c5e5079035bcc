"""The simplest use: identity on the result of an operation that PyTorch computed as always."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats._factors import Lookup
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.uses._uses import KEY, Use, attach, refuse_derivatives, unseen
from gradstats.contractions import Contraction, Fused


class Factors:
    """How the gradient of an operation's result becomes factors of its tracked operands."""

    __slots__ = ()

    def __call__(self, grad: Tensor, *saved: Any) -> list:
        """Return one factor for each tracked operand, from what ``tap`` has saved."""
        raise NotImplementedError

    def norms(self, grad: Tensor, *saved: Any) -> list[Contraction] | None:
        """Return squared norms, if the factors need not wait for others; None to form factors."""

    def data_gradients(self, nodes: Sequence[Node], grad: Tensor, *saved: Any) -> Any:
        """Return the gradients of ``saved``, computed by tracked operations, or refuse.

        None if they do not depend on the tracked operands.
        """
        refuse_derivatives(nodes)


def _tap_again(ctx, grad: Tensor, *saved: Tensor | None):
    gradients = ctx.factors_of.data_gradients(ctx.use.nodes, grad, *saved)
    if gradients is None:
        return ((2, grad),)
    return zip(ctx.data, gradients, strict=True)


class Tap(torch.autograd.Function):
    """Identity on an operation's result that turns its gradient into reports.

    The result is marked as changed in place so that it remains an ordinary tensor: returned as a
    view, it could not be changed in place by a later ``relu_``.
    """

    @staticmethod
    def forward(ctx, use, factors_of, result, *saved):
        ctx.use, ctx.factors_of = use, factors_of
        ctx.data = range(3, 3 + len(saved))
        ctx.save_for_backward(*saved)
        ctx.mark_dirty(result)
        return result

    @staticmethod
    @unseen(_tap_again)
    def backward(ctx, grad, *saved):
        use = ctx.use
        # Inside a checkpoint's forward, where torch.autograd.grad may run as well, the checkpoint
        # would take what ``factors_of`` records for a part of it.
        if use.is_due():
            factors = None
            if use.settings.consumer is None and use.all_sole:
                norms = ctx.factors_of.norms(grad, *saved)
                factors = None if norms is None else [Fused(None, each, None) for each in norms]
            use.take(ctx.factors_of(grad, *saved) if factors is None else factors)
        return (None, None, grad, *(None for _ in saved))


def tap(
    nodes: Sequence[Node],
    result: Tensor,
    factors_of: Factors,
    *saved: Tensor | None,
    lookup: Lookup | None = None,
) -> Tensor:
    """Return ``result`` with the factors of ``nodes`` attached to its gradient.

    Args:
        nodes: the tracked operands of the operation.
        result: what the operation returned, still connected to the operands as PyTorch connects it.
        factors_of: makes the factors.
        saved: tensors that ``factors_of`` needs, saved as an operation saves its operands.
        lookup: the look-up that the operation is, if its factors name one.
    """
    use = Use(nodes)
    use.lookup = lookup
    if is_compiling() or torch._C._len_torch_dispatch_stack() == 0:
        result = attach(Tap)(use, factors_of, result, *saved)
    else:
        # Dispatch modes, such as selective checkpoints', may check that results were not changed.
        with torch.autograd._unsafe_preserve_version_counter(result):
            result = attach(Tap)(use, factors_of, result, *saved)
    base = result._base
    if base is not None and base.grad_fn is not None and not is_compiling():
        metadata: Any = base.grad_fn.metadata  # of the node that hides the use's own
        metadata[KEY] = use
    return result
