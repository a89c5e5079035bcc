"""The oracle: float64, one example at a time, plain autograd. Everything is compared with this."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradstats as gs
from gradstats.capture.uses import _together
from gradstats.statistics._kept import keep, products


def to_float64(batch):
    """Return a batch with its floating-point tensors in float64."""
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: to_float64(item) for key, item in batch.items()}
    return tuple(to_float64(item) for item in batch)


def oracle_gradients(
    model: nn.Module, batch: Any, loss_fn: Callable[[nn.Module, Any], Tensor]
) -> dict[str, Tensor]:
    """Return the per-example gradients (B, *shape) of every parameter that requires grad.

    Those of complex parameters as real numbers, (B, *shape, 2).
    """
    model = copy.deepcopy(model).double()
    return gradients_of(model, loss_fn(model, to_float64(batch)))


def gradients_of(model: nn.Module, losses: Tensor) -> dict[str, Tensor]:
    """Return the same of the losses (B,) of a model as it is, whose forward has run."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    for loss in losses:
        gradients = torch.autograd.grad(
            loss, list(named.values()), retain_graph=True, allow_unused=True
        )
        for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
            gradient = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
            gradient = gradient.resolve_conj()
            rows[name].append(torch.view_as_real(gradient) if gradient.is_complex() else gradient)
    return {name: torch.stack(gradients) for name, gradients in rows.items()}


def oracle_sqnorms(model, batch, loss_fn) -> dict[str, Tensor]:
    """Return the squared norms (B,) of every parameter's per-example gradients, float64."""
    return sqnorms_of(oracle_gradients(model, batch, loss_fn))


