"""Float64 references of scales and norm layers, by autograd, one example at a time."""

from __future__ import annotations

import torch
from torch.nn import functional

from tests.kernels.cases import random
from tests.kernels.reference import FLOAT32_EPS, assert_close, examples_of


def operands(case):
    """(x, g, cu_seqlens) of one shape out of a case's (a, g, cu_seqlens)."""
    x, _, bounds = case
    # features apart in one of the two, so that strides cannot be mixed up
    g = random((*x.shape[:-2], x.shape[-1], x.shape[-2]), x.dtype, x.device, 21).mT
    if bounds is not None:
        g[: bounds[0]] = float("nan")
        g[bounds[-1] :] = float("nan")
    return x, g, bounds


def _sums(rows_of_x, rows_of_g, normalise):
    """((scale, shift), (their sums of absolute terms)), each float64 (B, C)."""
    scales, shifts, absolute = [], [], []
    for example, (x, g) in enumerate(zip(rows_of_x, rows_of_g, strict=True)):
        x_hat = normalise(example, x)
        scales.append((x_hat * g).sum(0))
        shifts.append(g.sum(0))
        # where the mean is subtracted, x_hat rounds by eps of the mean over the deviation
        spread = x.std(correction=0) if x.numel() > 1 else 1.0
        rounded = x_hat.abs() + x.abs() / max(float(spread), 1e-3)
        absolute.append(((rounded * g.abs()).sum(0), g.abs().sum(0)))
    scale_terms, shift_terms = (torch.stack(terms) for terms in zip(*absolute, strict=True))
    return (torch.stack(scales), torch.stack(shifts)), (scale_terms, shift_terms)


def scale(x, g, bounds, mean=None, rstd=None):
    def normalise(example, rows):
        if mean is None:
            return rows
        return (rows - mean.double().cpu()) * rstd.double().cpu()

    return _sums(examples_of(x, bounds), examples_of(g, bounds), normalise)


def layer_norm(x, g, bounds, eps, rms):
    shape = x.shape[-1:]
    function = functional.rms_norm if rms else functional.layer_norm

    def normalise(example, rows):
        return function(rows, shape, eps=eps) if len(rows) else rows

    return _sums(examples_of(x, bounds), examples_of(g, bounds), normalise)


def group_norm(x, g, groups, eps):
    def normalise(example, rows):
        return functional.group_norm(rows.T[None], groups, eps=eps)[0].T

    return _sums(examples_of(x, None), examples_of(g, None), normalise)


def check_sums(got, want, factor=32.0):
    sums, terms = want
    for index in range(2):
        assert_close(got[index], sums[index], terms[index], factor)


def check_squares(got, want, factor=32.0):
    sums, terms = want
    for index in range(2):
        # an element's error is eps of its terms; squared and summed, twice their product and more
        size = 2 * (terms[index] * sums[index].abs()).sum(1)
        assert_close(
            got[index], sums[index].square().sum(1),
            size + factor * FLOAT32_EPS * terms[index].square().sum(1), factor,
        )  # fmt: skip


def check_backward(got, x, g, weight, bounds, eps, rms, factor=32.0):
    """Checks (input gradient, scale and shift gradients, squared norms) of a whole backward."""
    used = torch.ones(x.shape[:-1], dtype=torch.bool)
    if bounds is not None:
        used[: bounds[0]], used[bounds[-1] :] = False, False
    rows, upstream = (torch.where(used[..., None], side.double().cpu(), 0.0) for side in (x, g))
    check_input_gradient(got[0], x, rows, _weighted(upstream, weight), eps, rms, factor)
    check_totals(got[1:], layer_norm(x, g, bounds, eps, rms), factor)


def check_group_backward(got, x, g, weight, groups, eps, factor=32.0):
    """As `check_backward`, for groups of channels."""
    batch, positions, channels = x.shape

    def blocks(side):
        return side.double().cpu().mT.reshape(batch, groups, -1)

    def whole(side):
        return side.reshape(batch, channels, positions).mT

    weighted = _weighted(g.double().cpu(), weight)
    check_input_gradient(got[0], x, blocks(x), blocks(weighted), eps, False, factor, whole)
    check_totals(got[1:], group_norm(x, g, groups, eps), factor)


def _weighted(g, weight):
    return g if weight is None else g * weight.double().cpu()


def check_input_gradient(got, x, rows, upstream, eps, rms, factor, whole=lambda side: side):
    """Checks the gradient of `rows` that are normalised; `whole` gives them the shape of x."""
    function = functional.rms_norm if rms else functional.layer_norm
    leaf = rows.clone().requires_grad_()
    (want,) = torch.autograd.grad(function(leaf, rows.shape[-1:], eps=eps), leaf, upstream)
    # a row of zeros that nobody uses has no gradient, whatever its deviation
    want = torch.where(upstream.any(-1, keepdim=True), want, 0.0)
    # what is subtracted from g may be as large as g, in units of the deviation
    spread = rows if rms else rows - rows.mean(-1, keepdim=True)
    rstd = (spread.square().mean(-1, keepdim=True) + eps).rsqrt()
    size = (upstream.norm(dim=-1, keepdim=True) * rstd).expand_as(rows)
    limit = 4 * torch.finfo(x.dtype).eps * want.abs() + factor * FLOAT32_EPS * size
    assert got.dtype == x.dtype and got.stride() == torch.empty_like(x).stride()
    assert ((got.double().cpu() - whole(want)).abs() <= whole(limit)).all()


def check_totals(got, want, factor):
    """Checks (scale gradient, shift gradient, their squared norms) summed over the examples."""
    sums, terms = want
    for index in range(2):
        assert_close(got[index], sums[index].sum(0), terms[index].sum(0), factor)
    check_squares(got[2:], want, factor)


def check_scale_backward(got, x, g, weight, bounds, mean=None, rstd=None, factor=32.0):
    """Checks the whole backward of weight x_hat + bias, of a scale alone or a shift alone.

    What was not asked for is empty; x is None for a shift alone.
    """
    gradient, *rest = got
    sums, terms = scale(g if x is None else x, g, bounds, mean, rstd)
    for place, part in enumerate(rest):
        kind = place % 2
        if not part.numel():
            continue
        if place < 2:
            assert_close(part, sums[kind].sum(0), terms[kind].sum(0), factor)
        else:
            size = 2 * (terms[kind] * sums[kind].abs()).sum(1)
            limit = size + factor * FLOAT32_EPS * terms[kind].square().sum(1)
            assert_close(part, sums[kind].square().sum(1), limit, factor)
    if not gradient.numel():
        return
    want = g.double().cpu() * (1.0 if weight is None else weight.double().cpu())
    if rstd is not None:
        want = want * rstd.double().cpu()
    if bounds is not None:
        want[: bounds[0]], want[bounds[-1] :] = 0, 0
    # Below the normal numbers, where float16 soon is, rounding is to multiples of the smallest.
    limits = torch.finfo(gradient.dtype)
    smallest = limits.smallest_normal * limits.eps
    limit = 4 * (limits.eps + FLOAT32_EPS) * want.abs() + smallest
    assert gradient.dtype == x.dtype and gradient.stride() == torch.empty_like(x).stride()
    assert ((gradient.double().cpu() - want).abs() <= limit).all()
