"""Where the examples lie in the results of the user's operations on data."""

from __future__ import annotations

import torch
from torch import Tensor

from gradstats.capture.following._apart import after_scores, scores, without_columns
from gradstats.capture.following._examples import (
    APART,
    MIXED,
    Examples,
    Grid,
    Mixed,
    Scores,
    Whole,
    same_layout,
    sole_of,
)
from gradstats.capture.following._families import FAMILIES
from gradstats.capture.following._grids import after_grid, meets_grid
from gradstats.capture.following._indexing import looked_up
from gradstats.capture.following._joins import joined_layout
from gradstats.capture.following._layout import (
    FOLLOWED,
    SHARED,
    follow,
    is_shared,
)
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._meetings import BROUGHT_BACK, MEETS, NO_SUM
from gradstats.capture.following._reductions import ATTENTION, OF_TWO, OVER_AXES, REDUCES, runs_over
from gradstats.capture.following._reindexed import REINDEXES
from gradstats.capture.following._separable import LOSSES, is_root, is_square, is_sum
from gradstats.capture.operations._call import Call
from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._nested import operands_of
from gradstats.capture.operations._operations import (
    JOINS,
    LOOKS_AT_FIRST,
    MOVES,
    OPAQUE,
    PAD_SEQUENCE,
    PRODUCTS,
    READS_ONLY_FIRST,
    RESHAPES,
    SUM_LAST,
    UNFOLLOWED,
    is_trusted,
)
from gradstats.capture.parameters._tensors import node_of

Layout = Examples | Whole | Mixed | Grid | None


class Unchanged:
    """Says that nothing need be noted on a result: its shape tells where the examples lie."""


UNCHANGED = Unchanged()


