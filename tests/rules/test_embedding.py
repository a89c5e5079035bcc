"""Table look-ups."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import gradstats as gs
from gradstats.contractions import FEW, _rows
from tests.oracle import assert_sqnorms, check_model, oracle_gradients, oracle_sqnorms
from tests.rules.operation import Operation, check_operation, check_refused, normal, uneven_loss

ROWS = 5


def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return ids of few rows, so that most are repeated."""
    return torch.randint(0, ROWS, shape, dtype=dtype)


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from([None, 0, 3, -1]),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_embedding_sweep(shape, width, padding_idx, dtype):
    layer = nn.Embedding(ROWS, width, padding_idx=padding_idx)
    check_operation(lambda m, ids: m.layer(ids), {"layer": layer}, integers(*shape, dtype=dtype))


@pytest.mark.parametrize(
    "repeat",
    [
        lambda numbers, counts: torch.repeat_interleave(numbers, counts),
        lambda numbers, counts: numbers.repeat_interleave(counts, 0),
        lambda numbers, counts: numbers[None].repeat_interleave(counts, dim=-1)[0],
    ],
)
@pytest.mark.parametrize("counts", [[2, 2, 2], [1, 0, 4], [0, 3, 0], [3, 3, 0]], ids=str)
def test_numbers_of_examples_repeated_as_often_as_these_say(repeat, counts):
    """What is looked up by them is that of the example that said how often."""

    def function(m, x, counts):
        numbers = repeat(torch.arange(len(x)), counts)
        rows = m.table(numbers) + m.layer(x)[numbers]
        return x.new_zeros(len(x), 3).index_add(0, numbers, rows.sin() + m.table(numbers))

    parts = {"table": nn.Embedding(3, 3), "layer": nn.Linear(4, 3)}
    check_operation(function, parts, normal(3, 4), torch.tensor(counts))


def test_numbers_repeated_for_other_examples_are_refused():
    def function(m, x, counts):
        numbers = torch.repeat_interleave(torch.arange(len(x)), counts.flip(0))
        return x.new_zeros(len(x), 3).index_add(0, numbers, m.layer(x)[numbers] * m.table(numbers))

    parts = {"table": nn.Embedding(3, 3), "layer": nn.Linear(4, 3)}
    check_refused(
        function,
        parts,
        normal(3, 4),
        torch.tensor([1, 2, 3]),
        error=gs.GradStatsError,
        match="different",
    )


def test_embedding_of_one_id_repeated():
    ids = torch.tensor([[2, 2, 2, 2], [2, 1, 2, 1], [0, 1, 2, 3]])
    check_operation(lambda m, ids: m.layer(ids), {"layer": nn.Embedding(ROWS, 3)}, ids)


@pytest.mark.parametrize("positions", [1, FEW, FEW + 1])
def test_embedding_of_few_and_of_many_ids(monkeypatch, positions):
    """Two ways to the same norms, one example at a time where there is no room for more."""
    monkeypatch.setattr(_rows, "SCRATCH", 1)

    def function(m, ids):
        return m.layer(ids) + m.table[ids - ROWS]

    layer = nn.Embedding(ROWS, 3, padding_idx=2)
    parameters = {"layer": layer, "table": (ROWS, 3)}
    check_operation(function, parameters, integers(4, positions))


def test_embedding_of_no_ids():
    def function(m, ids):
        return m.layer(ids).sum(1) + m.table[ids].sum(1) + m.bias

    parameters = {"layer": nn.Embedding(ROWS, 3), "table": (ROWS, 3), "bias": (3,)}
    check_operation(function, parameters, integers(4, 0))


@pytest.mark.parametrize("fused", [True, False])
def test_sparse_gradients(fused):
    layer = nn.Embedding(ROWS, 3, sparse=True).double()
    ids = torch.tensor([[2, 2], [2, 1], [0, 1]])

    def losses(m, ids):
        return m(ids).square().sum((1, 2))

    dense = nn.Embedding.from_pretrained(layer.weight.detach().clone(), freeze=False)
    expected = oracle_sqnorms(dense, ids, losses)
    losses(dense, ids).mean().backward()
    with gs.track(layer, batch_size=3) as tracker:
        tracker.backward(losses(layer, ids))
    assert_sqnorms(tracker.stats, expected, 1e-12)
    assert layer.weight.grad.is_sparse
    torch.testing.assert_close(layer.weight.grad.to_dense(), dense.weight.grad)
    assert_sqnorms(gs.per_example_norms(layer, ids, losses), expected, 1e-12)


