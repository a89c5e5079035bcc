"""Self-influence against plain autograd, its baselines, its table and its report."""

from __future__ import annotations

import re
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from gradstats.scoring import _self_influence
from gradstats.scoring._metrics import detect
from gradstats.scoring._rankings import Ranking
from gradstats.scoring._table import FIELDS
from tests.oracle import assert_unchanged, oracle_sqnorms, snapshot
from tests.scoring.setting import (
    RATES,
    batches,
    loss_fn,
    make_setting,
    put_back,
    sorted_losses,
)


@pytest.fixture
def setting():
    return make_setting()


def run(setting, loss=loss_fn, **options):
    checkpoints = gs.Checkpoints(setting.states, lr=list(RATES))
    options = {"progress": False, **options}
    return gs.self_influence(setting.model, setting.train_batches, loss, checkpoints, **options)


def at_checkpoints(setting):
    """(C, N) squared norms and losses, (C, N, K) probabilities, by plain autograd."""
    sqnorms, losses, probabilities = [], [], []
    for state in setting.states:
        model = make_setting().model
        model.load_state_dict(state)
        sqnorms.append(sum(oracle_sqnorms(model, setting.train, loss_fn).values()))
        with torch.no_grad():
            losses.append(loss_fn(model, setting.train))
            probabilities.append(model(setting.train[0]).softmax(1))
    return (torch.stack(each).numpy() for each in (sqnorms, losses, probabilities))


def test_every_column(setting):
    state = snapshot(setting.model)
    table = run(setting)
    sqnorms, losses, probabilities = at_checkpoints(setting)
    given = setting.train[1].numpy()
    rows = np.arange(11)
    chosen = probabilities[:, rows, given]
    others = np.where(np.eye(3, dtype=bool)[given], -1.0, probabilities).max(-1)
    errors = probabilities - np.eye(3)[given]
    expected = {
        "id": rows, "label": given, "predicted": probabilities[-1].argmax(1),
        "self_influence": np.array(RATES) @ sqnorms,
        "grad_norm": np.sqrt(sqnorms).mean(0), "loss": losses.mean(0),
        "margin": (chosen - others).mean(0), "el2n": np.linalg.norm(errors, axis=2).mean(0),
    }  # fmt: skip
    assert list(table.columns) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(table.columns[name], values, rtol=1e-10, err_msg=name)
        attribute = getattr(table, "ids" if name == "id" else name)
        np.testing.assert_array_equal(attribute, table.columns[name])
    np.testing.assert_allclose(table.sqnorm, sqnorms, rtol=1e-10)
    each = {
        "self_influence": np.array(RATES)[:, None] * sqnorms, "grad_norm": np.sqrt(sqnorms),
        "loss": losses, "margin": chosen - others, "el2n": np.linalg.norm(errors, axis=2),
        "predicted": probabilities.argmax(2),
    }  # fmt: skip
    assert list(table.by_checkpoint) == list(each)
    for name, values in each.items():
        np.testing.assert_allclose(table.by_checkpoint[name], values, rtol=1e-10, err_msg=name)
    first = table.top(2).by_checkpoint["loss"][:, 0]
    np.testing.assert_allclose(first, losses[:, np.argmax(table.self_influence)], rtol=1e-10)
    assert table.reason is None
    assert_unchanged(setting.model, state)


@pytest.mark.parametrize("loss", [sorted_losses, put_back])
def test_losses_that_the_model_sorted(setting, loss):
    """Rows are the examples of the data, in whatever order their losses were computed."""
    expected, table = run(setting), run(setting, loss)
    for name, values in expected.columns.items():
        np.testing.assert_allclose(table.columns[name], values, rtol=1e-10, err_msg=name)
    assert table.reason is None


@pytest.mark.usefixtures("graphs_run_on_cpus")
@pytest.mark.parametrize("loss", [loss_fn, sorted_losses, put_back])
def test_losses_that_are_compiled(setting, loss):
    torch._dynamo.reset()
    expected, table = run(setting), run(setting, torch.compile(loss, backend="aot_eager"))
    for name, values in expected.columns.items():
        np.testing.assert_allclose(table.columns[name], values, rtol=1e-10, err_msg=name)
    assert table.reason is None


