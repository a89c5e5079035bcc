"""Checkpoints: what files say, what they may not do, and which learning rate belongs to what."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import shutil
import warnings
from argparse import Namespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import distributed, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gradstats as gs
from gradstats.scoring._checkpoint_files import find_files
from gradstats.scoring._checkpoints import WeightsOnly
from tests.oracle import assert_unchanged, oracle_sqnorms, snapshot
from tests.scoring.setting import gradients_at, loss_fn, make_setting
from tests.test_models import gpt2


@pytest.fixture
def setting():
    return make_setting()


def score(setting, checkpoints, **options):
    return gs.self_influence(
        setting.model, setting.train_batches, loss_fn, checkpoints, progress=False, **options
    ).self_influence


def expected(setting, states, rates):
    """Σ_c Σ_p η_cp ‖g_p‖² by plain autograd."""
    total = 0
    for state, rate in zip(states, rates, strict=True):
        for name, gradient in gradients_at(setting, state, setting.train).items():
            own = rate[name] if isinstance(rate, dict) else rate
            total = total + own * gradient.square().sum(1)
    return total.numpy()


def test_files_in_natural_order(tmp_path):
    for name in ("epoch-10.pt", "epoch-2.pt", "epoch-1.pt", "other.txt"):
        (tmp_path / name).touch()
    found = gs.Checkpoints(f"{tmp_path}/epoch-*.pt", lr=1.0).names
    assert [name.rsplit("/", 1)[1] for name in found] == ["epoch-1.pt", "epoch-2.pt", "epoch-10.pt"]
    for folder in ("step-9", "step-10"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.pt").touch()
    paths = find_files(f"{tmp_path}/step-*/model.pt")
    assert [path.parent.name for path in paths] == ["step-9", "step-10"]
    (tmp_path / "1²2.pt").touch()
    (tmp_path / "1.pt").touch()
    assert [path.name for path in find_files(f"{tmp_path}/1*.pt")] == ["1.pt", "1²2.pt"]


def test_checkpoints_in_a_shell(setting):
    run = gs.Checkpoints(setting.states[:2], lr=[0.1, {"*": 0.2}])
    assert repr(run) == "Checkpoints(state dict 0: 0.1, state dict 1: {'*': 0.2})"
    loaded = repr(run.load(0, setting.model, ["0.weight"]))
    assert loaded == "Checkpoint(name='state dict 0', rates=0.1)"
    many = gs.Checkpoints(setting.states[:1] * 6, lr="optimizer")
    assert repr(many) == (
        "Checkpoints(state dict 0: optimizer, state dict 1: optimizer, 2 more, "
        "state dict 4: optimizer, state dict 5: optimizer)"
    )


def test_the_working_directory_may_change_before_a_file_is_read(setting, tmp_path, monkeypatch):
    torch.save(setting.states[0], tmp_path / "epoch-1.pt")
    monkeypatch.chdir(tmp_path)
    checkpoints = gs.Checkpoints("epoch-*.pt", lr=1.0)
    monkeypatch.chdir(tmp_path.parent)
    got = score(setting, checkpoints)
    np.testing.assert_array_equal(got, score(setting, gs.Checkpoints(setting.states[:1], lr=1.0)))
    assert checkpoints.names == ("epoch-1.pt",)


@pytest.mark.parametrize("layout", [
    "plain", "model", "model_state_dict", "state_dict", "safetensors", "memory", "data parallel",
    "legacy",
])  # fmt: skip
def test_every_layout_of_weights(setting, tmp_path, layout):
    state = setting.states[0]
    path = tmp_path / "weights.pt"
    if layout == "safetensors":
        path = tmp_path / "weights.safetensors"
        save_file(state, path)
    elif layout == "legacy":
        torch.save(state, path, _use_new_zipfile_serialization=False)
    elif layout == "data parallel":
        torch.save({f"module.{name}": value for name, value in state.items()}, path)
    elif layout in ("plain", "memory"):
        torch.save(state, path)
    else:
        torch.save({layout: state, "epoch": 3, "args": {"lr": 7.0}}, path)
    source = [state] if layout == "memory" else path
    got = score(setting, gs.Checkpoints(source, lr=0.25))
    np.testing.assert_allclose(got, expected(setting, [state], [0.25]), rtol=1e-10)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("key", ["optimizer", "optimizer_state_dict", "optimizer_states"])
def test_learning_rates_from_the_optimizer(setting, tmp_path, key, named):
    """The rate that the schedule had reached, not the one it started from."""
    model = setting.model
    source = model.named_parameters() if named else model.parameters()
    optimizer = torch.optim.SGD(source, lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    for number, state in enumerate(setting.states):
        held = optimizer.state_dict()
        weights = "model" if key == "optimizer" else "state_dict"
        content = {weights: state, key: [held] if key == "optimizer_states" else held}
        torch.save(content, tmp_path / f"{number}.pt")
        optimizer.step()
        schedule.step()
    got = score(setting, gs.Checkpoints(f"{tmp_path}/*.pt", lr="optimizer"))
    np.testing.assert_allclose(got, expected(setting, setting.states, [0.5, 0.05]), rtol=1e-10)


def folders(setting, tmp_path, file="optimizer.pt"):
    """Write checkpoints as the Trainer of transformers does, at rates 0.5 and 0.05."""
    for number, (state, rate) in enumerate(zip(setting.states, [0.5, 0.05], strict=True)):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        save_file(state, folder / "model.safetensors")
        decayed, *others = setting.model.parameters()
        optimizer = torch.optim.AdamW([{"params": [decayed]}, {"params": others}], lr=rate)
        torch.save(optimizer.state_dict(), folder / file)
        (folder / "training_args.bin").write_bytes(b"objects that are not to be opened")


@pytest.mark.parametrize("file", ["optimizer.pt", "optimizer.bin"])  # transformers, accelerate
def test_learning_rates_from_a_file_beside_the_weights(setting, tmp_path, file):
    folders(setting, tmp_path, file)
    run = gs.Checkpoints(f"{tmp_path}/checkpoint-*/model.safetensors", lr="optimizer")
    got = score(setting, run)
    np.testing.assert_allclose(got, expected(setting, setting.states, [0.5, 0.05]), rtol=1e-10)


@pytest.mark.parametrize("file", ["optimizer.pt", "optimizer.bin"])
def test_a_pattern_that_matches_what_lies_beside_the_weights(setting, tmp_path, file):
    """Each file would be a checkpoint of its own, and the optimizer's nobody's."""
    folders(setting, tmp_path, file)
    for place in ("checkpoint-*", "checkpoint-0", "**"):
        with pytest.raises(gs.CheckpointError, match=rf"also matches .*{file}") as caught:
            gs.Checkpoints(f"{tmp_path}/{place}/*", lr="optimizer")
        advice = f"{tmp_path}/{place}/model.safetensors"
        assert f"such as '{advice}'" in str(caught.value)
        gs.Checkpoints(advice, lr="optimizer")


@pytest.mark.parametrize(
    ("copies", "given", "message"),
    [
        ({"optimizer.bin": "optimizer.pt"}, "*/model", "not that of one torch.optim.Optimizer"),
        ({"optimizer_1.bin": "optimizer.pt"}, "*/model", "not that of one torch.optim.Optimizer"),
        # Beside several checkpoints it is nobody's, whether all or one of them are given;
        ({"later.safetensors": "model.safetensors"}, "0/*", "holds no optimizer state"),
        (
            {f"epoch-{number}.safetensors": "model.safetensors" for number in range(2)},
            "0/epoch-0",
            "holds no optimizer state",
        ),
        # nor is it known whose it is where accelerate has saved two models.
        ({"model_1.safetensors": "model.safetensors"}, "*/model", "holds no optimizer state"),
        ({"model_1.safetensors": "model.safetensors"}, "*/model_1", "holds no optimizer state"),
    ],
)
def test_optimizers_beside_the_weights_that_may_be_anothers(
    setting, tmp_path, copies, given, message
):
    folders(setting, tmp_path)
    for folder in tmp_path.iterdir():
        for new, original in copies.items():
            shutil.copy(folder / original, folder / new)
    run = gs.Checkpoints(f"{tmp_path}/checkpoint-{given}.safetensors", lr="optimizer")
    with pytest.raises(gs.CheckpointError, match=re.escape(message)):
        score(setting, run)


def test_what_stands_beside_the_weights_is_not_unpickled(setting, tmp_path):
    folders(setting, tmp_path, file="other.pt")
    torch.save(Namespace(lr=0.1), tmp_path / "checkpoint-0" / "optimizer.pt")
    run = gs.Checkpoints(f"{tmp_path}/checkpoint-0/model.safetensors", lr="optimizer")
    with pytest.raises(gs.CheckpointError, match=r"optimizer\.pt cannot be read"):
        score(setting, run)


def test_a_rate_for_each_parameter_group(setting):
    """Groups in another order than the model's parameters."""
    named = dict(setting.model.named_parameters())
    slow = [(name, p) for name, p in named.items() if name.endswith("weight")]
    fast = [(name, p) for name, p in named.items() if name.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": fast, "lr": 0.3}, {"params": slow, "lr": 0.02}], lr=1.0
    )
    content = {"model": setting.states[0], "optimizer": optimizer.state_dict()}
    rates = {name: 0.3 if name.endswith("bias") else 0.02 for name in named}
    want = expected(setting, setting.states[:1], [rates])
    np.testing.assert_allclose(
        score(setting, gs.Checkpoints([content], lr="optimizer")), want, rtol=1e-10
    )
    patterns = {"*.bias": 0.3, "*.weight": 0.02}
    np.testing.assert_allclose(
        score(setting, gs.Checkpoints(setting.states[:1], lr=patterns)), want, rtol=1e-10
    )
    scores = gs.influence(
        setting.model, setting.train_batches, setting.train_batches, loss_fn,
        gs.Checkpoints([content], lr="optimizer"), progress=False,
    )  # fmt: skip
    np.testing.assert_allclose(np.diag(np.asarray(scores)), want, rtol=1e-10)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_part_called_module_keeps_its_weights_and_rate(wrapped):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.weight = nn.Linear(4, 3), nn.Parameter(torch.rand(3) + 0.5)

        def forward(self, x):
            return self.module(x) * self.weight

    trained, batch = Model().double(), (torch.randn(5, 4).double(), torch.randint(3, (5,)))
    saved = nn.DataParallel(trained) if wrapped else trained
    named = list(saved.named_parameters())
    groups = [
        {"params": [each for each in named if each[1] is trained.weight], "lr": 0.3},
        {"params": [each for each in named if each[1] is not trained.weight], "lr": 0.02},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    content = {"model": saved.state_dict(), "optimizer": optimizer.state_dict()}
    got = gs.self_influence(
        Model().double(), [batch], loss_fn, gs.Checkpoints([content], lr="optimizer"),
        progress=False,
    )  # fmt: skip
    norms = oracle_sqnorms(trained, batch, loss_fn)
    want = sum((0.3 if name == "weight" else 0.02) * row for name, row in norms.items())
    np.testing.assert_allclose(got.self_influence, want, rtol=1e-10)


def optimizer_content(setting, groups, lr=0.1):
    optimizer = torch.optim.SGD(groups, lr=lr)
    return [{"model": setting.states[0], "optimizer": optimizer.state_dict()}]


def test_rates_that_cannot_be_known_are_errors(setting):
    parameters = list(setting.model.parameters())
    named = list(setting.model.named_parameters())
    cases = [
        (optimizer_content(setting, [{"params": parameters[:2]}, {"params": parameters[2:],
                                                                  "lr": 0.2}]),
         "2 parameter groups have different learning rates .*named_parameters"),
        (optimizer_content(setting, parameters[:2]),
         "holds 2 parameters without names, the model has 6"),
        (optimizer_content(setting, named[:2]),
         r"does not hold '2.weight', '2.bias', .* only '0.weight', '0.bias', so .* whose names"),
        (setting.states[:1], 'holds no optimizer state, from which lr="optimizer"'),
        ([{"model": setting.states[0], "optimizer": [1, 2]}], "not that of one torch.optim"),
        ([{"model": setting.states[0], "optimizer": {"param_groups": [{"params": [0]}]}}],
         "parameter group 0 of the optimizer has no 'lr'"),
    ]  # fmt: skip
    for content, message in cases:
        with pytest.raises(gs.CheckpointError, match=message):
            score(setting, gs.Checkpoints(content, lr="optimizer"))
    for rate in (0.1, 0.2):  # though the rates may agree
        patterns = {"0.*": 0.1, "*.bias": rate}
        with pytest.raises(
            gs.CheckpointError, match=r"2 patterns of lr match the parameter '0\.bias'"
        ):
            score(setting, gs.Checkpoints(setting.states, lr=patterns))
    with pytest.raises(
        gs.CheckpointError, match=r"0 patterns of lr match the parameter '2.weight'"
    ):
        score(setting, gs.Checkpoints(setting.states, lr={"0.*": 0.1}))
    unknown = {"*": 0.1, "head.*": 0.2}
    with pytest.raises(
        gs.CheckpointError, match=r"'head\.\*' of lr matches no parameter.*0\.weight"
    ):
        score(setting, gs.Checkpoints(setting.states, lr=unknown))
    # A parameter that is left out needs no rate, and may have one.
    score(setting, gs.Checkpoints(setting.states, lr={"0.*": 0.1, "2.*": 0.2}), parameters="0.*")
    score(setting, gs.Checkpoints(setting.states, lr={"0.*": 0.1}), parameters="0.*")


def two_optimizers(setting):
    """As Lightning keeps them for a model trained by several optimizers, such as a GAN."""
    parts = list(setting.model[0].parameters()), list(setting.model[3].parameters())
    held = [torch.optim.SGD(part, lr=0.1).state_dict() for part in parts]
    return {"state_dict": setting.states[0], "optimizer_states": held}


def without_rate(setting):
    """As an optimizer that sets its own steps keeps them, such as Adafactor."""
    optimizer = torch.optim.SGD(setting.model.parameters(), lr=0.1).state_dict()
    optimizer["param_groups"][0]["lr"] = None
    return {"model": setting.states[0], "optimizer": optimizer}


@pytest.mark.parametrize("source", ["memory", "file"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (two_optimizers, r"not that of one torch\.optim\.Optimizer\. Pass the learning rates"),
        (without_rate, r"rate of parameter group 0 in .* is None, expected a number\. Pass lr="),
        (lambda setting: {"model": setting.states[0], "optimizer": {"param_groups": 3}},
         r"not that of one torch\.optim\.Optimizer"),
        (lambda setting: {"model": setting.states[0], "optimizer": {"param_groups": [{"lr": 1}]}},
         r"not that of one torch\.optim\.Optimizer"),
    ],
)  # fmt: skip
def test_an_unusual_optimizer_is_read_only_where_it_is_asked(
    setting, tmp_path, make, message, source
):
    content = [make(setting)]
    if source == "file":
        torch.save(content[0], tmp_path / "weights.pt")
        content = tmp_path / "weights.pt"
    want = expected(setting, setting.states[:1], [0.1])
    np.testing.assert_allclose(score(setting, gs.Checkpoints(content, lr=0.1)), want, rtol=1e-10)
    scores = gs.influence(
        setting.model, setting.train_batches, setting.train_batches, loss_fn,
        gs.Checkpoints(setting.states[:1], lr=0.1), query_checkpoints=content, progress=False,
    )  # fmt: skip
    np.testing.assert_allclose(np.diag(scores), want, rtol=1e-10)
    with pytest.raises(gs.CheckpointError, match=message):
        score(setting, gs.Checkpoints(content, lr="optimizer"))


def test_rates_in_tensors(setting):
    """As capturable optimizers keep them; also in a list."""
    optimizer = torch.optim.SGD(setting.model.parameters(), lr=0.5).state_dict()
    optimizer["param_groups"][0]["lr"] = torch.tensor(0.5)
    content = {"model": setting.states[0], "optimizer": optimizer}
    want = expected(setting, setting.states[:1], [0.5])
    for lr in ("optimizer", [torch.tensor(0.5)], [np.array(0.5)]):
        got = score(setting, gs.Checkpoints([content], lr=lr))
        np.testing.assert_allclose(got, want, rtol=1e-10)


@pytest.mark.parametrize("named", [False, True])
def test_an_optimizer_that_maximises_is_refused(setting, named):
    """Its steps raise what it was given: the losses, or their negatives."""
    model = setting.model
    source = list(model.named_parameters() if named else model.parameters())
    groups = [{"params": source[:2]}, {"params": source[2:], "maximize": True}]
    optimizer = torch.optim.SGD(groups, lr=0.5).state_dict()
    content = {"model": setting.states[0], "optimizer": optimizer}
    with pytest.raises(gs.CheckpointError, match=r"group 1 .*maximize=True.*Pass lr= numbers"):
        score(setting, gs.Checkpoints([content], lr="optimizer"))
    got = score(setting, gs.Checkpoints([content], lr=0.5))
    np.testing.assert_allclose(got, expected(setting, setting.states[:1], [0.5]), rtol=1e-10)


def test_an_optimizer_that_estimates_its_steps_is_refused(setting):
    """As Prodigy and D-Adaptation do, whose rate is one throughout."""
    optimizer = torch.optim.SGD(setting.model.parameters(), lr=1.0).state_dict()
    optimizer["param_groups"][0]["d"] = 1e-4
    content = {"model": setting.states[0], "optimizer": optimizer}
    with pytest.raises(gs.CheckpointError, match=r"group 0 .* has 'd', .*\['lr'\] \* group\['d'\]"):
        score(setting, gs.Checkpoints([content], lr="optimizer"))
    got = score(setting, gs.Checkpoints([content], lr=[1e-4]))
    np.testing.assert_allclose(got, expected(setting, setting.states[:1], [1e-4]), rtol=1e-10)


def with_rates(setting, rates):
    """Checkpoints as a schedule leaves them."""
    contents = []
    for state, rate in zip(setting.states, rates, strict=True):
        optimizer = torch.optim.SGD(setting.model.parameters(), lr=rate)
        contents.append({"model": state, "optimizer": optimizer.state_dict()})
    return contents


@pytest.mark.parametrize("given", ["optimizer", "list", "patterns"])
@pytest.mark.parametrize("top_k", [None, 2])
def test_a_checkpoint_at_rate_zero_is_warned_about(setting, given, top_k):
    """As a linear decay's last one; where all are, nothing is computed."""

    def checkpoints(rates):
        if given == "optimizer":
            return gs.Checkpoints(with_rates(setting, rates), lr="optimizer")
        lr = list(rates) if given == "list" else [{"*": rate} for rate in rates]
        return gs.Checkpoints(setting.states, lr=lr)

    message = "learning rate of every parameter is zero in state dict 1, so it adds nothing"
    with pytest.warns(gs.GradStatsWarning, match=message) as heard:
        got = score(setting, checkpoints([0.1, 0.0]))
    np.testing.assert_allclose(got, expected(setting, setting.states[:1], [0.1]), rtol=1e-10)
    sides = setting.train_batches, setting.query_batches
    with pytest.warns(gs.GradStatsWarning, match=message) as heard_too:
        scores = gs.influence(
            setting.model, *sides, loss_fn, checkpoints([0.1, 0.0]), top_k=top_k, progress=False
        )
    # At the caller's line, however far below it a checkpoint is loaded.
    assert {warning.filename for warning in (*heard, *heard_too)} == {__file__}
    alone = gs.influence(
        setting.model, *sides, loss_fn, gs.Checkpoints(setting.states[:1], lr=0.1), top_k=top_k,
        progress=False,
    )  # fmt: skip
    np.testing.assert_array_equal(scores.proponents(1, 2).scores, alone.proponents(1, 2).scores)

    def unseen(model, batch):
        raise AssertionError("nothing should be computed")

    with pytest.raises(gs.CheckpointError, match="every learning rate is zero"):
        gs.self_influence(
            setting.model, setting.train_batches, unseen, checkpoints([0.0, 0.0]), progress=False
        )


def test_rates_of_parameters_that_are_left_out_do_not_count(setting):
    checkpoints = gs.Checkpoints(setting.states, lr={"0.*": 0.1, "[23].*": 0.0})
    with pytest.raises(gs.CheckpointError, match="every learning rate is zero"):
        score(setting, checkpoints, parameters="3.*")


@pytest.mark.parametrize(
    ("lr", "message"),
    [
        (np.array(-0.1), r"is -0.1, expected a finite number"),
        (np.array([0.1, 0.2, 0.3]), "lists 3 learning rates"),
        (None, r"no learning rates \(lr=None\)"),
        ("cosine", "is 'cosine', expected a number"),
        (True, "is True, expected a number"),
        (-0.1, "is -0.1, expected a finite number"),
        (float("nan"), "is nan, expected a finite number"),
        ([0.1], "lists 1 learning rates, expected one for each of the 2 checkpoints"),
        ([0.1, None], "of state dict 1 is None, expected a number"),
        (0, "every learning rate is zero"),
        ({"*": "fast"}, "is 'fast', expected a number"),
        (b"ab", "of state dict 0 is b'ab', expected a number"),
        ({0.1, 0.3}, "lr is a set, which has no order"),
        (frozenset([0.1]), "lr is a frozenset, which has no order"),
    ],
)
def test_missing_or_impossible_rates(setting, lr, message):
    with pytest.raises(gs.CheckpointError, match=message):
        gs.Checkpoints(setting.states, lr=lr)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], r"the list is empty.*\[model.state_dict\(\)\]"),
        ("nowhere/*.pt", "no checkpoint matches 'nowhere/"),
        ([3], "checkpoint 0 is int, expected a file"),
        ([nn.Linear(1, 1)], "checkpoint 0 is Linear, expected a file"),
        ([{"epoch": 3}], r"holds no weights.*keys, load the file with torch\.load"),
        ({"model": {"w": torch.ones(1)}, "state_dict": {"w": torch.ones(1)}}, "under each of"),
        ({"early.pt", "late.pt"}, "the list of checkpoints is a set, which has no order"),
        (np.array("early.pt"), "checkpoint 0 is ndarray, expected a file"),
        (torch.ones(2), "checkpoint 0 is Tensor, expected a file"),
        (b"early.pt", "checkpoint 0 is bytes, expected a file"),
    ],
)
def test_sources_that_are_none(sources, message):
    with pytest.raises(gs.CheckpointError, match=message):
        gs.Checkpoints(sources, lr=1.0)
    with pytest.raises(gs.CheckpointError, match=message):
        WeightsOnly(sources, gs.Checkpoints({"w": torch.ones(1)}, lr=1.0))


