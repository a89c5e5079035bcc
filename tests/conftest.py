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