def test_on_disk_the_same(setting, tmp_path):
    values = run(setting)._values
    assert np.array_equal(run(setting, out=tmp_path / "table")._values, values)
    assert np.array_equal(run(setting, out=tmp_path / "table")._values, values)


def test_top(setting):
    table = run(setting)
    order = np.argsort(-table.self_influence)
    best = table.top(4)
    assert best.ids.tolist() == order[:4].tolist()
    for name in table.columns:
        np.testing.assert_array_equal(best.columns[name], table.columns[name][order[:4]])
    assert len(table.top(100)) == 11
    assert table.top(np.int64(4)).ids.tolist() == best.ids.tolist()
    for k in (0, -1, 2.0, True):
        with pytest.raises(gs.ScoreError, match=r"^k is"):
            table.top(k)


def test_log_probabilities_and_modules_are_seen(setting):
    def negative_log(model, batch):
        return functional.nll_loss(
            input=model(batch[0]).log_softmax(1), target=batch[1], reduction="none"
        )

    criterion = nn.CrossEntropyLoss(reduction="none")
    expected = run(setting)
    for loss in (negative_log, lambda model, batch: criterion(model(batch[0]), batch[1])):
        got = run(setting, loss)
        for name in ("self_influence", "margin", "el2n", "loss", "label", "predicted"):
            np.testing.assert_allclose(got.columns[name], expected.columns[name], rtol=1e-10)


def two_classes(model, batch):
    """The first logit, of labels that are 0 or 1: a column, sorted, and one number for each."""
    order = batch[0][:, 0].argsort()
    return model(batch[0][order])[:, :1], (batch[1][order] % 2)[:, None].double()


def binary(model, batch):
    logits, labels = two_classes(model, batch)
    loss = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return loss[:, 0]


def binary_of_probabilities(model, batch):
    logits, labels = two_classes(model, batch)
    return nn.BCELoss(reduction="none")(logits[:, 0].sigmoid(), labels[:, 0])


def beside_another(model, batch):
    """Of several classes, and of whether it is the last one."""
    logits = model(batch[0])
    last = functional.binary_cross_entropy_with_logits(
        logits[:, 2], (batch[1] == 2).double(), reduction="none"
    )
    return last + functional.cross_entropy(logits, batch[1], reduction="none")


def test_several_classes_beside_two(setting):
    table, expected = run(setting, beside_another), run(setting)
    np.testing.assert_allclose(table.margin, expected.margin, rtol=1e-10)
    np.testing.assert_allclose(table.el2n, expected.el2n, rtol=1e-10)