def test_a_file_that_holds_no_dict(setting, tmp_path):
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(gs.CheckpointError, match=r"list\.pt holds list, expected a state dict"):
        score(setting, gs.Checkpoints(tmp_path / "list.pt", lr=1.0))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "*.pt"]
)
def test_folders_are_refused_with_what_to_pass(tmp_path, name):
    for number in (1, 2):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        for file in ("optimizer.pt", name.replace("*", "epoch")):
            (folder / file).touch()
    pattern = f"{tmp_path}/checkpoint-*"
    with pytest.raises(gs.CheckpointError, match=re.escape(f"such as '{pattern}/{name}'")):
        gs.Checkpoints(pattern, lr=1.0)


def test_the_keys_of_a_mapping_are_in_order(tmp_path):
    """Its files with their rates, say."""
    run = {str(tmp_path / f"{name}.pt"): rate for name, rate in (("b", 0.3), ("a", 0.1))}
    for file in run:
        torch.save({"w": torch.ones(1)}, file)
    assert gs.Checkpoints(run.keys(), lr=run.values()).names == tuple(run)


def test_rates_in_arrays(setting):
    want = expected(setting, setting.states, [0.1, 0.1])
    tensor = torch.tensor(0.1, dtype=torch.float64)
    for lr in (np.array(0.1), tensor, np.array([0.1, 0.1]), np.float64(0.1)):
        got = score(setting, gs.Checkpoints(setting.states, lr=lr))
        np.testing.assert_allclose(got, want, rtol=1e-10)


