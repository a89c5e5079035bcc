"""The Lightning callback in real runs: what it logs against the oracle."""

from __future__ import annotations

import copy
import importlib
import math
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader

import gradstats as gs
from tests.losses import losses_of
from tests.monitor.digits import Digits, Shuffled, classifier
from tests.monitor.expected import gradient_rows, metrics_of
from tests.oracle import assert_unchanged, oracle_gradients, snapshot

lightning = pytest.importorskip("lightning.pytorch")
callback_module = pytest.importorskip("gradstats.integrations.lightning")

pytestmark = [
    # Lightning's own: advice on the data loader and on logging, and a deprecated call.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance\\(treespec, LeafSpec\\)"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty"),
]

COUNT, B, ACCUMULATE = 36, 8, 2  # five batches an epoch, the last of four; three steps


def module_of(package):
    class Module(package.LightningModule):
        def __init__(self, dtype=torch.float64):
            super().__init__()
            self.net = classifier(dtype)
            self.rate = 0.2

        def training_step(self, batch, index):
            return functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)

    return Module


class Recorder(lightning.Callback):
    """Keeps the network and the micro-batches of every optimizer step."""

    def __init__(self):
        self.steps: list[tuple[nn.Module, list]] = []
        self.measured: list[bool] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.steps.append((copy.deepcopy(pl_module.net), []))
        self.steps[-1][1].append(batch)

    def on_before_backward(self, trainer, pl_module, loss):
        state = snapshot(pl_module)
        hooks = any(any(counts) for counts in state["hooks"].values())
        tracked = any(kind is not nn.Parameter for _, kind, *_ in state["parameters"].values())
        modes = len(_get_current_function_mode_stack())
        assert bool(modes) == tracked and not hooks
        self.measured.append(tracked)


class Memory(lightning.loggers.logger.Logger):
    """Keeps what is logged."""

    name = version = "memory"

    def __init__(self):
        super().__init__()
        self.logged: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics, step=None):
        self.logged[step] = metrics

    def log_hyperparams(self, *args, **kwargs):
        pass


def fit(callback, package=lightning, epochs=2, module=None, recorder=None, ckpt=None, **options):
    data = Digits(COUNT, options.pop("dtype", torch.float64))
    module = module or module_of(package)()
    settings = {"logger": Memory(), "accumulate_grad_batches": ACCUMULATE, "max_epochs": epochs}
    trainer = package.Trainer(
        callbacks=[each for each in (recorder, callback) if each is not None],
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **{**settings, **options},
    )
    loader = DataLoader(data, batch_size=B, sampler=Shuffled(COUNT))
    trainer.fit(module, loader, ckpt_path=ckpt)
    return trainer, module


def test_logged_values_against_the_oracle():
    """Accumulation, clipping and a last step with fewer micro-batches of fewer examples."""
    recorder, callback = Recorder(), callback_module.GradStatsCallback(every=2, ids=2)
    trainer, _ = fit(callback, recorder=recorder, gradient_clip_val=0.01)
    logged = trainer.loggers[0].logged
    assert list(logged) == [0, 2, 4]
    assert len(recorder.steps) == callback.monitor.steps == 6  # the last was not measured
    expected = np.zeros(COUNT)
    for number, metrics in logged.items():
        network, batches = recorder.steps[number]
        whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
        rows = gradient_rows(network, whole, losses_of)
        assert metrics["example_grad_norm/max"] == pytest.approx(np.linalg.norm(rows, axis=1).max())
        if len(batches) == ACCUMULATE:
            truth = metrics_of(rows)
            for name in ("grad_norm", "gns/tr_sigma", "gns/g2", "m_coherence"):
                assert metrics[name] == pytest.approx(truth[name]), name
            parts = [metrics_of(part) for part in np.split(rows, ACCUMULATE)]
            for name in ("align/mean_cos_to_mean", "align/fraction_negative"):
                assert metrics[name] == pytest.approx(np.mean([part[name] for part in parts]))
        else:
            # One micro-batch of four: its loss is halved all the same, and so is the gradient.
            assert len(rows) == 4
            truth = metrics_of(rows)
            assert metrics["grad_norm"] == pytest.approx(truth["grad_norm"] / 2)
            assert metrics["gns/tr_sigma"] == pytest.approx(truth["gns/tr_sigma"])
        loss = losses_of(network, whole).mean().item()
        assert metrics["batch_loss"] == pytest.approx(loss)
        np.add.at(expected, whole[2].numpy() - 1000, 0.2 * (rows**2).sum(1))
    table = callback.monitor.self_influence
    assert table.ids.tolist() == (np.flatnonzero(expected) + 1000).tolist()
    np.testing.assert_allclose(table.values, expected[expected > 0])
    assert trainer.callback_metrics["grad_norm"].item() == pytest.approx(metrics["grad_norm"])