def binary_by_position(model, batch):
    """With PyTorch's older arguments, of which the fifth is another than a cross-entropy's."""
    logits, labels = two_classes(model, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return functional.binary_cross_entropy_with_logits(logits, labels, None, None, False)[:, 0]


@pytest.mark.parametrize("loss", [binary, binary_of_probabilities, binary_by_position])
def test_binary_classification(setting, loss):
    def as_two_classes(model, batch):
        logits, labels = two_classes(model, batch)
        logits = functional.pad(logits, (1, 0))
        return functional.cross_entropy(logits, labels[:, 0].long(), reduction="none")

    table, expected = run(setting, loss), run(setting, as_two_classes)
    assert table.reason is None and np.isfinite(table.margin).all()
    for name, values in expected.columns.items():
        np.testing.assert_allclose(table.columns[name], values, rtol=1e-10, err_msg=name)


def squared(model, batch):
    return (model(batch[0]).sum(1) - batch[1]).square()


def twice(model, batch):
    return loss_fn(model, batch) + loss_fn(model, batch)


def ignoring(model, batch):
    labels = torch.where(batch[1] == 0, -100, batch[1])
    return functional.cross_entropy(model(batch[0]), labels, reduction="none") + model(
        batch[0]
    ).square().sum(1)


def smoothed(model, batch):
    return functional.cross_entropy(
        model(batch[0]), functional.one_hot(batch[1], 3).double(), reduction="none"
    )


def binary_smoothed(model, batch):
    logits, labels = two_classes(model, batch)
    return functional.binary_cross_entropy_with_logits(
        logits[:, 0], 0.9 * labels[:, 0] + 0.05, reduction="none"
    )


def several_labels(model, batch):
    labels = functional.one_hot(batch[1], 3).double()
    return functional.binary_cross_entropy_with_logits(
        model(batch[0]), labels, reduction="none"
    ).sum(1)


def beside_a_scalar(model, batch):
    """A term that is the same for all, and in which the model plays no part."""
    alike = functional.binary_cross_entropy(batch[0].new_tensor(0.5), batch[0].new_tensor(1.0))
    return squared(model, batch) + alike


def in_pairs(model, batch):
    logits = model(batch[0]).repeat_interleave(2, 0)
    labels = batch[1].repeat_interleave(2, 0)
    return functional.cross_entropy(logits, labels, reduction="none").view(-1, 2).mean(1)


def beside_rows_of_another(model, batch):
    """What is logged of rows that are not those of the batch, one each."""
    outputs = model(batch[0])
    rows = [0, *range(len(outputs) - 1)]
    functional.cross_entropy(outputs.detach()[rows], batch[1])
    return outputs.square().sum(1)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (squared, r"calls cross_entropy \(or nll_loss, or a binary_cross_entropy\) 0 times"),
        (twice, r"calls cross_entropy \(or nll_loss, or a binary_cross_entropy\) 2 times"),
        (binary_smoothed, "some labels of the binary cross-entropy are neither 0 nor 1"),
        (beside_a_scalar, r"logits of shape \(\)"),
        (several_labels, r"logits of shape \(3, 3\) and labels of shape \(3, 3\)"),
        (smoothed, r"labels of shape \(3, 3\)"),
        (in_pairs, r"of 3 examples sees logits of shape \(6, 3\)"),
        (beside_rows_of_another, r"which example each row of the logits is of .* \[0, 0, 1\]"),
    ],
)
def test_where_the_loss_shows_no_classification(setting, loss, reason):
    table = run(setting, loss)
    assert np.isnan(table.margin).all() and np.isnan(table.el2n).all()
    assert (table.label == -1).all() and (table.predicted == -1).all()
    report = table.report([1, 2])
    assert list(report.rows) == ["self-influence", "mean gradient norm", "mean loss"]
    for text in (str(table), str(report)):
        assert re.search(reason, text), text


