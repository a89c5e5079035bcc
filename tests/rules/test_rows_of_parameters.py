"""Rows of parameters among rows of examples: each is that of the examples that read it."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradstats as gs
from tests.oracle import check_model, check_products
from tests.rules.operation import check_operation, normal

EXAMPLES, TOKENS, WIDTH = 3, 5, 4
ALL = EXAMPLES * TOKENS


def losses(model, x):
    return model(x).sin().square().flatten(1).sum(1)


class OfParameters(nn.Module):
    """A layer behind rows of examples and one of parameters.

    Attributes:
        read: called with the module and the rows of all examples and of parameters, returns those
            of the examples.
    """

    def __init__(self, read, *, behind=True):
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.row = nn.Parameter(torch.randn(1, WIDTH))
        self.read, self.behind = read, behind

    def forward(self, x):
        rows = [self.first(x).flatten(0, 1), self.row.sin()]
        return self.read(self, torch.cat(rows if self.behind else rows[::-1]))


def made_of_parameters(read, *, behind=True):
    torch.manual_seed(0)
    model = OfParameters(read, behind=behind).double()
    return model, torch.randn(EXAMPLES, TOKENS, WIDTH).double()


def by_experts(m, rows):
    """Four slots of each expert, of which some get the row of parameters, which is cut away."""
    slots = torch.full((5, 4), ALL)
    slots[:, :3] = torch.arange(ALL).flip(0).roll(4).view(5, 3)
    out = m.inner(rows[slots]).tanh().flatten(0, 1)
    return (
        torch.zeros_like(rows)
        .index_add(0, slots.flatten(), out)[:ALL]
        .unflatten(0, (EXAMPLES, TOKENS))
    )


def of_the_last(m, rows):
    """That of parameters is read by the last example alone."""
    places = torch.arange(ALL).view(EXAMPLES, TOKENS).clone()
    places[-1, 1:3] = ALL
    return m.inner(rows[places])


CUT = {
    "experts": by_experts,
    "layer": lambda m, rows: m.inner(rows)[:ALL].unflatten(0, (EXAMPLES, TOKENS)),
    "last": of_the_last,
}


@pytest.mark.parametrize("read", CUT.values(), ids=CUT)
def test_rows_of_parameters_that_one_example_reads_or_none(read):
    model, x = made_of_parameters(read)
    check_model(model, x, losses)
    check_products(model, x, losses)


@pytest.mark.parametrize("read", CUT.values(), ids=CUT)
def test_a_loss_over_all_examples_of_rows_of_parameters_is_refused(read):
    model, x = made_of_parameters(read)
    with pytest.raises(gs.ExampleAxisError, match="does not tell"):
        with gs.track(model, batch_size=EXAMPLES):
            losses(model, x).mean().backward()


def test_a_loss_over_all_examples_of_a_row_of_parameters_alone_is_refused():
    """No parameter is used behind it."""
    model, x = made_of_parameters(lambda m, rows: rows)
    with pytest.raises(gs.ExampleAxisError, match="does not tell"):
        with gs.track(model, batch_size=EXAMPLES):
            model(x).sin().mean().backward()


def padded(m, rows):
    """Two examples read the row of parameters, one of them with nothing else."""
    places = torch.arange(ALL).view(EXAMPLES, TOKENS).clone()
    places[0], places[2, 1:3] = ALL, ALL
    return m.inner(rows[places])


def of_neighbours(m, rows):
    """Every row has the one of parameters as its last neighbour."""
    near = torch.arange(ALL)[:, None].expand(-1, 3).clone()
    near[:, 2], near[4, 1] = ALL, -1
    found = rows.index_select(0, near.flatten() % (ALL + 1)).view(ALL, 3, WIDTH)
    out = m.inner(rows.tanh() * m.row.cos())[:ALL] + found.sin().sum(1)
    return out.unflatten(0, (EXAMPLES, TOKENS))


def twice(m, rows):
    """What was computed of the rows one by one, and picked, is picked again."""
    rows = ((rows + m.inner.bias) * 2).exp()
    places = torch.arange(ALL).view(EXAMPLES, TOKENS).flip(1).clone()
    places[:, 0] = ALL
    return m.inner(rows[places]) + rows[places.flip(1), :]


READ = {"padded": padded, "of neighbours": of_neighbours, "twice": twice}


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_rows_of_parameters_that_several_examples_read(read, behind):
    def in_front(m, rows):
        return read(m, torch.cat([rows[1:], rows[:1]]))

    model, x = made_of_parameters(read if behind else in_front, behind=behind)
    check_model(model, x, losses, fusing=(True,))
    check_products(model, x, losses)


def test_places_of_the_batch():
    """They say whose reads they are, where an example reads rows of parameters alone."""
    torch.manual_seed(0)
    model = OfParameters(lambda m, rows: rows).double()

    def each(model, batch):
        x, places = batch
        rows = torch.cat([model.first(x).flatten(0, 1), model.row, model.row.sin()])
        return model.inner(rows[places]).sin().square().sum((1, 2))

    x = torch.randn(EXAMPLES, TOKENS, WIDTH).double()
    places = torch.tensor([[ALL, ALL + 1], [5, -1], [-2, 14]])
    check_model(model, (x, places), each, fusing=(True,))


def rows_of_others(m, rows):
    places = torch.arange(ALL).view(EXAMPLES, TOKENS).clone()
    places[0, 1], places[0, 2] = ALL, ALL - 1
    return m.inner(rows[places])


def after_a_layer(m, rows):
    """The layer's gradient there is that of all readers."""
    return padded(m, m.inner(rows))


