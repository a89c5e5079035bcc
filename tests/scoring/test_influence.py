"""The train × query matrix against plain autograd, and every way it can be asked for."""

from __future__ import annotations

import contextlib
import gc
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, default_collate
from tqdm import tqdm

import gradstats as gs
from gradstats.scoring._batches import BatchLayout
from gradstats.scoring._memory import Halving
from gradstats.scoring._work import amount, duration
from gradstats.statistics._division import Division
from tests.oracle import assert_unchanged, flat, gradients_of, snapshot
from tests.scoring import processes
from tests.scoring.setting import (
    RATES,
    batches,
    gradients_at,
    loss_fn,
    make_setting,
    oracle_influence,
    put_back,
    setting_state,
    sorted_losses,
)


@pytest.fixture
def setting():
    return make_setting()


def run(setting, checkpoints=None, **options):
    checkpoints = checkpoints or gs.Checkpoints(setting.states, lr=list(RATES))
    options = {"progress": False, **options}
    return gs.influence(
        setting.model, setting.train_batches, setting.query_batches, loss_fn, checkpoints, **options
    )


def assert_scores(got, expected) -> None:
    np.testing.assert_allclose(np.asarray(got), expected.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("on_disk", [False, True])
def test_raw_and_cosine_from_one_pass(setting, tmp_path, on_disk):
    state = snapshot(setting.model)
    scores = run(setting, out=tmp_path / "scores" if on_disk else None)
    assert_scores(scores, oracle_influence(setting))
    assert_scores(scores.raw, oracle_influence(setting))
    assert_scores(scores.cosine, oracle_influence(setting, cosine=True))
    assert scores.normalize is None and scores.cosine.normalize == "cosine"
    assert_unchanged(setting.model, state)


@pytest.mark.parametrize("loss", [sorted_losses, put_back])
def test_losses_that_the_model_sorted(setting, loss):
    """Rows and columns are the examples of the data, in whatever order their losses stand."""
    scores = gs.influence(
        setting.model, setting.train_batches, setting.query_batches, loss,
        gs.Checkpoints(setting.states, lr=list(RATES)), progress=False,
    )  # fmt: skip
    assert_scores(scores, oracle_influence(setting))


def test_normalize_chooses_what_is_shown(setting):
    assert_scores(run(setting, normalize="cosine"), oracle_influence(setting, cosine=True))


def test_memory_disk_and_lists_agree_to_the_bit(setting, tmp_path):
    setting.model.float()
    float_batches = [
        [(x.float(), y) for x, y in side] for side in (setting.train_batches, setting.query_batches)
    ]
    found = [
        gs.influence(
            setting.model, *float_batches, loss_fn, gs.Checkpoints(setting.states, lr=0.1),
            progress=False, out=out,
        )
        for out in (None, tmp_path / "scores")
    ]  # fmt: skip
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0].cosine, found[1].cosine)
    top = gs.influence(
        setting.model, *float_batches, loss_fn, gs.Checkpoints(setting.states, lr=0.1),
        progress=False, top_k=3,
    )  # fmt: skip
    for query in range(6):
        expected = found[0].opponents(query, 3)
        assert np.array_equal(top.opponents(query, 3).scores, expected.scores)
        assert np.array_equal(top.opponents(query, 3).positions, expected.positions)
    folder = next((tmp_path / "scores").glob("checkpoint-*"))
    assert np.load(folder / "products.npy").dtype == np.float32


def test_a_learning_rate_for_each_parameter(setting):
    patterns = {"0.*": 0.5, "2.*": 0.0, "3.*": 0.01}
    rates = {name: patterns[name[:2] + "*"] for name, _ in setting.model.named_parameters()}
    checkpoints = gs.Checkpoints(setting.states, lr=[patterns, 0.3])
    scores = run(setting, checkpoints)
    assert_scores(scores, oracle_influence(setting, rates=(rates, 0.3)))
    assert_scores(scores.cosine, oracle_influence(setting, rates=(rates, 0.3), cosine=True))


def test_the_two_sides_at_different_weights(setting):
    """A small MLP on one mini-batch at two checkpoints: ⟨∇ℓ_i(w₁), ∇ℓ_j(w₂)⟩ for all pairs."""
    first, second = setting.states
    scores = gs.influence(
        setting.model, [setting.train], [setting.train], loss_fn, gs.Checkpoints([first], lr=1.0),
        query_checkpoints=[second], progress=False,
    )  # fmt: skip
    one, other = (
        torch.cat(list(gradients_at(setting, state, setting.train).values()), 1)
        for state in (first, second)
    )
    assert_scores(scores, one @ other.T)
    direct = gs.inner_products(
        *(part for state in (first, second) for part in (at(setting, state), setting.train)),
        loss_fn,
    )
    np.testing.assert_allclose(np.asarray(scores), direct.numpy(), rtol=1e-12)


def at(setting, state):
    model = make_setting().model
    model.load_state_dict(state)
    return model


def test_state_dicts_that_share_memory_with_the_model(setting):
    """A model's own state dict says what it said, whatever the model is given in the meantime."""
    own = setting.model.state_dict()
    apart = {name: value.clone() for name, value in own.items()}
    other = setting.states[0]
    shared = run(setting, gs.Checkpoints([other, own], lr=[0.1, 0.3]))
    assert np.array_equal(shared, run(setting, gs.Checkpoints([other, apart], lr=[0.1, 0.3])))
    early = gs.Checkpoints([other], lr=1.0)
    shared = run(setting, early, query_checkpoints=[own])
    assert np.array_equal(shared, run(setting, early, query_checkpoints=[apart]))
    model, loader = setting.model, setting.train_batches
    shared, expected = (
        gs.self_influence(
            model, loader, loss_fn, gs.Checkpoints([other, last], lr=1.0), progress=False
        )
        for last in (own, apart)
    )
    assert np.array_equal(shared.self_influence, expected.self_influence)


