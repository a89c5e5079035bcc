"""What becomes of the examples in data that the user's code computes with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from gradstats._factors import Segments
from gradstats.capture._examples import MIXED, Examples, Mixed, Whole, candidates, joined, same_rows
from gradstats.capture._indexing import argument_of, looked_up
from gradstats.capture._layout import (
    CHANGES,
    FOLLOWED,
    REINDEXES,
    contracted,
    convolved,
    follow,
    is_one,
    leaves,
    tensordot,
)
from gradstats.capture._marks import Marks
from gradstats.capture._nodes import operands_of
from gradstats.capture._operations import (
    ADDED_PRODUCTS,
    BROADCASTS,
    CONVOLUTIONS,
    JOINS,
    LOOKS_AT_FIRST,
    MOVES,
    OPAQUE,
    PAD_SEQUENCE,
    PRODUCTS,
    ROW_PRODUCTS,
    SHARED_WEIGHT,
    SOLVES,
    SUM_LAST,
    TENSOR_PRODUCTS,
    UNFOLLOWED,
)
from gradstats.capture._reductions import ATTENTION, OVER_AXES, REDUCES, runs_over
from gradstats.capture._tensors import node_of
from gradstats.errors import CoupledExamplesError, ExampleAxisError

if TYPE_CHECKING:
    from gradstats.capture._writes import Write


class Data(Marks):
    """Constants and data of one batch, followed through the operations on them.

    Attributes:
        coupled: autograd nodes in which examples met that a loss may not depend on together, with
            how they met there.
        loss_order: (B,) the example of each loss; None where they stand in the batch's order.
        followed: what a rule returned last, if where its examples lie has been noted: operation by
            operation, as far as they are out of the ordinary.
    """

    def __init__(self, batch_size: int, batch_dim: int, segments: Segments | None):
        super().__init__(batch_size, batch_dim, segments)
        self.coupled: dict[Any, str] = {}
        self.loss_order: Tensor | None = None
        self.followed: Any = None

    def is_trained(self, item: Any) -> bool:
        """Whether an operand was computed from data and has a gradient to pass on."""
        if not isinstance(item, Tensor) or not item.requires_grad or node_of(item) is not None:
            return False
        return self.is_data(item)

    def follow_write(self, write: Write, target: Tensor, before: bool, after: Tensor) -> None:
        """Note where the examples lie in a tensor that data were written into.

        Args:
            write: what was written, and where.
            target: the operand.
            before: whether it held data already.
            after: what holds the data now: the operand, or a copy of it.
        """
        values = [
            item
            for item in write.values
            if isinstance(item, Tensor) and node_of(item) is None and self.is_data(item)
        ]
        if before and (one := self.sole_example([target, *values])):
            self.place(after, one)
            return
        if before and write.read is None and not self.follows_layouts:
            if all(value.shape == target.shape for value in values):
                return
        owned = []
        for value in values:
            layout = self.owned(value)
            if isinstance(layout, (Examples, Whole)):
                owned.append((value, layout))
            elif self._is_marked(value):
                self.place(after, layout)
                if after is target:
                    self._note_base(target, None, first=False)
                return
        known = self.layout_of(target) if before else None
        if not owned or (before and known is None):
            if not before and not self._is_distinct(after):
                self.place(after, None)
            elif self._is_marked(target):
                self.place(after, known)
            if owned and after is target:
                # A view of which nothing is known, but perhaps of the tensor that it shows.
                first = owned[0][1] if write.read is None else None
                same = isinstance(first, Whole) and all(own == first for _, own in owned)
                self._note_base(target, first if same else None, first=False)
            return
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
            # What held nothing of any example may be all of one.
            whole = not known and write.read is None and isinstance(first, Whole)
            found = first if whole and all(own == first for _, own in owned) else None
        self.place(after, found)
        packed = self._contract.segments is not None
        if packed and found is None and any(value.requires_grad for value, _ in owned):
            # Nothing else would say it: losses of packed rows are taken as they come.
            self._note_meeting(after)
        if after is target and (found is None or not before):
            self._note_base(target, found, first=not before)

    def candidates(self, target: Tensor, owned: Examples | Whole) -> Iterator[Examples]:
        """Yield the layouts that a tensor may have which held nothing of any example.

        Args:
            target: the tensor.
            owned: whose a value is that is written into it.
        """
        return candidates(target, self._contract, owned)

    def _note_base(self, view: Tensor, owned: Examples | Whole | None, *, first: bool) -> None:
        """Note where the examples lie in the tensor that a view shows which was written into.

        Args:
            view: what was written into.
            owned: whose it is now.
            first: the tensor held nothing of any example before.
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

    def follow_gradients(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Tensor]
    ) -> None:
        """Note where the examples lie in what ``torch.autograd.grad`` found: as in its inputs."""
        inputs = kwargs.get("inputs", args[1] if len(args) > 1 else ())
        sources = [inputs] if isinstance(inputs, Tensor) else inputs
        for source, result in zip(sources, results, strict=True):
            if isinstance(result, Tensor) and node_of(source) is None:
                self.place(result, self.owned(source))

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
        if func in FOLLOWED:
            self.follow_layout(func, args, kwargs, data, target)
        else:
            self.place(target, None)
        self._note_base(target, None, first=False)

    def note_followed(self, result: Tensor, examples: Examples) -> None:
        """Note, if it is so, that there is nothing to note of a rule's result.

        Args:
            result: what the rule returns.
            examples: where the examples lie in it.
        """
        if examples is self._contract and not torch.compiler.is_compiling():
            self.followed = result

    def place_like(self, tensor: Tensor, source: Tensor) -> None:
        """Note of a tensor what is known of the one that it was made of, row by row."""
        if not self.is_data(source):
            self.mark_constant(tensor)
        elif self._is_marked(source) or self.layout_of(source) != self.by_contract(tensor):
            self.place(tensor, self.owned(source))

    def follow_move(self, tensor: Tensor) -> None:
        """Note where the examples lie in a tensor whose axes were moved in place."""
        plain = not self._is_marked(tensor) and self._is_distinct(tensor)
        sizes = list(tensor.shape)
        self.place(tensor, self._contract.along(sizes.index(self.batch_size)) if plain else None)

    def follow_layout(
        self, func, args: tuple[Any, ...], kwargs: dict[str, Any], data: list[Tensor], result
    ) -> None:
        """Note where the examples lie in the result of an operation on some tensors of data."""
        after: Examples | Whole | Mixed | None
        if self.follows_layouts and self._mixes(data, result):
            after = MIXED
        elif func in JOINS:
            after = self._joined(func, args, kwargs, result)
        elif func is PAD_SEQUENCE:
            tensors, layouts = self._with_layouts(args[0])
            dim = 0 if len(args) > 1 and args[1] else 1  # batch_first
            after = self._side_by_side(tensors, layouts, dim, stacked=True)
        elif func in OVER_AXES and self._runs_over_examples(func, args, kwargs):
            after = MIXED if result.requires_grad and self.batch_size > 1 else None
            if after is MIXED and func not in REDUCES:
                self.coupled[result.grad_fn] = "runs over the examples"
        elif self.follows_layouts and self._is_whole(data):
            after = self.owned(data[0])
        elif self._multiplies(func, args):
            after = self._multiplied((*args, *kwargs.values()), result, func in ROW_PRODUCTS)
            if func is linear:
                bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
                biases = [tensor for tensor in data if tensor is bias]
                if biases and self._broadcast(biases, result) != after:
                    self._note_meeting(result)
                    after = None
        elif func in ADDED_PRODUCTS:
            named = [kwargs[name] for name in ADDED_PRODUCTS[func] if name in kwargs]
            factors = (*args[1:], *named)[:2]
            multiplied = any(item is tensor for item in factors for tensor in data)
            after = self._multiplied(factors, result) if multiplied else None
            if any(tensor is args[0] for tensor in data):
                added = self._broadcast([args[0]], result)
                after = added if added == after or not multiplied else None
        elif func in SOLVES:
            after = self._broadcast(data, result)
            if after is not None and after.axis >= result.dim() - 2:
                # Each right-hand side is solved alone, if the examples have no matrices of theirs.
                sides = args[SOLVES[func]] if len(args) > SOLVES[func] else None
                alone = len(data) == 1 and data[0] is sides and sides.dim() > 1
                place = result.dim() - (1 if kwargs.get("left", True) else 2)
                after = after if alone and after.axis == place else None
        elif func is torch.einsum:
            operands = operands_of(args[1:], {})
            after = self._contracted(operands, partial(contracted, args), result)
        elif func in CONVOLUTIONS and not is_one(func, args[0]):
            named = [kwargs[name] for name in ("weight", "bias") if name in kwargs]
            lies = partial(convolved, func, args, kwargs, result)
            after = self._contracted(operands_of((*args, *named), {}), lies, result)
        elif func in TENSOR_PRODUCTS:
            operands = list(args[:2])
            after = self._contracted(operands, partial(tensordot, func, args, kwargs), result)
        elif func in BROADCASTS and (
            len(data) > 1 or self._is_marked(data[0]) or result.dim() > data[0].dim()
        ):
            after = self._broadcast(data, result)
        else:
            # The compiler of PyTorch 2.14 cannot negate a tuple.
            constant = len(args) == 0 or not any(tensor is args[0] for tensor in data)
            lost = (
                func in UNFOLLOWED
                or type(func) in OPAQUE
                or (func not in FOLLOWED and func is not None and result.requires_grad)
                or (func in LOOKS_AT_FIRST and constant)
                or is_one(func, data[0])
            )
            changes = lost or func in CHANGES or self._is_gone(data, result)
            if func in OVER_AXES and not leaves(func, data[0], self.batch_dim, result):
                changes = True
            if func in REINDEXES and not constant:
                data = [args[0]]  # what is indexed decides
            elif len(data) > 1 and not self._agree(func, args, kwargs, data, result):
                changes = lost = True
            source, layout = self._deciding(data)
            dims = max(item.dim() for item in data)
            if any(item.dim() < dims for item in data if item is source or item.requires_grad):
                changes = lost = True  # broadcast perhaps, so that axes count from the right
            if func in SUM_LAST and layout is not None and layout.axis == source.dim() - 1:
                changes = lost = True  # the axis that a product sums
            if not self._is_marked(source) and (not changes or layout is None):
                return
            if lost or layout is None:
                after = None
            elif func in REINDEXES and constant:
                after = looked_up(func, args, kwargs, source, layout)
            else:
                after = follow(func, args, kwargs, source, layout, result)
            decides = func in MOVES or type(func) in OPAQUE
            if after is None and layout is not None and decides:
                # Where nothing else has the batch's size, shape can decide after all.
                alone = self._is_distinct(source) and self._is_distinct(result)
                if alone and layout.plain and self.has_example_axis(result):
                    return
        unclear = not isinstance(after, (Examples, Whole)) or result.grad_fn in self.coupled
        if unclear and (one := self.sole_example(data)) is not None:
            # Whatever happens to values of one example alone, they stay its own.
            self.coupled.pop(result.grad_fn, None)
            after = one
        self.place(result, after)

    def sole_example(self, data: list[Tensor]) -> Whole | None:
        """Return the example to which all operands of data belong; None where it is not one."""
        if self.batch_size == 1 or not self.follows_layouts:
            return None
        owners = [_sole(self.owned(item)) if self._is_marked(item) else None for item in data]
        first = owners[0]
        if not isinstance(first, Whole):
            return None
        return first if all(other == first for other in owners) else None

    def _multiplies(self, func, args: tuple[Any, ...]) -> bool:
        """Whether an operation multiplies two operands either of which may hold the examples."""
        if func is not linear:
            return func in PRODUCTS or func in ROW_PRODUCTS
        first = args[0]
        if node_of(first) is None and self.is_data(first):
            layout = self.layout_of(first)
            if layout is not None and layout.axis == first.dim() - 1:
                return True  # the axis that it sums
        # A layer's weight is shared by all, unless it was computed from parameters and data.
        return any(map(self.is_trained, args[1:]))

    def _agree(
        self, func, args: tuple[Any, ...], kwargs, data: list[Tensor], result: Tensor
    ) -> bool:
        """Whether trained operands have the same examples in the same places; note if they meet."""
        trained = [tensor for tensor in data if tensor.requires_grad]
        if any(self._is_lost(tensor) for tensor in trained):
            return False
        if func in LOOKS_AT_FIRST and any(tensor is not args[0] for tensor in trained):
            self._note_meeting(result)
            return False
        if func in SHARED_WEIGHT:
            weight = argument_of((*args, *[None] * 3), kwargs, SHARED_WEIGHT[func], "weight")
            if any(tensor is weight for tensor in trained):
                self._note_meeting(result)
                return False
        # Shapes are aligned as broadcasting does it, from the right.
        places = [
            owned.along(owned.axis - tensor.dim()) if isinstance(owned, Examples) else owned
            for tensor, owned in zip(trained, map(self.owned, trained), strict=True)
            if owned is not None
        ]
        if all(_same(places[0], other) for other in places[1:]):
            return True
        self._note_meeting(result)
        return False

    def _is_lost(self, tensor: Tensor) -> bool:
        return self._is_marked(tensor) and self.owned(tensor) is None

    def _note_meeting(self, result: Tensor) -> None:
        """Note that trained values of one example meet those of another."""
        if result.requires_grad and self.batch_size > 1:
            self.coupled[result.grad_fn] = "combines trained values of different examples"

    def _is_gone(self, data: list[Tensor], result: Tensor) -> bool:
        """Whether a trained result has no example axis, which its first operand had by contract."""
        if not result.requires_grad or self.by_contract(data[0]) is None:
            return False
        return self.by_contract(result) is None

    def _runs_over_examples(self, func, args, kwargs) -> bool:
        operands = list(args[:1])
        if func is ATTENTION:
            operands = [*args[:3], *(kwargs[name] for name in ("key", "value") if name in kwargs)]
        # Rows of packed examples are positions too, which the model keeps apart by itself.
        if self._contract.segments is not None:
            return False
        for item in operands:
            if isinstance(item, Tensor) and node_of(item) is None and self.is_data(item):
                layout = self.layout_of(item)
                if layout is not None:
                    if runs_over(func, (item, *args[1:]), kwargs, layout.axis):
                        return True
        return False

    def _mixes(self, data: list[Tensor], result: Tensor) -> bool:
        """Whether a result holds trained values of all examples; note where one's meet them."""
        trained = [self.owned(tensor) for tensor in data if tensor.requires_grad]
        if not any(owned is MIXED for owned in trained) or not result.requires_grad:
            return False
        if any(isinstance(owned, (Examples, Whole)) for owned in trained):
            self.coupled[result.grad_fn] = (
                "brings what was computed over all examples (a sum, a mean or a norm along their "
                "axis) back to each of them"
            )
        return True

    def _is_whole(self, data: list[Tensor]) -> bool:
        """Whether all of several tensors belongs to one example."""
        first = self._mark_of(data[0])
        if first is None or not isinstance(first[0], Whole):
            return False
        return all(self._mark_of(tensor) == first for tensor in data[1:])

    def _deciding(self, data: list[Tensor]) -> tuple[Tensor, Examples | None]:
        """Return the operand whose layout the result has, and that layout."""
        if len(data) == 1 or not self.follows_layouts:
            return data[0], self.layout_of(data[0])
        layouts = [(tensor, self.layout_of(tensor)) for tensor in data]
        known = [(tensor, layout) for tensor, layout in layouts if layout is not None]
        trained = [(tensor, layout) for tensor, layout in known if tensor.requires_grad]
        deciding = trained or known
        # In doubt the first whose layout is out of the ordinary.
        first = next((item for item in layouts if self._is_marked(item[0])), layouts[0])
        if not deciding or any(first[0] is tensor for tensor, _ in deciding):
            return first
        return deciding[0]

    def _broadcast(self, data: list[Tensor], result: Tensor) -> Examples | None:
        """Return the layout of operands that are broadcast against each other."""
        if any(tensor.dim() > result.dim() for tensor in data):
            return None  # of losses, which were reduced then
        aligned = []
        for tensor in data:
            layout = self.layout_of(tensor)
            if layout is not None:
                layout = layout.along(layout.axis + result.dim() - tensor.dim())
                aligned.append((tensor, layout))
            elif tensor.requires_grad and self._is_marked(tensor):
                return None
        if not aligned:
            return self.by_contract(result)
        trained = [layout for tensor, layout in aligned if tensor.requires_grad]
        deciding = trained or [layout for _, layout in aligned]
        first = deciding[0]
        if result.shape[first.axis] != first.rows:
            return None  # the only example, repeated
        if all(_same(first, layout) for layout in deciding[1:]):
            return first
        if trained:
            self._note_meeting(result)
            return None
        # Inputs of several examples meet: by contract the batch's own order says whose it is.
        if any(layout.axis != first.axis for layout in deciding):
            return None
        return next((layout for layout in deciding if layout.plain), None)

    def _multiplied(
        self, operands: tuple[Any, ...], result: Tensor, of_rows: bool = False
    ) -> Examples | None:
        """Return the layout of a matrix product.

        Args:
            operands: of which the first two are multiplied.
            result: the product.
            of_rows: of the rows of both, not of rows and columns.
        """
        kept: list[tuple[Tensor, Examples]] = []
        for place, tensor in enumerate(operands[:2]):
            if node_of(tensor) is not None or not self.is_data(tensor):
                continue
            layout = self.layout_of(tensor)
            if layout is None:
                if not self._is_marked(tensor):
                    continue
                if isinstance(self.owned(tensor), Whole):
                    self._note_meeting(result)
                return None
            # Axes are counted from the right: 1 for the columns, 2 for the rows.
            axis = tensor.dim() - layout.axis
            summed = 1 if place == 0 or of_rows or tensor.dim() == 1 else 2
            if axis == summed:
                if kept and self._contract.segments is not None:
                    break  # attention among packed examples: the model keeps them apart
                return None
            if place == 1 and of_rows and axis == 2:
                axis = 1  # rows of the second operand are columns of the product
            elif operands[1 - place].dim() == 1 and (place == 0 or axis > 2):
                axis -= 1
            kept.append((tensor, layout.along(result.dim() - axis)))
        return self._product(kept, result)

    def _contracted(self, operands: Sequence[Tensor], follow, result: Tensor) -> Examples | None:
        """Return the layout of a contraction.

        Args:
            operands: of the contraction.
            follow: called as follow(place, layout) with the place and layout of an operand, it
                returns where the examples lie in the result; None where they are summed.
            result: the contraction's.
        """
        kept = []
        for place, tensor in enumerate(operands):
            if node_of(tensor) is not None or not self.is_data(tensor):
                continue
            layout = self.layout_of(tensor)
            after = None if layout is None else follow(place, layout)
            if after is not None:
                kept.append((tensor, after))
            elif layout is not None or self._is_marked(tensor):
                return None
        return self._product(kept, result)

    def _product(self, kept: list[tuple[Tensor, Examples]], result: Tensor) -> Examples | None:
        """Return the layout of a product of operands whose examples lie in the result as given."""
        trained = [layout for tensor, layout in kept if tensor.requires_grad]
        found = trained or [layout for _, layout in kept]
        if not found:
            return self.by_contract(result)
        apart = self._contract.segments is not None  # by the model itself, if at all
        axes = {layout.axis for layout in trained}
        if self.batch_size > 1 and len(axes) > 1 and not apart:
            # Every example meets every other. Whether a loss depends on it shows in its graph.
            self.coupled[result.grad_fn] = (
                f"multiplies every example with every other ({self.batch_size} × {self.batch_size} "
                "products of trained values, as contrastive losses form them)"
            )
        elif any(not _same(trained[0], other) for other in trained[1:]) and not apart:
            self._note_meeting(result)
            return None
        return found[0]

    def _joined(self, func, args, kwargs, result: Tensor) -> Examples | None:
        tensors = list(args[0] if args else kwargs["tensors"])
        # What is empty, as the list that a loop begins with is, holds nothing of any example.
        tensors = [tensor for tensor in tensors if tensor.numel()] or tensors
        dim = JOINS[func]
        if dim is None:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % result.dim()
        elif any(tensor.dim() <= max(dim, 1) for tensor in tensors):
            return None  # which get an axis, or are joined along another
        tensors, layouts = self._with_layouts(tensors)
        stacked = func is torch.stack
        if not any(isinstance(layout, Whole) for layout in layouts):
            found = self._in_line(tensors, layouts, dim, result, stacked=stacked)
            alone = [_sole(layout) for layout in layouts]
            if found is not None or alone == layouts:
                return found
            layouts = alone
        return self._side_by_side(tensors, layouts, dim, stacked=stacked)

    def _with_layouts(self, tensors: Sequence[Tensor]):
        """Return tensors, and whose each of them is: None for what holds nothing of any example."""
        return tensors, [
            self.owned(t) if node_of(t) is None and self.is_data(t) else None for t in tensors
        ]

    def _in_line(self, tensors, layouts, dim: int, result, *, stacked: bool) -> Examples | None:
        """Return the layout of tensors joined of which each has rows of its examples."""
        known = [layout for layout in layouts if isinstance(layout, Examples)]
        if not known:
            lost = any(self._is_marked(tensor) for tensor in tensors)
            return None if lost else self.by_contract(result)
        if stacked:
            shifted = [layout.along(layout.axis + (dim <= layout.axis)) for layout in known]
            return joined(shifted, -1, result.device)
        if dim != known[0].axis:
            # Along other axes constants may stand beside the data.
            return joined(known, dim, result.device)
        return joined(known, dim, result.device) if len(known) == len(tensors) else None

    def _side_by_side(self, tensors, layouts, dim: int, *, stacked: bool) -> Examples | None:
        """Return the layout of tensors along ``dim`` of which some belong to one example each."""
        owners: list[int] = []
        for tensor, layout in zip(tensors, layouts, strict=True):
            rows = 1 if stacked else tensor.shape[dim]
            if isinstance(layout, Whole):
                owners += [layout.example] * rows
            elif layout is not None and layout.axis == dim and not stacked:
                owners += layout.owner(tensor.device).tolist()
            elif layout is None and not self._is_marked(tensor):
                # A constant: of the examples in whose place it stands, where the others stand so.
                owners += range(len(owners), len(owners) + rows)
            else:
                return None
        constant = any(layout is None for layout in layouts)
        if constant and owners != list(range(self.batch_size)):
            return None
        owner = torch.tensor(owners, device=tensors[0].device)
        return Examples(self.batch_size, dim).owned_by(owner, dim)

    def note_losses(self, losses: Tensor) -> None:
        """Remember whose each loss is, where the model put the examples in another order."""
        if self.batch_size == 1:
            return
        layout = self.layout_of(losses)
        if self.owned(losses) is MIXED:
            raise CoupledExamplesError(
                "each loss depends on several examples: trained values were summed, averaged or "
                "normalised along the example axis on the way. Expected losses that depend on one "
                "example each: reduce over other axes, or detach what comes from other examples."
            )
        moved = self._is_marked(losses) and not (layout is not None and layout.plain)
        if not moved:
            return
        if layout is None and self._contract.segments is not None:
            return  # sums over packed rows, which the model keeps apart by itself
        if layout is None:
            raise ExampleAxisError(
                "which loss belongs to which example was lost on the way: the losses, or what was "
                "combined with them, were moved or reduced along the example axis by an operation "
                "that is not followed. Expected losses in the order of the batch, each of one "
                "example: reduce each example's own rows, or put rows back by indexing."
            )
        owner = layout.owner(losses.device)
        if owner.numel() != self.batch_size or owner.unique().numel() != self.batch_size:
            raise ExampleAxisError(
                f"the losses belong to the examples {owner.tolist()}, as followed through the "
                f"model: expected one loss for each of {self.batch_size} examples. Sum the losses "
                "of each example."
            )
        self.loss_order = owner


def _sole(owned: Examples | Whole | Mixed | None) -> Examples | Whole | Mixed | None:
    """Return whose a tensor is, all of it where its rows belong to one example."""
    if isinstance(owned, Examples) and owned.segments is not None:
        sole = owned.segments.sole
        return owned if sole is None else Whole(sole)
    return owned


def _same(first: Examples | Whole | Mixed, second: Examples | Whole | Mixed) -> bool:
    """Whether two layouts say that the same examples lie in the same places."""
    if not isinstance(first, Examples) or not isinstance(second, Examples):
        return first == second
    return first.axis == second.axis and same_rows(first, second)


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
    return isinstance(owned, Examples) and bool(
        (owned.lead(seen).flatten(1) == owned.owner(base.device)[:, None]).all()
    )
