"""Offsets past 2^31 elements, and the order in which tiles are walked."""

import functools

import numpy
import pytest
import torch
import triton
import triton.language as tl
from gradstats.kernels import (
    convolution,
    convolution_pair_gram,
    diagonal,
    direct,
    direction,
    gram,
    group_norm,
    layer_norm,
    operators,
    pairwise,
    pairwise_direct,
    rank_one,
    rows,
    rows_pairs,
    scale_backward,
    vector,
    weight_gradient,
)
from gradstats.kernels._config import TileConfig
from gradstats.kernels._tile import grouped, triangle
from triton.runtime.errors import InterpreterError

from tests.kernels import reference
from tests.kernels.cases import random
from tests.kernels.reference import assert_close

TILE = TileConfig(16, 16, 16, num_warps=1, num_stages=1)


def far_apart(shape, strides, seed):
    """A view whose elements lie more than 2^31 apart, over memory that is never touched between."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    assert extent > 2**31 and max(strides) < 2**31
    # numpy leaves untouched pages of zeros unallocated
    memory = torch.from_numpy(numpy.zeros(extent, dtype=numpy.float16))
    view = memory.as_strided(shape, strides)
    view.copy_(random(shape, torch.float16, "cpu", seed))
    return view


# example, position and feature strides of (3, 2, 17), whose products leave 32 bits
STRIDES = {
    "examples": (2**30 + 16, 17, 1),
    "positions": (17, 2**31 - 16, 1),
    "features": (2, 1, 2**27 + 16),
}


@pytest.mark.parametrize("axis", STRIDES)
def test_offsets_are_64_bit(axis):
    a = far_apart((3, 2, 17), STRIDES[axis], 1)
    g = random((3, 2, 18), torch.float16, "cpu", 2)
    want = reference.sqnorm_reference(a, g)
    scale = reference.magnitude_reference(a, g)
    numbers = (1.0, 1.0, 1.0)
    form = functools.partial(gram.gram_sqnorm, a, g, 1, *numbers, config=TILE, direct_config=TILE)
    assert_close(form(reference.NOBODY_SUSPECT)[0], want, scale)
    assert_close(form(0.0)[0], want)
    assert_close(direct.direct_sqnorm(a, g, config=TILE), want)
    gradient, sqnorm = weight_gradient.weight_gradient_sqnorm(
        a, g, config=TILE, splits=1, gradient_dtype=torch.float32
    )
    assert_close(sqnorm, want)
    terms = reference.gradients(a.abs(), g.abs()).sum(0)
    assert_close(gradient, reference.weight_gradient_reference(a, g), terms)
    pairs = reference.pairwise_reference(a, g, a, g)
    limit = reference.pairwise_reference(a.abs(), g.abs(), a.abs(), g.abs())
    assert_close(pairwise.pairwise_gram(a, g, a, g, config=TILE), pairs, limit)
    assert_close(pairwise_direct.pairwise_direct(a, g, a, g, config=TILE), pairs, limit)
    got, _ = diagonal.diagonal_gram(a, g, a, g, config=TILE)
    assert_close(got, want, limit.diagonal())
    flat = TileConfig(1, 16, 8, 1, 1)
    assert_close(
        vector.vector_sqnorm(a, config=flat),
        reference.bias_sqnorm_reference(a),
        reference.bias_magnitude_reference(a),
    )
    weight = random((18, 17), torch.float16, "cpu", 3)
    assert_close(
        direction.direction_inner(a, g, weight, config=TILE),
        reference.direction_reference(a, g, weight),
        reference.direction_reference(a.abs(), g.abs(), weight.abs()),
    )
    if axis != "positions":
        first = rank_one.rank_one_sqnorm(
            a[:, 0], g[:, 0], config=TileConfig(4, 1, 16, num_warps=1, num_stages=1)
        )
        assert_close(first, reference.sqnorm_reference(a[:, :1], g[:, :1]))


@pytest.mark.parametrize("axis", STRIDES)
def test_offsets_of_streams_and_patches_are_64_bit(axis):
    x = far_apart((3, 2, 17), STRIDES[axis], 1)
    g = random((3, 2, 17), torch.float16, "cpu", 2)
    want = operators.layer_norm_sqnorm(x.double(), g, 1e-5)
    got = layer_norm.layer_norm_sqnorm(x, g, 1e-5, config=TileConfig(4, 32, 1, 1, 1))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6)
    want = operators.group_norm_sqnorm(x.double(), g, 17, 1e-5)
    got = group_norm.group_norm_sqnorm(x, g, 17, 1e-5, config=TileConfig(1, 16, 8, 1, 1))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6)
    scale = random((17,), torch.float16, "cpu", 3)
    for got, want in (
        (
            layer_norm.layer_norm_backward(g, x, scale, 1e-5, config=TileConfig(4, 32, 1, 1, 1)),
            operators.layer_norm_backward(g.double(), x.double(), scale, 1e-5),
        ),
        (
            scale_backward.scale_backward(x, g, weight=scale, config=TileConfig(1, 16, 8, 1, 1)),
            operators.scale_backward(x.double(), g.double(), scale),
        ),
        (
            group_norm.group_norm_backward(x, g, scale, 17, 1e-5, config=TileConfig(1, 1, 8, 1, 1)),
            operators.group_norm_backward(x.double(), g, scale, 17, 1e-5),
        ),
    ):
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-2, atol=1e-2)
    ids = torch.tensor([[1, 1], [0, 1], [2, 2]])
    got = rows.rows_sqnorm(ids, x, config=TileConfig(1, 32, 4, 1, 1))
    assert_close(got, operators.rows_sqnorm(ids, x.double()), operators.rows_sqnorm(ids, x.abs()))
    got = rows_pairs.pairwise_rows(ids, x, ids, x, config=TileConfig(2, 32, 4, 1, 1))
    want, limit = (operators.pairwise_rows(ids, y, ids, y) for y in (x.double(), x.double().abs()))
    assert_close(got, want, limit)
    # two channels of images in one dimension: channels take the place of positions
    layer = ([3], [1], [1], [1])
    for groups, outputs in ((1, 3), (2, 2)):
        gradient = random((3, outputs, 17), torch.float16, "cpu", 4)
        own = (x, gradient, *layer, groups)
        absolute = (x.double().abs(), gradient.double().abs(), *layer, groups)
        tile = TileConfig(4, 4, 16, 1, 1) if groups == 2 else TILE
        got = convolution.convolution_sqnorm(*own, config=tile)
        assert_close(
            got, operators.convolution_sqnorm(*own), operators.convolution_sqnorm(*absolute)
        )
        two, both = (x, gradient, *own), (*absolute[:2], *absolute)
        want = operators.pairwise_convolution_gram(*two)
        limit = operators.pairwise_convolution_gram(*both)
        got = convolution_pair_gram.pairwise_convolution_gram(*two, config=TILE)
        assert_close(got, want, limit)
        got, _ = convolution_pair_gram.convolution_inner_gram(*two, config=TILE)
        assert_close(got, want.diagonal(), limit.diagonal())


@triton.jit
def triangle_kernel(index_ptr, row_ptr, column_ptr):
    program = tl.program_id(0)
    row, column = triangle(tl.load(index_ptr + program))
    tl.store(row_ptr + program, row)
    tl.store(column_ptr + program, column)


@triton.jit
def grouped_kernel(row_ptr, column_ptr, row_tiles, column_tiles, GROUP: tl.constexpr):
    program = tl.program_id(0)
    row, column = grouped(program, row_tiles, column_tiles, GROUP)
    tl.store(row_ptr + program, row)
    tl.store(column_ptr + program, column)


def test_triangle_inverts_the_row_by_row_order():
    sides = [*range(1, 40), 999, 4000, 32768, 65534]
    wanted = [(row, column) for row in sides for column in sorted({0, row // 2, row - 1, row})]
    index = torch.tensor([row * (row + 1) // 2 + column for row, column in wanted])
    index = index.to(torch.int32)
    rows, columns = torch.zeros_like(index), torch.zeros_like(index)
    triangle_kernel[(len(index),)](index, rows, columns)
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == wanted


@pytest.mark.parametrize("tiles", [(1, 1), (3, 5), (8, 2), (9, 4), (17, 3)], ids=str)
def test_grouped_walks_every_tile_once(tiles):
    total = tiles[0] * tiles[1]
    rows, columns = torch.zeros(total, dtype=torch.int32), torch.zeros(total, dtype=torch.int32)
    grouped_kernel[(total,)](rows, columns, *tiles, 8)
    walked = set(zip(rows.tolist(), columns.tolist(), strict=True))
    assert walked == {(row, column) for row in range(tiles[0]) for column in range(tiles[1])}


@triton.jit
def _next_kernel(numbers, out, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out + places, tl.load(numbers + places) + 1)


def test_integers_that_overflow_are_seen():
    numbers = torch.tensor([0, 2**31 - 2], dtype=torch.int32)
    out = torch.empty_like(numbers)
    _next_kernel[(1,)](numbers, out, BLOCK=2)
    assert out.tolist() == [1, 2**31 - 1]
    with pytest.raises(InterpreterError, match="add of int32 overflows"):
        _next_kernel[(1,)](out, numbers, BLOCK=2)
    assert numbers.tolist() == [0, 2**31 - 2]