def test_weights_that_share_memory_still_do_with_a_checkpoint():
    """Tied by views of one buffer, not by name: what is loaded reaches both."""
    model, other = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double() for _ in range(2))
    model[1].weight.data = model[0].weight.data
    other[1].weight.data = other[0].weight.data
    state = snapshot(model)
    data = [(torch.randn(4, 3).double(), torch.randint(3, (4,)))]
    checkpoints = gs.Checkpoints([other.state_dict()], lr=1.0)
    scores = gs.influence(model, data, data, loss_fn, checkpoints, progress=False)
    assert_unchanged(model, state)
    sqnorm = gs.per_example_norms(other, data[0], loss_fn).sqnorm
    np.testing.assert_allclose(np.diag(np.asarray(scores)), sqnorm)


@pytest.mark.parametrize("budget", [1, 1 << 30])
def test_two_checkpoints_on_the_query_side(setting, budget):
    swapped = setting.states[::-1]
    scores = run(setting, query_checkpoints=swapped, budget=budget)
    assert_scores(scores, oracle_influence(setting, query_states=swapped))
    expected = oracle_influence(setting, query_states=swapped, cosine=True)
    assert_scores(scores.cosine, expected)
    with pytest.raises(gs.CheckpointError, match="2 checkpoints and 1 query checkpoints"):
        run(setting, query_checkpoints=swapped[:1])


def test_the_budget_changes_blocks_and_no_bit(setting):
    assert np.array_equal(run(setting, budget=1), run(setting))


def test_query_gradients_stay_within_the_budget(setting, monkeypatch):
    from gradstats.scoring import _stream

    sizes = []
    real = _stream.products

    def watched(kept, *args, **options):
        sizes.append(sum(each.nbytes for each in kept))
        return real(kept, *args, **options)

    monkeypatch.setattr(_stream, "products", watched)
    run(setting)
    whole = max(sizes)
    assert len(sizes) == 6
    sizes.clear()
    run(setting, budget=whole - 1)
    assert len(sizes) == 12 and max(sizes) < whole


@pytest.mark.parametrize("budget", [1, 8 * 16 * 6, 1 << 30])
@pytest.mark.parametrize("form", ["raw", "cosine"])
def test_top_lists_without_the_matrix(setting, budget, form):
    full = getattr(run(setting), form)
    top = getattr(run(setting, top_k=3, budget=budget), form)
    for query in range(6):
        for kind in ("proponents", "opponents"):
            expected = getattr(full, kind)(query, 3)
            got = getattr(top, kind)(query, 3)
            assert got.positions.tolist() == expected.positions.tolist()
            np.testing.assert_allclose(got.scores, expected.scores, rtol=1e-12)
    for matrix in (lambda: top[0, 0], lambda: np.asarray(top), lambda: list(top)):
        with pytest.raises(gs.ScoreError, match="only the 3 strongest"):
            matrix()
    with pytest.raises(gs.ScoreError, match=r"call gs\.influence with top_k=4"):
        top.proponents(0, 4)
    assert len(top.proponents(0)) == len(top.opponents(0)) == 3
    assert len(top.plot(0).axes[0].get_yticklabels()) == 6


def test_folders_of_lists_hold_no_matrix(setting, tmp_path):
    run(setting, top_k=3, out=tmp_path / "lists")
    with pytest.raises(gs.StoreError, match=r"which gs\.TopScores\.load reads; expected"):
        gs.InfluenceScores.load(tmp_path / "lists")


def test_top_lists_longer_than_the_data(setting):
    assert len(run(setting, top_k=100).proponents(0, 100)) == 11


def test_proponents_and_opponents(setting):
    expected = oracle_influence(setting)
    scores = run(setting)
    order = expected[:, 2].argsort(descending=True).tolist()
    assert scores.proponents(2, 4).positions.tolist() == order[:4]
    assert scores.opponents(query=2, k=4).positions.tolist() == order[::-1][:4]
    pairs = list(scores.proponents(2, 2))
    assert [name for name, _ in pairs] == order[:2]
    assert pairs[0][1] == pytest.approx(expected[order[0], 2].item())
    header, line = str(scores.proponents(2, 1)).splitlines()
    assert header.split() == ["score", "id"] and line.split()[1] == str(order[0])


@pytest.mark.parametrize("top_k", [None, 3])
def test_the_strongest_of_all_queries_as_one_table(setting, top_k):
    def names(batch):
        return [str(value.item()) for value in batch[0].flatten(1)[:, 0]]

    expected = oracle_influence(setting)
    scores = run(setting, top_k=top_k, query_ids=names)
    table = scores.to_pandas(2)
    assert len(table) == 6 * 2 * 2 and table["rank"].tolist() == [1, 2] * 12
    for query, name in enumerate(names(setting.query)):
        order = expected[:, query].argsort(descending=True)
        for kind, best in (("proponent", order[:2]), ("opponent", order.flip(0)[:2])):
            rows = table[(table["query"] == name) & (table["kind"] == kind)]
            assert rows["id"].tolist() == best.tolist()
            np.testing.assert_allclose(rows["score"], expected[best, query], rtol=1e-9)
        assert list(scores.proponents(name, 2)) == list(scores.proponents(query, 2))
        assert list(scores.opponents(name, 2)) == list(scores.opponents(query, 2))
    with pytest.raises(gs.ScoreError, match=r"query is 'unknown', expected .* 0 to 5, or its id"):
        scores.proponents("unknown")