def test_embedding_with_everything_padded():
    layer = nn.Embedding(ROWS, 3, padding_idx=2)
    ids = torch.tensor([[2, 2], [2, 1], [0, 1]])
    check_operation(lambda m, ids: m.layer(ids), {"layer": layer}, ids)
    model = nn.Sequential(layer)
    stats = gs.per_example_norms(model, ids, lambda m, b: m(b).square().sum((1, 2)))
    assert stats.sqnorm[0] == 0 and (stats.sqnorm[1:] > 0).all()


def test_embedding_of_folded_ids():
    def function(m, ids):
        return m.layer(ids.view(-1, ids.shape[-1])).view(*ids.shape, 3)

    check_operation(function, {"layer": nn.Embedding(ROWS, 3, padding_idx=1)}, integers(3, 2, 4))


def test_embedding_along_another_example_axis():
    check_operation(
        lambda m, ids: m.layer(ids),
        {"layer": nn.Embedding(ROWS, 3)},
        integers(4, 3),
        batch_dim=1,
        loss_fn=lambda m, b: m(*b).square().sum((0, 2)),
    )


def test_functional_embedding_with_positional_and_keyword_padding():
    parameters = {"w": (ROWS, 3)}
    check_operation(lambda m, ids: functional.embedding(ids, m.w, 1), parameters, integers(3, 4))
    check_operation(
        lambda m, ids: functional.embedding(ids, weight=m.w, padding_idx=-2),
        parameters,
        integers(3, 4),
    )


def test_scale_by_frequency_is_refused():
    check_refused(
        lambda m, ids: m.layer(ids),
        {"layer": nn.Embedding(ROWS, 3, scale_grad_by_freq=True)},
        integers(3, 4),
        match=r"scale_grad_by_freq.*'layer\.weight'",
    )
    check_refused(
        lambda m, ids: m.layer(ids),
        {"layer": nn.EmbeddingBag(ROWS, 3, scale_grad_by_freq=True)},
        integers(3, 4),
        match=r"scale_grad_by_freq.*'layer\.weight'",
    )


