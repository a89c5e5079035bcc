"""The cost model: which form contracts which shapes, and how much of it at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradstats import _convolution_cost, _cost
from gradstats.contractions._tensor_cores import cut_off

WORKSPACE = 2**28


def test_form_for_one_position_is_rank_one():
    for positions in (0, 1):
        assert _cost.choose_outer_form(positions, 1, 1) == "rank_one"
        assert _cost.choose_outer_form(positions, 4096, 4096, with_sum=True) == "rank_one"


@settings(max_examples=25)
@given(st.integers(1, 5000), st.integers(1, 5000), st.booleans())
def test_forms_cross_once_as_positions_grow(p, q, with_sum):
    choices = [
        _cost.choose_outer_form(positions, p, q, with_sum=with_sum)
        for positions in range(2, 6000, 7)
    ]
    switch = choices.index("direct") if "direct" in choices else len(choices)
    assert set(choices[:switch]) <= {"gram"} and set(choices[switch:]) <= {"direct"}
    assert choices == [
        _cost.choose_outer_form(positions, q, p, with_sum=with_sum)
        for positions in range(2, 6000, 7)
    ]


@pytest.mark.parametrize("width", [512, 1024, 4096])
def test_the_crossover_counts_the_symmetry_of_gram_matrices(width):
    double = {"roundoff": 2.0**-53}
    # T (T + 64) / 2 · 2 width = T · width², so T + 64 = width, elementwise work aside.
    assert _cost.choose_outer_form(int(0.8 * width) - 64, width, width, **double) == "gram"
    assert _cost.choose_outer_form(int(1.2 * width), width, width, **double) == "direct"
    # Twice as many positions as a rule that ignores the symmetry would give the Gram form.
    assert _cost.choose_outer_form(int(0.6 * width), width, width, **double) == "gram"


def test_forms_beside_training_as_measured():
    """Where the faster one was found to be by a tenth and more (benchmarks/crossover.py)."""
    for positions, p, q, form in (
        (16, 64, 64, "gram"), (64, 64, 64, "direct"), (32, 1024, 256, "gram"),
        (128, 256, 256, "direct"), (96, 512, 512, "direct"), (32, 768, 768, "gram"),
        (128, 768, 768, "direct"), (32, 2048, 512, "gram"), (128, 2048, 512, "direct"),
    ):  # fmt: skip
        assert _cost.choose_outer_form(positions, p, q, with_sum=True) == form


def test_forms_of_norms_alone_as_measured():
    """The same; widths of 128 and 1152 are those of a 3×3 convolution of 128 channels."""
    for positions, p, q, form in (
        (64, 128, 1152, "gram"), (196, 128, 1152, "direct"), (256, 128, 1152, "direct"),
        (49, 512, 4608, "gram"),
    ):  # fmt: skip
        assert _cost.choose_outer_form(positions, p, q) == form


def test_a_few_small_examples_are_formed():
    """There the number of operations decides, of which the Gram form takes more."""
    for examples, positions, width, form in (
        (8, 4, 16, "direct"), (128, 4, 16, "direct"), (32, 16, 32, "direct"),
        (32, 4, 128, "gram"), (8, 16, 256, "gram"),
    ):  # fmt: skip
        assert _cost.choose_outer_form(positions, width, width, examples=examples) == form
    assert _cost.choose_outer_form(4, 16, 16) == "gram"


def test_the_sum_comes_for_free_with_the_direct_form():
    forms = {
        with_sum: [
            _cost.choose_outer_form(t, 256, 256, with_sum=with_sum) for t in range(2, 400)
        ].count("gram")
        for with_sum in (False, True)
    }
    assert 0 < forms[True] < forms[False]


def test_positions_are_halved_down_to_blocks():
    assert _cost.gram_halvings(50, 8, WORKSPACE) == (0, 50 * 50)
    assert _cost.gram_halvings(128, 8, WORKSPACE) == (2, 64 * 64)
    assert _cost.gram_halvings(160, 8, WORKSPACE) == (2, 80 * 80)
    # Rows of blocks where halves end in large blocks, or are too large themselves.
    assert _cost.gram_halvings(197, 8, WORKSPACE) == (None, 197 * 32)
    assert _cost.gram_halvings(250, 8, WORKSPACE) == (None, 250 * 32)
    assert _cost.gram_halvings(128, 8, 2**14) == (None, 128 * 32)
    assert _cost.gram_halvings(2**13, 8, WORKSPACE) == (None, 2**13 * 32)


def test_without_a_guard_the_gram_form_is_never_chosen():
    for positions, p, q in ((2, 4096, 4096), (16, 512, 512), (1000, 3, 3)):
        assert _cost.choose_outer_form(positions, p, q, guarded=False) == "direct"


@pytest.mark.parametrize("on_chip", [False, True])
def test_what_the_guard_would_recompute_is_formed_at_once(on_chip):
    """From 1678 positions on, 2⁻²⁴ T, the bound where they are uncorrelated, is above 1e-4."""
    for p, q in ((4096, 4096), (4096, 14336), (2304, 50257)):
        for positions, form in ((1677, "gram"), (1678, "direct"), (2048, "direct")):
            assert _cost.choose_outer_form(positions, p, q, on_chip=on_chip) == form
    double = _cost.choose_outer_form(2048, 4096, 14336, on_chip=on_chip, roundoff=2.0**-53)
    assert double == "gram"


def test_rows_too_long_for_the_hardware_are_not_multiplied_with_each_other():
    """Of a vocabulary's width tensor cores cut off more than the guard tolerates, unseen by it."""
    for p, q, form in ((4096, 4096, "gram"), (2304, 50257, "direct"), (4096, 128256, "direct")):
        lost = cut_off(torch.bfloat16, p + q, (9, 0))
        assert _cost.choose_outer_form(512, p, q, on_chip=True, cut_off=lost) == form
    # A sixteenth of the rows' length in blocks, each of three quarters of an eps.
    assert cut_off(torch.bfloat16, 32, (9, 0)) == pytest.approx(1.5 * 2.0**-23)
    assert cut_off(torch.bfloat16, 32, (8, 0)) == pytest.approx(1.5 * 2.0**-22)


