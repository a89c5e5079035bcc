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

# Gradients are multiplied by up to this factor to check whether a backward is linear: those of
# losses averaged over a batch are smaller by about as much, and a backward that clips might leave
# them as they are.
LARGEST_WEIGHT = 1024

# Differences of up to this many units of rounding of the gradients count as rounding.
ROUNDING = 8

# PyTorch's message for a backward that cannot be differentiated.
NO_DERIVATIVE = re.compile("derivative for .* is not implemented")


class Replay:
    """A derived tensor computed again from roots, which can be differentiated repeatedly.

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
            # Preparing a batch of gradients takes longer than many a backward.
            return [pulled.unsqueeze(0) for pulled in self.pull(cotangents[0])]
        try:
            # Anomaly detection cannot look for NaN in a batch of gradients.
            with torch.autograd.set_detect_anomaly(False):
                return self._pull(cotangents, cotangents.shape[:1])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # some backwards take no batch of gradients, as a sparse product's
            return self._pull_in_turn(cotangents)

    def _pull_in_turn(self, cotangents: Tensor) -> list[Tensor]:
        columns = zip(*map(self.pull, cotangents), strict=True)
        return [torch.stack(column) for column in columns]

    def pull(self, cotangent: Tensor) -> list[Tensor]:
        """Return the roots' gradients, given one gradient of the derived tensor."""
        return self._pull(cotangent.to(self.value), ())

    def _pull(self, cotangents: Tensor, batch: Sequence[int]) -> list[Tensor]:
        """Return the roots' gradients.

        Args:
            cotangents: (*batch, *) of the derived tensor.
            batch: (B,) or ().
        """
        options = {"retain_graph": True, "allow_unused": True, "is_grads_batched": bool(batch)}
        found = torch.autograd.grad(self.value, self.leaves, cotangents, **options)
        return self._filled(found, batch)

    def _filled(
        self, gradients: Sequence[Tensor | None], batch: Sequence[int] = ()
    ) -> list[Tensor]:
        """Return the leaves' gradients (*batch, *), dense and in the accumulation dtype.

        Some may be missing, as of the sign of a determinant, and an embedding's may be sparse.
        """
        filled: list[Tensor] = []
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            if gradient is None:
                gradient = leaf.new_zeros(*batch, *leaf.shape)
            dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
            filled.append(dense.to(compute_dtype(dense)))
        return filled

    def push(self, direction: Tensor) -> Tensor | None:
        """Return how the derived tensor changes when its only root changes by ``direction``.

        This is the derivative of ``pull``, which is linear in its cotangent. None if PyTorch cannot
        differentiate an operation's backward (fused attention), if that is zero for every cotangent
        (``sign``), if the result is not finite, or if a backward is not that of its operation
        (``scale_grad_by_freq``).
        """
        if not self.value.numel():
            # As the rows of a table without indices, whose backward may not be differentiable.
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
        effective = direction.to(pulled).where(pulled != 0, 0)
        difference = (effective * pulled).sum() - pushed.square().sum()
        allowed = _tolerance(self.value.dtype) * effective.norm() * pulled.norm()
        return bool(difference.abs() <= allowed)


def _tolerance(dtype: torch.dtype) -> float:
    """Return how far a backward may be from linear, relative to the norms of its results.

    It may compute in a lower precision than their dtype suggests.
    """
    return 1e-6 if dtype == torch.float64 else 2e-2


def _weighted(weights: Tensor, gradients: Tensor) -> Tensor:
    """Return the weighted sum of the norms of gradients (B, *)."""
    return (weights * gradients.reshape(len(gradients), -1).norm(dim=1)).sum()


class FunctionReplay(Replay):
    """A replay that passes through a custom autograd Function.

    The Function's backward runs as autograd runs it, for one gradient at a time: it need neither
    support batches of gradients nor be differentiable.
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
            # torch.autograd.grad would disable the mode.
            found = torch.autograd.Variable._execution_engine.run_backward(
                (self.value,),
                (given,),
                True,  # keep the graph
                False,  # create none
                tuple(self.leaves),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        return self._filled(found)

    def _check_linear(self, cotangents: Tensor, found: Sequence[Tensor]) -> None:
        """Raise unless the backward of a weighted sum is the weighted sum of the backwards.

        Otherwise the examples' gradients would not add up to the batch's, and would depend on the
        scale of the losses.
        """
        count = len(cotangents)
        weights = torch.linspace(LARGEST_WEIGHT / 2, LARGEST_WEIGHT, count).to(cotangents)
        together = self.pull(torch.tensordot(weights, cotangents, 1))
        tolerance = _tolerance(self.value.dtype)
        # Gradients that are nothing but rounding errors add up to anything.
        rounding = ROUNDING * torch.finfo(cotangents.dtype).eps * _weighted(weights, cotangents)
        for pulled, whole in zip(found, together, strict=True):
            cast_weights = weights.to(pulled)
            missing = (whole - torch.tensordot(cast_weights, pulled, 1)).norm() - rounding
            difference = missing / _weighted(cast_weights, pulled).clamp(min=1e-300)
            # NaN passes: non-finite gradients are reported elsewhere.
            if not bool(difference > tolerance):
                continue
            raise UnsupportedOperationError(
                f"the backward of an autograd Function in {self.described} is not linear: its "
                "result for a weighted sum of gradients differs from the weighted sum of its "
                f"results by {float(difference):.1e}, relative to their norms. Expected a backward "
                "that multiplies the gradient by what the forward saved: clip or round gradients "
                "after the backward (parameter.register_hook), or leave the parameters out by "
                f"name with exclude={self.names!r}.",
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

        None if it does anything else. It is tested on the sum of the gradients, on the first
        example's and on random numbers of their size, each with both signs.

        Args:
            factor: of the result.
        """
        (slope,) = self.pull(torch.ones_like(self.value))
        largest = LARGEST_WEIGHT * total([factor])
        # A separate generator leaves the user's as they are.
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
                f"an autograd Function in {self.replay.described} starts another backward in its "
                "backward, which may reach parameters that were not seen. Expected "
                "torch.autograd.grad there, or torch.utils.checkpoint.checkpoint if the Function "
                "is to save memory; otherwise leave the parameters out by name with "
                f"exclude={self.replay.names!r}.",
                self.replay.names,
            )
        # Not part of the user's step: other modes need not see it.
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))