@settings(max_examples=25)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from(["sum", "mean", "max"]),
    st.sampled_from([None, 0, -1]),
)
def test_bags_of_equal_size(batch, count, mode, padding_idx):
    layer = nn.EmbeddingBag(ROWS, 3, mode=mode, padding_idx=padding_idx)
    check_operation(lambda m, ids: m.layer(ids), {"layer": layer}, integers(batch, count))


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.sampled_from(["sum", "mean", "max"]),
    st.sampled_from([None, 0, -1]),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_bags_at_offsets(counts, mode, padding_idx, last, dtype):
    # Bags may be empty, the first and the last included.
    bounds = torch.tensor([0, *counts]).cumsum(0).to(dtype)
    ids = integers(sum(counts), dtype=dtype)
    layer = nn.EmbeddingBag(ROWS, 3, mode=mode, padding_idx=padding_idx, include_last_offset=last)
    labels = torch.zeros(len(counts), dtype=torch.int64)
    check_operation(
        lambda m, labels, offsets, ids: m.layer(ids, offsets),
        {"layer": layer},
        labels,
        bounds if last else bounds[:-1],
        ids,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at_offsets", [False, True])
def test_means_of_bags_that_half_precision_cannot_count(dtype, at_offsets):
    """bfloat16 has no number between 256 and 258, float16 none between 2048 and 2050."""
    torch.manual_seed(0)
    counts = [3000, 2, 2051]
    table = nn.EmbeddingBag(ROWS, 3, mode="mean", padding_idx=1).to(dtype)
    if at_offsets:
        offsets = torch.tensor([0, *counts]).cumsum(0)[:-1]
        data: tuple[Tensor, ...] = (offsets, integers(sum(counts)))
    else:
        data = (integers(3, 3000),)

    def loss(model, batch):
        ids, *rest = reversed(batch)
        return model(ids, *rest).square().sum(1)

    stats = gs.per_example_norms(table, data, loss)
    # The output is rounded to half precision, and so is what the loss makes of it.
    assert_sqnorms(stats, oracle_sqnorms(table, data, loss), 8 * torch.finfo(dtype).eps)


def test_weights_for_each_sample():
    layer = nn.EmbeddingBag(ROWS, 3, mode="sum", padding_idx=1)
    check_operation(
        lambda m, ids, shares: m.layer(ids, per_sample_weights=shares),
        {"layer": layer},
        integers(3, 4),
        normal(3, 4),
    )
    offsets = torch.tensor([0, 3, 4])
    check_operation(
        lambda m, offsets, ids, shares: m.layer(ids, offsets, per_sample_weights=shares),
        {"layer": layer},
        offsets,
        integers(7),
        normal(7),
        gradient_of_data=False,
    )


@pytest.mark.parametrize("padding_idx", [None, 0, -1])
@pytest.mark.parametrize("equal", [False, True])
def test_the_largest_of_equal_rows_are_those_that_pytorch_chooses(padding_idx, equal):
    layer = nn.EmbeddingBag(ROWS, 3, mode="max", padding_idx=padding_idx)
    if equal:
        layer.weight.data.round_().clamp_(-1, 1)
    check_operation(lambda m, ids: m.layer(ids).sin(), {"layer": layer}, integers(3, 4))
    check_operation(
        lambda m, ids: m.layer(ids) * m.layer.weight.sum(), {"layer": layer}, integers(3, 3)
    )


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["table", "mean", "max"])
def test_rows_renormalised_where_they_are_looked_up(kind, fused, sparse):
    """Twice, so that a table is changed after it was used."""
    if kind == "table":
        layer = nn.Embedding(ROWS, 3, max_norm=0.5, sparse=sparse)
    elif kind == "mean":
        layer = nn.EmbeddingBag(ROWS, 3, mode=kind, max_norm=0.5, sparse=sparse)
    else:
        layer = nn.EmbeddingBag(ROWS, 3, mode=kind, max_norm=0.5)
    ids = integers(4, 6), integers(4, 6)
    model = Operation(lambda m, a, b: m.layer(a) + m.layer(b).sin(), {"layer": layer}, False)
    plain = copy.deepcopy(model)
    uneven_loss(plain, ids).mean().backward()
    expected = oracle_sqnorms(model, ids, uneven_loss)
    table = model.layer.weight.detach().clone()
    assert_sqnorms(gs.per_example_norms(model, ids, uneven_loss), expected, 1e-9)
    assert torch.equal(model.layer.weight, plain.layer.weight)
    model.layer.weight.data = table
    with gs.track(model, batch_size=4, fused=fused) as tracker:
        tracker.backward(uneven_loss(model, ids))
    assert_sqnorms(tracker.stats, expected, 1e-9)
    assert torch.equal(model.layer.weight, plain.layer.weight)
    assert model.layer.weight.grad.layout == plain.layer.weight.grad.layout
    torch.testing.assert_close(
        model.layer.weight.grad.to_dense(), plain.layer.weight.grad.to_dense()
    )


def test_rows_of_a_derived_table_are_not_renormalised():
    check_refused(
        lambda m, ids: functional.embedding(ids, m.w + 1, max_norm=1.0),
        {"w": (ROWS, 3)},
        integers(3, 4),
        match="embedding.*max_norm of a table that is not a parameter.*'w'",
    )


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_embedding_bag_of_several_bags_for_each_example(mode):
    """As layers of product keys and features of several values look up, position by position."""
    parameters = {"layer": nn.EmbeddingBag(ROWS, 3, mode=mode, padding_idx=1)}
    check_operation(
        lambda m, ids: m.layer(ids.flatten(0, 1)).view(3, 2, 3), parameters, integers(3, 2, 4)
    )

    def one_row(m, ids):
        return m.layer(ids.flatten(), 4 * torch.arange(6)).view(3, 2, 3)

    check_operation(one_row, parameters, integers(3, 2, 4))


