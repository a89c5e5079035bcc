"""A forward that records what happens to every parameter, without raising for any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradstats._compiler import imported_compiler, running_eagerly
from gradstats.capture._coverage import check_coverage
from gradstats.capture._selection import check_trackable
from gradstats.capture._tracker import DEFAULT_WORKSPACE, Tracker
from gradstats.capture.following._taken import ABOUT_EXAMPLES, take_call, took_doubtful
from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._nested import operands_of, rebuild, tensors_in
from gradstats.capture.parameters._tensors import nodes_of, value_of
from gradstats.capture.parameters._transforms import HiddenError
from gradstats.capture.uses._uses import Settings
from gradstats.errors import GradStatsError


class Survey(Tracker):
    """A context that notes refused operations and goes on. Its numbers are not valid.

    Attributes:
        operations: name of a parameter → names of the operations that used it, in order.
        refused: name of a parameter → why its per-example gradient is not known.
    """

    def __init__(self, model: nn.Module, **options: Any):
        settings = Settings(weight_gradients=True, fused=True, workspace=DEFAULT_WORKSPACE)
        super().__init__(model, settings=settings, **options)
        self.operations: dict[str, list[str]] = {root.name: [] for root in self.roots}
        self.refused: dict[str, str] = {}

    def open(self) -> None:
        for root in list(self.roots):
            try:
                check_trackable(root)
            except GradStatsError as error:
                self._note(error)
                self.roots.remove(root)
        super().open()

    def dispatch(self, func, args: tuple[Any, ...], kwargs: dict[str, Any]):
        try:
            result = super().dispatch(func, args, kwargs)
        except GradStatsError as error:
            if self.maps_examples is not None and isinstance(error, HiddenError):
                raise  # torch.vmap then tries another way
            self._note(error)
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*rebuild(args, value_of), **rebuild(kwargs, value_of))
        if any(item.requires_grad for item in tensors_in(result)):
            for node in nodes_of(operands_of(args, kwargs)):
                for root in node.roots:
                    names = self.operations[root.name]
                    if function_name(func) not in names:
                        names.append(function_name(func))
        return result

    def find_hidden_uses(self, losses: Tensor) -> None:
        """Note the parameters that are used by operations that no context can see."""
        while losses.grad_fn is not None:
            try:
                check_coverage(self, [losses.grad_fn])
                return
            except GradStatsError as error:
                self._note(error)
                self.roots = [root for root in self.roots if root.name not in error.parameters]

    def _note(self, error: GradStatsError) -> None:
        """Note an error for the parameters that it names; raise one that names none."""
        if not error.parameters:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, which would keep the forward alive
        for name in error.parameters:
            self.refused.setdefault(name, str(error))


def survey(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    entries: Sequence[Sequence[Any]],
    **options: Any,
) -> Survey:
    """Return what a forward of ``loss_fn`` does to each parameter, running compiled parts eagerly.

    If something is refused, and tensors that are constants may have been taken for data, the
    forward is run once more with these as constants, as it is for gradients.

    Args:
        model, batch: what ``loss_fn`` takes.
        loss_fn: may be called twice.
        entries: lists in the batch that hold one entry for each example, in order.
        options: the other arguments of Tracker.
    """
    found = Survey(model, **options)
    try:
        _look(found, model, batch, loss_fn, entries)
    except ABOUT_EXAMPLES:
        if not took_doubtful(found.marks, loss_fn, model, tensors_in(batch)):
            raise
    else:
        if not (found.refused and took_doubtful(found.marks, loss_fn, model, tensors_in(batch))):
            return found
    found = Survey(model, doubtful_are_data=False, **options)
    _look(found, model, batch, loss_fn, entries)
    return found


def _look(
    found: Survey,
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    entries: Sequence[Sequence[Any]],
) -> None:
    """Run a forward under a survey."""
    take_call(found.marks, loss_fn, model, tensors_in(batch), entries)
    # If the compiler has not been imported, nothing is compiled; importing it takes seconds.
    stance = nullcontext() if imported_compiler() is None else running_eagerly()
    with torch.enable_grad(), stance:
        try:
            try:
                found.open()
                losses = loss_fn(model, batch)
                if isinstance(losses, Tensor):
                    found.find_hidden_uses(losses)
            finally:
                found.close()
        finally:
            found.close()  # again, in case an interrupt hit the call above as it began