def test_a_file_listed_twice_is_refused(setting, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        torch.save(setting.states[0], f"e-{number}.pt")
    os.symlink("e-1.pt", "last.pt")
    with pytest.raises(
        gs.CheckpointError, match=r"checkpoint e-2\.pt is listed more than once, so"
    ):
        gs.Checkpoints(["e-*.pt", "e-2.pt"], lr=1.0)
    for other in (tmp_path / "e-1.pt", "last.pt"):
        with pytest.raises(gs.CheckpointError, match=r"listed more than once, also as e-1\.pt"):
            gs.Checkpoints(["e-1.pt", other], lr=1.0)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("kind", ["self", "matrix", "top"])
@pytest.mark.parametrize("source", ["file", "memory"])
def test_the_same_weights_count_once(setting, tmp_path, kind, source, on_disk):
    first, second = setting.states
    sources = [first, second, {f"module.{name}": value for name, value in first.items()}]
    if source == "file":
        for number, content in enumerate(sources):
            torch.save(content, tmp_path / f"{number}.pt")
        sources = [tmp_path / f"{number}.pt" for number in range(3)]
    checkpoints = gs.Checkpoints(sources, lr=0.1)
    options = {"progress": False, "out": tmp_path / "scores" if on_disk else None}
    with pytest.raises(gs.CheckpointError, match=r"2.* and .*0.* hold the same weights"):
        if kind == "self":
            score(setting, checkpoints, out=options["out"])
        else:
            gs.influence(
                setting.model, setting.train_batches, setting.query_batches, loss_fn, checkpoints,
                top_k=3 if kind == "top" else None, **options,
            )  # fmt: skip


@pytest.mark.parametrize(("what", "sides"), [("weights", 1), ("learning rates", 1), ("weights", 2)])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_file_that_is_written_during_a_call_is_refused(setting, tmp_path, on_disk, what, sides):
    """With top_k= files are read again for every chunk of the training data."""
    files = [tmp_path / "0.pt", tmp_path / "1.pt"]
    optimizer = torch.optim.SGD(setting.model.parameters(), lr=0.1)
    for file, state in zip(files, setting.states, strict=True):
        torch.save({"model": state, "optimizer": optimizer.state_dict()}, file)
    calls = []

    def writing(model, batch):
        calls.append(len(batch[0]))
        if len(calls) == 5:
            state = setting.states[1]
            if what == "weights":
                state = {name: 2 * value for name, value in state.items()}
            else:
                optimizer.param_groups[0]["lr"] = 0.7
            torch.save({"model": state, "optimizer": optimizer.state_dict()}, files[1])
        return loss_fn(model, batch)

    out = tmp_path / "out" if on_disk else None
    checkpoints, other = gs.Checkpoints(files, lr="optimizer"), None
    if sides == 2:
        checkpoints, other = gs.Checkpoints(setting.states, lr=0.1), files
    with pytest.raises(gs.CheckpointError, match=rf"1\.pt holds other {what} than when .* first"):
        gs.influence(
            setting.model, setting.train_batches, setting.query_batches, writing, checkpoints,
            query_checkpoints=other, top_k=2, budget=1, out=out, progress=False,
        )  # fmt: skip


@pytest.mark.parametrize("wrap", [lambda model: model, AveragedModel])
def test_averages_of_weights(setting, tmp_path, wrap):
    """AveragedModel counts its updates beside the weights: its checkpoints and others fit it."""
    average = AveragedModel(setting.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    states = []
    for state in setting.states:
        setting.model.load_state_dict(state)
        average.update_parameters(setting.model)
        states.append({name: value.clone() for name, value in average.state_dict().items()})
    bare = [
        {name.removeprefix("module."): state[name] for name in state if name != "n_averaged"}
        for state in states
    ]
    want = expected(setting, bare, [0.1, 0.3])
    model = wrap(setting.model)
    before = snapshot(model)
    for number, sources in enumerate((states, bare)):
        got = gs.self_influence(
            model, setting.train_batches, loss_fn, gs.Checkpoints(sources, lr=[0.1, 0.3]),
            out=tmp_path / str(number), progress=False,
        )  # fmt: skip
        np.testing.assert_allclose(got.self_influence, want)
        assert_unchanged(model, before)
    # The same weights, whatever was counted.
    entries = [json.loads((tmp_path / f"{n}/manifest.json").read_text()) for n in range(2)]
    assert entries[0]["checkpoints"].keys() == entries[1]["checkpoints"].keys()


def test_a_folder_is_no_checkpoint(tmp_path):
    (tmp_path / "step-[1]").mkdir()
    for name in (tmp_path, tmp_path / "step-[1]", f"{tmp_path}/step-*", f"{tmp_path}/"):
        with pytest.raises(gs.CheckpointError, match="matches folders only, expected") as caught:
            gs.Checkpoints(name, lr=1.0)
        assert str(caught.value).endswith("/*.pt'.") and "//" not in str(caught.value)


@pytest.mark.parametrize(
    ("saved", "advice"),
    [
        ("checkpoint-5/model.safetensors", "/*/model.safetensors'"),
        ("model.safetensors", "/model.safetensors'"),
        ("adapter_model.safetensors", "/*.safetensors'"),
        ("epoch-1.pt", "/*.pt'"),
    ],
)
def test_a_folder_says_what_to_look_for_in_it(tmp_path, saved, advice):
    (tmp_path / saved).parent.mkdir(exist_ok=True)
    (tmp_path / saved).touch()
    with pytest.raises(gs.CheckpointError) as error:
        gs.Checkpoints(tmp_path, lr=1.0)
    assert f"Pass a glob, such as '{tmp_path}{advice}" in str(error.value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_shards_is_made_a_file_first(setting, tmp_path):
    """As FSDP writes them; the advice is followed."""
    folder, file = tmp_path / "step-1", tmp_path / "step-1.pt"
    torch.distributed.checkpoint.save(
        {"model": setting.states[0]}, checkpoint_id=folder, no_dist=True
    )
    for name in (folder, f"{tmp_path}/step-*"):
        with pytest.raises(gs.CheckpointError, match=r"step-1 is a folder of .*dcp_to_torch_save"):
            gs.Checkpoints(name, lr=1.0)
    dcp_to_torch_save(folder, file)
    np.testing.assert_allclose(
        score(setting, gs.Checkpoints(file, lr=1.0)), expected(setting, setting.states[:1], [1.0])
    )


class Payload:
    """An object that runs code when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_a_file_that_would_run_code_is_refused(setting, tmp_path, monkeypatch):
    """Also where the environment asks torch.load to trust files."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    target = tmp_path / "hacked"
    torch.save({"model": setting.states[0], "extra": Payload(target)}, tmp_path / "bad.pt")
    with pytest.raises(gs.CheckpointError, match="not unpickled, because that may run code"):
        score(setting, gs.Checkpoints(tmp_path / "bad.pt", lr=1.0))
    assert not target.exists()


def test_what_a_file_holds_is_named_without_advice_to_trust_it(setting, tmp_path):
    """PyTorch's own message begins with how to read the file without the safeguard."""
    torch.save({"model": setting.states[0], "args": Namespace(lr=0.1)}, tmp_path / "run.pt")
    (tmp_path / "text.pt").write_text("xx")
    for name, reason in (("run", "GLOBAL argparse.Namespace was not"), ("text", "operand 120")):
        with pytest.raises(gs.CheckpointError, match=reason) as caught:
            score(setting, gs.Checkpoints(tmp_path / f"{name}.pt", lr=1.0))
        message = str(caught.value)
        assert "will likely succeed" not in message and "\x1b" not in message
    # The way on that the message leaves open.
    with torch.serialization.safe_globals([Namespace]):
        result = score(setting, gs.Checkpoints(tmp_path / "run.pt", lr=1.0))
    np.testing.assert_allclose(result, expected(setting, setting.states[:1], [1.0]))


def test_weights_that_were_not_saved_are_filled_in_by_the_user(setting):
    """As of adapters: only what was trained is in the files."""
    setting.model[0].requires_grad_(False)
    start = setting.model.state_dict()
    trained = {name for name, p in setting.model.named_parameters() if p.requires_grad}
    saved = [{name: state[name] for name in trained} for state in setting.states]
    with pytest.raises(gs.CheckpointError, match=r"pass gs\.Checkpoints"):
        score(setting, gs.Checkpoints(saved, lr=0.1))
    filled = [{**start, **each} for each in saved]
    result = score(setting, gs.Checkpoints(filled, lr=0.1))
    np.testing.assert_allclose(result, expected(setting, filled, [0.1] * len(filled)))


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("size", [0, 10, 700])
def test_truncated_files_are_reported(setting, tmp_path, suffix, size):
    path = tmp_path / f"weights.{suffix}"
    if suffix == "pt":
        torch.save(setting.states[0], path)
    else:
        save_file(setting.states[0], path)
    os.truncate(path, size)
    state = snapshot(setting.model)
    with pytest.raises(gs.CheckpointError, match=rf"weights\.{suffix} cannot be read"):
        score(setting, gs.Checkpoints(path, lr=1.0))
    assert_unchanged(setting.model, state)


def save_in_parts(state, folder, suffix):
    """Save weights in two files with an index, as transformers does; return the index."""
    folder.mkdir()
    names = list(state)
    listed = {}
    for number, part in enumerate((names[:3], names[3:]), 1):
        file = f"model-{number:05}-of-00002.{suffix}"
        held = {name: state[name] for name in part}
        save_file(held, folder / file) if suffix == "safetensors" else torch.save(
            held, folder / file
        )
        listed.update(dict.fromkeys(part, file))
    index = folder / f"model.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": listed}))
    return index


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_weights_in_several_files(setting, tmp_path, suffix):
    for number, state in enumerate(setting.states):
        save_in_parts(state, tmp_path / f"step-{number}", suffix)
    got = score(setting, gs.Checkpoints(f"{tmp_path}/step-*/*.index.json", lr=[0.1, 0.3]))
    np.testing.assert_allclose(got, expected(setting, setting.states, [0.1, 0.3]), rtol=1e-10)
    with pytest.raises(gs.CheckpointError, match=r"one file of several.*index\.json"):
        score(setting, gs.Checkpoints(f"{tmp_path}/step-0/model-*", lr=0.1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not the index of a checkpoint"),
        ("[1]", "not the index of a checkpoint"),
        ('{"weight_map": {"0.weight": 3}}', "not the index of a checkpoint"),
        ('{"weight_map": {"0.weight": "../other.safetensors"}}', "not the index of a checkpoint"),
        ('{"weight_map": {"0.weight": "model.index.json"}}', r"lists \['model\.index\.json'\]"),
        ('{"weight_map": {"0.weight": "gone.safetensors"}}', r"lists \['gone\.safetensors'\]"),
        ('{"weight_map": {}}', "lists no files"),
    ],
)
def test_an_index_that_lists_no_files_of_its_folder(setting, tmp_path, content, message):
    (tmp_path / "other.safetensors").touch()
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / "model.index.json").write_text(content)
    with pytest.raises(gs.CheckpointError, match=message):
        score(setting, gs.Checkpoints(folder / "model.index.json", lr=0.1))