def test_ties_go_to_the_first_example(setting):
    """Two checkpoints of the same examples twice over: every score occurs twice."""
    doubled = [torch.cat([each, each]) for each in setting.train]
    scores = gs.influence(
        setting.model, batches(tuple(doubled), 11), [setting.query], loss_fn,
        gs.Checkpoints(setting.states, lr=0.1), progress=False,
    )  # fmt: skip
    positions = scores.proponents(0, 4).positions.tolist()
    assert positions == [positions[0], positions[0] + 11, positions[2], positions[2] + 11]


def test_indexing(setting):
    expected = oracle_influence(setting).numpy()
    scores = run(setting)
    for key in (
        (3, 2), 3, -1, slice(2, 5), (slice(None), 1), (slice(None, None, 2), [0, 5]),
        ([1, 2], [3, 4]), Ellipsis,
    ):  # fmt: skip
        np.testing.assert_allclose(scores[key], expected[key], rtol=1e-10)
        np.testing.assert_allclose(scores.cosine[key], np.asarray(scores.cosine)[key], rtol=1e-10)
    assert scores.shape == (11, 6) and len(scores) == 11
    np.testing.assert_allclose(list(scores), expected, rtol=1e-10)
    assert repr(scores) == "InfluenceScores(11 train × 6 query, normalize=None, 2 checkpoints)"
    single = run(setting, gs.Checkpoints(setting.states[:1], lr=0.1))
    assert repr(single) == "InfluenceScores(11 train × 6 query, normalize=None, 1 checkpoint)"
    top = run(setting, top_k=3).cosine
    assert repr(top) == "TopScores(11 train × 6 query, top_k=3, normalize='cosine', 2 checkpoints)"


@pytest.mark.parametrize(("on_disk", "checkpoints"), [(False, 1), (True, 2), (True, 1)])
def test_one_score_is_a_number(setting, tmp_path, on_disk, checkpoints):
    run_of = gs.Checkpoints(setting.states[:checkpoints], lr=0.1)
    scores = run(setting, run_of, out=tmp_path / "scores" if on_disk else None)
    for form in (scores.raw, scores.cosine):
        assert type(form[3, 2]) is np.float64 and form[3, 2] == form[3][2]


@pytest.mark.parametrize(("on_disk", "checkpoints"), [(False, 2), (True, 2), (True, 1)])
def test_scores_are_changed_in_copies_only(setting, tmp_path, on_disk, checkpoints):
    """Slices, rankings and arrays never reach what the scores are read from."""
    run_of = gs.Checkpoints(setting.states[:checkpoints], lr=0.1)
    scores = run(setting, run_of, out=tmp_path / "scores" if on_disk else None)
    expected = np.array(scores)
    for copied in (np.array(scores), np.array(scores, copy=True), scores[:].copy()):
        copied[:] = 7.0
        np.testing.assert_array_equal(scores, expected)
    assert np.array(scores, dtype=np.float32).dtype == np.float32
    for key in (slice(None), (slice(None), 0), 3):
        part = scores[key]
        if part.flags.writeable:
            part[...] = 7.0
        else:
            with pytest.raises(ValueError, match="read-only"):
                part.sort()
        np.testing.assert_array_equal(scores, expected)
    assert scores[:].flags.writeable == (on_disk and checkpoints > 1)
    top = run(setting, run_of, top_k=2).proponents(1, 2)
    for listed in (top.scores, top.positions):
        with pytest.raises(ValueError, match="read-only"):
            listed.sort()


def test_an_array_without_a_copy(setting, tmp_path):
    scores = run(setting)
    assert np.shares_memory(np.array(scores, copy=False), np.asarray(scores))
    added_up = run(setting, out=tmp_path / "scores")
    with pytest.raises(ValueError, match=r"on disk, which are read and added up.*copy=None"):
        np.array(added_up, copy=False)


