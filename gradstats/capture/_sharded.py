"""Parameters that ``fully_shard`` shards: they are whole only while a managed module runs.

At other times a module holds a shard of each parameter (a DTensor). Its forward and backward use
another object, the whole parameter, which FSDP keeps and refills. That one is tracked: a forward
pre-hook on each managed module, which runs after FSDP's own, gives it the tracked class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from gradstats.capture._selection import Anatomy
from gradstats.capture.parameters._nodes import Root
from gradstats.errors import CoverageError, UnsupportedOperationError

Meet = Callable[[nn.Parameter, Root | None], None]


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether a parameter is distributed over processes."""
    return type(parameter) is not nn.Parameter and hasattr(parameter, "device_mesh")


class ShardedParameters:
    """The sharded parameters of a model for the duration of one context.

    Args:
        anatomy: the model's.
        roots: all tracked parameters, sharded or not.
    """

    def __init__(self, anatomy: Anatomy, roots: Iterable[Root]):
        self._roots: dict[int, Root] = {}
        # For each managed module, where its parameters are: (owner, name, root of the shard).
        self._places: dict[nn.Module, list[tuple[nn.Module, str, Root | None]]] = {}
        self._whole: dict[int, nn.Parameter] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        for path, module in anatomy.modules:
            if type(module).__name__ == "FullyShardedDataParallel":
                raise UnsupportedOperationError(
                    f"module {path!r} is a FullyShardedDataParallel, which computes with views of "
                    "a flat parameter that no module holds. Expected its successor fully_shard, or "
                    "DistributedDataParallel."
                )
        if {*map(type, anatomy.parameters.values())} == {nn.Parameter}:
            return  # most models
        if not any(map(is_sharded, anatomy.parameters.values())):
            return
        self._roots = {id(root.parameter): root for root in roots if is_sharded(root.parameter)}
        from torch.distributed.fsdp import FSDPModule

        placed = set()
        for _, module in anatomy.modules:
            if not isinstance(module, FSDPModule):
                continue
            places = self._places[module] = []
            for owner in _managed(module, FSDPModule):
                for name, parameter in owner._parameters.items():
                    if parameter is not None and is_sharded(parameter):
                        places.append((owner, name, self._roots.get(id(parameter))))
                        placed.add(id(parameter))
        for root in self._roots.values():
            if id(root.parameter) not in placed:
                raise _tensor_parallel(root.describe())

    @property
    def any(self) -> bool:
        """Whether any parameter is sharded."""
        return bool(self._places)

    def others(self, roots: Sequence[Root]) -> Sequence[Root]:
        """Return the given parameters that are not sharded."""
        if not self._roots:
            return roots
        return [root for root in roots if id(root.parameter) not in self._roots]

    def open(self, meet: Meet) -> None:
        """Register the hooks that track the whole parameters as they appear.

        Args:
            meet: called with a whole parameter and its root when it first appears; if it is not
                tracked, with None for the root, and each time that it appears.
        """
        for module in self._places:
            hook = partial(self._before_forward, meet)
            self._hooks.append(module.register_forward_pre_hook(hook))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before_forward(self, meet: Meet, module: nn.Module, args) -> None:
        for owner, name, root in self._places[module]:
            whole = owner._parameters[name]
            assert whole is not None
            if is_sharded(whole):
                raise _tensor_parallel(name if root is None else root.describe())
            if root is None or id(whole) not in self._whole:
                meet(whole, root)
            self._whole[id(whole)] = whole

    def knows(self, leaf: torch.Tensor) -> bool:
        """Whether a leaf of the graph is a whole parameter that was seen."""
        return id(leaf) in self._whole

    def check_known(self, leaves: Iterable[torch.Tensor]) -> None:
        """Raise for a whole parameter in the graph that no hook has seen."""
        for leaf in leaves if self._places else ():
            if isinstance(leaf, nn.Parameter) and not self.knows(leaf):
                raise CoverageError(
                    f"a parameter of shape {tuple(leaf.shape)} was used outside the forward of the "
                    "module that fully_shard manages, where it cannot be tracked. Call the model "
                    "itself, or apply fully_shard to the module whose parameters are used."
                )


def _managed(module: nn.Module, managed_type: type) -> Iterator[nn.Module]:
    """Yield a managed module and the modules below it, except those of other managed modules."""
    yield module
    for child in module.children():
        if not isinstance(child, managed_type):
            yield from _managed(child, managed_type)


def _tensor_parallel(described: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"{described} is a DTensor in the forward (tensor parallelism), expected a plain "
        "parameter: each process would see only a part of every example's gradient. Use "
        "DistributedDataParallel or fully_shard instead, or leave the parameter out by name with "
        "exclude=."
    )