def test_weights_that_do_not_fit_leave_the_model_as_it_was(setting):
    state = snapshot(setting.model)
    good = setting.states[0]
    missing = {name: value for name, value in good.items() if name != "3.bias"}
    cases = [
        (missing, r"it lacks '3.bias'\. Expected .* lr=\.\.\.\), where saved has"),
        ({**good, "4.weight": torch.ones(2)}, r"it holds '4.weight', which .*architecture\.$"),
        ({**missing, "4.bias": torch.ones(2)}, "it lacks '3.bias', and it holds '4.bias', which"),
        (
            {**good, "3.bias": torch.ones(5)},
            r"does not fit the model: '3.bias' has shape \(5,\), exp",
        ),
        (
            {name: torch.ones(1, 1) for name in good},
            r"'0.weight' has .*; '0.bias' has .*; '2.weight' has .*\); and 3 more\. Pass a model",
        ),
    ]
    for content, message in cases:
        with pytest.raises(gs.CheckpointError, match=f"(?s){message}"):
            score(setting, gs.Checkpoints([good, content], lr=1.0))
        assert_unchanged(setting.model, state)


class Noting(nn.Linear):
    """Saves what is no tensor, and loads it not."""

    def get_extra_state(self):
        return {"calls": 1}


class Counted(Noting):
    def set_extra_state(self, state):
        assert state == {"calls": 1}


