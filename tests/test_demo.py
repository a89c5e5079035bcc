"""The demo: metrics and scores by value, a short run against the oracle, and its refusals."""

from __future__ import annotations

import csv
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import gradstats as gs
from gradstats.__main__ import main
from gradstats.demo import DemoError, Settings, run_demo
from gradstats.demo._command import WRITERS
from gradstats.demo._data import flip_labels, load_noisy_digits
from gradstats.demo._experiment import Ranked
from gradstats.demo._report import chance, table, verdict
from gradstats.demo._training import digit_network, loss_fn
from gradstats.scoring._confidence import el2n, margin
from gradstats.scoring._metrics import Detection, chance_halfwidth, detect
from tests.oracle import oracle_sqnorms

SHORT = Settings(seed=3, epochs=5, checkpoints=(1, 3, 5), early_epoch=3, initialisations=2)
FILES = ("scores.csv", "suspicious-digits.png", "curves.png")


def pair_counting_auroc(values, flipped):
    above = np.sign(values[flipped][:, None] - values[~flipped][None, :])
    return float(((above + 1) / 2).mean())


def recall_over_random_tie_breaks(values, flipped, random, rounds=4000):
    count = flipped.sum()
    found = [
        flipped[np.lexsort((random.random(len(values)), -values))[:count]].mean()
        for _ in range(rounds)
    ]
    return float(np.mean(found))


@pytest.mark.parametrize("levels", [2, 4, 1000])
def test_auroc_counts_pairs_and_ties_half(levels):
    random = np.random.default_rng(levels)
    for _ in range(20):
        values = random.integers(levels, size=50).astype(float)
        flipped = random.permutation(50) < random.integers(1, 50)
        assert detect(values, flipped).auroc == pytest.approx(
            pair_counting_auroc(values, flipped), abs=1e-12
        )


def test_recall_at_noise_rate_is_the_mean_over_tie_breaks():
    random = np.random.default_rng(0)
    values = random.integers(4, size=40).astype(float)
    flipped = random.permutation(40) < 10
    assert detect(values, flipped).recall_at_noise_rate == pytest.approx(
        recall_over_random_tie_breaks(values, flipped, random), abs=0.01
    )


def test_recall_at_noise_rate_by_hand():
    flipped = np.array([True, False, True, False, False, True])
    assert detect(np.array([6.0, 5, 4, 3, 2, 1]), flipped).recall_at_noise_rate == pytest.approx(
        2 / 3
    )
    assert detect(np.array([6.0, 1, 5, 2, 3, 4]), flipped).recall_at_noise_rate == 1.0
    # Five examples share the second place: two of them are taken, and two of the five are flipped.
    assert detect(np.array([2.0, 1, 1, 1, 1, 1]), flipped).recall_at_noise_rate == pytest.approx(
        (1 + 2 * 2 / 5) / 3
    )


def test_curves_by_hand():
    detection = detect(np.array([3.0, 2, 2, 1]), np.array([True, True, False, False]))
    assert detection.inspected.tolist() == [0, 1, 3, 4]
    assert detection.found.tolist() == [0, 1, 2, 2]
    assert detection.inspected_fraction.tolist() == [0, 0.25, 0.75, 1]
    assert detection.found_fraction.tolist() == [0, 0.5, 1, 1]
    assert detection.false_alarm_fraction.tolist() == [0, 0, 0.5, 1]


def test_chance_halfwidth_covers_random_rankings():
    random = np.random.default_rng(0)
    flipped = np.arange(300) < 30
    aurocs = [detect(random.random(300), flipped).auroc for _ in range(2000)]
    inside = np.mean(np.abs(np.array(aurocs) - 0.5) <= chance_halfwidth(flipped))
    assert inside == pytest.approx(0.95, abs=0.015)


def test_score_formulas_by_value():
    probability = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])
    given = np.array([0, 1])
    np.testing.assert_allclose(margin(probability, given), [0.5, -0.3])
    np.testing.assert_allclose(
        el2n(probability, given), np.sqrt([0.3**2 + 0.2**2 + 0.1**2, 0.1**2 + 0.7**2 + 0.6**2])
    )
    np.testing.assert_allclose(margin(probability[None], given), [[0.5, -0.3]])


def test_flips_are_symmetric_and_of_the_asked_number():
    labels = np.repeat(np.arange(10), 1000)
    flipped = flip_labels(labels, 0.5, np.random.default_rng(0))
    assert (flipped != labels).sum() == 5000
    counts = np.bincount((flipped - labels) % 10, minlength=10)[1:]
    assert counts == pytest.approx(5000 / 9, rel=0.15)


def test_data_are_split_without_overlap_and_held_out_labels_are_clean():
    from sklearn.datasets import load_digits

    data = load_noisy_digits(np.random.default_rng(0), 0.22, 0.1)
    pixels, labels = load_digits(return_X_y=True)
    assert (len(data.ids), len(data.held_out_labels)) == (1402, 395)
    assert data.flipped.sum() == 140
    held_out = np.setdiff1d(np.arange(len(labels)), data.ids)
    assert (data.true == labels[data.ids]).all()
    assert sorted(data.held_out_labels) == sorted(labels[held_out])
    np.testing.assert_array_equal(data.images.flatten(1).numpy() * 16, pixels[data.ids])