def ignoring_a_class(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none", ignore_index=0)


def ignoring_by_position(model, batch):
    log_probability = model(batch[0]).log_softmax(1)
    return functional.nll_loss(log_probability, batch[1], None, None, 0, None, "none")


@pytest.mark.parametrize("loss", [ignoring, ignoring_a_class, ignoring_by_position])
def test_ignored_labels_have_no_margin(setting, loss):
    """Others of their batch keep theirs."""
    table = run(setting, loss)
    assert table.reason == "some labels are ignored by the cross-entropy"
    unlabelled, known = setting.train[1].numpy() == 0, run(setting)
    assert 0 < unlabelled.sum() < 11
    for name, of_none in (("label", -1), ("margin", np.nan), ("el2n", np.nan)):
        want = np.where(unlabelled, of_none, known.columns[name])
        np.testing.assert_allclose(table.columns[name], want, rtol=1e-10, err_msg=name)
    np.testing.assert_array_equal(table.predicted, known.predicted)


def test_report_puts_every_baseline_in_its_row(setting):
    table = run(setting)
    bad = np.zeros(11, dtype=bool)
    bad[[2, 5, 7]] = True
    report = table.report(bad)
    assert list(report.rows) == [
        "self-influence", "mean gradient norm", "mean loss", "mean margin", "mean EL2N",
    ]  # fmt: skip
    scores = {"self-influence": table.self_influence, "mean margin": -table.margin}
    for name, values in scores.items():
        pairs = [(values[i] > values[j]) for i in (2, 5, 7) for j in range(11) if not bad[j]]
        assert report.rows[name].auroc == pytest.approx(np.mean(pairs))
        top = np.argsort(-values)[:3]
        assert report.rows[name].recall_at_noise_rate == pytest.approx(bad[top].mean())
        assert f"{report.rows[name].auroc:.4f}" in str(report)
    assert report.bad == 3 and "3 known bad among 11 examples" in str(report)
    for ids in ([2, 5, 7], {2, 5, 7}, frozenset([2, 5, 7]), {2: 0, 5: 0, 7: 0}.keys(),
                torch.tensor([7, 5, 2])):  # fmt: skip
        assert str(table.report(ids)) == str(report)


def test_scores_that_are_not_finite_are_left_out_of_the_report(setting):
    setting.train[0][9, 0] = float("nan")
    report = run(setting, nonfinite="keep").report([2, 5])
    assert list(report.rows) == [] and report.examples == 11
    assert list(report.missing) == [
        "self-influence", "mean gradient norm", "mean loss", "mean margin", "mean EL2N",
    ]  # fmt: skip
    (empty,) = run(setting, nonfinite="keep").plot([2, 5]).axes[1:]
    assert [text.get_text() for text in empty.texts] == ["no score is finite for all examples"]
    text = str(report)
    assert text.splitlines()[0] == "2 known bad among 11 examples"
    assert (
        "no self-influence, mean gradient norm, mean loss, mean margin, mean EL2N: not finite for "
        "the examples with ids [9]"
    ) in text

    def finite_loss(model, batch):
        return loss_fn(model, (batch[0].nan_to_num(), batch[1]))

    def root(model, batch):
        """Of infinite slope where the input is zero."""
        outputs = model[0](batch[0].nan_to_num())
        return (outputs - outputs.detach()).abs().sum(1).sqrt() + finite_loss(model, batch)

    table = run(setting, root, nonfinite="keep")
    report = table.report([2, 5])
    assert list(report.rows) == ["mean loss", "mean margin", "mean EL2N"]
    assert "no self-influence, mean gradient norm: not finite for the examples with ids [" in str(
        report
    )
    assert len(table.plot([2, 5]).axes) == 2


def test_an_example_that_is_not_finite_leaves_the_others_of_its_batch_as_they_are(setting):
    expected = run(setting)
    setting.train[0][9, 0] = float("nan")
    table = run(setting, nonfinite="keep")
    assert table.reason is None
    for name, values in expected.columns.items():
        got = table.columns[name]
        np.testing.assert_allclose(got[:9], values[:9], rtol=1e-10, err_msg=name)
        np.testing.assert_allclose(got[10:], values[10:], rtol=1e-10, err_msg=name)
    assert table.label[9] == setting.train[1][9] and table.predicted[9] == -1
    assert np.isnan([table.margin[9], table.el2n[9], table.self_influence[9]]).all()
    assert table.top(11, by="margin").ids[-1] == 9


def test_infinite_scores_are_left_out_of_the_report(setting):
    """They would rank, and above all others."""
    held = run(setting)._values
    held[0, 4, FIELDS.index("sqnorm")] = held[1, 4, FIELDS.index("weighted")] = np.inf
    report = gs.SelfInfluence(np.arange(11), ("a", "b"), held, None).report([2, 5])
    assert list(report.rows) == ["mean loss", "mean margin", "mean EL2N"]
    for name in ("self-influence", "mean gradient norm"):
        assert report.missing[name] == "not finite for the examples with ids [4]"


def test_average_precision():
    sklearn = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    for decimals in (8, 1):
        values = random.normal(size=60).round(decimals)
        bad = random.random(60) < 0.3
        found = detect(values, bad)
        expected = sklearn.average_precision_score(bad, values)
        assert found.average_precision == pytest.approx(expected, rel=1e-12)
        assert found.auroc == pytest.approx(sklearn.roc_auc_score(bad, values), rel=1e-12)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros(5, dtype=bool), r"shape \(5,\), expected \(11,\)"),
        (np.zeros(11, dtype=bool), "marks 0 of 11"),
        (np.ones(11, dtype=bool), "marks 11 of 11"),
        ([3, 99], r"lists \[99\], which are not ids .* in the Subset"),
        ([3, float("nan")], r"lists \[nan\], which are not ids"),
        (np.eye(11, dtype=int)[4], r"lists \[0\] more than once.*known_bad.astype\(bool\)"),
        (torch.eye(11, dtype=torch.int64)[4], r"lists \[0\] more than once"),
        ([1, 2, 5, 2, 5], r"lists \[2, 5\] more than once"),
        ([[1], [2]], r"has shape \(2, 1\), expected one axis"),
        (3, r"has shape \(\), expected one axis"),
        ([2.0**53], r"has dtype float64, which cannot hold every id from 9007199254740992"),
    ],
)
def test_a_mask_that_tells_nothing_apart(setting, bad, message):
    with pytest.raises(gs.ScoreError, match=message):
        run(setting).report(bad)


