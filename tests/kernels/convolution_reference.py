"""Float64 references of convolutions, and the checks that both lanes run."""

from __future__ import annotations

import torch
from gradstats.kernels import (
    _reference,
    convolution,
    convolution_gram,
    convolution_pair_gram,
    convolution_pairs,
    convolution_weight_gradient,
    operators,
)

from tests.kernels.cases import random
from tests.kernels.reference import assert_close, gram_sums


def build(sizes, outputs, layer, layout, dtype, batch=2, seed=1, device="cpu"):
    """(x, g) in the given layout of memory."""
    kernel, stride, padding, dilation, _ = layer
    positions = [
        (size + 2 * pad - spread * (taps - 1) - 1) // step + 1
        for size, taps, step, pad, spread in zip(
            sizes[1:], kernel, stride, padding, dilation, strict=True
        )
    ]
    x = random((batch, *sizes), dtype, device, seed)
    g = random((batch, outputs, *positions), dtype, device, seed + 1)
    if layout == "last":
        return tuple(t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, g))
    if layout == "sliced":
        wide = torch.full(
            (*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"), dtype=dtype, device=device
        )
        wide[..., 1:-2:2] = x
        return wide[..., 1:-2:2], g
    if layout == "expanded":
        shape = g.shape
        return x, g.flatten(2)[..., :1].reshape(*shape[:2], *(1,) * (len(shape) - 2)).expand(shape)
    return x, g


def absolute(x, g, layer):
    """Weight gradients of absolute values, (B, weights): what their elements round by."""
    own = _reference.convolution_gradients(x.cpu().abs(), g.cpu().abs(), *layer)
    return torch.stack([gradient.flatten() for gradient in own])


def exact(x, g, layer):
    """Per-example weight gradients, float64 (B, weights)."""
    own = _reference.convolution_gradients(x.cpu(), g.cpu(), *layer)
    return torch.stack([gradient.flatten() for gradient in own])


def sums_of_gram(x, g, layer):
    """(sqnorm, magnitude, size) of the Gram form in float64, on the host."""
    operands = x.cpu(), g.cpu(), *layer
    return gram_sums(lambda *rounding: operators.convolution_gram_sqnorm(*operands, *rounding))


def same(call):
    return call()


def check_norms(
    x,
    g,
    layer,
    config=None,
    fused=None,
    gram=None,
    splits=None,
    factor=32.0,
    gram_factor=32.0,
    run=same,
):
    """Checks the norms in all three forms and the summed gradient; `run` calls each launcher."""
    want, terms = exact(x, g, layer), absolute(x, g, layer)
    sqnorm, scale = want.square().sum(1), (want.abs() * terms).sum(1)
    # an element's error is eps of its terms; squared and summed, twice their product and more
    limit = 2 * scale + factor * torch.finfo(torch.float32).eps * terms.square().sum(1)
    got = run(lambda: convolution.convolution_sqnorm(x, g, *layer, config=config))
    assert_close(got, sqnorm, limit, factor)
    if x.shape[1] == layer[-1]:
        gradient, got = run(
            lambda: convolution_weight_gradient.convolution_weight_gradient_sqnorm(
                x, g, *layer, config=fused, splits=splits, gradient_dtype=torch.float32
            )
        )
        assert_close(got, sqnorm, limit, factor)
        assert_close(gradient.flatten(), want.sum(0), terms.sum(0), factor)

    def form(*rounding):
        return run(
            lambda: convolution_gram.convolution_gram_sqnorm(
                x, g, *layer, *rounding, config=gram, direct_config=config
            )
        )

    got, magnitude, size = gram_sums(form)
    _, want_magnitude, want_size = sums_of_gram(x, g, layer)
    assert_close(got, sqnorm, want_magnitude, gram_factor)
    assert_close(magnitude, want_magnitude, factor=gram_factor)
    assert_close(size, want_size, factor=gram_factor)
    # all of them computed again
    got, bound = form(2.0**-22, 0.0, 0.0, 0.0)
    assert_close(got, sqnorm, limit, factor)
    assert torch.equal(bound, got * 2.0**-22)


def check_pairs(
    x1, g1, x2, g2, layer, config=None, workspace=10**8, gram=None, factor=32.0, run=same
):
    """Checks inner products of all pairs and of equal indices, and with a direction."""
    check_pair_grams(x1, g1, x2, g2, layer, gram, factor=factor, run=run)
    first, second = exact(x1, g1, layer), exact(x2, g2, layer)
    limit = absolute(x1, g1, layer) @ absolute(x2, g2, layer).T
    factors = (x1, g1, x2, g2, *layer)
    if x1.shape == x2.shape:
        got = run(lambda: convolution.convolution_inner(*factors, config=config))
        assert_close(got, (first * second).sum(1), limit.diagonal(), factor)
    got = run(
        lambda: convolution_pairs.pairwise_convolution(*factors, workspace=workspace, config=config)
    )
    assert_close(got, first @ second.T, limit, factor)
    shape = (g1.shape[1], x1.shape[1] // layer[-1], *layer[0])
    direction = random(shape[::-1], torch.float32, x1.device, 9).permute(*range(len(shape))[::-1])
    got = run(lambda: convolution.convolution_direction(x1, g1, direction, *layer, config=config))
    flat = direction.double().cpu().flatten()
    assert_close(got, first @ flat, absolute(x1, g1, layer) @ flat.abs(), factor)


def check_pair_grams(
    x1, g1, x2, g2, layer, config=None, factor=32.0, run=same, module=convolution_pair_gram
):
    """Checks inner products through products of patches, those of equal indices where they are."""
    factors = (x1, g1, x2, g2, *layer)
    host = tuple(operand.double().cpu() for operand in factors[:4])
    # a term's error is eps of what its two products add up, not of what they come to
    absolutes = tuple(operand.abs() for operand in host)
    got = run(lambda: module.pairwise_convolution_gram(*factors, config=config))
    want = exact(*host[:2], layer) @ exact(*host[2:], layer).T
    limit = operators.pairwise_convolution_gram(*absolutes, *layer)
    assert_close(got, want, limit, factor)
    if len(x1) == len(x2):
        inner, magnitude = run(lambda: module.convolution_inner_gram(*factors, config=config))
        assert_close(inner, want.diagonal(), limit.diagonal(), factor)
        _, want = operators.convolution_inner_gram(*host, *layer)
        assert_close(magnitude, want, limit.diagonal(), factor)
