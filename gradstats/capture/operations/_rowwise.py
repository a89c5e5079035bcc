"""PyTorch functions that keep the rows of their operands apart.

An operation that is listed neither here nor in ``_operations``, ``_reductions`` or ``_reindexed``
may move or mix rows, whatever the sizes of its result: its layout is unknown.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Operators that PyTorch marks as pointwise though they reduce, if given one tensor or always.
EXTREMES = frozenset({"max", "min", "equal"})

# Functions that compute element by element but that PyTorch does not mark as pointwise: aliases and
# compositions of marked operators, and conversions.
UNMARKED = frozenset(
    {
        "absolute", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh",
        "negative", "fix", "floor_divide", "floordiv", "mod", "divide", "multiply", "subtract",
        "greater", "greater_equal", "less", "less_equal", "not_equal", "isclose", "complex",
        "polar", "tril", "triu", "conj", "resolve_conj", "resolve_neg", "real", "imag",
        "view_as_real", "view_as_complex", "contiguous", "detach", "data", "as_subclass", "type",
        "float", "double", "half", "bfloat16", "cfloat", "cdouble", "chalf", "cpu", "cuda", "xpu",
        "pin_memory", "requires_grad_", "dropout", "alpha_dropout", "feature_dropout",
        "feature_alpha_dropout", "native_dropout", "dropout1d", "dropout2d", "dropout3d",
        "softsign", "tanhshrink", "logsigmoid", "hardswish", "fake_quantize_per_tensor_affine",
        "fake_quantize_per_channel_affine", "fused_moving_avg_obs_fake_quant",
        "_autocast_to_reduced_precision", "_autocast_to_full_precision",
        "binary_cross_entropy_with_logits", "poisson_nll_loss", "kl_div", "hinge_embedding_loss",
        "margin_ranking_loss", "soft_margin_loss", "_standard_gamma",
        "leaky_relu",  # which PyTorch 2.11 leaves unmarked
    }
)  # fmt: skip

# The same, computed from the first operand alone whatever other tensors they take.
OF_THE_FIRST = frozenset({"to", "type_as", "bernoulli", "normal"})

# In-place methods that fill a tensor without moving its values from place to place.
FILLS = frozenset(
    {
        "copy", "fill", "zero", "fill_diagonal", "random", "uniform", "exponential", "geometric",
        "cauchy", "log_normal", "apply", "map", "map2", "and", "or",
    }
)  # fmt: skip

# The overloads of PyTorch's own operators, by name. The functions below read tags and schemas from
# the dispatcher: creating the objects of torch.ops takes ten times as long.
OVERLOADS: dict[str, list[str]] = {}
for _name in torch._C._dispatch_get_all_op_names():
    if _name.startswith("aten::"):
        _operator, _, _overload = _name.partition(".")
        OVERLOADS.setdefault(_operator, []).append(_overload)


def _overloads(*names: str) -> list[tuple[str, str]]:
    """Return the (operator, overload) pairs of all PyTorch operators with one of these names."""
    operators = [f"aten::{name}" for name in names]
    return [(operator, each) for operator in operators for each in OVERLOADS.get(operator, ())]


def _is_marked(overloads: list[tuple[str, str]]) -> bool:
    found = (torch._C._get_operation_overload(*overload) for overload in overloads)
    return any(torch.Tag.pointwise in tags for _, _, tags in found)


def _has_several(overload: tuple[str, str]) -> bool:
    """Whether an overload computes from more than one tensor."""
    arguments = torch._C._get_schema(*overload).arguments
    return sum("Tensor" in str(item.type) for item in arguments if not item.is_out) > 1


def _elementwise() -> tuple[frozenset[Any], frozenset[Any]]:
    """Return the functions that compute element by element from one tensor, and from several."""
    found: tuple[list[Any], list[Any]] = [], []
    for owner in (torch, Tensor, functional, torch.special):
        for name in dir(owner):
            base = name[2:-2] if name.startswith("__") else name
            special = owner is torch.special
            overloads = _overloads(*({f"special_{name}"} if special else {name, base}))
            listed = base in UNMARKED or base in OF_THE_FIRST
            if special:
                # PyTorch does not mark the aliases in torch.special.
                listed = bool(overloads) and name not in ("softmax", "log_softmax", "logsumexp")
            if name in EXTREMES or not (listed or _is_marked(overloads)):
                continue
            function = getattr(owner, name)
            if not callable(function):
                function = getattr(function, "__get__", None)  # of a property
            several = base not in OF_THE_FIRST and any(map(_has_several, overloads))
            found[several].append(function)
    return frozenset(found[0]) - {None}, frozenset(found[1]) - {None}


POINTWISE, POINTWISE_OF_SEVERAL = _elementwise()


def is_elementwise_in_place(method: Any) -> bool:
    """Whether an in-place method changes each element separately."""
    name = method.__name__
    base = name[3:-2] if name.startswith("__i") else name[:-1]
    listed = base in FILLS or base in UNMARKED or base in OF_THE_FIRST
    return listed or _is_marked(_overloads(name, base, f"__{base}__"))
