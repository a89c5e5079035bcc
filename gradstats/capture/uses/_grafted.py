"""Operations followed through a decomposition, which runs instead of them or beside them.

Beside them, the operation's own result is kept and the decomposition only says how it was made.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils.checkpoint import _StopRecomputationError

from gradstats._complex import as_real
from gradstats.capture.following._marks import Marks
from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._nested import flatten, like, operands_of, rebuild, tensors_in
from gradstats.capture.parameters._derivation import Derived, reached
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.parameters._tensors import first_node, node_of, nodes_of, value_of, wrap
from gradstats.errors import GradStatsError, UnsupportedOperationError

if TYPE_CHECKING:
    from gradstats.capture._context import Context

# How much a decomposition's result may differ from the operation's, relative to its norm. The
# operation may compute in lower precision than its result's dtype; gs.verify is the strict check.
VALUE_TOLERANCE = {torch.float64: 1e-4}
OTHER_TOLERANCE = 5e-2


class Grafted:
    """The rule of an operation that runs as it is, with a decomposition beside it.

    Attributes:
        decomposition: takes the operation's arguments and returns what it returns.
    """

    def __init__(self, decomposition: Callable[..., Any]):
        self.decomposition = decomposition

    def __call__(self, tracker: Context, func, *args, **kwargs):
        trains = tracker.settings.weight_gradients

        def plain(item):
            node = node_of(item)
            if node is None:
                return item
            return node.value if trains else node.value.detach()

        def beside(item):
            node = node_of(item)
            if node is None:
                return _beside(tracker.marks, item)
            if id(item) not in stand_ins:
                stand_ins[id(item)] = _without_gradient(node)
            return stand_ins[id(item)]

        operands = operands_of(args, kwargs)
        stand_ins: dict[int, Tensor] = {}
        shown = _readable(tracker.marks, operands)
        before = [item._version for item in shown]
        result = func(*rebuild(args, plain), **rebuild(kwargs, plain))
        node = first_node(*operands)
        if [item._version for item in shown] != before:
            _refuse_change(func, node)
        # Modes and subclasses are off while an operation is handled: turn them on again, so that
        # the operations of the decomposition are seen.
        with torch._C._EnableTorchFunction(), tracker.watching():
            shadow = self._run(func, node, args, kwargs, beside)
        single = isinstance(result, Tensor)
        results = [result] if single else list(result)
        shadows = list(shadow) if isinstance(shadow, (tuple, list)) else [shadow]
        if [item._version for item in shown] != before:
            raise self._wrong(func, node, "changed an operand in place, expected no side effects")
        self._check(func, node, results, shadows)
        if isinstance(self, Registered) and torch.is_grad_enabled():
            self._check_use(func, list(stand_ins.values()), shadows)
        for number, (first, second) in enumerate(zip(results, shadows, strict=True)):
            if isinstance(first, Tensor) and (first.is_floating_point() or first.is_complex()):
                results[number] = _graft(node, value_of(second), first)
                if node_of(second) is None:
                    tracker.marks.place_like(results[number], second)
        tracker.followed = results[0] if single else like(result, results)
        return tracker.followed

    def _run(self, func, node: Node | None, args, kwargs, beside: Callable[[Any], Any]) -> Any:
        """Run the decomposition on the stand-ins that ``beside`` returns for the operands."""
        try:
            return self.decomposition(*rebuild(args, beside), **rebuild(kwargs, beside))
        except TypeError as error:
            if _takes(self.decomposition, args, kwargs):
                raise
            problem = f"does not take the operation's arguments ({error})"
            raise self._wrong(func, node, problem) from error
        except RecursionError:
            name = function_name(func)
            problem = f"exceeded Python's recursion limit, as one that calls {name} itself does"
            raise self._wrong(func, node, problem) from None

    def follow(self, tracker: Context, func, args, kwargs, results: list) -> None:
        """Note where the examples lie in the results of an operation on data alone."""

        def beside(item):
            return _beside(tracker.marks, item)

        with torch._C._EnableTorchFunction(), tracker.watching():
            shadow = self._run(func, None, args, kwargs, beside)
        for first, second in zip(results, flatten((shadow,)), strict=True):
            if isinstance(first, Tensor) and isinstance(second, Tensor):
                tracker.marks.place_like(first, second)

    def _check(self, func, node: Node, results: list, shadows: list) -> None:
        """Raise unless the decomposition computed what the operation computed."""
        got, expected = list(map(_shape, shadows)), list(map(_shape, results))
        if got != expected:
            problem = f"returned results of shape {got}, expected {expected}"
        else:
            pairs = zip(results, shadows, strict=True)
            differences = [_difference(first, value_of(second)) for first, second in pairs]
            found, allowed = max(differences, key=lambda pair: pair[0] / pair[1])
            if found <= allowed:
                return
            problem = (
                f"returned values that differ by {found:.2%} of their norm, expected the "
                f"operation's to within {allowed:.2%}"
            )
        raise self._wrong(func, node, problem)

    def _check_use(self, func, operands: Sequence[Tensor], shadows: list) -> None:
        """Raise if no result depends on some parameter, whose gradients would be reported as 0."""
        values = [each for each in map(value_of, tensors_in(shadows)) if each.requires_grad]
        nodes = nodes_of(operands)
        used = {node for value in values for node in reached(value, nodes)}
        for node in nodes:
            if node not in used:
                raise self._wrong(
                    func,
                    node,
                    "returned nothing that depends on it, expected a use of it (if the operation "
                    "has no gradient for it, detach it in the model)",
                )

    def _wrong(self, func, node: Node | None, problem: str) -> UnsupportedOperationError:
        name = getattr(self.decomposition, "__name__", "the decomposition")
        where = "of data" if node is None else f"on {node.describe()}"
        return UnsupportedOperationError(
            f"the rule registered for {function_name(func)} {where}: {name} {problem}"
            ". Correct the decomposition, or remove the rule with its handle's remove().",
            () if node is None else node.names,
        )


class Registered(Grafted):
    """The rule that a user registered. Its results must depend on every tracked operand."""


def _takes(function: Callable[..., Any], args, kwargs) -> bool:
    """Whether a function accepts arguments of this number and these names."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # it has no signature to ask
        return True
    return True


