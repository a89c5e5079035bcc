"""Where the examples lie in what autograd Functions, wrappers, exchanges and ``grad`` return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gradstats._compiler import is_compiling
from gradstats.capture.following._examples import APART, MIXED, Examples, Whole, same_layout
from gradstats.capture.following._following import note_lost, spans_examples
from gradstats.capture.following._layout import follow
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._meetings import EXCHANGED
from gradstats.capture.following._separable import joins_examples
from gradstats.capture.following._slots import ELEMENT_BY_ELEMENT, REARRANGES
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._graph import nodes_behind
from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._nested import (
    argument_of,
    flatten,
    is_among,
    operands_of,
    tensors_in,
)
from gradstats.capture.operations._operations import JOINS
from gradstats.capture.parameters._nodes import same_form
from gradstats.capture.parameters._tensors import node_of
from gradstats.errors import UnsupportedOperationError


class Functions:
    """The autograd Functions that run inside a context.

    Attributes:
        seen: while one runs, the results of its operations, by id.
        inside: names of the parameters used in the forward of such Functions; their backward may
            run a backward of its own.
    """

    def __init__(self, marks: Marks):
        self._marks = marks
        self.seen: dict[int, ref[Tensor]] | None = None
        self.inside: set[str] = set()

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        data: list[Tensor],
    ) -> Any:
        """Run an autograd Function, and note where the examples lie in what it returns.

        Results of operations that were seen in its forward have been followed. Results that a
        kernel filled, unseen, are assumed to have the operands' layout.

        Args:
            function: its ``apply``.
            args, kwargs: what it is called with.
            data: its operands of data.
        """
        outer, self.seen = (self.seen, self.inside), {}
        self.inside = set()
        try:
            returned = function(*args, **kwargs)
            seen, inside = self.seen, self.inside
        finally:
            self.seen, self.inside = outer
        with torch._C.DisableTorchFunction():
            operands = operands_of(args, kwargs)
            given = [item for item in operands if node_of(item) is None]
            results = tensors_in(returned)
            trained = any(item.requires_grad for item in results)
            if trained or self.seen is not None:
                self.inside |= inside
            # Parameters among its operands are refused elsewhere (see _coverage).
            if inside and trained and len(given) == len(operands):
                _check_inside(self._marks, function, (*operands, *results), inside)
            for tensor in results:
                if not is_among(tensor, given):
                    # The id alone may be that of a tensor that has been freed since.
                    found = seen.get(id(tensor))
                    was_seen = found is not None and found() is tensor
                    _note_returned(self._marks, function, tensor, given, data, seen=was_seen)
        self.note_seen(returned)
        return returned

    def note_seen(self, result: Any) -> None:
        """Note the result of an operation that was seen inside an autograd Function."""
        if self.seen is not None:
            self.seen.update((id(item), ref(item)) for item in tensors_in(result))

    def note_inside(self, operands: Sequence[Tensor]) -> None:
        """Note the parameters that an operation uses while no gradients are recorded."""
        nodes = filter(None, map(node_of, operands))
        self.inside.update(root.name for node in nodes for root in node.roots)


def _check_inside(
    marks: Marks, function: Callable[..., Any], tensors: Sequence[Tensor], inside: set[str]
) -> None:
    """Raise if an autograd Function runs a part of the model that cannot be followed.

    Its backward runs that part again on new tensors, of which only the contract tells the layout.

    Args:
        function: its ``apply``.
        tensors: what it takes and returns.
        inside: names of the parameters that it uses.
    """
    for item in tensors:
        ordinary = marks.has_example_axis(item)
        if marks.is_data(item):
            plain = not marks.is_marked(item) and (ordinary or not item.requires_grad)
        else:
            plain = not ordinary
        if not plain:
            names = sorted(inside)
            raise UnsupportedOperationError(
                f"{function_name(function)} runs a part of the model, with {names[:4]}, without "
                "recording gradients, like checkpoints of other libraries: it is not known which "
                "example each row belongs to when its backward runs this part again. Got "
                f"a tensor of shape {tuple(item.shape)}, expected only tensors with their examples "
                f"along batch_dim={marks.batch_dim}. Use torch.utils.checkpoint.checkpoint, or "
                f"leave the parameters out by name with exclude={names!r}.",
                names,
            )


def _note_returned(
    marks: Marks,
    function: Callable[..., Any],
    tensor: Tensor,
    given: list[Tensor],
    data: list[Tensor],
    *,
    seen: bool,
) -> None:
    """Note where the examples lie in a result of an autograd Function.

    Args:
        function: its ``apply``.
        tensor: the result.
        given, data: the Function's operands that are not tracked, and those of data.
        seen: whether the result was computed by operations that were seen.
    """
    base = tensor._base
    trained = [item for item in data if item.requires_grad]
    first, *others = map(marks.owned, trained or data)
    same = first is not None and all(
        other is not None and same_layout(first, other) for other in others
    )
    if spans_examples(marks, trained, tensor):
        marks.place(tensor, MIXED)
        # A loss is trusted to be passed through unchanged, as by wrappers of models.
        if not tensor.dim() and all(map(marks.is_additive, trained)):
            marks.values.note(tensor, sum=True)
        return
    if tensor.requires_grad and not same and _has_others(marks, trained):
        note_lost(marks, tensor, trained, function_name(function))
        return
    if base is not None and is_among(base, given) and same_form(tensor, base):
        marks.place_like(tensor, base)  # an operand that is returned as it is
        return
    lost = tensor.requires_grad and marks.owned(tensor) is None
    if not marks.is_data(tensor):
        marks.take_batch([tensor])  # made without data, and filled with them
    elif seen and not lost:
        return
    if lost or any(map(marks.is_marked, trained or data)):
        fits = same and not (isinstance(first, Examples) and not first.fits(tensor))
        marks.place(tensor, first if fits else None, function_name(function))
        if not fits and all(map(marks.is_additive, trained)):
            marks.values.note(tensor, sum=True)


def follow_unchanged(marks: Marks, operands: Sequence[Tensor], returned: Any) -> None:
    """Note on results what is known about the operands, if all have the same shapes.

    A wrapper around a model, such as DistributedDataParallel, returns what the model returned.
    """
    results = tensors_in(returned)
    if [item.shape for item in results] == [item.shape for item in operands]:
        with torch._C.DisableTorchFunction():
            for result, operand in zip(results, operands, strict=True):
                if result is not operand and node_of(operand) is None:
                    marks.place_like(result, operand)


def note_exchanged(marks: Marks, operands: Sequence[Tensor], returned: Any) -> None:
    """Note that results of an exchange contain examples of other processes.

    A sum over the examples is trusted to become a sum over those of all processes.
    """
    with torch._C.DisableTorchFunction():
        trained = filter(marks.is_trained, operands)
        apart = any(isinstance(marks.owned(item), APART) for item in trained)
        if not apart or torch.distributed.get_world_size() == 1:
            return
        for result in tensors_in(returned):
            if result.requires_grad:
                marks.meetings.couple(result, EXCHANGED)


def _has_others(marks: Marks, trained: list[Tensor]) -> bool:
    """Whether some operands belong to one example as a whole, or to unknown ones.

    The gradients that a Function passes back to them may depend on all examples, whatever its
    forward does.
    """
    return any(marks.is_lost(item) or isinstance(marks.owned(item), Whole) for item in trained)


def follow_gradients(
    marks: Marks, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    """Note where the examples lie in gradients that ``grad`` returned: where they do in inputs."""
    inputs = argument_of(args, kwargs, 1, "inputs", ())
    sources = [inputs] if isinstance(inputs, Tensor) else inputs
    outputs = flatten((args[0],))
    batched = bool(kwargs.get("is_grads_batched"))
    vectors = flatten((kwargs.get("grad_outputs"),))
    joint = any(joins_examples(marks, output) for output in outputs) or any(
        _weighs_others(marks, output, vector, batched)
        for output, vector in zip(outputs, vectors, strict=False)
    )
    for source, result in zip(sources, results, strict=True):
        if not isinstance(result, Tensor):
            continue
        if node_of(source) is not None:
            marks.mark_constant(result)  # a parameter's gradient, summed over the examples
            continue
        if marks.meetings.crossed:
            marks.meetings.cross(result)  # its graph need not lead to what was differentiated
        if marks.meetings.supposed:
            marks.meetings.supposed.append(None)
        # All examples may share a constant, whatever its size: then its gradient is of all.
        has_examples = (
            marks.is_data(source)
            or marks.is_marked(source)
            or marks.batch_size == 1
            or _met_beside(marks, source, outputs)
        )
        owned = marks.owned(source) if has_examples or not result.requires_grad else None
        if batched and isinstance(owned, Examples):
            owned = owned.along(owned.axis + 1)  # gradients along several vectors
        shared = owned is None and not marks.is_marked(source) and result.requires_grad
        marks.place(result, MIXED if shared else owned)
        if shared and not joint:
            marks.values.note(result, sum=True)
        if joint and result.grad_fn is not None:
            marks.meetings.couple(
                result,
                "is part of a derivative of values in which several examples met, other than by a "
                "sum over them",
            )


def note_beside(marks: Marks, call: Call) -> None:
    """Note if each row of constants meets values only of the example in whose place it is.

    Also if another constant is made of one, row by row.

    Args:
        call: an operation, with all of its operands that are not tracked.
    """
    func, args, _, operands, result = call
    constants = [item for item in operands if item.requires_grad and not marks.is_data(item)]
    if not constants or is_compiling() or not isinstance(result, Tensor):
        return
    contract = marks.contract
    made = not marks.is_data(result)
    if func in REARRANGES and made and len(constants) == 1 and constants[0] is args[0]:
        rows = contract.fits(args[0]) and same_layout(follow(call, args[0], contract), contract)
    else:
        # The operands of a join have as many axes as each other.
        dims = {item.dim() for item in constants if func not in JOINS}
        rows = (
            (func in ELEMENT_BY_ELEMENT or func in JOINS)
            and dims <= {result.dim()}
            and all(map(contract.fits, (*constants, result)))
            and (made or same_layout(marks.owned(result), contract))
        )
    if rows:
        marks.meetings.beside[result.grad_fn] = made


def _met_beside(marks: Marks, constant: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Whether ``note_beside`` noted all uses of a constant by which values are differentiated."""
    beside = marks.meetings.beside
    if not beside or not marks.contract.fits(constant):
        return False
    nodes = {node for output in outputs for node in nodes_behind(output)}
    made = {get_gradient_edge(constant).node}
    while made:  # of what is made of it as well
        reads = [n for n in nodes if any(each in made for each, _ in n.next_functions)]
        if not all(node in beside for node in reads):
            return False
        made = {node for node in reads if beside[node]}
    return True


def _weighs_others(marks: Marks, output: Tensor, vector: Any, batched: bool) -> bool:
    """Whether the vector of a vector-Jacobian product weighs values of other examples.

    What is differentiated is their product, and both pass on gradients.
    """
    if not marks.is_trained(vector):
        return False
    weights, owned = marks.owned(vector), marks.owned(output)
    if batched and isinstance(owned, Examples):
        owned = owned.along(owned.axis + 1)
    apart = isinstance(weights, APART) and isinstance(owned, APART)
    return not (apart and same_layout(weights, owned))
