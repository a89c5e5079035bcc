"""The tensor classes whose operations contexts see."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from types import FunctionType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import functional

from gradstats._compiler import leave_graph
from gradstats.capture.operations._modes import innermost_mode
from gradstats.capture.operations._nested import operands_of
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._nodes import AS_SUBCLASS, Node

# What the compiler is to record for functions that are written in Python: it traces into them, and
# cannot follow how they dispatch on the classes of operands. Methods and operators it calls by
# functions of its own, which share only their names.
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.pad: torch._C._nn.pad,
    functional.rms_norm: torch.rms_norm,
}
METHODS: dict[str, Callable[..., Any]] = {
    "norm": torch.norm,
    "split": lambda tensor, split_size, dim=0: torch.split(tensor, split_size, dim),
}
OPERATORS: dict[str, Callable[..., Any]] = {
    "__rdiv__": lambda divisor, other: torch.mul(torch.reciprocal(divisor), other),
    "__rmatmul__": lambda right, left: torch.matmul(left, right),
    "__rpow__": lambda exponent, base: torch.pow(base, exponent),
    "__rsub__": torch.rsub,
    "pow": torch.pow,
}


class TrackedParameter(torch.nn.Parameter):
    """A parameter of the user's model inside a context: the same object, with its class changed."""

    _gradstats: Node | None = None  # a copy belongs to no context

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def __deepcopy__(self, memo):
        # The copy is an ordinary parameter that no context tracks.
        with torch._C.DisableTorchFunctionSubclass():
            result = super().__deepcopy__(memo)
        result.__class__ = torch.nn.Parameter
        return result

    def __reduce_ex__(self, proto):
        node = self.__dict__.pop("_gradstats", None)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return super().__reduce_ex__(proto)
        finally:
            if node is not None:
                self._gradstats = node


def release(parameter: torch.nn.Parameter) -> None:
    """Stop tracking a parameter, and restore it."""
    parameter.__dict__.pop("_gradstats", None)
    parameter.__class__ = torch.nn.Parameter  # what it was: see check_trackable


