"""What two processes do with models that ``fully_shard`` divides between them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional

import gradstats as gs
from tests.monitor.expected import gradient_rows
from tests.monitor.processes import RANKS, B, check_training, losses_of, same_network, whole_batch


def shard(model, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fully_sharded(rank: int) -> None:
    for micro_batches, fused in ((1, False), (2, True)):
        check_training(rank, shard, micro_batches, fused)
    check_norms_of_a_sharded_model(rank)
    check_sums_over_processes(rank)
    check_sharded_refusals(rank)


def hooks_and_classes(model):
    return [
        (name, len(module._forward_pre_hooks), [type(p) for p in module._parameters.values()])
        for name, module in model.named_modules()
    ]


def check_norms_of_a_sharded_model(rank: int) -> None:
    alone, model = same_network(2)
    model = shard(model)
    batch = whole_batch(torch.Generator().manual_seed(3))
    expected = np.linalg.norm(gradient_rows(alone, batch, losses_of), axis=1)
    mine = slice(rank * B, (rank + 1) * B)
    before = hooks_and_classes(model)
    for _ in range(2):
        stats = gs.per_example_norms(model, tuple(item[mine] for item in batch), losses_of)
        np.testing.assert_allclose(stats.norm.numpy(), expected[mine], rtol=1e-9)
        assert hooks_and_classes(model) == before
    one_each = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("rank", "shard"))["shard"]
    for sharded in (model, shard(alone, one_each)):
        some = gs.per_example_norms(
            sharded, tuple(item[mine] for item in batch), losses_of, exclude="blocks.0.*"
        )
        for name, square in some.by_parameter.items():
            np.testing.assert_allclose(square.numpy(), stats.by_parameter[name].numpy(), rtol=1e-9)


def check_sums_over_processes(rank: int) -> None:
    """Divided by another factor, the gradient is not the mean that examples are compared with."""
    batch = whole_batch(torch.Generator().manual_seed(3))
    mine = tuple(item[rank * B : rank * B + B] for item in batch)
    alone, mean, total = same_network(3)
    rows = gradient_rows(alone, batch, losses_of)
    models = [shard(each) for each in (mean, total)]
    for model, factor in zip(models, (RANKS, 1), strict=True):
        model.blocks[1].set_gradient_divide_factor(factor)
    monitor, refused = (gs.Monitor(model, every=1) for model in models)
    with monitor.step(B):
        losses_of(models[0], mine).mean().backward()
    assert monitor.metrics()["grad_norm"] == pytest.approx(np.linalg.norm(rows.mean(0)))
    state = hooks_and_classes(models[1])
    with pytest.raises(gs.TrackingError, match=r"'blocks.1' divides .* by 1, .* by 2"):
        with refused.step(B):
            losses_of(models[1], mine).mean().backward()
    assert hooks_and_classes(models[1]) == state


def check_sharded_refusals(rank: int) -> None:
    (model,) = same_network(1)
    model = shard(model)
    batch = whole_batch(torch.Generator().manual_seed(3), B)

    def around_the_forward(model, batch):
        model.unshard()
        for block in model.blocks:
            block.unshard()
        hidden = functional.embedding(batch[0], model.embedding.weight)
        return functional.linear(hidden, model.head.weight).sum((1, 2))

    with pytest.raises(gs.CoverageError, match="outside the forward"):
        gs.per_example_norms(model, batch, around_the_forward)
    (model,) = same_network(1)
    mesh = init_device_mesh("cpu", (RANKS,))
    parallelize_module(model.blocks[0], mesh, {"linear": ColwiseParallel()})
    with pytest.raises(gs.UnsupportedOperationError, match=r"blocks.0.linear.*tensor parallelism"):
        gs.per_example_norms(model, batch, losses_of)
    (model,) = same_network(1)
    flat = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(gs.UnsupportedOperationError, match="Expected its successor fully_shard"):
        gs.per_example_norms(flat, batch, losses_of)
