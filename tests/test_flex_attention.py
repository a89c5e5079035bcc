"""flex_attention: scores that a function of the user's changes, and masks that one computes."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import gradstats as gs
from gradstats._factors import Segments
from gradstats.capture.following._apart import mask_keeps_apart
from gradstats.capture.following._examples import Examples
from tests.oracle import assert_sqnorms, check_model, oracle_on_the_batch, oracle_sqnorms
from tests.test_packed import check_packed, sqnorms_alone

B, T, HEADS, WIDTH = 3, 16, 2, 32

# Of the compiler, which looks at .grad of what enters a graph, and of its eager form.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:flex_attention")


@pytest.fixture(autouse=True)
def backward_on_cpus(monkeypatch):
    """PyTorch refuses it there, and is able to run it."""
    monkeypatch.setattr(module, "_validate_device", lambda *operands: None)


class Attention(nn.Module):
    """A layer whose scores are changed, or masked.

    Args:
        make: what flex_attention is given beside query, key and value, from the layer and its data.
        heads: of keys and values; each is shared by several of the query's where there are fewer.
        attend: flex_attention, perhaps compiled.
    """

    def __init__(self, make, heads=HEADS, attend=flex_attention):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, WIDTH // HEADS * heads) for _ in range(2))
        self.out = nn.Linear(WIDTH, 5)
        self.register_buffer("slopes", torch.tensor([0.25, 0.5]))
        self.make, self.attend = make, attend

    def forward(self, x):
        sides = [
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        grouped = sides[0].shape[1] != sides[1].shape[1]
        mixed = self.attend(*sides, enable_gqa=grouped, **self.make(self, x))
        return self.out(mixed.transpose(1, 2).flatten(2))


def causal(b, h, q, k):
    return q >= k


def slopes(m, x):
    given = m.slopes
    return {"score_mod": lambda score, b, h, q, k: score - (q - k).abs() * given[h]}


def of_the_example(m, x):
    """Numbers of the example itself, without a gradient."""
    shifts = x.detach().mean(2)
    return {"score_mod": lambda score, b, h, q, k: score + shifts[b, k]}


def blocks(m, x):
    positions = x.shape[1]
    mask = create_block_mask(causal, None, None, positions, positions, "cpu", BLOCK_SIZE=8)
    return {"block_mask": mask}


FORMS = {
    "plain": lambda m, x: {},
    "blocks": blocks,
    "slopes": slopes,
    "of the example": of_the_example,
}


def losses(model, batch):
    x, labels = batch
    return functional.cross_entropy(model(x).mean(1), labels, reduction="none")


def batch_of(positions=T):
    torch.manual_seed(0)
    return torch.randn(B, positions, WIDTH).double(), torch.randint(5, (B,))


@pytest.mark.parametrize("heads", [HEADS, 1])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_forms(form, heads):
    check_model(Attention(form, heads).double(), batch_of(), losses)


def as_run(form, how, backend):
    """Return a layer, and what runs it: as it is, with the function compiled, or as a whole."""
    torch.compiler.reset()
    options = {"backend": backend, "fullgraph": True}
    attend = torch.compile(flex_attention, **options) if how == "function" else flex_attention
    model = Attention(FORMS[form], attend=attend).double()
    return model, torch.compile(model, **options) if how == "model" else model


def sqnorms_of(model, batch):
    """Return those of a layer in float64 on a CPU, where nothing is compiled."""
    plain = Attention(model.make).double()
    plain.load_state_dict(model.state_dict())
    return oracle_sqnorms(plain, batch, losses)


@pytest.mark.usefixtures("graphs_run_on_cpus")
@pytest.mark.parametrize(
    ("form", "how"),
    [("plain", "function"), ("slopes", "model"), ("of the example", "function"),
     ("of the example", "model")],
)  # fmt: skip
def test_compiled(form, how, caplog):
    """As it is meant to be called; inside of a graph and as one."""
    model, run = as_run(form, how, "aot_eager")
    with caplog.at_level("INFO", "gradstats"):
        stats = gs.per_example_norms(run, batch_of(), losses)
    assert_sqnorms(stats, sqnorms_of(model, batch_of()), 1e-9)
    assert not [each for each in caplog.messages if "operation by operation" in each]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how", ["eager", "function", "model"])
@pytest.mark.parametrize("form", ["plain", "slopes", "of the example"])
def test_on_a_gpu(form, how):
    model, run = as_run(form, how, "inductor")
    x, labels = batch_of(128)
    expected = sqnorms_of(model, (x, labels))
    model.float().cuda()
    stats = gs.per_example_norms(run, (x.float().cuda(), labels.cuda()), losses)
    assert_sqnorms(stats, {name: each.cuda() for name, each in expected.items()}, 1e-3)


@pytest.mark.parametrize(
    ("form", "error", "message"),
    [
        (
            lambda m, x: {"score_mod": lambda score, b, h, q, k: score + m.bias[h, q - k + T]},
            gs.UnsupportedOperationError,
            r"flex_attention with a score_mod .* parameter 'bias'.*attn_mask=",
        ),
        (
            lambda m, x: {"score_mod": _beside(m.beside(x).roll(1, 0))},
            gs.ExampleAxisError,
            "lost at torch.ops.higher_order.flex_attention",
        ),
    ],
    ids=["parameter", "values of other examples"],
)
def test_what_a_modification_takes_beside_its_score(form, error, message):
    model = Attention(form)
    model.beside, model.bias = nn.Linear(WIDTH, HEADS), nn.Parameter(torch.randn(HEADS, 2 * T))
    with pytest.raises(error, match=message):
        gs.per_example_norms(model.double(), batch_of(), losses)


def _beside(values):
    return lambda score, b, h, q, k: score + values[b, q, h]


def masked(owner, apart):
    def mask_mod(b, h, q, k):
        return (q >= k) & ((owner[q] == owner[k]) | (h >= apart))

    rows = len(owner)
    return create_block_mask(mask_mod, None, HEADS, rows, rows, "cpu", BLOCK_SIZE=8)


def packed_losses(owner, count):
    def loss_fn(model, batch):
        rows, labels = batch
        each = functional.cross_entropy(model(rows[None])[0], labels, reduction="none")
        return each.new_zeros(count).index_add(0, owner, each)

    return loss_fn


def test_a_mask_of_all_heads_is_read_once():
    owner, calls = torch.arange(3).repeat_interleave(4), []

    def mask_mod(b, h, q, k):
        calls.append(h)
        return owner[q] == owner[k]

    rows = Examples(3, 2, 4, Segments(owner, 3))
    counts = []
    for heads in (1, 8):
        calls.clear()
        assert mask_keeps_apart(mask_mod, (1, heads, 12, 4), rows)
        counts.append(len(calls))
    assert counts == [2, 2]  # to see what it takes, and for all pairs


@pytest.mark.parametrize("apart", [HEADS, 1], ids=["all heads", "one head of two"])
def test_packed_examples(apart):
    """Masks of documents, which have to hold in every head."""
    torch.manual_seed(0)
    lengths = [5, 3, 8]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    owner = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    model = Attention(lambda m, x: {"block_mask": masked(owner, apart)}).double()
    batch = torch.randn(16, WIDTH).double(), torch.randint(5, (16,))
    loss_fn = packed_losses(owner, 3)
    if apart < HEADS:
        with pytest.raises(gs.GradStatsError, match="flex_attention"):
            gs.per_example_norms(model, batch, loss_fn, cu_seqlens=bounds)
        return

    def loss_alone(m, own):
        rows, labels = own
        m.make = blocks  # which know of no other examples
        loss = functional.cross_entropy(m(rows[None])[0], labels, reduction="sum")
        return loss.unsqueeze(0)

    pieces = itertools.pairwise(bounds.tolist())
    examples = [tuple(each[start:end] for each in batch) for start, end in pieces]
    alone = copy.deepcopy(model)
    expected = sqnorms_alone(alone, examples, loss_alone)
    check_packed(model, batch, loss_fn, bounds, expected)


@pytest.mark.parametrize("apart", [True, False], ids=["both", "one of two"])
def test_packed_examples_in_several_rows(apart):
    """As two views of all of them have, whose masks may differ."""
    torch.manual_seed(0)
    owner = torch.arange(3).repeat_interleave(torch.tensor([5, 3, 8]))

    def mask_mod(b, h, q, k):
        return (owner[q] == owner[k]) | ((b > 0) & (not apart))

    mask = create_block_mask(mask_mod, 2, None, 16, 16, "cpu", BLOCK_SIZE=8)
    model = Attention(lambda m, x: {"block_mask": mask}).double()

    def loss_fn(model, batch):
        (rows,) = batch
        each = model(torch.stack([rows, rows.flip(1)])).square().sum((0, 2))
        return each.new_zeros(3).index_add(0, owner, each)

    batch, bounds = (torch.randn(16, WIDTH).double(),), torch.tensor([0, 5, 8, 16])
    if not apart:
        with pytest.raises(gs.GradStatsError, match="flex_attention"):
            gs.per_example_norms(model, batch, loss_fn, cu_seqlens=bounds)
        return
    stats = gs.per_example_norms(model, batch, loss_fn, cu_seqlens=bounds)
    for name, expected in oracle_on_the_batch(model, batch, loss_fn).items():
        torch.testing.assert_close(stats.by_parameter[name], expected, rtol=1e-7, atol=1e-12)


FIRST = """
import torch
from torch.nn.attention import flex_attention as module
import gradstats as gs

module._validate_device = lambda *operands: None
model = torch.nn.Linear(16, 16)

def losses(model, batch):
    rows = model(batch[0]).unsqueeze(1)
    return module.flex_attention(rows, rows, rows).square().sum((1, 2, 3))

batch = (torch.randn(3, 4, 16),)
print(gs.per_example_norms(model, batch, losses).norm.shape)
"""


def test_its_first_call_in_a_process():
    """There it compiles itself, even where nobody has called the compiler."""
    ran = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True)
    assert ran.stdout == "torch.Size([3])\n", ran.stderr
