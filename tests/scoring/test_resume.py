"""Results on disk: processes are killed, files cut and damaged; what was done is never lost."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import gradstats as gs
from gradstats.scoring import _folder, _tiles, _top, _work
from tests.scoring.processes import arrays, call
from tests.scoring.setting import (
    RATES,
    Rows,
    loss_fn,
    make_setting,
    oracle_influence,
    setting_state,
)

ROOT = Path(__file__).parents[2]
TILES = 3 * 2
# What the loss sees where everything is done: the first train batch at both checkpoints.
RECOGNISED = [4, 4]


@pytest.fixture(scope="module")
def run_processes():
    """Return a function that has tests.scoring.processes carry out a command.

    It returns how the processes ended, and what they wrote to standard error.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "tests.scoring.processes"], cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    ) as server:  # fmt: skip

        def run(*arguments) -> tuple[list[int], str]:
            print(json.dumps([*map(str, arguments)]), file=server.stdin, flush=True)
            answer = server.stdout.readline()
            assert answer, "tests.scoring.processes has ended"
            return json.loads(answer)

        yield run


class Counting:
    """The loss, and the sizes of the batches that it saw."""

    def __init__(self):
        self.sizes = []

    def __call__(self, model, batch):
        self.sizes.append(len(batch[0]))
        return loss_fn(model, batch)

    __qualname__ = loss_fn.__qualname__


def assert_same(kind, got, expected) -> None:
    got, expected = arrays(kind, got), arrays(kind, expected)
    assert got.keys() == expected.keys()
    for name in expected:
        assert np.array_equal(got[name], expected[name], equal_nan=True), name


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        # In the manifest; in the first column of a tile; between a tile and its mark; a mark.
        ("matrix", [1, 5, 8, 11, 20, 17, 25]),
        ("self", [3, 14, 20]),
        ("top", [2, 5, 1]),
    ],
)
def test_killed_again_and_again_the_bits_are_the_same(run_processes, tmp_path, kind, counts):
    out = tmp_path / "scores"
    codes, _ = run_processes("kill", out, kind, *counts)
    assert codes == [-signal.SIGKILL] * len(counts)
    counting = Counting()
    resumed = call(kind, out, loss=counting)
    fresh = Counting()
    assert_same(kind, resumed, call(kind, None, loss=fresh))
    computed = sum(counting.sizes) - sum(RECOGNISED)
    assert 0 < computed < sum(fresh.sizes), "nothing was taken from the disk"
    counting = Counting()
    assert_same(kind, call(kind, out, loss=counting), resumed)
    assert counting.sizes == RECOGNISED


def test_a_kill_loses_at_most_the_tile_in_flight(run_processes, tmp_path):
    """The 26th write is the first of the fourth tile's."""
    out = tmp_path / "scores"
    (code,), _ = run_processes("kill", out, "matrix", 26)
    assert code == -signal.SIGKILL
    (first,) = out.glob("checkpoint-*")
    done = np.load(first / "done.npy") != 0
    assert done.sum() == 3, done
    counting = Counting()
    call("matrix", out, loss=counting)
    # The results are recognised by the first batch; both query batches are kept again; train batch
    # 0 is done, and half of 1.
    assert counting.sizes[:5] == [4, 4, 2, 4, 3]


def test_files_that_cannot_grow_are_reported_and_nothing_is_lost(run_processes, tmp_path):
    out = tmp_path / "scores"
    codes, said = run_processes("limit", out, 0, 14)
    assert codes == [0, 0] and said.count("cannot be written: File too large") == 2, said
    assert "Resolve this, and call again" in said.splitlines()[-1]
    (first,) = out.glob("checkpoint-*")
    assert (np.load(first / "done.npy") != 0).sum() == 2
    assert_same("matrix", call("matrix", out), call("matrix", None))


def test_what_stands_in_the_locks_place_is_named(tmp_path):
    (tmp_path / "scores" / ".manifest.json.lock").mkdir(parents=True)
    with pytest.raises(gs.StoreError, match=r"json\.lock cannot be written: Is a directory"):
        call("matrix", tmp_path / "scores")


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(gs.StoreError, match=r"disk is full \(error ENOSPC\).*Make room"):
            call("matrix", tmp_path / "scores")
    assert_same("matrix", call("matrix", tmp_path / "scores"), call("matrix", None))


def test_an_array_of_which_less_was_written_is_named(tmp_path, monkeypatch):
    """NumPy's own error of a full disk, which says neither that nor any error of the system's."""

    def short(file, arr):
        raise OSError("16000 requested and 8064 written")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", short)
        with pytest.raises(
            gs.StoreError, match=r"ids\.npy.*16000 requested and 8064 written.*full"
        ):
            call("matrix", tmp_path / "scores")
    assert_same("matrix", call("matrix", tmp_path / "scores"), call("matrix", None))


