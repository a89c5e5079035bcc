"""Rules for users' own operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from gradstats.capture._grafted import Grafted
from gradstats.capture._names import function_class_of, function_name
from gradstats.capture.rules import RULES
from gradstats.errors import TrackingError


class RuleHandle:
    """A registered rule; ``remove`` takes it back, and so does leaving it as a context."""

    def __init__(self, undo: list[Callable[[], Any]]):
        self._undo = undo

    def remove(self) -> None:
        """Make everything as it was before the registration; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> RuleHandle:
        return self

    def __exit__(self, kind, value, traceback) -> None:
        self.remove()


def register_rule(function: Any, decomposition: Callable[..., Any]) -> RuleHandle:
    """Tell gradstats how an operation of your own uses its parameters.

    Inside a context, wherever ``function`` meets a tracked parameter and data, it runs as always:
    its values and its gradients are what they were. Beside it ``decomposition`` runs on the same
    arguments, and the per-example gradients are those of its PyTorch operations for the gradient
    that reaches the result. A ``torch.autograd.Function`` of parameters and constants alone needs
    no rule: it is pulled back by its own backward.

        class ScaledSiLU(torch.autograd.Function):          # perhaps a Triton kernel
            @staticmethod
            def forward(ctx, x, weight):
                ctx.save_for_backward(x, weight)
                return x * torch.sigmoid(x) * weight

            @staticmethod
            def backward(ctx, grad):
                x, weight = ctx.saved_tensors
                s = torch.sigmoid(x)
                dx = grad * weight * s * (1 + x * (1 - s))
                return dx, (grad * x * s).flatten(0, -2).sum(0)

        def scaled_silu(x, weight):                          # the same with PyTorch's operations
            return torch.nn.functional.silu(x) * weight

        gs.register_rule(ScaledSiLU, scaled_silu)            # the model stays as it is
        gs.verify(model, batch, loss_fn)                     # and is it right?

    Args:
        function: a ``torch.autograd.Function`` class (or its ``apply``), an operator of
            ``torch.library`` or ``torch.ops``, a function of PyTorch without a rule, or a Python
            function that calls ``torch.overrides.handle_torch_function``. A Python function that
            only calls other operations needs no rule: register the operations inside.
        decomposition: a function of the same arguments that returns the same values and has the
            same gradient, without side effects or randomness. A gradient that differs from the
            derivative of the value (straight-through estimators) is written as such:
            ``x + (x.round() - x).detach()``.

    Returns:
        A handle: ``handle.remove()``, or ``with gs.register_rule(...):``, takes the rule back.

    Raises:
        TrackingError: ``function`` has a rule already, or its calls cannot be seen.
        UnsupportedOperationError: when the rule runs and ``decomposition`` returns other values.

    Cost:
        The decomposition's forward and backward beside the operation's.
    """
    if not callable(decomposition):
        raise TrackingError(
            f"the decomposition is {type(decomposition).__name__}, expected a function of the same "
            "arguments as the operation, written with PyTorch's own operations."
        )
    # The class itself, or its ``apply``.
    function_class = function_class_of(getattr(function, "apply", function))
    keys: list[Any]
    undo: list[Callable[[], Any]]
    if function_class is not None:
        apply, restore = _make_visible(function_class)
        keys, undo = [apply], [restore]
    else:
        keys, undo = _overridable(function), []
    for key in keys:
        if key in RULES:
            raise TrackingError(
                f"{function_name(key)} has a rule already. Expected an operation without one; if "
                "it was registered before, take that rule back with its handle's remove()."
            )
    rule = Grafted(decomposition)
    for key in keys:
        RULES[key] = rule
        undo.append(partial(RULES.pop, key))
    return RuleHandle(undo)


class VisibleApply(staticmethod):
    """The ``apply`` of a class with a rule. Subclasses, which have another forward, keep theirs."""

    def __init__(self, apply: Callable[..., Any], function_class: type, before: Any):
        """Take what ``function_class`` had as its own ``apply`` before, None if it inherited it."""
        super().__init__(apply)
        self._class: Any = function_class
        self._before = before

    def __get__(self, instance: Any, owner: Any = None) -> Callable[..., Any]:
        if owner is None:  # as torch.compile asks, with the class in the instance's place
            owner = instance
        if owner is self._class:
            return self.__func__
        if self._before is not None:
            return self._before.__get__(instance, owner)
        return super(self._class, owner).apply  # type: ignore[misc]


def _make_visible(function_class) -> tuple[Callable[..., Any], Callable[[], None]]:
    """Let contexts see the calls of an autograd Function's ``apply``, and return how to undo it."""
    inner = function_class.apply
    if inner in RULES:
        raise TrackingError(
            f"{function_class.__name__} has a rule already. Expected an operation without one: "
            "take the registered rule back with its handle's remove()."
        )

    def apply(*args, **kwargs):
        if has_torch_function(args):
            return handle_torch_function(apply, args, *args, **kwargs)
        return inner(*args, **kwargs)

    apply.__self__ = function_class  # type: ignore[attr-defined]
    before = function_class.__dict__.get("apply")
    function_class.apply = VisibleApply(apply, function_class, before)

    def restore() -> None:
        if before is None:
            del function_class.apply
        else:
            function_class.apply = before

    return apply, restore


def _overridable(function: Any) -> list[Any]:
    """Return the functions under which contexts see an operation's calls, or raise."""
    operator = getattr(function, "_opoverload", function)  # what torch.library.custom_op returns
    if isinstance(operator, torch._ops.OpOverload):
        return [operator, operator.overloadpacket]
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return [operator, *(getattr(operator, name) for name in operator.overloads())]
    if function in torch.overrides.get_testing_overrides():
        return [function]
    code = getattr(function, "__code__", None)
    if code is not None and "handle_torch_function" in code.co_names:
        return [function]
    raise TrackingError(
        f"calls of {getattr(function, '__qualname__', function)!r} cannot be seen. Expected a "
        "torch.autograd.Function, an operator of torch.library or torch.ops, a function of "
        "PyTorch, or a Python function that calls torch.overrides.handle_torch_function. A Python "
        "function that calls other operations needs no rule: register the operations inside it."
    )