@pytest.mark.parametrize(
    "kind, changed, message",
    [
        (Counted, {"weight": torch.ones(2, 5)}, r"fit the model: 'weight' has shape \(2, 5\)"),
        (Noting, {}, r"the model has no way to take '_extra_state'"),
    ],
)
def test_what_is_no_tensor_in_checkpoints_that_do_not_fit(kind, changed, message):
    model, batch = kind(5, 3), (torch.randn(4, 5), torch.arange(4) % 3)
    checkpoints = gs.Checkpoints([{**model.state_dict(), **changed}], lr=1)
    with pytest.raises(gs.CheckpointError, match=message):
        gs.self_influence(model, [batch], loss_fn, checkpoints, progress=False)


def test_a_checkpoint_of_the_module_around_the_model(setting):
    """As Lightning saves it; or the other way round."""
    inner = setting.model.state_dict()
    around = {f"net.{name}": value for name, value in inner.items()} | {
        "metric.total": torch.ones(1)
    }
    with pytest.raises(
        gs.CheckpointError, match=r"the model's with 'net\.' before them: pass state dicts"
    ):
        score(setting, gs.Checkpoints([around], lr=1.0))
    outer = nn.ModuleDict({"net": setting.model})
    data = (outer, [setting.train], lambda outer, batch: loss_fn(outer["net"], batch))
    with pytest.raises(gs.CheckpointError, match=r"without 'net\.' before them: pass model\.net, "):
        gs.self_influence(*data, gs.Checkpoints([inner], lr=1.0), progress=False)


