"""Convolutions and transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from gradstats.capture.following._examples import Examples
from gradstats.capture.operations._operations import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import first_node, node_of, nodes_of, value_of
from gradstats.capture.rules._common import (
    are_of_one,
    as_data,
    autocast_dtype,
    cast_for_autocast,
    layered,
    locate,
)
from gradstats.capture.uses._convolution import ConvolutionFactors
from gradstats.capture.uses._decided import decide
from gradstats.capture.uses._grafted import Composed, watched
from gradstats.capture.uses._hooked import CONVOLVED, hooked
from gradstats.capture.uses._tap import tap
from gradstats.capture.uses._together import is_small

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def convolution(
    dims,
    tracker: Context,
    func,
    input,
    weight,
    bias=None,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
):
    """Patches(x, g) for the weight, Vector(Σ_t g) for the bias."""
    stride, dilation = _per_axis(stride, dims), _per_axis(dilation, dims)
    if padding == "same":
        # The stride is 1 here. If the total is odd, PyTorch pads one more at the end. Doing that
        # first leaves a convolution with the same padding on both sides.
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(t % 2 for t in total):
            extra = [amount for t in reversed(total) for amount in (0, t % 2)]
            padded = functional.pad(input, extra)
            tracker.marks.place_like(padded, input)
            input = padded
        padding = tuple(t // 2 for t in total)
    elif padding == "valid":
        padding = 0
    call = (stride, _per_axis(padding, dims), dilation, False, (0,) * dims, groups)
    return _convolution(tracker, func, dims, input, weight, bias, call)


def transposed_convolution(
    dims,
    tracker: Context,
    func,
    input,
    weight,
    bias=None,
    stride=1,
    padding=0,
    output_padding=0,
    groups=1,
    dilation=1,
):
    """The factor of a convolution with input and output gradient exchanged."""
    call = (
        _per_axis(stride, dims),
        _per_axis(padding, dims),
        _per_axis(dilation, dims),
        True,
        _per_axis(output_padding, dims),
        groups,
    )
    return _convolution(tracker, func, dims, input, weight, bias, call)


def _convolution(tracker: Context, func, dims, input, weight, bias, call):
    nodes = nodes_of((weight, bias))
    if input.dim() != dims + 2:
        shape = tuple(input.shape)
        refuse(
            func,
            first_node(input, weight, bias),
            f"of an unbatched input of shape {shape} has no rule",
            "Give the layer all examples together (torch.stack), or say whose each input is: "
            "gs.assign_rows(x, torch.full((len(x),), i)) for that of example i.",
        )
    marks, batch = tracker.marks, tracker.batch_size
    if call[-1] % batch == 0:
        folded = Examples(batch, 1, input.shape[1] // batch)
        of_each = marks.is_of_data(weight) and not marks.is_of_data(input)
        if of_each or (len(input) == 1 < batch and marks.layout_of(input) == folded):
            return _in_groups(tracker, func, input, weight, bias, call)
    if node_of(input) is not None:
        refuse(func, first_node(input), "with a tracked input and data as its weight has no rule")
    if tracker.marks.is_trained(weight) and not are_of_one(tracker, (input, weight)):
        apart = Composed(partial(_bias_apart, func))
        return apart(tracker, func, input, weight, bias, **_options(call))
    examples = locate(tracker, func, nodes[0], input, axis=0, folds=True)
    if examples.segments is not None or (examples.fold != 1 and dims == 3):
        if call == (call[0], (0,) * dims, (1,) * dims, False, (0,) * dims, 1):
            if input.shape[2:] == weight.shape[2:]:
                return Composed(as_product)(tracker, func, input, weight, bias)
    settings, of_weight, of_bias = tracker.settings, node_of(weight), node_of(bias)
    data = tracker.marks.is_trained(weight), tracker.marks.is_trained(bias)
    layer = ConvolutionFactors(
        of_weight is not None, of_bias is not None, examples, tuple(weight.shape), data, call
    )
    outputs = weight.shape[1] * call[-1] * math.prod(call[0]) if call[3] else weight.shape[0]
    if is_small(settings, input, input.shape[1], outputs):
        result = hooked(tracker, input, (weight, bias), examples, CONVOLVED, layer, layer.forward)
        if result is not None:
            return result
    autocast = autocast_dtype(input) is not None
    if settings.exact:
        x, operands = cast_for_autocast(tracker, input), [value_of(weight), value_of(bias)]
        result = layer.forward(x, *(layer.cast(x, operands) if autocast else operands))
        return tap(nodes, result, layer, x)
    return decide(tracker, layered, input, (weight, bias), examples, layer, autocast)


def _in_groups(tracker: Context, func, input, weight, bias, call):
    """A convolution of examples folded into channels, with groups of channels for each example.

    A tracked kernel that was repeated for the batch has a slice for each example. So does a tracked
    input, such as the constant that a generator starts from.
    """

    def sliced(item, axis=0):
        node = node_of(item)
        if node is None:
            return item
        examples = Examples(tracker.batch_size, axis, item.shape[axis] // tracker.batch_size)
        return as_data(tracker, func, node, item, examples)

    def convolve(data):
        return func(sliced(data, 1), sliced(weight), sliced(bias), **_options(call))

    # Data convolved with data, which the mode follows.
    return watched(tracker, convolve, input)


def _bias_apart(func, input: Tensor, weight: Tensor, bias: Tensor, **options) -> Tensor:
    """The layer as a convolution and a sum, for kernels that were computed from data."""
    result = func(input, weight, **options)
    return result + bias.view(-1, *(1 for _ in weight.shape[2:])).to(result.dtype)


def _options(call) -> dict[str, Any]:
    """Return the options of a convolution as its function takes them."""
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    options = dict(zip(names, call, strict=True))
    if not options.pop("transposed"):
        del options["output_padding"]
    return options


def as_product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A convolution of inputs as large as the kernel: a product of each with the weight."""
    result = functional.linear(input.flatten(1), weight.flatten(1), bias)
    return result.reshape(*result.shape, *(1 for _ in weight.shape[2:]))


def _per_axis(value, dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)


RULES = {
    func: partial(transposed_convolution if func in TRANSPOSED_CONVOLUTIONS else convolution, dims)
    for func, dims in CONVOLUTIONS.items()
}
