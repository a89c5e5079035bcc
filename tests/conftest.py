"""Shared settings of the tests: no source of randomness but fixed seeds."""

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


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def graphs_run_on_cpus(monkeypatch):
    """Have contexts run compiled graphs here, as they do on a GPU."""
    from gradstats.capture import _selection

    monkeypatch.setattr(_selection, "GRAPHS_RUN_ON", {"cpu"})


@pytest.fixture
def kernels(monkeypatch):
    """Send every factor to the operators' CPU implementations and record which were called."""
    from gradstats.kernels import operators

    from gradstats.contractions import _triton

    calls = []
    for name in operators.OPERATORS:
        operator = getattr(operators, name)

        def record(*args, name=name, operator=operator, **options):
            calls.append(name)
            return operator(*args, **options)

        monkeypatch.setattr(operators, name, record)
    monkeypatch.setattr(_triton, "runs", lambda first, *others: first.dtype == torch.float32)
    return calls
