"""The gradients of all gates of a recurrent layer, from PyTorch's own backward of a layer.

If the input weight is the identity, a layer's input is added to the gates and has their gradient.
So a layer with that weight and the input W_ih x + b_ih yields the gradients of all steps in one
call. On a GPU, where cuDNN runs all steps in one kernel, that is one more forward and half a
backward of the layer instead of several kernels for each step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradstats._factors import cast
from gradstats.capture.uses._steps import States, Steps

if TYPE_CHECKING:
    from gradstats.capture.uses._recurrence import Sweep

# Devices on which one call is faster than a loop over the steps.
AT_ONCE_ON = frozenset({"cuda"})


def are_found_at_once(sweep: Sweep, rows: Tensor) -> bool:
    """Whether to compute the gradients of a layer's gates by one call."""
    # Sequences of different lengths cannot be reversed together.
    uneven = sweep.steps.reverse and not sweep.steps.even
    return rows.device.type in AT_ONCE_ON and sweep.projection is None and not uneven


def find_at_once(
    sweep: Sweep,
    inner: Tensor,
    starts: States,
    after: Tensor | None,
    grad: Tensor | None,
    ends: States,
) -> tuple[Tensor, Tensor, States]:
    """Return a layer's output, the gradients of its gates, and those of its initial states.

    Args:
        sweep: the layer.
        inner: what the input contributes to the gates, (rows, gates · H).
        starts, after, grad, ends: as ``Sweep.pass_back`` takes them.

    Returns:
        (rows, H), (rows, gates · H) and (sequences, H) each. The gradients of the gates are those
        of the input's contribution.

    Cost: one forward of the layer and a backward without weight gradients, each with a product of
    the gates with the identity.
    """
    weight, steps = sweep.from_state, sweep.steps
    weights = [torch.eye(len(weight), dtype=weight.dtype, device=weight.device), weight]
    if sweep.state_bias is not None:
        weights += [torch.zeros_like(sweep.state_bias), sweep.state_bias]
    with torch.enable_grad():
        read = _laid_out(steps, inner).detach().requires_grad_()
        states = [cast(s, weight.dtype)[None].detach().requires_grad_() for s in starts]
        output, *finals = _run(sweep, steps, read, states, weights)
    of_finals = [cast(end, weight.dtype)[None] for end in ends]
    results, grads = finals, of_finals
    if grad is not None:
        results, grads = [output, *finals], [_laid_out(steps, cast(grad, weight.dtype)), *of_finals]
    of_read, *of_states = torch.autograd.grad(results, [read, *states], grads)
    if after is None:
        after = _in_rows(steps, output.detach())
    return after, _in_rows(steps, of_read), [state[0] for state in of_states]


def _run(sweep: Sweep, steps: Steps, read: Tensor, states: States, weights: list[Tensor]) -> Any:
    """Run PyTorch's layer in training mode: otherwise cuDNN saves nothing for its backward."""
    sizes = () if steps.even else (torch.tensor(steps.sizes),)
    layout = (False,) if steps.even else ()
    options = sweep.state_bias is not None, 1, 0.0, True, False, *layout
    with weights_apart():
        return sweep.cell.layer(read, *sizes, as_given(states), weights, *options)


@contextmanager
def weights_apart() -> Iterator[None]:
    """Suppress PyTorch's warning about weights that do not lie in one block of memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part of single")
        yield


def as_given(states: Sequence[Tensor]) -> Any:
    """Return a layer's states as PyTorch takes them: a single one by itself."""
    return states if len(states) > 1 else states[0]


def _laid_out(steps: Steps, rows: Tensor) -> Tensor:
    """Return rows as the input of a PyTorch layer that reads forwards."""
    if not steps.even:
        return rows  # packed sequences, which are only read forwards here
    laid_out = rows.unflatten(0, (len(steps.sizes), -1))
    return laid_out.flip(0) if steps.reverse else laid_out


def _in_rows(steps: Steps, laid_out: Tensor) -> Tensor:
    """Return the output of such a layer as rows."""
    if not steps.even:
        return laid_out
    return (laid_out.flip(0) if steps.reverse else laid_out).flatten(0, 1)
