"""Contexts beside what other threads do."""

import copy
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import gradstats as gs
from tests.losses import losses_of as loss_fn
from tests.oracle import assert_sqnorms, assert_unchanged, oracle_sqnorms, snapshot


class Positions(nn.Module):
    """Positions as many as examples: whose rows they are shows only where they are made."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 6)
        self.first = nn.Linear(1, 6)
        self.last = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        places = self.embed(torch.arange(x.shape[1])) * torch.exp(self.scale)
        return self.last((self.first(x[..., None]) + places).tanh().mean(1))


@pytest.fixture
def setting():
    torch.manual_seed(0)
    batch = torch.randn(4, 4, dtype=torch.float64), torch.randint(3, (4,))
    return Positions().double(), batch


def stance():
    return torch._dynamo.eval_frame._stance.stance


def test_contexts_in_several_threads_at_once(setting):
    model, (x, y) = setting
    models = [copy.deepcopy(model) for _ in range(3)]
    batches = [(x + number, y) for number in range(10)]
    expected = [oracle_sqnorms(model, batch, loss_fn) for batch in batches]

    def measure(model):
        for batch, want in zip(batches, expected, strict=True):
            assert_sqnorms(gs.per_example_norms(model, batch, loss_fn), want, 1e-9)
            with gs.track(model, batch_size=4) as tracker:
                tracker.backward(loss_fn(model, batch))
            assert_sqnorms(tracker.stats, want, 1e-9)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(measure, models))
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("fused", [True, False])
def test_another_thread_that_compiles(setting, fused):
    model, batch = setting
    torch._dynamo.reset()

    def measure():
        with gs.track(model, batch_size=4, fused=fused) as tracker:
            tracker.backward(loss_fn(model, batch))
        return gs.per_example_norms(model, batch, loss_fn), tracker.stats

    measured = []

    def backend(graph, _):
        with ThreadPoolExecutor(1) as pool:
            measured.extend(pool.submit(measure).result())
        return graph.forward

    expected = oracle_sqnorms(model, batch, loss_fn)
    other = torch.compile(copy.deepcopy(model), backend=backend)
    torch.testing.assert_close(other(batch[0]), model(batch[0]))
    for stats in measured:
        assert_sqnorms(stats, expected, 1e-9)
    assert measured


class Reverses(nn.Module):
    """Rows put in another order between two layers, where no context sees it."""

    def __init__(self, unseen):
        super().__init__()
        self.first, self.last, self.unseen = nn.Linear(4, 6), nn.Linear(6, 3), unseen

    def forward(self, x):
        return self.last(self.unseen(self.first(x).tanh()))


def reversed_in_a_thread(rows):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.flip, rows, [0]).result()


def reversed_without_modes(rows):
    with torch._C.DisableTorchFunction():
        return rows.flip(0)


@pytest.mark.parametrize("unseen", [reversed_in_a_thread, reversed_without_modes])
def test_verify_finds_rows_that_were_moved_out_of_sight(setting, unseen):
    _, batch = setting
    report = gs.verify(Reverses(unseen).double(), batch, loss_fn)
    assert not report.ok
    wrong = {row.name for row in report.rows if not row.ok}
    assert wrong == {"first.weight", "first.bias"}
    assert gs.verify(Reverses(torch.sin).double(), batch, loss_fn).ok


def test_contexts_that_end_in_another_order_leave_the_compiler_as_it_was(setting):
    model, batch = setting
    torch.compile(copy.deepcopy(model), backend="eager")
    expected = oracle_sqnorms(model, batch, loss_fn)
    opened, closed = threading.Event(), threading.Event()

    def overlapping():
        own = copy.deepcopy(model)
        with gs.track(own, batch_size=4) as tracker:
            opened.set()
            assert closed.wait(60)
            assert stance() == "force_eager"
            tracker.backward(loss_fn(own, batch))
        return tracker.stats

    with ThreadPoolExecutor(1) as pool:
        with gs.track(model, batch_size=4) as tracker:
            stats = pool.submit(overlapping)
            assert opened.wait(60)
            tracker.backward(loss_fn(model, batch))
        closed.set()
        assert_sqnorms(stats.result(), expected, 1e-9)
    assert_sqnorms(tracker.stats, expected, 1e-9)
    assert stance() == "default"


IMPORTING = """
import importlib, sys, threading, torch, gradstats as gs

model, x = torch.nn.Linear(3, 1), torch.randn(4, 3)
assert "torch._dynamo" not in sys.modules
thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
thread.start()
while thread.is_alive():
    stats = gs.per_example_norms(model, x, lambda model, x: model(x)[:, 0])
torch.testing.assert_close(stats.sqnorm, x.square().sum(1) + 1)
"""


def test_another_thread_that_imports_the_compiler():
    subprocess.run([sys.executable, "-c", IMPORTING], check=True)


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_another_thread_that_is_not_followed(setting, what):
    """There it is not seen which tensors were computed without data."""
    model, batch = setting
    state = snapshot(model)
    with ThreadPoolExecutor(1) as pool, gs.track(model, batch_size=4) as tracker:
        if what == "forward":
            run = pool.submit(loss_fn, model, batch)
        else:
            run = pool.submit(tracker.backward, loss_fn(model, batch))
        with pytest.raises(gs.TrackingError, match="another thread than the one that opened"):
            run.result()
        tracker.backward(loss_fn(model, batch))
    assert_sqnorms(tracker.stats, oracle_sqnorms(model, batch, loss_fn), 1e-9)
    model.zero_grad()
    assert_unchanged(model, state)


def test_evaluation_in_another_thread(setting):
    model, batch = setting

    @torch.no_grad()
    def evaluate():
        return loss_fn(model, batch)

    expected = evaluate()
    with ThreadPoolExecutor(1) as pool, gs.track(model, batch_size=4) as tracker:
        torch.testing.assert_close(pool.submit(evaluate).result(), expected)
        tracker.backward(loss_fn(model, batch))
    assert_sqnorms(tracker.stats, oracle_sqnorms(model, batch, loss_fn), 1e-9)


def test_a_context_that_another_thread_closes(setting):
    """As the garbage collector does with what was left open."""
    model, batch = setting
    state, expected = snapshot(model), oracle_sqnorms(model, batch, loss_fn)
    tracker = gs.track(model, batch_size=4).__enter__()
    tracker.backward(loss_fn(model, batch))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(tracker.__exit__, None, None, None).result()
    assert_sqnorms(tracker.stats, expected, 1e-9)
    model.zero_grad()
    assert_unchanged(model, state)
    assert_sqnorms(gs.per_example_norms(model, batch, loss_fn), expected, 1e-9)
    assert torch._C._len_torch_function_stack() == 0
