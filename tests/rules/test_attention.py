"""Multi-head attention in every form of nn.MultiheadAttention, and Transformer layers."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import assert_sqnorms, check_model, oracle_on_the_batch, oracle_sqnorms
from tests.rules.operation import Operation, check_operation, check_refused, normal, uneven_loss

BATCH, WIDTH, HEADS = 3, 4, 2

FORMS = {
    "plain": {},
    "sequence first": {"batch_first": False},
    "no bias": {"bias": False},
    "key and value of other widths": {"kdim": 3, "vdim": 5},
    "key and value of other widths, no bias": {"kdim": 3, "vdim": 5, "bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True},
    "bias_kv and zero attention": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 3},
}


def attend(m, query, key, value, **options):
    return m.attention(query, key, value, **options)[0]


# Every form with each length and with and without weights, which take turns.
@pytest.mark.parametrize(
    ("name", "lengths", "need_weights"),
    [
        (name, lengths, (number + turn) % 2 == 0)
        for number, name in enumerate(FORMS)
        for turn, lengths in enumerate([(2, 5), (BATCH, BATCH)])
    ],
)
def test_forms(name, lengths, need_weights):
    form = {"batch_first": True, **FORMS[name]}
    attention = nn.MultiheadAttention(WIDTH, HEADS, **form)
    queries, keys = lengths
    data = (
        normal(BATCH, queries, WIDTH),
        normal(BATCH, keys, form.get("kdim", WIDTH)),
        normal(BATCH, keys, form.get("vdim", WIDTH)),
    )

    def function(m, *data):
        if not form["batch_first"]:
            data = [x.transpose(0, 1) for x in data]
        result = m.attention(*data, need_weights=need_weights)[0]
        return result if form["batch_first"] else result.transpose(0, 1)

    check_operation(function, {"attention": attention}, *data)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("heads", [1, WIDTH])
def test_as_many_heads_as_features_and_one_alone(heads, need_weights):
    """Where what attention mixed can be reshaped without a copy, PyTorch makes one."""
    attention = nn.MultiheadAttention(WIDTH, heads, batch_first=True)
    check_operation(
        lambda m, x: attend(m, x, x, x, need_weights=need_weights),
        {"attention": attention},
        normal(BATCH, 5, WIDTH),
    )


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("length", [BATCH, 5])
def test_self_attention_and_one_memory(length, need_weights):
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x, memory = normal(BATCH, length, WIDTH), normal(BATCH, 2, WIDTH)
    check_operation(
        lambda m, x: attend(m, x, x, x, need_weights=need_weights), {"attention": attention}, x
    )
    check_operation(
        lambda m, x, y: attend(m, x, y, y, need_weights=need_weights),
        {"attention": attention},
        x,
        memory,
    )


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("length", [BATCH, 5])
def test_attention_weights_in_the_loss(length, average):
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def function(m, x):
        result, weights = m.attention(x, x, x, average_attn_weights=average)
        # The weights' examples lie along the first axis, where the scale meets them.
        return torch.cat([result.flatten(1), (weights * m.scale).flatten(1)], 1)

    parameters = {"attention": attention, "scale": (length,)}
    check_operation(function, parameters, normal(BATCH, length, WIDTH))


MASKS = {
    "causal": lambda length: torch.ones(length, length).triu(1).bool(),
    "added": lambda length: torch.linspace(-1, 1, length * length).view(length, length).double(),
    "for each head": lambda length: (
        torch.linspace(-1, 1, BATCH * HEADS * length * length).view(-1, length, length).double()
    ),
}


@pytest.mark.parametrize(
    ("need_weights", "padded", "extra"),
    [(True, False, False), (False, True, False), (False, False, True), (True, True, True)],
)
@pytest.mark.parametrize("mask", [*MASKS, None])
def test_masks(mask, need_weights, padded, extra):
    length = 4
    attention = nn.MultiheadAttention(
        WIDTH, HEADS, batch_first=True, add_bias_kv=extra, add_zero_attn=extra
    )
    mask = MASKS[mask](length) if mask else None
    padding = torch.arange(length) >= torch.tensor([[4], [2], [3]]) if padded else None
    if padded and mask is not None and mask.dtype != torch.bool:
        padding = torch.zeros(padding.shape).double().masked_fill(padding, -torch.inf)

    def function(m, x):
        return attend(
            m, x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=need_weights
        )

    check_operation(function, {"attention": attention}, normal(BATCH, length, WIDTH))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("need_weights", [True, False])
def test_the_hint_that_a_mask_is_causal(need_weights, padded):
    length = 4
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    causal = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)
    padding = torch.zeros(BATCH, length).double()
    padding[0, 3:] = -torch.inf

    def function(m, x):
        return attend(
            m,
            x,
            x,
            x,
            attn_mask=causal,
            is_causal=True,
            need_weights=need_weights,
            key_padding_mask=padding if padded else None,
        )

    check_operation(function, {"attention": attention}, normal(BATCH, length, WIDTH))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("heads", [False, True], ids=["one", "for each head"])
def test_a_trained_mask(heads, need_weights, padded):
    """Relative position biases handed over as the mask."""
    length = 4
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    padding = torch.zeros(BATCH, length).double()
    padding[0, 3:] = -torch.inf

    def function(m, x):
        mask = m.bias.tanh().repeat(BATCH, 1, 1) if heads else m.bias[0]
        return attend(
            m,
            x,
            x,
            x,
            attn_mask=mask,
            need_weights=need_weights,
            key_padding_mask=padding if padded else None,
        )

    parameters = {"attention": attention, "bias": (HEADS, length, length)}
    check_operation(function, parameters, normal(BATCH, length, WIDTH))


@pytest.mark.parametrize("need_weights", [True, False])
def test_trained_queries(need_weights):
    """Queries that are parameters, the same for every example; constants as keys."""
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def function(m, x):
        queries = m.queries.expand(BATCH, -1, -1)
        out = attend(m, queries, x, x, need_weights=need_weights)
        constant = torch.ones(BATCH, 2, WIDTH, dtype=torch.float64)
        return out + attend(m, x, constant, constant, need_weights=need_weights)

    parameters = {"attention": attention, "queries": (BATCH, WIDTH)}
    check_operation(function, parameters, normal(BATCH, BATCH, WIDTH))


@pytest.mark.parametrize("fused", [True, False])
def test_trained_queries_repeated_for_the_only_example(fused):
    def function(m, x):
        queries = m.queries.expand(len(x), -1, -1, -1)
        return functional.scaled_dot_product_attention(queries, x, m.scale * x)

    parameters = {"queries": (1, HEADS, BATCH, WIDTH), "scale": (WIDTH,)}
    check_operation(function, parameters, normal(1, HEADS, BATCH, WIDTH), fusing=(fused,))


@pytest.mark.parametrize("rows", [1, BATCH])
def test_trained_queries_of_scaled_dot_products(rows):
    """Latents that attend to every example, and learned keys and values beside its own."""

    def function(m, x):
        queries = m.queries.expand(BATCH, -1, -1, -1) if rows == BATCH else m.queries
        pooled = functional.scaled_dot_product_attention(queries, x, x)
        keys, values = (w.expand(BATCH, -1, -1, -1) for w in (m.keys, m.values))
        return pooled + functional.scaled_dot_product_attention(x, keys, values, m.bias)

    shape = (1, HEADS, BATCH, WIDTH)
    parameters = {name: shape for name in ("queries", "keys", "values")}
    parameters["bias"] = (HEADS, BATCH, BATCH)
    x = normal(BATCH, HEADS, BATCH, WIDTH)
    check_operation(function, parameters, x, fusing=(True, False) if rows == BATCH else (True,))
    if rows == 1:
        model = Operation(function, parameters, upstream=False)
        with pytest.raises(gs.UnsupportedOperationError, match=r"dot_product.*'queries'"):
            with gs.track(model, batch_size=BATCH, fused=False):
                model(x)


@pytest.mark.parametrize("length", [BATCH, 5])
def test_keys_of_fewer_axes_that_all_examples_share(length):
    """As many of them as examples, and more."""

    def function(m, x):
        own = functional.scaled_dot_product_attention(x, 1 * m.keys, m.keys)
        constant = torch.linspace(0, 1, length * WIDTH).double().view(length, WIDTH)
        return own + functional.scaled_dot_product_attention(x * m.scale, constant, m.values)

    parameters = {"keys": (length, WIDTH), "values": (1, length, WIDTH), "scale": (WIDTH,)}
    check_operation(function, parameters, normal(BATCH, 2, WIDTH), fusing=(True,))
    check_operation(function, parameters, normal(1, 2, WIDTH), fusing=(True,))


def test_scaled_dot_products_between_the_examples_are_refused():
    for shape in ((3, 4), (1, 3, 4)):
        check_refused(
            lambda m, x: functional.scaled_dot_product_attention(m.q, x, x),
            {"q": shape},
            normal(3, 4),
            match="scaled_dot_product_attention whose examples do not lie along the first axis",
        )


def test_examples_along_the_second_axis():
    attention = nn.MultiheadAttention(WIDTH, HEADS)

    def losses(model, batch):
        out = model(*batch).transpose(0, 1).flatten(1)
        return (out * torch.linspace(0.5, 1.5, out.shape[1]).double() + out.square() / 3).sum(1)

    for length in (BATCH, 5):
        check_operation(
            lambda m, x: attend(m, x, x, x),
            {"attention": attention},
            normal(length, BATCH, WIDTH),
            loss_fn=losses,
            batch_dim=1,
        )


def test_examples_along_an_axis_that_attention_mixes():
    attention = nn.MultiheadAttention(WIDTH, HEADS)  # sequence first
    for length in (BATCH, 5):
        check_refused(
            lambda m, x: attend(m, x, x, x),
            {"attention": attention},
            normal(BATCH, length, WIDTH),
            error=gs.ExampleAxisError,
            match="multi_head_attention_forward.*along axis 1",
        )


def test_static_key_and_value():
    def function(m, x, k, v):
        a = m.attention
        x = x.transpose(0, 1)
        return functional.multi_head_attention_forward(
            x, x, x, WIDTH, HEADS, a.in_proj_weight, a.in_proj_bias, None, None, False, 0.0,
            a.out_proj.weight, a.out_proj.bias, need_weights=False, static_k=k.flatten(0, 1),
            static_v=v.flatten(0, 1),
        )[0].transpose(0, 1)  # fmt: skip

    keys = [normal(BATCH, HEADS, 5, WIDTH // HEADS) for _ in range(2)]
    attention = nn.MultiheadAttention(WIDTH, HEADS)
    check_operation(function, {"attention": attention}, normal(BATCH, 4, WIDTH), *keys)


COMPUTED_MASKS = {
    "for each head": ("attn_mask", lambda m, x: m["mask"](x).repeat_interleave(HEADS, 0), True),
    "for each example": ("key_padding_mask", lambda m, x: m["mask"](x[:, 0]), True),
    "heads first": ("attn_mask", lambda m, x: m["mask"](x).repeat(HEADS, 1, 1), False),
    "of the examples as positions": ("attn_mask", lambda m, x: m["mask"](x[:, 0]), False),
    "of other examples": ("key_padding_mask", lambda m, x: m["mask"](x[:, 0]).T, False),
}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("name, mask, right", COMPUTED_MASKS.values(), ids=COMPUTED_MASKS)
def test_masks_computed_from_data(name, mask, right, trained):
    def losses(model, x):
        steps = x.transpose(0, 1)
        given = {name: mask(model, x), "need_weights": False}
        return model["attention"](steps, steps, steps, **given)[0].square().sum((0, 2))

    attention = nn.MultiheadAttention(WIDTH, HEADS).requires_grad_(trained)
    model = nn.ModuleDict({"attention": attention, "mask": nn.Linear(WIDTH, BATCH)}).double()
    x = normal(BATCH, BATCH, WIDTH)
    if right:
        check_model(model, x, losses)
        return
    with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
        gs.per_example_norms(model, x, losses)


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout(need_weights):
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dropout=0.4)

    def losses(model, batch):
        torch.manual_seed(3)
        return uneven_loss(model, batch)

    check_operation(
        lambda m, x: attend(m, x, x, x, need_weights=need_weights),
        {"attention": attention},
        normal(BATCH, 4, WIDTH),
        loss_fn=losses,
    )


def test_dropout_beside_a_trained_mask():
    """The mask's gradient depends on which weights were dropped: known where it is computed."""
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dropout=0.4)

    def losses(model, batch):
        torch.manual_seed(3)
        return uneven_loss(model, batch)

    model = Operation(
        lambda m, x: attend(m, x, x, x, attn_mask=m.bias, need_weights=False),
        {"attention": attention, "bias": (4, 4)},
        upstream=False,
    )
    x = normal(BATCH, 4, WIDTH)
    expected = oracle_sqnorms(model, (x,), losses)
    assert_sqnorms(gs.per_example_norms(model, (x,), losses), expected, 1e-9)
    with gs.track(model, batch_size=BATCH) as tracker:
        tracker.backward(losses(model, (x,)))
    assert_sqnorms(tracker.stats, expected, 1e-9)
    with (
        pytest.raises(gs.UnsupportedOperationError, match=r"dropout.*'bias'.*fused=True"),
        gs.track(model, batch_size=BATCH, fused=False),
    ):
        losses(model, (x,))


