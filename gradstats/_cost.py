"""Which algorithm contracts a factor, decided from shapes alone.

Every function here is pure: the same shapes give the same answer, on every machine, so that results
are reproducible and the choice can be tested.

Costs are counted in multiply-adds of a matrix product. Other operations (squaring, comparing,
adding tiles) run at memory speed: each element that they move is charged ``ELEMENT_COST`` of these.
"""

from __future__ import annotations

from typing import Literal

from gradstats._compiler import remembered

Form = Literal["rank_one", "gram", "direct"]

# One element read or written by an elementwise pass costs about as much as this many multiply-adds
# of a matrix product (float32, two cores of an AMD EPYC; see benchmarks/crossover.py).
ELEMENT_COST = 8

# Fixed cost of the Gram form's additional operations, about 15 µs.
GRAM_OPERATIONS = 1_400_000

# Factor on the cost of a Gram form for norms alone, whose products are smaller than those that form
# gradients (two cores of an AMD EPYC, benchmarks/crossover.py). Beside training, and if gradients
# are formed one at a time, the choice is as good without it.
GRAM_RATE = 1.2

# Cost of forming gradients one at a time by oneDNN, where it multiplies faster than PyTorch
# (contractions/_multiply.py): a factor on the multiply-adds, and a constant for each call, in
# multiply-adds (two cores of an AMD EPYC, T from 64 to 1024, widths 128 to 3072).
ALONE = (0.45, 2_200_000)

# The same factor for the sum of the gradients, which is one product beside a Gram form.
SUM_ALONE = 0.6

# The most ways from a parameter to a tensor along which factors are pulled back separately: each
# pair of ways adds an inner product.
MOST_WAYS = 4

# Relative error bound above which a result is recomputed by the direct form. Its error grows with
# the square root of the condition number, that of the Gram form with the condition number itself.
GUARD_TOLERANCE = 1e-4

# Rows of a Gram matrix computed at once: only blocks on and above the diagonal are needed.
GRAM_BLOCK = 32

# The same for the kernels, whose tiles fill the tensor cores.
KERNEL_BLOCK = 128

# Cost of the kernels relative to one matrix product of all positions: a factor on the multiply-adds
# and a constant for beginning and ending an example's sums, in positions (half precision, NVIDIA
# H100, T from 64 to 2048, widths 768 to 4096, benchmarks/bench_linear_kernels.py).
KERNEL_GRAM = (1.45, 70)
KERNEL_DIRECT = (0.87, 230)
KERNEL_DIRECT_AND_SUM = (1.05, 330)

# Limits in bytes that hold even if the workspace allows more.

# Scratch that fits a core's second-level cache: a tile is squared right after it is written.
CACHE_BYTES = 1 * 1024 * 1024

# Memory that one operation may allocate. The C library maps and unmaps larger pieces (32 MiB) each
# time, and touching fresh pages costs more than forming the gradients that go there.
FRESH_BYTES = 16 * 1024 * 1024

# Operands of several uses that are concatenated at once. More is no faster (2 to 128 uses of 1 to
# 48 MiB in all, one core of an AMD EPYC).
MERGED_BYTES = 8 * 1024 * 1024

# Gradients of both sides that are formed at once for the products of all pairs, so that memory does
# not grow with d. A tile is read once for each example of the other side, so large products matter
# more than a core's cache: smaller tiles are slower and larger ones no faster (two cores of an AMD
# EPYC, benchmarks/influence.py).
PAIR_TILE_BYTES = 24 * 1024 * 1024


def gram_cost(positions: int, d_left: int, d_right: int) -> float:
    """Return the cost of Σ_{t,s} (l_t·l_s)(r_t·r_s) over the blocks on and above the diagonal.

    Computing T(T + block)/2 entries of both Gram matrices takes T(T + block)/2 · (d_left + d_right)
    multiply-adds, and each entry is written, read and multiplied once.
    """
    entries = positions * (positions + min(positions, GRAM_BLOCK)) / 2
    return entries * (d_left + d_right) + 3 * entries * ELEMENT_COST


def direct_cost(positions: int, d_left: int, d_right: int, *, with_sum: bool, alone: bool) -> float:
    """Return the cost of forming one example's gradient tile by tile and squaring it.

    The product takes T·d_left·d_right multiply-adds; each of the d_left·d_right elements is written
    once, read once to be squared and, with ``with_sum``, added to the running weight gradient while
    it is still in the cache. Gradients formed ``alone`` cost less (see ``ALONE``).
    """
    elements = d_left * d_right
    passes = 3 if with_sum else 2
    rate, call = ALONE if alone else (1, 0)
    return rate * positions * elements + call + passes * elements * ELEMENT_COST