@pytest.mark.parametrize(
    "positions, p, q, alone, with_sum",
    [
        (64, 768, 768, "gram", "gram"),
        (197, 768, 3072, "gram", "gram"),
        (1024, 768, 768, "direct", "direct"),
        (1024, 768, 2304, "direct", "direct"),
        (1024, 3072, 768, "direct", "direct"),
        (1024, 4096, 4096, "gram", "direct"),
    ],
)
def test_forms_of_kernels_as_measured(positions, p, q, alone, with_sum):
    """Half precision on an H100: the Gram form takes half as long, or half as long again."""
    for want, wanted in ((alone, False), (with_sum, True)):
        got = _cost.choose_outer_form(positions, p, q, with_sum=wanted, on_chip=True)
        assert got == want


@pytest.mark.parametrize(
    ("channels", "outputs", "kernel", "positions", "groups", "examples", "way"),
    [
        (256, 64, (1, 1), 196, 1, 64, "patches"),
        (3, 64, (7, 7), 196, 1, 64, "patches"),
        (3, 64, (7, 7), 2704, 1, 64, "patches"),
        (3, 64, (7, 7), 2916, 1, 64, "alone"),
        (3, 64, (3, 7, 7), 2916, 1, 64, "alone"),
        (1, 512, (10,), 1024, 1, 8, "groups"),
        (1, 512, (10,), 1023, 1, 8, "patches"),
        (8, 512, (10,), 1024, 1, 8, "patches"),
        (12, 64, (3, 3), 196, 1, 64, "patches"),
        (20, 64, (3, 3), 196, 1, 64, "groups"),
        (64, 64, (3, 3), 3136, 1, 64, "groups"),
        (64, 6, (3, 3), 3136, 1, 64, "alone"),
        (64, 64, (3, 3), 256, 1, 64, "groups"),
        (64, 64, (3, 3), 64, 1, 64, "groups"),
        (64, 64, (3, 3), 63, 1, 64, "patches"),
        (128, 128, (3, 3), 256, 1, 64, "groups"),
        (512, 512, (3, 3), 49, 1, 64, "patches"),
        (64, 16, (3, 3), 16, 1, 4, "patches"),
        (64, 4, (3, 3), 1, 1, 64, "patches"),
        (1, 64, (3, 3), 3136, 64, 64, "groups"),
        (32, 64, (3, 3), 16, 2, 64, "groups"),
        (32, 64, (3, 3), 15, 2, 64, "patches"),
    ],
)
def test_ways_of_convolutions_as_measured(
    channels, outputs, kernel, positions, groups, examples, way
):
    assert (
        _convolution_cost.convolution_way(channels, outputs, kernel, positions, groups, examples)
        == way
    )


def test_factors_are_pulled_back_in_several_ways_where_examples_are_short():
    assert not _cost.pays_to_pull_apart(1, 5)
    for ways in (2, 3, 4):
        longest = 80 // (2 * ways - 3)
        assert _cost.pays_to_pull_apart(longest, ways)
        assert not _cost.pays_to_pull_apart(longest + 1, ways)