def sqnorms_of(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the squared norms (B,) of per-example gradients, by parameter, float64."""
    return {
        name: gradient.reshape(len(gradient), -1).double().square().sum(1)
        for name, gradient in gradients.items()
    }


def assert_sqnorms(got: gs.GradientNorms, expected: dict[str, Tensor], rtol: float) -> None:
    """Compare every parameter's squared norms and their sum with the oracle's.

    A parameter's error counts relative to its own squared norm, plus a millionth of the whole: a
    gradient that is zero but for rounding has no correct digits.
    """
    total = sum(expected.values())
    assert set(got.by_parameter) == set(expected)
    for name, value in expected.items():
        actual = got.by_parameter[name].double()
        allowed = rtol * (value + 1e-6 * total)
        assert bool(((actual - value).abs() <= allowed).all()), (
            f"{name}: got {actual.tolist()}, expected {value.tolist()}"
        )
    torch.testing.assert_close(got.sqnorm.double(), total, rtol=rtol, atol=0)


def are_right(
    norms: Callable[[], gs.GradientNorms],
    expected: dict[str, Tensor],
    name: str,
    rtol: float = 1e-8,
) -> bool:
    """Check what a call returns against the oracle; return False where it refuses instead."""
    try:
        got = norms()
    except gs.GradStatsError:
        return False
    try:
        assert_sqnorms(got, expected, rtol)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error
    return True


@contextmanager
def taken_for(size: str):
    """Have operations on a CPU treated as those on ``"small"`` or ``"large"`` data.

    Small ones are PyTorch's own, and wait for each other: here even a single one does.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_together, "SMALL", 0 if size == "large" else 2**30)
        patch.setattr(_together, "FEWEST", 1)
        yield


def check_model(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    rtol: float = 1e-9,
    gradient_rtol: float = 1e-12,
    fusing: tuple[bool, ...] = (True, False),
    size: str = "small",
    gradients: dict[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """Check norms alone, norms beside training (fused and not), and the training gradients.

    Args:
        model: in the dtype to test; tolerances default to float64's.
        batch, loss_fn: as for gs.per_example_norms.
        rtol: tolerance of squared norms.
        gradient_rtol: tolerance of ``param.grad`` with fusing, relative to all gradients' norm.
        fusing: which values of ``fused`` to check beside training.
        size: what the operations' data are taken for: ``"small"`` or ``"large"``.
        gradients: the oracle's, if they are known; they may be of parameters that are frozen now.
        options: passed on to both calls.
    """
    if gradients is None:
        gradients = oracle_gradients(model, batch, loss_fn)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    expected = sqnorms_of({name: gradients[name] for name in trained})
    with taken_for(size):
        _check_model(model, batch, loss_fn, expected, rtol, gradient_rtol, fusing, options)


def _check_model(model, batch, loss_fn, expected, rtol, gradient_rtol, fusing, options) -> None:
    state = snapshot(model)
    stats = gs.per_example_norms(model, batch, loss_fn, **options)
    assert_sqnorms(stats, expected, rtol)
    assert_unchanged(model, state)

    plain = copy.deepcopy(model)
    plain.zero_grad()
    losses = loss_fn(plain, batch)
    losses.mean().backward()
    torch.testing.assert_close(stats.loss, losses.detach(), rtol=rtol, atol=rtol)
    size = sum(p.grad.norm() ** 2 for p in plain.parameters() if p.grad is not None) ** 0.5
    for fused in fusing:
        model.zero_grad()
        with gs.track(model, batch_size=len(losses), fused=fused, **options) as tracker:
            tracker.backward(loss_fn(model, batch))
        assert_sqnorms(tracker.stats, expected, rtol)
        for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            if want.grad is None:
                assert got.grad is None or not got.grad.any(), name
            elif fused:
                assert (got.grad - want.grad).norm() <= gradient_rtol * size, name
            else:
                assert torch.equal(got.grad, want.grad), f"{name}: not bit-identical unfused"
    model.zero_grad()
    assert_unchanged(model, state)


def flat(gradients: dict[str, Tensor]) -> Tensor:
    """Return the oracle's per-example gradients as rows over all parameters, (B, d)."""
    return torch.cat([gradient.reshape(len(gradient), -1) for gradient in gradients.values()], 1)


def assert_products(got: Tensor, first: Tensor, second: Tensor, rtol: float) -> None:
    """Compare inner products of all pairs, or on the diagonal, with those of the oracle's rows.

    An inner product's error counts relative to the product of the two norms: of orthogonal
    gradients no digit can be right.
    """
    if got.dim() == 1:
        expected, size = (first * second).sum(1), first.norm(dim=1) * second.norm(dim=1)
    else:
        expected, size = first @ second.T, first.norm(dim=1)[:, None] * second.norm(dim=1)
    assert got.shape == expected.shape
    assert bool(((got.double() - expected).abs() <= rtol * size).all()), (
        f"got {got.tolist()}, expected {expected.tolist()}"
    )


def perturbed(model: nn.Module, size: float = 0.1) -> nn.Module:
    """Return a copy of a model with other weights, as another checkpoint has."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += size * noise.to(parameter)
    return other


def check_products(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    other: tuple[nn.Module, Any] | None = None,
    rtol: float = 1e-9,
    gradients: dict[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """Check inner products within a batch, with another checkpoint, and with directions.

    What is kept of the batch serves products with all examples and on the diagonal.

    Args:
        model, batch, loss_fn: as for gs.inner_products.
        other: another model and batch; by default the model with other weights, the same batch.
        rtol: tolerance relative to the product of the norms.
        gradients: the oracle's of the model and batch, if they are known.
        options: passed on to all calls.
    """
    state = snapshot(model)
    named = oracle_gradients(model, batch, loss_fn) if gradients is None else gradients
    rows = flat(named)
    mean = rows.mean(0, keepdim=True)
    stats = gs.per_example_norms(model, batch, loss_fn, gram=True, alignment=True, **options)
    assert_products(stats.gram, rows, rows, rtol)
    assert_products(stats.alignment[:, None], rows, mean, rtol)
    assert_products(stats.mean_sqnorm.view(1, 1), mean, mean, rtol)
    cosines = (rows @ mean[0]) / (rows.norm(dim=1) * mean.norm())
    torch.testing.assert_close(
        stats.cosine.double(), cosines, rtol=0, atol=10 * rtol, equal_nan=True
    )

    model_b, batch_b = other or (perturbed(model), batch)
    columns = flat(oracle_gradients(model_b, batch_b, loss_fn))
    kept = keep(model, batch, loss_fn, **options)
    for diagonal in (False, True) if len(rows) == len(columns) else (False,):
        (found,) = products(
            [kept], model_b, batch_b, loss_fn, diagonal=diagonal, consume=diagonal, **options
        )
        assert_products(found.values, rows, columns, rtol)

    generator = torch.Generator().manual_seed(2)
    parameters = dict(model.named_parameters())
    direction, numbers = {}, []
    for name, gradient in named.items():
        dtype = parameters[name].dtype
        value = torch.randn(gradient.shape[1:], generator=generator, dtype=dtype.to_real())
        value = value.to(gradient.device)
        direction[name] = torch.view_as_complex(value) if dtype.is_complex else value
        numbers.append(value.flatten())
    along = torch.cat(numbers)[None].double()
    got = gs.alignment(model, batch, loss_fn, direction, **options)
    assert_products(got[:, None], rows, along, rtol)
    assert_unchanged(model, state)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Return everything of a model that tracking must leave alone."""
    return {
        "parameters": {
            name: (
                (id(p), p.data_ptr()),
                type(p),
                p.requires_grad,
                dict(p.__dict__),
                p.detach().clone(),
                (p._version, _hooks_on(p)),
            )
            for name, p in model.named_parameters()
        },
        "buffers": {
            name: ((id(b), _address(b)), b.to_dense().clone()) for name, b in model.named_buffers()
        },
        "training": {name: m.training for name, m in model.named_modules()},
        "hooks": {
            name: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for name, m in model.named_modules()
        },
    }


def _hooks_on(parameter: Tensor) -> tuple[int, int]:
    """Return how many hooks a parameter has, of either kind."""
    kinds = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    first, second = (len(kind or ()) for kind in kinds)
    return first, second


def _address(tensor: Tensor) -> int:
    """Return where a tensor's numbers are; sparse ones have no place of their own."""
    return tensor.data_ptr() if tensor.layout == torch.strided else 0


def assert_unchanged(model: nn.Module, state: dict[str, Any]) -> None:
    """Raise unless the model is as the snapshot says and has no gradients."""
    now = snapshot(model)
    assert now["training"] == state["training"]
    assert now["hooks"] == state["hooks"]
    for name, (identity, kind, flag, attributes, value, rest) in state["parameters"].items():
        assert now["parameters"][name][:3] == (identity, kind, flag), name
        assert now["parameters"][name][3].keys() == attributes.keys(), name
        assert torch.equal(now["parameters"][name][4], value), name
        assert now["parameters"][name][5] == rest, name
    for name, (identity, value) in state["buffers"].items():
        assert now["buffers"][name][0] == identity, name
        assert torch.equal(now["buffers"][name][1], value), name
    assert all(p.grad is None for p in model.parameters())


def oracle_on_the_batch(model, batch, losses) -> dict[str, torch.Tensor]:
    """Squared norms of the gradient of each loss of the batch as a whole, which nothing divides."""
    return sqnorms_of(gradients_of(model, losses(model, batch)))
