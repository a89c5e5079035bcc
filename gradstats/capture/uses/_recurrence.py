"""Recurrent cells, and backpropagation through time with known hidden states.

A layer's output is its hidden states. Given these, the gates of all steps are computed at once, and
each gate's gradient is its state's times a known factor. Only the gradients passed to previous
steps have to be computed step by step (Werbos 1990). On a GPU a single call of PyTorch's own layer
does all of this (see ``_gates``).

    Elman  h' = tanh(gate) or max(0, gate)
    Lstm   i, f, g, o = gates;  c' = σ(f)·c + σ(i)·tanh(g);  h' = σ(o)·tanh(c')
    Gru    r, z, n = gates;  n = tanh(n_x + σ(r)·n_h);  h' = n + σ(z)·(h − n)

(Elman 1990; Hochreiter & Schmidhuber 1997; Cho et al. 2014.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from gradstats._factors import cast, compute_dtype
from gradstats.capture.uses._gates import are_found_at_once, find_at_once
from gradstats.capture.uses._steps import States, Steps
from gradstats.contractions._multiply import linear, multiply, pays

# grad, y → grad · y (1 − y) and grad · (1 − y²)
sigmoid_backward = torch.ops.aten.sigmoid_backward.default
tanh_backward = torch.ops.aten.tanh_backward.default


class Cell(Protocol):
    """The gates of all steps, and how gradients pass them.

    Attributes:
        layer: PyTorch's function for layers of such cells.
        resets: whether the first gate scales what the hidden state contributes to the last.
        hidden: what the cell computes, before it is projected: (rows, H).
        inner, outer: once gradients have been passed back through every step, the gradients of
            what input and hidden state contributed to the gates: (rows, gates · H).
    """

    layer: Callable[..., tuple[Tensor, ...]]
    resets: bool
    hidden: Tensor
    inner: Tensor
    outer: Tensor

    def __init__(self, steps: Steps, inner: Tensor, outer: Tensor, before: Tensor, starts: States):
        """Take what input and hidden state contributed to the gates of all steps.

        Args:
            steps: the order of the rows.
            inner, outer: (rows, gates · H), which are overwritten.
            before: hidden states before each step, (rows, width).
            starts: the initial states.
        """

    @staticmethod
    def forward(inner: Tensor, outer: Tensor, states: States) -> States:
        """Return the states after one step; the contributions to the gates may be overwritten."""

    def back(self, step: int, grad: Tensor, others: States) -> tuple[Tensor, Tensor | None, States]:
        """Pass one step's gradients back.

        Args:
            step: its number.
            grad: the gradient of the hidden state before it is projected.
            others: the gradients of the other states.

        Returns:
            The gradient of ``outer`` at this step; the gradient that reaches the previous hidden
            state by other ways, or None; the gradients of the other previous states.
        """


class Elman:
    """One gate: h' = tanh(gate)."""

    layer = staticmethod(torch.rnn_tanh)
    resets = False

    def __init__(self, steps: Steps, inner: Tensor, outer: Tensor, before: Tensor, starts: States):
        [self.hidden] = self.forward(inner, outer, [])
        self.inner = self.outer = self._slope(outer)
        self._outer = steps.split(outer)

    @staticmethod
    def forward(inner: Tensor, outer: Tensor, states: States) -> States:
        return [inner.add_(outer).tanh_()]

    def back(self, step, grad, others):
        return self._outer[step].mul_(grad), None, []

    def _slope(self, outer: Tensor) -> Tensor:
        return outer.fill_(1).addcmul_(self.hidden, self.hidden, value=-1)


class Rectified(Elman):
    """One gate: h' = max(0, gate)."""

    layer = staticmethod(torch.rnn_relu)

    @staticmethod
    def forward(inner: Tensor, outer: Tensor, states: States) -> States:
        return [inner.add_(outer).relu_()]

    def _slope(self, outer: Tensor) -> Tensor:
        return outer.copy_(self.hidden > 0)