@pytest.mark.parametrize("fused", [False, True])
def test_training_and_checkpoints_are_the_same(tmp_path, fused):
    states = []
    for callback in (callback_module.GradStatsCallback(every=2, fused=fused), None):
        trainer, module = fit(callback)
        trainer.save_checkpoint(tmp_path / "run.ckpt")
        states.append(torch.load(tmp_path / "run.ckpt", weights_only=True))
        assert all(type(p) is nn.Parameter for p in module.parameters())
    for name, value in states[1]["state_dict"].items():
        if fused:
            torch.testing.assert_close(states[0]["state_dict"][name], value, rtol=1e-6, atol=0)
        else:
            assert torch.equal(states[0]["state_dict"][name], value)
    assert "GradStatsCallback" in states[0]["callbacks"] and not states[1]["callbacks"]


def test_a_resumed_run_continues(tmp_path):
    whole, first, second = (callback_module.GradStatsCallback(every=2, ids=2) for _ in range(3))
    fit(whole, epochs=3)
    trainer, _ = fit(first, epochs=1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    fit(second, epochs=3, ckpt=tmp_path / "run.ckpt")
    assert second.monitor.history["step"] == whole.monitor.history["step"] == [0, 2, 4, 6, 8]
    for name, values in whole.monitor.history.items():
        np.testing.assert_allclose(second.monitor.history[name], values, rtol=1e-9, err_msg=name)
    table, other = whole.monitor.self_influence, second.monitor.self_influence
    assert table.ids.tolist() == other.ids.tolist()
    np.testing.assert_allclose(other.values, table.values)


def test_a_second_fit_of_the_module_continues():
    whole, callback = (callback_module.GradStatsCallback(every=2, ids=2) for _ in range(2))
    _, module = fit(whole, epochs=1)
    fit(callback, epochs=1)
    monitor, state = callback.monitor, copy.deepcopy(callback.monitor.history)
    module = fit(callback, module=module_of(lightning)(), epochs=1)[1]
    assert callback.monitor is not monitor  # another module's run
    np.testing.assert_equal(callback.monitor.history, state)
    monitor, before = callback.monitor, callback.monitor.self_influence.values
    module.rate = 0.3
    recorder = Recorder()
    fit(callback, module=module, recorder=recorder, epochs=1)
    assert callback.monitor is monitor
    assert monitor.history["step"] == [0, 2, 0, 2]
    for name, values in state.items():
        np.testing.assert_array_equal(monitor.history[name][:2], values)
    expected = before.copy()
    for network, batches in (recorder.steps[0], recorder.steps[2]):
        whole_batch = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
        rows = gradient_rows(network, whole_batch, losses_of)
        places = np.searchsorted(monitor.self_influence.ids, whole_batch[2].numpy())
        np.add.at(expected, places, 0.3 * (rows**2).sum(1))
    np.testing.assert_allclose(monitor.self_influence.values, expected)


@pytest.mark.parametrize("ids", ["line", lambda batch: batch["line"]])
def test_batches_that_are_mappings(ids):
    """Where examples and ids lie is said by keys and functions."""

    class Mapped(module_of(lightning)):
        def on_after_batch_transfer(self, batch, index):
            return {"shared": torch.ones(3), "data": batch[:2], "line": batch[2]}

        def training_step(self, batch, index):
            return super().training_step(batch["data"], index)

    plain = callback_module.GradStatsCallback(every=2, ids=2)
    mapped = callback_module.GradStatsCallback(
        every=2, ids=ids, batch_size=lambda batch: len(batch["line"])
    )
    assert mapped.state_dict() == {}
    fit(plain, epochs=1)
    fit(mapped, epochs=1, module=Mapped())
    np.testing.assert_equal(mapped.monitor.history, plain.monitor.history)
    expected, got = plain.monitor.self_influence, mapped.monitor.self_influence
    assert got.top(3) == expected.top(3) and len(got) == len(expected)


def test_a_checkpoint_that_is_tested_replaces_nothing(tmp_path):
    """trainer.test(ckpt_path="best") restores callbacks too; another fit goes on from the last."""

    class Tested(module_of(lightning)):
        def test_step(self, batch, index):
            self.net(batch[0])

    callback, module = callback_module.GradStatsCallback(every=2, ids=2), Tested()
    fit(callback, module=module, epochs=1)[0].save_checkpoint(tmp_path / "best.ckpt")
    trainer, _ = fit(callback, module=module, epochs=1)
    monitor = callback.monitor
    history, influence = monitor.history, monitor.self_influence.values
    trainer.test(
        module, DataLoader(Digits(COUNT, torch.float64), B), tmp_path / "best.ckpt", verbose=False
    )
    np.testing.assert_equal(monitor.history, history)
    np.testing.assert_array_equal(monitor.self_influence.values, influence)
    fit(callback, module=module, epochs=1)
    assert callback.monitor is monitor
    assert monitor.history["step"] == [0, 2, 0, 2, 0, 2]


@pytest.mark.parametrize(
    "ids, message",
    [
        ("line", "batch is a list .*no 'line'"),
        (3, "batch is a list of 3 .*no 3"),
        ("index", "batch is a list of 3 .*no 'index'"),
        (0, "ids have shape \\(8, 64\\)"),
    ],
)
def test_ids_that_the_batch_does_not_hold(ids, message):
    module = module_of(lightning)()
    state = snapshot(module)
    with pytest.raises(gs.TrackingError, match=message):
        fit(callback_module.GradStatsCallback(every=1, ids=ids), module=module)
    assert_unchanged(module, state)


def test_ids_that_a_mapping_does_not_hold():
    class Mapped(module_of(lightning)):
        def on_after_batch_transfer(self, batch, index):
            return {"x": batch[0], "y": batch[1]}

    with pytest.raises(gs.TrackingError, match=r"a dict of \['x', 'y'\] and has no 'line'"):
        fit(callback_module.GradStatsCallback(every=1, ids="line"), module=Mapped())


@pytest.mark.parametrize("ids", [True, 1.5, ("line",)])
def test_ids_of_no_kind(ids):
    with pytest.raises(gs.TrackingError, match=r"ids is .*expected a key"):
        callback_module.GradStatsCallback(ids=ids)


def test_a_batch_size_that_is_no_function():
    with pytest.raises(gs.TrackingError, match="batch_size is 4, expected a function"):
        callback_module.GradStatsCallback(batch_size=4)


def test_what_no_monitor_takes_is_named_at_once():
    with pytest.raises(TypeError, match=r"no option 'evry', .* of gs\.Monitor: loss_reduction, "):
        callback_module.GradStatsCallback(evry=10)
    with pytest.raises(gs.TrackingError, match="every is 0"):
        callback_module.GradStatsCallback(every=0)
    with pytest.raises(gs.TrackingError, match="decay is 2"):
        callback_module.GradStatsCallback(decay=2)


def test_off_steps_touch_nothing():
    recorder = Recorder()
    callback = callback_module.GradStatsCallback(every=3)
    trainer, _ = fit(callback, recorder=recorder, accumulate_grad_batches=1, epochs=1)
    assert recorder.measured == [True, False, False, True, False]
    assert list(trainer.loggers[0].logged) == [0, 3]


@pytest.mark.parametrize("error", [RuntimeError("the user's own"), KeyboardInterrupt()])
def test_an_exception_leaves_nothing_behind(error):
    class Fails(module_of(lightning)):
        def training_step(self, batch, index):
            super().training_step(batch, index)
            assert type(self.net[0].weight) is not nn.Parameter
            raise error

    module = Fails()
    state = snapshot(module)
    with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
        fit(callback_module.GradStatsCallback(every=1), module=module)
    assert_unchanged(module, state)


def test_a_module_that_skips_the_rest_of_an_epoch():
    """Lightning then neither runs nor ends the batch whose start it has announced."""
    recorder, callback = Recorder(), callback_module.GradStatsCallback(every=1)

    class Skips(module_of(lightning)):
        def on_train_batch_start(self, batch, index):
            return -1 if index == 2 else None

    trainer, module = fit(callback, module=Skips(), recorder=recorder, accumulate_grad_batches=1)
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    logged = trainer.loggers[0].logged
    assert list(logged) == [0, 1, 2, 3]
    run = [step for place, step in enumerate(recorder.steps) if place % 3 < 2]
    for (network, batches), metrics in zip(run, logged.values(), strict=True):
        truth = metrics_of(gradient_rows(network, batches[0], losses_of))
        for name in ("grad_norm", "example_grad_norm/max", "gns/tr_sigma"):
            assert metrics[name] == pytest.approx(truth[name]), name


@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize("alignment", [True, False])
def test_micro_batches_that_the_module_skips(alignment):
    """The first of a step, the last of another, and all of a third; the others make the step."""
    skipped, recorder = (0, 3, 4), Recorder()

    class Skips(module_of(lightning)):
        def training_step(self, batch, index):
            return None if index in skipped else super().training_step(batch, index)

    callback = callback_module.GradStatsCallback(every=1, ids=2, alignment=alignment)
    trainer, module = fit(callback, module=Skips(), recorder=recorder, epochs=1)
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    logged = trainer.loggers[0].logged
    assert list(logged) == [0, 1] and callback.monitor.metrics() == {}
    expected = np.zeros(COUNT)
    for (network, batches), kept, metrics in zip(
        recorder.steps[:2], (1, 0), logged.values(), strict=True
    ):
        rows = gradient_rows(network, batches[kept], losses_of)
        truth = metrics_of(rows)
        assert metrics["grad_norm"] == pytest.approx(truth["grad_norm"] / ACCUMULATE)
        for name in ("example_grad_norm/max", "gns/tr_sigma", "gns/g2", "m_coherence"):
            assert metrics[name] == pytest.approx(truth[name]), name
        if alignment:
            name = "align/mean_cos_to_mean"
            assert metrics[name] == pytest.approx(truth[name])
        assert metrics["batch_loss"] == pytest.approx(
            losses_of(network, batches[kept]).mean().item()
        )
        np.add.at(expected, batches[kept][2].numpy() - 1000, 0.2 * (rows**2).sum(1))
    table = callback.monitor.self_influence
    assert table.ids.tolist() == (np.flatnonzero(expected) + 1000).tolist()
    np.testing.assert_allclose(table.values, expected[expected > 0])


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
def test_a_module_without_an_optimizer():
    """Lightning puts an optimizer in its place that has no parameters; the module steps itself."""

    class Own(module_of(lightning)):
        def configure_optimizers(self):
            return None

        def on_train_batch_end(self, outputs, batch, index):
            self.zero_grad()

    callback = callback_module.GradStatsCallback(every=1, ids=2)
    trainer, module = fit(callback, module=Own(), epochs=1, accumulate_grad_batches=1)
    assert list(trainer.loggers[0].logged) == [0, 1, 2, 3, 4]
    assert callback.monitor.metrics()["grad_norm"] > 0 and len(callback.monitor.self_influence) == 0
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())