def test_embedding_bags_that_are_cut_from_one_row():
    def function(m, ids, starts):
        ends = torch.cat([starts, starts.new_tensor([12])])
        last = functional.embedding_bag(ids.flatten(), m.w, ends, include_last_offset=True)
        frozen = functional.embedding_bag(ids.flatten(), m.w.detach(), torch.arange(0, 12, 4))
        return m.layer(ids.flatten(), torch.arange(0, 12, 4)) * frozen + last

    starts = torch.tensor([0, 4, 8])
    check_operation(
        function, {"layer": nn.EmbeddingBag(ROWS, 3), "w": (ROWS, 3)}, integers(3, 4), starts
    )


def test_embedding_bags_that_hold_ids_of_several_examples_are_refused():
    check_refused(
        lambda m, ids: m.layer(ids.flatten(), torch.tensor([0, 3, 8])),
        {"layer": nn.EmbeddingBag(ROWS, 3)},
        integers(3, 4),
        match="bags whose ids are of several examples.*labels before.*cu_seqlens",
    )


@pytest.mark.parametrize("starts", [[0, 1, 3], [0, 1, 2]], ids=str)
def test_bags_weighted_by_trained_values_of_other_examples_are_refused(starts):
    """As many weights as examples: followed only where each bag has its own example's."""

    def function(m, x):
        ids, offsets = torch.tensor([0, 1, 2]), torch.tensor(starts)
        return functional.embedding_bag(
            ids, m.w, offsets, mode="sum", per_sample_weights=m.first(x).sum(1)
        )

    parameters = {"first": nn.Linear(4, 4), "w": (ROWS, 3)}
    if starts == [0, 1, 2]:
        check_operation(function, parameters, normal(3, 4))
        return
    check_refused(function, parameters, normal(3, 4), match="bags whose ids are of several")


def test_bags_of_other_examples_trained_rows_are_refused():
    def function(m, x, ids):
        rows = functional.embedding_bag(ids.flatten(), m.first(x), torch.arange(3), mode="sum")
        return m.last(rows)

    check_refused(
        function,
        {"first": nn.Linear(4, 4), "last": nn.Linear(4, 2)},
        normal(3, 4),
        torch.tensor([[2], [0], [1]]),
        error=gs.ExampleAxisError,
        match="linear.*'last.weight'",
    )


def test_bags_of_weights_with_the_examples_along_the_axis_that_is_summed_are_refused():
    """Rows of a table may be as wide as there are examples."""
    ids, table = torch.tensor([[0, 1, 2], [2, 3, 1], [4, 0, 1]]), normal(ROWS, 3)

    def function(m, x):
        weights = m.layer(x)[..., 0].T
        return functional.embedding_bag(ids, table, mode="sum", per_sample_weights=weights).T

    check_refused(
        function, {"layer": nn.Linear(4, 2)}, normal(3, 3, 4),
        error=gs.ExampleAxisError, match="which loss belongs to which example was lost",
    )  # fmt: skip


def test_embedding_bag_of_weighted_bags_at_each_position():
    def function(m, x):
        share, ids = (x.flatten(0, 1) @ m.keys.T).topk(2)
        found = functional.embedding_bag(ids, m.w, mode="sum", per_sample_weights=share)
        return found.unflatten(0, x.shape[:2])

    check_operation(function, {"keys": (ROWS, 4), "w": (ROWS, 3)}, normal(3, 5, 4))


def test_embedding_bag_of_bags_in_another_order():
    def function(m, ids, order):
        rows = m.layer(ids.flatten(0, 1)[order])
        return torch.zeros(6, 3).double().index_copy(0, order, rows).view(3, 2, 3)

    model = Operation(function, {"layer": nn.EmbeddingBag(ROWS, 3)}, upstream=False)
    order = torch.tensor([4, 0, 3, 1, 5, 2])
    check_model(model, (integers(3, 2, 4),), lambda m, batch: uneven_loss(m, (*batch, order)))