def test_learning_rate_steps_down_after_half_and_four_fifths():
    rates = [Settings().learning_rate_at(epoch) for epoch in (1, 50, 51, 80, 81, 100)]
    assert rates == pytest.approx([0.05, 0.05, 0.005, 0.005, 0.0005, 0.0005])


def ranked(name, forward_only, flipped_ranks):
    """A score of 200 examples that puts its 10 flipped labels at the given ranks."""
    flipped = np.zeros(200, dtype=bool)
    flipped[flipped_ranks] = True
    values = -np.arange(200.0)
    return Ranked(name, f"title of {name}", forward_only, values, detect(values, flipped))


def test_verdict_follows_the_numbers():
    perfect, good, poor = list(range(10)), list(range(1, 11)), list(range(60, 70))
    loss = ranked("mean_loss", True, perfect)
    el2n_score = ranked("el2n", True, poor)
    cases = [
        (good, [loss], "close to but not better than the cheap baselines: title of mean_loss gets "
         "AUROC 1.0000, recall 1.000"),
        (good, [loss, el2n_score], "close to but not better than the best cheap baseline"),
        (poor, [loss, el2n_score], "is behind the cheap baselines"),
        (perfect, [loss], "close to but not better than the cheap baselines"),
        (good, [el2n_score], "is ahead of all 1 cheap baselines"),
    ]  # fmt: skip
    for own, baselines, expected in cases:
        assert expected in verdict([*baselines, ranked("self_influence", False, own)])


def test_chance_sentence_follows_the_numbers():
    def sentence(auroc):
        values = np.array([0.0, 1.0])
        detection = Detection(np.array([0, 100, 200]), np.array([0, 100 * auroc, 100]))
        ranked = Ranked("grand_at_initialisation", "GraNd", False, values, detection)
        return chance([ranked], halfwidth=0.05)

    assert "no better than chance" in sentence(0.46)
    assert "above chance" in sentence(0.6)
    assert "below chance" in sentence(0.4)


def test_table_is_aligned():
    lines = table([ranked("short", True, [0, 1]), ranked("a_much_longer_name", False, [5, 9])])
    assert len({len(line) for line in lines.splitlines()}) == 1


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "new" / "folder"
    return folder, run_demo(SHORT, folder)


def read_scores(folder):
    with (folder / "scores.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def oracle_scores(outcome, chosen):
    """Self-influence and early squared norm of some examples, in float64 by plain autograd."""
    given = torch.from_numpy(outcome.data.given)[chosen]
    batch = (outcome.data.images[chosen], given)

    model = digit_network(0)
    sqnorms = []
    assert list(outcome.checkpoints) == list(SHORT.checkpoints)
    for checkpoint in outcome.checkpoints.values():
        model.load_state_dict(checkpoint["model"])
        sqnorms.append(sum(oracle_sqnorms(model, batch, loss_fn).values()).numpy())
    rates = [SHORT.learning_rate_at(epoch) for epoch in SHORT.checkpoints]
    early = SHORT.checkpoints.index(SHORT.early_epoch)
    return sum(rate * sqnorm for rate, sqnorm in zip(rates, sqnorms, strict=True)), sqnorms[early]


def test_csv_holds_what_the_oracle_computes(short_run):
    folder, outcome = short_run
    rows = read_scores(folder)
    values = np.array([float(row["self_influence"]) for row in rows])
    chosen = np.argsort(-values)[[0, 1, 100, 700, 1000]]
    influence, early = oracle_scores(outcome, chosen)
    np.testing.assert_allclose(values[chosen], influence, rtol=1e-4)
    written = [float(rows[index]["squared_norm_epoch_3"]) for index in chosen]
    np.testing.assert_allclose(written, early, rtol=1e-4)


def test_csv_holds_what_the_forward_passes_say(short_run):
    """Loss, margin and EL2N of every digit, and the class that the early checkpoint predicts."""
    folder, outcome = short_run
    rows = read_scores(folder)
    given = torch.from_numpy(outcome.data.given)
    model = digit_network(0).double()
    probability, losses = [], []
    for checkpoint in outcome.checkpoints.values():
        model.load_state_dict(checkpoint["model"])
        logits = model(outcome.data.images.double()).detach()
        probability.append(logits.softmax(1).numpy())
        losses.append(F.cross_entropy(logits, given, reduction="none").numpy())
    early = probability[SHORT.checkpoints.index(SHORT.early_epoch)]
    margins = [margin(each, given.numpy()) for each in probability]
    expected = {
        "mean_loss": np.mean(losses, axis=0),
        "negated_mean_margin": -np.mean(margins, axis=0),
        "el2n_epoch_3": el2n(early, given.numpy()),
        "predicted_label": early.argmax(1),
    }
    for name, values in expected.items():
        written = np.array([float(row[name]) for row in rows])
        np.testing.assert_allclose(written, values, rtol=1e-4, atol=1e-6, err_msg=name)
    last = (probability[-1].argmax(1) == outcome.data.given)[outcome.data.flipped]
    assert outcome.memorised == last.mean()


def test_csv_holds_the_labels_and_every_score(short_run):
    folder, outcome = short_run
    rows = read_scores(folder)
    assert list(rows[0]) == [
        "id", "given_label", "true_label", "flipped", "predicted_label", "self_influence",
        "mean_loss", "negated_mean_margin", "el2n_epoch_3", "squared_norm_epoch_3",
        "grand_at_initialisation",
    ]  # fmt: skip
    assert len(rows) == len(outcome.data.ids) == len({row["id"] for row in rows})
    for row in rows:
        assert (row["given_label"] != row["true_label"]) == (row["flipped"] == "1")
    assert sum(row["flipped"] == "1" for row in rows) == 140


def test_pictures_are_written(short_run):
    folder, _ = short_run
    for name in FILES[1:]:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_the_command_finds_flipped_labels_by_training_only(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path)]) == 0
    rows = read_scores(tmp_path)
    flipped = np.array([row["flipped"] == "1" for row in rows])
    aurocs = {
        name: pair_counting_auroc(np.array([float(row[name]) for row in rows]), flipped)
        for name in ("self_influence", "grand_at_initialisation")
    }
    assert aurocs["self_influence"] >= 0.99
    assert 0.42 <= aurocs["grand_at_initialisation"] <= 0.55
    captured = capsys.readouterr()
    assert f"Self-influence (AUROC {aurocs['self_influence']:.4f}" in captured.out
    assert "training: 100%" in captured.err


