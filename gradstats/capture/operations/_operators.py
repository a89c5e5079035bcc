"""Operators of ``torch.ops``, which exported programs call, as the functions that users call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Types of the operators of ``torch.ops``.
OPERATORS = frozenset({torch._ops.OpOverload, torch._ops.OpOverloadPacket})

# Where to look for the functions generated from the same definitions as the operators.
OWNERS = (
    torch,
    *(getattr(torch._C, name) for name in ("_nn", "_linalg", "_fft", "_special")),
    Tensor,
)

# Python functions that take the same arguments as the operators of the same names.
ALIKE = {
    function.__name__: function
    for function in (
        torch.split, functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d,
        functional.adaptive_avg_pool3d, functional.glu, functional.hardsigmoid,
        functional.hardswish, functional.hardtanh, functional.leaky_relu, functional.mish,
        functional.relu6, functional.silu,
    )
}  # fmt: skip

# Operators that take other arguments than the functions of the same names, or that round quotients
# of integers.
UNLIKE = frozenset(
    f"prims::{name}" for name in ("transpose", "svd", "var", "prod", "normal", "div")
)


def is_own_operator(func) -> bool:
    """Whether an operator of ``torch.ops`` is one of PyTorch's own, not a custom one."""
    return _full_name(func).startswith(("aten::", "prims::"))


def exchanges(func) -> bool:
    """Whether an operator of ``torch.ops`` sends tensors to other processes."""
    return _full_name(func).startswith(("c10d::", "_c10d_functional"))


def _full_name(func) -> str:
    return str(getattr(func, "_qualified_op_name", None) or getattr(func, "_name", ""))


def as_function(func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Convert a call of an operator to one of a known function; unchanged if there is none."""
    name = _name(func)
    if name in OTHERWISE and not kwargs:
        return OTHERWISE[name](*args)
    if name == "einsum":
        return torch.einsum, args, {}  # without the order of contractions, which it finds itself
    return _function(name) or func, args, kwargs


@cache
def _name(operator) -> str:
    """Return the name of one of PyTorch's own operators, without an overload's.

    "" for other operators, and for those of ``UNLIKE``.
    """
    known = is_own_operator(operator) and _full_name(operator) not in UNLIKE
    return operator.__name__.partition(".")[0] if known else ""


@cache
def _function(name: str) -> Any:
    if name in OTHERWISE or name in ALIKE:
        return ALIKE.get(name)
    found = (getattr(owner, name, None) for owner in OWNERS)
    kinds = BuiltinFunctionType, MethodDescriptorType
    return next((each for each in found if isinstance(each, kinds)), None)


def _embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    padding = padding_idx if padding_idx >= 0 else None
    named = {"padding_idx": padding, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    return functional.embedding, (indices, weight), named


def _norm(function):
    """Convert batch or instance normalisation."""

    def convert(x, weight, bias, mean, variance, of_input, momentum, eps, cudnn):
        return function, (x, mean, variance, weight, bias, of_input, momentum, eps), {}

    return convert


def _slice(x, dim=0, start=None, end=None, step=1):
    before = (slice(None),) * (dim % x.dim())
    return Tensor.__getitem__, (x, (*before, slice(start, end, step))), {}


def _index(x, indices):
    places = (slice(None) if index is None else index for index in indices)
    return Tensor.__getitem__, (x, tuple(places)), {}


REDUCTIONS = "none", "mean", "sum"


def _cross_entropy(x, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0):
    _, operands, named = _nll_loss(x, target, weight, reduction, ignore_index)
    return functional.cross_entropy, operands, {**named, "label_smoothing": label_smoothing}


def _nll_loss(x, target, weight=None, reduction=1, ignore_index=-100):
    how = REDUCTIONS[reduction]
    named = {"weight": weight, "ignore_index": ignore_index, "reduction": how}
    return functional.nll_loss, (x, target), named


def _mse_loss(x, target, reduction=1):
    return functional.mse_loss, (x, target), {"reduction": REDUCTIONS[reduction]}


# Operators whose function takes other arguments, with what converts these. Options of PyTorch's
# Python functions are passed by name, as modes see them.
OTHERWISE: dict[str, Callable[..., tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "cross_entropy_loss": _cross_entropy,
    "nll_loss": _nll_loss,
    "nll_loss_nd": _nll_loss,
    "mse_loss": _mse_loss,
    "embedding": _embedding,
    "batch_norm": _norm(functional.batch_norm),
    "instance_norm": _norm(functional.instance_norm),
    "slice": _slice,
    "index": _index,
    "mT": lambda x: (torch.transpose, (x, -2, -1), {}),
    "to": lambda x, *form: (Tensor.to, (x, *form), {}),
}
