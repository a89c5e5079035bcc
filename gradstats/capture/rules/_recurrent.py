"""Recurrent layers and cells: Elman, LSTM and GRU.

A weight that T steps use is one use with T positions: PyTorch computes the layer, and the backward
finds the gradients of the gates of all steps (``_recurrence``).

Rows are the inputs of all steps in order: first those of all examples at the first step, then those
at the second, and so on. Packed sequences are such rows already, with fewer at later steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._factors import Factor, cast, compute_dtype
from gradstats.capture.following._examples import Examples, same_rows
from gradstats.capture.following._sequences import (
    RECURRENT_CELLS,
    RECURRENT_LAYERS,
    packed_places,
    states_of,
    telling_states,
)
from gradstats.capture.operations._names import function_name
from gradstats.capture.parameters._nodes import unique_roots
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import first_node, node_of, nodes_of, value_of
from gradstats.capture.rules._common import are_of_one, as_data, product_dtype, rows_along
from gradstats.capture.uses._gates import as_given, weights_apart
from gradstats.capture.uses._layer import bias_factor
from gradstats.capture.uses._linear import outer_factor
from gradstats.capture.uses._recomputed import Site, recomputed
from gradstats.capture.uses._recurrence import (
    Cell,
    Elman,
    Gru,
    Lstm,
    Passed,
    Rectified,
    Sweep,
)
from gradstats.capture.uses._steps import States, Steps
from gradstats.errors import ExampleAxisError

if TYPE_CHECKING:
    from gradstats.capture._context import Context

CELLS: dict[Callable, Any] = {
    torch.lstm: Lstm,
    torch.gru: Gru,
    torch.rnn_tanh: Elman,
    torch.rnn_relu: Rectified,
    torch.lstm_cell: Lstm,
    torch.gru_cell: Gru,
    torch.rnn_tanh_cell: Elman,
    torch.rnn_relu_cell: Rectified,
}


@dataclass(frozen=True)
class Recurrence:
    """A recurrent layer; tensors are data, the initial states, then all weights.

    Attributes:
        call: PyTorch's own, called as call(data, states, weights); returns all results.
        cell: what a step computes.
        states: 2 for an LSTM's hidden state and memory, else 1.
        directions: how many.
        biases, projects: whether it has two biases, and a projection of its hidden state.
        form: how data and output are laid out: "rows", "steps" (T, B, width), "examples" (B, T,
            width), or "cell": one step, states (B, width), and no output but the states.
        sizes: number of examples at each step, not increasing.
        examples: the examples at the places of a step, along axis 0.
        dtype: of the products.
    """

    call: Callable[[Tensor, list[Tensor], list[Tensor]], tuple[Tensor, ...]]
    cell: type[Cell]
    states: int
    directions: int
    biases: bool
    projects: bool
    form: str
    sizes: tuple[int, ...]
    examples: Examples
    dtype: torch.dtype

    def native(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return PyTorch's own results."""
        first = 1 + self.states
        return self.call(tensors[0], list(tensors[1:first]), list(tensors[first:]))

    def differentiate(
        self,
        grads: Sequence[Tensor | None],
        output: Tensor | None,
        tensors: Sequence[Tensor],
        wanted: Sequence[bool],
    ) -> tuple[list[Tensor | None], list[Site]]:
        """Return the gradients of the data that are wanted, and the sites of all weights.

        Args:
            grads: of the results.
            output: the first result; None where it was not kept.
            tensors: the operands.
            wanted: for each of them, whether its gradient is wanted.
        """
        rows, states = self._rows(tensors[0]), tensors[1 : 1 + self.states]
        of_output, *of_states = (None, *grads) if self.form == "cell" else grads
        from_output = None if of_output is None else self._rows(of_output)
        ends = [
            torch.zeros_like(state) if grad is None else grad
            for state, grad in zip(states, of_states, strict=True)
        ]
        of_rows: Tensor | None = None
        starts: list[States] = []
        sites: list[Site] = []
        for side in range(self.directions):
            sweep, first = self._sweep(tensors, side), self._of_side(states, side)
            after = None if output is None else self._half(self._rows(output), side)
            grad = None if from_output is None else self._half(from_output, side)
            passed = sweep.pass_back(rows, first, after, grad, self._of_side(ends, side))
            starts.append(passed.starts)
            sites += self._sites(side, passed, rows)
            if wanted[0]:
                part = sweep.data_gradient(passed)
                of_rows = part if of_rows is None else of_rows + part
        gradients: list[Tensor | None] = [None] * len(tensors)
        if of_rows is not None:
            gradients[0] = self._laid_out(of_rows).to(tensors[0].dtype)
        for i, (state, parts) in enumerate(zip(states, zip(*starts, strict=True), strict=True), 1):
            if wanted[i]:
                whole = parts[0] if self.form == "cell" else torch.stack(parts)
                gradients[i] = whole.to(state.dtype)
        return gradients, sites

    def factor(self, site: Site) -> Factor:
        """Return the factor of the weight at a site."""
        left = self._by_place(site.left)
        width = left.shape[-1]
        if site.right is None:
            return bias_factor(self.examples, left)
        right = self._by_place(site.right)
        return outer_factor(self.examples, left, right, (width, right.shape[-1]))

    def _slots(self, side: int) -> list[int | None]:
        """Return the places of a direction's W_ih, W_hh, b_ih, b_hh and W_hr among the tensors."""
        each = 2 + 2 * self.biases + self.projects
        first = 1 + self.states + side * each
        biases = [first + 2, first + 3] if self.biases else [None, None]
        return [first, first + 1, *biases, first + each - 1 if self.projects else None]

    def _sweep(self, tensors: Sequence[Tensor], side: int) -> Sweep:
        weights: list[Any] = [
            None if slot is None else cast(tensors[slot], self.dtype) for slot in self._slots(side)
        ]
        return Sweep(self.cell, Steps(self.sizes, side == 1), *weights)

    def _sites(self, side: int, passed: Passed, rows: Tensor) -> list[Site]:
        gradients = passed.inner, passed.outer, passed.inner, passed.outer, passed.projected
        inputs = rows, passed.before, None, None, passed.hidden
        return [
            Site(slot, cast(left, self.dtype), None if right is None else cast(right, self.dtype))
            for slot, left, right in zip(self._slots(side), gradients, inputs, strict=True)
            if slot is not None and left is not None
        ]

    def _half(self, rows: Tensor, side: int) -> Tensor:
        """Return a direction's part of the output."""
        return rows.chunk(self.directions, 1)[side]

    def _of_side(self, states: Sequence[Tensor], side: int) -> States:
        """Return a direction's states, in the accumulation dtype."""
        chosen = states if self.form == "cell" else [state[side] for state in states]
        return [cast(state, compute_dtype(state)) for state in chosen]

    def _rows(self, tensor: Tensor) -> Tensor:
        """Return data or output as rows, in the accumulation dtype."""
        if self.form == "examples":
            tensor = tensor.transpose(0, 1)
        rows = tensor.flatten(0, 1) if tensor.dim() == 3 else tensor
        return cast(rows, compute_dtype(rows))

    def _laid_out(self, rows: Tensor) -> Tensor:
        """Return rows as the data are laid out."""
        if self.form in ("rows", "cell"):
            return rows
        steps = rows.unflatten(0, (len(self.sizes), -1))
        return steps.transpose(0, 1) if self.form == "examples" else steps

    def _by_place(self, rows: Tensor) -> Tensor:
        """Return rows (R, width) as (places, T, width), zero where an example has ended."""
        steps, places = len(self.sizes), self.sizes[0]
        if self.sizes[-1] == places:
            return rows.view(steps, places, rows.shape[1]).transpose(0, 1)
        sizes = torch.tensor(self.sizes, device=rows.device)
        starts = sizes.cumsum(0) - sizes
        place = torch.arange(places, device=rows.device)[:, None]
        gathered = rows[torch.where(place < sizes, starts + place, 0)]
        return gathered.masked_fill_((place >= sizes).unsqueeze(-1), 0)


