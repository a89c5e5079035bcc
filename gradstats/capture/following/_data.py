"""Where the examples lie in results of autograd Functions and ``grad``, and in the losses."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from gradstats._factors import Segments
from gradstats.capture.following._enclosed import EnclosedTensors, of_layers
from gradstats.capture.following._examples import (
    APART,
    IF_A_CONSTANT,
    MIXED,
    Examples,
    Whole,
    same_layout,
)
from gradstats.capture.following._meetings import EXCHANGED
from gradstats.capture.following._separable import joins_examples
from gradstats.capture.following._written import Written
from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._nested import argument_of, flatten, operands_of, tensors_in
from gradstats.capture.parameters._nodes import same_form
from gradstats.capture.parameters._tensors import node_of
from gradstats.errors import CoupledExamplesError, ExampleAxisError, UnsupportedOperationError


class Data(Written):
    """Constants and data of one batch.

    Attributes:
        followed: the last result of a rule that has already noted where its examples lie, so that
            the mode need not follow it.
        seen: while an autograd Function runs, the results of its operations, by id.
        inside: names of the parameters used in the forward of such Functions, whose backward may
            run a backward of its own.
        enclosed: tensors in the closures and globals of the loss function and the model's code.
    """

    def __init__(self, batch_size: int, batch_dim: int, segments: Segments | None):
        super().__init__(batch_size, batch_dim, segments)
        self.followed: Any = None
        self.seen: dict[int, ref[Tensor]] | None = None
        self.inside: set[str] = set()
        self.enclosed: Container[Tensor] = ()

    def take_call(self, loss_fn: Any, model: nn.Module, batch: Iterable[Tensor]) -> None:
        """Prepare for a call of a loss function with the tensors of a batch."""
        batch = list(batch)
        self.take_batch(batch)
        if not self.doubtful_are_data:
            self.keep_constant(of_layers(model, loss_fn, batch))
        self.enclosed = EnclosedTensors(loss_fn, model, batch)

    def took_doubtful(self, loss_fn: Any, model: nn.Module, batch: Iterable[Tensor]) -> bool:
        """Whether the forward of a call may have taken tensors for data that are none."""
        return self.taken is not None or bool(of_layers(model, loss_fn, batch))

    def kept(self) -> list[Tensor]:
        """Return the tensors that the model keeps, except tracked ones."""
        return list(self._constants.values())

    def run_function(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        data: list[Tensor],
    ) -> Any:
        """Run an autograd Function, and note where the examples lie in what it returns.

        For results of operations that were seen in its forward, that is known. Results filled by a
        kernel unseen are assumed to have the examples where the operands have them.

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
            results = [*tensors_in(returned)]
            trained = any(item.requires_grad for item in results)
            if trained or self.seen is not None:
                self.inside |= inside
            # Parameters among its operands are refused elsewhere (see _coverage).
            if inside and trained and len(given) == len(operands):
                self._check_inside(function, (*operands, *results), inside)
            for tensor in results:
                if not any(tensor is item for item in given):
                    # The id alone may be that of a tensor that has been freed since.
                    found = seen.get(id(tensor))
                    was_seen = found is not None and found() is tensor
                    self._note_returned(function, tensor, given, data, seen=was_seen)
        self.note_seen(returned)
        return returned

    def note_inside(self, operands: Sequence[Tensor]) -> None:
        """Note the parameters that an operation uses while gradients are not recorded."""
        nodes = filter(None, map(node_of, operands))
        self.inside.update(root.name for node in nodes for root in node.roots)

    def _check_inside(
        self, function: Callable[..., Any], tensors: Sequence[Tensor], inside: set[str]
    ) -> None:
        """Raise if an autograd Function runs a part of the model that cannot be followed.

        Its backward runs that part again on new tensors, whose layout only the contract tells.

        Args:
            function: its ``apply``.
            tensors: what it takes and returns.
            inside: names of the parameters that it uses.
        """
        for item in tensors:
            ordinary = self.by_contract(item) is not None
            if self.is_data(item):
                plain = not self.is_marked(item) and (ordinary or not item.requires_grad)
            else:
                plain = not ordinary
            if not plain:
                names = sorted(inside)
                raise UnsupportedOperationError(
                    f"{function_name(function)} runs a part of the model, with {names[:4]}, where "
                    "gradients are not recorded, as checkpoints of other libraries do, and takes "
                    f"or returns a tensor of shape {tuple(item.shape)} whose examples do not lie "
                    f"along batch_dim={self.batch_dim}, or that belongs to none. In its backward "
                    "it is then not known which example each row belongs to. Use "
                    "torch.utils.checkpoint.checkpoint, or leave the parameters out by name with "
                    f"exclude={names!r}.",
                    names,
                )

    def _note_returned(
        self,
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
        first, *others = map(self.owned, trained or data)
        same = first is not None and all(
            other is not None and same_layout(first, other) for other in others
        )
        if self._mixes(trained, tensor):
            self.place(tensor, MIXED)
            # A loss is trusted to be passed through, as wrappers of models do.
            if not tensor.dim() and all(map(self.is_additive, trained)):
                self.mark_sum(tensor)
            return
        if tensor.requires_grad and not same and self._has_others(trained):
            self._lose(tensor, trained, function_name(function))
            return
        if base is not None and any(item is base for item in given) and same_form(tensor, base):
            self.place_like(tensor, base)  # an operand that is returned as it is
            return
        lost = tensor.requires_grad and self.placed(tensor) is None
        if not self.is_data(tensor):
            self.take_batch([tensor])  # made without data, and filled with them
        elif seen and not lost:
            return
        if lost or any(map(self.is_marked, trained or data)):
            fits = same and not (isinstance(first, Examples) and not first.fits(tensor))
            self.place(tensor, first if fits else None, function_name(function))
            if not fits and all(map(self.is_additive, trained)):
                self.mark_sum(tensor)

    def follow_unchanged(self, operands: Sequence[Tensor], returned: Any) -> None:
        """Note on results with the operands' shapes what is known about these.

        A wrapper around a model, such as DistributedDataParallel, returns what the model returned.
        """
        results = [*tensors_in(returned)]
        if [item.shape for item in results] == [item.shape for item in operands]:
            with torch._C.DisableTorchFunction():
                for result, operand in zip(results, operands, strict=True):
                    if result is not operand and node_of(operand) is None:
                        self.place_like(result, operand)

    def note_exchanged(self, operands: Sequence[Tensor], returned: Any) -> None:
        """Note on exchanged results that they contain examples of other processes.

        A sum over the examples is trusted to become a sum over those of all processes.
        """
        with torch._C.DisableTorchFunction():
            trained = filter(self.is_trained, operands)
            apart = any(isinstance(self.placed(item), APART) for item in trained)
            if not apart or torch.distributed.get_world_size() == 1:
                return
            for result in tensors_in(returned):
                if result.requires_grad:
                    self.couple(result, EXCHANGED)

    def _has_others(self, trained: list[Tensor]) -> bool:
        """Whether some operands belong to one example as a whole, or their examples are unknown.

        The gradients that they pass back may depend on all examples, whatever the forward does.
        """
        return any(self.is_lost(item) or isinstance(self.owned(item), Whole) for item in trained)

    def note_seen(self, result: Any) -> None:
        """Note that an operation inside an autograd Function was seen, with its result."""
        if self.seen is not None:
            self.seen.update((id(item), ref(item)) for item in tensors_in(result))

    def follow_gradients(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Tensor]
    ) -> None:
        """Note where the examples lie in gradients that ``grad`` returned: as in its inputs."""
        inputs = argument_of(args, kwargs, 1, "inputs", ())
        sources = [inputs] if isinstance(inputs, Tensor) else inputs
        outputs = flatten((args[0],))
        joint = any(joins_examples(self, output) for output in outputs)
        for source, result in zip(sources, results, strict=True):
            if not isinstance(result, Tensor):
                continue
            if node_of(source) is None:
                owned = self.owned(source)
                if kwargs.get("is_grads_batched") and isinstance(owned, Examples):
                    owned = owned.along(owned.axis + 1)  # gradients along several vectors
                shared = owned is None and not self.is_marked(source) and result.requires_grad
                self.place(result, MIXED if shared else owned)
                if shared and not joint:
                    self.mark_sum(result)  # by what belongs to no example, over all of them
                if joint and result.requires_grad and result.grad_fn is not None:
                    self.couple(
                        result,
                        "is part of a derivative of values in which several examples met, other "
                        "than by a sum over them",
                    )
            else:
                self.mark_constant(result)  # a parameter's gradient, summed over the examples

    def note_followed(self, result: Tensor, examples: Examples) -> None:
        """Note where the examples lie in a rule's result, so that it need not be followed.

        Args:
            result: what the rule returns.
            examples: where the examples lie in it.
        """
        if examples.segments is not None:
            return
        if examples is not self._contract:
            self.place(result, examples)
        self.followed = result

    def place_like(self, tensor: Tensor, source: Tensor) -> None:
        """Note on a tensor that was computed row by row from another what is known about that."""
        if not self.is_data(source):
            self.mark_constant(tensor)
        elif self.is_marked(source) or self.layout_of(source) != self.by_contract(tensor):
            self.place(tensor, self.owned(source))
            if self.is_sum(source):
                self.mark_sum(tensor)

    def order_of(self, losses: Tensor) -> Tensor | None:
        """Return the example of each loss, (B,); None if they are in the batch's order."""
        if self.batch_size == 1:
            return None
        owned = self.owned(losses)
        if owned is MIXED:
            raise CoupledExamplesError(
                "each loss depends on several examples: trained values were summed, averaged, "
                "normalised or multiplied by a matrix along the example axis on the way. Such a "
                "loss, a contrastive one for instance, has no gradient of one example. Expected "
                "losses that depend on one example each: reduce over other axes, or detach what "
                f"comes from other examples. {IF_A_CONSTANT}"
            )
        plain = isinstance(owned, Examples) and owned.plain
        if plain or not self.is_marked(losses):
            return None
        if isinstance(owned, Whole):
            owned = self.rows_of_one(losses, 0)
        if not isinstance(owned, Examples):
            raise self._refusal_of_lost(losses)
        owner = owned.owner(losses.device)
        if owner.numel() != self.batch_size or owner.unique().numel() != self.batch_size:
            raise ExampleAxisError(
                f"the losses belong to the examples {owner.tolist()}, as followed through the "
                f"model, expected one loss for each of {self.batch_size} examples. Sum the losses "
                "of each example."
            )
        return owner

    def check_sum(self, loss: Tensor) -> None:
        """Raise unless a loss is known to be a sum over the examples."""
        if not self.is_additive(loss):
            raise ExampleAxisError(
                f"which values belong to which example was lost {self._where_lost(loss)}: they "
                "were moved or combined along the example axis in a way that cannot be followed, "
                "and the loss may be more than a sum over the examples, so that it has no gradient "
                f"of one example. {IF_A_CONSTANT} Expected a sum, a mean or a weighted sum of "
                "losses that depend on one example each: combine each example's own rows alone; if "
                "you know whose values they are, say so with gs.assign_rows."
            )
        if self.supposed and not self.knows_losses:
            raise ExampleAxisError(
                "nothing was written to some rows of a tensor, so that it is not known to which "
                "packed example they belong, and a loss over all examples does not tell. Expected "
                "one loss for each example, as tracker.backward(losses) takes; or say whose rows "
                "these are with gs.assign_rows."
            )

    def _refusal_of_lost(self, losses: Tensor) -> ExampleAxisError | CoupledExamplesError:
        """Return the error for losses whose examples are not known."""
        met = self.met_behind(losses)
        if met is not None:
            return self.refusal_of_meeting(met)
        return ExampleAxisError(
            f"which loss belongs to which example was lost {self._where_lost(losses)}: the losses, "
            "or what was combined with them, were moved or reduced along the example axis in a way "
            f"that cannot be followed. {IF_A_CONSTANT} Expected losses in the order of the batch, "
            "each of one example: reduce each example's own rows, or put rows back by indexing; if "
            "you know whose loss each is, say so with gs.assign_rows."
        )

    def _where_lost(self, losses: Tensor) -> str:
        operation = self.lost_at(losses)
        return f"at {operation}" if operation else "on the way"