def test_sharded_models_and_their_shards_are_refused(setting):
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = copy.deepcopy(setting.model)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        shards = gs.Checkpoints([model.state_dict()], lr=1.0)
        sharded = dataclasses.replace(setting, model=model)
        for checkpoints in (shards, gs.Checkpoints(setting.states, lr=1.0)):
            with pytest.raises(gs.UnsupportedOperationError, match=r"sharded .* a whole model"):
                score(sharded, checkpoints)
        with pytest.raises(gs.CheckpointError, match=r"shards of '0.weight', .*full_state_dict"):
            score(setting, shards)
    finally:
        distributed.destroy_process_group()


def test_adapters_that_peft_saved(setting, tmp_path):
    """Under names that are not the model's, and without what was not trained."""
    peft = pytest.importorskip("peft")
    options = {"r": 2, "target_modules": ["0"], "modules_to_save": ["2"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model is no transformer of Hugging Face
        model = peft.get_peft_model(setting.model, peft.LoraConfig(**options))
        states, files = [], []
        for number in range(2):
            for parameter in model.parameters():
                if parameter.requires_grad:
                    nn.init.normal_(parameter)
            states.append({name: value.clone() for name, value in model.state_dict().items()})
            model.save_pretrained(tmp_path / str(number))
            files.append(tmp_path / str(number) / "adapter_model.safetensors")
    batches, losses = setting.train_batches, loss_fn

    def measured(checkpoints):
        table = gs.self_influence(model, batches, losses, checkpoints, progress=False)
        return table.self_influence

    expected = measured(gs.Checkpoints(states, lr=0.1))
    before = snapshot(model)
    np.testing.assert_allclose(measured(gs.Checkpoints(files, lr=0.1)), expected, rtol=1e-12)
    assert_unchanged(model, before)
    parts = [load_file(file) for file in files]
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    whole = model.state_dict()
    beside = "base_model.model.0.base_layer.weight"  # as peft adds embeddings that it adapts
    more = [{**part, beside: whole[beside]} for part in parts]
    np.testing.assert_allclose(measured(gs.Checkpoints(more, lr=0.1)), expected, rtol=1e-12)
    named = [{**whole, **{name: state[name] for name in trained}} for state in states]
    np.testing.assert_allclose(measured(gs.Checkpoints(named, lr=0.1)), expected, rtol=1e-12)
    hint = "If adapters of peft are all that is trained, pass peft's files unchanged"
    with pytest.raises(gs.CheckpointError, match=hint):
        measured(gs.Checkpoints([{**whole, **part} for part in parts], lr=0.1))
    with pytest.raises(gs.CheckpointError, match=hint):
        del parts[0]["base_model.model.2.bias"]
        measured(gs.Checkpoints(parts[:1], lr=0.1))
    for parameter in model.parameters():
        parameter.requires_grad_()  # trained, and not saved
    with pytest.raises(gs.CheckpointError, match=hint):
        measured(gs.Checkpoints(files, lr=0.1))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(gs.CoverageError, match=r"no parameter that requires grad.*is_trainable"):
        measured(gs.Checkpoints(files, lr=0.1))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, which peft calls
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_prompts_that_peft_saved(tmp_path, kind):
    """Under a name of their own, without that of their table in the model."""
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = peft.get_peft_model(gpt2(), config).double().eval()
    files = []
    for number in range(2):
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter)
        model.save_pretrained(tmp_path / str(number), save_embedding_layers=False)
        files.append(tmp_path / str(number) / "adapter_model.safetensors")

    def losses(model, batch):
        logits = model(input_ids=batch).logits[:, -batch.shape[1] : -1]
        return functional.cross_entropy(logits.mT, batch[:, 1:], reduction="none").mean(1)

    tokens = torch.randint(50, (4, 6))
    checkpoints = gs.Checkpoints(files, lr=[0.5, 0.1])
    table = gs.self_influence(model, [tokens], losses, checkpoints, progress=False)
    for file, measured in zip(files, table.sqnorm, strict=True):
        peft.set_peft_model_state_dict(model, load_file(file))
        total = sum(oracle_sqnorms(model, tokens, losses).values())
        np.testing.assert_allclose(measured, total, rtol=1e-7)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, which peft calls
@pytest.mark.parametrize("kind", ["tokens", "vectors"])
def test_tied_adapters_that_peft_saved(tmp_path, kind):
    """Under one of their names: tokens beside an output layer that is tied, or shared vectors."""
    peft = pytest.importorskip("peft")
    config = {
        "tokens": peft.LoraConfig(
            r=2, target_modules=["c_attn"], fan_in_fan_out=True, trainable_token_indices=[3, 7]
        ),
        "vectors": peft.VBLoRAConfig(
            r=2, num_vectors=8, vector_length=4, target_modules=["c_attn"], fan_in_fan_out=True
        ),
    }[kind]
    model = peft.get_peft_model(gpt2(), config).double().eval()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    files, states = [], []
    for number in range(2):
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.3)
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        model.save_pretrained(tmp_path / str(number), save_embedding_layers=False)
        files.append(tmp_path / str(number) / "adapter_model.safetensors")
    model.load_state_dict(whole)

    def losses(model, batch):
        logits = model(input_ids=batch).logits[:, :-1]
        return functional.cross_entropy(logits.mT, batch[:, 1:], reduction="none").mean(1)

    tokens = torch.randint(10, (4, 6))
    table = gs.self_influence(
        model, [tokens], losses, gs.Checkpoints(files, lr=[0.5, 0.1]), progress=False
    )
    for state, measured in zip(states, table.sqnorm, strict=True):
        model.load_state_dict(state)
        total = sum(oracle_sqnorms(model, tokens, losses).values())
        np.testing.assert_allclose(measured, total, rtol=1e-7)


