"""Recurrent layers and cells in every form of torch.nn, packed sequences included."""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import gradstats as gs
from gradstats.capture.rules import _recurrent
from gradstats.capture.uses import _gates, _recurrence
from gradstats.capture.uses._recomputed import Kept
from tests.oracle import assert_sqnorms, check_model, oracle_on_the_batch, oracle_sqnorms
from tests.rules.operation import Operation, check_operation, check_refused, normal, uneven_loss

BATCH, WIDTH, HIDDEN = 3, 4, 5

LAYERS = {
    "lstm": lambda **o: nn.LSTM(WIDTH, HIDDEN, **o),
    "gru": lambda **o: nn.GRU(WIDTH, HIDDEN, **o),
    "tanh": lambda **o: nn.RNN(WIDTH, HIDDEN, **o),
    "relu": lambda **o: nn.RNN(WIDTH, HIDDEN, nonlinearity="relu", **o),
}

FORMS = {
    "plain": {},
    "sequence first": {"batch_first": False},
    "two layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True},
    "no bias": {"bias": False},
    "as many layers as examples": {"num_layers": BATCH, "bias": False},
    "two layers, bidirectional, no bias, sequence first": {
        "num_layers": 2,
        "bidirectional": True,
        "bias": False,
        "batch_first": False,
    },
}


def check(function, parameters, *data, loss_fn=uneven_loss, **options):
    """Compare with the oracle, all of the parameters trained."""
    check_model(Operation(function, parameters, upstream=True), data, loss_fn, **options)


def final_state(result):
    """Return the last layer's final hidden state, (B, width)."""
    state = result[1]
    return state[0][-1] if isinstance(state, tuple) else state[-1]


@pytest.fixture
def at_once(monkeypatch):
    """Have gates' gradients found by one call, as on a GPU; holds how many calls there were."""
    calls = []

    def spy(*args):
        calls.append(args)
        return _gates.find_at_once(*args)

    monkeypatch.setattr(_gates, "AT_ONCE_ON", {"cpu"})
    monkeypatch.setattr(_recurrence, "find_at_once", spy)
    return calls


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind, form):
    form = {"batch_first": True, **form}
    layer = LAYERS[kind](**form)

    def function(m, x):
        result = m.layer(x if form["batch_first"] else x.transpose(0, 1))
        output = result[0] if form["batch_first"] else result[0].transpose(0, 1)
        return torch.cat([output.flatten(1), final_state(result)], 1)

    for positions in (1, BATCH):
        check(function, {"layer": layer}, normal(BATCH, positions, WIDTH))


@pytest.mark.parametrize("kind", LAYERS)
def test_weights_frozen_in_turn(kind):
    layer = LAYERS[kind](batch_first=True)
    check_operation(lambda m, x: m.layer(x)[0], {"layer": layer}, normal(BATCH, 2, WIDTH))


@pytest.mark.parametrize("form", [{}, {"num_layers": 2, "bidirectional": True}])
def test_projections(form):
    layer = nn.LSTM(WIDTH, HIDDEN, proj_size=2, batch_first=True, **form)

    def function(m, x):
        output, (hidden, memory) = m.layer(x)
        return torch.cat([output.flatten(1), hidden[-1], memory[0]], 1)

    check(function, {"layer": layer}, normal(BATCH, 4, WIDTH))


@pytest.mark.parametrize("kind", LAYERS)
def test_initial_states(kind):
    """Made from data, and trained, the same for every example."""
    layer = LAYERS[kind](num_layers=2, batch_first=True)
    states = 2 if kind == "lstm" else 1

    def function(m, x):
        made = [torch.stack([m.start(x[:, 0]), m.start(x[:, 1])]).tanh() for _ in range(states)]
        learned = [m.hidden.unsqueeze(1).expand(-1, BATCH, -1) for _ in range(states)]
        total = 0
        for state in (made, learned):
            output, _ = m.layer(x, tuple(state) if states > 1 else state[0])
            total = total + output
        return total

    parameters = {"layer": layer, "start": nn.Linear(WIDTH, HIDDEN), "hidden": (2, HIDDEN)}
    check(function, parameters, normal(BATCH, 4, WIDTH))