@pytest.mark.parametrize("first", [3, 2**63 + 7])
def test_ids_of_64_bits_are_told_from_their_neighbours(first):
    """Such as hashes: signed and unsigned ones compared by NumPy are rounded to 53 bits."""
    random = np.random.default_rng(0)
    ids = 2**61 + random.choice(2**59, size=300, replace=False).astype(np.uint64)
    ids = np.stack([ids, ids + 1], 1).ravel()
    ids[0] = first
    bad = np.arange(2, 200, 2)
    values = random.random((1, len(ids), len(FIELDS)))
    table = gs.SelfInfluence(ids if first > 3 else ids.astype(np.int64), ("a",), values, None)
    expected = str(table.report(np.isin(np.arange(len(ids)), bad)))
    listed = ids[bad].tolist()
    for given in (listed, set(listed), torch.tensor(listed), ids[bad], ids[bad].astype(np.int64)):
        assert str(table.report(given)) == expected


def trained(steps, width):
    """A linear classifier of some inputs after some steps, the label of example 3 wrong."""
    torch.manual_seed(0)
    x = torch.randn(60, width)
    y = (x[:, :5].argmax(1) + torch.arange(60).eq(3)) % 5
    model = nn.Linear(width, 5)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    table = gs.self_influence(
        model, batches((x, y), 32), loss_fn, gs.Checkpoints([model.state_dict()], lr=1.0),
        progress=False,
    )  # fmt: skip
    return table


def test_a_checkpoint_that_has_memorised_is_warned_about():
    table = trained(60, width=80)
    assert "predicts 100.0% of the given labels" in str(table)
    (warning,) = table.report([3]).warnings
    assert "predicts the given label of 100% of the known bad examples" in warning
    assert "warning: state dict 0 predicts" in str(table.report([3]))
    assert "warning" not in str(table.top(5))


def test_the_initialisation_is_warned_about():
    (warning,) = trained(0, width=80).report([3]).warnings
    assert "mean loss 1.61, guessing gives 1.61: near the initialisation, gradient" in warning


def test_checkpoints_that_are_warned_about_alike_share_a_warning():
    (x, y), model = (torch.randn(20, 6), torch.arange(20) % 5), nn.Linear(6, 5)
    states = [{"weight": torch.full((5, 6), v), "bias": torch.zeros(5)} for v in (0.0, 1.0, 2.0)]
    table = gs.self_influence(
        model, batches((x, y), 20), loss_fn, gs.Checkpoints(states, lr=1.0), progress=False
    )
    (warning,) = table.report([3]).warnings
    assert warning.startswith("state dict 0 has mean loss 1.61, guessing gives 1.61: ")
    assert warning.endswith(" The same holds for state dict 1, state dict 2.")
    assert warning in str(table)


def test_a_checkpoint_in_between_is_not_warned_about():
    table = trained(6, width=8)
    assert table.report([3]).warnings == [] and "warning" not in str(table)