@pytest.mark.parametrize("query", [6, -7, 1.0, True, "a"])
def test_a_query_that_is_none_is_refused(setting, query):
    with pytest.raises(gs.ScoreError, match="query is"):
        run(setting).proponents(query)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": "l2"}, "normalize is 'l2', expected None or \"cosine\""),
        ({"top_k": 0}, "^top_k is 0, expected a positive integer"),
        ({"budget": -1}, "budget is -1"),
        ({"budget": 1.5}, "budget is 1.5"),
    ],
)
def test_bad_options_are_refused(setting, options, message):
    with pytest.raises(gs.ScoreError, match=message):
        run(setting, **options)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": [1]}, gs.TrackingError, r"model is list, expected a torch\.nn\.Module"),
        ({"loss_fn": None}, gs.TrackingError, r"loss_fn is NoneType, expected a function"),
        ({"out": 3}, gs.StoreError, r"out is 3, expected the path of a folder"),
        ({"resume": "no"}, gs.TrackingError, "resume is 'no', expected True or False"),
    ],
)
@pytest.mark.parametrize("kind", ["self", "matrix"])
def test_arguments_of_other_kinds_are_named(setting, kind, changes, error, message):
    arguments = {
        "model": setting.model, "loss_fn": loss_fn, "progress": False,
        "checkpoints": gs.Checkpoints(setting.states, lr=0.1), **changes,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        if kind == "self":
            gs.self_influence(loader=setting.train_batches, **arguments)
        else:
            gs.influence(
                train_loader=setting.train_batches, query_loader=setting.query_batches, **arguments
            )


def test_inference_mode_is_refused(setting):
    with torch.inference_mode():
        with pytest.raises(gs.TrackingError, match=r"under torch\.inference_mode\(\)"):
            run(setting)
    with torch.no_grad():
        scores = run(setting)
    assert_scores(scores, oracle_influence(setting))


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"out": "scores"}])
def test_scores_can_be_pickled(setting, tmp_path, monkeypatch, options):
    """Without the loaders, which may hold what cannot be."""
    monkeypatch.chdir(tmp_path)
    loader = DataLoader(
        TensorDataset(*setting.train), 4, collate_fn=lambda rows: default_collate(rows)
    )
    scores = gs.influence(
        setting.model, loader, setting.query_batches, loss_fn,
        gs.Checkpoints(setting.states, lr=0.1), progress=False, **options,
    )  # fmt: skip
    copied = pickle.loads(pickle.dumps(scores))
    for query in range(6):
        for form in ("raw", "cosine"):
            got, expected = (getattr(each, form).opponents(query, 3) for each in (copied, scores))
            np.testing.assert_array_equal(got.ids, expected.ids)
            np.testing.assert_array_equal(got.scores, expected.scores)
    assert len(copied.plot(2, k=3).axes[0].get_yticklabels()) == 6


def test_parameters_and_exclude(setting):
    rates = {name: float(name == "3.bias") for name, _ in setting.model.named_parameters()}
    assert_scores(
        run(setting, gs.Checkpoints(setting.states, lr=1.0), parameters="3.bias"),
        oracle_influence(setting, rates=(rates, rates)),
    )


def test_a_data_loader_gives_the_same(setting):
    loaders = [DataLoader(TensorDataset(*side), 4) for side in (setting.train, setting.query)]
    state = torch.random.get_rng_state()
    scores = gs.influence(
        setting.model, *loaders, loss_fn, gs.Checkpoints(setting.states, lr=list(RATES)),
        progress=False,
    )  # fmt: skip
    assert np.array_equal(scores, run(setting))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_model_comes_back_after_an_exception(setting):
    setting.model.train()
    setting.model[2].eval()
    state = snapshot(setting.model)
    calls = []

    def failing(model, batch):
        calls.append(model.training)
        if len(calls) == 4:
            raise RuntimeError("mine")
        return loss_fn(model, batch)

    with pytest.raises(RuntimeError, match="mine"):
        gs.influence(
            setting.model, setting.train_batches, setting.query_batches, failing,
            gs.Checkpoints(setting.states, lr=0.1), progress=False,
        )  # fmt: skip
    assert_unchanged(setting.model, state)
    assert calls == [False] * 4


