"""Shipped configurations, compiled for sm_80, sm_90 and sm_100 and inspected."""

from gradstats.kernels import _config
from gradstats.kernels._config import TileConfig
from gradstats.kernels._table import TABLE

from tests.kernels.compiled import aot, checks, launches

MATMULS = {
    "gram",
    "direct",
    "diagonal",
    "weight_gradient",
    "weight_gradient_descriptor",
    "pairwise",
    "pairwise_rows",
    "direction",
    "convolution",
    "convolution_fused",
    "convolution_gram",
}

# kernels that take the tiles of another operation
SHARED_TILES = {"example_tiles": "direct", "tied": "gram"}

# kernels without matrix products, alike on all architectures: the subset compiles them for one
STREAMING = {
    "layer_norm",
    "scale",
    "scale_positions_adjacent",
    "statistics",
    "rows",
    "depthwise",
    "depthwise_channels_adjacent",
}

PATCHES_AND_ROWS = {
    "tied",
    "pairwise_rows",
    "convolution",
    "convolution_fused",
    "convolution_gram",
}


def cases():
    """(operation, architecture, kind, aligned, configuration, layout, in the default subset)."""
    for operation in (*TABLE, *SHARED_TILES):
        entries = _config.shipped(SHARED_TILES.get(operation, operation))
        for (architecture, kind, aligned), configs in entries.items():
            for rank, config in enumerate(configs):
                layouts = launches.layouts(operation)
                for layout in layouts:
                    other = layout == layouts[-1 if aligned else 0]
                    default = rank == 0 and (
                        (kind == "half" and (other or operation.endswith("_descriptor")))
                        or (kind == "tf32x3" and architecture == 90 and layout == "dense")
                    )
                    if operation in STREAMING:
                        default = default and architecture == 90
                    elif operation in PATCHES_AND_ROWS:
                        default = default and kind == "half" and (aligned or architecture == 90)
                    yield operation, architecture, kind, aligned, config, layout, default


def name_of(case):
    operation, architecture, kind, aligned, config, layout, _ = case
    alignment = "aligned" if aligned else "unaligned"
    return f"{operation}-sm_{architecture}-{kind}-{alignment}-{config}-{layout}"


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-configs", default=False)
        chosen = [case for case in cases() if every or case[-1]]
        metafunc.parametrize("case", chosen, ids=map(name_of, chosen))


def test_shipped_configuration(case):
    operation, architecture, kind, aligned, config, layout, _ = case
    recorded = launches.launches(operation, config, launches.DTYPES[kind], aligned, layout)
    assert recorded
    for launch in recorded:
        compiled = aot.compile_launch(launch, architecture)
        checks.check_shared(compiled, _config.shared_limit(architecture))
        checks.check_spills(compiled, checks.allowed_spills(operation, config, architecture))
        checks.check_no_atomics(compiled)
        checks.check_offsets(compiled)
        matmul = SHARED_TILES.get(operation, operation) in MATMULS and not compiled.name.startswith(
            "segment_sum"
        )
        if matmul and kind != "ieee":
            checks.check_tensor_cores(compiled, architecture, config.rows)


def test_transposed_operands_compile():
    """Features apart and positions adjacent: another memory layout, so another compilation."""
    config = _config.choose_direct(1024, 1024, 2, aligned=False)
    for operation in ("direct", "weight_gradient"):
        for launch in launches.launches(
            operation, config, launches.DTYPES["half"], True, "transposed"
        ):
            compiled = aot.compile_launch(launch, 90)
            checks.check_shared(compiled, _config.shared_limit(90))
            checks.check_tensor_cores(compiled, 90, config.rows)


def test_the_largest_fused_tile_spills_no_more_than_listed():
    """Not in the table before a GPU has timed it, but callers can ask for it."""
    operation, config = "weight_gradient_descriptor", TileConfig(128, 256, 64, 8, 3)
    for launch in launches.launches(operation, config, launches.DTYPES["half"], True):
        compiled = aot.compile_launch(launch, 90)
        checks.check_shared(compiled, _config.shared_limit(90))
        checks.check_spills(compiled, checks.allowed_spills(operation, config, 90))
        assert compiled.ptx.count("cp.async.bulk.tensor") >= 2