@pytest.mark.parametrize("infinite", [1, 10])
def test_infinite_losses_are_not_taken_for_the_initialisation(infinite):
    held = {name: 1.25 for name in FIELDS} | {"label": 0, "predicted": 1, "classes": 10}
    values = np.array([[[held[name] for name in FIELDS]] * 10])
    values[0, :infinite, FIELDS.index("loss")] = np.inf
    table = gs.SelfInfluence(np.arange(10), ("a",), values, None)
    assert table.report([3]).warnings == [] and "warning" not in str(table)


def made(examples, label=0.0, reason=None):
    """A table of given numbers at one checkpoint, with ids that are long."""
    held = {name: 1.25 for name in FIELDS} | {"label": label, "predicted": label + 1, "classes": 10}
    values = np.array([[[held[name] for name in FIELDS]] * examples])
    return gs.SelfInfluence(np.arange(examples) + 123456, ("a",), values, reason)


def test_the_table_as_text(setting):
    lines = str(run(setting)).splitlines()
    assert len({len(line) for line in lines[1:13]}) == 1
    assert repr(run(setting)).startswith("SelfInfluence(examples=11, self_influence=")
    head = "id      label  predicted  self_influence  grad_norm  loss  margin  el2n"
    row = "123456      0          1            1.25      1.118  1.25    1.25  1.25"
    assert str(made(1)).splitlines() == [
        "self-influence of 1 example over 1 checkpoint", head, row,
    ]  # fmt: skip
    assert len(str(made(20)).splitlines()) == 22
    assert str(made(1021)).splitlines()[22:] == ["… 1,001 more; .top(k) ranks them"]
    assert str(made(1, np.nan, "it shows none")).splitlines()[1:] == [
        "id      self_influence  grad_norm  loss",
        "123456            1.25      1.118  1.25",
        "no margin and EL2N: it shows none",
    ]


def test_ids_that_are_known_to_be_bad():
    """Integers that floats would not tell apart, and names."""
    held = made(4)
    for ids in (np.arange(4) + 2**53, np.array(["a", "b", "c", "d"])):
        table = gs.SelfInfluence(ids, ("a",), held._values, None)
        for bad in (ids[1:3], ids[1:3].tolist(), set(ids[1:3].tolist())):
            assert table.report(bad).bad == 2


def test_results_in_a_notebook(setting):
    ranking = Ranking(np.arange(2), np.array(["a", "b"]), np.array([0.5, 0.25]))
    for result in (run(setting), run(setting).report([1, 2, 5]), ranking):
        shown = result._repr_mimebundle_(include=None, exclude=None)
        assert shown == {"text/plain": str(result)} and len(str(result).splitlines()) > 2


def test_results_in_a_shell(setting):
    """One line each: their counts at all thresholds would fill the screen."""
    report = run(setting).report([1, 2, 5])
    rows = {name: round(row.auroc, 4) for name, row in report.rows.items()}
    assert repr(report) == f"DetectionReport(bad=3, examples=11, auroc={rows})"
    row = report.rows["mean loss"]
    assert repr(row) == (
        f"Detection(auroc={row.auroc:.4f}, average_precision={row.average_precision:.4f}, "
        f"recall_at_noise_rate={row.recall_at_noise_rate:.4f})"
    )
    single = gs.self_influence(
        setting.model, setting.train_batches, loss_fn, gs.Checkpoints(setting.states[:1], lr=0.1),
        progress=False,
    )  # fmt: skip
    assert str(single).startswith("self-influence of 11 examples over 1 checkpoint\n")
    assert str(single.top(1)).startswith("self-influence of 1 example over 1 checkpoint\n")