def layers(tracker: Context, func, *args):
    """A stack of layers, on data of shape (T, B, d) or (B, T, d), or on packed rows."""
    if isinstance(args[3], (list, tuple)):
        return _packed(tracker, func, *args)
    return _padded(tracker, func, *args)


def _padded(tracker: Context, func, input, hx, weights, *options):
    *shared, batch_first = options
    states = states_of(hx)
    node = first_node(input, *states, *weights)
    axis = 0 if batch_first else 1
    operands, place = [input], axis
    if not tracker.marks.is_of_data(input):
        # Steps of no example are those of the examples of the states.
        operands, place = telling_states(tracker.marks, hx), 1
    examples = rows_along(tracker, func, node, operands, place).along(0)
    data = as_data(tracker, func, node, input, examples.along(axis))
    form = "examples" if batch_first else "steps"
    sizes = (examples.rows,) * data.shape[1 - axis]
    return _stack(tracker, func, node, data, (), states, weights, shared, form, sizes, examples)


def _packed(tracker: Context, func, data, batch_sizes, hx, weights, *options):
    states = states_of(hx)
    node = first_node(data, *states, *weights)
    examples = packed_places(tracker.marks, data, batch_sizes) if node_of(data) is None else None
    if examples is None:
        tracked = nodes_of((data, *states, *weights))
        raise ExampleAxisError(
            f"{function_name(func)} on {node.describe()}: got packed rows that belong to unknown "
            "examples, expected the result of torch.nn.utils.rnn.pack_padded_sequence on data "
            "whose examples lie along batch_dim. Pack inside the context, or leave the parameter "
            "out by name with exclude=.",
            [root.name for root in unique_roots(tracked)],
        )
    rows, sizes = (batch_sizes,), tuple(batch_sizes.tolist())
    form = "rows"
    return _stack(tracker, func, node, data, rows, states, weights, options, form, sizes, examples)