@pytest.mark.parametrize(("kind", "training"), [("lstm", True), ("gru", True), ("gru", False)])
def test_dropout_between_layers(kind, training):
    layer = LAYERS[kind](num_layers=3, dropout=0.4, batch_first=True, bidirectional=True)
    layer.train(training)

    def losses(model, batch):
        torch.manual_seed(3)
        return uneven_loss(model, batch)

    def function(m, x):
        result = m.layer(x)
        return torch.cat([result[0].flatten(1), final_state(result)], 1)

    check(function, {"layer": layer}, normal(BATCH, 4, WIDTH), loss_fn=losses)


PICKS = {
    "one step's output": lambda result: result[0][:, 0],
    "one hidden state": lambda result: result[1][0][0],
    "one memory": lambda result: result[1][1][1],
}


@pytest.mark.parametrize("pick", PICKS.values(), ids=PICKS)
def test_results_that_the_loss_leaves_out(pick):
    layer = nn.LSTM(WIDTH, HIDDEN, 2, batch_first=True)
    check(lambda m, x: pick(m.layer(x)), {"layer": layer}, normal(BATCH, 4, WIDTH))


@pytest.mark.parametrize("form", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("kind", LAYERS)
def test_results_changed_in_place(kind, form):
    """Backward needs the hidden states, which are the output: it computes them again."""
    layer = LAYERS[kind](batch_first=True, **form)
    check(lambda m, x: m.layer(x)[0].mul_(0.5), {"layer": layer}, normal(BATCH, 4, WIDTH))


@pytest.mark.parametrize("kind", LAYERS)
def test_gates_at_once(kind, at_once):
    """Two directions and layers, with and without biases, and all their results."""
    for bias in (True, False):
        layer = LAYERS[kind](batch_first=True, num_layers=2, bidirectional=True, bias=bias)

        def function(m, x):
            output, states = m.layer(x)
            states = torch.stack(states) if kind == "lstm" else states
            return torch.cat([output.flatten(1), states.transpose(-2, 0).flatten(1)], 1)

        at_once.clear()
        check(function, {"layer": layer}, normal(BATCH, 4, WIDTH))
        assert at_once and len(at_once) % 4 == 0


@pytest.mark.parametrize("kind", LAYERS)
def test_gates_at_once_without_the_output(kind, at_once):
    """Where it was changed in place, or the loss leaves it out; weights frozen in turn."""
    layer = LAYERS[kind](batch_first=True)
    check(lambda m, x: m.layer(x)[0].mul_(0.5), {"layer": layer}, normal(BATCH, 4, WIDTH))
    check(lambda m, x: final_state(m.layer(x)), {"layer": layer}, normal(BATCH, 4, WIDTH))
    check_operation(lambda m, x: m.layer(x)[0], {"layer": layer}, normal(BATCH, 2, WIDTH))
    assert at_once


@pytest.mark.parametrize("kind", LAYERS)
def test_gates_at_once_of_packed_sequences(kind, at_once):
    """Those read from the first step on; the other direction goes step by step."""
    layer = LAYERS[kind](bidirectional=True)
    states = 2 if kind == "lstm" else 1

    def function(m, x):
        packed = pack_padded_sequence(x, torch.tensor([1, 4, 3]), True, enforce_sorted=False)
        starts = [m.start(x[:, 0]).view(BATCH, 2, -1).transpose(0, 1)] * states
        output, state = m.layer(packed, tuple(starts) if states > 1 else starts[0])
        output, _ = pad_packed_sequence(output, batch_first=True)
        return torch.cat([output.flatten(1), final_state((output, state))], 1)

    parameters = {"layer": layer, "start": nn.Linear(WIDTH, 2 * HIDDEN)}
    check(function, parameters, normal(BATCH, 4, WIDTH))
    assert at_once and not any(sweep.steps.reverse for sweep, *_ in at_once)


def test_projections_changed_in_place():
    layer = nn.LSTM(WIDTH, HIDDEN, proj_size=2, batch_first=True)

    def function(m, x):
        output, (hidden, memory) = m.layer(x)
        return torch.cat([output[:, 1:].mul_(2).flatten(1), hidden[-1], memory[0]], 1)

    check(function, {"layer": layer}, normal(BATCH, 4, WIDTH))


@pytest.mark.parametrize("kind", LAYERS)
def test_packed_rows_changed_in_place(kind):
    def function(m, x):
        packed = pack_padded_sequence(x, torch.tensor([1, 4, 3]), True, enforce_sorted=False)
        rows, _ = m.layer(packed)
        rows.data.mul_(0.5)
        return pad_packed_sequence(rows, batch_first=True)[0]

    layer = LAYERS[kind](batch_first=True, bidirectional=True)
    check(function, {"layer": layer}, normal(BATCH, 4, WIDTH))


@pytest.mark.parametrize("kind", LAYERS)
def test_inside_a_checkpoint(kind):
    """The output is not kept: whose memory a checkpoint saves."""
    layer = LAYERS[kind](num_layers=2, batch_first=True)

    def function(m, x):
        return checkpoint(lambda x: m.layer(x)[0], x, use_reentrant=False)

    check(function, {"layer": layer}, normal(BATCH, 4, WIDTH))


def test_what_backward_keeps_of_a_result():
    result = torch.ones(2)
    kept = Kept(result)
    assert kept.take().data_ptr() == result.data_ptr()
    assert kept.take() is None  # a second backward finds the memory given back
    kept = Kept(result)
    result[:1] = 0
    assert kept.take() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert Kept(result).take() is None


def test_used_twice_with_tied_weights():
    layer = nn.GRU(WIDTH, WIDTH, batch_first=True)
    layer.weight_hh_l0 = layer.weight_ih_l0
    check(lambda m, x: m.layer(m.layer(x)[0])[0], {"layer": layer}, normal(BATCH, 4, WIDTH))


@pytest.mark.parametrize("count", [1, 2, BATCH])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_states_of_an_earlier_batch(kind, count):
    """As truncated backpropagation through time hands them on: numbers, examples along axis 1."""
    layer = LAYERS[kind](num_layers=count, batch_first=True)
    model = nn.ModuleDict({"layer": layer, "head": nn.Linear(HIDDEN, 3)}).double()
    _, states = layer(normal(BATCH, 4, WIDTH))
    states = [state.detach() for state in (states if kind == "lstm" else (states,))]

    def losses(m, batch):
        x, *own = batch
        output, _ = m["layer"](x, tuple(own) if kind == "lstm" else own[0])
        return m["head"](output[:, -1]).logsumexp(1)

    check_model(model, (normal(BATCH, 4, WIDTH), *states), losses)


def test_examples_along_the_second_axis():
    def losses(model, batch):
        return uneven_loss(lambda *b: model(*b).transpose(0, 1), batch)

    for positions in (BATCH, 4):
        check(
            lambda m, x: m.layer(x)[0],
            {"layer": nn.LSTM(WIDTH, HIDDEN, 2)},
            normal(positions, BATCH, WIDTH),
            loss_fn=losses,
            batch_dim=1,
        )


def test_examples_along_the_axis_of_steps():
    for positions in (BATCH, 4):
        check_refused(
            lambda m, x: m.layer(x)[0],
            {"layer": nn.GRU(WIDTH, HIDDEN)},  # sequence first
            normal(BATCH, positions, WIDTH),
            error=gs.ExampleAxisError,
            match="gru.*along axis 1.*pass batch_dim=1",
        )


def test_examples_along_the_axis_that_the_layer_takes_but_not_along_batch_dim():
    check_refused(
        lambda m, x: m.layer(x.transpose(0, 1))[0].transpose(0, 1),
        {"layer": nn.GRU(WIDTH, HIDDEN, batch_first=True)},
        normal(BATCH, 4, WIDTH),
        error=gs.ExampleAxisError,
        match=r"gru.*along axis 0\. Move the axis",
    )


def test_initial_states_of_other_examples_are_refused():
    check_refused(
        lambda m, x: m.layer(x, m.start(x[:, 0]).flip(0)[None])[0],
        {"layer": nn.GRU(WIDTH, HIDDEN, batch_first=True), "start": nn.Linear(WIDTH, HIDDEN)},
        normal(BATCH, 2, WIDTH),
        match="initial states in another order",
    )


@pytest.mark.parametrize("options", [{}, {"fused": False}], ids=["fused", "unfused"])
def test_derivatives_through_a_layer_are_refused(options):
    model, x = nn.GRU(WIDTH, HIDDEN, batch_first=True).double(), normal(BATCH, 2, WIDTH)

    def losses(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
        return slope.square().sum((1, 2))

    with pytest.raises(gs.UnsupportedOperationError, match="ran through an operation"):
        with gs.track(model, batch_size=BATCH, **options) as tracker:
            tracker.backward(losses(model, x))


CELLS = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "tanh": nn.RNNCell,
    "relu": lambda *a, **o: nn.RNNCell(*a, nonlinearity="relu", **o),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_cells(kind, bias):
    def function(m, x):
        state = None
        for step in x.unbind(1):
            state = m.cell(step, state)
        return torch.cat(state, 1) if kind == "lstm" else state

    cell = CELLS[kind](WIDTH, HIDDEN, bias=bias)
    for positions in (1, BATCH):
        check(function, {"cell": cell}, normal(BATCH, positions, WIDTH))


@pytest.mark.parametrize("made", [0, 2], ids=["weight", "bias"])
def test_cells_of_which_each_example_makes_its_own(made):
    def function(m, x):
        states = []
        for row in x.split(1):
            weights = [m.w_ih, m.w_hh, m.b_ih, m.b_hh]
            weights[made] = m.maker(row).view(HIDDEN, -1).squeeze(1)
            states.append(torch.rnn_tanh_cell(row, m.start.expand(1, -1), *weights))
        return torch.cat(states)

    parameters = {
        "maker": nn.Linear(WIDTH, HIDDEN * (WIDTH if made == 0 else 1)),
        "w_ih": (HIDDEN, WIDTH),
        "w_hh": (HIDDEN, HIDDEN),
        "b_ih": (HIDDEN,),
        "b_hh": (HIDDEN,),
        "start": (1, HIDDEN),
    }
    check_operation(function, parameters, normal(BATCH, WIDTH))


def test_cells_that_one_example_makes_for_all_are_refused():
    def function(m, x):
        bias = m.maker(x)[0]
        return torch.rnn_tanh_cell(x, x.new_zeros(BATCH, HIDDEN), m.w_ih, m.w_hh, bias, bias)

    check_refused(
        function,
        {
            "maker": nn.Linear(WIDTH, HIDDEN),
            "w_ih": (HIDDEN, WIDTH),
            "w_hh": (HIDDEN, HIDDEN),
        },
        normal(BATCH, WIDTH),
        error=gs.GradStatsError,
        match="example",
    )


LENGTHS = {"sorted": [4, 3, 1], "unsorted": [1, 4, 3], "equal": [4, 4, 4]}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("form", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("kind", LAYERS)
def test_packed_sequences(kind, form, lengths):
    for batch_first in (True, False):
        layer = LAYERS[kind](batch_first=batch_first, **form)

        def function(m, x):
            x = m.before(x)
            packed = pack_padded_sequence(
                x if batch_first else x.transpose(0, 1),  # noqa: B023
                torch.tensor(lengths),
                batch_first=batch_first,  # noqa: B023
                enforce_sorted=False,
            )
            output, state = m.layer(packed)
            output, _ = pad_packed_sequence(output, batch_first=True)
            return m.after(torch.cat([output[:, 0], final_state((output, state))], 1))

        width = HIDDEN * (3 if form else 2)
        parameters = {
            "layer": layer,
            "before": nn.Linear(WIDTH, WIDTH),
            "after": nn.Linear(width, 2),
        }
        check(function, parameters, normal(BATCH, 4, WIDTH))


def test_packed_sequences_with_an_initial_state():
    def function(m, x):
        packed = pack_padded_sequence(x, torch.tensor([1, 4, 3]), True, enforce_sorted=False)
        output, _ = m.layer(packed, m.start(x[:, 0]).unsqueeze(0))
        return pad_packed_sequence(output, batch_first=True)[0]

    layer = nn.GRU(WIDTH, HIDDEN, batch_first=True)
    parameters = {"layer": layer, "start": nn.Linear(WIDTH, HIDDEN)}
    check(function, parameters, normal(BATCH, 4, WIDTH))


def test_other_parameters_on_packed_rows():
    """The rows of a packed sequence are followed to their examples."""

    def function(m, x):
        packed = pack_padded_sequence(x, torch.tensor([1, 4, 3]), True, enforce_sorted=False)
        packed = packed._replace(data=m.norm(m.linear(packed.data)).tanh())
        return pad_packed_sequence(m.layer(packed)[0], batch_first=True)[0]

    parameters = {
        "linear": nn.Linear(WIDTH, WIDTH),
        "norm": nn.LayerNorm(WIDTH),
        "layer": nn.LSTM(WIDTH, HIDDEN, bidirectional=True),
    }
    check(function, parameters, normal(BATCH, 4, WIDTH))


@pytest.mark.parametrize("lengths", [[5, 3, 1], [2, 2, 1]])
def test_steps_of_the_sequences_that_are_not_over(lengths):
    """Sorted by length; those that are over keep their state, of which the first step has none."""

    def function(m, x):
        state = m.start.expand(len(x), -1)
        for step in range(lengths[0]):
            going = sum(length > step for length in lengths)
            state = torch.cat([m.cell(x[:going, step], state[:going]), state[going:]])
        return state

    parameters = {"start": torch.randn(3), "cell": nn.GRUCell(4, 3)}
    check_operation(function, parameters, normal(3, lengths[0], 4))


def test_a_state_of_which_nothing_is_left_over_decides_of_which_dtype_the_states_are():
    def function(m, x):
        states = torch.cat([m.cell(x), m.start[len(x) :].to(torch.complex128)])
        assert states.dtype == torch.complex128
        return states.real + m.start[0]

    check_operation(function, {"start": torch.randn(3, 3), "cell": nn.Linear(4, 3)}, normal(3, 4))


def test_several_sequences_of_each_example():
    """Frames or windows folded into the batch axis: rows of one example each."""

    def function(m, x):
        rows = m.layer(x.flatten(0, 1))[0]
        states = torch.cat([m.cell(rows[:, 0], m.start.expand(len(rows), -1)), rows[:, -1]], 1)
        return states.view(BATCH, 2, -1)

    def uneven_rows(m, x):
        rows = m.layer(x.flatten(0, 1)[:-1])[0]
        states = m.cell(rows[:, 0], m.start.expand(len(rows), -1))
        return torch.stack([part.sum(0) for part in states.split(2)])

    layers = {
        "layer": nn.LSTM(WIDTH, HIDDEN, batch_first=True),
        "cell": nn.GRUCell(HIDDEN, HIDDEN),
    }
    parameters = dict(layers, start=(HIDDEN,))
    check(function, parameters, normal(BATCH, 2, 4, WIDTH))
    check(uneven_rows, parameters, normal(BATCH, 2, 4, WIDTH))

    def zero_start(m, x):
        rows = m.layer(x.flatten(0, 1))[0]
        return torch.cat([m.cell(rows[:, 0]), rows[:, -1]], 1).view(BATCH, 2, -1)

    check(zero_start, layers, normal(BATCH, 2, 4, WIDTH))


@pytest.mark.parametrize("sequences", [1, 3])
def test_packed_sequences_of_one_example_at_a_time(sequences):
    def of_one(m, own, lengths):
        packed = pack_padded_sequence(own.transpose(0, 1), lengths, enforce_sorted=False)
        return pad_packed_sequence(m.layer(packed)[0])[0].sum(0).flatten()

    def function(m, x):
        lengths = torch.tensor([[1, 4, 3], [2, 2, 4], [3, 1, 1]])[:, :sequences]
        return torch.stack([of_one(m, *own) for own in zip(m.before(x), lengths, strict=True)])

    parameters = {"before": nn.Linear(WIDTH, WIDTH), "layer": nn.LSTM(WIDTH, HIDDEN, 2)}
    check(function, parameters, normal(BATCH, sequences, 4, WIDTH))


def test_packed_rows_from_outside_are_refused():
    """Rows that nobody saw packed could be anyone's."""
    packed = pack_padded_sequence(normal(BATCH, 4, WIDTH), torch.tensor([4, 3, 1]), True)
    check_refused(
        lambda m, x: m.layer(packed)[1][0],
        {"layer": nn.GRU(WIDTH, HIDDEN)},
        normal(BATCH, WIDTH),
        error=gs.ExampleAxisError,
        match="gru.*packed rows",
    )


def test_packed_rows_moved_from_place_to_place_are_refused():
    def function(m, x):
        packed = pack_padded_sequence(x, torch.tensor([4, 3, 1]), True)
        return m.layer(packed._replace(data=packed.data.roll(1, 0)))[1][0]

    check_refused(
        function,
        {"layer": nn.GRU(WIDTH, HIDDEN)},
        normal(BATCH, 4, WIDTH),
        error=gs.ExampleAxisError,
        match="gru.*packed rows",
    )


def test_states_made_of_data_before_constant_steps():
    frozen = nn.GRU(2, HIDDEN).double().requires_grad_(False)

    def function(m, x):
        steps = torch.ones(BATCH, BATCH, 2, dtype=x.dtype)
        return m.last(frozen(steps, m.layer(x).tanh()[None])[0]).transpose(0, 1)

    parameters = {"layer": nn.Linear(WIDTH, HIDDEN), "last": nn.Linear(HIDDEN, 2)}
    check_operation(function, parameters, normal(BATCH, WIDTH))


@pytest.mark.parametrize("learned", [False, True], ids=["constant", "learned"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_steps_of_no_example_belong_to_those_of_the_initial_states(learned, batch_first):
    def function(m, x):
        steps = m.steps if learned else torch.ones_like(m.steps)
        axis = 0 if batch_first else 1
        steps = steps.unsqueeze(axis).repeat_interleave(len(x), axis)
        output = m.layer(steps, x.flip(0)[None])[0]
        return output.flip(axis).movedim(axis, 0)

    parameters = {
        "layer": nn.GRU(2, HIDDEN, batch_first=batch_first),
        "steps": nn.Parameter(normal(2, 2)),
    }
    check_operation(function, parameters, normal(BATCH, HIDDEN))


@pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("started", [False, True])
def test_learned_steps_of_frozen_layers(cell, started):
    frozen = cell(2, HIDDEN, batch_first=True).double().requires_grad_(False)

    def function(m, x):
        states = x[None], x.tanh()[None]
        states = (m.layer(states[0]), states[1]) if started else states
        steps = m.steps.expand(len(x), 3, 2)
        return frozen(steps, states if cell is nn.LSTM else states[0])[0]

    parameters = {"steps": nn.Parameter(normal(2))}
    if started:
        parameters["layer"] = nn.Linear(HIDDEN, HIDDEN)
    check_operation(function, parameters, normal(BATCH, HIDDEN))


STARTS = {
    "of other examples": lambda h: h.flip(0),
    "of one example": lambda h: h[:1].expand(BATCH, -1),
    "the mean of all examples": lambda h: h.mean(0).expand(BATCH, -1),
    "of unknown examples": lambda h: h[:, :BATCH].T @ h,
}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", STARTS)
def test_frozen_layers_with_initial_states_of_other_examples_are_refused(name, packed):
    frozen = nn.GRU(WIDTH, HIDDEN, batch_first=True).double().requires_grad_(False)

    def function(m, x):
        steps = pack_padded_sequence(x, torch.tensor([4, 3, 1]), True) if packed else x
        return frozen(steps, STARTS[name](m.start(x[:, 0]))[None].contiguous())[1][0]

    check_refused(
        function,
        {"start": nn.Linear(WIDTH, HIDDEN)},
        normal(BATCH, 4, WIDTH),
        error=gs.ExampleAxisError,
        match="which loss belongs to which example was lost at torch.*gru",
    )


@pytest.mark.parametrize("count", [1, BATCH])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_frozen_layers_with_initial_states_of_their_own_examples(count, packed):
    frozen = nn.GRU(WIDTH, HIDDEN, batch_first=True).double().requires_grad_(False)

    def function(m, x):
        steps = pack_padded_sequence(x, torch.tensor([4, 3, 1][:count]), True) if packed else x
        output, state = frozen(steps, m.start(x[:, 0])[None])
        output = pad_packed_sequence(output, True)[0] if packed else output
        return m.last(output).sum(1) + m.last(state[0])

    parameters = {"start": nn.Linear(WIDTH, HIDDEN), "last": nn.Linear(HIDDEN, 2)}
    check_operation(function, parameters, normal(count, 4, WIDTH))


def test_a_frozen_layer_with_one_trained_state_beside_values_that_lie_elsewhere():
    frozen = nn.LSTM(WIDTH, BATCH, batch_first=True).double().requires_grad_(False)

    def function(m, x):
        # The values that a sequence starts with are not its own.
        hidden = x.detach()[:, 0, :BATCH].T[None].contiguous()
        return frozen(x, (hidden, m.start(x[:, 0])[None]))[0].sum((1, 2))

    check_operation(function, {"start": nn.Linear(WIDTH, BATCH)}, normal(BATCH, 4, WIDTH))


def test_steps_of_examples_along_the_wrong_axis_are_refused_beside_initial_states():
    frozen = nn.GRU(WIDTH, HIDDEN).double().requires_grad_(False)  # sequence first
    check_refused(
        lambda m, x: frozen(m.layer(x), m.start(x[:, 0])[None])[1][0],
        {"layer": nn.Linear(WIDTH, WIDTH), "start": nn.Linear(WIDTH, HIDDEN)},
        normal(BATCH, BATCH, WIDTH),
        error=gs.ExampleAxisError,
        match="which loss belongs to which example was lost at torch.*gru",
    )


def test_packed_rows_moved_from_place_to_place_are_refused_by_frozen_layers():
    frozen = nn.GRU(WIDTH, HIDDEN).double().requires_grad_(False)

    def function(m, x):
        packed = pack_padded_sequence(m.layer(x), torch.tensor([4, 3, 1]), True)
        moved = packed._replace(data=packed.data.roll(1, 0))
        return frozen(moved)[0].data[torch.tensor([0, 2, 3])]  # a row of each example

    check_refused(
        function,
        {"layer": nn.Linear(WIDTH, WIDTH)},
        normal(BATCH, 4, WIDTH),
        error=gs.ExampleAxisError,
        match="which loss belongs to which example was lost at torch.*gru",
    )


def test_packed_rows_of_unknown_examples_have_a_fallback():
    def function(m, x):
        rows = x.transpose(0, 1).flatten(0, 1)
        mixed = torch.eye(len(rows), dtype=rows.dtype) @ rows
        sizes = torch.full((x.shape[1],), len(x))
        return m.layer(torch.nn.utils.rnn.PackedSequence(mixed, sizes))[1][0]

    model = Operation(function, {"layer": nn.GRU(WIDTH, HIDDEN)}, upstream=False)
    data = (normal(BATCH, 4, WIDTH),)
    with pytest.raises(gs.ExampleAxisError, match=r"gru.*packed rows") as caught:
        gs.per_example_norms(model, data, uneven_loss)
    assert set(caught.value.parameters) == {name for name, _ in model.named_parameters()}
    stats = gs.per_example_norms(model, data, uneven_loss, fallback="vmap")
    assert_sqnorms(stats, oracle_sqnorms(model, data, uneven_loss), 1e-9)


@pytest.mark.parametrize("how", ["step by step", "at once"])
def test_autocast(lstm_under_autocast, how, request):
    if how == "at once":
        request.getfixturevalue("at_once")
    layer = nn.LSTM(WIDTH, HIDDEN, batch_first=True)
    x = torch.randn(BATCH, 4, WIDTH)

    def losses(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)[0]
        return out.float().square().sum((1, 2))

    expected = sum(oracle_on_the_batch(layer, x, losses).values())
    stats = gs.per_example_norms(layer, x, losses)
    torch.testing.assert_close(stats.sqnorm.double(), expected, rtol=0.05, atol=0)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_the_training_flag_where_pytorch_differentiates(kind, dropout, packs, monkeypatch):
    """cuDNN refuses the gradients of what did not run in training mode."""
    flags, stack = [], _recurrent._stack

    def spied_on(tracker, func, *rest):
        @functools.wraps(func)
        def spy(*args):
            flags.append(args[7 if packs else 6])
            return func(*args)

        monkeypatch.setitem(_recurrent.CELLS, spy, _recurrent.CELLS[func])
        return stack(tracker, spy, *rest)

    monkeypatch.setattr(_recurrent, "_stack", spied_on)
    layer = LAYERS[kind](num_layers=2, dropout=dropout, batch_first=True).double()
    x, lengths = normal(BATCH, 4, WIDTH), torch.tensor([4, 2, 1])
    for training, fused, frozen in itertools.product((True, False), repeat=3):
        layer.train(training)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(not (frozen and name.endswith("_l1")))
        flags.clear()
        with gs.track(layer, batch_size=BATCH, fused=fused) as tracker:
            data = pack_padded_sequence(x, lengths, batch_first=True) if packs else x
            tracker.backward(final_state(layer(data)).sum(1))
        # fused, backward takes the layers apart whose weights are tracked
        assert flags == [training and not fused, training and (frozen or not fused)]