class Lstm:
    """i, f, g, o = gates;  c' = σ(f)·c + σ(i)·tanh(g);  h' = σ(o)·tanh(c')."""

    layer = staticmethod(torch.lstm)
    resets = False

    def __init__(self, steps: Steps, inner: Tensor, outer: Tensor, before: Tensor, starts: States):
        i, f, g, o = inner.add_(outer).chunk(4, 1)
        g = g.tanh()
        inner.sigmoid_()
        written, keeps = steps.split(i * g), steps.split(f)
        memory = torch.empty_like(g)
        memories = steps.split(memory)

        def write(step: int, states: States) -> States:
            return [torch.addcmul(written[step], keeps[step], states[0], out=memories[step])]

        steps.walk(starts[1:], write)
        shown = memory.tanh()
        self.hidden = o * shown
        # To be multiplied by the gradient of c' for the first three gates, of h' for the last.
        slopes = outer.unflatten(1, (4, -1))
        slopes[:, 0] = sigmoid_backward(g, i)
        slopes[:, 1] = sigmoid_backward(steps.before(memory, starts[1]), f)
        slopes[:, 2] = tanh_backward(i, g)
        slopes[:, 3] = sigmoid_backward(shown, o)
        self.inner = self.outer = outer
        self._outer = steps.split(outer)
        self._written, self._shown = steps.split(slopes[:, :3]), steps.split(slopes[:, 3])
        self._keeps = keeps
        self._reads = steps.split(tanh_backward(o, shown))  # ∂h'/∂c'

    @staticmethod
    def forward(inner: Tensor, outer: Tensor, states: States) -> States:
        i, f, g, o = (inner + outer).chunk(4, 1)
        memory = f.sigmoid_() * states[1] + i.sigmoid_() * g.tanh_()
        return [o.sigmoid_() * memory.tanh(), memory]

    def back(self, step, grad, others):
        memory = torch.addcmul(others[0], grad, self._reads[step])
        self._written[step].mul_(memory.unsqueeze(1))
        self._shown[step].mul_(grad)
        return self._outer[step], None, [memory.mul_(self._keeps[step])]


class Gru:
    """r, z, n = gates;  n = tanh(n_x + σ(r)·n_h);  h' = n + σ(z)·(h − n)."""

    layer = staticmethod(torch.gru)
    resets = True

    def __init__(self, steps: Steps, inner: Tensor, outer: Tensor, before: Tensor, starts: States):
        (r, z, n), (r_h, z_h, n_h) = inner.chunk(3, 1), outer.chunk(3, 1)
        r, z = r.add_(r_h).sigmoid_(), z.add_(z_h).sigmoid_()
        candidate = torch.addcmul(n, r, n_h).tanh_()
        difference = before - candidate
        self.hidden = torch.addcmul(candidate, z, difference)
        n.copy_(tanh_backward(1 - z, candidate))  # ∂h'/∂n_x
        slopes = outer.unflatten(1, (3, -1))
        slopes[:, 0] = sigmoid_backward(n * n_h, r)
        slopes[:, 1] = sigmoid_backward(difference, z)
        slopes[:, 2] = n * r
        self.outer, self._inner = outer, inner
        self._outer, self._slopes = steps.split(outer), steps.split(slopes)
        self._keeps, self._candidates = steps.split(z), steps.split(n)

    @property
    def inner(self) -> Tensor:
        gates = slice(2 * self.hidden.shape[1])
        self._inner[:, gates] = self.outer[:, gates]
        return self._inner

    @staticmethod
    def forward(inner: Tensor, outer: Tensor, states: States) -> States:
        (r, z, n), (r_h, z_h, n_h) = inner.chunk(3, 1), outer.chunk(3, 1)
        candidate = torch.addcmul(n, (r + r_h).sigmoid_(), n_h).tanh_()
        return [candidate + (z + z_h).sigmoid_() * (states[0] - candidate)]

    def back(self, step, grad, others):
        self._slopes[step].mul_(grad.unsqueeze(1))
        self._candidates[step].mul_(grad)
        return self._outer[step], grad * self._keeps[step], []


@dataclass(frozen=True)
class Passed:
    """The result of passing a layer's gradients back through all steps.

    Attributes:
        inner, outer: gradients of what input and hidden state contributed to the gates,
            (rows, gates · H).
        before: hidden states before each step, (rows, width).
        hidden, projected: what was projected, (rows, H), and the gradients of its projection,
            (rows, width); None without a projection.
        starts: gradients of the initial states.
    """

    inner: Tensor
    outer: Tensor
    before: Tensor
    hidden: Tensor | None
    projected: Tensor | None
    starts: States