def test_bfloat16():
    recorder, callback = Recorder(), callback_module.GradStatsCallback(every=2)
    trainer, _ = fit(
        callback,
        module=module_of(lightning)(torch.float32),
        recorder=recorder,
        precision="bf16-mixed",
        dtype=torch.float32,
        epochs=1,
    )
    metrics = trainer.loggers[0].logged[0]
    network, batches = recorder.steps[0]
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    truth = metrics_of(gradient_rows(network, whole, losses_of))
    for name in ("grad_norm", "gns/tr_sigma", "example_grad_norm/mean"):
        assert metrics[name] == pytest.approx(truth[name], rel=0.03)


def test_a_grad_scaler_is_divided_out():
    """The scaler of a precision plugin, as for 16-bit training."""

    class Scaled(lightning.plugins.Precision):
        def __init__(self):
            self.scaler = torch.amp.GradScaler("cpu", init_scale=512.0)

        def pre_backward(self, tensor, module):
            return super().pre_backward(self.scaler.scale(tensor), module)

    recorder, callback = Recorder(), callback_module.GradStatsCallback(every=2)
    trainer, _ = fit(callback, recorder=recorder, plugins=[Scaled()], epochs=1)
    network, batches = recorder.steps[0]
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    truth = metrics_of(gradient_rows(network, whole, losses_of))
    metrics = trainer.loggers[0].logged[0]
    for name in ("grad_norm", "gns/tr_sigma", "gns/g2"):
        assert metrics[name] == pytest.approx(truth[name])
    assert metrics["batch_loss"] == pytest.approx(losses_of(network, whole).mean().item())