def test_chunks():
    assert _cost.examples_per_chunk(100, 8, 250) == 2
    assert _cost.examples_per_chunk(100, 8, 1) == 1
    assert _cost.examples_per_chunk(1, 8, WORKSPACE) == 8
    assert _cost.examples_per_chunk(0, 8, WORKSPACE) == 8
    # A chunk stays in cache even where the workspace allows more.
    assert _cost.examples_per_chunk(2**20, 64, WORKSPACE) == _cost.CACHE_BYTES // 2**20
    # Large gradients are formed one at a time, small ones as batches of a few MiB.
    assert _cost.direct_chunk(2**19, 64, WORKSPACE) == 1
    assert _cost.direct_chunk(2**18, 64, WORKSPACE) == 16
    assert _cost.direct_chunk(2**22, 99, WORKSPACE, launched=True) == 64
    assert _cost.direct_chunk(100, 8, WORKSPACE) == 8
    assert _cost.direct_chunk(100, 8, 250) == 2
    assert _cost.direct_chunk(100, 8, 1) == 1
    assert _cost.fitting(100, 10, 250) == 2
    assert _cost.fitting(100, 10, 1) == 1
    assert _cost.fitting(1, 10, 7) == 7
    assert _cost.fitting(0, 10, 250) == 10
    # What is pulled back holds as much again, and no more than the workspace either.
    assert _cost.pulled_chunk(2**18, 64, WORKSPACE, launched=False) == 8
    assert _cost.pulled_chunk(2**22, 99, WORKSPACE, launched=True) == 64
    assert _cost.pulled_chunk(100, 8, 250, launched=False) == 2
    assert _convolution_cost.convolution_chunk(50, 50, 99, WORKSPACE) == 64
    assert _convolution_cost.convolution_chunk(50, 50, 64, 250) == 2
    # Gradients that are formed together take a few MiB.
    assert _convolution_cost.convolution_chunk(50, 2**18, 64, WORKSPACE) == 16
    assert _convolution_cost.convolution_chunk(50, 2**22, 64, WORKSPACE) == 1
    assert _convolution_cost.convolution_chunk(50, 2**23, 64, WORKSPACE) == 1
    assert _convolution_cost.convolution_chunk(0, 0, 64, WORKSPACE) == 64
    assert _convolution_cost.convolution_chunk(2**21, 50, 99, WORKSPACE) == 64


def test_forms_of_pairs():
    """Products of T × T' positions for each pair, or gradients of both sides and their products."""
    for positions1, positions2 in ((0, 1), (1, 1)):
        assert _cost.choose_pair_form(positions1, positions2, 64, 64, 8, 8) == "rank_one"
    for positions1, positions2 in ((1, 2), (2, 1)):
        assert _cost.choose_pair_form(positions1, positions2, 64, 64, 8, 8) == "gram"
    # 16 · 16 · (64 + 64 + 24) for each of n² pairs; 64 · 64 · 2 (16 + 16) for each of n, and n².
    assert _cost.choose_pair_form(16, 16, 64, 64, 7, 7) == "gram"
    assert _cost.choose_pair_form(16, 16, 64, 64, 8, 8) == "direct"
    # One side's gradients cost as much as the other's.
    for sizes in ((15, 1), (1, 15)):
        assert _cost.choose_pair_form(16, 16, 64, 64, *sizes) == "gram"
    # Where positions are multiplied on the chip only the products cost anything.
    assert _cost.choose_pair_form(16, 16, 64, 64, 8, 8, on_chip=True) == "gram"
    # Products of so few digits would be computed once more.
    assert _cost.choose_pair_form(16, 16, 64, 64, 1, 1, roundoff=2.0**-8) == "direct"


def test_gradients_are_formed_transposed_where_that_has_fewer_columns():
    assert _cost.pays_to_transpose(64, 256, 4, with_sum=False)
    assert not _cost.pays_to_transpose(256, 64, 4, with_sum=False)
    # A sum has to be transposed back.
    assert not _cost.pays_to_transpose(64, 256, 7, with_sum=True)
    assert _cost.pays_to_transpose(64, 256, 8, with_sum=True)
    for p, q in ((64, 256), (256, 64)):
        # (256, 64) either way: rows of 256 bytes.
        plan = _cost.direct_plan(4, 1, p, q, 4, 2**12, with_sum=False)
        assert plan == (p < q, 16, 1)


def test_gradients_of_several_groups_are_formed_within_the_workspace():
    rows = 3 * 10 * 8  # bytes of one row of the transposes, of all groups
    for workspace, expected in ((2**28, (20, 4)), (4 * rows, (4, 1)), (1, (1, 1))):
        plan = _cost.direct_plan(4, 3, 10, 20, 8, workspace, with_sum=False)
        assert plan == (True, *expected)


def test_no_examples_choose_a_form():
    assert _cost.choose_outer_form(64, 8, 8, examples=0) in ("gram", "direct")
