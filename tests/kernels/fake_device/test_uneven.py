"""Examples of uneven length on the device, and their order and lengths found on the host."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gradstats as gs
from gradstats import contractions
from gradstats._factors import Rows
from tests.oracle import (
    assert_products,
    assert_sqnorms,
    check_model,
    flat,
    oracle_gradients,
    oracle_sqnorms,
    sqnorms_of,
)

B = 5


def in_order(layer, x, lengths):
    order = lengths.cpu().argsort(descending=True).to(x.device)
    return layer(x[order])[0][order.argsort()]


def indexed_on_the_host(layer, x, lengths):
    order = lengths.cpu().argsort()
    return layer(x[order])[0][order.argsort()]


def packed(layer, x, lengths):
    rows = pack_padded_sequence(x, lengths.cpu(), True, enforce_sorted=False)
    return pad_packed_sequence(layer(rows)[0], True)[0]


def taken_out_of_padding(layer, x, lengths):
    mask = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    result = x.new_zeros(*x.shape[:2], layer.hidden_size)
    result[mask] = layer(x[mask][:, None])[0][:, 0]
    return result


class Model(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run
        self.before, self.after = nn.Linear(6, 4), nn.Linear(3, 2)
        self.layer = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x, lengths):
        return self.after(self.run(self.layer, self.before(x), lengths))


def losses_of(model, batch):
    return model(*batch).square().flatten(1).sum(1)


@pytest.mark.parametrize("run", [in_order, indexed_on_the_host, packed, taken_out_of_padding])
def test_uneven_sequences(run):
    batch = torch.randn(B, 4, 6).cuda(), torch.tensor([2, 4, 1, 4, 3]).cuda()
    check_model(Model(run).cuda(), batch, losses_of, rtol=1e-3, gradient_rtol=1e-4, fusing=(True,))


class Tables(nn.Module):
    """Rows of parameters picked by ids that lie on the host."""

    def __init__(self):
        super().__init__()
        self.table, self.pairs = nn.Parameter(torch.randn(7, 3)), nn.Parameter(torch.randn(4, 7, 3))

    def forward(self, x, ids):
        return self.table[ids] * x + self.pairs[(x[..., 0] > 0).long(), ids] + self.table[2]


def test_ids_on_the_host():
    batch = torch.randn(B, 4, 3).cuda(), torch.randint(7, (B, 4))
    check_model(Tables().cuda(), batch, losses_of, rtol=1e-3, gradient_rtol=1e-4, fusing=(True,))


class Tokens(nn.Module):
    """Tokens of examples of uneven length, taken out of their padding before they are looked up."""

    def __init__(self):
        super().__init__()
        self.table, self.after = nn.Embedding(7, 3), nn.Linear(3, 2)

    def forward(self, ids, lengths):
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        rows = self.after(self.table(ids[mask]).tanh())
        result = rows.new_zeros(*ids.shape, 2)
        result[mask] = rows
        return result


def test_tokens_taken_out_of_their_padding():
    batch = torch.randint(7, (B, 4)).cuda(), torch.tensor([2, 4, 1, 4, 3]).cuda()
    check_model(Tokens().cuda(), batch, losses_of, rtol=1e-3, gradient_rtol=1e-4, fusing=(True,))


class Bags(nn.Module):
    """Bags of tokens of examples in another order, as many for each or not."""

    def __init__(self, even):
        super().__init__()
        self.even = even
        self.table, self.after = nn.EmbeddingBag(7, 3), nn.Linear(3, 2)

    def forward(self, ids, lengths):
        order = torch.tensor([3, 1, 4, 0, 2], device=ids.device)
        ids, lengths = ids[order], lengths[order]
        if self.even:
            bags = self.table(ids)
        else:
            mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
            bags = self.table(ids[mask], lengths.cumsum(0) - lengths)
        return self.after(bags)[order.argsort()]


@pytest.mark.parametrize("even", [True, False])
def test_bags_of_tokens_in_another_order(even):
    batch = torch.randint(7, (B, 4)).cuda(), torch.tensor([2, 4, 1, 4, 3]).cuda()
    check_model(Bags(even).cuda(), batch, losses_of, rtol=1e-3, gradient_rtol=1e-4, fusing=(True,))


@pytest.mark.parametrize("tokens", [False, True], ids=["rows", "tokens"])
def test_packed_examples(tokens):
    first = nn.Embedding(7, 6) if tokens else nn.Linear(4, 6)
    model = nn.Sequential(first, nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3)).cuda()
    lengths = torch.tensor([3, 1, 0, 4])
    bounds = functional.pad(lengths.cumsum(0), (1, 0)).cuda()
    owner = torch.arange(4).repeat_interleave(lengths).cuda()
    x = (torch.randint(7, (8,)) if tokens else torch.randn(8, 4)).cuda()

    def losses(model, x):
        values = model(x).square().sum(1)
        return values.new_zeros(4).index_add(0, owner, values)

    expected = oracle_sqnorms(model, x, losses)
    rows = flat(oracle_gradients(model, x, losses))
    stats = gs.per_example_norms(model, x, losses, cu_seqlens=bounds, gram=True, alignment=True)
    assert_sqnorms(stats, expected, 1e-3)
    assert_products(stats.gram, rows, rows, 1e-4)
    assert_products(stats.alignment[:, None], rows, rows.mean(0, keepdim=True), 1e-4)
    with gs.track(model, batch_size=4, cu_seqlens=bounds) as tracker:
        tracker.backward(losses(model, x))
    assert_sqnorms(tracker.stats, expected, 1e-3)


class Tied(nn.Module):
    """Tokens looked up in a table, pooled, and compared with the table again."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(7, 8), nn.Linear(8, 8)

    def forward(self, ids, bounds):
        hidden = self.layer(self.table(ids)).tanh()
        pooled = [rows.mean(0) for rows in hidden.split(bounds.diff().tolist())]
        return functional.linear(torch.stack(pooled), self.table.weight)


