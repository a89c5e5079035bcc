"""Which parameters of a model are measured, and the names by which users know them."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from gradstats.capture.compiled._used import is_compiled
from gradstats.capture.parameters._nodes import Root
from gradstats.capture.parameters._tensors import TrackedParameter
from gradstats.errors import CoverageError, TrackingError, UnsupportedOperationError

# Wrappers that keep the model as ``module``. Other modules may have an attribute of that name too.
WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, AveragedModel)

# Prefixes that these wrappers and torch.compile put before parameter names.
WRAPPER_PREFIXES = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class Anatomy:
    """A model's modules and parameters, found in one pass.

    Attributes:
        modules: (path, module), each once, under its first path.
        parameters: name → parameter, each once, under its first name, in the model's order.
        prefix: what wrappers around the model put before each of these names.
        compiled: whether torch.compile was applied to the model or a part of it.
    """

    modules: list[tuple[str, nn.Module]]
    parameters: dict[str, nn.Parameter]
    prefix: str
    compiled: bool

    def named(self) -> dict[str, nn.Parameter]:
        """Return every parameter, frozen ones too, by its name in the unwrapped model, or raise."""
        if not (self.prefix or self.compiled):
            return self.parameters
        whole: dict[str, str] = {}
        for name in self.parameters:
            bare = clean_name(name, self.prefix)
            other = whole.setdefault(bare, name)
            # A class derived from a wrapper may have parameters beside those of the model in it.
            if other != name:
                raise CoverageError(
                    f"{other!r} and {name!r} have the same name, {bare!r}, without the prefixes of "
                    "wrappers, so their gradients cannot be told apart by name. Expected different "
                    "names: rename the attribute of one of them."
                )
        return {bare: self.parameters[name] for bare, name in whole.items()}

    def _check_values(self) -> None:
        """Raise unless all parameters and buffers hold values."""
        for path, module in self.modules:
            for name, value in chain(module._parameters.items(), module._buffers.items()):
                if value is not None and value.is_meta:
                    place = f"{path}.{name}" if path else name
                    raise TrackingError(
                        f"{place!r} of the model is on the meta device, where tensors hold no "
                        "values. Load values first: model.to_empty(device=...), then "
                        "model.load_state_dict(...)."
                    )

    def select(
        self, parameters: Sequence[str] | str | None, exclude: Sequence[str] | str
    ) -> dict[str, nn.Parameter]:
        """Return the parameters to track, by name and in the model's order, or raise.

        Args:
            parameters: fnmatch patterns over the names of parameters that require grad.
            exclude: fnmatch patterns over all names, those of frozen parameters too.
        """
        self._check_values()
        named = self.named()
        trainable = {name: each for name, each in named.items() if each.requires_grad}
        if not trainable:
            adapted = is_adapted(module for _, module in self.modules)
            loaded = " peft loads adapters for inference unless it is given is_trainable=True."
            raise CoverageError(
                "the model has no parameter that requires grad, so there is no gradient to "
                "measure. Set requires_grad on the parameters whose gradients you want."
                f"{loaded if adapted else ''}"
            )
        leave_out = patterns_of("exclude", exclude)
        if parameters is None and not leave_out:
            return trainable
        include = patterns_of("parameters", parameters) if parameters is not None else ("*",)
        included = self._chosen_by(include, trainable, "parameter that requires grad")
        names = included - self._chosen_by(leave_out, named, "parameter")
        selected = {name: parameter for name, parameter in trainable.items() if name in names}
        if not selected:
            raise CoverageError(
                f"parameters={parameters!r} and exclude={exclude!r} leave no parameter to measure. "
                "Expected at least one: widen the first or narrow the second."
            )
        return selected

    def _chosen_by(
        self, patterns: Iterable[str], named: dict[str, nn.Parameter], kind: str
    ) -> set[str]:
        """Return the names that any pattern matches; raise for one that matches none.

        Args:
            patterns: fnmatch patterns over names.
            named: name → parameter.
            kind: describes the parameters, for the message.
        """
        chosen: set[str] = set()
        for pattern in patterns:
            found = _matching(pattern, named)
            chosen.update(found)
            if not found:
                wider = f"*{pattern.strip('*')}*"
                more = len(_matching(wider, named))
                raise CoverageError(
                    f"the pattern {pattern!r} matches no {kind}. Expected a pattern that matches a "
                    f"whole name, such as one of {list(named)[:8]}{' …' if len(named) > 8 else ''}."
                    f"{f' {wider!r} matches {more} of them.' if more else ''}"
                    f"{self._tied_under(pattern, named)}"
                )
        return chosen

    def _tied_under(self, pattern: str, named: dict[str, nn.Parameter]) -> str:
        """Explain a pattern that matches a tied parameter's later name, not its first."""
        first = {id(parameter): name for name, parameter in named.items()}
        _, model = self.modules[0]
        for other, parameter in model.named_parameters(remove_duplicate=False):
            other = clean_name(other, self.prefix)
            if id(parameter) in first and fnmatchcase(other, pattern):
                return f" {other!r} is tied to {first[id(parameter)]!r}: use that name."
        return ""


def anatomy_of(model: nn.Module) -> Anatomy:
    """Return a model's anatomy."""
    modules: list[tuple[str, nn.Module]] = []
    parameters: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    compiled = False

    # A stack, so that modules come in the order of `named_modules`.
    left: list[tuple[str, nn.Module]] = [("", model)]
    while left:
        path, module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        modules.append((path, module))
        compiled = compiled or is_compiled(module)
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is None or (number := id(parameter)) in seen:
                continue
            seen.add(number)
            parameters[prefix + name] = parameter
        if module._modules:
            for name, child in reversed(module._modules.items()):
                if child is not None:
                    left.append((prefix + name, child))
    return Anatomy(modules, parameters, wrapper_prefix(model), compiled)


