"""Derived tensors computed again, to pull gradients back to their parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradstats._factors import Factor, compute_dtype
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._nodes import Node, Root
from gradstats.contractions import total
from gradstats.errors import UnsupportedOperationError

# How far the backward of a custom Function may be from linear, relative to the norms of its
# results: it may compute in a lower precision than their dtype suggests.
LINEAR_TOLERANCE = {torch.float64: 1e-6}
OTHER_TOLERANCE = 2e-2

# Linearity is checked with gradients multiplied by up to this factor: gradients of losses averaged
# over a batch are smaller by about as much, and a backward that clips might not change those.
LARGEST_WEIGHT = 1024

# Differences of up to so many roundings of the gradients are taken for rounding.
ROUNDING = 8

# PyTorch's error message where a backward cannot be differentiated.
NO_DERIVATIVE = re.compile("derivative for .* is not implemented")


class Replay:
    """A derived tensor computed again from roots, to be differentiated any number of times.

    Attributes:
        leaves: the roots' values, in real numbers.
        value: the derived tensor, in real numbers.
        widest: elements of the largest tensor between the two.
    """

    def __init__(self, node: Derived, roots: Sequence[Root], copies: bool = False):
        """Compute ``node`` again from ``roots``; with ``copies``, weights may change afterwards."""
        self.widest = node.widest
        self.leaves, self.value = node.replay_from(roots, copies)

    def pull_each(self, factor) -> list[Tensor]:
        """Return the roots' per-example gradients, given a factor of the derived tensor."""
        cotangents = factor.dense().to(self.value)
        if len(cotangents) == 1:
            # Not as a batch, whose preparation takes longer than many a backward.
            return [pulled.unsqueeze(0) for pulled in self.pull(cotangents[0])]
        try:
            # Anomaly detection cannot look for NaN in a batch of gradients.
            with torch.autograd.set_detect_anomaly(False):
                return self._pull(cotangents, cotangents.shape[:1])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # not every backward supports batches: a sparse product's does not
            return self._pull_in_turn(cotangents)

    def _pull_in_turn(self, cotangents: Tensor) -> list[Tensor]:
        columns = zip(*map(self.pull, cotangents), strict=True)
        return [torch.stack(column) for column in columns]

    def pull(self, cotangent: Tensor) -> list[Tensor]:
        """Return the roots' gradients, given one gradient of the derived tensor."""
        return self._pull(cotangent.to(self.value), ())

    def _pull(self, cotangents: Tensor, batch: Sequence[int]) -> list[Tensor]:
        """Return the roots' gradients, dense and in the accumulation dtype.

        Args:
            cotangents: (*batch, *) of the derived tensor.
            batch: (B,) or ().
        """
        kept = {"retain_graph": True, "allow_unused": True}
        batched = bool(batch)
        found = torch.autograd.grad(
            self.value, self.leaves, cotangents, is_grads_batched=batched, **kept
        )
        # A result may have no gradient, as the sign of a determinant, or a sparse one.
        return [
            _dense(leaf.new_zeros(*batch, *leaf.shape) if pulled is None else pulled)
            for leaf, pulled in zip(self.leaves, found, strict=True)
        ]

    def push(self, direction: Tensor) -> Tensor | None:
        """Return how the derived tensor changes when its only root changes by ``direction``.

        Computed as the derivative of ``pull``, which is linear in its cotangent. None if PyTorch
        cannot differentiate an operation's backward (fused attention), if that is zero for every
        cotangent (``sign``), if the result is not finite, and if the derivative is not that of the
        operation (``scale_grad_by_freq``).
        """
        if not self.value.numel():
            # Rows of a table without indices: a backward may not be differentiable in no numbers.
            return self.value.detach().to(compute_dtype(self.value))
        with torch.enable_grad():
            cotangent = torch.zeros_like(self.value, requires_grad=True)
            (pulled,) = torch.autograd.grad(
                self.value, self.leaves, cotangent, create_graph=True, allow_unused=True
            )
            if pulled is None or not pulled.requires_grad:
                return None
            try:
                (pushed,) = torch.autograd.grad(
                    pulled, cotangent, direction.to(pulled), allow_unused=True
                )
            except RuntimeError as error:
                if NO_DERIVATIVE.search(str(error)) is None:
                    raise
                return None
        if pushed is None or not bool(pushed.isfinite().all()):
            return None
        pushed = pushed.to(compute_dtype(pushed))
        return pushed if self._are_adjoint(direction, pushed) else None

    def _are_adjoint(self, direction: Tensor, pushed: Tensor) -> bool:
        """Whether ⟨direction, pull(pushed)⟩ = ⟨pushed, pushed⟩, as must be if push is right."""
        (pulled,) = self.pull(pushed)
        met = direction.to(pulled).where(pulled != 0, 0)
        difference = (met * pulled).sum() - pushed.square().sum()
        tolerance = LINEAR_TOLERANCE.get(self.value.dtype, OTHER_TOLERANCE)
        return bool(difference.abs() <= tolerance * met.norm() * pulled.norm())


def _weighted(weights: Tensor, gradients: Tensor) -> Tensor:
    """Return the weighted sum of the norms of gradients (B, *)."""
    return (weights * gradients.reshape(len(gradients), -1).norm(dim=1)).sum()