@dataclass(frozen=True)
class Sweep:
    """One layer in one direction.

    Attributes:
        cell: what a step computes.
        steps: the order of its rows.
        from_input, from_state: W_ih (gates · H, d_in) and W_hh (gates · H, width), both in the
            dtype of the products; all data are in the accumulation dtype.
        input_bias, state_bias: b_ih and b_hh, or None for both.
        projection: W_hr (width, H); None where the hidden state is not projected.
    """

    cell: type[Cell]
    steps: Steps
    from_input: Tensor
    from_state: Tensor
    input_bias: Tensor | None
    state_bias: Tensor | None
    projection: Tensor | None

    def run(self, rows: Tensor, starts: States) -> Tensor:
        """Return the hidden state after each step, (rows, width).

        Args:
            rows: (rows, d_in).
            starts: the initial states, (sequences, width) each.
        """
        inner = self.steps.split(self._inner(rows))
        found = list(inner)

        def advance(step: int, states: States) -> States:
            after = self.cell.forward(inner[step], self._outer(states[0]), states)
            if self.projection is not None:
                after[0] = _product(after[0], self.projection.t())
            found[step] = after[0]
            return after

        self.steps.walk(starts, advance)
        return torch.cat(found)

    def pass_back(
        self, rows: Tensor, starts: States, after: Tensor | None, grad: Tensor | None, ends: States
    ) -> Passed:
        """Return the gradients of the gates of all steps.

        Args:
            rows, starts: as ``run`` takes them.
            after: what ``run`` returns; None where that is not known.
            grad: the gradient of ``after``; None where it has none.
            ends: gradients of the final states, (sequences, width) each.
        """
        if are_found_at_once(self, rows):
            inner = linear(cast(rows, self.from_input.dtype), self.from_input, self.input_bias)
            after, found, first = find_at_once(self, inner, starts, after, grad, ends)
            before = self.steps.before(after, starts[0])
            return Passed(
                found, self._outer_gradient(found, inner, before), before, None, None, first
            )
        if after is None:
            after = self.run(rows, starts)
        steps, projection = self.steps, self.projection
        before = steps.before(after, starts[0])
        cell = self.cell(steps, self._inner(rows), self._outer(before), before, starts)
        grads = None if grad is None else steps.split(grad)
        product = self._product_of_steps(starts[0].dtype)
        projected = list(steps.split(after))

        def advance(step: int, states: States) -> States:
            state, *others = states
            if grads is not None:
                state = state + grads[step]
            if projection is not None:
                projected[step] = state
                state = product(state, projection)
            gates, beside, others = cell.back(step, state, others)
            earlier = product(gates, self.from_state)
            return [earlier if beside is None else earlier.add_(beside), *others]

        first = steps.walk(ends, advance, back=True)
        if projection is None:
            return Passed(cell.inner, cell.outer, before, None, None, first)
        return Passed(cell.inner, cell.outer, before, cell.hidden, torch.cat(projected), first)

    def _product_of_steps(self, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the function that multiplies one step's rows, in a dtype, by W_hh or W_hr.

        Chosen once: steps may be so small that choosing takes as long as their operations.
        """
        product: Callable[[Tensor, Tensor], Tensor] = torch.mm
        work, count = self.steps.sizes[0] * self.from_state.numel(), len(self.steps.sizes)
        # Steps of different sizes would each need preparation.
        if self.steps.even and pays(work, self.from_state, times=count, on_rows=True):
            product = partial(multiply, times=count)
        return product if dtype == self.from_state.dtype else partial(_product, product=product)

    def data_gradient(self, passed: Passed) -> Tensor:
        """Return the gradient of the rows, (rows, d_in)."""
        return _product(passed.inner, self.from_input, multiply)

    def _outer_gradient(self, grad: Tensor, inner: Tensor, before: Tensor) -> Tensor:
        """Return the gradients of what the hidden state contributed, from those of the gates."""
        if not self.cell.resets:
            return grad
        width = before.shape[1]
        bias = None if self.state_bias is None else self.state_bias[:width]
        reset = (inner[:, :width] + _linear(before, self.from_state[:width], bias)).sigmoid_()
        return torch.cat([grad[:, :-width], grad[:, -width:] * reset], 1)

    def _inner(self, rows: Tensor) -> Tensor:
        return _linear(rows, self.from_input, self.input_bias)

    def _outer(self, states: Tensor) -> Tensor:
        return _linear(states, self.from_state, self.state_bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return cast(linear(cast(x, weight.dtype), weight, bias), compute_dtype(x))


def _product(x: Tensor, weight: Tensor, product: Callable[..., Tensor] = torch.mm) -> Tensor:
    return cast(product(cast(x, weight.dtype), weight), x.dtype)
