"""This lane compiles kernels, so it needs a process in which triton does not interpret them."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["test_*.py"]


def pytest_addoption(parser):
    parser.addoption(
        "--all-configs",
        action="store_true",
        default=os.environ.get("GRADSTATS_ALL_CONFIGS") == "1",
        help="compile every shipped configuration, not a representative subset",
    )
