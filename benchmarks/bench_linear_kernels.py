"""The linear-layer kernels on one GPU: checked first, then timed against their floors and rivals.

    python -m benchmarks.bench_linear_kernels --out benchmarks/results/linear_kernels.csv

Floors, timing and what a dry run is: see `kernel_harness`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch

from benchmarks.kernel_harness import (
    DTYPES,
    MEASURED,
    ROUNDING,
    Meter,
    Operands,
    Provider,
    bench,
    meter_of,
    parser_of,
    write,
)

COLUMNS = [*"operation provider name batch positions d_in d_out".split(), *MEASURED]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A named layer: B examples of T positions."""

    name: str
    batch: int
    positions: int
    d_in: int
    d_out: int


SHAPES = (
    Shape("gpt2_qkv", 16, 1024, 768, 2304),
    Shape("gpt2_projection", 16, 1024, 768, 768),
    Shape("gpt2_mlp_up", 16, 1024, 768, 3072),
    Shape("gpt2_mlp_down", 16, 1024, 3072, 768),
    Shape("llama_7b_projection", 4, 2048, 4096, 4096),
    Shape("vit_b_mlp", 64, 197, 768, 3072),
    Shape("bert_short", 128, 64, 768, 768),
    Shape("unaligned", 16, 500, 1001, 1001),
    Shape("mlp_wide", 4096, 1, 4096, 4096),
    Shape("mlp_mnist", 256, 1, 784, 2048),
)
QUICK = ("gpt2_qkv", "mlp_wide")
DRY = (Shape("sequence", 2, 9, 32, 48), Shape("one_position", 5, 1, 32, 48))


def providers(shape: Shape, dtype: torch.dtype, descriptors: bool) -> Iterator[Provider]:
    """Every kernel that serves this shape, beside what it competes with.

    With `descriptors`, the variants for compute capability 9.0 too.
    """
    from gradstats.kernels import (
        direct,
        direction,
        gram,
        pairwise,
        pairwise_direct,
        rank_one,
        vector,
    )
    from gradstats.kernels import weight_gradient as fused

    batch, positions, d_in, d_out = shape.batch, shape.positions, shape.d_in, shape.d_out
    size = torch.empty((), dtype=dtype).element_size()
    read = batch * positions * (d_in + d_out) * size
    product = 2.0 * batch * positions * d_in * d_out
    gradient_bytes = d_in * d_out * size

    def squares(a, g, weight):
        return torch.stack([(y.T @ x).square().sum() for x, y in zip(a, g, strict=True)])

    def loss(weight, a, g):
        return (torch.nn.functional.linear(a, weight) * g).sum()

    per_example = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def flat_product(a, g, weight):
        return g.flatten(0, 1).T @ a.flatten(0, 1)

    if positions == 1:
        yield Provider(
            "rank_one", "gradstats", lambda a, g, w: rank_one.rank_one_sqnorm(a[:, 0], g[:, 0]),
            0.0, read, squares,
        )  # fmt: skip
        yield Provider(
            "rank_one", "torch",
            lambda a, g, w: a.float().square().sum((1, 2)) * g.float().square().sum((1, 2)),
            0.0, read, squares,
        )  # fmt: skip
    else:
        gram_flops = batch * positions * (positions + 1.0) * (d_in + d_out)
        # Of more positions, uncorrelated as these are, the guard would form every gradient anew.
        _, products, _, tolerance = ROUNDING
        if products * positions <= tolerance:
            yield Provider(
                "gram", "gradstats", lambda a, g, w: gram.gram_sqnorm(a, g, 1, *ROUNDING),
                gram_flops, read, squares, lambda out: out[0],
            )  # fmt: skip
        yield Provider(
            "gram", "opacus formula",
            lambda a, g, w: ((a @ a.mT) * (g @ g.mT)).sum((1, 2), dtype=torch.float32),
            gram_flops, read,
        )  # fmt: skip
        yield Provider(
            "direct", "gradstats", lambda a, g, w: direct.direct_sqnorm(a, g),
            product, read, squares,
        )  # fmt: skip
        if 4 * batch * d_in * d_out < 16 * 2**30:
            yield Provider(
                "direct", "einsum",
                lambda a, g, w: torch.einsum("bto,bti->boi", g, a).float().square().sum((1, 2)),
                product, read, squares,
            )  # fmt: skip
            yield Provider(
                "direct", "vmap",
                lambda a, g, w: per_example(w, a, g).float().square().sum((1, 2)),
                product, read, squares,
            )  # fmt: skip
        yield Provider(
            "vector", "gradstats", lambda a, g, w: vector.vector_sqnorm(g),
            0.0, batch * positions * d_out * size, lambda a, g, w: g.sum(1).square().sum(1),
        )  # fmt: skip

    yield Provider("weight_gradient", "cublas", flat_product, product, read + gradient_bytes)
    # of one position norms need no gradient, and nothing beside a plain product
    fused_options: dict[str, dict] = {"gradstats": {}} if positions > 1 else {}
    if fused_options and d_in % 16 == 0 and d_out % 16 == 0 and descriptors:
        fused_options["gradstats descriptors"] = {"descriptors": True}
        fused_options["gradstats pointers"] = {"descriptors": False}
    for name, options in fused_options.items():
        yield Provider(
            "weight_gradient", name,
            lambda a, g, w, options=options: fused.weight_gradient_sqnorm(a, g, **options),
            product, read + gradient_bytes, squares, lambda out: out[1],
        )  # fmt: skip

    if batch * positions <= 8192 or positions == 1:
        pair_flops = 2.0 * batch**2 * positions**2 * (d_in + d_out)
        if positions > 1 or dtype == torch.float32:  # otherwise the products are PyTorch's
            yield Provider(
                "pairwise_gram", "gradstats", lambda a, g, w: pairwise.pairwise_gram(a, g, a, g),
                pair_flops, read + 4 * batch**2, squares, lambda out: out.diagonal(),
            )  # fmt: skip
        if positions == 1:
            yield Provider(
                "pairwise_gram", "torch",
                lambda a, g, w: (a[:, 0] @ a[:, 0].T) * (g[:, 0] @ g[:, 0].T),
                pair_flops, read + 4 * batch**2,
            )  # fmt: skip
    if positions > 1:
        yield Provider(
            "pairwise_direct", "gradstats",
            lambda a, g, w: pairwise_direct.pairwise_direct(a, g, a, g),
            product + 2.0 * batch**2 * d_in * d_out, read, squares, lambda out: out.diagonal(),
        )  # fmt: skip
    yield Provider(
        "direction", "gradstats", lambda a, g, w: direction.direction_inner(a, g, w),
        product, read + gradient_bytes, lambda a, g, w: ((g @ w) * a).sum((1, 2)),
    )  # fmt: skip
    yield Provider(
        "direction", "torch",
        lambda a, g, w: ((g @ w).float() * a.float()).sum((1, 2)), product, read + gradient_bytes,
    )  # fmt: skip