@pytest.mark.parametrize("read", [rows_of_others, after_a_layer])
def test_rows_in_which_examples_meet_are_refused(read):
    model, x = made_of_parameters(read)
    with pytest.raises(gs.GradStatsError):
        gs.per_example_norms(model, x, losses)


def test_rows_of_parameters_that_keywords_pick():
    def function(m, x):
        rows = torch.cat([m.tokens.expand(len(x), -1, -1), x.sin()], 1)
        picked = torch.index_select(input=rows, dim=1, index=torch.tensor([0, 3]))
        return m.layer(torch.select(input=picked, dim=1, index=0) + picked[:, 1])

    parameters = {"tokens": (1, 2, WIDTH), "layer": nn.Linear(WIDTH, 2)}
    check_operation(function, parameters, normal(EXAMPLES, TOKENS, WIDTH))


class Frames(nn.Module):
    """Patches of several frames of each example, with a token of parameters.

    Attributes:
        tokens: called with the module and the rows of all frames, the token first, returns what is
            joined to the patches.
    """

    def __init__(self, tokens, *, frames=2, checkpointed=None):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 1 + TOKENS, WIDTH))
        self.tokens, self.frames, self.checkpointed = tokens, frames, checkpointed

    def embed(self, x):
        rows = self.first(x).flatten(0, 1)
        rows = torch.cat([self.token.expand(len(rows), -1, -1), rows], 1) + self.positions
        rows = functional.dropout(rows, 0.5, training=False)
        return self.tokens(self, rows, len(x))

    def forward(self, x):
        if self.checkpointed is None:
            rows = self.embed(x)
        else:
            rows = checkpoint(self.embed, x, **self.checkpointed)
        return self.last(self.norm(rows)).reshape(len(x), -1)


def of_the_first_frames(m, rows, batch):
    """As TimeSformer takes them: of the first rows, not of each example's."""
    return torch.cat([rows[:batch, 0].unsqueeze(1), rows[:, 1:].reshape(batch, -1, WIDTH)], 1)


def repeated(m, rows, batch):
    """As a ViT with windows does: all examples' tokens, once for each window."""
    patches = rows[:, 1:].unflatten(1, (TOKENS, 1)).flatten(0, 1)
    return torch.cat([rows[:, :1].repeat(TOKENS, 1, 1), patches], 1)


def of_one(m, rows, batch):
    return rows[:, 1:] + (rows.select(1, 0)[:1] * m.norm.weight).sin().unsqueeze(1)


def narrowed(m, rows, batch):
    token = rows.narrow(1, 0, 1).flip(0)[:, None, 0].transpose(0, 1)
    return torch.cat([rows[:, 1:], token.transpose(0, 1).roll(1, 0)], 1)


def between(m, rows, batch):
    """Two rows of parameters, of which one stands among the patches."""
    rows = torch.cat([rows[:, :3], m.token.sin().expand(len(rows), -1, -1), rows[:, 3:]], 1)
    return torch.cat([rows[:, 3:4].flip(0), rows[:, :1].roll(1, 0), rows[:, 1:3]], 1)


TOKENS_OF = {
    "of the first frames": of_the_first_frames,
    "repeated": repeated,
    "of one": of_one,
    "narrowed": narrowed,
    "between": between,
}


def made_of_frames(tokens, **options):
    torch.manual_seed(0)
    model = Frames(tokens, **options).double()
    return model, torch.randn(EXAMPLES, model.frames, TOKENS, WIDTH).double()


@pytest.mark.parametrize("frames", [1, 2, 3])
@pytest.mark.parametrize("tokens", TOKENS_OF.values(), ids=TOKENS_OF)
def test_tokens_of_parameters_in_the_places_of_other_examples(tokens, frames):
    model, x = made_of_frames(tokens, frames=frames)
    check_model(model, x, losses, fusing=(True,))
    check_products(model, x, losses)


@pytest.mark.parametrize("tokens", TOKENS_OF.values(), ids=TOKENS_OF)
def test_tokens_of_parameters_in_checkpoints(tokens):
    model, x = made_of_frames(tokens, checkpointed={"use_reentrant": False})
    check_model(model, x, losses, fusing=(True,))


def test_gradients_that_are_to_be_those_of_torch_to_the_bit():
    """They are summed in another order."""
    model, x = made_of_frames(of_the_first_frames)
    with pytest.raises(gs.ExampleAxisError, match="lost at torch"):
        with gs.track(model, batch_size=EXAMPLES, fused=False):
            losses(model, x)