def _stack(
    tracker: Context, func, node, data, rows, states, weights, options, form, sizes, examples
):
    """Run the layers one by one, so that the result of each is known."""
    bias, count, dropout, training, bidirectional = options
    _check_weights(tracker, func, node, data, weights)
    # Only trained states can carry gradients from one example to another. Others, such as those of
    # the batch before, may lie along any axis.
    trained = list(filter(tracker.marks.is_trained, states))
    if trained and not same_rows(rows_along(tracker, func, node, trained, 1), examples):
        refuse(func, node, "with initial states in another order than the data has no rule")
    states = [as_data(tracker, func, node, state, examples.along(1)) for state in states]
    layout = () if form == "rows" else (form == "examples",)
    directions = 1 + bool(bidirectional)
    each = len(weights) // count

    def call(trains, data, states, weights):
        options = (bias, 1, 0.0, trains, bidirectional, *layout)
        # On a GPU PyTorch warns if one layer's weights are a part of a larger block.
        with weights_apart() if count > 1 and data.is_cuda else nullcontext():
            return func(data, *rows, as_given(states), weights, *options)

    finals = []
    for number in range(count):
        if number > 0 and training and dropout > 0:
            data = functional.dropout(data, dropout)
        layer_states = [state[number * directions : (number + 1) * directions] for state in states]
        layer_weights = weights[number * each : (number + 1) * each]
        # Only in training mode does cuDNN keep what its own backward needs.
        differentiated = tracker.settings.exact or all(node_of(w) is None for w in layer_weights)
        operation = Recurrence(
            call=partial(call, training and differentiated),
            cell=CELLS[func],
            states=len(states),
            directions=directions,
            biases=bool(bias),
            projects=each // directions % 2 == 1,
            form=form,
            sizes=sizes,
            examples=examples,
            dtype=product_dtype(data),
        )
        data, *final = _attach(tracker, operation, data, layer_states, layer_weights)
        finals.append(final)
    return (data, *(torch.cat(column) for column in zip(*finals, strict=True)))


def cell(tracker: Context, func, input, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    """One step on data of shape (B, d)."""
    states = states_of(hx)
    weights = [item for item in (w_ih, w_hh, b_ih, b_hh) if item is not None]
    node = first_node(input, *states, *weights)
    _check_weights(tracker, func, node, input, weights)
    examples = rows_along(tracker, func, node, (input, *states), 0)
    data, *states = (as_data(tracker, func, node, item, examples) for item in (input, *states))

    def call(data, states, weights):
        result = func(data, as_given(states), *weights)
        return result if isinstance(result, tuple) else (result,)

    operation = Recurrence(
        call=call,
        cell=CELLS[func],
        states=len(states),
        directions=1,
        biases=b_ih is not None,
        projects=False,
        form="cell",
        sizes=(examples.rows,),
        examples=examples,
        dtype=product_dtype(data),
    )
    results = _attach(tracker, operation, data, states, weights)
    return results if len(states) > 1 else results[0]


def _check_weights(tracker: Context, func, node, data: Tensor, weights: Sequence[Tensor]) -> None:
    """Raise if weights were computed from data, unless all of it is the same single example's."""
    trained = [item for item in weights if tracker.marks.is_trained(item)]
    rows = [data] if node_of(data) is None else []
    if trained and not are_of_one(tracker, [*trained, *rows]):
        refuse(func, node, "with weights that were computed from other examples has no rule")


def _attach(tracker: Context, operation, data, states, weights):
    """Run the operation with the factors of its tracked weights attached."""
    tensors = [data, *states, *map(value_of, weights)]
    slots = dict(enumerate(weights, 1 + len(states)))
    tracked = tuple([slot for slot, item in slots.items() if node_of(item) is not None])
    if not tracked:
        return operation.native(*tensors)
    trained = tuple([slot for slot, item in slots.items() if tracker.marks.is_trained(item)])
    return recomputed(nodes_of(weights), tracked, trained, operation, *tensors)


RULES = {
    **dict.fromkeys(RECURRENT_LAYERS, layers),
    **dict.fromkeys(RECURRENT_CELLS, cell),
}