def operands(shape: Shape, dtype: torch.dtype, seed: int, device: str = "cuda") -> Operands:
    """(a, g, weight) of random data."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def random(*size):
        return torch.randn(size, generator=generator, device=device).to(dtype)

    a = random(shape.batch, shape.positions, shape.d_in)
    g = random(shape.batch, shape.positions, shape.d_out)
    return a, g, random(shape.d_out, shape.d_in)


def rows_of(
    shape: Shape, dtype_name: str, limits: tuple[float, float], meter: Meter
) -> Iterator[dict]:
    """One row for each operation and provider."""
    dtype = DTYPES[dtype_name]
    descriptors = meter.device == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    return bench(
        dataclasses.asdict(shape) | {"dtype": dtype_name},
        providers(shape, dtype, descriptors),
        lambda seed: operands(shape, dtype, seed, meter.device),
        32,
        limits,
        meter,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=[shape.name for shape in SHAPES])
    options = parser.parse_args(arguments)
    meter = meter_of(parser, options)
    names = options.shapes or (QUICK if options.quick else [shape.name for shape in SHAPES])
    shapes = DRY if options.dry_run else [shape for shape in SHAPES if shape.name in names]
    dtypes = options.dtypes or (["bf16"] if options.quick else ["bf16", "fp32"])

    def work() -> Iterator[tuple[str, Callable[[], Iterator[dict]]]]:
        for dtype_name in dtypes:
            limits = meter.ceilings(DTYPES[dtype_name])
            bandwidth, rate = limits[0] / 1e12, limits[1] / 1e12
            print(f"{dtype_name}: copy {bandwidth:.2f} TB/s, matmul {rate:.0f} TFLOP/s")
            for shape in shapes:
                yield shape.name, functools.partial(rows_of, shape, dtype_name, limits, meter)

    return write(options, COLUMNS, work())


if __name__ == "__main__":
    raise SystemExit(main())
