"""Two processes over gloo, against one process on all their data."""

from __future__ import annotations

import pytest

from tests import forked
from tests.monitor.processes import data_parallel, free_port, process
from tests.monitor.sharded import fully_sharded


def test_two_processes():
    forked.run(process, free_port(), data_parallel, fully_sharded)


def test_two_processes_of_a_trainer():
    pytest.importorskip("accelerate")
    trainers = pytest.importorskip("tests.monitor.trainer_process").trainers
    forked.run(process, free_port(), trainers)