def test_adapters_for_a_model_without_them(setting, tmp_path):
    """The model below is passed, where that of peft was trained."""
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model is no transformer of Hugging Face
        options = peft.LoraConfig(r=2, target_modules=["0"])
        peft.get_peft_model(copy.deepcopy(setting.model), options).save_pretrained(tmp_path)
    checkpoints = gs.Checkpoints(tmp_path / "adapter_model.safetensors", lr=0.1)
    hint = r"These are adapters of peft, which the model lacks: .*is_trainable=True\)"
    with pytest.raises(gs.CheckpointError, match=hint):
        score(setting, checkpoints)


def test_each_checkpoint_is_loaded_once(setting, tmp_path, monkeypatch):
    from gradstats.scoring import _checkpoints

    for number, state in enumerate(setting.states):
        torch.save(state, tmp_path / f"{number}.pt")
    read, paths = _checkpoints.read_file, []
    monkeypatch.setattr(_checkpoints, "read_file", lambda path: paths.append(path) or read(path))
    checkpoints = gs.Checkpoints(f"{tmp_path}/*.pt", lr=0.1)
    score(setting, checkpoints)
    assert len(paths) == 2
    gs.influence(
        setting.model, setting.train_batches, setting.query_batches, loss_fn, checkpoints,
        budget=1, out=tmp_path / "scores", progress=False,
    )  # fmt: skip
    assert len(paths) == 4


class Tied(nn.Module):
    """An embedding whose weight is the head's too; the head first in the state dict or last."""

    def __init__(self, head_first):
        super().__init__()
        if head_first:
            self.head = nn.Linear(4, 9, bias=False)
        self.embedding = nn.Embedding(9, 4)
        self.middle = nn.Linear(4, 4)
        if not head_first:
            self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.middle(self.embedding(ids))))


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("kept", ["embedding.weight", "head.weight"])
def test_tied_weights_stored_once(tmp_path, kept, head_first):
    """As safetensors' save_model and Hugging Face's save_pretrained store them."""
    model, other = (Tied(head_first).double() for _ in range(2))
    state = other.state_dict()
    dropped = {"embedding.weight": "head.weight", "head.weight": "embedding.weight"}[kept]
    save_file({k: v for k, v in state.items() if k != dropped}, tmp_path / "1.safetensors")
    save_model(other, tmp_path / "2.safetensors")
    data = [(torch.randint(9, (5,)), torch.randint(9, (5,)))]
    sqnorms = sum(oracle_sqnorms(other, data[0], loss_fn).values())
    before = snapshot(model)
    for number in (1, 2):
        checkpoints = gs.Checkpoints(tmp_path / f"{number}.safetensors", lr=0.5)
        table = gs.self_influence(model, data, loss_fn, checkpoints, progress=False)
        np.testing.assert_allclose(table.self_influence, 0.5 * sqnorms.numpy(), rtol=1e-10)
        scores = gs.influence(model, data, data, loss_fn, checkpoints, progress=False)
        np.testing.assert_allclose(np.diag(scores), 0.5 * sqnorms.numpy(), rtol=1e-10)
        assert_unchanged(model, before)
    with pytest.raises(gs.CheckpointError, match="hold the same weights"):
        both = gs.Checkpoints([tmp_path / "1.safetensors", state], lr=0.5)
        gs.self_influence(model, data, loss_fn, both, progress=False)


@pytest.mark.parametrize("head_first", [False, True])
def test_rates_of_tied_weights(head_first):
    """A rate under either name is that of the one parameter, which cannot have two."""
    model = Tied(head_first).double()
    data = [(torch.randint(9, (5,)), torch.randint(9, (5,)))]
    tied, rest = "head.weight" if head_first else "embedding.weight", {"middle.*": 0.1}
    sqnorms = oracle_sqnorms(model, data[0], loss_fn)
    expected = 0.5 * sqnorms.pop(tied) + 0.1 * sum(sqnorms.values())

    def scored(rates):
        checkpoints = gs.Checkpoints(model.state_dict(), lr={**rest, **rates})
        return gs.self_influence(model, data, loss_fn, checkpoints, progress=False)

    for rates in ({"head.*": 0.5}, {"embedding.*": 0.5}, {"head.*": 0.5, "embedding.*": 0.5}):
        np.testing.assert_allclose(scored(rates).self_influence, expected.numpy(), rtol=1e-10)
    with pytest.raises(gs.CheckpointError, match=r"2 patterns of lr .*tied as \["):
        scored({"head.*": 0.5, "embedding.*": 0.2})


def test_tied_weights_that_are_nowhere_are_missing():
    model = Tied(False)
    content = {"middle.weight": torch.ones(4, 4), "middle.bias": torch.ones(4)}
    data = [(torch.randint(9, (5,)), torch.randint(9, (5,)))]
    with pytest.raises(gs.CheckpointError, match=r"lacks 'embedding\.weight', 'head\.weight'\. "):
        gs.self_influence(model, data, loss_fn, gs.Checkpoints([content], lr=1.0), progress=False)


def transposed_tie():
    """Tied by memory alone: the head holds the embedding's table the other way round."""
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight.data = model[0].weight.data.T
    return model, ("0.weight", "1.weight")


