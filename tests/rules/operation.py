"""Models of a single operation, checked with every choice of what is trained."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradstats as gs
from tests.oracle import check_model, check_products, oracle_gradients

IN_TURN = [
    {"size": size, "fusing": (fused,)}
    for size, fused in (("large", True), ("small", False), ("small", True), ("large", False))
]


class Operation(nn.Module):
    """``function(model, *data)`` with parameters as attributes.

    Attributes:
        upstream: a scalar that floating-point data are multiplied by first, so that the operation's
            gradient with respect to its data is checked too; None for data that need no gradient.
    """

    def __init__(self, function: Callable[..., Tensor], parameters: dict[str, Any], upstream: bool):
        super().__init__()
        self.function = function
        self.upstream = nn.Parameter(torch.tensor(1.25).double()) if upstream else None
        for name, value in parameters.items():
            if isinstance(value, nn.Module):
                value = value.double()
            elif value is not None:
                value = value if isinstance(value, Tensor) else torch.randn(value)
                value = nn.Parameter(value if value.is_complex() else value.double())
            setattr(self, name, value)

    def forward(self, *data):
        if self.upstream is not None:
            data = [x * self.upstream if x.is_floating_point() else x for x in data]
        return self.function(self, *data)


def uneven_loss(model: nn.Module, batch) -> Tensor:
    """Return losses whose gradient differs from output to output."""
    out = model(*batch)
    out = out.reshape(out.shape[0], -1)
    slope = torch.linspace(0.5, 1.5, out.shape[1], dtype=out.dtype)
    return (out * slope + out.square() / 3).sum(1)


def check_operation(
    function: Callable[..., Tensor],
    parameters: dict[str, Any],
    *data: Tensor,
    loss_fn: Callable[[nn.Module, Any], Tensor] = uneven_loss,
    gradient_of_data: bool = True,
    **options: Any,
) -> None:
    """Compare with the oracle: all trained, each frozen in turn, with and without upstream.

    Of more than four parameters, every fourth is frozen at once, beginning with another each time.
    With upstream the data are taken for large ones, without it for small ones; where parameters are
    frozen for either in turn, and training gradients are fused or not in turn.
    Inner products are compared with all trained, without upstream.

    Args:
        function: called as function(model, *data).
        parameters: name → shape, tensor or module.
        data: batch; floating-point tensors in float64.
        loss_fn: how a loss is made of the result.
        gradient_of_data: whether floating-point data may have a gradient.
        options: passed on to gradstats.
    """
    floating = gradient_of_data and any(x.is_floating_point() for x in data)
    if floating:
        check_model(Operation(function, parameters, True), data, loss_fn, size="large", **options)

    model = Operation(function, parameters, upstream=False)
    # Beside training a small operation is PyTorch's own, fused or not.
    whole: dict[str, Any] = {"fusing": (True,)} if floating else {}
    gradients = oracle_gradients(model, data, loss_fn)
    check_model(model, data, loss_fn, gradients=gradients, **(whole | options))
    products = {k: v for k, v in options.items() if k not in ("gradient_rtol", "fusing")}
    check_products(model, data, loss_fn, gradients=gradients, **products)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    step = min(len(trained), 4)
    in_turn = cycle(IN_TURN)
    for first in range(step if step > 1 else 0):
        for index, parameter in enumerate(trained):
            parameter.requires_grad_(index % step != first)
        check_model(model, data, loss_fn, gradients=gradients, **(next(in_turn) | options))
    for parameter in trained:
        parameter.requires_grad_(True)  # a module may be given to several calls


def check_refused(
    function: Callable[..., Tensor],
    parameters: dict[str, Any],
    *data: Tensor,
    error: type[gs.GradStatsError] = gs.UnsupportedOperationError,
    match: str,
    **options: Any,
) -> None:
    """Expect an error, and the model as it was."""
    model = Operation(function, parameters, upstream=False)
    with pytest.raises(error, match=match):
        gs.per_example_norms(model, data, uneven_loss, **options)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def normal(*shape: int) -> Tensor:
    """Return data in float64."""
    return torch.randn(shape, dtype=torch.float64)
