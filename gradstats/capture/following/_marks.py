"""What a context notes about tensors: which are constant, and where examples lie in the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from gradstats._factors import Segments
from gradstats.capture.following._examples import (
    APART,
    Examples,
    Layout,
    Scores,
    Whole,
    same_rows,
    sole_of,
)
from gradstats.capture.following._meetings import Meetings
from gradstats.capture.following._values import VALUES, Values, unmark
from gradstats.capture.operations._graph import KEPT_APPLY_IS_UNSEEN
from gradstats.capture.operations._memory import RearrangedMemory, WrittenMemory
from gradstats.capture.parameters._tensors import node_of

SERIALS = itertools.count()

# Constants found by any context, by id, while they are alive: what a model computed without data
# and kept is still constant in later contexts. They are listed here, not marked, because the user
# may save the tensors.
CONSTANTS: dict[int, ref[Tensor]] = {}

# The attribute of data tensors that holds their mark: the context's serial number, the layout, the
# operation at which the layout was lost, and how often examples had been moved in memory.
LAYOUT = "_gradstats_layout"


class Marks:
    """Which tensors are constant, and to which examples the others belong.

    Most of this is noted on the tensors themselves.

    Attributes:
        batch_size, batch_dim: as the caller gave them.
        serial: identifies this context in the marks on tensors; a copied tensor carries a copy of
            its mark, perhaps into another context.
        packed: whether the caller gave packed examples, with different numbers of rows.
        scored: whether any tensor has scores.
        taken: the function that made a tensor which counts as data only because of its size, and
            the tensor's shape.
        took_entries: whether entries of lists in the batch were taken for those of the examples.
        doubtful_are_data: whether tensors that may be constants count as data: those of given or
            drawn values that have the size of data, and those from closures and globals of the
            model's code; and whether entries of lists are taken for those of the examples. Results
            are exact either way, but take longer to compute if this is False.
        meetings: the operations in which trained values of different examples met.
        values: properties of the values of data tensors.
        contract: the layout of data without a mark.
        constants: tensors that the model keeps, except tracked ones, by id. They are kept alive:
            a data tensor might reuse the id of a freed one.
        written: the memory that data were written into.
        rearranged: the memory in which examples were moved.
        marked: the data tensors that carry a mark.
        noted_nodes: the sequence numbers of the autograd nodes of tensors whose examples do not lie
            as the contract says; kept only where operations may run unseen.
        knows_losses: whether there are losses of one example each, whose layouts tell what a loss
            over all examples does not.
        enclosed: tensors in the closures and globals of the loss function and the model's code.
    """

    def __init__(self, batch_size: int, batch_dim: int, segments: Segments | None):
        self.serial = next(SERIALS)
        self.meetings, self.values = Meetings(batch_size), Values(self.serial)
        self.batch_size = batch_size
        self.batch_dim = batch_dim
        self.packed = segments is not None
        self.scored = False
        self.taken: tuple[Callable[..., Any], tuple[int, ...]] | None = None
        self.took_entries = False
        self.doubtful_are_data = True
        self.contract = Examples(batch_size, batch_dim, 1, segments)
        # Packed examples often keep a batch axis of size 1.
        self._behind_one = self.contract.along(batch_dim + 1) if self.packed else None
        self.constants: dict[int, Tensor] = {}
        self.written, self.rearranged = WrittenMemory(), RearrangedMemory()
        self.marked: list[ref[Tensor]] = []
        self.noted_nodes: set[int] = set()
        self.knows_losses = False
        self.enclosed: Container[Tensor] = ()

    def expected_along(self, axis: int) -> str:
        """Describe the expected size along an axis, for a message."""
        rows = f"the {self.contract.rows} rows of " if self.packed else ""
        kind = "packed examples" if self.packed else "examples"
        return f"{rows}{self.batch_size} {kind} along axis {axis}"

    def keep_constant(self, tensors: Iterable[Tensor]) -> None:
        """Remember tensors that the model keeps, which must not be marked, as constants."""
        self.constants.update((id(tensor), tensor) for tensor in tensors)

    def take_batch(self, tensors: Iterable[Tensor]) -> None:
        """Treat the tensors of a batch as data, even if an earlier context found them constant."""
        for tensor in tensors:
            self.constants.pop(id(tensor), None)
            CONSTANTS.pop(id(tensor), None)

    def is_kept(self, tensor: Tensor) -> bool:
        """Whether the model keeps a tensor, so that it outlives the context."""
        return id(tensor) in self.constants

    def forget(self) -> None:
        """Forget everything, and remove the marks from tensors."""
        unmark(self.marked, LAYOUT, self.serial)
        self.values.forget()
        self.constants.clear()
        self.written.clear()
        self.rearranged.clear()
        self.meetings = Meetings(self.batch_size)
        self.enclosed = ()

    def is_data(self, tensor: Tensor) -> bool:
        """Whether a plain tensor may carry examples: it is not known to be constant."""
        if self.written.storages and tensor in self.written:
            return True
        if id(tensor) in self.constants:
            return False
        if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter):
            return False  # a parameter created in the forward has no examples either
        return id(tensor) not in CONSTANTS

    def may_hold_rows(self, tensor: Tensor) -> bool:
        """Whether a plain tensor may hold values of examples, even if it only meets parameters.

        A single number holds those of one example at most, and has a mark if it was picked from
        data.
        """
        if not self.is_data(tensor):
            return False
        one = tensor.numel() == 1 < self.batch_size and not tensor.requires_grad
        return not one or self.is_marked(tensor) or self.has_example_axis(tensor)

    def is_of_data(self, item: Any) -> bool:
        """Whether an operand is an untracked tensor that may carry examples."""
        return isinstance(item, Tensor) and node_of(item) is None and self.is_data(item)

    def is_trained(self, item: Any) -> bool:
        """Whether an operand was computed from data and has a gradient to pass on."""
        return self.is_of_data(item) and item.requires_grad

    def data_among(self, items: Iterable[Any]) -> list[Tensor]:
        """Return the data tensors among an operation's operands."""
        return [item for item in items if self.is_of_data(item)]

    def has_example_axis(self, tensor: Tensor) -> bool:
        """Whether a tensor's example axis has the size of the batch."""
        return self.by_contract(tensor) is not None

    def by_contract(self, tensor: Tensor) -> Examples | None:
        """Return the contract's layout for a tensor; None if the tensor's shape does not fit."""
        found, axis = self.contract, self.batch_dim
        if not found.fits(tensor):
            if self._behind_one is None or tensor.shape[axis : axis + 2] != (1, found.rows):
                return None
            found = self._behind_one
        # The layers of a model may be on several devices.
        if found.segments is not None and found.segments.owner.device != tensor.device:
            return found.on(tensor.device)
        return found

    def mark_constant(self, tensor: Tensor) -> None:
        """Remember that a tensor was computed without data."""
        if id(tensor) not in self.constants:
            # The callback is in C: inside a Python callback an interrupt would be swallowed.
            CONSTANTS[id(tensor)] = ref(tensor, partial(CONSTANTS.pop, id(tensor)))

    def mark_data(self, tensor: Tensor) -> None:
        """Remember that a tensor, and all others that share its memory, hold data from now on."""
        if not self.is_data(tensor):
            self.written.add(tensor)

    def is_additive(self, tensor: Tensor, writes: int = 0) -> bool:
        """Whether each value of a tensor is of one example, or a sum of terms of one each.

        Tensors without a mark, such as those from outside, count as such.

        Args:
            tensor: of data.
            writes: how many of its last changes to undo before asking for sums.
        """
        found = self.owned(tensor)
        apart = isinstance(found, APART) and not isinstance(found, Scores)
        return apart or not self.is_marked(tensor) or self.values.is_sum(tensor, writes)

    def layout_of(self, tensor: Tensor) -> Examples | None:
        """Return where the examples lie in a tensor of data; None if along no known axis."""
        mark = self.mark_of(tensor)
        if mark is None:
            if self.written.storages and tensor in self.written and not self.is_distinct(tensor):
                return None
            return self.by_contract(tensor)
        if self.batch_size == 1 and self.contract.fits(tensor):
            return self.contract  # everything belongs to the only example
        (layout,) = mark
        return layout if isinstance(layout, Examples) else None

    def layout_of_rows(self, item: Any) -> Examples | None:
        """Return where the examples lie in an operand; None unless it is data with a known axis.

        None for scores too, which depend on other examples as well.
        """
        layout = self.layout_of(item) if self.is_of_data(item) else None
        return None if isinstance(layout, Scores) else layout

    def rows_of_one(self, tensor: Tensor, axis: int) -> Examples | None:
        """Return the layout along ``axis`` of a tensor that belongs to one example; else None."""
        owned = sole_of(self.owned(tensor))
        if not isinstance(owned, Whole):
            return None
        owner = torch.full((tensor.shape[axis],), owned.example, device=tensor.device)
        return Examples(self.batch_size, axis).owned_by(owner, axis)

    def mark_of(self, tensor: Tensor) -> tuple[Layout] | None:
        """Return the noted layout in a tuple of one; None if nothing was noted."""
        mark = getattr(tensor, LAYOUT, None)
        if mark is not None and mark[0] != self.serial:
            mark = None
        if self.rearranged.storages:
            since = -1 if mark is None else mark[3]
            if self.rearranged.touched(tensor, since):
                return (None,)
        return None if mark is None else mark[1:2]

    def note_rearranged(self, tensor: Tensor) -> None:
        """Note that a write moved the examples of a tensor.

        This invalidates the marks of other tensors that share its memory.
        """
        if self.batch_size > 1:
            self.rearranged.add(tensor)

    def owned(self, tensor: Tensor) -> Layout:
        """Return the layout of a tensor of data; None if it is not known."""
        mark = self.mark_of(tensor)
        found = self.layout_of(tensor) if mark is None else mark[0]
        return Whole(0) if found is None and self.batch_size == 1 else found

    def is_distinct(self, tensor: Tensor) -> bool:
        """Whether exactly one axis has the size of the batch, or of all its packed rows."""
        return sum(size == self.contract.rows for size in tensor.shape) == 1

    def is_lost(self, tensor: Tensor) -> bool:
        """Whether a computed data tensor has no known layout.

        It may have no mark either, if it was computed unseen inside an autograd Function.
        """
        if self.owned(tensor) is not None:
            return False
        return self.is_marked(tensor) or tensor.grad_fn is not None

    def lost_at(self, tensor: Tensor) -> str | None:
        """Return the operation at which the layout of a tensor of data was lost, if known."""
        if self.mark_of(tensor) != (None,):
            return None
        mark: Any = getattr(tensor, LAYOUT, None)
        if mark is None or mark[:2] != (self.serial, None):
            return "a write into another tensor that shows its memory"
        return mark[2]

    def place(self, tensor: Tensor, layout: Layout, at: str | None = None) -> None:
        """Note where the examples lie in a tensor of data.

        Args:
            tensor: of data.
            layout: where they lie; None where that is not known.
            at: the name of the operation at which the layout was lost.
        """
        known = layout == self.by_contract(tensor) and self.mark_of(tensor) is None
        # Trained data without an example axis have lost their examples.
        lost = layout is None and tensor.requires_grad and self.batch_size > 1
        if not known or lost or (self.written.storages and tensor in self.written):
            self.mark(tensor, layout, at)

    def mark(self, tensor: Tensor, layout: Layout, at: str | None = None) -> None:
        """Do the same, even if the layout is the one that a tensor without a mark has."""
        if isinstance(layout, Examples):
            layout = layout.on(tensor.device)  # the tensor may be a copy from another device
            self.scored = self.scored or isinstance(layout, Scores)
        setattr(tensor, LAYOUT, (self.serial, layout, at, self.rearranged.count))
        self.marked.append(ref(tensor))
        if KEPT_APPLY_IS_UNSEEN and tensor.grad_fn is not None:
            if layout is None or layout != self.by_contract(tensor):
                self.noted_nodes.add(tensor.grad_fn._sequence_nr())

    @contextmanager
    def aside(self, tensor: Tensor) -> Iterator[None]:
        """Take the notes off a tensor for a while, so that they are not copied or saved with it."""
        attributes = vars(tensor)
        notes = {name: attributes.pop(name) for name in (LAYOUT, VALUES) if name in attributes}
        try:
            yield
        finally:
            attributes.update(notes)

    def place_like(self, tensor: Tensor, source: Tensor) -> None:
        """Note on a tensor what is known about another from which it was computed row by row."""
        if not self.is_data(source):
            self.mark_constant(tensor)
        elif self.is_marked(source) or self.layout_of(source) != self.by_contract(tensor):
            self.place(tensor, self.owned(source))
            if self.values.is_sum(source):
                self.values.note(tensor, sum=True)
            owner = self.values.owner_of(source)
            if owner is not None:
                self.values.note(tensor, owner=owner)

    def known_of(self, rows: int) -> Iterator[Examples]:
        """Yield the different layouts with so many rows that living tensors are marked with."""
        seen: list[Examples] = []
        for reference in self.marked:
            marked = reference()
            mark = None if marked is None else self.mark_of(marked)
            layout = None if mark is None else mark[0]
            if type(layout) is not Examples or layout.rows != rows:
                continue
            if not any(same_rows(layout, other) for other in seen):
                seen.append(layout)
                yield layout

    def is_marked(self, tensor: Tensor) -> bool:
        """Whether anything was noted about a tensor of data."""
        return self.mark_of(tensor) is not None