@pytest.mark.parametrize("make", [
    lambda: (Tied(True), ("head.weight", "embedding.weight")),
    lambda: (Tied(False), ("embedding.weight", "head.weight")),
    transposed_tie,
])  # fmt: skip
def test_untied_weights_do_not_fit_a_model_that_ties_them(make):
    """Of two values one would be scored and the other dropped without a word."""
    model, (first, second) = make()
    before = snapshot(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state[first] += 1
    data = [(torch.randint(4, (5,)), torch.randint(4, (5,)))]
    message = rf"other values for '{first}' than for '{second}', which share memory in the model"
    for call in (
        lambda run: gs.self_influence(model, data, loss_fn, run, progress=False),
        lambda run: gs.influence(
            model, data, data, loss_fn, gs.Checkpoints([model.state_dict()], lr=1.0),
            query_checkpoints=run, progress=False,
        ),
    ):  # fmt: skip
        with pytest.raises(gs.CheckpointError, match=message):
            call(gs.Checkpoints([state], lr=1.0))
        assert_unchanged(model, before)
    # Coarser numbers, NaN among them, are the same where they were the same before.
    with torch.no_grad():
        model.state_dict()[second][0, 0] = float("nan")
    half = {name: value.half() for name, value in model.state_dict().items()}
    table = gs.self_influence(
        model, data, loss_fn, gs.Checkpoints([half], lr=1.0), nonfinite="keep", progress=False
    )
    assert len(table) == 5


def next_token_loss(model, batch):
    logits = model(input_ids=batch[0]).logits[:, :-1]
    losses = functional.cross_entropy(logits.transpose(1, 2), batch[0][:, 1:], reduction="none")
    return losses.mean(1)


def test_a_tied_transformer_as_saved_by_its_library(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=13, n_positions=7,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model, other = (transformers.GPT2LMHeadModel(config).double().eval() for _ in range(2))
    other.save_pretrained(tmp_path)
    tokens = torch.randint(13, (4, 6))
    table = gs.self_influence(
        model, [(tokens,)], next_token_loss, gs.Checkpoints(f"{tmp_path}/*.safetensors", lr=0.5),
        progress=False,
    )  # fmt: skip
    expected = sum(oracle_sqnorms(other, (tokens,), next_token_loss).values())
    np.testing.assert_allclose(table.self_influence, 0.5 * expected.numpy(), rtol=1e-9)


def image_loss(model, batch):
    return functional.cross_entropy(model(pixel_values=batch[0]).logits, batch[1], reduction="none")


def a_renamed_model(name):
    """Two models whose library saves them under other names, and what they are trained on."""
    transformers = pytest.importorskip("transformers")
    shared = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "vit":
        config = transformers.ViTConfig(
            **shared, intermediate_size=8, image_size=4, patch_size=2, num_channels=1, num_labels=3
        )
        made, data = transformers.ViTForImageClassification, (
            torch.randn(4, 1, 4, 4, dtype=torch.float64), torch.randint(3, (4,)),
        )  # fmt: skip
        return *(made(config).double().eval() for _ in range(2)), data, image_loss
    config = transformers.MixtralConfig(
        **shared, intermediate_size=8, vocab_size=13, num_key_value_heads=2, num_local_experts=2,
        experts_implementation="eager",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    made, data = transformers.MixtralForCausalLM, (torch.randint(13, (4, 6)),)
    return *(made(config).double().eval() for _ in range(2)), data, next_token_loss


@pytest.mark.parametrize("name", ["vit", "mixtral"])
def test_weights_that_their_library_saves_under_other_names(tmp_path, name, capfd):
    model, other, data, loss_fn = a_renamed_model(name)
    model.config.dtype = torch.float16  # as it was loaded once; what was saved has more digits
    other.save_pretrained(tmp_path)
    capfd.readouterr()
    saved = load_file(tmp_path / "model.safetensors")
    assert not set(saved) <= set(model.state_dict())
    random, before = torch.get_rng_state(), snapshot(model)
    table = gs.self_influence(
        nn.DataParallel(model) if name == "vit" else model,
        [data], loss_fn, gs.Checkpoints(f"{tmp_path}/*.safetensors", lr=0.5), progress=False,
    )  # fmt: skip
    expected = sum(oracle_sqnorms(other, data, loss_fn).values())
    np.testing.assert_allclose(table.self_influence, 0.5 * expected.numpy(), rtol=1e-9)
    assert torch.equal(torch.get_rng_state(), random)
    assert_unchanged(model, before)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("ignored", [None, ["classifier.weight", "cls_token"]])
def test_weights_under_other_names_are_not_made_up(tmp_path, monkeypatch, ignored):
    model, other, data, loss_fn = a_renamed_model("vit")
    # What this class' from_pretrained initialises without a word.
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_missing", ignored)
    other.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for lost in ("classifier.weight", "vit.embeddings.cls_token"):
        some = {name: value for name, value in saved.items() if name != lost}
        with pytest.raises(gs.CheckpointError, match="does not fit the model: it lacks"):
            run = gs.Checkpoints([some], lr=0.5)
            gs.self_influence(model, [data], loss_fn, run, progress=False)
    more = saved | {"classifier.scale": torch.ones(3)}
    wide = saved | {"classifier.weight": torch.ones(3, 9)}
    for misfit in (more, wide):
        run = gs.Checkpoints([misfit], lr=0.5)
        with pytest.raises(gs.CheckpointError, match="does not fit the model: it lacks"):
            gs.self_influence(model, [data], loss_fn, run, progress=False)


@pytest.mark.parametrize("shown", [True, False])
def test_what_transformers_shows_stays_as_the_user_has_it(tmp_path, shown):
    model, other, data, loss_fn = a_renamed_model("vit")
    logging = pytest.importorskip("transformers").utils.logging
    other.save_pretrained(tmp_path)
    before = logging.is_progress_bar_enabled(), logging.get_verbosity()
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    try:
        run = gs.Checkpoints(f"{tmp_path}/*.safetensors", lr=0.5)
        gs.self_influence(model, [data], loss_fn, run, progress=False)
        assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == (shown, before[1])
    finally:
        (logging.enable_progress_bar if before[0] else logging.disable_progress_bar)()


@pytest.mark.parametrize("change", ["head", "class"])
def test_models_changed_since_they_were_made_are_read_under_other_names(tmp_path, change):
    model, other, data, loss_fn = a_renamed_model("vit")

    class Wide(type(model)):
        def __init__(self, config, width):
            super().__init__(config)
            self.classifier = nn.Linear(8, width)

    if change == "class":
        model, other = (Wide(each.config, 5).double().eval() for each in (model, other))
    else:
        for each in (model, other):
            each.classifier = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 7)).double()
    other.save_pretrained(tmp_path)
    assert not set(load_file(tmp_path / "model.safetensors")) <= set(model.state_dict())
    before = snapshot(model)
    run = gs.Checkpoints(f"{tmp_path}/*.safetensors", lr=0.5)
    table = gs.self_influence(model, [data], loss_fn, run, progress=False)
    expected = sum(oracle_sqnorms(other, data, loss_fn).values())
    np.testing.assert_allclose(table.self_influence, 0.5 * expected.numpy(), rtol=1e-9)
    assert_unchanged(model, before)


def test_checkpoints_are_asked_for_by_name(setting):
    with pytest.raises(gs.CheckpointError, match=r"checkpoints is list, expected gs.Checkpoints"):
        score(setting, setting.states)
