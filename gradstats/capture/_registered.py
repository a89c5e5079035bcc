"""Rules for users' own operations: the operation as it is, beside a tracked decomposition."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from gradstats.capture._marks import leave_graph
from gradstats.capture._nodes import Derived, Node, function_name, operands_of, rebuild
from gradstats.capture._tensors import node_of, wrap
from gradstats.capture.rules import RULES
from gradstats.errors import TrackingError, UnsupportedOperationError

# By how much a decomposition's result may differ from the operation's, relative to its norm. An
# operation may compute in lower precision than its result shows; gs.verify is the sharp check.
VALUE_TOLERANCE = {torch.float64: 1e-4}
OTHER_TOLERANCE = 5e-2


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
    that reaches the result.

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
        The decomposition's forward and its backward without data gradients, beside the operation's.
    """
    if not callable(decomposition):
        raise TrackingError(
            f"the decomposition is {type(decomposition).__name__}, expected a function of the same "
            "arguments as the operation, written with PyTorch's own operations."
        )
    function_class = _function_class(function)
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


class Grafted:
    """The rule of a registered operation."""

    def __init__(self, decomposition: Callable[..., Any]):
        self.decomposition = decomposition

    def __call__(self, tracker, func, *args, **kwargs):
        leave_graph(f"{function_name(func)}, which has a registered rule")
        trains = tracker.settings.weight_gradients

        def own(item):
            node = node_of(item)
            if node is None:
                return item
            return node.value if trains else node.value.detach()

        def seen(item):
            node = node_of(item)
            if node is not None:
                return _without_gradient(node)
            return item.detach() if isinstance(item, Tensor) else item

        result = func(*rebuild(args, own), **rebuild(kwargs, own))
        # Here the operation is being handled, and nothing would be seen of the decomposition.
        with torch._C._EnableTorchFunction(), tracker.watching():
            shadow = self.decomposition(*rebuild(args, seen), **rebuild(kwargs, seen))
        single = isinstance(result, Tensor)
        results = [result] if single else list(result)
        shadows = [shadow] if isinstance(shadow, Tensor) else list(shadow)
        node = next(n for n in map(node_of, operands_of(args, kwargs)) if n is not None)
        self._check(func, node, results, shadows)
        for number, (first, second) in enumerate(zip(results, shadows, strict=True)):
            if isinstance(first, Tensor) and first.is_floating_point():
                results[number] = _graft(node, _plain(second), first)
        return results[0] if single else type(result)(results)

    def _check(self, func, node: Node, results: list, shadows: list) -> None:
        """Raise unless the decomposition computes what the operation computes."""
        got, expected = list(map(_shape, shadows)), list(map(_shape, results))
        if got != expected:
            problem = f"results of shape {got}, expected {expected}"
        else:
            pairs = zip(results, shadows, strict=True)
            worst = max(_difference(first, _plain(second)) for first, second in pairs)
            if worst <= 1:
                return
            problem = (
                f"values that differ by {worst:.2g} times the tolerance, expected the operation's"
            )
        name = getattr(self.decomposition, "__name__", "the decomposition")
        raise UnsupportedOperationError(
            f"the rule registered for {function_name(func)} on {node.describe()}: {name} returned "
            f"{problem}. Correct the decomposition, or take the rule back with its handle's "
            "remove().",
            [root.name for root in node.roots],
        )


class Graft(torch.autograd.Function):
    """The operation's own result, whose gradient reaches the decomposition as well."""

    @staticmethod
    def forward(ctx, node, shadow, result):
        ctx.node = node
        # Not a view, which could not be changed in place by a later relu_.
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise UnsupportedOperationError(
                "the loss contains derivatives of the network (a backward with create_graph=True "
                f"ran through a registered operation on {ctx.node.describe()}), where the "
                "parameter is used once more in a way that is not counted. Call the decomposition "
                "in the model instead, or exclude the parameter.",
                [root.name for root in ctx.node.roots],
            )
        return None, grad, grad


def _graft(node: Node, shadow: Tensor, result: Tensor) -> Tensor:
    if result._is_view():
        result = result.clone()
    # Nothing is changed, so an operation that needs its own result in backward may find it.
    with torch.autograd._unsafe_preserve_version_counter(result):
        return Graft.apply(node, shadow, result)


class Blocked(torch.autograd.Function):
    """A view that requires grad and passes none on: the operation itself provides it."""

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return None


def _without_gradient(node: Node) -> Tensor:
    """Return a tracked tensor of the node's value whose uses count and give no gradient."""
    value = Blocked.apply(node.value)
    return wrap(Derived(node.tracker, value, Tensor.clone, (node,), {}, None))


def _plain(tensor: Tensor) -> Tensor:
    node = node_of(tensor)
    return tensor if node is None else node.value


def _shape(item) -> tuple[int, ...] | None:
    return tuple(item.shape) if isinstance(item, Tensor) else None


def _difference(result, shadow) -> float:
    """Return the norm of the difference relative to the result's, in units of the tolerance."""
    if not isinstance(result, Tensor) or not bool(result.isfinite().all()):
        return 0.0
    tolerance = VALUE_TOLERANCE.get(result.dtype, OTHER_TOLERANCE)
    wide, other = result.detach().double(), shadow.detach().double()
    return ((wide - other).norm() / (wide.norm() * tolerance).clamp(min=1e-300)).item()


def _function_class(function: Any) -> type[torch.autograd.Function] | None:
    owner = getattr(function, "__self__", function)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return owner
    return None


def _make_visible(function_class) -> tuple[Callable[..., Any], Callable[[], None]]:
    """Let contexts see the calls of an autograd Function's ``apply``, and return how to undo it."""
    inner = function_class.apply
    if getattr(inner, "_gradstats_visible", False):
        raise TrackingError(
            f"{function_class.__name__} has a rule already. Expected an operation without one: "
            "take the registered rule back with its handle's remove()."
        )

    def apply(*args, **kwargs):
        if has_torch_function(args):
            return handle_torch_function(apply, args, *args, **kwargs)
        return inner(*args, **kwargs)

    apply.__name__ = f"{function_class.__name__}.apply"
    apply.__module__ = function_class.__module__
    apply._gradstats_visible = True  # type: ignore[attr-defined]
    before = function_class.__dict__.get("apply")
    function_class.apply = staticmethod(apply)

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
