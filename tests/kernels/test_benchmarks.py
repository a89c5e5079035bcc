"""The GPU scripts parse, refuse to run without a GPU, and write the table that is committed."""

import runpy
from pathlib import Path

import pytest
import torch
from gradstats.kernels import _config
from gradstats.kernels._table import TABLE

from benchmarks import bench_layer_kernels, bench_linear_kernels, tune_linear_kernels


@pytest.mark.parametrize("script", [bench_linear_kernels, bench_layer_kernels, tune_linear_kernels])
def test_help_and_the_need_for_a_gpu(script, capsys):
    with pytest.raises(SystemExit) as done:
        script.main(["--help"])
    assert done.value.code == 0
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit) as done:
            script.main([])
        assert done.value.code == 2
        assert "CUDA device" in capsys.readouterr().err


def test_the_committed_table_is_what_the_script_writes(tmp_path):
    written = tune_linear_kernels.render(TABLE)
    assert Path(_config.__file__).with_name("_table.py").read_text() == written
    (tmp_path / "table.py").write_text(written)
    assert runpy.run_path(str(tmp_path / "table.py"))["TABLE"] == TABLE


@pytest.mark.parametrize("kind", _config.KINDS)
@pytest.mark.parametrize("operation", tune_linear_kernels.MATMULS)
def test_candidates_are_distinct_tiles_that_a_dot_can_take(operation, kind):
    for timed in (False, True):
        groups = tune_linear_kernels.candidates(operation, kind, timed)
        areas = [{row[0] * row[1] for row in group} for group in groups]
        assert all(len(area) == 1 for area in areas)
        assert [max(area) for area in areas] == sorted((max(area) for area in areas), reverse=True)
        assert all(min(row[:3]) >= 16 for group in groups for row in group)


def test_every_shape_has_floors():
    shapes = bench_linear_kernels.SHAPES
    assert len({shape.name for shape in shapes}) == len(shapes)
    assert set(bench_linear_kernels.QUICK) <= {shape.name for shape in shapes}


def test_every_layer_has_a_name_of_its_own():
    names = [layer.name for layer in bench_layer_kernels.LAYERS]
    assert len(set(names)) == len(names)
    assert set(bench_layer_kernels.QUICK) <= set(names)
