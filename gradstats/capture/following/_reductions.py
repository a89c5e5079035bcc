"""Operations over some axes of their operand, which may be that of the examples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradstats.capture.following._examples import Examples
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._nested import argument_of
from gradstats.capture.operations._operations import variants

# The position of an argument that can only be given by name.
KEYWORD = 99

# Reductions, with the position of the axes among their arguments.
REDUCES: dict[Any, int] = {
    **dict.fromkeys(
        variants(
            "sum", "mean", "amax", "amin", "max", "min", "prod", "logsumexp", "var", "std",
            "median", "argmax", "argmin", "any", "all", "nansum", "nanmean", "std_mean",
            "var_mean", "count_nonzero",
        ),
        1,
    ),
    **dict.fromkeys(variants("norm"), 2),
    **dict.fromkeys((torch.linalg.vector_norm, torch.linalg.norm), 2),
    torch.special.logsumexp: 1,
    torch.frobenius_norm: 1,
    **dict.fromkeys(variants("aminmax", "dist", "trace"), KEYWORD),
}  # fmt: skip


def reduced(call: Call, source: Tensor, layout: Examples) -> Examples | None:
    """Return the layout of a reduction's result; None where it runs over the examples."""
    func, result = call.func, call.result
    position, default = OVER_AXES[func]
    dim = call.argument(position, "dim", default)
    if dim is None or isinstance(dim, str):
        return None
    dims = {d % source.dim() for d in (dim if isinstance(dim, (tuple, list)) else (dim,))}
    if layout.axis in dims or not dims:
        return None
    quantiles = call.argument(1, "q") if func in QUANTILES else None
    # Several quantiles add an axis in front.
    axis = layout.axis + (isinstance(quantiles, Tensor) and quantiles.dim())
    count = result.dim() - (axis - layout.axis)
    if count == source.dim():
        return layout.along(axis)
    if count == source.dim() - len(dims):
        return layout.along(axis - sum(d < layout.axis for d in dims))
    # Some of these axes are left, as if matrices give vectors; or others are gone too, as if losses
    # are averaged.
    lead = layout.axis + 1
    before = layout.axis < min(dims) and result.shape[:lead] == source.shape[:lead]
    return layout if before else None


# Operations that choose their axis by the number of axes, if they are given none.
IMPLICIT = frozenset({functional.softmax, functional.log_softmax, functional.softmin})

# Operations on matrices, which span the last two axes.
OVER_MATRICES = frozenset(
    getattr(torch.linalg, name)
    for name in (
        "cholesky", "cholesky_ex", "cond", "det", "eig", "eigh", "eigvals", "eigvalsh", "inv",
        "inv_ex", "ldl_factor", "lu", "lu_factor", "lu_factor_ex", "matrix_exp", "matrix_power",
        "matrix_rank", "matrix_sqrth", "pinv", "polar", "qr", "slogdet", "svd", "svdvals",
    )
    if hasattr(torch.linalg, name)
).union(
    variants(
        "cholesky", "det", "inverse", "logdet", "lu", "matrix_exp", "matrix_power", "pinverse",
        "qr", "slogdet", "svd", "cholesky_inverse",
    )
)  # fmt: skip

# Operations over as many of the last axes as a shape among their arguments has.
OVER_LAST = frozenset(
    {*variants("layer_norm", "native_layer_norm", "rms_norm"), functional.layer_norm,
     functional.rms_norm}
)  # fmt: skip

# Losses of rows, with the axis along which a row lies; of sequences, with those of their steps and
# classes.
ROW_LOSSES: dict[Any, int | tuple[int, ...]] = {
    getattr(owner, name): axis
    for axis, names in (
        (1, ("cross_entropy", "nll_loss", "multi_margin_loss", "multilabel_margin_loss")),
        (-1, ("multilabel_soft_margin_loss", "cosine_embedding_loss", "triplet_margin_loss")),
        ((0, -1), ("ctc_loss",)),
    )
    for name in names
    for owner in (torch, functional)
    if hasattr(owner, name)
}

ATTENTION = functional.scaled_dot_product_attention

# Operations that broadcast two operands against each other first, and run over their last axis
# unless they are told another.
OF_TWO_ROWS = (
    functional.pairwise_distance, torch.linalg.vecdot, torch.linalg.cross, torch.trapezoid,
    torch.trapz, torch.cumulative_trapezoid,
)  # fmt: skip
OF_TWO = frozenset([*OF_TWO_ROWS, functional.cosine_similarity, *variants("cross")])

QUANTILES = frozenset(variants("quantile", "nanquantile"))

# All operations that may run over the example axis, with the position of the axes among their
# arguments and their default; None for all axes.
OVER_AXES: dict[Any, tuple[int, int | tuple[int, ...] | None]] = {
    **dict.fromkeys(
        [
            *IMPLICIT, *OVER_LAST, ATTENTION, torch.special.softmax, torch.special.log_softmax,
            *variants(
                "softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin",
                "nanmedian",
            ),
        ],
        (1, None),
    ),
    **dict.fromkeys(variants("mode"), (1, -1)),
    **dict.fromkeys([*variants("cross"), *QUANTILES], (2, None)),
    **dict.fromkeys([functional.normalize, functional.cosine_similarity], (2, 1)),
    **dict.fromkeys(variants("diff", "kthvalue"), (2, -1)),
    torch.linalg.matrix_norm: (2, (-2, -1)),
    torch.gradient: (KEYWORD, None),
    **dict.fromkeys([*OF_TWO_ROWS, *variants("stft")], (KEYWORD, -1)),
    **dict.fromkeys([*variants("istft"), *OVER_MATRICES], (KEYWORD, (-2, -1))),
    **{
        getattr(torch.fft, f"{kind}{axes}"): (2, default)
        for axes, default in (("", -1), ("2", (-2, -1)), ("n", None))
        for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
    },
    **{function: (position, None) for function, position in REDUCES.items()},
    **{function: (KEYWORD, axis) for function, axis in ROW_LOSSES.items()},
}  # fmt: skip


def runs_over(func, args, kwargs, axis: int) -> bool:
    """Whether an operation of ``OVER_AXES`` on args[0] runs over this axis."""
    dims = args[0].dim()
    if func is ATTENTION:
        return axis >= dims - 2
    position, default = OVER_AXES[func]
    if func in OVER_LAST:
        return axis >= dims - len(argument_of(args, kwargs, position, "normalized_shape"))
    dim = argument_of(args, kwargs, position, "dim", default)
    if dim is None and func in IMPLICIT:
        return axis == (0 if dims in (0, 1, 3) else 1)
    if dim is None or (func in ROW_LOSSES and dims == 1):
        return True  # over all axes, or the only one
    over = dim if isinstance(dim, (tuple, list)) else (dim,)
    return not over or axis in over or axis - dims in over
