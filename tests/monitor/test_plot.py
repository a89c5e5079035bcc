"""The plot of a run: what is drawn are the values that were measured."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from gradstats.monitor import plot

pytest.importorskip("matplotlib")


@pytest.fixture
def monitor():
    model = nn.Linear(5, 3).double()
    monitor = gs.Monitor(model, every=2, alignment=False, top=3)
    for step in range(20):
        inputs, labels = torch.randn(6, 5, dtype=torch.float64), torch.randint(3, (6,))
        if step == 14:
            inputs[4] *= 300
            labels[4] = model(inputs)[4].argmin()
        with monitor.step(batch_size=6, ids=torch.arange(6) + 40):
            functional.cross_entropy(model(inputs), labels).backward()
        model.zero_grad()
    return monitor


def test_the_figure_shows_what_was_measured(monitor, tmp_path):
    figure = plot(monitor)
    norms, noise = figure.axes
    history = monitor.history
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    for label, name in (
        ("median example", "example_grad_norm/p50"),
        ("largest", "example_grad_norm/max"),
        ("training gradient", "grad_norm"),
        ("noise scale $B_{simple}$", "gns/b_simple"),
    ):
        np.testing.assert_array_equal(lines[label].get_xdata(), history["step"])
        np.testing.assert_array_equal(lines[label].get_ydata(), history[name])
    band = norms.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == min(history["example_grad_norm/p05"])
    assert band[:, 1].max() == max(history["example_grad_norm/p95"])
    (marked,) = norms.texts
    assert marked.get_text().startswith("44") and marked.xy[0] == 14
    assert marked.xy[1] == monitor.spikes[0].examples[0].norm
    figure.canvas.draw()
    inside, outside = norms.get_window_extent(), norms.get_legend().get_window_extent()
    assert marked.get_window_extent().y1 < inside.y1 <= outside.y0, "neither cut off nor covered"
    assert noise.get_xlabel() == "optimizer step"
    figure.savefig(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 10_000


def test_one_measured_step_is_seen(monitor):
    history = {name: values[:1] for name, values in monitor.history.items()}
    figure = plot(SimpleNamespace(history=history, spikes=[], metrics=dict))
    lines = [line for line in figure.axes[0].get_lines() if len(line.get_xdata())]
    assert len(lines) == 3 and all(line.get_marker() == "." for line in lines)
    assert len({(line.get_color(), line.get_markerfacecolor()) for line in lines}) == 3
    figure.canvas.draw()
    ticks = [tick.get_text() for tick in figure.axes[1].get_xticklabels()]
    assert "0" in ticks and not any("." in tick for tick in ticks)  # steps have whole numbers
    assert all(line.get_marker() == "None" for line in plot(monitor).axes[0].get_lines()[:3])


@pytest.mark.parametrize(("scale", "expected"), [(1, "2 3 4"), (0.1, "0.2 0.3 0.4")])
def test_norms_of_one_magnitude_have_plain_labels(monitor, scale, expected):
    norms = (scale * np.linspace(2.0, 4.5, len(monitor.history["step"]))).tolist()
    names = [name for name in monitor.history if "grad_norm" in name]
    history = {**monitor.history, **dict.fromkeys(names, norms)}
    figure = plot(SimpleNamespace(history=history, spikes=[], metrics=dict))
    figure.canvas.draw()
    labels = {tick.get_text() for tick in figure.axes[0].get_yticklabels(minor=True)}
    assert set(expected.split()) <= labels


def test_a_value_without_neighbours_is_seen(monitor):
    """As the last of a run whose step before had an example that was not finite."""
    values = list(monitor.history["grad_norm"])
    values[1] = values[3] = values[-2] = float("nan")
    history = {**monitor.history, "grad_norm": values}
    figure = plot(SimpleNamespace(history=history, spikes=[], metrics=dict))
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    line = lines["training gradient"]
    assert line.get_marker() == "."
    assert line.get_markevery() == [0, 2, len(values) - 1]
    assert lines["median example"].get_marker() == "None"


def test_a_first_estimate_is_shown_before_its_error_is_known(monitor):
    """A standard error takes two steps."""
    history = {name: values[:2] for name, values in monitor.history.items()}
    known = {"gns/b_simple": [40.0, 50.0], "gns/b_simple_se": [float("nan")] * 2}
    (noise,) = plot(SimpleNamespace(history={**history, **known}, spikes=[])).axes[1:]
    assert not noise.texts and 50 < noise.get_ylim()[1] < 100
    assert "a step: 6 examples" in [line.get_label() for line in noise.get_lines()]
    known["gns/b_simple"] = [float("nan")] * 2
    (noise,) = plot(SimpleNamespace(history={**history, **known}, spikes=[])).axes[1:]
    said = "undefined so far: the average of gns/g2 is not positive"
    assert [text.get_text() for text in noise.texts] == [said]


def test_examples_without_gradient_do_not_flatten_the_norms(monitor):
    """As examples that are fit to the last digit have next to none, or none at all."""
    history = {**monitor.history}
    least, highest = min(history["grad_norm"]), max(history["example_grad_norm/max"])
    for low in (1e-14, 0.0):
        history["example_grad_norm/p05"] = [low] * len(history["step"])
        history["example_grad_norm/p50"] = [low, *history["example_grad_norm/p50"][1:]]
        (norms, _) = plot(SimpleNamespace(history=history, spikes=[], metrics=dict)).axes
        bottom, top = norms.get_ylim()
        assert (1 - 1e-9) * 1e-3 * least <= bottom < least and highest < top < 10 * highest
        diverged = {**history, "grad_norm": [*history["grad_norm"][1:], float("inf")]}
        (norms, _) = plot(SimpleNamespace(history=diverged, spikes=[], metrics=dict)).axes
        assert highest < norms.get_ylim()[1] < 10 * highest
    history["grad_norm"] = [float("nan")] * len(history["step"])
    plot(SimpleNamespace(history=history, spikes=[], metrics=dict)).canvas.draw()


def test_a_run_without_any_gradient(monitor):
    """Zeros have no place on a logarithmic scale, of which matplotlib warns."""
    history = {**monitor.history}
    for name in history:
        if "norm" in name:
            history[name] = [0.0] * len(history["step"])
    figure = plot(SimpleNamespace(history=history, spikes=[], metrics=dict))
    figure.canvas.draw()
    assert figure.axes[0].get_yscale() == "linear"


def test_the_noise_scale_can_be_read_where_its_errors_are_large(monitor):
    """As on runs of few steps, where errors are a hundred times the estimates."""
    history = monitor.history
    values = [float("nan"), *range(100, 100 + len(history["step"]) - 1)]
    changed = {**history, "gns/b_simple": values, "gns/b_simple_se": [100 * v for v in values]}
    (noise,) = plot(SimpleNamespace(history=changed, spikes=[], metrics=dict)).axes[1:]
    assert 1.2 * max(values[1:]) < noise.get_ylim()[1] < 4 * max(values[1:])
    assert any("gaps" in text.get_text() for text in noise.get_legend().get_texts())
    changed["gns/b_simple_se"] = [0.01 * v for v in values]
    (noise,) = plot(SimpleNamespace(history=changed, spikes=[], metrics=dict)).axes[1:]
    assert max(values[1:]) < noise.get_ylim()[1] < 1.3 * max(values[1:])


def test_the_batch_stands_beside_the_noise_scale(monitor):
    """The two are read together; a batch far above the noise scale does not flatten its line."""
    (noise,) = plot(monitor).axes[1:]
    (batch,) = [line for line in noise.get_lines() if line.get_label() == "a step: 6 examples"]
    np.testing.assert_array_equal(batch.get_xdata(), monitor.history["step"])
    np.testing.assert_allclose(batch.get_ydata(), 6, rtol=1e-12)
    assert noise.get_ylabel() == "number of examples"
    history = monitor.history
    many = [1e6 * value for value in history["gradient_diversity/batch_bound"]]
    changed = {**history, "gradient_diversity/batch_bound": many}
    (other,) = plot(SimpleNamespace(history=changed, spikes=[], metrics=dict)).axes[1:]
    assert other.get_ylim() == noise.get_ylim()
    assert "a step: 6,000,000 examples" in [line.get_label() for line in other.get_lines()]


def test_what_is_missing_is_said(monitor, monkeypatch):
    with pytest.raises(gs.TrackingError, match=r"nothing to plot\. .*monitor\.step"):
        plot(gs.Monitor(monitor.model))
    with pytest.raises(gs.TrackingError, match=r"monitor is NoneType.* as callback\.monitor"):
        plot(None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(gs.MissingPackageError, match=r"gradstats\[plot\]"):
        plot(monitor)