def _dense(pulled: Tensor) -> Tensor:
    """Return a gradient in the accumulation dtype, and dense, which embeddings' may not be."""
    dense = pulled if pulled.layout == torch.strided else pulled.to_dense()
    return dense.to(compute_dtype(dense))


class FunctionReplay(Replay):
    """A replay that passes through a custom autograd Function.

    Its backward runs as autograd would run it, for one gradient at a time: it need not support
    batches of gradients, nor be differentiable.
    """

    def __init__(self, node: Derived, roots: Sequence[Root], copies: bool = False):
        super().__init__(node, roots, copies)
        self.described, self.names = node.describe(), [root.name for root in roots]

    def pull_each(self, factor) -> list[Tensor]:
        cotangents = factor.dense().to(self.value)
        found = self._pull_in_turn(cotangents)
        self._check_linear(cotangents, found)
        return found

    def pull(self, cotangent: Tensor) -> list[Tensor]:
        # A copy, because a backward may change the gradient that it is given.
        given = cotangent.to(self.value, copy=True)
        with (
            torch._C._EnableTorchFunction(),
            torch._C.DisableTorchFunctionSubclass(),
            OneBackward(self),
        ):
            # Not torch.autograd.grad, which would disable the mode.
            given_to = torch.autograd.Variable._execution_engine.run_backward(
                (self.value,),
                (given,),
                True,  # keep the graph
                False,  # create none
                tuple(self.leaves),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        # The Function may return no gradient for an operand.
        found = [
            torch.zeros_like(leaf) if pulled is None else pulled
            for leaf, pulled in zip(self.leaves, given_to, strict=True)
        ]
        return [pulled.to(compute_dtype(pulled)) for pulled in found]

    def _check_linear(self, cotangents: Tensor, found: Sequence[Tensor]) -> None:
        """Raise unless the backward of a sum is the sum of the backwards.

        Otherwise the examples' gradients would not add up to the batch's, and would depend on the
        scale of the losses.
        """
        count = len(cotangents)
        weights = torch.linspace(LARGEST_WEIGHT / 2, LARGEST_WEIGHT, count).to(cotangents)
        together = self.pull(torch.tensordot(weights, cotangents, 1))
        tolerance = LINEAR_TOLERANCE.get(self.value.dtype, OTHER_TOLERANCE)
        # Gradients that are only rounding errors add up to anything.
        rounding = ROUNDING * torch.finfo(cotangents.dtype).eps * _weighted(weights, cotangents)
        for pulled, whole in zip(found, together, strict=True):
            own = weights.to(pulled)
            missing = (whole - torch.tensordot(own, pulled, 1)).norm() - rounding
            difference = missing / _weighted(own, pulled).clamp(min=1e-300)
            # NaN passes: non-finite gradients are reported elsewhere.
            if not bool(difference > tolerance):
                continue
            raise UnsupportedOperationError(
                f"the backward of an autograd Function in {self.described} is not linear: for a "
                "weighted sum of gradients its result differs from the weighted sum of its results "
                f"for each by {float(difference):.1e}, relative to their norms. Expected a "
                "backward that multiplies the gradient by what the forward saved, and leaves that "
                "unchanged: clip or round gradients after the backward (parameter.register_hook), "
                f"or leave the parameters out by name with exclude={self.names!r}.",
                self.names,
            )


class FunctionStep(FunctionReplay):
    """The result of a custom autograd Function, computed again from one operand."""

    def __init__(self, node: Derived, parent: Node):
        self.value, known = node.step()
        self.leaves = [known[parent]]
        self.described, self.names = node.describe(), parent.names

    def slope(self, factor: Factor) -> Tensor | None:
        """Return the elementwise factor by which the backward multiplies gradients.

        None if it does anything else, which is tested on the sum of the gradients, on the first
        example's and on random numbers of their size, all with both signs.

        Args:
            factor: of the result.
        """
        (slope,) = self.pull(torch.ones_like(self.value))
        largest = LARGEST_WEIGHT * total([factor])
        # From a separate generator, to leave the user's as they are.
        numbers = torch.randn(largest.shape, generator=torch.Generator().manual_seed(0))
        numbers = numbers.to(largest) * largest.abs().max().nan_to_num(nan=1).clamp(min=1e-3)
        first = factor.select(slice(0, 1)).dense()[0]
        tolerance = 8 * torch.finfo(self.value.dtype).eps
        for trial in (largest, -largest, numbers, -numbers, first, -first):
            trial = trial.to(self.value)
            expected = slope * trial
            (found,) = self.pull(trial)
            near = (found - expected).abs() <= tolerance * expected.abs()
            if not bool(near.all()):
                return None
        return slope


class OneBackward(TorchFunctionMode):
    """Refuses a backward started inside a Function's backward.

    It would accumulate gradients once for each example, and might reach parameters unseen.
    """

    def __init__(self, replay: FunctionReplay):
        super().__init__()
        self.replay = replay

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func in (Tensor.backward, torch.autograd.backward):
            raise UnsupportedOperationError(
                f"an autograd Function in {self.replay.described} runs a backward of its own in "
                "its backward, which may reach parameters that were not seen, so that per-example "
                "gradients are not known. Expected torch.autograd.grad there, or "
                "torch.utils.checkpoint.checkpoint if it is there to save memory; otherwise leave "
                f"the parameters out by name with exclude={self.replay.names!r}.",
                self.replay.names,
            )
        # Not part of the user's step: other modes need not see it.
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))
