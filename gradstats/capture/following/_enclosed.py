"""Tensors in the closures, defaults and globals of functions, and in objects that modules keep."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import _lru_cache_wrapper, lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from gradstats.capture.parameters._attributes import PLAIN_TYPES, tensors_kept

# Longer containers are not searched: they hold no weights, and few hold modules.
LONGEST, LONGEST_OF_MODULES = 10_000, 100
CONTAINERS = (list, tuple, dict)
# A search ends after this many objects.
MOST = 100_000
# Types of objects in which nothing is searched.
EMPTY_TYPES = PLAIN_TYPES | {type, ModuleType, BuiltinFunctionType}
READS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
# Levels that are searched for caches: methods, the functions they use, and those that these use.
DEPTH_OF_CACHES = 3
# Both conditions are needed: derived classes may have the same module name, and users may have put
# classes of their own into ``torch.nn``.
LAYERS_OF_PYTORCH = frozenset(
    each
    for each in vars(nn).values()
    if isinstance(each, type) and each.__module__.startswith("torch.")
)
CACHES: WeakKeyDictionary[type, list[ref[_lru_cache_wrapper]]] = WeakKeyDictionary()


class EnclosedTensors:
    """The tensors in the closures and globals of a loss function and of a model's code.

    Those of the batch are left out. The search runs when it is first needed: in most calls, never.
    """

    def __init__(self, loss_fn: Any, model: nn.Module, batch: Iterable[Tensor]):
        self._loss_fn = loss_fn
        self._model = model
        self._batch = set(map(id, batch))
        self._found: dict[int, Tensor] | None = None

    def __contains__(self, tensor: object) -> bool:
        if self._found is None:
            self._found = enclosed_tensors(*sources_of(self._model), self._loss_fn)
        return id(tensor) in self._found and id(tensor) not in self._batch


def of_layers(model: nn.Module, loss_fn: Any, batch: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that only a model's code uses from closures, globals and objects."""
    found = enclosed_tensors(*sources_of(model))
    for tensor in (*enclosed_tensors(loss_fn).values(), *batch):
        found.pop(id(tensor), None)
    return [tensor for tensor in found.values() if not tensor.requires_grad]


def sources_of(model: nn.Module) -> Iterator[Any]:
    """Yield methods of the user's own modules, and the functions and objects that modules keep."""
    seen: set[type] = set()
    for module in model.modules():
        if type(module) not in seen:
            yield from filter(_is_function, _methods(type(module)))
        seen.add(type(module))
        for kept in vars(module).values():
            if _is_function(kept):
                yield kept
            elif not isinstance(kept, (type, nn.Module, Tensor)):
                yield getattr(kept, "__dict__", None)


def _is_function(item: Any) -> bool:
    return isinstance(item, (FunctionType, MethodType, partial, _lru_cache_wrapper))


def caches_of(kinds: Iterable[type[nn.Module]]) -> list[_lru_cache_wrapper]:
    """Return the caches (functools.lru_cache) around methods of classes, and those they use."""
    caches: list[ref[_lru_cache_wrapper]] = []
    for kind in kinds:
        if kind in LAYERS_OF_PYTORCH:
            continue  # this is faster than a look-up in CACHES
        found = CACHES.get(kind)
        if found is None:
            found = CACHES[kind] = []
            level = list(_methods(kind))
            for _ in range(DEPTH_OF_CACHES):
                found += [ref(each) for each in level if isinstance(each, _lru_cache_wrapper)]
                functions = [each for each in level if isinstance(each, FunctionType)]
                level = [inner for each in functions for inner in _inside_function(each)]
        caches += found
    return [cache for each in caches if (cache := each()) is not None]


def _methods(kind: type) -> Iterator[Any]:
    """Yield the attributes of a class and its bases, except PyTorch's; methods as functions."""
    for base in kind.__mro__[:-1]:
        if base.__module__.partition(".")[0] != "torch":
            for attribute in vars(base).values():
                # Static and class methods wrap their function.
                yield getattr(attribute, "__func__", attribute)


def enclosed_tensors(*functions: Any) -> dict[int, Tensor]:
    """Return by id the tensors that functions use from closures, defaults, globals and objects.

    Lists, tuples and dicts are searched too, and functions of the same package that these functions
    use; modules are not.
    """
    return {id(tensor): tensor for tensor in _reached(functions, Tensor, LONGEST)}


def buffers_beside(loss_fn: Any) -> list[Tensor]:
    """Return the buffers of the modules that a loss function uses beside the model it is given.

    This runs before each call, so long lists and dicts are not searched.
    """
    found: list[Tensor] = []
    for module in modules_beside(loss_fn):
        with suppress(Exception):  # the module may not be initialised
            found.extend(module.buffers())
    return found


def modules_beside(loss_fn: Any) -> Iterator[nn.Module]:
    """Yield the modules that a loss function uses, without the modules in them."""
    return _reached([loss_fn], nn.Module, LONGEST_OF_MODULES)


def _reached(sources: Iterable[Any], kind: type, longest: int) -> Iterator[Any]:
    """Yield the objects of a kind among the sources, what these hold, and so on.

    The last of several objects is searched first. Containers with more than ``longest`` entries are
    not searched.
    """
    seen: set[int] = set()
    waiting = [*sources]
    while waiting and len(seen) < MOST:
        item = waiting.pop()
        if type(item) in EMPTY_TYPES or id(item) in seen:
            continue
        seen.add(id(item))
        if issubclass(type(item), kind):  # isinstance would read __class__, which may raise
            yield item
        elif not (type(item) in CONTAINERS and len(item) > longest):
            try:
                waiting.extend(_inside(item))
            except Exception:
                pass  # an object may not support being read


def _inside(item: Any) -> Iterator[Any]:
    if type(item) in CONTAINERS:
        yield from item.values() if isinstance(item, dict) else item
    elif isinstance(item, partial):
        yield from (item.func, *item.args, *item.keywords.values())
    elif isinstance(item, MethodType):
        yield item.__func__
        instance = item.__self__
        if isinstance(instance, (type, nn.Module)) or not hasattr(instance, "__dict__"):
            yield instance
        else:
            yield from vars(instance).values()
    elif isinstance(item, FunctionType):
        yield from _inside_function(item)
    elif isinstance(item, _lru_cache_wrapper):
        yield item.__wrapped__
        yield from tensors_kept(item)
    elif not isinstance(item, (type, nn.Module)):
        call = getattr(type(item), "__call__", None)  # noqa: B004
        if isinstance(call, FunctionType):  # an object that the user made callable
            yield call
            yield from getattr(item, "__dict__", {}).values()


def _inside_function(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            pass  # an empty cell
    package = _package(function)
    for name in _globals_read(function.__code__):
        value = function.__globals__.get(name)
        # Functions of other packages do not hold the caller's tensors.
        if not isinstance(value, FunctionType) or _package(value) == package:
            yield value


def _package(function: FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]


@lru_cache(maxsize=4096)
def _globals_read(code: CodeType) -> frozenset[str]:
    """Return the names of globals that code reads, including the code nested in it."""
    found: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in READS_GLOBAL:
            found.add(instruction.argval)
        elif isinstance(instruction.argval, CodeType):
            found |= _globals_read(instruction.argval)
    return frozenset(found)
