"""The tile choice: pure functions over a committed table."""

import dataclasses
import functools
import itertools

import pytest
from gradstats.kernels import _config, _streaming
from gradstats.kernels._table import TABLE

GPUS = (80, 86, 87, 89, 90, 100, 103, 120)
SIZES = (1, 15, 16, 17, 100, 768, 4096, 50257)
PRECISIONS = {2: ("ieee",), 4: ("ieee", "tf32x3", "tf32", "highest")}
CLASSES = [
    (itemsize, precision, gpu, aligned)
    for itemsize in (2, 4)
    for precision in PRECISIONS[itemsize]
    for gpu in GPUS
    for aligned in (True, False)
]


def check(config, itemsize, gpu):
    assert config.is_valid(itemsize, gpu), config
    assert config.precision in ("ieee", "tf32x3", "tf32")
    for size in (config.rows, config.columns, config.inner, config.num_warps):
        assert size > 0 and size & (size - 1) == 0, config


@pytest.mark.parametrize("size", SIZES)
def test_every_choice_fits_the_gpu(size):
    for itemsize, precision, gpu, aligned in CLASSES:
        matmul = (itemsize, precision, gpu, aligned)
        for operation in set(_config.MATMULS) - {"weight_gradient_descriptor"}:
            for other in SIZES:
                config = _config.choose(operation, size, other, *matmul)
                check(config, itemsize, gpu)
                assert min(config.rows, config.columns, config.inner) >= 16, "too small for a dot"


def test_every_streaming_tile_fits_every_gpu():
    for operation in _streaming.TILES:
        for config in _streaming.tiles(operation):
            for gpu in GPUS:
                check(config, 2 if operation == "rank_one_half" else 4, gpu)


def test_gram_tiles_are_square():
    tables = (_config.shipped("gram"), _config.shipped("convolution_gram"))
    for configs in itertools.chain.from_iterable(table.values() for table in tables):
        assert all(config.rows == config.columns for config in configs)


def test_the_table_is_complete():
    for operation in set(_config.MATMULS) - {"weight_gradient_descriptor"}:
        wanted = itertools.product(_config.ARCHITECTURES, _config.KINDS, (True, False))
        missing = set(wanted) - set(TABLE[operation])
        # plain fp32 serves where no configuration with split products is free of spills
        assert all(kind == "tf32x3" for _, kind, _ in missing), (operation, missing)
    assert set(TABLE) == set(_config.MATMULS)
    assert {key[0] for key in TABLE["weight_gradient_descriptor"]} == {90, 100}


def test_candidates_run_from_large_to_small():
    for operation in TABLE:
        for key, configs in _config.shipped(operation).items():
            areas = [config.rows * config.columns for config in configs]
            assert areas == sorted(areas, reverse=True), (operation, key)


def test_small_shapes_get_small_tiles():
    assert _config.choose("gram", 8, 8, 2).rows < _config.choose("gram", 1024, 1024, 2).rows
    small = _config.choose("weight_gradient", 10, 64, 2)
    large = _config.choose("weight_gradient", 4096, 4096, 2)
    assert small.rows * small.columns < large.rows * large.columns


def test_padding_is_weighed_against_the_size_of_the_tile():
    assert _config.choose("gram", 1024, 1024, 2).rows == 128
    assert _config.choose("gram", 128, 128, 2).rows == 128
    assert _config.choose("gram", 140, 140, 2).rows == 64
    assert _config.choose("gram", 1, 1, 2).rows == 16
    assert _config.choose("direct", 768, 2304, 2).columns == 256
    assert _config.choose("direct", 768, 264, 2).columns < 256


@pytest.mark.parametrize(("positions", "factors", "rows"), [
    (128, 132, 128), (128, 66, 64), (128, 16, 32), (128, 1, 16), (1024, 8, 128), (1024, 1, 64),
])  # fmt: skip
def test_few_factors_get_tiles_for_more_processors(positions, factors, rows):
    assert _config.choose("gram", positions, positions, 4, "highest", factors=factors).rows == rows
    few = _config.choose("direct", positions, positions, 2, factors=factors)
    many = _config.choose("direct", positions, positions, 2)
    assert (few == many) is (factors * _config.tiles_of(many, positions, positions) >= 132)


