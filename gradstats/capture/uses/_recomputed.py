"""Operations that PyTorch computes as a whole and whose backward is taken apart.

A recurrent layer reaches PyTorch as one operation, whose backward does not expose the gradients of
the products inside. The backward here computes them again, for the operands' gradients and factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradstats._factors import Factor
from gradstats.capture.operations._graph import hooks_on_saved
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.uses._uses import Use, free_of_views, refuse_derivatives
from gradstats.contractions import Fused, sqnorm_and_sum

if TYPE_CHECKING:
    from gradstats.capture.rules._recurrent import Recurrence


@dataclass(frozen=True)
class Site:
    """A place where one operand meets data: its gradient is Σ_r left_r right_rᵀ over rows r.

    Attributes:
        slot: the position of the operand among the operation's tensors.
        left: (rows, p), the gradients of the product or sum that the operand is in.
        right: (rows, q), the data that it multiplies; None if it is added.
    """

    slot: int
    left: Tensor
    right: Tensor | None

    def total(self) -> Tensor:
        """Return the gradient summed over all rows."""
        return self.left.sum(0) if self.right is None else self.left.t() @ self.right


class Kept:
    """An operation's result, kept for its backward unless it is changed in place.

    Saved by autograd, it would raise an error if user code changed it, which PyTorch's operation
    may allow.
    """

    def __init__(self, result: Tensor):
        # Hooks on saved tensors, such as checkpoints', are there to save memory: keep nothing then.
        self._alias = result.detach() if hooks_on_saved() is None else None
        self._version = result._version

    def take(self) -> Tensor | None:
        """Return the result and drop it; None if it was not kept or has changed."""
        alias, self._alias = self._alias, None
        return alias if alias is not None and alias._version == self._version else None


class Recomputed(torch.autograd.Function):
    """The results of an operation, with a backward that computes the operation again.

    If results are ``given``, PyTorch's operation differentiates them: only factors are found here.
    """

    @staticmethod
    def forward(ctx, use, operation, tracked, data, given, *tensors):
        results, tensors = tensors[:given], tensors[given:]
        ctx.use, ctx.operation, ctx.tracked, ctx.data = use, operation, tracked, data
        ctx.given = given
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        if given:
            ctx.mark_dirty(*results)
        else:
            results = tuple(map(free_of_views, operation.native(*tensors)))
        ctx.output = Kept(results[0])
        return results

    @staticmethod
    def backward(ctx, *grads):
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            refuse_derivatives(ctx.use.nodes)
        with torch._C.DisableTorchFunction():
            settings = ctx.use.settings
            wanted = [False] * len(tensors) if ctx.given else ctx.needs_input_grad[5:]
            # The operands have been cast already, and what is accumulated must not be.
            with torch.autocast(tensors[0].device.type, enabled=False):
                output = ctx.output.take()
                gradients, sites = ctx.operation.differentiate(grads, output, tensors, wanted)
            factors: dict[int, Factor | Fused] = {}
            for site in sites:
                train = wanted[site.slot] and (ctx.use.tracker.trains or site.slot in ctx.data)
                if site.slot in ctx.tracked:
                    factor = ctx.operation.factor(site)
                    sole = ctx.use.is_sole(ctx.tracked.index(site.slot))
                    factors[site.slot] = factor
                    if train and site.right is not None and sole:
                        norms, total = sqnorm_and_sum(factor, settings.workspace)
                        factors[site.slot] = Fused(factor, norms, total)
                        gradients[site.slot] = total.to(tensors[site.slot].dtype)
                if train and gradients[site.slot] is None:
                    gradients[site.slot] = site.total().to(tensors[site.slot].dtype)
            ctx.use.deliver([factors[slot] for slot in ctx.tracked])
        return (None, None, None, None, None, *grads[: ctx.given], *gradients)


def recomputed(
    nodes: Sequence[Node],
    tracked: tuple[int, ...],
    data: tuple[int, ...],
    operation: Recurrence,
    *tensors: Tensor,
) -> tuple[Tensor, ...]:
    """Return an operation's results with the factors of ``nodes`` attached.

    Args:
        nodes: the tracked operands.
        tracked: their positions among ``tensors``.
        data: the positions of weights that were computed from trained data: their gradients are
            always wanted.
        operation: computes the results and takes its backward apart.
        tensors: its operands, as plain tensors.

    Cost: one more forward of the operation, in the backward; until then only the first result is
    kept in memory.
    """
    use = Use(nodes)
    if not use.settings.exact:
        return Recomputed.apply(use, operation, tracked, data, 0, *tensors)
    results = tuple(map(free_of_views, operation.native(*tensors)))
    # The Function marks the results as changed, without changing their values. Without this, an
    # operation that needs its own result in the backward would raise an error.
    with torch.autograd._unsafe_preserve_version_counter(results):
        own = use, operation, tracked, data, len(results)
        return Recomputed.apply(*own, *results, *tensors)