def test_packed_tokens_of_a_table_that_is_a_head_too():
    bounds = torch.tensor([0, 3, 4, 9])
    model, ids = Tied().cuda(), torch.randint(7, (9,)).cuda()

    def losses(model, ids):
        return model(ids, bounds).square().sum(1)

    expected = oracle_sqnorms(model, ids, losses)
    rows = flat(oracle_gradients(model, ids, losses))
    options = {"cu_seqlens": bounds, "gram": True, "alignment": True}
    stats = gs.per_example_norms(model, ids, losses, **options)
    assert_sqnorms(stats, expected, 1e-3)
    assert_products(stats.gram, rows, rows, 1e-4)
    assert_products(stats.alignment[:, None], rows, rows.mean(0, keepdim=True), 1e-4)
    with gs.track(model, batch_size=3, **options) as tracker:
        tracker.backward(losses(model, ids))
    assert_sqnorms(tracker.stats, expected, 1e-3)
    assert_products(tracker.stats.gram, rows, rows, 1e-4)


class Folded(nn.Module):
    """A normalisation of all positions of all examples in one axis."""

    def __init__(self, norm):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), norm

    def forward(self, x):
        return self.norm(self.layer(x).flatten(0, 1)).view(x.shape)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norm_layers_of_folded_rows(norm):
    model, batch = Folded(norm(8)).cuda(), (torch.randn(4, 5, 8).cuda(),)
    check_model(model, batch, losses_of, rtol=1e-3, gradient_rtol=1e-4)
    rows = flat(oracle_gradients(model, batch, losses_of))
    stats = gs.per_example_norms(model, batch, losses_of, gram=True, alignment=True)
    assert_products(stats.gram, rows, rows, 1e-4)
    assert_products(stats.alignment[:, None], rows, rows.mean(0, keepdim=True), 1e-4)


@pytest.mark.parametrize("turned", [False, True])
def test_tables_of_which_one_is_looked_up_evenly(turned):
    def table(counts, longest=None):
        example = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).cuda()
        ids = torch.randint(5, example.shape).cuda()
        return Rows(ids, torch.randn(len(ids), 3).cuda(), example, len(counts), (5, 3), longest)

    torch.manual_seed(0)
    tables = [table([2, 2, 2], 2), table([0, 4, 1])]
    first, second = tables[::-1] if turned else tables
    rows, columns = (each.dense().double().flatten(1) for each in (first, second))
    sizes = rows.norm(dim=1), columns.norm(dim=1)
    pairs = contractions.inner_pairs([first], [second], 2**20, sizes)
    torch.testing.assert_close(pairs, rows @ columns.T, rtol=1e-5, atol=1e-5)
    diagonal = contractions.inner_diagonal([first], [second], 2**20, sizes)
    torch.testing.assert_close(diagonal, (rows * columns).sum(1), rtol=1e-5, atol=1e-5)


MADE = {
    "low rank": ([(16, 4), (24, 4)], lambda m: functional.linear(m.first, m.second)),
    "flat": ([(384,), (1,)], lambda m: m.first.tanh().view(16, 24)),
    "other rows": ([(2, 192), (1,)], lambda m: (m.first.exp() * 2).reshape(16, 24)),
    "normalised": ([(2, 192), (1,)], lambda m: functional.normalize(m.first.view(24, 16)).T),
}


@pytest.mark.parametrize("shapes, make", MADE.values(), ids=MADE)
@pytest.mark.parametrize("positions", [1, 3, 40])
def test_matrices_made_of_parameters_of_other_shapes(shapes, make, positions):
    def losses_of(model, x):
        return (x @ make(model)).square().flatten(1).sum(1) + model.second.sum() * x[:, 0, 0]

    torch.manual_seed(0)
    model, x = nn.Module(), torch.randn(3, positions, 16).cuda()
    model.first, model.second = (nn.Parameter(torch.randn(shape).cuda()) for shape in shapes)
    gradients = oracle_gradients(model, x, losses_of)
    rows = torch.cat([each.flatten(1) for each in gradients.values()], 1)
    stats = gs.per_example_norms(model, x, losses_of, gram=True, alignment=True)
    assert_sqnorms(stats, sqnorms_of(gradients), 1e-4)
    assert_products(stats.gram, rows, rows, 1e-4)
    assert_products(stats.alignment[:, None], rows, rows.mean(0, keepdim=True), 1e-4)
    direction = {name: torch.randn_like(each) for name, each in model.named_parameters()}
    flat = torch.cat([direction[name].flatten() for name in gradients]).double()
    along = gs.alignment(model, x, losses_of, direction)
    assert_products(along[:, None], rows, flat[None], 1e-4)