class Following(Marks):
    """Data of one batch, followed through the operations on them."""

    def follow_layout(self, call: Call) -> None:
        """Note where the examples lie in the result of an operation on data."""
        func, _, _, data, result = call
        if self.packed and result.numel() and not any(item.numel() for item in data):
            self.mark_constant(result)  # such as the sum over an example that has no rows
            return
        after = self._layout_after(call)
        # Products handle scores among their operands themselves.
        if self.packed and result.requires_grad and not (func in PRODUCTS or func is torch.einsum):
            after = self._kept_apart(call, after)
        if isinstance(after, Unchanged):
            return
        if isinstance(after, Examples) and not after.fits(result):
            after = None  # for instance where an index takes only some of the rows
        unclear = not isinstance(after, (Examples, Whole)) or self.is_coupled(result)
        if unclear and (one := self.sole_example(data)) is not None:
            # All that is computed from one example's values alone belongs to that example.
            self.coupled.pop(result.grad_fn, None)
            after = one
        blamed = func is not None and (after is None or isinstance(after, Grid))
        at = function_name(func) if blamed else None
        if after is None:
            self._lose(result, data, at)
        else:
            self.place(result, after, at)
        if self.is_marked(result) and result.requires_grad and not isinstance(after, APART):
            sums = is_sum(self, call)
            if sums:
                self.mark_sum(result)
            elif sums is False and after is MIXED:
                if result.grad_fn not in self.coupled:
                    self.couple(result, NO_SUM)
                if is_root(self, call):
                    self.roots_of_sums.add(result.grad_fn)
            elif data[0].grad_fn in self.roots_of_sums and is_square(call):
                self.mark_sum(result)
                self.added[data[0].grad_fn] = self.coupled.pop(data[0].grad_fn, NO_SUM)
        if result.requires_grad and (self.coupled or self.added):
            self._note_added(data, result)

    def _note_added(self, data: list[Tensor], result: Tensor) -> None:
        """Note where values of different examples are added, and where more is computed from a sum.

        A loss of all examples may be a sum of sums over groups of them, whose terms are separable.
        """
        node = result.grad_fn
        if self.coupled.get(node) in (MEETS, BROUGHT_BACK) and self.is_sum(result):
            self.added[node] = self.coupled.pop(node)
            return
        # A tensor changed in place has a new node, which leads to its former one.
        behind = [] if node is None else [child for child, _ in node.next_functions]
        behind += [item.grad_fn for item in data if item.requires_grad]
        if any(each in self.added for each in behind):
            if self.is_sum(result):
                self.added[node] = MEETS
            elif node not in self.coupled:
                self.couple(result, MEETS)

    def _kept_apart(self, call: Call, after: Layout | Unchanged) -> Layout | Unchanged:
        """Return the layout of a result; None if scores of different packed examples met in it."""
        known = self.by_contract(call.result) if isinstance(after, Unchanged) else after
        trained = filter(self.is_trained, call.data)
        of_scores = any(isinstance(self.owned(item), Scores) for item in trained)
        if isinstance(known, Mixed) or not (of_scores or isinstance(known, Scores)):
            return after
        rows = known if isinstance(known, Examples) else None
        if rows is None and call.func not in OVER_AXES:
            return None
        apart = after_scores(self, call, rows)
        if apart is None and rows is not None:
            self.note_meeting(call.result)
        return after if apart is known else apart

    def _lose(self, result: Tensor, data: list[Tensor], at: str | None) -> None:
        """Note that the examples of a result were lost at the operation named ``at``."""
        lost = next(filter(self.is_lost, data), None)
        if lost is None:
            self.place(result, None, at)
        else:
            # Blame the first of several operations that could not be followed.
            self._mark(result, None, self.lost_at(lost) if self.is_marked(lost) else at)

    def sole_example(self, data: list[Tensor]) -> Whole | None:
        """Return the one example to which data operands belong; None if there is none.

        Beside trained operands, others about which nothing is known do not matter (targets,
        positions within an image): only trained operands receive gradients.
        """
        if self.batch_size == 1 or not self.follows_layouts:
            return None
        known = [item for item in data if item.requires_grad or self.owned(item) is not None]
        if len(known) < len(data) and not any(item.requires_grad for item in known):
            return None
        owners = [sole_of(self.owned(item)) if self.is_marked(item) else None for item in known]
        first = owners[0]
        if not isinstance(first, Whole):
            return None
        return first if all(other == first for other in owners) else None

    def _layout_after(self, call: Call) -> Layout | Unchanged:
        func, _, _, data, result = call
        if meets_grid(self, call):
            return after_grid(self, call)
        if self.follows_layouts and self._mixes(data, result):
            return MIXED
        if func in JOINS or func is PAD_SEQUENCE:
            return joined_layout(self, call)
        if func in OVER_AXES and self._runs_over_examples(call):
            if not result.requires_grad or self.batch_size == 1:
                return None
            if func not in REDUCES:
                self.couple(result, "runs over the examples")
            return MIXED
        if self.follows_layouts and (whole := self._whole_of(data)) is not None:
            return whole
        if func in LOSSES and self._is_joined(call):
            return MIXED
        family = FAMILIES.get(func)
        return self.by_first(call) if family is None else family(self, call)

    def _is_joined(self, call: Call) -> bool:
        """Whether a loss function reduced all examples to one number; note if they met in it."""
        if call.result.dim() or not call.result.requires_grad or self.batch_size == 1:
            return False
        trained = [tensor for tensor in call.data if tensor.requires_grad]
        if not all(isinstance(self.owned(tensor), Examples) for tensor in trained):
            return False
        return self._agree(call) or self.is_coupled(call.result)

    def by_first(self, call: Call) -> Layout | Unchanged:
        """Return the layout of a result whose examples follow those of one operand."""
        func, args, kwargs, data, result = call
        constant = not args or not any(tensor is args[0] for tensor in data)
        lost = self._loses(call, constant)
        if func in REINDEXES and not constant:
            data = [args[0]]  # the indexed operand decides
        elif len(data) > 1 and not self._agree(call):
            lost = True
        source, layout = self._deciding(data)
        beside = data if func in ROLES else operands_of(args, kwargs)
        beside = [item for item in beside if not is_shared(call, item)]
        dims = max((item.dim() for item in beside if node_of(item) is None), default=0)
        if any(item.dim() < dims for item in data if item is source or item.requires_grad):
            lost = True  # it may be broadcast, which counts axes from the right
        if func in SUM_LAST and layout is not None and layout.axis == source.dim() - 1:
            lost = True  # the examples' axis is summed
        noted = self.is_marked(source)
        if layout is None and not (noted or self.is_lost(source)):
            return UNCHANGED
        after: Examples | Whole | Grid | None
        if lost or layout is None:
            after = None
        elif func in REINDEXES and constant:
            after = looked_up(call, source, layout)
        else:
            after = follow(call, source, layout)
        if after is not None and after is layout and not noted:
            return UNCHANGED
        decides = func in MOVES or is_trusted(func)
        if after is None and layout is not None and decides:
            # The shape still decides if no other axis has the batch's size.
            alone = self.is_distinct(source) and self.is_distinct(result)
            if alone and layout == self.by_contract(source) and self.has_example_axis(result):
                return UNCHANGED
        return after

    def _loses(self, call: Call, constant: bool) -> bool:
        """Whether it is not known where an operation puts the examples of its first operand.

        Args:
            call: the operation.
            constant: whether its first operand is not data.
        """
        func, _, _, data, result = call
        return (
            func in UNFOLLOWED
            or type(func) in OPAQUE
            or (func not in FOLLOWED and func is not None and result.requires_grad)
            or (func in LOOKS_AT_FIRST and constant)
            or any(tensor.requires_grad and is_shared(call, tensor) for tensor in data)
        )

    def _agree(self, call: Call) -> bool:
        """Whether trained operands have the same examples in the same places; note if not."""
        func, args, _, data, result = call
        trained = [tensor for tensor in data if tensor.requires_grad]
        if any(self.is_lost(tensor) for tensor in trained):
            return False
        if self.batch_size > 1 and any(isinstance(self.owned(tensor), Whole) for tensor in trained):
            return False  # other operands do not belong to this example
        if func in LOOKS_AT_FIRST and any(tensor is not args[0] for tensor in trained):
            self.note_meeting(result)
            return False
        if any(is_shared(call, tensor) for tensor in trained):
            self.note_meeting(result)
            return False
        # Count axes from the right, as in broadcasting.
        places = [
            owned.behind(-tensor.dim()) if isinstance(owned, Examples) else owned
            for tensor, owned in zip(trained, map(self.owned, trained), strict=True)
            if owned is not None
        ]
        if all(same_layout(places[0], other) for other in places[1:]):
            return True
        self.note_meeting(result)
        return False

    def _meets_others(self, tensor: Tensor, data: list[Tensor]) -> bool:
        """Whether one example's values are combined with trained values of others."""
        owned = self.owned(tensor)
        if not isinstance(owned, Whole):
            return False
        others = [self.owned(other) for other in data if other.requires_grad]
        known = [other for other in others if isinstance(other, (Examples, Whole))]
        return any(sole_of(other) != owned for other in known)

    def _runs_over_examples(self, call: Call) -> bool:
        func, args, kwargs, _, result = call
        operands = [item for item in args[: 2 if func in OF_TWO else 1] if isinstance(item, Tensor)]
        if func is ATTENTION:
            operands = [*args[:3], *(kwargs[name] for name in ("key", "value") if name in kwargs)]
        if self.packed and (func is ATTENTION or not result.requires_grad):
            # Packed rows are positions too: masks keep those of different examples apart, and
            # values without a gradient may run over all of them, such as counts.
            return False
        for item in operands:
            if self.is_of_data(item):
                layout = self.layout_of(item)
                if isinstance(layout, Scores) and self.packed:
                    continue  # their values tell whether examples meet
                # Axes refer to the shape that the operands are broadcast to.
                widest = max((item, *operands), key=Tensor.dim) if func in OF_TWO else item
                axis = 0 if layout is None else layout.axis + widest.dim() - item.dim()
                if layout is not None and runs_over(func, (widest, *args[1:]), kwargs, axis):
                    return True
        return False

    def _mixes(self, data: list[Tensor], result: Tensor) -> bool:
        """Whether a result has trained values over all examples; note if one's meet these."""
        trained = [self.owned(tensor) for tensor in data if tensor.requires_grad]
        if not any(owned is MIXED for owned in trained) or not result.requires_grad:
            return False
        if any(isinstance(owned, (Examples, Whole)) for owned in trained):
            self.couple(result, BROUGHT_BACK)
        return True

    def _whole_of(self, data: list[Tensor]) -> Whole | None:
        """Return the one example to which several tensors belong as a whole; None if there is none.

        A single number without a gradient belongs to no example, wherever it comes from.
        """
        marks = [
            mark
            for tensor, mark in zip(data, map(self._mark_of, data), strict=True)
            if mark is not None or tensor.requires_grad or tensor.numel() != 1
        ]
        first = marks[0] if marks else None
        if first is None or not isinstance(first[0], Whole):
            return None
        return first[0] if all(mark == first for mark in marks[1:]) else None

    def _deciding(self, data: list[Tensor]) -> tuple[Tensor, Examples | None]:
        """Return the operand that determines the result's layout, and its layout."""
        if len(data) == 1 or not (self.follows_layouts or self.layout_of(data[0]) is None):
            return data[0], self.layout_of(data[0])
        layouts = [(tensor, self.layout_of(tensor)) for tensor in data]
        known = [(tensor, layout) for tensor, layout in layouts if layout is not None]
        trained = [(tensor, layout) for tensor, layout in known if tensor.requires_grad]
        deciding = trained or known
        # If in doubt, the first operand about which something was noted.
        first = next((item for item in layouts if self.is_marked(item[0])), layouts[0])
        if not deciding or any(first[0] is tensor for tensor, _ in deciding):
            return first
        return deciding[0]

    def broadcast(self, data: list[Tensor], result: Tensor) -> Examples | None:
        """Return the layout of operands that are broadcast against each other."""
        if any(tensor.dim() > result.dim() for tensor in data):
            return None  # a loss function that reduced its result
        aligned = []
        for tensor in data:
            layout = self.layout_of(tensor)
            if layout is not None:
                layout = layout.behind(result.dim() - tensor.dim())
                aligned.append((tensor, layout))
            elif tensor.requires_grad and (self.is_marked(tensor) or self.is_lost(tensor)):
                if self._meets_others(tensor, data):
                    self.note_meeting(result)
                return None
        if not aligned:
            lost = self.packed and any(map(self.is_marked, data))
            return None if lost else self.by_contract(result)
        trained = [layout for tensor, layout in aligned if tensor.requires_grad]
        deciding = trained or [layout for _, layout in aligned]
        if any(result.shape[layout.axis] != layout.rows for layout in deciding):
            return None  # the only example, broadcast
        if self.packed and (pairs := scores(deciding, result)) is not None:
            # Pairs without a gradient count as values of their rows.
            return pairs if trained else without_columns(pairs)
        first = deciding[0]
        if all(same_layout(first, layout) for layout in deciding[1:]):
            return first
        if trained:
            self.note_meeting(result)
            return None
        # Untrained inputs of different examples meet: the one in the batch's order decides.
        if any(layout.axis != first.axis for layout in deciding):
            return None
        return next((layout for layout in deciding if layout.plain), None)


# Operations that do not broadcast all operands: some are weights, indices, or only give a shape.
ROLES = SHARED | REINDEXES.keys() | RESHAPES | READS_ONLY_FIRST