def test_one_attention_used_twice_and_tied_weights():
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def function(m, x):
        y = attend(m, x, x, x)
        return attend(m, y, x, x) + functional.linear(y, m.attention.in_proj_weight)[..., :WIDTH]

    check_operation(function, {"attention": attention}, normal(BATCH, 5, WIDTH))


LAYERS = {
    "encoder": lambda **o: nn.TransformerEncoderLayer(WIDTH, HEADS, 6, 0.0, **o),
    "encoders": lambda **o: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 6, 0.0, **o), 2
    ),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("name", "batch_first", "norm_first"),
    # PyTorch takes padding out of its encoder, where it does, for these of its options alone
    [*itertools.product(["encoder"], [True, False], [True, False]), ("encoders", True, False)],
)
def test_encoder_layers(name, batch_first, norm_first, training):
    layer = LAYERS[name](batch_first=batch_first, norm_first=norm_first).train(training)
    padding = torch.arange(4) >= torch.tensor([[4], [2], [3]])

    def function(m, x):
        x = x if batch_first else x.transpose(0, 1)
        with torch.no_grad():
            # Without gradients PyTorch may take another way; nothing of it is counted.
            ahead = m.layer(x, src_key_padding_mask=padding)
        out = m.layer(x, src_key_padding_mask=padding) + 0 * ahead
        return (out if batch_first else out.transpose(0, 1)) * ~padding.unsqueeze(-1)

    check_operation(function, {"layer": layer}, normal(BATCH, 4, WIDTH))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