def test_tokens_of_parameters_under_autocast():
    model, x = made_of_frames(of_the_first_frames)
    model, x = model.float(), x.float()

    def each(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=x.dtype == torch.float32):
            return losses(model, x)

    expected = gs.per_example_norms(model.double(), x.double(), losses)
    got = gs.per_example_norms(model.float(), x, each)
    torch.testing.assert_close(got.norm.double(), expected.norm, rtol=0.05, atol=0)


def beside_a_patch(m, rows, batch):
    return torch.cat([rows[:, :2].flip(0), rows[:, 2:]], 1)


def changed_in_place(m, rows, batch):
    token = rows[:, :1].clone()
    token *= rows[:, 1:2].mean()
    return torch.cat([token.flip(0), rows[:, 1:]], 1)


def of_constants_changed(m, rows, batch):
    scale = torch.ones(len(rows), 1, 1, dtype=rows.dtype)
    token = rows[:, :1] * scale
    scale += 1
    return torch.cat([token.flip(0), rows[:, 1:]], 1)


def hooked(m, rows, batch):
    rows = rows.sin()
    rows.register_hook(lambda grad: grad * 2)
    return torch.cat([rows[:, :1].flip(0), rows[:, 1:]], 1)


@pytest.mark.parametrize("tokens", [beside_a_patch, changed_in_place, of_constants_changed, hooked])
def test_tokens_that_are_not_of_parameters_alone_are_refused(tokens):
    model, x = made_of_frames(tokens)
    with pytest.raises(gs.GradStatsError):
        gs.per_example_norms(model, x, losses)


def of_the_first_dropped(m, rows, batch):
    """Each copy lost other elements."""
    rows = functional.dropout(rows, 0.5)
    return torch.cat([rows[:, :1].flip(0), rows[:, 1:]], 1)


def all_dropped_twice(m, rows, batch):
    torch.rand(3)
    rows = functional.dropout(functional.dropout(rows, 0.3), p=0.4, training=True)
    token = functional.dropout(rows[:, :1].contiguous(), 0.3)
    return torch.cat([token.flip(0), rows[:, 1:]], 1)


def drawn(model, x):
    torch.manual_seed(1)
    return losses(model, x)


@pytest.mark.parametrize("tokens", [of_the_first_dropped, all_dropped_twice])
@pytest.mark.parametrize("checkpointed", [None, {"use_reentrant": False}])
def test_tokens_dropped_at_random(tokens, checkpointed):
    options = {} if checkpointed is None else {"checkpointed": checkpointed}
    model, x = made_of_frames(tokens, frames=2, **options)
    check_model(model, x, drawn, fusing=(True,))


def test_numbers_are_drawn_as_without_rows_of_parameters_made_again():
    model, x = made_of_frames(of_the_first_dropped)
    torch.manual_seed(1)
    losses(model, x)
    expected = torch.get_rng_state()
    torch.manual_seed(1)
    gs.per_example_norms(model, x, losses)
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("drop", [functional.alpha_dropout, functional.dropout1d])
def test_tokens_dropped_otherwise_at_random_are_refused(drop):
    def tokens(m, rows, batch):
        rows = drop(rows, 0.5, True)
        return torch.cat([rows[:, :1].flip(0), rows[:, 1:]], 1)

    model, x = made_of_frames(tokens)
    with pytest.raises(gs.GradStatsError):
        gs.per_example_norms(model, x, losses)


def test_what_is_logged_of_tokens_in_other_places():
    """No loss depends on it, so that it may be lost whose it is."""

    def tokens(m, rows, batch):
        m.logged = torch.cat([rows[:, :2].flip(0), rows[:, 2:]], 1).mean().item()
        return rows

    model, x = made_of_frames(tokens)
    check_model(model, x, losses)


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}


def timesformer():
    from transformers import TimesformerConfig, TimesformerModel

    return TimesformerModel(
        TimesformerConfig(**SMALL, patch_size=8, num_frames=2, intermediate_size=8)
    )


def windowed_vit():
    """The backbone of RF-DETR."""
    from transformers import RfDetrDinov2Config
    from transformers.models.rf_detr.modeling_rf_detr import RfDetrDinov2Backbone

    windows = {"patch_size": 4, "num_windows": 2, "mlp_ratio": 1, "out_indices": [1]}
    return RfDetrDinov2Backbone(RfDetrDinov2Config(**SMALL, **windows))


@pytest.mark.parametrize(
    ("build", "shape", "result"),
    [
        (timesformer, (2, 3, 16, 16), lambda out: out.last_hidden_state),
        (windowed_vit, (3, 16, 16), lambda out: out.feature_maps[0]),
    ],
)
def test_models_of_hugging_face(build, shape, result):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, x = build().double().eval(), torch.randn(EXAMPLES, *shape).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    check_model(
        model,
        x,
        lambda model, x: losses(lambda x: result(model(pixel_values=x)), x),
        fusing=(True,),
    )