@pytest.mark.parametrize(
    ("name", "size", "queries"),
    [
        ("products", 500, 2), ("products", 300, 6), ("products", 60, 6), ("products", 0, 6),
        ("done", 130, 6), ("train_sqnorm", 150, 6), ("query_sqnorm", 10, 6),
    ],
)  # fmt: skip
def test_truncated_files_are_repaired(tmp_path, capsys, name, size, queries):
    out = tmp_path / "scores"
    expected = call("matrix", out)
    expected = call("matrix", None)
    damaged = sorted(out.glob("checkpoint-*"))[0] / f"{name}.npy"
    os.truncate(damaged, size)
    with pytest.raises(gs.StoreError, match=r"cannot be read|not complete"):
        gs.InfluenceScores.load(out)
    counting = Counting()
    repaired = call("matrix", out, loss=counting, progress=True)
    assert f"{damaged} is " in capsys.readouterr().err
    assert_same("matrix", repaired, expected)
    # The other checkpoint is not touched, nor are the whole tiles of a column of four queries: at
    # most 11 train examples and the queries, and the trial's.
    assert sum(counting.sizes) <= 11 + queries + 4 + min(queries, 4) + sum(RECOGNISED)


@pytest.mark.parametrize("place", [0, 6, 7, 11, 19, 60])
@pytest.mark.parametrize("name", ["products", "done", "query_sqnorm"])
def test_a_flipped_bit_in_a_header(tmp_path, capsys, name, place):
    """The magic string, the version, the quotes and the words."""
    out = tmp_path / "scores"
    call("matrix", out)
    damaged = sorted(out.glob("checkpoint-*"))[0] / f"{name}.npy"
    flip(damaged, place)
    # NumPy takes other magic for a pickle, and advises to load it unsafely.
    says = rf"cannot be read: {name}\.npy is damaged\. Call gs\.influence with the same"
    with pytest.raises(gs.StoreError, match=says):
        gs.InfluenceScores.load(out)
    repaired = call("matrix", out, progress=True)
    assert f"{damaged} is not readable: computing it again" in capsys.readouterr().err
    assert_same("matrix", repaired, call("matrix", None))
    gs.InfluenceScores.load(out)


@pytest.mark.parametrize("place", [11, -1, None])
def test_damaged_ids_are_written_again(tmp_path, place):
    """A header that is none, another id, and nothing at all."""
    out = tmp_path / "scores"
    call("matrix", out)
    ids = out / "train_ids.npy"
    if place is None:
        os.truncate(ids, 0)
    else:
        flip(ids, place)
    if place != -1:
        with pytest.raises(gs.StoreError, match=r"Call gs.influence .* again to repair it"):
            gs.InfluenceScores.load(out)
    call("matrix", out)
    assert gs.InfluenceScores.load(out).train_ids.tolist() == list(range(11))
    np.save(out / "train_ids.npy", np.arange(3))
    with pytest.raises(gs.StoreError, match="ids are of"):
        gs.InfluenceScores.load(out)


def flip(file, place):
    """Flip a bit of a file."""
    content = bytearray(file.read_bytes())
    content[place] ^= 16
    file.write_bytes(content)


def test_a_flipped_bit_costs_its_tile(tmp_path, capsys):
    out = tmp_path / "scores"
    call("matrix", out)
    expected = call("matrix", None)
    damaged = sorted(out.glob("checkpoint-*"))[1] / "products.npy"
    flip(damaged, -3)
    counting = Counting()
    repaired = call("matrix", out, loss=counting, progress=True)
    assert "tile 2, 1 fails its checksum: computing it again" in capsys.readouterr().err
    assert_same("matrix", repaired, expected)
    # The last two query examples and the last three train examples, for the trial and in earnest.
    assert sorted(counting.sizes) in ([2, 3, *RECOGNISED], [2, 2, 3, 3, *RECOGNISED])


def test_a_missing_file_is_made_again(tmp_path):
    out = tmp_path / "scores"
    call("matrix", out)
    (sorted(out.glob("checkpoint-*"))[0] / "products.npy").unlink()
    assert_same("matrix", call("matrix", out), call("matrix", None))


DAMAGED, ANOTHER = r"manifest.json is damaged", r"another version of gradstats \(format 1, exp"


@pytest.mark.parametrize(
    "content, message",
    [
        ("", DAMAGED), ("{", DAMAGED), ("[]", DAMAGED),
        ('{"format": 2, "checkpoints": 3}', DAMAGED),
        ('{"format": 2, "checkpoints": {"checkpoint-1": {"nam": "a"}}}', DAMAGED),
        ('{"format": 2, "checkpoints": {"checkpoint-1": {"name": 1}}}', DAMAGED),
        ('{"format": 1, "checkpoints": {}}', ANOTHER),
    ],
)  # fmt: skip
def test_a_manifest_that_is_damaged_or_of_another_version_is_refused_and_kept(
    tmp_path, content, message
):
    out = tmp_path / "scores"
    call("matrix", out)
    (out / "manifest.json").write_text(content)
    for action in (lambda: call("matrix", out), lambda: gs.InfluenceScores.load(out)):
        with pytest.raises(gs.StoreError, match=message):
            action()
    assert (out / "manifest.json").read_text() == content