def test_tracked_weights_of_samples_are_refused():
    check_refused(
        lambda m, ids: functional.embedding_bag(
            ids, m.w, mode="sum", per_sample_weights=m.shares.expand(3, 4)
        ),
        {"w": (ROWS, 3), "shares": (4,)},
        integers(3, 4),
        match="per-sample weights",
    )


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 3), (3, 2, 4)], ids=str)
@pytest.mark.parametrize("table", [(ROWS,), (ROWS, 3), (ROWS, 2, 3)], ids=str)
def test_parameter_indexed_by_data(shape, table):
    ids = integers(*shape) - 2  # some of them count from the end
    check_operation(lambda m, ids: m.w[ids], {"w": table}, ids)
    check_operation(lambda m, ids: m.w[ids,], {"w": table}, ids)


def test_parameter_indexed_by_int32():
    check_operation(lambda m, ids: m.w[ids], {"w": (ROWS, 3)}, integers(3, 4, dtype=torch.int32))


def test_parameter_selected_along_an_axis():
    ids = integers(3)
    parameters = {"w": (ROWS, 3), "v": (3, ROWS), "u": (2, ROWS, 4)}

    def function(m, ids):
        first = m.w.index_select(0, ids) + torch.index_select(m.w, axis=0, index=ids) ** 2
        second = m.v.index_select(1, ids).T + m.v[:, ids].T ** 2
        third = m.u.index_select(1, ids) + m.u[:, ids - ROWS] ** 2 + m.u[..., ids, :]
        return torch.cat([first, second, third.transpose(0, 1).flatten(1)], 1)

    check_operation(function, parameters, ids)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 3)], ids=str)
def test_parameter_indexed_by_several(shape):
    """Scores of transitions, as in a conditional random field."""

    def function(m, before, after):
        constant = torch.arange(shape[-1]) % 4
        found = m.table[before, after - ROWS] + m.cube[before, after, 1]
        slices = m.cube[:, before, after].sum(0)
        scores = m.table[before, constant] if len(shape) > 1 else m.table[before, 2]
        features = m.features[before, after]
        return torch.cat(
            [(found + slices + scores).view(len(before), -1), features.flatten(1)], 1
        )  # fmt: skip

    parameters = {
        "table": (ROWS, ROWS), "cube": (ROWS, ROWS, ROWS), "features": (ROWS, ROWS, 2),
    }  # fmt: skip
    check_operation(function, parameters, integers(*shape), integers(*shape))


def test_partition_function_of_a_chain():
    def function(m, x, tags):
        score = m.start[tags[:, 0]] + x[:, 0].gather(1, tags[:, :1])[:, 0]
        total = m.start + x[:, 0]
        for step in range(1, x.shape[1]):
            score = score + m.table[tags[:, step - 1], tags[:, step]]
            score = score + x[:, step].gather(1, tags[:, step : step + 1])[:, 0]
            total = torch.logsumexp(total[:, :, None] + m.table + x[:, step, None], 1)
        return torch.logsumexp(total, 1) - score

    parameters = {"start": (ROWS,), "table": (ROWS, ROWS)}
    check_operation(function, parameters, normal(3, 4, ROWS), integers(3, 4))
    check_operation(function, parameters, normal(3, 3, ROWS), integers(3, 3))


def test_indices_that_do_not_exist_are_an_error_as_always():
    for ids in (integers(3) + ROWS, integers(3) - 2 * ROWS):
        with pytest.raises(IndexError):
            check_operation(lambda m, ids: m.w[ids, ids], {"w": (2 * ROWS, ROWS)}, ids)


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 3)], ids=str)
def test_parameter_indexed_along_axes_that_lie_apart(shape):
    def function(m, ids, others):
        apart = m.w[ids, :, others] + m.w[..., ids].sum((0, 1)).unsqueeze(-1)
        numbers = m.v[:, ids, :, 1].movedim(0, -1)
        between = m.v[ids, 2, :, others]
        after = m.v[1, :, ids].movedim(0, -1)
        return torch.cat([part.flatten(1) for part in (apart, numbers, between, after)], 1)

    parameters = {"w": (ROWS, 3, ROWS), "v": (ROWS, ROWS, ROWS, ROWS)}
    check_operation(function, parameters, integers(*shape), integers(*shape))


