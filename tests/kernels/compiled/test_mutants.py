"""The checks of this lane reject kernels that are broken in one line."""

import contextlib
import inspect

import pytest
import torch
from gradstats.kernels import (
    _check,
    _tile,
    direct,
    finish,
    gram,
    guard,
    means,
    scale,
)
from gradstats.kernels._config import TileConfig
from gradstats.kernels.statistics import Statistics

from tests.kernels.compiled import aot, checks, launches
from tests.kernels.compiled.sass import Local
from tests.kernels.mutants import mutant
from tests.kernels.reference import ROUNDING

TILE = TileConfig(64, 64, 64, 4, 2)


def compile_gram(module, monkeypatch, tile=TILE):
    monkeypatch.setattr(_check, "_runs_here", lambda device: True)
    a, g, _, _ = launches.factor(torch.bfloat16, True, "dense")
    with aot.recorded(module, direct, guard) as recorded:
        module.gram_sqnorm(a, g, 1, *ROUNDING, config=tile)
    return aot.compile_launch(recorded[0], 90)


def test_the_checks_accept_what_is_shipped(monkeypatch):
    compiled = compile_gram(gram, monkeypatch)
    checks.check_offsets(compiled)
    checks.check_no_atomics(compiled)
    checks.check_spills(compiled)
    checks.check_tensor_cores(compiled, 90, 64)


@pytest.mark.parametrize(
    "wide, narrow",
    [
        ("tl.cast(rows, tl.int64)[:, None] * row_stride", "rows[:, None] * row_stride"),
        ("tl.cast(example, tl.int64) * example_stride", "example * example_stride"),
    ],
    ids=["rows of a tile", "first row of an example"],
)
def test_a_32_bit_offset(tmp_path, monkeypatch, wide, narrow):
    broken = mutant(_tile, wide, narrow, tmp_path)
    source = "from gradstats.kernels._tile import"
    module = mutant(gram, source, f"from {broken.__name__} import", tmp_path)
    with pytest.raises(AssertionError, match="32-bit offset"):
        checks.check_offsets(compile_gram(module, monkeypatch))


@pytest.mark.parametrize(
    "module, wide, narrow",
    [
        (scale, "tl.cast(rows, tl.int64)[:, None] * stride_ot", "rows[:, None] * stride_ot"),
        (scale, "tl.cast(example, tl.int64) * stride_mb", "example * stride_mb"),
        (means, "group = tl.cast(index % groups, tl.int64)", "group = index % groups"),
    ],
    ids=["rows written", "statistics of an example", "a group"],
)
def test_a_32_bit_offset_of_a_scale(tmp_path, monkeypatch, module, wide, narrow):
    broken = mutant(module, wide, narrow, tmp_path)
    monkeypatch.setattr(_check, "_runs_here", lambda device: True)
    x, g, _, _ = launches.factor(torch.bfloat16, True, "dense")
    statistics = torch.empty((x.shape[0], x.shape[2]), device="meta")
    with aot.recorded(broken, finish) as recorded:
        if module is scale:
            segments = _check.check_pair(x, g)
            broken.launch(g, x, segments, Statistics(statistics, statistics), input_gradient=True)
        else:
            rows = Statistics(x[..., 0].float(), x[..., 0].float(), by_position=True)
            broken.with_means(rows, x, g, None)
    with pytest.raises(AssertionError, match="32-bit offset"):
        checks.check_offsets(aot.compile_launch(recorded[0], 90))


def test_an_atomic_sum(tmp_path, monkeypatch):
    module = mutant(
        gram, "    tl.store(output, total)\n", "    tl.atomic_add(partial_ptr, total)\n", tmp_path
    )
    with pytest.raises(AssertionError, match="atomic"):
        checks.check_no_atomics(compile_gram(module, monkeypatch))


def test_a_tile_that_spills(monkeypatch):
    compiled = compile_gram(gram, monkeypatch, TileConfig(128, 128, 64, 4, 2))
    assert compiled.spills.inner > 0 < compiled.spills.once
    with pytest.raises(AssertionError, match="spilled"):
        checks.check_spills(compiled)


@pytest.mark.parametrize(
    "spills, allowed, accepted",
    [
        (Local(inner=4), Local(), False),
        (Local(inner=4), Local(inner=4), True),
        (Local(inner=8), Local(inner=4, once=512), False),
        (Local(once=checks.OUTSIDE - 4, outer=4), Local(), True),
        (Local(once=checks.OUTSIDE, outer=4), Local(), False),
        (Local(once=checks.OUTSIDE, outer=4), Local(once=checks.OUTSIDE + 4), True),
        (Local(once=checks.OUTSIDE), Local(inner=4), True),
        (Local(once=checks.OUTSIDE + 8), Local(once=checks.OUTSIDE + 4), False),
    ],
)
def test_what_may_spill(spills, allowed, accepted):
    compiled = aot.Compiled("kernel", 0, 255, spills, "", "")
    with contextlib.nullcontext() if accepted else pytest.raises(AssertionError, match="spilled"):
        checks.check_spills(compiled, allowed)


def test_a_kernel_without_tensor_cores(monkeypatch):
    compiled = compile_gram(gram, monkeypatch)
    compiled.ptx = compiled.ptx.replace("wgmma.mma_async", "fma.rn.f32")
    with pytest.raises(AssertionError, match="no wgmma"):
        checks.check_tensor_cores(compiled, 90, 64)


def test_what_is_recorded_is_what_the_kernel_takes():
    a, g, _, _ = launches.factor(torch.bfloat16, True, "dense")
    assert a.device.type == "meta" and g.device.type == "meta"
    names = list(inspect.signature(gram.gram_kernel.fn).parameters)
    recorded = launches.launches("gram", TILE, torch.bfloat16, True)
    assert list(recorded[0].arguments) == names