def test_tensorboard_shows_what_was_measured(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    loggers = importlib.import_module("lightning.pytorch.loggers")
    recorder = Recorder()
    callback = callback_module.GradStatsCallback(every=2, histograms=True, layers="net.*")
    logger = loggers.TensorBoardLogger(tmp_path)
    fit(callback, recorder=recorder, logger=logger)
    events = reader.EventAccumulator(logger.log_dir).Reload()
    history = callback.monitor.history
    for name in ("grad_norm", "gns/b_simple", "gns/net.0/tr_sigma", "align/mean_cos_to_mean"):
        points = events.Scalars(name)
        assert [point.step for point in points] == [0, 2, 4]
        np.testing.assert_allclose([p.value for p in points], history[name], rtol=1e-6)
    event = events.Histograms("example_grad_norm")[-1]
    histogram = event.histogram_value
    network, batches = recorder.steps[event.step]
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    norm = np.linalg.norm(gradient_rows(network, whole, losses_of), axis=1)
    assert (histogram.num, histogram.sum) == (len(norm), pytest.approx(norm.sum()))


def test_histograms_for_weights_and_biases(monkeypatch):
    """With the step over which Lightning has them shown, also by a logger made of theirs."""
    wandb = types.ModuleType("wandb")
    wandb.Histogram = lambda values: ("histogram", values.tolist())
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    logged = []
    experiment = types.SimpleNamespace(log=logged.append)
    kind = type("Own", (type("WandbLogger", (), {"experiment": experiment}),), {})
    columns = {"example_grad_norm": np.array([1.0, 2.0]), "cosine": np.array([])}
    callback_module._log_histograms(kind(), columns, 7)
    callback_module._log_histograms(kind(), {"cosine": np.array([])}, 8)
    assert logged == [{"example_grad_norm": ("histogram", [1.0, 2.0]), "trainer/global_step": 7}]


def test_manual_optimization_is_refused():
    class Manual(module_of(lightning)):
        automatic_optimization = False

    with pytest.raises(gs.TrackingError, match="optimizes manually"):
        fit(callback_module.GradStatsCallback(), module=Manual(), accumulate_grad_batches=1)


SCRIPT = """
import warnings; warnings.simplefilter("ignore")
import sys, torch, pytorch_lightning as package
from torch.utils.data import DataLoader
from gradstats.integrations.lightning import GradStatsCallback
from tests.losses import losses_of
from tests.monitor.digits import Digits, Shuffled, classifier

class Module(package.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = classifier()
    def training_step(self, batch, index):
        return losses_of(self.net, batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)

callback = GradStatsCallback(every=2)
assert isinstance(callback, package.Callback) and "lightning.pytorch" not in sys.modules
trainer = package.Trainer(
    callbacks=[callback], accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False,
    enable_model_summary=False, enable_checkpointing=False, accumulate_grad_batches=2)
trainer.fit(Module(), DataLoader(Digits(36), batch_size=8, sampler=Shuffled(36)))
print(repr(callback.monitor.history["grad_norm"]))
"""


def test_pytorch_lightning_gives_the_same():
    pytest.importorskip("pytorch_lightning")
    callback = callback_module.GradStatsCallback(every=2)
    fit(callback, epochs=1)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert eval(done.stdout.splitlines()[-1]) == callback.monitor.history["grad_norm"]


def test_the_extra_is_named_where_lightning_is_missing(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "gradstats.integrations.lightning")
    with pytest.raises(gs.MissingPackageError, match=r"gradstats\[lightning\]"):
        importlib.import_module("gradstats.integrations.lightning")


def test_oracle_gradients_are_not_trivial():
    """The comparisons above would pass on zeros."""
    gradients = oracle_gradients(classifier(), next(iter(DataLoader(Digits(8), 8)))[:2], losses_of)
    assert all(gradient.flatten(1).norm(dim=1).min() > 1e-3 for gradient in gradients.values())
    assert not any(math.isnan(g.sum().item()) for g in gradients.values())