def test_buffers_that_a_forward_assigns_come_back(setting):
    """A running mean that is not written in place, and a count that was not there yet."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = setting.model
            self.register_buffer("mean", torch.zeros(()).double(), persistent=False)
            self.register_buffer("count", None, persistent=False)

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
            self.count = torch.ones(())
            return self.inner(x)

    model, states = Counting(), [{f"inner.{k}": v for k, v in s.items()} for s in setting.states]
    mean = model.mean
    scores = gs.influence(
        model, setting.train_batches, setting.query_batches, loss_fn,
        gs.Checkpoints(states, lr=list(RATES)), progress=False,
    )  # fmt: skip
    assert_scores(scores, oracle_influence(setting))
    assert model.mean is mean and mean.item() == 0 and model.count is None


@pytest.mark.parametrize("fails", [False, True])
def test_extra_state_comes_back(setting, fails):
    """What a module keeps in its state dict beside tensors is loaded with each checkpoint."""

    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = setting.model
            self.held = SimpleNamespace(temperature=1.0)

        def forward(self, x):
            return self.inner(x) / self.held.temperature

        def get_extra_state(self):
            return vars(self.held)

        def set_extra_state(self, state):
            vars(self.held).update(state)

    def loss(model, batch):
        if fails:
            raise RuntimeError("mine")
        return loss_fn(model, batch)

    model = Tempered()
    states = [
        {**{f"inner.{k}": v for k, v in state.items()}, "_extra_state": {"temperature": 2.0}}
        for state in setting.states
    ]
    checkpoints = gs.Checkpoints(states, lr=0.1)
    with pytest.raises(RuntimeError, match="mine") if fails else contextlib.nullcontext():
        table = gs.self_influence(model, setting.train_batches, loss, checkpoints, progress=False)
    assert model.held.temperature == 1.0
    if not fails:
        other, expected = Tempered(), 0
        for state in states:
            other.load_state_dict(state)
            expected += 0.1 * gs.per_example_norms(other, setting.train, loss_fn).sqnorm
        np.testing.assert_allclose(table.self_influence, expected)


def test_extra_state_that_is_only_taken(setting):
    """A module may take what older versions of it saved, and save none itself."""

    class Taking(nn.Sequential):
        def set_extra_state(self, state):
            raise AssertionError("a checkpoint holds none")

    model = Taking(setting.model)
    states = [{f"0.{name}": value for name, value in state.items()} for state in setting.states]
    checkpoints = gs.Checkpoints(states, lr=0.1)
    table = gs.self_influence(model, setting.train_batches, loss_fn, checkpoints, progress=False)
    own = gs.Checkpoints(setting.states, lr=0.1)
    other = gs.self_influence(setting.model, setting.train_batches, loss_fn, own, progress=False)
    np.testing.assert_array_equal(table.self_influence, other.self_influence)


@pytest.mark.parametrize("fails", [False, True])
def test_a_graph_recorded_before_can_still_be_differentiated(setting, fails):
    """What autograd has saved is as it was, and it knows."""
    model = nn.Sequential(setting.model, nn.Linear(3, 3), nn.BatchNorm1d(3).eval()).double()
    expected = torch.autograd.grad(loss_fn(model, setting.train).sum(), [*model.parameters()])
    recorded = loss_fn(model, setting.train).sum()
    states = [setting_state(model, seed) for seed in range(2)]
    states[0]["2.running_var"].abs_(), states[1]["2.running_var"].abs_()
    if fails:
        states[1].pop("1.bias")
    checkpoints = gs.Checkpoints(states, lr=0.1)
    for call in (
        lambda: gs.self_influence(
            model, setting.train_batches, loss_fn, checkpoints, progress=False
        ),
        lambda: gs.influence(
            model, setting.train_batches, setting.query_batches, loss_fn, checkpoints,
            progress=False,
        ),
    ):  # fmt: skip
        with pytest.raises(gs.CheckpointError) if fails else contextlib.nullcontext():
            call()
    for got, want in zip(
        torch.autograd.grad(recorded, [*model.parameters()]), expected, strict=True
    ):
        assert torch.equal(got, want)


def test_buffers_come_back():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    other = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    other(torch.randn(9, 4).double())
    state = snapshot(model)
    data = [(torch.randn(5, 4).double(), torch.randint(3, (5,)))]
    checkpoints = gs.Checkpoints([other.state_dict()], lr=1.0)
    scores = gs.influence(model, data, data, loss_fn, checkpoints, progress=False)
    assert_unchanged(model, state)
    other.eval()
    np.testing.assert_allclose(
        np.diag(np.asarray(scores)), gs.per_example_norms(other, data[0], loss_fn).sqnorm
    )


def test_non_finite_gradients_name_the_examples(setting):
    setting.train[0][9, 0] = float("nan")
    with pytest.raises(gs.NonFiniteGradientError, match=r"training examples with ids \[9\]"):
        run(setting)
    setting.query[0][5, 0] = float("inf")
    with pytest.raises(gs.NonFiniteGradientError, match=r"state dict 0.* query .* \[5\]"):
        run(setting)


def test_non_finite_gradients_may_be_kept(setting):
    expected = oracle_influence(setting).numpy()
    setting.train[0][9, 0] = float("nan")
    scores = np.asarray(run(setting, nonfinite="keep"))
    others = np.arange(11) != 9
    assert np.isnan(scores[9]).all()
    np.testing.assert_allclose(scores[others], expected[others], rtol=1e-10)


@pytest.mark.parametrize("top_k", [None, 3])
def test_an_infinite_gradient_has_no_cosine(top_k):
    """Without a warning of NumPy, which tests turn into errors."""
    model = nn.Linear(2, 1, bias=False)
    train = [torch.tensor([[torch.inf, 1.0], [3.0, 4.0], [-2.0, 0.0]])]
    scores = gs.influence(
        model, train, [torch.tensor([[2.0, 0.0]])], lambda model, x: model(x).sum(1),
        gs.Checkpoints([model.state_dict()], lr=1.0), normalize="cosine", top_k=top_k,
        nonfinite="keep", progress=False,
    ).proponents(0, 3)  # fmt: skip
    assert scores.positions.tolist() == [1, 2, 0]
    np.testing.assert_allclose(scores.scores, [0.6, -1.0, np.nan])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_scores_that_are_not_numbers_come_last(k):
    """After those that are infinite, whatever the length of the list."""
    model = nn.Linear(1, 1, bias=False)
    train, query = [torch.tensor([[float("nan")], [-1e18], [1.0]])], [torch.tensor([[1e18]])]
    checkpoints = gs.Checkpoints([model.state_dict()], lr=1e4)
    for top_k in (None, k):
        scores = gs.influence(
            model, train, query, lambda model, x: model(x).sum(1), checkpoints,
            top_k=top_k, nonfinite="keep", progress=False,
        )  # fmt: skip
        assert scores.proponents(0, k).positions.tolist() == [2, 1, 0][:k]
        assert scores.opponents(0, k).positions.tolist() == [1, 2, 0][:k]


@pytest.mark.parametrize("top_k", [None, 1])
def test_scores_that_float32_does_not_hold(tmp_path, top_k):
    """Gradients are finite, products with the learning rate are float32 numbers no more."""
    model = nn.Linear(1, 1, bias=False)
    data = [torch.tensor([[1e18], [1.0]])]
    arguments = {
        "model": model, "train_loader": data, "query_loader": data, "top_k": top_k,
        "loss_fn": lambda model, x: model(x).sum(1), "progress": False,
        "checkpoints": gs.Checkpoints([model.state_dict()], lr=1e4),
    }  # fmt: skip
    for out in (None, tmp_path / "scores"):
        with pytest.raises(gs.NonFiniteGradientError, match=r"state dict 0.* 1e\+40.*float32"):
            gs.influence(**arguments, out=out)
    kept = gs.influence(**arguments, nonfinite="keep")
    assert kept.proponents(0, 1).scores[0] == np.inf
    arguments["model"] = model.double()
    arguments["train_loader"] = arguments["query_loader"] = [data[0].double()]
    arguments["checkpoints"] = gs.Checkpoints([model.state_dict()], lr=1e4)
    assert gs.influence(**arguments).proponents(0, 1).scores[0] == pytest.approx(1e40)


@pytest.mark.parametrize("limit", [1, 3])
def test_out_of_memory_halves_the_batch(setting, capsys, limit):
    """The loss fails like an allocator for more examples than fit."""

    def hungry(model, batch):
        if len(batch[0]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss_fn(model, batch)

    scores = gs.influence(
        setting.model, setting.train_batches, setting.query_batches, hungry,
        gs.Checkpoints(setting.states, lr=list(RATES)),
    )  # fmt: skip
    assert_scores(scores, oracle_influence(setting))
    assert_scores(scores.cosine, oracle_influence(setting, cosine=True))
    printed = capsys.readouterr().err
    assert "out of memory with 4 query examples at once (CUDA out of memory" in printed
    assert "continuing with 2 at once" in printed
    assert "out of memory with 4 training examples at once" in printed
    # Whole batches are not tried again and again.
    assert printed.count("out of memory with 4 training examples") == 1


@pytest.mark.parametrize("capacity", [1, 2, 3, 5])
def test_how_a_batch_is_divided_does_not_depend_on_those_before(capacity, monkeypatch):
    """Or a call that goes on from the disk would give other bits than one that was not stopped."""
    monkeypatch.setattr(gc, "collect", lambda: 0)  # it takes most of the time

    def sizes(*batches):
        halving = Halving("examples", BatchLayout())

        def work(part):
            if len(part) > capacity:
                raise MemoryError
            return len(part)

        return [halving.run(work, torch.zeros(size, 2), size) for size in batches][-1]

    for size in range(1, 9):
        alone = sizes(size)
        assert sum(alone) == size and max(alone) >= (min(size, capacity) + 1) // 2
        for before in range(1, 9):
            assert sizes(before, size) == alone, (before, size)


def test_out_of_memory_with_one_example_is_an_error(setting):
    def hungry(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        gs.influence(
            setting.model, setting.train_batches, setting.query_batches, hungry,
            gs.Checkpoints(setting.states, lr=0.1), progress=False,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("shared", "what"),
    [
        (torch.zeros(7), r"a tensor of shape \(7,\) without an axis of 4 at 0"),
        (["one", "two"], "a list of 2 entries"),
        (
            [0.1, 0.2, 0.3, 0.4],
            "a list of 4 numbers, which may not be one for each example",
        ),
        (np.array([0.1, 0.2, 0.3, 0.4]), "a ndarray of 4 numbers"),
        ([torch.zeros(4), torch.zeros(4, 2)] * 2, "a list of 4 tensors"),
        (np.zeros(7), "a ndarray, which cannot be taken apart"),
        (object(), "a object, which cannot be taken apart"),
    ],
)
def test_a_batch_that_cannot_be_divided_says_so(shared, what):
    def work(part):
        raise MemoryError

    with pytest.raises(gs.LoaderError, match=rf"batch of 4 examples cannot be divided: .*{what}"):
        Halving("examples", BatchLayout()).run(work, {"x": torch.zeros(4, 2), "shared": shared}, 4)


def test_what_each_example_has_goes_with_it():
    batch = {
        "x": torch.arange(8).view(4, 2),
        "names": ["a", "b", "c", "d"],
        "captions": ("one", "two", "three", "four"),
        "size": (224, 224, 3),
        "boxes": [{"corners": torch.zeros(n, 4), "of": [n] * n} for n in (1, 4, 0, 2)],
        "rows": np.arange(8.0).reshape(4, 2),
        "scale": np.float32(0.5),
        "settings": SimpleNamespace(smoothing=0.1),
    }
    half = BatchLayout().part(batch, 1, 3, 4)
    assert half["x"].tolist() == [[2, 3], [4, 5]] and half["names"] == ["b", "c"]
    assert half["captions"] == ("two", "three") and half["rows"].tolist() == [[2, 3], [4, 5]]
    assert half["size"] == (224, 224, 3) and half["settings"] is batch["settings"]
    assert [len(box["corners"]) for box in half["boxes"]] == [4, 0] and half["scale"] == 0.5
    assert half["boxes"][0] is batch["boxes"][1]
    along = {"x": torch.zeros(3, 4), "rows": np.arange(12).reshape(3, 4), "names": list("abcd")}
    half = BatchLayout(batch_dim=1).part(along, 0, 2, 4)
    assert half["rows"].tolist() == [[0, 1], [4, 5], [8, 9]] and half["names"] == ["a", "b"]
    packed = {
        "x": torch.zeros(7, 2), "bounds": torch.tensor([0, 2, 3, 7]), "names": ["a", "b", "c"],
        "words": list("rstuvwx"),
    }  # fmt: skip
    part = BatchLayout(cu_seqlens="bounds").part(packed, 1, 3, 3)
    assert part["names"] == ["b", "c"] and part["words"] == list("tuvwx")
    assert part["bounds"].tolist() == [0, 1, 5] and part["x"].shape == (5, 2)


def test_lists_of_unlike_tensors_are_no_entries_of_examples():
    """As many as there are examples by accident."""
    batch = {"x": torch.zeros(4, 3), "parts": [torch.zeros(4, 2), torch.zeros(7)] * 2}
    half = Division(4, 0).take(batch, [1, 2])
    assert [len(each) for each in half["parts"]] == [2, 7, 2, 7]


def test_lists_that_hardly_differ_are_warned_about():
    """Inputs of one rough direction and very different lengths: the longest lead every list."""
    model = nn.Linear(9, 3, bias=False)
    nn.init.zeros_(model.weight)

    def inputs(count, spread):
        directions = torch.cat([torch.ones(count, 1), 0.5 * torch.randn(count, 8)], 1)
        return directions * (spread * torch.randn(count, 1)).exp()

    train = inputs(80, 2.0), torch.zeros(80, dtype=torch.long)
    query = inputs(12, 0.0), torch.zeros(12, dtype=torch.long)
    checkpoints = gs.Checkpoints([model.state_dict()], lr=0.1)
    for options in ({}, {"top_k": 10}):
        message = r'10 strongest .* Try normalize="cosine"'
        with pytest.warns(gs.GradStatsWarning, match=message) as heard:
            gs.influence(model, [train], [query], loss_fn, checkpoints, progress=False, **options)
        assert {warning.filename for warning in heard} == {__file__}
        # Divided by the norms the lists differ, and nothing is warned about.
        gs.influence(
            model, [train], [query], loss_fn, checkpoints, normalize="cosine", progress=False,
            **options,
        )  # fmt: skip


def test_sizes_are_rounded_to_the_unit_that_they_round_to():
    sizes = {999: "999 bytes", 999_400: "999 kB", 999_600: "1 MB", 12_345_678: "12.3 MB"}
    sizes |= {4e12: "4 TB"}
    assert [amount(size) for size in sizes] == list(sizes.values())
    times = {2.34: "2.3 s", 59.4: "59 s", 600: "10 min", 7200: "2 h", 4e5: "5 days"}
    assert [duration(seconds) for seconds in times] == list(times.values())


def test_the_estimate_and_the_bar_are_printed(setting, tmp_path, capsys):
    run(setting, progress=True, out=tmp_path / "scores")
    printed = capsys.readouterr().err
    assert "influence of 11 training examples on 6 query examples at 2 checkpoints" in printed
    assert f"1.33 kB in {tmp_path / 'scores'}; query gradients take" in printed
    assert "about " in printed and "100%" in printed
    run(setting, progress=True, out=tmp_path / "scores")
    assert "the first checkpoint is already there" in capsys.readouterr().err
    run(setting, progress=True, top_k=100)
    assert "4.22 kB for the lists" in capsys.readouterr().err
    run(setting, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["self", "matrix", "top"])
def test_bars_are_closed_after_an_exception(kind):
    def failing(model, batch):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop") as caught:
        processes.call(kind, None, loss=failing, progress=True)
    # The traceback would keep an open one.
    assert caught.value.__traceback__ is not None
    assert not list(tqdm._instances)


def test_pictures_where_the_data_are_images(setting):
    scores = run(setting)
    figure = scores.plot(2, k=3)
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert len(labels) == 6 and figure.axes[0].get_xlabel() == "influence on query 2 (raw)"
    assert scores.cosine.plot(2).axes[0].get_xlabel() == "influence on query 2 (cosine)"
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    data = [(torch.rand(5, 1, 6, 6), torch.randint(3, (5,)))]
    scores = gs.influence(
        model, data, data, loss_fn, gs.Checkpoints([model.state_dict()], lr=0.1), progress=False
    )
    figure = scores.plot(query=1, k=2)
    shown = [axes for axes in figure.axes if axes.images]
    assert len(shown) == 5 and shown[1].get_title().startswith("proponents (raw)\n")
    np.testing.assert_allclose(
        shown[0].images[0].get_array(), _stretched(data[0][0][1, 0].double().numpy())
    )
    best = scores.proponents(1, 1).positions[0]
    title = shown[1].get_title()
    assert f"{best}: " in title and f"label {data[0][1][best].item()}" in title


@pytest.mark.parametrize("queries", [3, 4])
def test_lists_of_few_queries_are_left_to_chance(queries):
    matrix = np.repeat(np.arange(40.0)[:, None], queries, 1)
    scores = gs.InfluenceScores({None: matrix}, np.arange(40), np.arange(queries), None, ("a",))
    alike = pytest.warns(gs.GradStatsWarning, match="hardly differ between queries")
    with alike if queries == 4 else contextlib.nullcontext():
        scores.warn_if_alike(10)


@pytest.mark.parametrize(
    ("shape", "title"),
    [((6, 6), "query 1"), ((3, 6, 6), "query 1"), ((2, 6, 6), None), ((3, 6, 2), None),
     ((3, 6), None), ((36,), None), ((1, 6, 6, 6), None)],
)  # fmt: skip
def test_what_is_a_picture(shape, title):
    """Of one channel or three; a target that is no class is no label."""
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(1))
    data = [(torch.rand(5, *shape), torch.rand(5))]
    model(data[0][0])

    def losses(model, batch):
        return (model(batch[0])[:, 0] - batch[1]).square()

    checkpoints = gs.Checkpoints([model.state_dict()], lr=0.1)
    scores = gs.influence(model, data, data, losses, checkpoints, progress=False)
    (first, *_) = scores.plot(query=1, k=2).axes
    assert (first.get_title() if first.images else None) == title


def test_pictures_of_examples_along_another_axis():
    """Spectrograms (frames, B, bands), which could be cut along the frames just as well."""
    model = nn.Linear(7, 3)

    def losses(model, batch):
        return functional.cross_entropy(model(batch[0].mean(0)), batch[1], reduction="none")

    data = [(torch.rand(9, 5, 7), torch.randint(3, (5,)))]
    checkpoints = gs.Checkpoints([model.state_dict()], lr=0.1)
    scores = gs.influence(model, data, data, losses, checkpoints, batch_dim=1, progress=False)
    axes = scores.plot(query=4, k=2).axes[0]
    np.testing.assert_allclose(
        axes.images[0].get_array(), _stretched(data[0][0][:, 4].double().numpy())
    )
    assert f"label {data[0][1][4].item()}" in axes.get_title()


def test_the_picture_of_a_query_counted_from_the_end():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    data = [(torch.rand(size, 1, 6, 6), torch.randint(3, (size,))) for size in (4, 3)]
    checkpoints = gs.Checkpoints([model.state_dict()], lr=0.1)
    scores = gs.influence(model, data, data, loss_fn, checkpoints, progress=False)
    axes = scores.plot(query=-1, k=2).axes[0]
    np.testing.assert_allclose(
        axes.images[0].get_array(), _stretched(data[1][0][2, 0].double().numpy())
    )


def _stretched(image):
    return (image - image.min()) / (image.max() - image.min())


@pytest.mark.filterwarnings("ignore:Input Tensor 0 did not already require:UserWarning")
def test_equal_to_captum_tracincp(tmp_path):
    """At learning rate 1, with the plain network that both support."""
    tracin = pytest.importorskip("captum.influence").TracInCP
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    x, y = torch.randn(14, 6), torch.randint(4, (14,))
    queries, labels = torch.randn(5, 6), torch.randint(4, (5,))
    paths = []
    for number in range(2):
        state = {
            name: value + 0.2 * torch.randn_like(value)
            for name, value in model.state_dict().items()
        }
        paths.append(tmp_path / f"{number}.pt")
        torch.save({"model_state_dict": state}, paths[-1])

    def load(net, path):
        net.load_state_dict(torch.load(path, weights_only=True)["model_state_dict"])
        return 1.0

    captum = tracin(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), TensorDataset(x, y),
        [str(path) for path in paths], checkpoints_load_func=load,
        loss_fn=nn.CrossEntropyLoss(reduction="sum"), batch_size=5,
        sample_wise_grads_per_batch=True,
    )  # fmt: skip
    checkpoints = gs.Checkpoints([str(path) for path in paths], lr=1.0)
    data = batches((x, y), 5)
    scores = gs.influence(model, data, [(queries, labels)], loss_fn, checkpoints, progress=False)
    expected = captum.influence((queries, labels)).T
    np.testing.assert_allclose(np.asarray(scores), expected.numpy(), rtol=1e-4, atol=1e-5)
    own = gs.self_influence(model, data, loss_fn, checkpoints, progress=False)
    np.testing.assert_allclose(own.self_influence, captum.self_influence().numpy(), rtol=1e-4)


@pytest.mark.filterwarnings("ignore:Input Tensor 0 did not already require:UserWarning")
@pytest.mark.parametrize("fast", [False, True])
def test_captum_leaves_out_some_layers_in_its_faster_form(fast):
    """As the guide says: with ``sample_wise_grads_per_batch``, all but linear and Conv2d layers."""
    tracin = pytest.importorskip("captum.influence").TracInCP
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
    data = torch.randn(14, 6), torch.randint(4, (14,))
    query = torch.randn(5, 6), torch.randint(4, (5,))
    captum = tracin(
        model, TensorDataset(*data), ["held"], checkpoints_load_func=lambda net, path: 1.0,
        loss_fn=nn.CrossEntropyLoss(reduction="sum" if fast else "none"), batch_size=5,
        sample_wise_grads_per_batch=fast,
    )  # fmt: skip
    held = gs.Checkpoints(model.state_dict(), lr=1.0)
    scores = gs.influence(
        model, [data], [query], loss_fn, held, exclude="1.*" if fast else None, progress=False
    )
    expected = captum.influence(query).T.numpy()
    np.testing.assert_allclose(np.asarray(scores), expected, rtol=1e-4, atol=1e-5)


def test_a_transformer_with_tied_weights_from_dict_batches():
    """Hugging Face's batches, a loss with ignored positions, both sides of different lengths."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=13, n_positions=7, attn_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(config).double()

    def next_token(model, batch):
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        targets = batch["input_ids"][:, 1:]
        losses = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return losses.mean(1)

    train = transformers.BatchEncoding({"input_ids": torch.randint(13, (4, 6))})
    query = transformers.BatchEncoding({"input_ids": torch.randint(13, (3, 5))})
    state = {name: value.clone() for name, value in model.state_dict().items()}
    scores = gs.influence(
        model, [train], [query], next_token, gs.Checkpoints([state], lr=0.5), progress=False
    )
    model.eval()
    sides = [flat(gradients_of(model, next_token(model, batch))) for batch in (train, query)]
    np.testing.assert_allclose(
        np.asarray(scores), 0.5 * sides[0] @ sides[1].T, rtol=1e-9, atol=1e-12
    )