def test_a_seed_fixes_every_byte_whatever_the_number_of_threads(short_run, tmp_path, capsys):
    folder, _ = short_run
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        run_demo(SHORT, tmp_path)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.random.get_rng_state(), state)
    printed = capsys.readouterr().out
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
        assert f"wrote {tmp_path / name}" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--seed", "-1"], "argument --seed: -1 is out of range: expected a whole number"),
        (["demo", "--seed", "4294967296"], "out of range"),
        (["demo", "--seed", "two"], "'two' is not a number"),
        (["demo", "--out", ""], "argument --out: the folder's name is empty"),
        (["dem"], "invalid choice: 'dem'"),
        ([], "required: COMMAND"),
    ],
)
def test_bad_arguments_exit_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def no_training(monkeypatch):
    def fail(settings):
        raise AssertionError("training started")

    monkeypatch.setattr("gradstats.demo._command.run_experiment", fail)


def test_out_that_is_a_file_is_refused(tmp_path, no_training, capsys):
    path = tmp_path / "results"
    path.write_text("mine")
    assert main(["demo", "--out", str(path)]) == 2
    captured = capsys.readouterr()
    assert f"error: --out {path} is a file: name a folder" in captured.err
    assert path.read_text() == "mine"


def test_an_interrupt_is_no_failure(tmp_path, monkeypatch, capsys):
    def interrupt(settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("gradstats.demo._command.run_experiment", interrupt)
    assert main(["demo", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "\npython -m gradstats: interrupted\n"


def test_a_disk_that_fills_up_is_named(tmp_path, monkeypatch):
    def full(path, outcome):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gradstats.demo._command.run_experiment", lambda settings: None)
    monkeypatch.setattr("gradstats.demo._command.report", lambda outcome: "")
    monkeypatch.setitem(WRITERS, "curves.png", full)
    monkeypatch.setitem(WRITERS, "suspicious-digits.png", lambda path, outcome: None)
    with pytest.raises(DemoError, match=r"cannot write .*curves\.png: No space left on device"):
        run_demo(SHORT, tmp_path)


@pytest.mark.parametrize("tail", ["results/below", "n" * 300])
def test_out_that_cannot_be_made_is_refused(tail, tmp_path, no_training):
    (tmp_path / "results").write_text("mine")
    with pytest.raises(DemoError, match=r"cannot write to --out .*: name a folder that can be"):
        run_demo(SHORT, tmp_path / tail)


def test_out_that_is_not_writable_is_refused(tmp_path, no_training, monkeypatch):
    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    # The superuser may write anywhere, so the refusal has to be made.
    monkeypatch.setattr("gradstats.demo._command.tempfile.TemporaryFile", refuse)
    with pytest.raises(DemoError, match=r"cannot write to --out .* \(Permission denied\)"):
        run_demo(SHORT, tmp_path)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path, no_training):
    (tmp_path / "curves.png").mkdir()
    with pytest.raises(DemoError, match=r"curves\.png is in the way: remove it"):
        run_demo(SHORT, tmp_path)


@pytest.mark.parametrize(
    ("module", "package"),
    [("sklearn.datasets", "sklearn"), ("matplotlib.figure", "matplotlib")],
)
def test_a_missing_package_names_the_extra(module, package, tmp_path, no_training, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"{package} is needed .*pip install 'gradstats\[demo\]'"
    with pytest.raises(gs.MissingPackageError, match=message):
        run_demo(SHORT, tmp_path / "out")
    assert not (tmp_path / "out").exists()
