"""The benchmark's calls and references, on shapes that the interpreter can run."""

import csv
import importlib
import sys

import pytest
import torch

from benchmarks import bench_layer_kernels, gpu, layer_kernels
from benchmarks.bench_linear_kernels import Shape, operands, providers
from benchmarks.kernel_harness import error

SHAPES = [Shape("one position", 5, 1, 32, 48), Shape("sequence", 2, 9, 32, 48)]
SHAPES.append(Shape("unaligned", 2, 9, 33, 47))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_provider_runs_and_is_right(shape):
    checked = set()
    inputs = operands(shape, torch.float32, 0, "cpu")
    for provider in providers(shape, torch.float32, descriptors=True):
        off = error(provider, inputs)
        if off is None:
            assert torch.is_tensor(provider.call(*inputs))
            continue
        assert off < 1e-5, (provider.operation, provider.name, off)
        checked.add(provider.operation)
    own = {"rank_one"}
    if shape.positions > 1:
        own = {"gram", "direct", "vector", "pairwise_direct", "weight_gradient"}
    assert checked == {"direction", "pairwise_gram"} | own


@pytest.mark.parametrize("layer", bench_layer_kernels.DRY, ids=lambda layer: layer.name)
def test_every_provider_of_a_layer_runs_and_is_right(layer):
    for channels_last in (False, True) if layer.kind == "convolution" else (False,):
        inputs = layer_kernels.operands(layer, torch.float32, 0, "cpu", channels_last)
        ours = 0
        for provider in layer_kernels.providers(layer, torch.float32):
            off = error(provider, inputs)
            if off is None:
                assert torch.is_tensor(provider.call(*inputs))
                continue
            assert off < 1e-5, (provider.operation, provider.name, off)
            ours += provider.name.startswith("gradstats")
        assert ours >= 2


KINDS = {
    "quick": {None},
    "layers": {
        "convolution", "embedding", "layer_norm", "rms_norm", "group_norm", "scale", "scale_first",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "step", [each for each in gpu.steps() if each.dry], ids=lambda step: step.name
)
def test_dry_runs_come_to_their_end(step, tmp_path, monkeypatch):
    command = [part.replace("{out}", str(tmp_path)) for part in (*step.command, *step.dry)]
    monkeypatch.setattr(sys, "argv", command[1:])
    assert not importlib.import_module(command[1]).main()
    (table,) = tmp_path.iterdir()
    with table.open() as file:
        rows = [row for row in csv.DictReader(file) if row["provider"].startswith("gradstats")]
    assert {row.get("kind") for row in rows} == KINDS[step.name]
    assert all(float(row["ms"]) > 0 and row["note"] == "" for row in rows)
