"""Recurrent layers and cells: Elman, LSTM (Hochreiter & Schmidhuber 1997), GRU (Cho et al. 2014).

A weight that T steps use is one use with T positions: PyTorch computes the layer, and in backward
it is computed again step by step, for the gradients of its gates.

Rows are what the steps read, one after the other: all examples' first step, all examples' second
step, and so on. Packed sequences are rows already, of which later steps have fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._factors import Factor
from gradstats.capture._dispatch import refuse
from gradstats.capture._examples import same_rows
from gradstats.capture._linear import bias_factor, outer_factor
from gradstats.capture._marks import leave_graph
from gradstats.capture._nodes import function_name
from gradstats.capture._recomputed import Site, recomputed
from gradstats.capture._sequences import RECURRENT_CELLS, RECURRENT_LAYERS, packed_places
from gradstats.capture._tensors import first_node, node_of
from gradstats.capture.rules._common import Examples, as_data, autocast_dtype, plain, rows_along
from gradstats.errors import ExampleAxisError


def lstm_step(inner: Tensor, outer: Tensor, state: list[Tensor]) -> list[Tensor]:
    """i, f, g, o = gates;  c' = σ(f)·c + σ(i)·tanh(g);  h' = σ(o)·tanh(c')."""
    i, f, g, o = (inner + outer).chunk(4, dim=1)
    memory = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return [o.sigmoid() * memory.tanh(), memory]


def gru_step(inner: Tensor, outer: Tensor, state: list[Tensor]) -> list[Tensor]:
    """n = tanh(n_x + σ(r)·n_h);  h' = n + σ(z)·(h − n)."""
    (reset, update, new), (reset_h, update_h, new_h) = inner.chunk(3, 1), outer.chunk(3, 1)
    candidate = (new + (reset + reset_h).sigmoid() * new_h).tanh()
    return [candidate + (update + update_h).sigmoid() * (state[0] - candidate)]


def tanh_step(inner: Tensor, outer: Tensor, state: list[Tensor]) -> list[Tensor]:
    """h' = tanh(x_gates + h_gates)."""
    return [(inner + outer).tanh()]


def relu_step(inner: Tensor, outer: Tensor, state: list[Tensor]) -> list[Tensor]:
    """h' = max(0, x_gates + h_gates)."""
    return [(inner + outer).relu()]


STEPS = {
    torch.lstm: lstm_step,
    torch.gru: gru_step,
    torch.rnn_tanh: tanh_step,
    torch.rnn_relu: relu_step,
    torch.lstm_cell: lstm_step,
    torch.gru_cell: gru_step,
    torch.rnn_tanh_cell: tanh_step,
    torch.rnn_relu_cell: relu_step,
}


@dataclass(frozen=True)
class Recurrence:
    """A stack of recurrent layers; tensors are data, the initial states, then all weights.

    Attributes:
        call: PyTorch's own, called as call(data, states, weights); returns all results.
        step: one step of the cell.
        states: 2 for an LSTM's hidden state and memory, else 1.
        layers, directions: how many.
        biases, projects: whether each layer has two biases, and a projection of its hidden state.
        form: how data and output are laid out: "rows", "steps" (T, B, width), "examples" (B, T,
            width), or "cell": one step, states (B, width), and no output but the states.
        sizes: number of examples in each step, not increasing.
        examples: the examples that stand in the places of a step, along axis 0.
        autocast: the dtype that autocast computes in, None where it is off.
    """

    call: Callable[[Tensor, list[Tensor], list[Tensor]], tuple[Tensor, ...]]
    step: Callable[[Tensor, Tensor, list[Tensor]], list[Tensor]]
    states: int
    layers: int
    directions: int
    biases: bool
    projects: bool
    form: str
    sizes: tuple[int, ...]
    examples: Examples
    autocast: torch.dtype | None

    def native(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        first = 1 + self.states
        return self.call(tensors[0], list(tensors[1:first]), list(tensors[first:]))

    def differentiate(
        self, grads: Sequence[Tensor | None], tensors: Sequence[Tensor], wanted: Sequence[bool]
    ) -> tuple[list[Tensor | None], list[Site]]:
        # Weights stay detached: their gradients are sums over all steps at once.
        leaves = [tensor.detach() for tensor in tensors]
        inputs = [i for i in range(1 + self.states) if wanted[i]]
        for i in inputs:
            leaves[i].requires_grad_()
        meetings: list[Meeting] = []
        enabled = self.autocast is not None
        device = tensors[0].device.type
        with torch.enable_grad(), torch.autocast(device, self.autocast, enabled, False):
            results = self._unroll(leaves, meetings)
        reached = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None]
        products = [product for meeting in meetings for product in meeting.products]
        found = torch.autograd.grad(
            [result for result, _ in reached],
            [*(leaves[i] for i in inputs), *products],
            [grad.to(result.dtype) for result, grad in reached],
            allow_unused=True,
            materialize_grads=True,
        )
        gradients: list[Tensor | None] = [None] * len(tensors)
        for i, gradient in zip(inputs, found, strict=False):
            gradients[i] = gradient
        rest = list(found[len(inputs) :])
        sites = []
        for meeting in meetings:
            left = torch.cat(rest[: len(meeting.products)])
            del rest[: len(meeting.products)]
            sites.append(Site(meeting.weight, left, torch.cat(meeting.inputs)))
            if meeting.bias is not None:
                sites.append(Site(meeting.bias, left, None))
        return gradients, sites

    def factor(self, site: Site) -> Factor:
        left = self._by_place(site.left)
        width = left.shape[-1]
        if site.right is None:
            return bias_factor(self.examples, left)
        right = self._by_place(site.right)
        return outer_factor(self.examples, left, right, (width, right.shape[-1]))

    def _unroll(self, tensors: Sequence[Tensor], meetings: list[Meeting]) -> tuple[Tensor, ...]:
        """Return the results, and note every product of a weight with data on the way to them."""
        data, *states = tensors[: 1 + self.states]
        if self.form == "cell":
            states = [state[None] for state in states]
        if self.form == "examples":
            data = data.transpose(0, 1)
        rows = data.flatten(0, 1) if data.dim() == 3 else data
        each = 2 + 2 * self.biases + self.projects
        slot = 1 + self.states
        finals: list[list[Tensor]] = []
        for layer in range(self.layers):
            outputs = []
            for direction in range(self.directions):
                initial = [state[layer * self.directions + direction] for state in states]
                slots = range(slot, slot + each)
                output, final = self._sweep(
                    rows, initial, tensors, slots, bool(direction), meetings
                )
                outputs.append(output)
                finals.append(final)
                slot += each
            rows = torch.cat(outputs, -1) if self.directions > 1 else outputs[0]
        if self.form == "cell":
            return tuple(finals[0])
        if self.form != "rows":
            rows = rows.unflatten(0, (len(self.sizes), -1))
        if self.form == "examples":
            rows = rows.transpose(0, 1)
        return (rows, *(torch.stack(column) for column in zip(*finals, strict=True)))

    def _sweep(
        self,
        rows: Tensor,
        initial: list[Tensor],
        tensors: Sequence[Tensor],
        slots: Sequence[int],
        backwards: bool,
        meetings: list[Meeting],
    ) -> tuple[Tensor, list[Tensor]]:
        """Run one layer in one direction; return its output rows and its final states."""
        biases = slots[2:4] if self.biases else (None, None)
        from_input = Meeting(slots[0], biases[0])
        from_state = Meeting(slots[1], biases[1])
        to_state = Meeting(slots[-1], None) if self.projects else None
        meetings += [from_input, from_state, *([] if to_state is None else [to_state])]
        gates = from_input.multiply(rows, tensors).split(self.sizes)
        steps = range(len(self.sizes))
        state = [start[: self.sizes[-1 if backwards else 0]] for start in initial]
        ended: list[list[Tensor]] = []
        outputs: list[Tensor] = []
        for t in reversed(steps) if backwards else steps:
            size, alive = self.sizes[t], len(state[0])
            if size < alive:
                ended.append([item[size:] for item in state])
                state = [item[:size] for item in state]
            elif size > alive:
                state = [
                    torch.cat([item, start[alive:size]])
                    for item, start in zip(state, initial, strict=True)
                ]
            state = self.step(gates[t], from_state.multiply(state[0], tensors), state)
            if to_state is not None:
                state[0] = to_state.multiply(state[0], tensors)
            outputs.append(state[0])
        if backwards:
            outputs.reverse()
            from_state.reverse()
            if to_state is not None:
                to_state.reverse()
        ended.append(state)
        finals = [torch.cat(parts) for parts in zip(*reversed(ended), strict=True)]
        return torch.cat(outputs), finals

    def _by_place(self, rows: Tensor) -> Tensor:
        """Return rows (R, width) as (places, T, width), zero where an example has ended."""
        steps, places = len(self.sizes), self.sizes[0]
        if self.sizes[-1] == places:
            return rows.view(steps, places, -1).transpose(0, 1)
        sizes = torch.tensor(self.sizes, device=rows.device)
        starts = sizes.cumsum(0) - sizes
        place = torch.arange(places, device=rows.device)[:, None]
        gathered = rows[torch.where(place < sizes, starts + place, 0)]
        return gathered.masked_fill_((place >= sizes).unsqueeze(-1), 0)


@dataclass(frozen=True)
class Meeting:
    """The products of one weight with data, step by step.

    Attributes:
        weight, bias: positions of the operands.
        products, inputs: what came out, and what went in.
    """

    weight: int
    bias: int | None
    products: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)

    def multiply(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        bias = None if self.bias is None else tensors[self.bias]
        result = functional.linear(x, tensors[self.weight], bias)
        if not result.requires_grad:
            result.requires_grad_()
        self.products.append(result)
        self.inputs.append(x.detach())
        return result

    def reverse(self) -> None:
        self.products.reverse()
        self.inputs.reverse()


def layers(tracker, func, *args):
    """A stack of layers, on data of shape (T, B, d) or (B, T, d), or on packed rows."""
    if isinstance(args[3], (list, tuple)):
        return _packed(tracker, func, *args)
    return _padded(tracker, func, *args)


def _padded(
    tracker, func, input, hx, weights, bias, count, dropout, training, bidirectional, batch_first
):
    states = _listed(hx)
    node = first_node(input, *states, *weights)
    if input.dim() != 3:
        refuse(func, node, f"of an input of shape {tuple(input.shape)} has no rule")
    axis = 0 if batch_first else 1
    examples = rows_along(tracker, func, node, (input,), axis).along(0)
    data = as_data(tracker, func, node, input, examples.along(axis))
    form = "examples" if batch_first else "steps"
    sizes = (examples.rows,) * data.shape[1 - axis]
    drops = dropout if training else 0.0
    return _stack(
        tracker, func, data, (), states, weights, bias, count, drops, bidirectional, form, sizes,
        examples,
    )  # fmt: skip


def _packed(
    tracker, func, data, batch_sizes, hx, weights, bias, count, dropout, training, bidirectional
):
    states = _listed(hx)
    node = first_node(data, *states, *weights)
    examples = packed_places(tracker, data, batch_sizes) if node_of(data) is None else None
    if examples is None:
        raise ExampleAxisError(
            f"{function_name(func)} on {node.describe()}: got packed rows of which it is not known "
            "whose they are, expected the result of torch.nn.utils.rnn.pack_padded_sequence on "
            "data with their examples along batch_dim. Pack inside the context, or leave the "
            "parameter out by name with exclude=."
        )
    drops = dropout if training else 0.0
    return _stack(
        tracker, func, data, (batch_sizes,), states, weights, bias, count, drops, bidirectional,
        "rows", tuple(batch_sizes.tolist()), examples,
    )  # fmt: skip


def _stack(
    tracker, func, data, rows, states, weights, bias, count, dropout, bidirectional, form, sizes,
    examples,
):  # fmt: skip
    """Run all layers as one operation, or one by one where random dropout stands between them."""
    node = first_node(data, *states, *weights)
    given = rows_along(tracker, func, node, states, 1)
    if any(node_of(s) is None and tracker.is_data(s) for s in states):
        if not same_rows(given, examples):
            refuse(func, node, "with initial states in another order than the data has no rule")
    states = [as_data(tracker, func, node, state, examples.along(1)) for state in states]
    single = dropout == 0 or count == 1
    layout = () if form == "rows" else (form == "examples",)
    directions = 1 + bool(bidirectional)
    each = len(weights) // (count * directions)

    def call(data, states, weights):
        options = (bias, count if single else 1, 0.0, dropout > 0, bidirectional, *layout)
        return func(data, *rows, _unlisted(states), weights, *options)

    finals = []
    for number in range(1 if single else count):
        own = slice(None) if single else slice(number * directions, (number + 1) * directions)
        parts = weights if single else weights[own.start * each : own.stop * each]
        operation = Recurrence(
            call=call,
            step=STEPS[func],
            states=len(states),
            layers=count if single else 1,
            directions=directions,
            biases=bool(bias),
            projects=each % 2 == 1,
            form=form,
            sizes=sizes,
            examples=examples,
            autocast=autocast_dtype(data),
        )
        data, *final = _attach(tracker, func, operation, data, [s[own] for s in states], parts)
        finals.append(final)
        if number < count - 1 and not single:
            data = functional.dropout(data, dropout)
    return (data, *(torch.cat(column) for column in zip(*finals, strict=True)))


def cell(tracker, func, input, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    """One step on data of shape (B, d)."""
    states = _listed(hx)
    weights = [item for item in (w_ih, w_hh, b_ih, b_hh) if item is not None]
    node = first_node(input, *states, *weights)
    examples = rows_along(tracker, func, node, (input, *states), 0)
    data, *states = (as_data(tracker, func, node, item, examples) for item in (input, *states))

    def call(data, states, weights):
        result = func(data, _unlisted(states), *weights)
        return result if isinstance(result, tuple) else (result,)

    operation = Recurrence(
        call=call,
        step=STEPS[func],
        states=len(states),
        layers=1,
        directions=1,
        biases=b_ih is not None,
        projects=False,
        form="cell",
        sizes=(examples.rows,),
        examples=examples,
        autocast=autocast_dtype(data),
    )
    results = _attach(tracker, func, operation, data, states, weights)
    return results if len(states) > 1 else results[0]


def _attach(tracker, func, operation, data, states, weights):
    """Run the operation with the factors of its tracked weights attached."""
    tensors = [data, *states, *map(plain, weights)]
    nodes = {1 + len(states) + i: node_of(item) for i, item in enumerate(weights)}
    tracked = {slot: node for slot, node in nodes.items() if node is not None}
    if not tracked:
        return operation.native(*tensors)
    leave_graph(f"{function_name(func)}, which backward takes apart")
    return recomputed(tracker, list(tracked.values()), tuple(tracked), operation, *tensors)


def _listed(hx) -> list[Tensor]:
    return list(hx) if isinstance(hx, (list, tuple)) else [hx]


def _unlisted(states: list[Tensor]):
    return states if len(states) > 1 else states[0]


RULES = {
    **dict.fromkeys(RECURRENT_LAYERS, layers),
    **dict.fromkeys(RECURRENT_CELLS, cell),
}
