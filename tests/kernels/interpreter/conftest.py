"""This lane runs kernels in Triton's interpreter, which must be chosen before triton loads."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config):
    asked = any("kernels/interpreter" in str(argument) for argument in config.args)
    if asked and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError(
            "tests/kernels/interpreter needs its own process: "
            "TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreter"
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.kernels.triton_interpreter import settle_interpreter

        settle_interpreter()


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    """Fills what torch.empty returns with NaN, so that an element that nobody writes is seen."""
    import torch

    def poisoned(allocate):
        def allocate_poisoned(*args, **kwargs):
            out = allocate(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return allocate_poisoned

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