def select_parameters(
    model: nn.Module, parameters: Sequence[str] | str | None, exclude: Sequence[str] | str
) -> dict[str, nn.Parameter]:
    """Return the parameters of a model to track, all with values; see ``Anatomy.select``."""
    selected = anatomy_of(model).select(parameters, exclude)
    for name, parameter in selected.items():
        if type(parameter) is nn.UninitializedParameter:
            raise UnsupportedOperationError(
                f"parameter {name!r} is lazy: it has no values before the model's first forward. "
                "Run one forward first.",
                [name],
            )
    return selected


def wrapper_prefix(model: nn.Module) -> str:
    """Return the prefix that wrappers around a whole model put before all names in it."""
    prefix, inner = "", model
    while "_orig_mod" in inner._modules or isinstance(inner, WRAPPERS):
        held = "_orig_mod" if "_orig_mod" in inner._modules else "module"
        prefix, inner = f"{prefix}{held}.", inner.get_submodule(held)
    return prefix


def data_parallel_in(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the model if it is a DistributedDataParallel, inside torch.compile or not."""
    while "_orig_mod" in model._modules:
        model = model.get_submodule("_orig_mod")
    return model if isinstance(model, nn.parallel.DistributedDataParallel) else None


def has_processes() -> bool:
    """Whether this process may be one of several of torch.distributed."""
    return dist.is_available() and dist.is_initialized()


def data_parallel_within(model: nn.Module) -> list[nn.parallel.DistributedDataParallel]:
    """Return all that is a DistributedDataParallel in a model, itself included."""
    if not has_processes():
        return []  # saves the walk over the modules
    kind = nn.parallel.DistributedDataParallel
    return [module for module in model.modules() if isinstance(module, kind)]


def is_adapted(modules: Iterable[nn.Module]) -> bool:
    """Whether peft put adapters into any of these modules."""
    return any(hasattr(module, "peft_config") for module in modules)


def clean_name(name: str, prefix: str) -> str:
    """Return the name of a parameter or module as the unwrapped model knows it.

    Args:
        prefix: the model's ``wrapper_prefix``.
    """
    return name.removeprefix(prefix).replace("._orig_mod.", ".")


def matching_names(given: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """Map each given name to the name that the model probably has for it.

    Names from a wrapped model all begin with the wrappers' prefixes. As many of these are removed
    as makes most names agree with the model's.

    Args:
        given: names in a state dict, an optimizer, or a direction.
        known: names in the unwrapped model.
    """
    names = {name: clean_name(name, "") for name in given}
    candidates = [names]
    while names:
        prefixes = (p for p in WRAPPER_PREFIXES if all(n.startswith(p) for n in names.values()))
        prefix = next(prefixes, None)
        if prefix is None:
            break
        names = {name: bare.removeprefix(prefix) for name, bare in names.items()}
        candidates.append(names)
    return max(candidates, key=lambda names: sum(bare in known for bare in names.values()))


def quoted(names: Sequence[str]) -> str:
    """Return the first four names, and how many more there are, for a message."""
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" * (len(names) > 4))


def check_trackable(root: Root) -> None:
    """Raise for a parameter whose class cannot be changed for the duration of a context."""
    parameter = root.parameter
    if type(parameter) is TrackedParameter:
        raise TrackingError(
            f"{root.describe()} is already tracked by another open context. Close that one first. "
            "If an interrupt left it open, call tracker.__exit__(None, None, None)."
        )
    if type(parameter) is not nn.Parameter:
        raise UnsupportedOperationError(
            f"{root.describe()} is a {type(parameter).__name__}, expected a plain "
            "torch.nn.Parameter: a subclass may compute with hidden values. If it is a lazy "
            "parameter, run one forward first. Otherwise leave it out by name with "
            f"exclude=[{root.name!r}].",
            [root.name],
        )


def patterns_of(name: str, patterns: Sequence[str] | str | None) -> tuple[str, ...]:
    """Return the patterns in an argument, or raise.

    Args:
        name: of the argument.
        patterns: its value; None for no patterns.
    """
    found: tuple = ()
    if patterns is None or (type(patterns) is tuple and not patterns):
        return found
    expected = "expected an fnmatch pattern over names, or a list of several."
    # Patterns are read for each batch of a run.
    if isinstance(patterns, Iterator):
        raise CoverageError(
            f"{name} is a {type(patterns).__name__}, which can be read only once, {expected}"
        )
    if isinstance(patterns, Tensor):
        raise CoverageError(f"{name} is Tensor, {expected}")
    with suppress(TypeError):
        found = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        if all(isinstance(pattern, str) for pattern in found):
            return found
    # Do not print tensors, whose values would fill the screen.
    tensor = next((type(item).__name__ for item in found if isinstance(item, Tensor)), None)
    given = f"is {reprlib.repr(patterns)}" if tensor is None else f"holds {tensor}"
    raise CoverageError(f"{name} {given}, {expected}")


def _matching(pattern: str, names: Collection[str]) -> list[str]:
    """Return the names that an fnmatch pattern matches, and a name that it is itself."""
    if not any(sign in pattern for sign in "*?["):
        return [pattern] if pattern in names else []
    return [name for name in names if name == pattern or fnmatchcase(name, pattern)]