@pytest.mark.parametrize("rows", [[0, 2], (0, 2), range(0, 4, 2), np.array([0, 2])], ids=repr)
def test_parameter_indexed_by_numbers_beside_data(rows):
    def function(m, ids):
        return m.w[rows, ids] + m.w.t()[ids, rows]

    check_operation(function, {"w": (ROWS, ROWS)}, integers(3, 1))


def test_a_mask_that_leaves_rows_out():
    def function(m, ids):
        mask = ids.double()[:2] > 1
        rows = torch.arange(2).unsqueeze(1).expand_as(mask)[mask]
        return torch.zeros(3).double().index_add(0, rows, m.w[mask].square())

    check_operation(function, {"w": (2, 3)}, integers(3, 3))


def test_more_slices_than_rows_is_refused():
    check_refused(
        lambda m, ids: m.w.gather(1, ids),
        {"w": (5, ROWS)},
        integers(3, 3),
        match=r"gather with 5 slices along axis 0 for 3 rows of 3 examples.*'w'",
    )


def spline(m, x, parameters):
    """Serves what lies inside an interval, and leaves the rest as it is."""
    inside = x.abs() < 1
    result = torch.zeros_like(x)
    result[~inside] = x[~inside]
    result[inside] = (x[inside][:, None] * parameters(m)[inside, :].softmax(-1)).square().sum(-1)
    return result


REPEATED = {
    "expanded": lambda m: m.w.expand(3, 4, 2),
    "repeated": lambda m: m.w[None].repeat(3, 1, 1),
    "made of it": lambda m: (m.w[None].expand(3, -1, -1) * 2).exp(),
}


@pytest.mark.parametrize("repeated", REPEATED.values(), ids=REPEATED)
def test_masks_of_data_on_what_was_repeated(repeated):
    torch.manual_seed(0)
    check_operation(lambda m, x: spline(m, x, repeated), {"w": (4, 2)}, normal(3, 4))


def test_masks_of_data_in_other_places():
    def function(m, x):
        first, second = torch.zeros_like(x), torch.zeros_like(x)
        first[x > 0] = m.w.expand(2, -1, 3, 4)[1, :, x > 0].sum(0)
        second[x > 1] = m.v.expand(3, 4).masked_select(x > 1)
        rows = x.sum(1) > 0
        first[rows] *= m.u.expand(3, -1)[rows]
        return first + second

    torch.manual_seed(0)
    parameters = {"w": (1, 2, 1, 4), "v": (4,), "u": (4,)}
    check_operation(function, parameters, normal(3, 4))


def test_a_table_as_long_as_the_batch_under_a_mask():
    """Each example finds elements of its own rows."""

    def function(m, x):
        chosen = torch.zeros_like(x)
        chosen[x > 0] = m.w[x > 0] * m.w.sum()
        return chosen

    check_operation(function, {"w": (3, 4)}, normal(3, 4))


@pytest.mark.parametrize("positions", [3, 4])
def test_elements_gathered_from_what_was_repeated(positions):
    def function(m, ids):
        rows = m.w.expand(3, -1).gather(1, ids)
        table = m.v.expand(3, -1, -1)
        return rows + torch.gather(table, axis=1, index=ids[:, :, None].expand(-1, -1, 2)).sum(-1)

    check_operation(function, {"w": (ROWS,), "v": (1, ROWS, 2)}, integers(3, positions))


def test_slices_selected_by_folded_ids():
    def function(m, ids):
        return m.w.index_select(1, ids.flatten(0, 1)).mT.unflatten(0, (3, 2))

    check_operation(function, {"w": (4, ROWS)}, integers(3, 2))


