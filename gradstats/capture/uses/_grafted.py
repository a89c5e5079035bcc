"""Operations followed through a decomposition, which runs instead of them or beside them."""

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
from gradstats.capture.operations._nested import flatten, operands_of, rebuild, tensors_in
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
        decomposition: returns what the operation returns.
    """

    def __init__(self, decomposition: Callable[..., Any]):
        self.decomposition = decomposition

    def __call__(self, tracker: Context, func, *args, **kwargs):
        trains = tracker.settings.weight_gradients

        def own(item):
            node = node_of(item)
            if node is None:
                return item
            return node.value if trains else node.value.detach()

        def seen(item):
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
        result = func(*rebuild(args, own), **rebuild(kwargs, own))
        node = first_node(*operands)
        if [item._version for item in shown] != before:
            _refuse_change(func, node)
        # Modes and subclasses are off while an operation is handled: turn them on again, so that
        # the decomposition is seen.
        with torch._C._EnableTorchFunction(), tracker.watching():
            shadow = self._run(func, node, args, kwargs, seen)
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
        if single:
            returned = results[0]
        elif hasattr(result, "_fields"):
            returned = type(result)(*results)
        else:
            returned = type(result)(results)
        tracker.followed = returned
        return returned

    def _run(self, func, node: Node | None, args, kwargs, seen: Callable[[Any], Any]) -> Any:
        """Return what the decomposition makes of operands as they are to be ``seen``."""
        try:
            return self.decomposition(*rebuild(args, seen), **rebuild(kwargs, seen))
        except TypeError as error:
            if _takes(self.decomposition, args, kwargs):
                raise
            problem = f"does not take the operation's arguments ({error})"
            raise self._wrong(func, node, problem) from error
        except RecursionError:
            name = function_name(func)
            problem = f"exceeded Python's limit on recursion, as one does that calls {name} itself"
            raise self._wrong(func, node, problem) from None

    def follow(self, tracker: Context, func, args, kwargs, results: list) -> None:
        """Note where the examples lie in the operation's results, where it takes data alone."""

        def seen(item):
            return _beside(tracker.marks, item)

        with torch._C._EnableTorchFunction(), tracker.watching():
            shadow = self._run(func, None, args, kwargs, seen)
        for first, second in zip(results, flatten((shadow,)), strict=True):
            if isinstance(first, Tensor) and isinstance(second, Tensor):
                tracker.marks.place_like(first, second)

    def _check(self, func, node: Node, results: list, shadows: list) -> None:
        """Raise unless the decomposition computes what the operation computes."""
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
        """Raise if no result of the decomposition depends on a parameter, which would get zeros."""
        values = [each for each in map(value_of, tensors_in(shadows)) if each.requires_grad]
        nodes = nodes_of(operands)
        used = {node for value in values for node in reached(value, nodes)}
        for node in nodes:
            if node not in used:
                raise self._wrong(
                    func,
                    node,
                    "returned nothing that depends on it, expected a use of it (where the "
                    "operation has no gradient for it, detach it in the model)",
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
    """The rule that a user registered: its results have to depend on every tracked operand."""


def _takes(function: Callable[..., Any], args, kwargs) -> bool:
    """Whether a function can be called with so many arguments, of these names."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # of a function without a signature it is not known
        return True
    return True


def _readable(marks: Marks, operands: Sequence[Tensor]) -> list[Tensor]:
    """Return the operands whose values a decomposition may read, without blank ones."""
    plain = [item for item in operands if node_of(item) is None and not item.is_inference()]
    data = [item for item in plain if marks.is_data(item) and not marks.values.was_blank(item)]
    return [node.value for node in nodes_of(operands)] + data


def _refuse_change(func, node: Node) -> NoReturn:
    """Raise for an operation that overwrote what its decomposition would be given."""
    raise UnsupportedOperationError(
        f"{function_name(func)} on {node.describe()} changed an operand in place, so that the rule "
        "registered for it would be given what the operation wrote. Expected an operation that "
        "leaves its operands as they are: return a new tensor, or leave the parameter out by name "
        f"with exclude={node.names!r}.",
        node.names,
    )


class Graft(torch.autograd.Function):
    """The operation's own result, whose gradient reaches the decomposition as well."""

    @staticmethod
    def forward(ctx, node, shadow, result):
        ctx.node = node
        # Marked as changed, the result is no view, which a later relu_ could not change in place.
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise UnsupportedOperationError(
                "the loss contains derivatives of the network (a backward with create_graph=True "
                f"ran through an operation on {ctx.node.describe()} that runs as it is, with a "
                "decomposition beside it), where the parameter is used once more in a way that is "
                "not counted. Expected the decomposition in the model instead, or for PyTorch's "
                "operations fused=True and float32 or float64, without autocast; or have "
                'per_example_norms compute one example at a time with fallback="vmap", or exclude '
                "the parameter.",
                ctx.node.names,
            )
        return None, grad, grad


def _graft(node: Node, shadow: Tensor, result: Tensor) -> Tensor:
    if result._is_view():
        result = result.clone()
    # Nothing is really changed: an operation that saved its own result must be able to read it.
    with torch.autograd._unsafe_preserve_version_counter(result):
        return Graft.apply(node, shadow, result)


class Blocked(torch.autograd.Function):
    """A view that requires grad but passes none on: the operation's own backward does that."""

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return None


def _beside(marks: Marks, item):
    """Return an operand for the decomposition, with its layout, that passes no gradient back."""
    if not isinstance(item, Tensor):
        return item
    # It still has to require grad: examples of trained operands must not meet in the decomposition.
    shown = Blocked.apply(item) if item.requires_grad else item.detach()
    marks.place_like(shown, item)
    return shown


def _without_gradient(node: Node) -> Tensor:
    """Return a tracked tensor of the node's value whose uses count but pass no gradient back."""
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
    # The decomposition may have values that are not finite where the operation has none.
    return distance if math.isfinite(distance) else math.inf, tolerance


class Composed:
    """The rule of an operation that is replaced by a composition of other operations.

    Where the training gradients must be PyTorch's own, the operation runs as it is and the
    composition beside it.

    Attributes:
        composition: returns what the operation returns.
        rounds: whether it rounds more often than the operation, so that in low precision the
            operation has to run as it is too.
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
            raise  # the latter by a checkpoint that has all tensors which the backward needs
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

    Modes and subclasses are off in the rule that calls this, and have to be turned on again.
    """
    with torch._C._EnableTorchFunction(), tracker.watching():
        tracker.followed = function(*args, **kwargs)
    return tracker.followed