def test_pandas_and_parquet(setting, tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    table = run(setting)
    frame = table.to_pandas()
    table.to_parquet(tmp_path / "table.parquet")
    for got in (frame, pandas.read_parquet(tmp_path / "table.parquet")):
        assert list(got.columns) == list(table.columns)
        for name, values in table.columns.items():
            np.testing.assert_array_equal(got[name].to_numpy(), values)


def test_the_rows_that_another_score_puts_first(setting):
    """As the report's baselines rank them: small margins are suspicious, all else is when large."""
    table = run(setting)
    for by in ("self_influence", "grad_norm", "loss", "margin", "el2n"):
        values = table.columns[by] * (-1 if by == "margin" else 1)
        best = table.top(4, by=by)
        assert best.ids.tolist() == np.argsort(-values, kind="stable")[:4].tolist()
        np.testing.assert_array_equal(best.columns[by], table.columns[by][best.ids])
    for by in ("label", 3, None):
        message = f"by is {by!r}, expected one of self_influence, grad_norm, loss, margin, el2n."
        with pytest.raises(gs.ScoreError, match=f"^{re.escape(message)}$"):
            table.top(4, by=by)
    regression = run(setting, lambda model, batch: model(batch[0]).square().sum(1))
    message = (
        "there is no margin: the loss calls cross_entropy (or nll_loss, or a binary_cross_entropy) "
        "0 times, expected once. Expected by= one of the scores that need no classification: "
        "self_influence, grad_norm, loss."
    )
    with pytest.raises(gs.ScoreError, match=f"^{re.escape(message)}$"):
        regression.top(4, by="margin")
    assert regression.top(2, by="loss").loss.tolist() == sorted(regression.loss)[:-3:-1]


def test_figures(setting):
    table = run(setting)
    (axes,) = table.plot().axes
    assert sorted(axes.lines[0].get_ydata(), reverse=True) == sorted(
        table.self_influence, reverse=True
    )
    figure = table.plot([2, 5])
    assert [line.get_label() for line in figure.axes[0].lines] == ["other examples", "known bad"]
    assert sorted(figure.axes[0].lines[1].get_ydata()) == sorted(table.self_influence[[2, 5]])
    auroc = table.report([2, 5]).rows["mean loss"].auroc
    found = figure.axes[1]
    assert f"mean loss: AUROC {auroc:.4f}" in [line.get_label() for line in found.lines]
    # Scores that find nearly the same are told apart, near where they are read: the noise rate.
    curves = [line for line in found.lines if "AUROC" in line.get_label()]
    assert len({(line.get_color(), line.get_linestyle()) for line in curves}) == len(curves) == 5
    assert [text.get_text() for text in found.texts] == ["noise rate 18.2%"]
    for bad in ([int(table.top(1).ids[0])], [2, 5], range(8)):
        rows = table.report(bad).rows.values()
        needed = min(row.inspected_fraction[row.found_fraction == 1][0] for row in rows)
        limits = 0, min(1, max(3 * len(bad) / 11, needed))
        np.testing.assert_allclose(table.plot(bad).axes[1].get_xlim(), limits)


@pytest.mark.parametrize(
    ("module", "action", "extra"),
    [
        ("pandas", lambda table, path: table.to_pandas(), "tables"),
        ("pyarrow", lambda table, path: table.to_parquet(path), "tables"),
        ("matplotlib.figure", lambda table, path: table.plot(), "plot"),
    ],
)
def test_a_missing_package_names_the_extra(setting, tmp_path, monkeypatch, module, action, extra):
    table = run(setting)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(gs.MissingPackageError, match=rf"pip install 'gradstats\[{extra}\]'"):
        action(table, tmp_path / "table.parquet")


def test_out_of_memory_halves_the_batch(setting, capsys):
    def hungry(model, batch):
        if len(batch[0]) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 10 bytes")
        return loss_fn(model, batch)

    got = run(setting, hungry, progress=True)
    expected = run(setting)
    np.testing.assert_allclose(got._values, expected._values, rtol=1e-10)
    printed = capsys.readouterr().err
    assert "out of memory with 4 examples at once (DefaultCPUAllocator" in printed
    assert "continuing with 1 at once" in printed


@pytest.mark.parametrize(("first", "expected"), [(0.9, "0.12 s"), (9.0, "1.8 min")])
def test_the_estimate_is_of_a_batch_after_the_first(setting, monkeypatch, capsys, first, expected):
    """What the first takes more, to choose and compile kernels, was counted for each."""
    # One example a batch: 12 to do, at 0.01 s each; a trial that is long is not repeated.
    batches = [[tensor[i : i + 1] for tensor in setting.train] for i in range(6)]
    clock = iter([0.0, first, first, first + 0.01])
    timer = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr(_self_influence, "time", timer)
    gs.self_influence(
        setting.model, batches, loss_fn, gs.Checkpoints(setting.states, lr=0.1), progress=True
    )
    assert f"about {expected}" in capsys.readouterr().err


def test_the_estimate_is_printed(setting, tmp_path, capsys):
    run(setting, progress=True, out=tmp_path / "table")
    printed = capsys.readouterr().err
    assert "self-influence of 11 examples at 2 checkpoints: 1.41 kB in" in printed
    assert "about " in printed


class Merging(nn.Linear):
    """Adds its adapter to its weight in eval mode, as loralib's layers do, and takes it off."""

    def __init__(self, *args, merges):
        super().__init__(*args)
        self.adapter = nn.Parameter(torch.full_like(self.weight, 0.5))
        self.merges, self.merged = merges, False

    def train(self, mode=True):
        super().train(mode)
        if self.merges and self.merged == mode:
            self.weight.data += -self.adapter.data if mode else self.adapter.data
        self.merged = not mode
        return self

    def forward(self, x):
        weight = self.weight if self.merges and self.merged else self.weight + self.adapter
        return functional.linear(x, weight, self.bias)


@pytest.mark.parametrize("training", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("merges", [False, True])
def test_a_mode_of_the_users_own(setting, merges, training):
    """What changes weights is refused; what keeps a note of the mode is told of it both times."""
    layers = [Merging(5, 5, merges=merges), Merging(5, 3, merges=merges)]
    model = nn.Sequential(*layers).double()
    expected = oracle_sqnorms(model, setting.train, loss_fn)
    states = [{name: value.clone() for name, value in model.state_dict().items()}]
    for layer, mode in zip(layers, training, strict=True):
        layer.train(mode)
    state, output = snapshot(model), model(setting.train[0])

    def run():
        return gs.self_influence(
            model, setting.train_batches, loss_fn, gs.Checkpoints(states, lr=1.0), progress=False
        ).self_influence

    if merges:
        with pytest.raises(gs.CheckpointError, match=r"eval\(\) changes '\d.weight'.*merge"):
            run()
    else:
        np.testing.assert_allclose(run(), sum(expected.values()), rtol=1e-10)
    assert_unchanged(model, state)
    assert [not layer.merged for layer in layers] == list(training)
    assert torch.equal(model(setting.train[0]), output)


def test_weights_that_a_forward_writes(setting):
    """An embedding with max_norm shortens rows where it looks them up: in a copy."""
    model = nn.Sequential(nn.Embedding(9, 5, max_norm=0.5), nn.Flatten(), nn.Linear(20, 3)).double()
    batch = torch.randint(9, (7, 4)), torch.randint(3, (7,))
    expected, state = oracle_sqnorms(model, batch, loss_fn), snapshot(model)
    # The memory of the model itself, and another.
    for weights in (model.state_dict(), {n: v.clone() for n, v in model.state_dict().items()}):
        table = gs.self_influence(
            model, [batch], loss_fn, gs.Checkpoints([weights], lr=1.0), progress=False
        )
        np.testing.assert_allclose(table.self_influence, sum(expected.values()), rtol=1e-10)
        assert_unchanged(model, state)


def test_non_finite_gradients(setting):
    setting.train[0][9, 0] = float("nan")
    with pytest.raises(gs.NonFiniteGradientError, match=r"state dict 0.*ids \[9\] are not finite"):
        run(setting)
    kept = run(setting, nonfinite="keep")
    assert np.isnan(kept.self_influence).nonzero()[0].tolist() == [9]
    with pytest.raises(gs.TrackingError, match="nonfinite is 'drop'"):
        run(setting, nonfinite="drop")
