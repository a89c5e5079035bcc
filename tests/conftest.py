"""Shared settings of the tests: no source of randomness but fixed seeds."""

import functools
import gc
import importlib
import sys

import pytest
import torch
from hypothesis import HealthCheck, settings

# A rule sweep builds models: its examples are slow to make, and none is worth a flaky deadline.
settings.register_profile(
    "gradstats",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("gradstats")


def pytest_collection_finish(session):
    """Let collections of garbage pass over what stays to the end: modules and tests."""
    if not all("/kernels/" in str(item.path) for item in session.items):
        importlib.import_module("torch._dynamo")  # a third of it all, and most tests need it
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config):
    gc.unfreeze()


@pytest.fixture
def quick_collections():
    """Let collections pass over all that is there before a test that makes many of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _imported():
    """Let collections pass over what the tests of a module have imported when they first ran."""
    before = len(sys.modules)
    yield
    if len(sys.modules) > before + 100:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _decisions_follow_patches():
    """Have rules decide anew after every patch: it may change limits or libraries they read."""
    kept = {name: getattr(pytest.MonkeyPatch, name) for name in ("setattr", "undo")}

    def forgetting(method):
        @functools.wraps(method)
        def run(*args, **kwargs):
            repeated = sys.modules.get("gradstats.capture.following._repeated")
            if repeated is not None:
                repeated.NOTED.clear()
            return method(*args, **kwargs)

        return run

    for name, method in kept.items():
        setattr(pytest.MonkeyPatch, name, forgetting(method))
    yield
    for name, method in kept.items():
        setattr(pytest.MonkeyPatch, name, method)


@pytest.fixture(autouse=True)
def _seed():
    # For every kind of device that is not there, torch.manual_seed formats the stack.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def nothing_remembered():
    """Have nothing remembered of operations in other tests, and leave nothing for these."""
    from gradstats.capture.following._repeated import NOTED

    NOTED.clear()
    yield
    NOTED.clear()


@pytest.fixture
def graphs_run_on_cpus(monkeypatch):
    """Have contexts run compiled graphs here, as they do on a GPU."""
    from gradstats.capture.compiled import _used

    monkeypatch.setattr(_used, "GRAPHS_RUN_ON", {"cpu"})


@pytest.fixture
def lstm_under_autocast():
    """Have LSTMs run in low precision on every CPU: without oneDNN where it has none for this one.

    Elsewhere oneDNN stays on, since it is what users' layers run with.
    """
    enabled = torch._C._get_mkldnn_enabled()
    try:
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                torch.nn.LSTM(1, 1)(torch.ones(1, 1, 1))
    except RuntimeError:
        torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns without a GPU
    yield
    torch._C._set_mkldnn_enabled(enabled)


@pytest.fixture
def operators_called(monkeypatch):
    """Record which of the kernels' operators are called."""
    from gradstats.kernels import operators

    calls = []
    for name in operators.OPERATORS:
        operator = getattr(operators, name)

        def record(*args, name=name, operator=operator, **options):
            calls.append(name)
            return operator(*args, **options)

        monkeypatch.setattr(operators, name, record)
    return calls


@pytest.fixture
def kernels(monkeypatch, operators_called):
    """Send every factor to the operators' CPU implementations and record which were called."""
    from gradstats.capture.uses import _together
    from gradstats.contractions import _triton

    monkeypatch.setattr(_together, "SMALL", 0)  # as on a GPU
    monkeypatch.setattr(_triton, "runs", lambda first, *others: first.dtype == torch.float32)
    return operators_called
