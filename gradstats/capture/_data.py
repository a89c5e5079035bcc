"""Where the examples lie after data are written into tensors, changed in place, differentiated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from gradstats._compiler import is_compiling
from gradstats._factors import Segments
from gradstats.capture._examples import MIXED, Examples, Whole, candidates, same_layout
from gradstats.capture._following import Following
from gradstats.capture._graph import nodes_behind
from gradstats.capture._layout import is_followed
from gradstats.capture._names import function_name
from gradstats.capture._nested import flatten, operands_of
from gradstats.capture._nodes import same_form
from gradstats.capture._tensors import node_of
from gradstats.errors import CoupledExamplesError, ExampleAxisError, UnsupportedOperationError

if TYPE_CHECKING:
    from gradstats.capture._writes import Write


class Data(Following):
    """Constants and data of one batch.

    Attributes:
        followed: the last result of a rule that has already noted where its examples lie, so that
            the mode need not follow it.
        seen: while an autograd Function runs, what its operations returned, by id.
        inside: names of the parameters that such Functions use in their forward: their backward may
            run a backward of its own.
    """

    def __init__(self, batch_size: int, batch_dim: int, segments: Segments | None):
        super().__init__(batch_size, batch_dim, segments)
        self.followed: Any = None
        self.seen: dict[int, ref[Tensor]] | None = None
        self.inside: set[str] = set()

    def follow_write(self, write: Write, target: Tensor, before: bool, after: Tensor) -> None:
        """Note where the examples lie in a tensor that data were written into.

        Args:
            write: what was written, and where.
            target: the operand.
            before: whether it held data already.
            after: what holds the data now: the operand, or a copy of it.
        """
        adds = write.adds and target.requires_grad and self._adds_sums(write, target, before)
        self._place_written(write, target, before, after)
        if adds and self.is_marked(after) and not isinstance(self.owned(after), Examples):
            self.mark_sum(after)

    def _adds_sums(self, write: Write, target: Tensor, before: bool) -> bool:
        """Whether sums over examples, or values of one, were just added to nothing or to a sum."""
        given = [item for item in write.values if self.is_trained(item)]
        kept = not before or self.is_sum(target, writes=1) or isinstance(self.owned(target), Whole)
        return kept and all(
            self.is_sum(item) or isinstance(self.owned(item), Whole) for item in given
        )

    def _place_written(self, write: Write, target: Tensor, before: bool, after: Tensor) -> None:
        given = write.values
        if write.index is not None and not (before or self.is_distinct(after)):
            given = (write.index,)  # only the place where a number is put says whose it is
        values = [
            item
            for item in given
            if isinstance(item, Tensor) and node_of(item) is None and self.is_data(item)
        ]
        if before and (one := self.sole_example([target, *values])):
            self.place(after, one)
            return
        fresh = not before or self._shows_unknown(target)
        if not fresh and write.read is None and not self.follows_layouts:
            if all(value.shape == target.shape for value in values):
                return
        owned = []
        for value in values:
            layout = self.owned(value)
            if isinstance(layout, (Examples, Whole)):
                owned.append((value, layout))
            elif self.is_marked(value):
                self.place(after, layout)
                if after is target:
                    self._note_base(target, None, first=False)
                return
        known = self.layout_of(target) if before else None
        if not owned or (before and known is None and self.is_marked(target)):
            if not before and not self.is_distinct(after):
                self.place(after, None)
            elif self.is_marked(target):
                self.place(after, known)
            if owned and after is target:
                # Nothing is known of the view itself, but perhaps of the tensor that it shows.
                first = owned[0][1] if write.read is None else None
                same = isinstance(first, Whole) and all(own == first for _, own in owned)
                self._note_base(target, first if same else None, first=False)
            elif before and fresh and after is target and target.requires_grad:
                self._note_base(target, known, first=True)
            return
        packed = self.packed
        found: Examples | Whole | None = None
        first = owned[0][1]
        layouts = [known] if known else []
        if not known or self.was_blank(target, writes=int(after is target)):
            layouts = [*layouts, *self.candidates(target, first)]
        for layout in layouts:
            if all(write.agrees(layout, *value) for value in owned):
                found = layout
                break
        else:
            # A tensor that held nothing of any example may now belong to one example as a whole.
            empty = not known if write.read is None else not before
            whole = empty and isinstance(first, Whole)
            found = first if whole and all(own == first for _, own in owned) else None
        if found is None and known and not (target.requires_grad or packed):
            # Inputs of different examples meet, as in CutMix: those written into decide.
            if all(write.mixes(known, *value) for value in owned):
                found = known
        self.place(after, found)
        if packed and found is None and any(value.requires_grad for value, _ in owned):
            # Nothing else would catch it: losses of packed rows are taken in the order they have.
            self.note_meeting(after)
        if after is target and (found is None or fresh):
            self._note_base(target, found, first=fresh)

    def _shows_unknown(self, view: Tensor) -> bool:
        """Whether a tensor is a view of data of which nothing was noted and shape says nothing.

        Such data are inputs that have no example axis by contract.
        """
        base = view._base
        if base is None or node_of(base) is not None or not self.is_data(base):
            return False
        return not self.is_marked(base) and self.layout_of(base) is None

    def candidates(self, target: Tensor, owned: Examples | Whole) -> Iterator[Examples]:
        """Yield the possible layouts of a tensor that held nothing of any example before a write.

        Args:
            target: the tensor.
            owned: whose the value is that is written into it.
        """
        return candidates(target, self._contract, owned)

    def _note_base(self, view: Tensor, owned: Examples | Whole | None, *, first: bool) -> None:
        """Note where the examples lie in the base of a view that was written into.

        Args:
            view: the view.
            owned: whose it is now.
            first: before the write, the base held nothing of any example, or nothing known.
        """
        base = view._base
        if base is None or node_of(base) is not None:
            return
        known: Iterable[Examples] = ()
        if owned is not None and base.is_contiguous():
            own = None if first else self.layout_of(base)
            known = candidates(base, self._contract, owned) if first else [own] if own else ()
        found: Examples | Whole | None = None
        found = next((own for own in known if _lies(view, owned, base, own)), None)
        if found is None and isinstance(owned, Whole) and (first or self.owned(base) == owned):
            found = owned  # such as a batch of one example
        self.place(base, found)

    def run_function(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        data: list[Tensor],
    ) -> Any:
        """Run an autograd Function, and note where the examples lie in what it returns.

        Where the operations in its forward were seen, that is known. Results that a kernel filled
        unseen are taken to have the examples where the operands have them.

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
            results = [item for item in flatten((returned,)) if isinstance(item, Tensor)]
            trained = any(item.requires_grad for item in results)
            if trained or self.seen is not None:
                self.inside |= inside
            # Parameters among its operands are refused where they show.
            if inside and trained and len(given) == len(operands):
                self._check_inside(function, (*operands, *results), inside)
            for tensor in results:
                if not any(tensor is item for item in given):
                    # A number alone may be that of a tensor that has been freed since.
                    found = seen.get(id(tensor))
                    was_seen = found is not None and found() is tensor
                    self._note_returned(function, tensor, given, data, seen=was_seen)
        self.note_seen(returned)
        return returned

    def note_inside(self, operands: Sequence[Tensor]) -> None:
        """Note the parameters that an operation uses where gradients are not recorded."""
        nodes = filter(None, map(node_of, operands))
        self.inside.update(root.name for node in nodes for root in node.roots)

    def _check_inside(
        self, function: Callable[..., Any], tensors: Sequence[Tensor], inside: set[str]
    ) -> None:
        """Raise if an autograd Function runs a part of the model that cannot be followed.

        Its backward runs that part again on tensors of its own, of which only the contract can say
        whose the rows are.

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
            return
        if tensor.requires_grad and not same and self._has_others(trained):
            self._lose(tensor, trained, function_name(function))
            return
        if base is not None and any(item is base for item in given) and same_form(tensor, base):
            self.place_like(tensor, base)  # an operand that is returned as it is
            return
        if not self.is_data(tensor):
            self.take_batch([tensor])  # made without data, and filled with them
        elif seen:
            return
        if any(map(self.is_marked, trained or data)):
            fits = same and not (isinstance(first, Examples) and not first.fits(tensor))
            self.place(tensor, first if fits else None, function_name(function))

    def _has_others(self, trained: list[Tensor]) -> bool:
        """Whether some operands belong to one example as a whole, or to nobody knows which.

        The gradients that they pass back may depend on all examples, whatever the forward does.
        """
        return any(self.is_lost(item) or isinstance(self.owned(item), Whole) for item in trained)

    def note_seen(self, result: Any) -> None:
        """Note that a result was computed, inside an autograd Function, by an operation seen."""
        if self.seen is not None:
            tensors = [item for item in flatten((result,)) if isinstance(item, Tensor)]
            self.seen.update((id(item), ref(item)) for item in tensors)

    def follow_gradients(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Tensor]
    ) -> None:
        """Note where the examples lie in gradients that ``grad`` returned: as in its inputs."""
        inputs = kwargs.get("inputs", args[1] if len(args) > 1 else ())
        sources = [inputs] if isinstance(inputs, Tensor) else inputs
        outputs = flatten((args[0],))
        joint = not self.packed and any(map(self._joins_examples, outputs))
        for source, result in zip(sources, results, strict=True):
            if not isinstance(result, Tensor):
                continue
            if node_of(source) is None:
                owned = self.owned(source)
                if kwargs.get("is_grads_batched") and isinstance(owned, Examples):
                    owned = owned.along(owned.axis + 1)  # gradients along several vectors
                self.place(result, owned)
                if joint and result.requires_grad and result.grad_fn is not None:
                    self.coupled[result.grad_fn] = (
                        "is part of a derivative of values in which several examples met, other "
                        "than by a sum over them"
                    )
            else:
                self.mark_constant(result)  # a parameter's, in which the examples are summed

    def _joins_examples(self, output: Any) -> bool:
        """Whether derivatives of a tensor may depend on values of several examples."""
        if not isinstance(output, Tensor) or node_of(output) is not None or self.batch_size == 1:
            return False
        if not (self.is_data(output) and output.requires_grad):
            return False
        if self.coupled and any(node in self.coupled for node in nodes_behind(output)):
            return True
        apart = isinstance(self.owned(output), (Examples, Whole)) or not self.is_marked(output)
        return not (apart or self.is_sum(output))

    def follow_change(
        self, func, args: tuple[Any, ...], kwargs: dict[str, Any], data: list[Tensor]
    ) -> None:
        """Note where the examples lie in a tensor that an operation changed in place.

        Args:
            func, args, kwargs: the operation, in the form that returns a new tensor.
            data: its operands of data.
        """
        target = args[0]
        if not target.requires_grad:
            return
        if is_followed(func):
            self.follow_layout(func, args, kwargs, data, target)
        else:
            self.place(target, None)
        self._note_base(target, None, first=False)

    def note_followed(self, result: Tensor, examples: Examples) -> None:
        """Note where the examples lie in a rule's result, so that it need not be followed.

        Args:
            result: what the rule returns.
            examples: where the examples lie in it.
        """
        if examples.segments is not None or is_compiling():
            return
        if examples is not self._contract:
            self.place(result, examples)
        self.followed = result

    def place_like(self, tensor: Tensor, source: Tensor) -> None:
        """Note of a tensor, made row by row of another, what is known of that one."""
        if not self.is_data(source):
            self.mark_constant(tensor)
        elif self.is_marked(source) or self.layout_of(source) != self.by_contract(tensor):
            self.place(tensor, self.owned(source))

    def follow_move(self, tensor: Tensor) -> None:
        """Note where the examples lie in a tensor whose axes were moved in place."""
        plain = not self.is_marked(tensor) and self.is_distinct(tensor)
        sizes = list(tensor.shape)
        self.place(tensor, self._contract.along(sizes.index(self.batch_size)) if plain else None)

    def order_of(self, losses: Tensor) -> Tensor | None:
        """Return the example of each loss, (B,); None where they stand in the batch's order."""
        if self.batch_size == 1:
            return None
        layout = self.layout_of(losses)
        if self.owned(losses) is MIXED:
            raise CoupledExamplesError(
                "each loss depends on several examples: trained values were summed, averaged or "
                "normalised along the example axis on the way. Expected losses that depend on one "
                "example each: reduce over other axes, or detach what comes from other examples."
            )
        moved = self.is_marked(losses) and not (layout is not None and layout.plain)
        if not moved:
            return None
        if layout is None and self.packed:
            return None  # sums over packed rows: the model keeps the examples apart itself
        if layout is None:
            raise ExampleAxisError(
                f"which loss belongs to which example was lost {self._lost_where(losses)}: the "
                "losses, or what was combined with them, were moved or reduced along the example "
                "axis in a way that cannot be followed. Expected losses in the order of the batch, "
                "each of one example: reduce each example's own rows, or put rows back by indexing."
            )
        owner = layout.owner(losses.device)
        if owner.numel() != self.batch_size or owner.unique().numel() != self.batch_size:
            raise ExampleAxisError(
                f"the losses belong to the examples {owner.tolist()}, as followed through the "
                f"model, expected one loss for each of {self.batch_size} examples. Sum the losses "
                "of each example."
            )
        return owner

    def _lost_where(self, losses: Tensor) -> str:
        operation = self.lost_at(losses)
        return f"at {operation}" if operation else "on the way"


def _lies(view: Tensor, owned: Examples | Whole | None, base: Tensor, layout: Examples) -> bool:
    """Whether a view holds the examples that the layout of its contiguous base gives it."""
    owner = layout.owner(base.device).to(torch.int32)
    shape = [1] * base.dim()
    shape[layout.axis] = -1
    owners = owner.view(shape).expand(base.shape).contiguous()
    offset = view.storage_offset() - base.storage_offset()
    seen = owners.as_strided(view.shape, view.stride(), offset)
    if isinstance(owned, Whole):
        return bool((seen == owned.example).all())
    if not isinstance(owned, Examples):
        return False
    expected = owned.owner(base.device).view(-1, *(1 for _ in seen.shape[1:]))
    return bool((owned.lead(seen) == expected).all())