def test_elements_gathered_along_the_examples_are_refused():
    for rows in (3, ROWS):
        check_refused(
            lambda m, ids: m.w.gather(0, ids), {"w": (rows, 4)}, integers(3, 4) % 3,
            match="gather.*along the example axis.*'w'",
        )  # fmt: skip


@pytest.mark.parametrize(
    "index",
    [lambda ids: (slice(1, 3), ids), lambda ids: (torch.tensor([True, False, True, False]), ids)],
    ids=["a part", "a mask"],
)
def test_look_ups_in_a_part_of_a_parameter_are_refused(index):
    check_refused(
        lambda m, ids: m.w[index(ids)].mean(0).unsqueeze(-1),
        {"w": (4, ROWS)},
        integers(2),
        match="__getitem__ with other than integer indices.*'w'",
    )


def test_look_ups_whose_examples_are_not_the_same_are_refused():
    check_refused(
        lambda m, ids: m.w[ids, ids.flip(0)], {"w": (ROWS, ROWS)}, integers(3),
        match="__getitem__.*'w'",
    )  # fmt: skip


def test_relative_position_table():
    # Constant ids: the table stays without examples until it meets data.
    def function(m, x):
        distance = (torch.arange(4)[:, None] - torch.arange(4)[None]).abs()
        return x + m.w[distance].permute(2, 0, 1)

    check_operation(function, {"w": (4, 2)}, normal(3, 2, 4, 4))
    check_operation(function, {"w": (4, 4)}, normal(4, 4, 4, 4))


@pytest.mark.parametrize("raw", [False, True])
def test_tables_of_positions_scaled_by_how_often_a_row_is_looked_up(raw):
    """PyTorch's second derivative of such a look-up is that of another, without the scale."""

    def function(m, x):
        positions = torch.arange(5) % 3
        if raw:
            return x * torch.embedding(m.table, positions, -1, True)
        return x * functional.embedding(positions, m.table, scale_grad_by_freq=True)

    check_operation(function, {"table": (400, 64)}, normal(20, 5, 64))
    check_operation(function, {"table": (4, 3)}, normal(2, 5, 3))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, **how: x * functional.embedding(torch.arange(5) % 3, m.table, **how),
        lambda m, x, **how: x @ functional.embedding(torch.arange(6) % 4, m.table, **how),
        lambda m, x, **how: (
            x
            * functional.embedding_bag(torch.arange(10).view(5, 2) % 3, m.table, mode="sum", **how)
        ),
    ],
    ids=["rows", "matrix", "bags"],
)
def test_tables_of_positions_with_sparse_gradients(function):
    x = normal(7, 5, 6)
    dense, sparse = (
        Operation(partial(function, sparse=each), {"table": (8, 6)}, False)
        for each in (False, True)
    )
    sparse.load_state_dict(dense.state_dict())
    options = {"gram": True, "alignment": True}
    expected = gs.per_example_norms(dense, (x,), uneven_loss, **options)
    assert_sqnorms(expected, oracle_sqnorms(dense, (x,), uneven_loss), 1e-9)
    for fused in (None, True, False):
        if fused is None:
            found = gs.per_example_norms(sparse, (x,), uneven_loss, **options)
        else:
            with gs.track(sparse, batch_size=7, fused=fused, **options) as tracker:
                tracker.backward(uneven_loss(sparse, (x,)))
            found = tracker.stats
        for name in ("sqnorm", "gram", "alignment"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("scale", [1e-8, 1e8])
def test_small_and_large_directions_of_tables_scaled_by_frequency(scale):
    """The derivative of the look-up's backward is another operation's, at any scale."""

    def function(m, x):
        return x * functional.embedding(m.ids, m.w, scale_grad_by_freq=True)

    model = Operation(function, {"w": (4, 3)}, upstream=False)
    model.ids = torch.tensor([1, 1, 2, 0, 1])
    x, direction = normal(3, 5, 3), normal(4, 3)
    (gradients,) = oracle_gradients(model, (x,), uneven_loss).values()
    along = gs.alignment(model, (x,), uneven_loss, {"w": scale * direction})
    torch.testing.assert_close(along / scale, gradients.flatten(1) @ direction.flatten())
