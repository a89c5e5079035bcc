"""Kernels of convolutions, embeddings and norm layers on one GPU: checked first, then timed.

    python -m benchmarks.bench_layer_kernels --out benchmarks/results/layer_kernels.csv

Floors, timing and what a dry run is: see `kernel_harness`; the kernels and their rivals: see
`layer_kernels`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

from benchmarks.kernel_harness import (
    DTYPES,
    MEASURED,
    Meter,
    bench,
    meter_of,
    parser_of,
    write,
)
from benchmarks.layer_kernels import Layer, operands, providers

COLUMNS = [*"operation provider name kind batch sizes channels_last".split(), *MEASURED]

LAYERS = (
    Layer("resnet50_stem", "convolution", 64, (3, 64, 224, 7, 2, 3, 1)),
    Layer("resnet50_stage1", "convolution", 64, (64, 64, 56, 3, 1, 1, 1)),
    Layer("resnet50_stage2", "convolution", 64, (128, 128, 28, 3, 1, 1, 1)),
    Layer("resnet50_stage3", "convolution", 64, (256, 256, 14, 3, 1, 1, 1)),
    Layer("resnet50_stage4", "convolution", 64, (512, 512, 7, 3, 1, 1, 1)),
    Layer("resnet50_shortcut", "convolution", 64, (256, 512, 56, 1, 2, 0, 1)),
    Layer("resnext50_stage2", "convolution", 64, (256, 256, 28, 3, 1, 1, 32)),
    Layer("convnext_t_stage1", "convolution", 64, (96, 96, 56, 7, 1, 3, 96)),
    Layer("convnext_t_stage3", "convolution", 64, (384, 384, 14, 7, 1, 3, 384)),
    Layer("vit_b_patches", "convolution", 64, (3, 768, 224, 16, 16, 0, 1)),
    Layer("gpt2_layer_norm", "layer_norm", 16, (1024, 768)),
    Layer("llama_7b_rms_norm", "rms_norm", 4, (2048, 4096)),
    Layer("resnet50_group_norm", "group_norm", 64, (3136, 256, 32)),
    Layer("llama_70b_rms_norm", "rms_norm", 2, (2048, 8192)),
    Layer("gpt2_bias", "scale", 16, (1024, 3072)),
    Layer("llama_7b_scale", "scale", 4, (2048, 4096)),
    Layer("resnet50_batch_norm", "scale_first", 64, (3136, 256)),
    Layer("gpt2_embedding", "embedding", 16, (1024, 768, 50257)),
)
DRY = (
    Layer("grouped", "convolution", 2, (4, 6, 5, 3, 1, 1, 2)),
    Layer("convolution", "convolution", 2, (3, 5, 6, 3, 2, 1, 1)),
    Layer("layer", "layer_norm", 2, (3, 20)),
    Layer("rms", "rms_norm", 2, (3, 20)),
    Layer("group", "group_norm", 2, (5, 12, 3)),
    Layer("scale", "scale", 2, (3, 20)),
    Layer("scale first", "scale_first", 2, (5, 12)),
    Layer("embedding", "embedding", 2, (7, 20, 11)),
)
QUICK = ("resnet50_stage2", "convnext_t_stage1", "gpt2_layer_norm", "gpt2_embedding")


def rows_of(
    layer: Layer,
    dtype_name: str,
    limits: tuple[float, float],
    channels_last: bool,
    meter: Meter,
) -> Iterator[dict]:
    """One row for each operation and provider."""
    dtype = DTYPES[dtype_name]
    return bench(
        dataclasses.asdict(layer) | {"dtype": dtype_name, "channels_last": channels_last},
        providers(layer, dtype),
        lambda seed: operands(layer, dtype, seed, meter.device, channels_last),
        16,
        limits,
        meter,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", choices=[layer.name for layer in LAYERS])
    options = parser.parse_args(arguments)
    meter = meter_of(parser, options)
    names = options.layers or (QUICK if options.quick else [layer.name for layer in LAYERS])
    layers = DRY if options.dry_run else [layer for layer in LAYERS if layer.name in names]

    def work() -> Iterator[tuple[str, Callable[[], Iterator[dict]]]]:
        for dtype_name in options.dtypes or ["bf16"]:
            limits = meter.ceilings(DTYPES[dtype_name])
            for layer in layers:
                for last in (False, True) if layer.kind == "convolution" else (False,):
                    rows = functools.partial(rows_of, layer, dtype_name, limits, last, meter)
                    yield f"{layer.name}{' last' if last else ''}", rows

    return write(options, COLUMNS, work())


if __name__ == "__main__":
    raise SystemExit(main())
