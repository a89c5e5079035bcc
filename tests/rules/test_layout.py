"""Examples moved to another axis by the model itself; with T = B shape cannot tell."""

import pytest
import torch
from torch import nn

import gradstats as gs
from tests.rules.operation import check_operation, check_refused, normal

BATCH = 3

MOVES = {
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0, 2),
    "movedim": lambda x: x.movedim(0, 1),
    "swapaxes": lambda x: torch.swapaxes(x, 0, 1),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "arithmetic": lambda x: 2 * x.transpose(0, 1).tanh() + 1,
    "through a layer": lambda x: nn.functional.layer_norm(x.transpose(0, 1), (4,)),
    "rearranged": lambda x: torch.einsum("btd->tbd", x),
}


@pytest.mark.parametrize("positions", [2, BATCH, 5])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_time_major(move, positions):
    check_operation(
        lambda m, x: m.layer(move(x)).transpose(0, 1),
        {"layer": nn.Linear(4, 2)},
        normal(BATCH, positions, 4),
    )


@pytest.mark.parametrize("positions", [2, BATCH, 5])
def test_time_major_rows_folded(positions):
    """Rows of one example do not stand together: which row is whose is lost."""

    def function(m, x):
        rows = x.transpose(0, 1).reshape(-1, 4)
        return m.layer(rows).view(positions, BATCH, 2).transpose(0, 1)

    check_refused(
        function,
        {"layer": nn.Linear(4, 2)},
        normal(BATCH, positions, 4),
        error=gs.ExampleAxisError,
        match=r"'layer.weight'.*folded together",
    )


@pytest.mark.parametrize("positions", [2, BATCH, 5])
def test_attention_written_as_einsum(positions):
    def function(m, x):
        q, k, v = m.qkv(x).chunk(3, dim=-1)
        weights = torch.einsum("bqd,bkd->bqk", q, k).softmax(-1)
        return m.out(torch.einsum("bqk,bkd->bqd", weights, v))

    parameters = {"qkv": nn.Linear(4, 12), "out": nn.Linear(4, 2)}
    check_operation(function, parameters, normal(BATCH, positions, 4))


@pytest.mark.parametrize("positions", [2, BATCH, 5])
def test_a_relative_position_bias_as_attention_mask(positions):
    def function(m, x):
        index = torch.arange(positions)
        bias = m.table((index[:, None] - index).abs()).permute(2, 0, 1).unsqueeze(0)
        heads = m.layer(x).unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias)
        return mixed.transpose(1, 2).flatten(2)

    parameters = {"layer": nn.Linear(4, 6), "table": nn.Embedding(positions, 2)}
    check_operation(function, parameters, normal(BATCH, positions, 4))


@pytest.mark.parametrize("positions", [BATCH, 5])
def test_positions_kept_as_an_attribute(positions):
    """A tensor that a module keeps belongs to no example, registered as a buffer or not."""
    layer = nn.Embedding(positions, 4)
    layer.positions = torch.arange(positions)
    check_operation(
        lambda m, x: x + m.layer(m.layer.positions), {"layer": layer}, normal(BATCH, positions, 4)
    )


def test_buffers_are_left_as_they_were():
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(2))
    gs.per_example_norms(model, torch.randn(3, 2), lambda m, x: (m(x) * m.scale.to(x.dtype)).sum(1))
    assert not model.scale.__dict__  # a mark would keep the context alive
