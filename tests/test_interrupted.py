"""Contexts that end in another order, and interrupts while one opens or closes."""

import sys

import pytest
import torch
from torch import nn

import gradstats as gs
from gradstats.capture import _mode, _tracker, _tracking
from gradstats.capture.parameters import _attributes
from tests.oracle import assert_sqnorms, assert_unchanged, oracle_sqnorms, snapshot

B = 4


class Kept(nn.Module):
    """A forward that leaves a tensor made of a parameter in an attribute."""

    def __init__(self):
        super().__init__()
        self.layer, self.embed = nn.Linear(3, 2), nn.Embedding(B, 2)
        self.kept = None

    def forward(self, x):
        self.kept = self.embed.weight * 2
        return self.layer(x) + self.embed(torch.arange(len(x)))


def loss_fn(model, batch):
    return model(batch).square().sum(1)


@pytest.fixture
def setting():
    torch.manual_seed(0)
    return Kept().double(), torch.randn(B, 3, dtype=torch.float64)


def measured(model, batch, how):
    if how == "norms":
        return gs.per_example_norms(model, batch, loss_fn)
    with gs.track(model, batch_size=B) as tracker:
        tracker.backward(loss_fn(model, batch))
    return tracker.stats


class Interrupt:
    """Raises KeyboardInterrupt at one of the lines that a few functions run."""

    def __init__(self, functions, line):
        self.codes = {function.__code__ for function in functions}
        self.left, self.line = line, None

    def __call__(self, frame, event, _):
        if frame.f_code not in self.codes:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.line = frame.f_lineno
                raise KeyboardInterrupt
        return self


# What opens and closes, but for the lines before their own try.
OPENING = _tracker.Tracker._open, _tracking.Tracking.begin, _tracking.Tracking._track
CLOSING = (
    _tracker.Tracker._close,
    _tracking.Tracking.end,
    _mode.FollowingMode.remove,
    _attributes.restore_attributes,
    _tracking.release,
)


@pytest.mark.parametrize("how", ["norms", "track"])
@pytest.mark.parametrize("functions", [OPENING, CLOSING], ids=["opening", "closing"])
def test_an_interrupt(setting, functions, how):
    model, batch = setting
    expected, state = oracle_sqnorms(model, batch, loss_fn), snapshot(model)
    measured(model, batch, how)
    for line in range(1, 100):
        tracing, interrupt = sys.gettrace(), Interrupt(functions, line)
        sys.settrace(interrupt)
        try:
            measured(model, batch, how)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracing)
        model.zero_grad()
        assert_unchanged(model, state)
        assert type(model.kept) in (torch.Tensor, type(None)), interrupt.line
        assert torch._C._len_torch_function_stack() == 0, interrupt.line
        if interrupt.line is None:
            break
        assert_sqnorms(measured(model, batch, how), expected, 1e-9)
        model.zero_grad()
    assert 10 < line < 99


def monitored(model, batch):
    with gs.Monitor(model, every=1).step(batch_size=B):
        loss_fn(model, batch).mean().backward()


CLOSES = {
    "norms": lambda model, batch: measured(model, batch, "norms"),
    "verify": lambda model, batch: gs.verify(model, batch, loss_fn),
    "monitor": monitored,
}


@pytest.mark.parametrize("how", CLOSES)
def test_an_interrupt_as_a_context_begins_to_close(setting, how):
    """Where signals are looked at: at the beginning of a call, before the function's own try."""
    model, batch = setting
    expected, state = oracle_sqnorms(model, batch, loss_fn), snapshot(model)
    tracing, times = sys.gettrace(), 0

    def interrupt(frame, event, _):
        nonlocal times
        if frame.f_code is _tracker.Tracker.close.__code__:
            times += 1
            sys.settrace(None)
            raise KeyboardInterrupt

    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            CLOSES[how](model, batch)
    finally:
        sys.settrace(tracing)
    assert times == 1
    model.zero_grad()
    assert_unchanged(model, state)
    assert torch._C._len_torch_function_stack() == 0
    assert_sqnorms(measured(model, batch, "norms"), expected, 1e-9)


def test_contexts_that_end_in_another_order(setting):
    model, batch = setting
    other = Kept().double()
    both = model, other
    expected = [oracle_sqnorms(each, batch, loss_fn) for each in both]
    states = [snapshot(each) for each in both]
    first, second = gs.track(model, batch_size=B), gs.track(other, batch_size=B)
    first.__enter__()
    first.backward(loss_fn(model, batch))
    second.__enter__()
    first.__exit__(None, None, None)
    second.backward(loss_fn(other, batch))
    second.__exit__(None, None, None)
    assert torch._C._len_torch_function_stack() == 0
    for each, tracker, want, state in zip(both, (first, second), expected, states, strict=True):
        assert_sqnorms(tracker.stats, want, 1e-9)
        each.zero_grad()
        assert_unchanged(each, state)


@pytest.mark.parametrize("does", ["forward", "backward"])
def test_a_context_opened_later_covers_the_one_before(setting, does):
    model, batch = setting
    other = Kept().double()
    states = [snapshot(each) for each in (model, other)]
    expected = [oracle_sqnorms(each, batch, loss_fn) for each in (model, other)]
    with gs.track(model, batch_size=B) as first:
        losses = loss_fn(model, batch)
        with gs.track(other, batch_size=B) as second:
            with pytest.raises(gs.TrackingError, match="context of another model, opened later"):
                loss_fn(model, batch) if does == "forward" else first.backward(losses)
            asked = [(each.requires_grad, each.size(), each.is_leaf) for each in model.parameters()]
            assert all(trained and leaf for trained, _, leaf in asked)
            with torch.no_grad():
                torch.testing.assert_close(loss_fn(model, batch), losses.detach())
            second.backward(loss_fn(other, batch))
        first.backward(losses)
    for each, tracker, want, state in zip(
        (model, other), (first, second), expected, states, strict=True
    ):
        assert_sqnorms(tracker.stats, want, 1e-9)
        each.zero_grad()
        assert_unchanged(each, state)