def test_true_fp32_never_becomes_tf32():
    for operation in ("gram", "direct", "weight_gradient", "pairwise", "direction"):
        for gpu, aligned in itertools.product(GPUS, (True, False)):
            for config in _config.candidates(operation, 4, "highest", gpu, aligned):
                assert config.precision in ("ieee", "tf32x3")


def test_configurations_are_values():
    config = _config.choose("gram", 100, 100, 2)
    assert config == _config.choose("gram", 100, 100, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rows = 1


def test_the_table_is_read_as_it_is_written():
    config = _config.TileConfig(128, 64, 32, 8, 3)
    assert str(config) == "128x64x32w8s3"
    for operation, entries in TABLE.items():
        for key, configs in _config.shipped(operation).items():
            assert " ".join(map(str, configs)) == entries[key]
    for operation, tiles in _streaming.TILES.items():
        assert " ".join(map(str, _streaming.tiles(operation))) == tiles


def test_validity_is_about_shared_memory():
    config = _config.TileConfig(128, 256, 64, 8, 4)
    assert config.shared_bytes(2) == 4 * 384 * 64 * 2
    assert config.is_valid(2, 90) and not config.is_valid(2, 80) and not config.is_valid(4, 90)
    assert _config.shared_limit(121) == _config.SMALLEST_SHARED_LIMIT


def test_splits_fill_the_machine_with_as_few_copies_as_possible():
    assert _config.choose_splits(132 * 10, 64) == 1
    assert _config.choose_splits(132, 64) == 1
    assert _config.choose_splits(36, 64) == 3
    assert _config.choose_splits(36, 2) == 2
    assert _config.choose_splits(1, 1000) <= _config.MAX_SPLITS
    assert _config.choose_splits(1, 1) == 1
    for tiles, batch in itertools.product((1, 7, 100, 133, 144), (1, 3, 64)):
        assert 1 <= _config.choose_splits(tiles, batch) <= min(batch, _config.MAX_SPLITS)


def test_tiles_beyond_whole_rounds_are_split():
    tile, half = _config.TileConfig(128, 128, 64, 8, 4), _config.TileConfig(64, 128, 64, 4, 4)
    assert _config.split_tiles(tile, 132, 8) == (132, 1)
    assert _config.split_tiles(tile, 144, 8) == (132, 8)  # 12 tiles of 8 examples
    assert _config.split_tiles(tile, 144, 100) == (132, 11)
    assert _config.split_tiles(tile, 36, 8) == (0, 3)
    assert _config.split_tiles(tile, 108, 8) == (108, 1)
    assert _config.split_tiles(half, 108, 8) == (0, 2)  # two of these run beside each other
    for tiles, batch in itertools.product((1, 7, 100, 133, 144, 1000), (1, 3, 64)):
        whole, splits = _config.split_tiles(tile, tiles, batch)
        assert 1 <= splits <= min(batch, _config.MAX_SPLITS)
        assert whole == tiles or ((tiles - whole) * splits <= 132 and splits > 1)


def test_weight_gradients_take_the_tile_that_fills_the_machine():
    choose = functools.partial(
        _config.choose_weight_gradient, "weight_gradient", batch=8, itemsize=2
    )
    for d_out, d_in in ((3072, 768), (768, 768), (4096, 4096), (64, 64), (1, 1)):
        config = choose(d_out, d_in)
        assert config in _config.candidates("weight_gradient", 2, "ieee", 90, True)
    assert choose(4096, 4096).rows * choose(4096, 4096).columns == 128 * 128
    assert choose(64, 64).rows <= 64
    assert choose(16, 48).rows == 16


def test_rows_are_shared_until_the_machine_is_full():
    assert _config.choose_row_splits(10**6, 1) == 1
    assert _config.choose_row_splits(10**6, 8) == 1
    assert _config.choose_row_splits(10**6, 80) == 10
    assert _config.choose_row_splits(132, 16) == 4
    assert _config.choose_row_splits(1, 16) == 16


def test_rows_are_held_whole_by_the_narrowest_tile_that_can():
    assert _streaming.choose_layer_norm(768).columns == 1024
    assert _streaming.choose_layer_norm(128).columns == 128
    assert _streaming.choose_layer_norm(4096).columns == 4096
    assert _streaming.choose_layer_norm(5000) == _streaming.choose_layer_norm(4096)


def test_groups_of_few_channels_are_held_whole_where_a_tile_can():
    def shape(features, positions, vectors=True):
        config = _streaming.choose_group_norm(features, positions, vectors)
        return config.columns, config.inner

    assert shape(8, 784) == (8, 1024)
    assert shape(15, 49) == (16, 16) and shape(8, 49) == (8, 128)
    # of many channels a third: measured
    assert shape(16, 784) == (16, 256) and shape(32, 196) == (32, 64) and shape(64, 49) == (64, 16)
    assert shape(1, 1) == (1, 256)
    assert shape(8, 1024) == shape(8, 1025) == shape(5, 10**6) == (8, 1024)
    assert shape(8, 1025, False) == (8, 256) and shape(8, 1024, False) == (8, 1024)
    assert shape(2048, 1) == (2048, 1)
    for features, positions in itertools.product((1, 7, 64, 65, 2048), SIZES):
        columns, inner = shape(features, positions)
        assert columns >= features and columns * inner <= 8192


def test_a_streaming_tile_is_more_than_half_filled():
    for choose in (_streaming.choose_vector, _streaming.choose_rows, _streaming.choose_runs):
        smallest = choose(1).columns
        for size in SIZES:
            assert choose(size).columns < 2 * size or choose(size).columns == smallest
    assert _streaming.choose_depthwise(128).inner == 64 < _streaming.choose_depthwise(129).inner
    assert _streaming.choose_depthwise_lines(128).num_warps == 1
    assert _streaming.choose_depthwise_lines(129).num_warps == 4


def test_runs_are_read_by_more_warps_where_they_are_long():
    for size in SIZES:
        short, long = (_streaming.choose_run_sums(size, each) for each in (4096, 100_000))
        assert short.num_warps == 1 and long.inner > short.inner
        assert short.columns == long.columns == _streaming.choose_rows_pairs(size).columns


def test_long_rows_are_read_by_few_and_short_ones_by_many_examples_at_once():
    assert [_streaming.choose_rank_one(size, 2).rows for size in (2048, 512, 10)] == [2, 4, 32]
    assert [_streaming.choose_rank_one(size, 4).rows for size in (2048, 512, 10)] == [1, 4, 32]


def test_the_axis_that_is_adjacent_in_memory_is_the_long_one():
    adjacent = _streaming.choose_scale(3136, 64, positions_adjacent=True)
    apart = _streaming.choose_scale(3136, 256)
    assert adjacent.inner > adjacent.columns and apart.columns > adjacent.columns
    assert 2 * min(adjacent.inner, apart.columns) >= 128, "less than a line is read at once"


def test_a_partition_takes_whole_examples_where_there_are_enough():
    assert _config.choose_partition(528, 100) == (1, 1)
    assert _config.choose_partition(4 * 528 + 1, 100) == (5, 1)
    assert _config.choose_partition(16, 1000) == (1, 33)
    assert _config.choose_partition(16, 7) == (1, 7)
    # 17 parts would be eight programs more than run at once
    assert _config.choose_partition(16, 1000, per_processor=2) == (1, 16)
    assert _config.choose_partition(64, 99) == (1, 8)
    assert _config.choose_partition(300, 99) == (1, 3)
    assert _config.choose_partition(1, 0) == (1, 1)