@pytest.mark.parametrize("batch_first", [True, False])
def test_decoder_layer_and_whole_transformer(batch_first):
    order = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 6, 0.0, batch_first=batch_first)
    data = normal(BATCH, BATCH, WIDTH), normal(BATCH, 5, WIDTH)
    causal = nn.Transformer.generate_square_subsequent_mask(BATCH, dtype=torch.float64)

    def decode(m, x, memory):
        return order(m.layer(order(x), order(memory), tgt_mask=causal, tgt_is_causal=True))

    check_operation(decode, {"layer": decoder}, *data)
    whole = nn.Transformer(WIDTH, HEADS, 1, 1, 6, 0.0, batch_first=batch_first)

    def translate(m, x, source):
        return order(m.layer(order(source), order(x), tgt_mask=causal))

    check_operation(translate, {"layer": whole}, *data)


def test_autocast():
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = torch.randn(BATCH, 5, WIDTH)

    def losses(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x, x, x, need_weights=False)[0]
        return out.float().square().sum((1, 2))

    expected = sum(oracle_on_the_batch(attention, x, losses).values())
    stats = gs.per_example_norms(attention, x, losses)
    torch.testing.assert_close(stats.sqnorm.double(), expected, rtol=0.02, atol=0)


def test_keys_of_other_examples_are_refused():
    def function(m, x):
        return m.layer(x, x.flip(0), x.flip(0), need_weights=False)[0]

    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    check_refused(
        function, {"layer": layer}, normal(3, 5, 4), match="rows belong to different examples"
    )


@pytest.mark.parametrize("masks", ["attn_mask", "key_padding_mask"])
def test_masks_of_the_function_itself(masks):
    """The layer makes numbers of them first."""

    def function(m, x):
        x, layer = x.transpose(0, 1), m.layer
        mask = torch.ones(3, 3).triu(1).bool()
        if masks == "key_padding_mask":
            mask = mask[:1].expand(x.shape[1], -1)
        out, _ = functional.multi_head_attention_forward(
            x, x, x, 4, 2, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0,
            layer.out_proj.weight, layer.out_proj.bias, **{masks: mask},
        )  # fmt: skip
        return out.transpose(0, 1)

    check_operation(function, {"layer": nn.MultiheadAttention(4, 2)}, normal(BATCH, 3, 4))