class DerivedTensor(torch.Tensor):
    """A tensor computed from parameters and constants alone, until it meets data."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def __reduce_ex__(self, proto):
        # A copy is a leaf, as of any tensor, and belongs to no context.
        return AS_SUBCLASS(self, torch.Tensor).__reduce_ex__(proto)

    def __format__(self, spec):
        # PyTorch formats the number in a 0-d tensor only for plain tensors.
        return format(AS_SUBCLASS(self, torch.Tensor), spec)

    # Uses read the value, so gradients arrive there.
    def retain_grad(self) -> None:
        self._gradstats.value.retain_grad()  # type: ignore[attr-defined]

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return self._gradstats.value.retains_grad  # type: ignore[attr-defined]

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        return self._gradstats.value.grad  # type: ignore[attr-defined]

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self._gradstats.value.grad = gradient  # type: ignore[attr-defined]


# Graphs are traced with tensors of the last class, any of which may be tracked.
TRACKED_TYPES = frozenset({TrackedParameter, DerivedTensor, FunctionalTensor})


@cache
def replace_parameter_constructor() -> None:
    """Allow a parameter to be made from a tracked tensor, as a new leaf with its values.

    PyTorch requires that detaching a tensor of a subclass returns one of that subclass.
    """
    made = torch.nn.Parameter.__new__

    @wraps(made)
    def new(cls, data=None, requires_grad=True):
        return made(cls, data.detach() if type(data) in TRACKED_TYPES else data, requires_grad)

    torch.nn.Parameter.__new__ = new  # type: ignore[method-assign]


@cache
def replace_variable_constructor() -> None:
    """From now on, show ``torch.autograd.Variable(x)`` of old code to contexts as x.detach()."""
    made = torch.autograd.Variable.__new__

    @wraps(made)
    def new(cls, data=None, requires_grad=False, **others):
        if not isinstance(data, Tensor) or innermost_mode() is None:
            return made(cls, data, requires_grad, **others)
        return data.detach().requires_grad_(requires_grad)

    torch.autograd.Variable.__new__ = new  # type: ignore[method-assign]


@cache
def replace_as_subclass() -> None:
    """From now on, show ``x.as_subclass(cls)`` to contexts."""
    Tensor.as_subclass = as_subclass  # type: ignore[method-assign]


# Not empty once the compiler skips the frame of ``as_subclass``, where the function called itself.
TRACED: list[bool] = []


def as_subclass(self, cls):
    """Return a tensor as one of another class, whose examples lie as before.

    Replaces ``Tensor.as_subclass``.
    """
    if TRACED and torch.compiler.is_dynamo_compiling():
        return self.as_subclass(cls)  # the compiler takes the method for PyTorch's own
    shown = torch._C._len_torch_function_stack() and not torch._C._is_torch_function_all_disabled()
    mode = innermost_mode() if shown else None
    if mode is None:
        return AS_SUBCLASS(self, cls)
    if node_of(self) is not None:
        return self.view_as(self) if cls is Tensor else AS_SUBCLASS(self, cls)
    with torch._C.DisableTorchFunction():
        result = AS_SUBCLASS(self, cls)
        mode.tracker.marks.place_like(result, self)
    return result


def run(func, args, kwargs):
    """Run an operation on tracked tensors, inside a compiled function or not."""
    if torch.compiler.is_dynamo_compiling():
        return _record(func, args, kwargs)
    return run_followed(func, args, kwargs)


def run_followed(func, args, kwargs):
    """Have the context of the first tracked operand run an operation, if any."""
    node = _first_open([*args, *kwargs.values()] if kwargs else args)
    node = node or _first_open(operands_of(args, kwargs))  # also inside lists
    if node is not None:
        return node.tracker.dispatch(func, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _first_open(items: Iterable[Any]) -> Node | None:
    """Return the node of the first item that an open context tracks, if any."""
    for item in items:
        if type(item) in TRACKED_TYPES:
            node: Node | None = getattr(item, "_gradstats", None)
            if node is not None and not node.tracker.closed:
                return node
    return None


def _record(func, args, kwargs):
    """Run an operation that the compiler records, as if it were on plain tensors."""
    if getattr(func, "__name__", "") == "__get__":
        if isinstance(func.__self__, FunctionType):
            if func.__self__.__name__ in METHODS:
                return partial(METHODS[func.__self__.__name__], args[0])
            # PyTorch 2.11 looks up methods written in Python this way, and cannot trace the answer.
            leave_graph("a method of a parameter that is written in Python")
        # With a mode on, the compiler calls this for every property of a subclass. It is a block of
        # its own, since PyTorch 2.11 would otherwise disable the mode for the whole graph.
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs)
    func = OPERATORS.get(getattr(func, "__name__", ""), FUNCTIONS.get(func, func))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def node_of(item) -> Node | None:
    """Return the node of a tracked tensor; None for everything else."""
    return getattr(item, "_gradstats", None) if type(item) in TRACKED_TYPES else None


def nodes_of(items: Iterable[Any]) -> list[Node]:
    """Return the nodes of the tracked tensors among some items, in order."""
    return [node for node in map(node_of, items) if node is not None]


def first_node(*items) -> Node:
    """Return the node of the first tracked tensor among some items, of which one is tracked."""
    return nodes_of(items)[0]


def wrap(node: Derived) -> torch.Tensor:
    """Return the tensor that user code gets for a derived node."""
    node.tracker.derived = True
    value = node.value
    traced = isinstance(value, FunctionalTensor)
    tensor = value.view_as(value) if traced else AS_SUBCLASS(value, DerivedTensor)
    # Tracked uses read the node's value, so an edge of the autograd graph to the tensor returned
    # here is a use that was not seen.
    node.tracker.shown[tensor.grad_fn] = node
    show(node, tensor)  # from now on, tensor.grad_fn is that of the value
    return tensor


def show(node: Derived, tensor: torch.Tensor) -> None:
    """Have a tensor in the user's code represent a derived node."""
    before = vars(tensor).get("_gradstats")  # the tensor's node until it was changed in place
    if before is not None and before.value.retains_grad:
        node.value.retain_grad()
    tensor._gradstats = node  # type: ignore[attr-defined]
    node.shown = ref(tensor)
    node.tracker.visible[node] = None


def value_of(item):
    """Return the plain tensor of a tracked one; everything else unchanged."""
    node = node_of(item)
    return item if node is None else node.value


def unwrap(item):
    """Return the plain tensor of a derived one; everything else unchanged."""
    node = node_of(item)
    return node.value if isinstance(node, Derived) else item
