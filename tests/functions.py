"""Custom autograd Functions that several tests use."""

import torch


class Kernel(torch.autograd.Function):
    """A user's own Function that takes data and a parameter: no PyTorch operation sees it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Recomputing(torch.autograd.Function):
    """A checkpoint as other libraries have it: its backward runs the forward, and a backward."""

    @staticmethod
    def forward(ctx, function, *args):
        ctx.function = function
        ctx.save_for_backward(*args)
        ctx.trained = [item.requires_grad for item in args]
        return function(*args)

    @staticmethod
    def backward(ctx, grad):
        args = [
            item.detach().requires_grad_(trained)
            for item, trained in zip(ctx.saved_tensors, ctx.trained, strict=True)
        ]
        with torch.enable_grad():
            result = ctx.function(*args)
        torch.autograd.backward(result, grad)
        return None, *(item.grad for item in args)


def recomputing(function, *args):
    """Run a function in such a checkpoint, whose ``apply`` is looked up now and not before."""
    return Recomputing.apply(function, *args)


class ScaleGradient(torch.autograd.Function):
    """Identity whose gradient is ``factor`` times what arrives; None for no gradient at all."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return None if ctx.factor is None else grad * ctx.factor, None


# A linear layer by an operator of one's own, which has no rule and leaves the examples in place.
LIBRARY = torch.library.Library("gradstats_tests", "DEF")
LIBRARY.define("linear(Tensor input, Tensor weight) -> Tensor")
LIBRARY.impl("linear", torch.nn.functional.linear, "CompositeImplicitAutograd")
linear_without_rule = torch.ops.gradstats_tests.linear


class Cubed(torch.autograd.Function):
    """x³, element by element."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2