def kernel_costs(
    positions: int, d_left: int, d_right: int, *, with_sum: bool
) -> tuple[float, float]:
    """Return the costs of one example's Gram form and direct form if tiles stay on the chip.

    The Gram form computes the tiles on and below the diagonal and, with ``with_sum``, the product
    for the weight gradient.
    """
    elements = d_left * d_right
    entries = positions * (positions + min(positions, KERNEL_BLOCK)) / 2
    rate, begin = KERNEL_GRAM
    gram = rate * entries * (d_left + d_right) + begin * elements
    if with_sum:
        gram += positions * elements
    rate, begin = KERNEL_DIRECT_AND_SUM if with_sum else KERNEL_DIRECT
    return gram, (rate * positions + begin) * elements


def gram_halvings(positions: int, bytes_per_product: int, workspace: int) -> tuple[int | None, int]:
    """Return how often to halve the positions for a Gram form, and the products it holds at once.

    Halves take fewer and larger matrix products than rows of blocks: 0.96 of the time at T = 128,
    0.83 at 256, 0.73 at 512 (two cores of an AMD EPYC). None if the last blocks would be large, or
    the scratch too much: then rows of blocks are better.

    Args:
        positions: number of positions T of one example.
        bytes_per_product: of one product of positions, with everything held beside it.
        workspace: bytes of scratch.
    """
    halvings = 0
    while positions % (2 << halvings) == 0 and positions >> (halvings + 1) >= GRAM_BLOCK:
        halvings += 1
    last = positions >> halvings
    held = max(positions * last, (positions // 2) ** 2)
    if last < 3 * GRAM_BLOCK and held * bytes_per_product <= min(workspace, FRESH_BYTES):
        return halvings, held
    return None, positions * GRAM_BLOCK


@remembered
def choose_outer_form(
    positions: int,
    d_left: int,
    d_right: int,
    *,
    with_sum: bool = False,
    guarded: bool = True,
    on_chip: bool = False,
    alone: bool = False,
    examples: int | None = None,
    roundoff: float = 2.0**-24,
    cut_off: float = 0.0,
) -> Form:
    """Choose how ‖Σ_t l_t r_tᵀ‖² is computed.

    Without the costs of elements and blocks, the Gram form would win for T < 2·p·q/(p + q), twice
    the crossover of a rule that ignores the symmetry of Gram matrices.

    Its error bound is roundoff · (Σ_t ‖l_t‖‖r_t‖)². For uncorrelated positions of one size that is
    roundoff · T relative to the squared norm, Σ_t ‖l_t‖²‖r_t‖². If that exceeds what the guard
    tolerates, nearly every example would be recomputed, and the direct form is chosen.

    Args:
        positions: number of positions T of one example.
        d_left: width of ``left`` (p).
        d_right: width of ``right`` (q).
        with_sum: whether the weight gradient Σ_i G_i is wanted too. The direct form yields it in
            one more pass; the Gram form needs a separate product.
        guarded: whether results with too large an error bound can be recomputed. If not (PyTorch's
            operations in a compiled graph), only forms that need no guard are chosen.
        on_chip: whether tiles are squared where they are made, so that only products cost anything.
        alone: whether gradients are formed one at a time, by faster products than those of
            positions.
        examples: number of examples; None leaves out fixed costs.
        roundoff: relative error of one product of operands.
        cut_off: relative error of sums over a row's width, if the hardware truncates them.

    Returns:
        "rank_one", "gram" or "direct".
    """
    if positions <= 1:
        return "rank_one"
    if not guarded or max(roundoff * positions, cut_off) > GUARD_TOLERANCE:
        return "direct"
    if on_chip:
        gram, direct = kernel_costs(positions, d_left, d_right, with_sum=with_sum)
        return "gram" if gram < direct else "direct"
    gram = gram_cost(positions, d_left, d_right)
    if with_sum:
        gram += (SUM_ALONE if alone else 1) * positions * d_left * d_right
    elif not alone:
        gram *= GRAM_RATE
    if examples is not None:
        gram += GRAM_OPERATIONS / max(1, examples)
    direct = direct_cost(positions, d_left, d_right, with_sum=with_sum, alone=alone)
    return "gram" if gram < direct else "direct"


def choose_pair_form(
    positions1: int,
    positions2: int,
    d_left: int,
    d_right: int,
    examples1: int,
    examples2: int,
    *,
    on_chip: bool = False,
    roundoff: float = 2.0**-24,
) -> Form:
    """Choose how ⟨Σ_t l_t r_tᵀ, Σ_s l'_s r'_sᵀ⟩ is computed for examples1 × examples2 pairs.

    Args:
        positions1, positions2: numbers of positions T and T' of one example of each side.
        d_left, d_right: widths p and q.
        examples1, examples2: numbers of examples B and B'; 1 and 1 for pairs of equal indices.
        on_chip: whether products of positions are multiplied where they are made.
        roundoff: relative error of one product of operands.

    Returns:
        "rank_one" if both sides have one position, "gram" for products of positions, "direct" for
        tiles of both sides' gradients.
    """
    if positions1 <= 1 and positions2 <= 1:
        return "rank_one"
    if roundoff > GUARD_TOLERANCE:
        return "direct"
    passes = 0 if on_chip else ELEMENT_COST
    entries = examples1 * examples2 * positions1 * positions2
    gram = entries * (d_left + d_right + 3 * passes)
    formed = examples1 * (positions1 + 2 * ELEMENT_COST)
    formed += examples2 * (positions2 + 2 * ELEMENT_COST)
    direct = d_left * d_right * (formed + examples1 * examples2)
    return "gram" if gram < direct else "direct"


def fitting(bytes_each: int, count: int, budget: int) -> int:
    """Return how many of ``count`` items fit a budget of bytes, but at least one."""
    return max(1, min(count, budget // max(1, bytes_each)))


def examples_per_chunk(bytes_per_example: int, examples: int, workspace: int) -> int:
    """Return how many examples to contract at once so that they stay in a core's cache."""
    return fitting(bytes_per_example, examples, min(workspace, CACHE_BYTES))


def direct_chunk(
    bytes_per_example: int, examples: int, workspace: int, *, launched: bool = False
) -> int:
    """Return how many examples' gradients to form and square at once.

    Gradients of 512 KiB and more are formed fastest one at a time, smaller ones in batches of a few
    MiB (two cores of an AMD EPYC, T = 128, widths 64 to 3072). If operations are ``launched`` on a
    GPU, the fewer the better.
    """
    if bytes_per_example >= CACHE_BYTES // 2 and not launched:
        return 1
    budget = workspace if launched else min(workspace, 4 * CACHE_BYTES)
    return fitting(bytes_per_example, examples, budget)


def pulled_chunk(bytes_per_example: int, examples: int, workspace: int, *, launched: bool) -> int:
    """Return how many examples to pull back at once to the parameters of a computation.

    The computation's intermediate results take about as much memory as the gradients, so only half
    as many examples fit the caches. Twice as many are no faster (two cores of an AMD EPYC, widths
    16 to 384).
    """
    budget = workspace if launched else min(workspace, 2 * CACHE_BYTES)
    return direct_chunk(bytes_per_example, examples, budget, launched=launched)


def pays_to_pull_apart(positions: int, ways: int) -> bool:
    """Whether to pull a factor back to a parameter along each of several ways separately.

    Each way after the first takes two products of all positions: a sum of the gradient, and an
    inner product with the gradient of another way. The alternative forms the gradients in one
    product and pulls them back in about ten passes over their elements.

    Args:
        positions: number of positions T of one example.
        ways: number of ways from the parameter to the tensor that is used with data.
    """
    few = ways <= MOST_WAYS
    return few and 2 * (ways - 1) * positions <= positions + 10 * ELEMENT_COST


@remembered
def direct_plan(
    batch: int, groups: int, p: int, q: int, itemsize: int, workspace: int, *, with_sum: bool
) -> tuple[bool, int, int]:
    """Return how to form gradients: whether transposed, how many rows, of how many examples.

    Args:
        batch, groups: numbers of examples and of the groups of each.
        p, q: rows and columns of one gradient.
        itemsize: bytes of an element.
        workspace: bytes of scratch.
        with_sum: whether the weight gradient Σ_i G_i is wanted too.
    """
    transposed = pays_to_transpose(p, q, batch, with_sum=with_sum)
    if transposed:
        p, q = q, p
    row_bytes = groups * q * itemsize
    rows = fitting(row_bytes, p, workspace)
    return transposed, rows, direct_chunk(rows * row_bytes, batch, workspace)


def pays_to_transpose(d_left: int, d_right: int, examples: int, *, with_sum: bool) -> bool:
    """Whether to form the transposes of an outer factor's gradients.

    A product with more rows than columns takes 0.6 to 1 of the time of its transpose. But a sum has
    to be transposed back, which costs as much as seven examples save (two cores of an AMD EPYC,
    widths 256 to 3072).

    Args:
        d_left: width of ``left`` (p), the rows of the gradient.
        d_right: width of ``right`` (q).
        examples: number of examples B.
        with_sum: whether the weight gradient Σ_i G_i is wanted too.
    """
    return d_right > d_left and (not with_sum or examples >= 8)
