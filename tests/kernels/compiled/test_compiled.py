"""Shipped configurations, compiled for sm_80, sm_90 and sm_100 and inspected.

The gate compiles a representative subset; `tests.kernels.compiled.sweep` compiles all.
"""

import dataclasses

import pytest
from gradstats.kernels import _config

from tests.kernels.compiled import aot, cases, checks, launches, sass, sweep

SUBSET = [case for case in cases.cases() if case.default]


@pytest.mark.parametrize("case", SUBSET, ids=map(str, SUBSET))
def test_shipped_configuration(case):
    recorded = launches.of(case)
    assert recorded
    for launch in recorded:
        assert not sweep.findings(sweep.facts_of(launch, case), case)


def test_a_sweep_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    chosen = [case for case in SUBSET if case.operation == "vector"][:2]
    path = tmp_path / "store"
    first = next(sweep.sweep(chosen, sweep.Store(path)))
    assert len(sweep.Store(path).known) == 1
    everything = list(sweep.sweep(chosen, sweep.Store(path)))
    assert everything[0] == first
    assert len(sweep.Store(path).known) == len(path.read_text().splitlines()) > 1

    def fail(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(aot, "compile_launch", fail)
    assert list(sweep.sweep(chosen, sweep.Store(path))) == everything


def test_a_sweep_reports_what_does_not_compile_or_exceeds_a_limit(monkeypatch):
    case = next(case for case in SUBSET if case.operation == "gram")
    good = sweep.Facts("gram_kernel", 0, 32, sass.Local(), True, [])
    assert sweep.findings(good, case) == []
    for change, message in (
        ({"shared": 10**6}, "shared memory"),
        ({"spills": sass.Local(inner=4)}, "spilled"),
        ({"tensor_cores": False}, "tensor-core"),
        ({"complaints": ["32-bit offset"]}, "32-bit"),
    ):
        (found,) = sweep.findings(dataclasses.replace(good, **change), case)
        assert message in found

    def fail(*_):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(aot, "compile_launch", fail)
    (found,) = sweep.facts_of(launches.of(case)[0], case).complaints
    assert "PassManager" in found


def test_transposed_operands_compile():
    """Features apart and positions adjacent: another memory layout, so another compilation."""
    config = _config.choose("direct", 1024, 1024, 2, aligned=False)
    for operation in ("direct", "weight_gradient"):
        for launch in launches.launches(
            operation, config, launches.DTYPES["half"], True, "transposed"
        ):
            compiled = aot.compile_launch(launch, 90)
            checks.check_shared(compiled, _config.shared_limit(90))
            if compiled.name not in ("add_parts_kernel", "replace_kernel"):
                checks.check_tensor_cores(compiled, 90, config.rows)


def test_spills_are_listed_of_tiles_that_can_be_launched():
    launched = {(case.operation, case.architecture, str(case.config)) for case in cases.cases()}
    assert set(checks.ALLOWED_SPILLS) <= launched


def test_descriptors_are_read_by_the_tensor_memory_accelerator():
    operation = "weight_gradient_descriptor"
    config = _config.shipped(operation)[90, "half", True][0]
    first, *_ = launches.launches(operation, config, launches.DTYPES["half"], True)
    assert aot.compile_launch(first, 90).ptx.count("cp.async.bulk.tensor") >= 2