def _readable(marks: Marks, operands: Sequence[Tensor]) -> list[Tensor]:
    """Return the operands whose values a decomposition may read; not those without any yet."""
    plain = [item for item in operands if node_of(item) is None and not item.is_inference()]
    data = [item for item in plain if marks.is_data(item) and not marks.values.was_blank(item)]
    return [node.value for node in nodes_of(operands)] + data


def _refuse_change(func, node: Node) -> NoReturn:
    """Raise for an operation that overwrote an operand of its decomposition."""
    raise UnsupportedOperationError(
        f"{function_name(func)} on {node.describe()} changed an operand in place, so that the rule "
        "registered for it would read what the operation wrote. Expected an operation that leaves "
        "its operands unchanged: return a new tensor, or leave the parameter out by name with "
        f"exclude={node.names!r}.",
        node.names,
    )


class Graft(torch.autograd.Function):
    """The operation's own result, whose gradient reaches the decomposition as well."""

    @staticmethod
    def forward(ctx, node, shadow, result):
        ctx.node = node
        # Without this mark the result would be a view, which a later relu_ could not change.
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise UnsupportedOperationError(
                "the loss contains derivatives of the network (a backward with create_graph=True "
                f"ran through an operation on {ctx.node.describe()} with a decomposition beside "
                "it), which use the parameter once more in a way that is not counted. Expected the "
                "decomposition in the model, or for PyTorch's operations fused=True and float32 or "
                "float64, without autocast. Otherwise have per_example_norms compute one example "
                f'at a time with fallback="vmap", or pass exclude={ctx.node.names!r}.',
                ctx.node.names,
            )
        return None, grad, grad


def _graft(node: Node, shadow: Tensor, result: Tensor) -> Tensor:
    if result._is_view():
        result = result.clone()
    # No value is changed, and an operation that saved its own result must be able to read it.
    with torch.autograd._unsafe_preserve_version_counter(result):
        return Graft.apply(node, shadow, result)


class Blocked(torch.autograd.Function):
    """A view that requires grad but passes none back: the operation's own backward does."""

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return None


def _beside(marks: Marks, item):
    """Return a stand-in for an operand: located as it is, but without a gradient to pass back."""
    if not isinstance(item, Tensor):
        return item
    # It still has to require grad: trained examples must not be mixed in the decomposition.
    shown = Blocked.apply(item) if item.requires_grad else item.detach()
    marks.place_like(shown, item)
    return shown


def _without_gradient(node: Node) -> Tensor:
    """Return a tracked stand-in for a node, whose uses count but pass no gradient back."""
    value = Blocked.apply(node.value)
    return wrap(Derived(node.tracker, value, Tensor.clone, (node,), {}, None))


def _shape(item) -> tuple[int, ...] | None:
    return tuple(item.shape) if isinstance(item, Tensor) else None


def _difference(result, shadow) -> tuple[float, float]:
    """Return the norm of the difference relative to the result's, and how large it may be."""
    if not isinstance(result, Tensor) or not bool(result.isfinite().all()):
        return 0.0, OTHER_TOLERANCE
    tolerance = VALUE_TOLERANCE.get(result.dtype, OTHER_TOLERANCE)
    wide, other = (as_real(item.detach()).double() for item in (result, shadow))
    distance = ((wide - other).norm() / wide.norm().clamp(min=1e-300)).item()
    # Only the decomposition may have returned values that are not finite.
    return distance if math.isfinite(distance) else math.inf, tolerance


class Composed:
    """The rule of an operation that is replaced by a composition of other operations.

    If the training gradients must be PyTorch's own, the operation runs as it is, with the
    composition beside it.

    Attributes:
        composition: takes the operation's arguments and returns what it returns.
        rounds: whether it rounds more often than the operation. Then it runs beside the operation
            in low precision too.
    """

    def __init__(self, composition: Callable[..., Tensor], *, rounds: bool = False):
        self.composition = composition
        self.rounds = rounds

    def __call__(self, tracker: Context, func, *args, **kwargs):
        if tracker.settings.exact or (self.rounds and _are_low(operands_of(args, kwargs))):
            return Grafted(self.composition)(tracker, func, *args, **kwargs)
        try:
            return watched(tracker, self.composition, *args, **kwargs)
        except (GradStatsError, _StopRecomputationError):
            raise  # the latter ends a checkpoint's recomputation once it has all tensors
        except Exception:
            func(*rebuild(args, value_of), **rebuild(kwargs, value_of))  # PyTorch's own error
            raise


def _are_low(operands: Sequence[Tensor]) -> bool:
    """Whether an operation may compute in low precision."""
    if torch._C._is_any_autocast_enabled():
        return True
    return any(item.is_floating_point() and item.dtype.itemsize < 4 for item in operands)


def watched(tracker: Context, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Run a function, handling each of its operations as if the user had called it.

    Modes and subclasses are off in the rule that calls this: they are turned on again.
    """
    with torch._C._EnableTorchFunction(), tracker.watching():
        tracker.followed = function(*args, **kwargs)
    return tracker.followed