def test_a_folder_is_loaded_once_it_is_complete(tmp_path):
    out = tmp_path / "scores"
    call("matrix", out)
    (done, _) = sorted(out.glob("checkpoint-*/done.npy"))
    np.save(done, np.load(done) * (np.arange(2) == 0))
    again = "Call gs.influence with the same arguments again to continue"
    with pytest.raises(gs.StoreError, match=f"{done.parent.name} is not complete. {again}"):
        gs.InfluenceScores.load(out)
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "checkpoints": {}}))
    with pytest.raises(gs.StoreError, match=f"scores holds no checkpoint yet. {again}"):
        gs.InfluenceScores.load(out)


@pytest.mark.parametrize("values", ["0.9&7", "0.97 0.98", ""])
def test_damaged_losses_are_told_from_those_of_the_call(tmp_path, values):
    out = tmp_path / "scores"
    call("matrix", out)
    manifest = json.loads((out / "manifest.json").read_text())
    for entry in manifest["checkpoints"].values():
        entry["first_losses"]["values"] = values
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(gs.StoreError, match="first_losses: on disk no list of as many numbers"):
        call("matrix", out)


def truncate(file: Path) -> None:
    os.truncate(file, 200)


def set_flag(file: Path) -> None:
    """Say in the archive's directory that its first member is encrypted."""
    content = bytearray(file.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1
    file.write_bytes(content)


def drop_a_query(file: Path) -> None:
    """Put the lists of another call there."""
    with np.load(file) as held:
        arrays = {name: array[1:] if array.ndim else array for name, array in held.items()}
    np.savez(file, **arrays)


@pytest.mark.parametrize("damage", [truncate, set_flag, drop_a_query])
def test_a_damaged_list_is_computed_again(tmp_path, capsys, damage):
    out = tmp_path / "scores"
    call("top", out)
    damage(out / "top.npz")
    again = call("top", out, progress=True)
    assert "top.npz is damaged" in capsys.readouterr().err
    assert_same("top", again, call("top", None))


OPTIONS = (
    "parameters", "exclude", "resume", "top_k", "query_checkpoints", "nonfinite", "budget",
)  # fmt: skip


def changed(out, kind="matrix", **changes):
    """Make a call that differs from the one that filled a folder."""
    setting = make_setting()
    options = {
        "model": setting.model, "train": setting.train_batches, "query": setting.query_batches,
        "loss": loss_fn, "states": setting.states, "lr": list(RATES), **changes,
    }  # fmt: skip
    extra = {k: v for k, v in options.items() if k in OPTIONS}
    return gs.influence(
        options["model"], options["train"], options["query"], options["loss"],
        gs.Checkpoints(options["states"], lr=options["lr"]), out=out, progress=False, **extra,
    )  # fmt: skip


def test_another_call_is_refused_with_the_difference(tmp_path):
    out = tmp_path / "scores"
    call("matrix", out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    other = make_setting(1)
    cases = [
        ({"train": other.train_batches}, r"train\.hash: on disk '\w+', now '\w+'\n.*contents"),
        ({"query": [other.query]}, r"query\.batches: on disk 2, now 1"),
        ({"parameters": "0.*"}, r"settings\.parameters: on disk \['0\.weight', .*now \['0\.w"),
        ({"model": make_setting().model.float()}, r"settings\.dtype: on disk 'float64', now"),
        ({"loss": None_called_other}, r"settings\.loss: on disk 'loss_fn', now 'None_called_o"),
        ({"lr": [0.1, 0.2]}, r"do not belong to state dict 1:\n  rates: on disk 0\.3, now 0\.2"),
        ({"resume": False}, r"resume=False. Pass resume=True"),
        ({"top_k": 2}, r"call:\n  kind: on disk 'influence', now 'strongest influence'\nNothing"),
    ]
    for changes, message in cases:
        with pytest.raises(gs.StoreError, match=message):
            changed(out, **changes)
    with pytest.raises(gs.StoreError, match="kind: on disk 'influence', now 'self-influence'"):
        call("self", out)
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def None_called_other(model, batch):
    raise AssertionError("the call should have been refused")


def scaled_loss(model, batch, temperature):
    inputs, labels = batch
    return functional.cross_entropy(model(inputs) / temperature, labels, reduction="none")


def sloped(slope):
    """Two models of one architecture, told apart by what they do alone."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LeakyReLU(slope), nn.Linear(7, 3)).double()


@pytest.mark.parametrize("kind", ["self", "matrix", "top"])
def test_losses_and_models_are_told_apart_by_what_they_do(tmp_path, kind):
    setting = make_setting()

    def run(model, loss, states, **options):
        checkpoints = gs.Checkpoints(states, lr=0.1)
        options = {"progress": False, "out": tmp_path / "scores", **options}
        if kind == "self":
            train = setting.train_batches
            return gs.self_influence(model, train, loss, checkpoints, **options).self_influence
        if kind == "top":
            options["top_k"] = 2
        scores = gs.influence(
            model, setting.train_batches, setting.query_batches, loss, checkpoints, **options
        )
        return scores.proponents(0, 2).scores

    states = [sloped(0.0).state_dict(), setting_state(sloped(0.0), 1)]
    first = functools.partial(scaled_loss, temperature=1.0)
    expected = run(sloped(0.1), first, states)
    message = r"first_losses: on disk [\d.]+, now [\d.]+, for example 0 and 3 others of the first"
    with pytest.raises(gs.StoreError, match=message):
        run(sloped(0.1), functools.partial(scaled_loss, temperature=1.01), states)
    with pytest.raises(gs.StoreError, match=message):
        run(sloped(0.2), first, states)
    # Rounding as on another machine does not count, and another name of one loss does not either.
    rounding = functools.partial(scaled_loss, temperature=1 + 1e-12)
    assert np.array_equal(run(sloped(0.1), rounding, states), expected)


def test_losses_that_are_not_finite_are_recognised(tmp_path):
    setting = make_setting()
    setting.train[0][1, 0] = float("nan")
    options = {"train": setting.train_batches, "nonfinite": "keep"}
    scores = np.asarray(changed(tmp_path / "scores", **options))
    assert np.isnan(scores[1]).all() and not np.isnan(np.delete(scores, 1, 0)).any()
    assert np.array_equal(changed(tmp_path / "scores", **options), scores, equal_nan=True)


def test_kept_gradients_that_are_not_finite_are_raised_by_the_next_call(tmp_path):
    setting = make_setting()
    setting.train[0][9, 0] = float("nan")
    checkpoints = gs.Checkpoints(setting.states, lr=list(RATES))

    def table(nonfinite):
        return gs.self_influence(
            setting.model, setting.train_batches, loss_fn, checkpoints, out=tmp_path / "table",
            nonfinite=nonfinite, progress=False,
        )  # fmt: skip

    def matrix(nonfinite, **sides):
        options = {"train": setting.train_batches, "nonfinite": nonfinite, **sides}
        return changed(tmp_path / ("queries" if sides else "scores"), **options)

    kept = np.asarray(matrix("keep"))
    assert np.isnan(table("keep").self_influence).nonzero()[0].tolist() == [9]
    for run in (table, matrix):
        with pytest.raises(gs.NonFiniteGradientError, match=r"training examples with ids \[9\]"):
            run("raise")
    assert np.array_equal(matrix("keep"), kept, equal_nan=True)
    swapped = {"train": setting.query_batches, "query": setting.train_batches}
    matrix("keep", **swapped)
    with pytest.raises(gs.NonFiniteGradientError, match=r"the query examples with ids \[9\]"):
        matrix("raise", **swapped)


@pytest.mark.parametrize("side", ["train", "query"])
def test_lists_go_on_where_gradients_that_are_not_finite_are_kept(tmp_path, side):
    """As the error says that stopped them; and only so."""
    setting, counting = make_setting(), Counting()
    getattr(setting, side)[0][5 if side == "query" else 9, 0] = float("nan")
    sides = {"train": setting.train_batches, "query": setting.query_batches}
    options = {**sides, "top_k": 2, "budget": 1, "loss": counting}
    with pytest.raises(gs.NonFiniteGradientError, match='pass nonfinite="keep"'):
        changed(tmp_path / "scores", **options)
    counting.sizes.clear()
    kept = changed(tmp_path / "scores", nonfinite="keep", **options)
    resumed = sum(counting.sizes)
    counting.sizes.clear()
    whole = changed(tmp_path / "other", nonfinite="keep", **options)
    assert_same("top", kept, whole)
    # Two of three batches of training examples were done, of queries none could be.
    assert (resumed < sum(counting.sizes)) == (side == "train")
    with pytest.raises(gs.NonFiniteGradientError, match=r"lists of .* not finite.*pass nonfinite"):
        changed(tmp_path / "scores", **options)
    assert_same("top", changed(tmp_path / "scores", nonfinite="keep", **options), whole)


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_coarse_losses_agree_up_to_rounding(tmp_path, dtype, apart):
    """√eps of the largest loss: 3.5e-4 and 0.088."""
    setting = make_setting()
    setting.model.to(dtype)
    train, query = (
        [(x.to(dtype), y) for x, y in side]
        for side in (setting.train_batches, setting.query_batches)
    )
    scale = 1.0

    def loss(model, batch):
        return scale * functional.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")

    def run():
        return changed(
            tmp_path / "scores", model=setting.model, train=train, query=query, loss=loss
        )

    kept = np.asarray(run())
    scale = 1 + apart
    assert np.array_equal(run(), kept)
    scale = 1 + 10 * apart
    with pytest.raises(gs.StoreError, match="first_losses"):
        run()


def test_calls_that_share_a_folder_keep_each_others_checkpoints(tmp_path):
    """A second call adds its checkpoint while the first one is under way."""
    out = tmp_path / "scores"
    first, second = make_setting().states
    reads = []

    class Batches(list):
        def __getitem__(self, number):
            reads.append(number)
            if len(reads) == 5:
                changed(out, states=[second], lr=0.3)
            return super().__getitem__(number)

    third = setting_state(make_setting().model, 5)
    train = Batches(make_setting().train_batches)
    changed(out, train=train, states=[first, third], lr=[0.1, 0.2])
    assert len(reads) == 2 * (1 + 3)
    loaded = gs.InfluenceScores.load(out)
    assert len(loaded.checkpoints) == 3
    expected = oracle_influence(setting_of([first, second, third]), [0.1, 0.3, 0.2])
    np.testing.assert_allclose(np.asarray(loaded), expected, rtol=1e-9, atol=1e-12)


def test_processes_fill_one_folder_at_once(run_processes, tmp_path):
    """Each with checkpoints of its own, and one is killed while it writes the manifest."""
    codes, said = run_processes("beside", tmp_path / "scores", 4)
    assert codes == [0, 0, 0, -signal.SIGKILL], said
    states = [setting_state(make_setting().model, number) for number in range(3 * 4)]
    counting = Counting()
    whole = changed(tmp_path / "scores", states=states, lr=0.1, loss=counting)
    assert len(gs.InfluenceScores.load(tmp_path / "scores").checkpoints) == 12
    expected = oracle_influence(setting_of(states), [0.1] * 12)
    np.testing.assert_allclose(np.asarray(whole), expected, rtol=1e-9, atol=1e-12)
    # Nine checkpoints were complete; the killed process left at most three to compute.
    assert sum(counting.sizes) - 12 * 4 <= 3 * (11 + 6)


def test_processes_write_the_same_lists_at_once(run_processes, tmp_path):
    codes, said = run_processes("lists", tmp_path / "scores", 3)
    assert codes == [0, 0, 0], said
    assert_same("top", gs.TopScores.load(tmp_path / "scores"), call("top", None))


def test_lists_that_another_process_has_completed_stay(tmp_path):
    """Whoever is slower has fewer, and may be killed after that."""
    call("top", tmp_path)
    whole = _top.TopLists.read(tmp_path)
    dataclasses.replace(whole, next_batch=1).save(tmp_path, 3)
    assert_same("top", gs.TopScores.load(tmp_path), call("top", None))
    # Not where they are damaged.
    os.truncate(tmp_path / _top.STATE, 100)
    whole.save(tmp_path, 3)
    assert_same("top", gs.TopScores.load(tmp_path), call("top", None))


@pytest.mark.parametrize("where", ["file system", "operating system"])
def test_where_there_are_no_locks_a_warning_says_so(where, tmp_path, monkeypatch):
    def no_locks(file, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    if where == "file system":
        monkeypatch.setattr(fcntl, "flock", no_locks)
    else:
        # As on Windows, where positioned writes and reserved blocks are missing too.
        monkeypatch.setattr(_folder, "fcntl", None)
        for name in ("pwrite", "posix_fallocate"):
            monkeypatch.delattr(os, name)
    with pytest.warns(gs.GradStatsWarning, match=r"be locked here \(Function not .*one process"):
        scores = call("matrix", tmp_path / "scores")
    assert_same("matrix", scores, call("matrix", None))


@pytest.mark.parametrize("what", ["torch", "device", "float32 products", "workspace"])
def test_other_circumstances_do_not_finish_a_checkpoint(tmp_path, what):
    out = tmp_path / "scores"
    call("matrix", out)
    manifest = json.loads((out / "manifest.json").read_text())
    for entry in manifest["checkpoints"].values():
        entry["circumstances"][what] = "1.0"
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert_same("matrix", call("matrix", out), call("matrix", None))
    damaged = sorted(out.glob("checkpoint-*"))[0] / "products.npy"
    damaged.write_bytes(damaged.read_bytes()[:-8] + bytes(8))
    with pytest.raises(gs.StoreError, match=rf"{what}: on disk '1\.0', now"):
        call("matrix", out)


def test_circumstances_are_those_of_the_first_tile(tmp_path, monkeypatch):
    """A call that came to none may have needed others, such as a smaller workspace."""
    out, own = tmp_path / "scores", _work.Work.circumstances
    left = [0]

    def loss(model, batch):
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("stop")
        return loss_fn(model, batch)

    loss.__qualname__ = loss_fn.__qualname__

    def stopped(calls, workspace):
        left[0] = calls
        monkeypatch.setattr(
            _work.Work, "circumstances", lambda w: {**own(w), "workspace": workspace}
        )
        with pytest.raises(RuntimeError, match="stop"):
            call("matrix", out, loss=loss)

    stopped(2, "large")
    (first,) = out.glob("checkpoint-*")
    assert not np.load(first / "done.npy").any()
    stopped(5, "small")
    assert np.load(first / "done.npy").any()
    with pytest.raises(gs.StoreError, match="workspace: on disk 'small', now 'None'"):
        monkeypatch.undo()
        call("matrix", out)
    monkeypatch.setattr(_work.Work, "circumstances", lambda w: {**own(w), "workspace": "small"})
    assert_same("matrix", call("matrix", out), call("matrix", None))


@pytest.mark.parametrize("what", ["torch", "float32 products", "workspace"])
def test_other_circumstances_do_not_finish_lists(tmp_path, monkeypatch, what):
    out = tmp_path / "lists"
    call("top", out)
    circumstances = _work.Work.circumstances

    def others(work):
        return {**circumstances(work), what: "1.0"}

    monkeypatch.setattr(_work.Work, "circumstances", others)
    assert_same("top", call("top", out), call("top", None))
    forget_a_batch(out / "top.npz")
    before = (out / "top.npz").read_bytes()
    with pytest.raises(gs.StoreError, match=rf"this call:\n  {what}: on disk '.*', now '1\.0'"):
        call("top", out)
    assert (out / "top.npz").read_bytes() == before


def test_a_checkpoint_is_finished_in_the_precision_that_it_was_begun_in(tmp_path):
    """PyTorch has two words for products of float32 that are not rounded."""
    products, convolutions = torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv
    before = products.fp32_precision, convolutions.fp32_precision
    out = tmp_path / "scores"

    def damage():
        damaged = sorted(out.glob("checkpoint-*"))[0] / "products.npy"
        damaged.write_bytes(damaged.read_bytes()[:-8] + bytes(8))

    try:
        products.fp32_precision = convolutions.fp32_precision = "none"
        whole = call("matrix", out)
        damage()
        products.fp32_precision = "ieee"
        assert_same("matrix", call("matrix", out), whole)
        damage()
        convolutions.fp32_precision = "bf16"
        with pytest.raises(gs.StoreError, match="products: on disk 'ieee', now 'ieee, bf16, ieee'"):
            call("matrix", out)
    finally:
        products.fp32_precision, convolutions.fp32_precision = before


@pytest.mark.parametrize("why", ["other versions", "manifest", "unreadable", "summed"])
def test_a_folder_that_is_refused_leaves_no_file_open(tmp_path, monkeypatch, why):
    out = tmp_path / "scores"
    call("matrix", out)
    done = sorted(out.glob("checkpoint-*"))[0] / "done.npy"
    done.write_bytes(done.read_bytes()[:-8] + bytes(8))
    if why == "other versions":
        monkeypatch.setattr(_work, "versions", lambda: {"torch": "1.0"})
    elif why == "manifest":
        manifest = json.loads((out / "manifest.json").read_text())
        (out / "manifest.json").write_text(json.dumps({**manifest, "checkpoints": {}}))
        monkeypatch.setattr(_folder.Folder, "_write", refuse)
    elif why == "unreadable":
        monkeypatch.setattr(_tiles.Tiles, "done", property(refuse))
    else:
        monkeypatch.setattr(_tiles.Tiles, "_drop_damaged", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises((gs.StoreError, OSError)):
        call("matrix", out)
    assert os.listdir("/proc/self/fd") == before


def refuse(*arguments):
    raise OSError(errno.EIO, "Input/output error")


def test_a_checkpoint_added_later(tmp_path):
    out = tmp_path / "scores"
    setting = make_setting()
    changed(out, states=setting.states[:1], lr=0.1)
    counting = Counting()
    both = changed(out, loss=counting)
    assert sum(counting.sizes) == 11 + 6 + sum(RECOGNISED)
    assert_same("matrix", both, call("matrix", None))
    counting = Counting()
    alone = changed(out, states=setting.states[1:], lr=0.3, loss=counting)
    np.testing.assert_allclose(np.asarray(both) - np.asarray(alone), changed(
        out, states=setting.states[:1], lr=0.1, loss=counting
    ), rtol=1e-9, atol=1e-12)  # fmt: skip
    assert counting.sizes == RECOGNISED
    assert_same("matrix", gs.InfluenceScores.load(out), both)
    assert gs.InfluenceScores.load(out, "cosine").normalize == "cosine"


def test_a_file_that_was_written_again_is_warned_about(tmp_path):
    """Its scores at both weights are in the folder, of which a call sees only its own."""
    setting = make_setting()
    file, out = tmp_path / "last.pt", tmp_path / "out"
    arguments = setting.model, setting.train_batches, setting.query_batches, loss_fn
    found = []
    for number, state in enumerate(setting.states):
        torch.save(state, file)
        checkpoints = gs.Checkpoints(file, lr=RATES[number])
        expectation = pytest.warns(gs.GradStatsWarning, match=r"last.pt at other weights")
        with expectation if number else contextlib.nullcontext():
            scores = gs.influence(*arguments, checkpoints, out=out, progress=False)
        found.append(np.array(scores))
    both = np.array(gs.InfluenceScores.load(out))
    np.testing.assert_allclose(both, found[0] + found[1])
    np.testing.assert_allclose(both, oracle_influence(setting))


def test_one_folder_holds_scores_of_one_kind_of_queries(tmp_path):
    """Each checkpoint of the train side goes with one of the query side, for all calls."""
    first, second = make_setting().states
    message = r"query_checkpoints: on disk (False|True), now (True|False)"
    alone, paired = tmp_path / "alone", tmp_path / "paired"
    changed(alone, states=[first], lr=0.1)
    kept = np.asarray(changed(paired, states=[first], lr=0.1, query_checkpoints=[second]))
    np.testing.assert_allclose(
        kept, oracle_influence(setting_of([first]), [0.1], [second]), rtol=1e-10
    )
    for states in ([first], [second]):
        with pytest.raises(gs.StoreError, match=message):
            changed(alone, states=states, lr=0.1, query_checkpoints=[second])
        with pytest.raises(gs.StoreError, match=message):
            changed(paired, states=states, lr=0.1)
    with pytest.raises(gs.StoreError, match=r"state dict 0:\n  query_weights: on disk '\w+', now"):
        changed(paired, states=[first], lr=0.1, query_checkpoints=[first])
    assert np.array_equal(gs.InfluenceScores.load(paired), kept)
    # One checkpoint of the query side may go with each of the train side.
    both = changed(paired, states=[first, second], query_checkpoints=[second, second])
    expected = oracle_influence(make_setting(), query_states=[second, second])
    np.testing.assert_allclose(np.asarray(both), expected, rtol=1e-10, atol=1e-12)
    assert np.array_equal(gs.InfluenceScores.load(paired), both)


def setting_of(states):
    return dataclasses.replace(make_setting(), states=states)


def test_ids_are_kept_beside_the_scores(tmp_path):
    setting = make_setting()
    named = [
        (x, y, [f"n{number}-{place}" for place in range(len(x))])
        for number, (x, y) in enumerate(setting.train_batches)
    ]
    scores = gs.influence(
        setting.model, named, setting.query_batches, lambda m, b: loss_fn(m, b[:2]),
        gs.Checkpoints(setting.states, lr=0.1), train_ids=2, out=tmp_path / "scores",
        progress=False,
    )  # fmt: skip
    loaded = gs.InfluenceScores.load(tmp_path / "scores")
    assert loaded.train_ids.tolist() == scores.train_ids.tolist()
    assert loaded.train_ids[4] == "n1-0"
    best = loaded.proponents(0, 1)
    assert best.ids[0] == loaded.train_ids[best.positions[0]]


def test_a_table_is_loaded_again(tmp_path):
    setting = make_setting()
    named = [(x, y, x[:, 0].mul(1e6).long()) for x, y in setting.train_batches]
    table = gs.self_influence(
        setting.model, named, lambda m, b: loss_fn(m, b[:2]),
        gs.Checkpoints(setting.states, lr=list(RATES)), ids=2, out=tmp_path / "table",
        progress=False,
    )  # fmt: skip
    loaded = gs.SelfInfluence.load(tmp_path / "table")
    assert loaded.checkpoints == table.checkpoints
    assert np.array_equal(loaded._values, table._values)
    assert str(loaded) == str(table)
    call("matrix", tmp_path / "scores")
    with pytest.raises(
        gs.StoreError, match=r"holds influence, which .*; expected .* gs.self_influence\(out"
    ):
        gs.SelfInfluence.load(tmp_path / "scores")
    with pytest.raises(
        gs.StoreError, match=r"self-influence, which .*; expected .* gs.influence\(out"
    ):
        gs.InfluenceScores.load(tmp_path / "table")
    done = next((tmp_path / "table").glob("checkpoint-*")) / "done.npy"
    os.truncate(done, done.stat().st_size - 8)
    with pytest.raises(
        gs.StoreError, match=r"cannot be read.*Call gs.self_influence with the same"
    ):
        gs.SelfInfluence.load(tmp_path / "table")


@pytest.mark.parametrize("kind", ["matrix", "top", "table"])
@pytest.mark.parametrize("further", [False, True], ids=["the same checkpoint", "a further one"])
def test_a_label_that_was_corrected_since_is_seen(tmp_path, kind, further):
    """In whichever batch: scores of the old one would be taken for those of the new."""
    setting = make_setting()
    images, labels = setting.train
    states = setting.states

    def run(labels, states):
        train = DataLoader(Rows((images, labels)), 2)
        checkpoints = gs.Checkpoints(states, lr=list(RATES)[: len(states)])
        out = {"out": tmp_path / "scores", "progress": False}
        if kind == "table":
            return gs.self_influence(setting.model, train, loss_fn, checkpoints, **out)
        query = setting.query_batches
        lists = {"top_k": 3} if kind == "top" else {}
        return gs.influence(setting.model, train, query, loss_fn, checkpoints, **out, **lists)

    run(labels, states[:1])
    corrected = labels.clone()
    corrected[3] = (corrected[3] + 1) % 3
    with pytest.raises(gs.StoreError, match=r"(data|train)\.hash: on disk"):
        run(corrected, states if further else states[:1])
    run(labels, states[:1])


def test_lists_are_loaded_again(tmp_path):
    out = tmp_path / "lists"
    made = call("top", out)
    for normalize in (None, "cosine"):
        loaded = gs.TopScores.load(out, normalize)
        assert loaded.normalize == normalize
        assert_same("top", loaded, made.cosine if normalize else made)
    assert loaded.checkpoints == made.checkpoints
    assert loaded.train_ids.tolist() == made.train_ids.tolist()
    assert str(loaded.raw.proponents(1, 2)) == str(made.raw.proponents(1, 2))
    call("matrix", tmp_path / "scores")
    with pytest.raises(
        gs.StoreError, match=r"holds influence, which gs.InfluenceScores.load reads"
    ):
        gs.TopScores.load(tmp_path / "scores")
    with pytest.raises(gs.ScoreError, match="normalize is 'sine'"):
        gs.TopScores.load(out, "sine")
    for results in (gs.TopScores, gs.InfluenceScores, gs.SelfInfluence):
        with pytest.raises(gs.StoreError, match="folder is None, expected the path of a folder"):
            results.load(None)


def forget_a_batch(file: Path) -> None:
    with np.load(file) as held:
        arrays = dict(held)
    np.savez(file, **(arrays | {"next_batch": arrays["next_batch"] - 1}))


def forget_examples(file: Path) -> None:
    ids = file.with_name("train_ids.npy")
    np.save(ids, np.load(ids)[:-1])  # a list holds the last one


@pytest.mark.parametrize(
    "damage, message",
    [
        (truncate, "cannot be read.*Call gs.influence with the same arguments again to repair"),
        (drop_a_query, r"its ids are of \[11, 6\] examples, its lists of others.*to repair it"),
        (forget_examples, r"its ids are of \[10, 6\] examples, its lists of others.*to repair it"),
        (forget_a_batch, "not complete. Call gs.influence with the same arguments again"),
        (Path.unlink, "cannot be read"),
    ],
)
def test_lists_that_are_damaged_are_not_loaded(tmp_path, damage, message):
    out = tmp_path / "lists"
    call("top", out)
    damage(out / "top.npz")
    with pytest.raises(gs.StoreError, match=message):
        gs.TopScores.load(out)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(gs.StoreError, match=r"is not empty and has no manifest\.json"):
        call("matrix", tmp_path)
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "thesis.tex"):
        found = r"holds no manifest\.json" if path.exists() else "does not exist"
        with pytest.raises(gs.StoreError, match=f"{path.name} {found}. Expected the folder that"):
            gs.InfluenceScores.load(path)
    with pytest.raises(gs.StoreError, match="cannot be used"):
        call("matrix", tmp_path / "thesis.tex" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_processes_share_the_work(run_processes, tmp_path):
    """The same result and the same files as one process, each example passed by one of them."""
    codes, said = run_processes("share", tmp_path, 2)
    assert codes == [0, 0], said
    single = {}
    for kind in ("matrix", "top", "self"):
        single[kind] = call(kind, tmp_path / f"single-{kind}")
        for rank in range(2):
            for name in ("memory", "disk", *["own"] * (kind == "top")):
                with np.load(tmp_path / f"{kind}-{name}-{rank}.npz") as got:
                    for key, expected in arrays(kind, single[kind]).items():
                        assert np.array_equal(got[key], expected), (kind, name, rank, key)
    for kind in ("matrix", "self"):
        ours, theirs = tmp_path / kind, tmp_path / f"single-{kind}"
        files = sorted(path.relative_to(ours) for path in ours.rglob("*") if path.is_file())
        assert files == sorted(p.relative_to(theirs) for p in theirs.rglob("*") if p.is_file())
        for path in files:
            assert (ours / path).read_bytes() == (theirs / path).read_bytes(), path
    for name in ("parallel", "compiled"):
        # Three batches for two processes: one has more forwards than the other.
        first, second = (np.load(tmp_path / f"{name}-{rank}.npy") for rank in range(2))
        np.testing.assert_array_equal(first, second)
        assert (first > 0).all() and len(first) == 11
    counts = [int((tmp_path / f"examples-{rank}").read_text()) for rank in range(2)]
    # In memory and on disk, at two checkpoints: the train side once, for the lists once for each of
    # two query batches; the query side in each process, for the lists once for each train batch.
    # On disk the first train batch once more at each checkpoint, in the first process.
    recognised = 3 * sum(RECOGNISED)
    assert sum(counts) == 4 * (11 + 11 + 2 * 11) + 4 * (2 * 6 + 3 * 6) + recognised
    assert "ValueError: only here" == (tmp_path / "error-1").read_text()
    assert "process 1 of 2 failed: ValueError: only here" in (tmp_path / "error-0").read_text()
    assert "ValueError: no label" == (tmp_path / "unsent-0").read_text()
    assert "process 0 of 2 failed: ValueError: no label" in (tmp_path / "unsent-1").read_text()
    for kind in ("matrix", "top", "self"):
        first, second = ((tmp_path / f"argument-{kind}-{rank}").read_text() for rank in range(2))
        assert "CoverageError: the pattern 'nowhere' matches no parameter" in second
        assert "CoverageError: process 1 of 2 failed: CoverageError: the pattern" in first
    for rank in range(2):
        said = (tmp_path / f"apart-{rank}").read_text()
        assert "cannot be opened (No such file or directory). Expected a folder that every" in said
        assert "settings.parameters: on disk" in (tmp_path / f"refused-{rank}").read_text()
        for name in ("matrix", "self"):
            said = (tmp_path / f"missing-{name}-{rank}").read_text()
            assert "missing-1.pt cannot be read" in said
        for name in ("data", "weights", "learning rates"):
            assert (
                f"different {name} in different processes"
                in (tmp_path / f"{name}-{rank}").read_text()
            )
        told = (tmp_path / f"queries-{rank}").read_text()
        assert "the query loader gives different data in different processes" in told
