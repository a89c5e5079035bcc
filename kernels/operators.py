"""The kernels as operators of torch, `torch.ops.gradstats.<name>`, for eager and compiled code.

Importing this module registers them. On CUDA they launch the Triton kernels, which are imported at
the first call; elsewhere they compute the same in plain torch. This module's functions of the same
names call the launchers directly where torch has nothing to add (`_calls.py`); unlike operators
they may return tensors that share memory. Operators have no autograd formula: statistics are
computed in the backward pass, beside the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from gradstats.kernels import _calls, _config, _reference, _reference_norms
from gradstats.kernels._reference import result_dtype
from torch import Tensor

SEGMENTS = "Tensor? cu_seqlens=None, SymInt? max_seqlen=None"
TWO_SEGMENTS = (
    "Tensor? cu_seqlens1=None, Tensor? cu_seqlens2=None, "
    "SymInt? max_seqlen1=None, SymInt? max_seqlen2=None"
)
TWO_FACTORS = f"Tensor a1, Tensor g1, Tensor a2, Tensor g2, {TWO_SEGMENTS}"
TWO_ROWS = f"Tensor ids1, Tensor g1, Tensor ids2, Tensor g2, {TWO_SEGMENTS}"
GEOMETRY = "SymInt[] kernel, SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"
ROUNDING = "float adding, float products, float cut_off, float tolerance"
WORKSPACE = f"SymInt workspace={_config.WORKSPACE}"
TWO_IMAGES = "Tensor x1, Tensor g1, Tensor x2, Tensor g2"

# Implementations for CPUs, by the operator's name.
ON_CPU = _reference.IMPLEMENTATIONS | _reference_norms.IMPLEMENTATIONS


@dataclass(frozen=True)
class Operator:
    """The declaration of one operator.

    Attributes:
        schema: its arguments and results as torch writes them.
        module: of this package, with the launcher of the operator's name.
        leading: how many arguments the launcher takes by position: the operands.
        outputs: returns the output or outputs, without data, for given arguments.
    """

    schema: str
    module: str
    leading: int
    outputs: Callable[[Arguments], Tensor | tuple[Tensor, ...]]


class Arguments(dict):
    """The arguments of one call by name, None where one was left out."""

    def __init__(self, name: str, positional: tuple, named: dict):
        names = _argument_names(name)
        super().__init__(dict.fromkeys(names) | _defaults(name))
        self.update(zip(names, positional, strict=False), **named)

    @property
    def operand(self) -> Tensor:
        """The first operand that holds no ids: results have its precision."""
        tensors = (value for value in self.values() if isinstance(value, Tensor))
        return next(tensor for tensor in tensors if tensor.is_floating_point())

    def batch(self, side: int = 1) -> int:
        """Number of examples of the first or the second factor."""
        bounds = self.get(f"cu_seqlens{side}", self.get("cu_seqlens"))
        return self._first_of(side).shape[0] if bounds is None else bounds.shape[0] - 1

    def _first_of(self, side: int) -> Tensor:
        own = (value for name, value in self.items() if name.endswith(str(side)))
        return next((each for each in own if isinstance(each, Tensor)), self.operand)


def _empty(arguments: Arguments, *shape: int) -> Tensor:
    operand = arguments.operand
    return operand.new_empty(shape, dtype=result_dtype(operand))


def _per_example(arguments: Arguments) -> Tensor:
    return arguments.operand.new_empty((arguments.batch(),), dtype=torch.float64)


def _of_groups(arguments: Arguments) -> Tensor:
    factors = arguments.batch()
    return arguments.operand.new_empty((factors // arguments["groups"],), dtype=torch.float64)


def _per_channel(arguments: Arguments) -> Tensor:
    return _empty(arguments, arguments.batch(), arguments.operand.shape[-1])


def _per_pair(arguments: Arguments) -> Tensor:
    return _empty(arguments, arguments.batch(1), arguments.batch(2))


def _linear_gradient(arguments: Arguments) -> Tensor:
    a, g = arguments["a"], arguments["g"]
    return a.new_empty((g.shape[-1], a.shape[-1]), dtype=arguments["gradient_dtype"] or a.dtype)


def _convolution_gradient(arguments: Arguments) -> Tensor:
    x, g = arguments["x"], arguments["g"]
    shape = (g.shape[1], x.shape[1] // arguments["groups"], *arguments["kernel"])
    return x.new_empty(shape, dtype=arguments["gradient_dtype"] or x.dtype)


def _of_backward(arguments: Arguments) -> tuple[Tensor, ...]:
    like = arguments["g"] if arguments["x"] is None else arguments["x"]
    wanted = arguments.get("input_gradient", True)
    gradient = torch.empty_like(like) if wanted else like.new_empty((0,))
    kinds = arguments["x"] is not None, arguments.get("shift", True)  # scale, shift
    dtype = arguments["gradient_dtype"] or result_dtype(like)
    features = like.shape[-1] if arguments["sums"] else 0
    sums = (like.new_empty((features if kind else 0,), dtype=dtype) for kind in kinds)
    batch = arguments.batch()
    squares = (like.new_empty((batch if kind else 0,), dtype=torch.float64) for kind in kinds)
    return gradient, *sums, *squares


def _several(*outputs: Callable[[Arguments], Tensor]) -> Callable[[Arguments], tuple[Tensor, ...]]:
    return lambda arguments: tuple(output(arguments) for output in outputs)


_two_norms = _several(_per_example, _per_example)
_two_sums = _several(_per_channel, _per_channel)

OPERATORS = {
    "rank_one_sqnorm": Operator("(Tensor a, Tensor g) -> Tensor", "rank_one", 2, _per_example),
    "vector_sqnorm": Operator(f"(Tensor v, {SEGMENTS}) -> Tensor", "vector", 1, _per_example),
    "vector_sum": Operator(f"(Tensor v, {SEGMENTS}) -> Tensor", "vector", 1, _per_channel),
    "gram_sqnorm": Operator(
        f"(Tensor a, Tensor g, SymInt groups, {ROUNDING}, {SEGMENTS}) -> (Tensor, Tensor)",
        "gram",
        7,
        _several(_of_groups, _of_groups),
    ),
    "direct_sqnorm": Operator(
        f"(Tensor a, Tensor g, {SEGMENTS}) -> Tensor", "direct", 2, _per_example
    ),
    "direct_inner": Operator(f"({TWO_FACTORS}) -> Tensor", "direct", 4, _per_example),
    "diagonal_gram": Operator(f"({TWO_FACTORS}) -> (Tensor, Tensor)", "diagonal", 4, _two_norms),
    "weight_gradient_sqnorm": Operator(
        f"(Tensor a, Tensor g, {SEGMENTS}, ScalarType? gradient_dtype=None,"
        " bool? descriptors=None) -> (Tensor, Tensor)",
        "weight_gradient",
        2,
        _several(_linear_gradient, _per_example),
    ),
    "pairwise_gram": Operator(f"({TWO_FACTORS}) -> Tensor", "pairwise", 4, _per_pair),
    "pairwise_direct": Operator(
        f"({TWO_FACTORS}, {WORKSPACE}) -> Tensor", "pairwise_direct", 4, _per_pair
    ),
    "direction_inner": Operator(
        f"(Tensor a, Tensor g, Tensor direction, {SEGMENTS}) -> Tensor",
        "direction",
        3,
        _per_example,
    ),
    "scale_sum": Operator(
        f"(Tensor x, Tensor g, Tensor? mean=None, Tensor? rstd=None, {SEGMENTS})"
        " -> (Tensor, Tensor)",
        "scale_gradients",
        2,
        _two_sums,
    ),
    "scale_backward": Operator(
        "(Tensor g, Tensor? x, Tensor? weight=None, Tensor? mean=None, Tensor? rstd=None,"
        f" bool shift=True, bool input_gradient=True, bool sums=True, {SEGMENTS},"
        " ScalarType? gradient_dtype=None)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        "scale_backward",
        2,
        _of_backward,
    ),
    "scale_direction": Operator(
        f"(Tensor g, Tensor? x, Tensor direction, {SEGMENTS}) -> Tensor",
        "scale_gradients",
        3,
        _per_example,
    ),
    "group_norm_sqnorm": Operator(
        "(Tensor x, Tensor g, SymInt groups, float eps) -> (Tensor, Tensor)",
        "group_norm",
        4,
        _two_norms,
    ),
    "group_norm_sum": Operator(
        "(Tensor x, Tensor g, SymInt groups, float eps) -> (Tensor, Tensor)",
        "group_norm",
        4,
        _two_sums,
    ),
    "layer_norm_sqnorm": Operator(
        f"(Tensor x, Tensor g, float eps, bool rms=False, {SEGMENTS}) -> (Tensor, Tensor)",
        "layer_norm",
        3,
        _two_norms,
    ),
    "layer_norm_sum": Operator(
        f"(Tensor x, Tensor g, float eps, bool rms=False, {SEGMENTS}) -> (Tensor, Tensor)",
        "layer_norm",
        3,
        _two_sums,
    ),
    "layer_norm_backward": Operator(
        "(Tensor x, Tensor g, Tensor? weight, float eps, bool rms=False, bool sums=True,"
        f" {SEGMENTS}, ScalarType? gradient_dtype=None)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        "layer_norm",
        4,
        _of_backward,
    ),
    "group_norm_backward": Operator(
        "(Tensor x, Tensor g, Tensor? weight, SymInt groups, float eps, bool sums=True,"
        " ScalarType? gradient_dtype=None)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        "group_norm",
        5,
        _of_backward,
    ),
    "rows_sqnorm": Operator(
        f"(Tensor ids, Tensor g, {SEGMENTS}) -> Tensor", "rows", 2, _per_example
    ),
    "rows_inner": Operator(f"({TWO_ROWS}) -> Tensor", "rows_inner", 4, _per_example),
    "pairwise_rows": Operator(f"({TWO_ROWS}) -> Tensor", "rows_pairs", 4, _per_pair),
    "rows_direction": Operator(
        f"(Tensor ids, Tensor g, Tensor direction, {SEGMENTS}) -> Tensor",
        "rows_direction",
        3,
        _per_example,
    ),
    "tied_inner": Operator(
        f"(Tensor a, Tensor g, Tensor ids, Tensor rows, {TWO_SEGMENTS}) -> Tensor",
        "tied",
        4,
        _per_example,
    ),
    "convolution_sqnorm": Operator(
        f"(Tensor x, Tensor g, {GEOMETRY}) -> Tensor", "convolution", 7, _per_example
    ),
    "convolution_gram_sqnorm": Operator(
        f"(Tensor x, Tensor g, {GEOMETRY}, {ROUNDING}) -> (Tensor, Tensor)",
        "convolution_gram",
        11,
        _two_norms,
    ),
    "convolution_weight_gradient_sqnorm": Operator(
        f"(Tensor x, Tensor g, {GEOMETRY}, ScalarType? gradient_dtype=None) -> (Tensor, Tensor)",
        "convolution_weight_gradient",
        7,
        _several(_convolution_gradient, _per_example),
    ),
    "convolution_inner": Operator(
        f"({TWO_IMAGES}, {GEOMETRY}) -> Tensor", "convolution", 9, _per_example
    ),
    "pairwise_convolution": Operator(
        f"({TWO_IMAGES}, {GEOMETRY}, {WORKSPACE}) -> Tensor", "convolution_pairs", 9, _per_pair
    ),
    "convolution_inner_gram": Operator(
        f"({TWO_IMAGES}, {GEOMETRY}) -> (Tensor, Tensor)", "convolution_pair_gram", 9, _two_norms
    ),
    "pairwise_convolution_gram": Operator(
        f"({TWO_IMAGES}, {GEOMETRY}) -> Tensor", "convolution_pair_gram", 9, _per_pair
    ),
    "convolution_direction": Operator(
        f"(Tensor x, Tensor g, Tensor direction, {GEOMETRY}) -> Tensor",
        "convolution",
        8,
        _per_example,
    ),
}


def _on_cpu(name: str) -> Callable:
    """The CPU implementation of an operator."""
    return lambda *args, **kwargs: ON_CPU[name](Arguments(name, args, kwargs))


def _launch(name: str) -> Callable:
    """The CUDA implementation of an operator."""
    return _calls.parted(_launcher(name))


def _launcher(name: str) -> Callable:
    operator = OPERATORS[name]
    names = functools.partial(_argument_names, name)
    return _calls.launcher(name, operator.module, operator.leading, names)


@functools.cache
def _argument_names(name: str) -> list[str]:
    schema = getattr(torch.ops.gradstats, name).default._schema
    return [argument.name for argument in schema.arguments]


@functools.cache
def _defaults(name: str) -> dict[str, Any]:
    schema = getattr(torch.ops.gradstats, name).default._schema
    return {each.name: each.default_value for each in schema.arguments if each.has_default_value()}


def _fake(name: str) -> Callable:
    """The operator's results for tensors without data."""
    return lambda *args, **kwargs: OPERATORS[name].outputs(Arguments(name, args, kwargs))


if TYPE_CHECKING:
    # the loop below binds every operator by its name

    def __getattr__(name: str) -> Any: ...


for _name, _operator in OPERATORS.items():
    torch.library.define(f"gradstats::{_name}", _operator.schema)
    torch.library.impl(f"gradstats::{_name}", "CUDA")(_launch(_name))
    torch.library.impl(f"gradstats::{_name}", "CPU")(_on_cpu(_name))
    torch.library.register_fake(f"gradstats::{_name}")(_fake(_name))
    globals()[_name] = _calls.at_once(getattr(torch.ops.gradstats, _name).default, _launcher(_name))
