"""Two processes over gloo, against one process on all their data."""

from __future__ import annotations

import pytest
import torch

from tests.monitor.processes import RANKS, data_parallel, free_port, process
from tests.monitor.sharded import fully_sharded


def test_two_processes():
    """Started once for all: importing PyTorch takes them longer than most of what they do."""
    torch.multiprocessing.spawn(process, (free_port(), data_parallel, fully_sharded), nprocs=RANKS)


@pytest.mark.parametrize("body", ["train", "train_in_eval_mode"])
def test_two_processes_of_a_trainer(tmp_path, body):
    pytest.importorskip("accelerate")
    body = getattr(pytest.importorskip("tests.monitor.trainer_process"), body)
    torch.multiprocessing.spawn(body, (free_port(), str(tmp_path), RANKS), nprocs=RANKS)
