"""Memory: neither side's gradients are formed, and what is held does not grow with the data."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
import torch
from torch import nn

import gradstats as gs
from benchmarks.ledger import MemoryLedger, peak_memory
from tests.scoring.setting import batches, loss_fn

BATCH = 16

pytestmark = pytest.mark.usefixtures("quick_collections")


def make(width, examples):
    """Return a call on an MLP of some width, with so many training examples, and its size d."""
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
    train = batches((torch.randn(examples, width), torch.randint(4, (examples,))), BATCH)
    query = batches((torch.randn(32, width), torch.randint(4, (32,))), BATCH)
    checkpoints = gs.Checkpoints([model.state_dict()], lr=0.1)

    def collected_loss(model, batch):
        # Contexts are cycles: what is counted is what is held, not what waits to be collected.
        gc.collect()
        return loss_fn(model, batch)

    def run(**options):
        gs.influence(
            model,
            train,
            query,
            collected_loss,
            checkpoints,
            progress=False,
            workspace=2**18,
            **options,
        )

    return run, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("width", [128, 512])
def test_no_tensor_of_examples_times_parameters(width):
    run, elements = make(width, 64)
    ledger = peak_memory(run)
    # The largest tensor may be a copy of one weight: never one gradient for each of two examples.
    assert ledger.largest <= elements
    # Two copies of the weights, given back at the end and loaded; activations and the workspace.
    assert ledger.peak <= 4 * (2 * elements + 32 * 16 * width) + 2**18


def test_what_is_held_does_not_grow_with_the_training_data(tmp_path):
    # What the first call of a process caches is no part of what a call holds.
    make(64, 64)[0]()
    peaks = {}
    for options in ({"top_k": 3, "budget": 2**16}, {"out": tmp_path}):
        for examples in (64, 256):
            run, _ = make(64, examples)
            own = dict(options)
            if "out" in own:
                own["out"] = tmp_path / str(examples)
            with MemoryLedger() as ledger:
                run(**own)
            peaks[examples] = ledger.peak
        assert peaks[256] == peaks[64], options


@pytest.mark.parametrize("checkpoints", [1, 3])
def test_the_matrix_in_memory_takes_sixteen_bytes_a_score(capsys, checkpoints):
    """Both forms in float64, as announced; tiles are added up in place."""
    model = nn.Linear(2, 3)
    train, query = (
        batches((torch.randn(size, 2), torch.randint(3, (size,))), 128) for size in (2048, 512)
    )
    states = [nn.Linear(2, 3).state_dict() for _ in range(checkpoints)]

    def run(progress=False):
        gs.influence(
            model, train, query, loss_fn, gs.Checkpoints(states, lr=0.1), budget=2**12,
            progress=progress,
        )  # fmt: skip

    run(progress=True)
    size = 16 * 2048 * 512
    assert f"{size / 1e6:.3g} MB in memory" in capsys.readouterr().err
    gc.collect()
    tracemalloc.start()
    try:
        run()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size <= peak <= 1.1 * size, peak / size


def test_a_block_of_query_gradients_is_released_before_the_next():
    """Many blocks hold no more at once than one, even before any garbage is collected."""
    peaks = {}
    gc.disable()
    try:
        for blocks in (1, 6):
            width = 256
            model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
            size = (blocks * 64, width)
            query = batches((torch.randn(size), torch.randint(4, size[:1])), 64)
            train = [(torch.randn(2, width), torch.randint(4, (2,)))]
            checkpoints = gs.Checkpoints([model.state_dict()], lr=0.1)
            with MemoryLedger() as ledger:
                gs.influence(model, train, query, loss_fn, checkpoints, budget=1, progress=False)
            peaks[blocks] = ledger.peak
    finally:
        gc.enable()
    factors = 64 * (2 * width + width + 4) * 4
    assert peaks[6] <= peaks[1] + factors / 2, (peaks, factors)
