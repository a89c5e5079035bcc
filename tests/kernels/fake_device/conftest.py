"""This lane gives PyTorch a CUDA device that is not there, which every other lane must not see."""

import os
import sys

import pytest

PLUGIN = "tests.kernels.fake_device.plugin"

if PLUGIN not in sys.modules:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config):
    asked = any("kernels/fake_device" in str(argument) for argument in config.args)
    chosen = PLUGIN in sys.modules and os.environ.get("TRITON_INTERPRET") == "1"
    if asked and not chosen:
        raise pytest.UsageError(
            "tests/kernels/fake_device needs its own process: TRITON_INTERPRET=1 "
            f"PYTEST_PLUGINS={PLUGIN} python -m pytest tests/kernels/fake_device"
        )
    if chosen and sys.modules[PLUGIN].REASON is None:
        from tests.kernels.triton_interpreter import settle_interpreter

        settle_interpreter()


def pytest_collection_modifyitems(items):
    plugin = sys.modules.get(PLUGIN)
    for item in items:
        if "fake_device" not in item.path.parts:
            continue
        if plugin is not None and plugin.REASON is not None:
            item.add_marker(pytest.mark.skip(reason=plugin.REASON))
