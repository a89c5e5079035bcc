"""Rules that users register for their own operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from gradstats.capture.operations._names import function_class_of, function_name
from gradstats.capture.parameters._functions import note_shown
from gradstats.capture.rules import RULES
from gradstats.capture.uses._grafted import Registered
from gradstats.errors import TrackingError, UnsupportedOperationError


class RuleHandle:
    """A registered rule, removed by ``remove`` or at the end of a ``with`` block."""

    def __init__(self, name: str, undo: list[Callable[[], Any]]):
        self._name, self._undo = name, undo

    def __repr__(self) -> str:
        return f"RuleHandle({self._name}{'' if self._undo else ', removed'})"

    def remove(self) -> None:
        """Undo the registration; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> RuleHandle:
        return self

    def __exit__(self, kind, value, traceback) -> None:
        self.remove()


def register_rule(function: Any, decomposition: Callable[..., Any]) -> RuleHandle:
    """Tell gradstats how your own operation uses its parameters.

    When ``function`` is called on a tracked parameter and data inside a context, it runs as usual,
    with the same values and gradients. ``decomposition`` runs beside it on the same arguments, and
    per-example gradients are computed from the PyTorch operations in it and from the gradient that
    reaches the result. A ``torch.autograd.Function`` of parameters and constants alone needs no
    rule: its own backward is used. A rule does not apply to subclasses of ``function``. Operations
    that change an operand in place are refused, unless they fill an uninitialised tensor.

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
        gs.verify(model, batch, loss_fn)                     # checks that the rule is right

    Args:
        function: a ``torch.autograd.Function`` class (or its ``apply``), an operator of
            ``torch.library`` or ``torch.ops``, a function of PyTorch without a rule, or a Python
            function that calls ``torch.overrides.handle_torch_function``. A Python function that
            only calls other operations needs no rule: register the operations inside.
        decomposition: a function of the same arguments with the same values and the same gradient,
            without side effects or randomness. If the operation's gradient is not the derivative of
            its values (straight-through estimators), write one that has it too:
            ``x + (x.round() - x).detach()``. The values are compared in each call, the gradients
            are not.

    Returns:
        A handle. ``handle.remove()``, or the end of ``with gs.register_rule(...):``, removes the
        rule.

    Raises:
        TrackingError: ``function`` has a rule already, or its calls cannot be seen.
        UnsupportedOperationError: when the rule runs: ``decomposition`` returned other values, or
            none that depend on a parameter it was given; or it or the operation changed an operand.

    Cost:
        The decomposition's forward and backward, beside the operation's own.
    """
    if not callable(decomposition):
        raise TrackingError(
            f"decomposition is {type(decomposition).__name__}, expected a function that takes the "
            "same arguments as the operation and is written with PyTorch's own operations."
        )
    # The class itself, or its ``apply``.
    function_class: Any = function_class_of(getattr(function, "apply", function))
    # Every subclass has its own ``apply``, so a rule for the base class would never run.
    is_class = function_class not in (None, torch.autograd.Function)
    keys = [function_class.apply] if is_class else _overridable(function)
    for key in keys:
        if key in RULES:
            raise TrackingError(
                f"{function_name(key)} has a rule already, expected an operation without one. If "
                "you registered that rule, remove it first with its handle's remove()."
            )
    name, undo = function_name(keys[0]), list[Callable[[], Any]]()
    if is_class:
        apply, restore = _make_visible(function_class)
        keys, undo = [apply], [restore]
    rule = Registered(decomposition)
    for key in keys:
        RULES[key] = rule
        undo.append(partial(RULES.pop, key))
    return RuleHandle(name, undo)


class Compiled(Registered):
    """The rule of a TorchScript function: the Python function that it was compiled from."""

    def _wrong(self, func, node, problem: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(
            f"{function_name(func)} on {node.describe()}: the Python function that it was compiled "
            f"from {problem}. Write it so that it does the same with and without TorchScript, or "
            f"leave the parameter out by name with exclude={node.names!r}.",
            node.names,
        )


def follow_through(script: Any, source: Callable[..., Any]) -> None:
    """Follow a TorchScript function through the Python function that it was compiled from."""
    if script not in RULES:
        RULES[script] = Compiled(source)


class VisibleApply(staticmethod):
    """The ``apply`` of a class with a rule. Subclasses, with other forwards, keep their own."""

    def __init__(self, apply: Callable[..., Any], function_class: type, before: Any):
        """Keep ``before``, the ``apply`` that the class itself defined; None if it had none."""
        super().__init__(apply)
        self._class: Any = function_class
        self._before = before

    def __get__(self, instance: Any, owner: Any = None) -> Callable[..., Any]:
        if owner is None:  # torch.compile passes the class as the instance
            owner = instance
        if owner is self._class:
            return self.__func__
        if self._before is not None:
            return self._before.__get__(instance, owner)
        return super(self._class, owner).apply  # type: ignore[misc]


def _make_visible(function_class) -> tuple[Callable[..., Any], Callable[[], None]]:
    """Make calls of an autograd Function visible; return its new ``apply`` and an undo function."""
    inner = function_class.apply

    def apply(*args, **kwargs):
        if has_torch_function(args):
            return handle_torch_function(apply, args, *args, **kwargs)
        return note_shown(inner(*args, **kwargs))  # contexts may not see ``inner``

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
    """Return the functions that contexts see when an operation is called, or raise."""
    operator = getattr(function, "_opoverload", function)  # what torch.library.custom_op returns
    if isinstance(operator, torch._ops.OpOverload):
        return [operator, operator.overloadpacket]
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return [operator, *(getattr(operator, name) for name in operator.overloads())]
    if callable(function) and function in torch.overrides.get_testing_overrides():
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
