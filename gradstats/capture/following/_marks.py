"""What a context notes about tensors: which are constant, and where examples lie in the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from gradstats._factors import Segments
from gradstats.capture.following._examples import (
    APART,
    Examples,
    Grid,
    Mixed,
    Scores,
    Whole,
    same_rows,
    sole_of,
)
from gradstats.capture.following._filled import Filling
from gradstats.capture.following._meetings import Meetings
from gradstats.capture.operations._graph import KEPT_APPLY_IS_UNSEEN
from gradstats.capture.operations._memory import RearrangedMemory, WrittenMemory
from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._operations import GIVEN_VALUES
from gradstats.capture.parameters._tensors import node_of
from gradstats.errors import CoupledExamplesError, ExampleAxisError, UnsupportedOperationError

SERIALS = itertools.count()

# Constants found by any context, by id, while they are alive: what a model computed without data
# and kept is still constant in later contexts. They are listed here, not marked, because the user
# may save the tensors.
CONSTANTS: dict[int, ref[Tensor]] = {}


# Attributes of marks on data tensors, tuples that begin with the context's serial number: where the
# examples lie, and properties of the values until they change.
LAYOUT, VALUES = "_gradstats_layout", "_gradstats_values"
NOTHING: dict[str, Any] = {}


class Note(NamedTuple):
    """What is known about a tensor, to be noted on another that was computed in the same way.

    Attributes:
        constant: whether it belongs to no example.
        place: where its examples lie; None if they lie as the contract says.
        held: properties of its values: see ``mark_sum``, ``mark_blank``.
    """

    constant: bool
    place: Examples | Whole | Mixed | None
    held: dict[str, Any]


# Errors raised if values may belong to several examples, or it is not known to which.
ABOUT_EXAMPLES = (ExampleAxisError, CoupledExamplesError, UnsupportedOperationError)


class Marks(Meetings):
    """Which tensors are constant, and to which examples the others belong.

    Most of this is noted on the tensors themselves.

    Attributes:
        batch_size, batch_dim: as the caller gave them.
        serial: identifies this context in the marks on tensors; a copied tensor carries a copy of
            its mark, perhaps into another context.
        follows_layouts: set once any tensor has a layout of its own, so that most models pay
            nothing for it.
        packed: whether the caller gave packed examples, with different numbers of rows.
        taken: the function that made a tensor during the forward that counts as data only because
            of its size, and the tensor's shape.
        doubtful_are_data: whether tensors count as data that may be constants: tensors of given or
            drawn values, if they have the size of data, and tensors from closures and globals of
            the model's code. If not, results are exact too, but take longer to compute.
        has_grids: whether the examples of some tensor lie along two axes.
        maps_examples: whether the running torch.vmap maps everything it was given over examples.
        maps_data: whether its function has met data that it was not given.
    """

    def __init__(self, batch_size: int, batch_dim: int, segments: Segments | None):
        super().__init__()
        self.serial = next(SERIALS)
        self.batch_size = batch_size
        self.batch_dim = batch_dim
        self.follows_layouts = segments is not None
        self.packed = segments is not None
        self.taken: tuple[Callable[..., Any], tuple[int, ...]] | None = None
        self.doubtful_are_data = True
        self.maps_examples = self.maps_data = False
        self.has_grids = False
        self._contract = Examples(batch_size, batch_dim, 1, segments)
        self._behind_one = self._contract.along(batch_dim + 1)
        # The tensors are kept alive: the id of a freed one might be reused by a data tensor.
        self._constants: dict[int, Tensor] = {}
        self._written, self._rearranged = WrittenMemory(), RearrangedMemory()
        # Data tensors that carry a mark.
        self._marked: list[ref[Tensor]] = []
        # The numbers in the autograd graph of those whose examples do not lie as the contract says,
        # where an operation may not be seen.
        self.noted_nodes: set[int] = set()
        # Whether rows that nothing was written to were supposed to belong to examples, and whether
        # there are losses of one example each, which would contradict what is wrong.
        self.supposed = self.knows_losses = False

    def expected_along(self, axis: int) -> str:
        """Describe the expected size along an axis, for a message."""
        rows = f"the {self._contract.rows} rows of " if self.packed else ""
        kind = "packed examples" if self.packed else "examples"
        return f"{rows}{self.batch_size} {kind} along axis {axis}"

    def keep_constant(self, tensors: Iterable[Tensor]) -> None:
        """Remember tensors that the model keeps, which must not be marked, as constants."""
        self._constants.update((id(tensor), tensor) for tensor in tensors)

    def keep_data(self, tensors: Iterable[Tensor]) -> None:
        """Treat tensors as data, even if the model keeps them from an earlier batch."""
        for tensor in tensors:
            if self._constants.pop(id(tensor), None) is not None:
                CONSTANTS.pop(id(tensor), None)

    def take_batch(self, tensors: Iterable[Tensor]) -> None:
        """Treat the tensors of a batch as data, even if an earlier context found them constant."""
        for tensor in tensors:
            self._constants.pop(id(tensor), None)
            CONSTANTS.pop(id(tensor), None)

    def is_kept(self, tensor: Tensor) -> bool:
        """Whether the model keeps a tensor, so that it outlives the context."""
        return id(tensor) in self._constants

    def forget_marks(self) -> None:
        """Remove the marks from the model's tensors and from data."""
        for reference in self._marked:
            marked = reference()
            if marked is None:
                continue
            for name in (LAYOUT, VALUES):
                if getattr(marked, name, (None,))[0] == self.serial:
                    delattr(marked, name)
        self._marked.clear()
        self._constants.clear()
        self._written.clear()
        self._rearranged.clear()

    def is_data(self, tensor: Tensor) -> bool:
        """Whether a plain tensor may carry examples: it is not known to be constant."""
        if self._written.storages and tensor in self._written:
            return True
        if id(tensor) in self._constants:
            return False
        if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter):
            return False  # a parameter created in the forward has no examples either
        return id(tensor) not in CONSTANTS

    def is_of_data(self, item: Any) -> bool:
        """Whether an operand is an untracked tensor that may carry examples."""
        return isinstance(item, Tensor) and node_of(item) is None and self.is_data(item)

    def is_trained(self, item: Any) -> bool:
        """Whether an operand was computed from data and has a gradient to pass on."""
        return self.is_of_data(item) and item.requires_grad

    def data_among(self, items: Iterable[Any]) -> list[Tensor]:
        """Return the data tensors among an operation's operands."""
        return [item for item in items if self.is_of_data(item)]

    def takes_for_data(self, function: Callable[..., Any], tensor: Tensor) -> bool:
        """Return whether a tensor of given or drawn values counts as data because of its size.

        If so, note it for ``explain``.
        """
        given = function in GIVEN_VALUES
        # With packed examples a mistake would go unnoticed: rows may meet there.
        if self.packed or not self.doubtful_are_data:
            return False
        if not self.has_example_axis(tensor):
            return False
        if given or self.taken is None:
            self.taken = function, tuple(tensor.shape)
        if given:
            self.mark_given(tensor)
        return True

    @property
    def took_given(self) -> bool:
        """Whether tensors made from given values were taken for data because of their size."""
        return self.taken is not None and self.taken[0] in GIVEN_VALUES

    def explain(self, error: BaseException | None) -> None:
        """Add to an error about examples which tensor was taken for data because of its size."""
        if self.taken is not None and isinstance(error, ABOUT_EXAMPLES):
            function, shape = self.taken
            instead = "keep it in the model (register_buffer)"
            if function not in GIVEN_VALUES:
                instead = "draw it like a parameter (torch.randn_like(weight)) or into a buffer"
                instead += " (buffer.normal_())"
            error.args = (
                f"{error} In this forward {function_name(function)} made a tensor of shape "
                f"{shape}. Since it has as many rows as there are examples, it was taken to hold "
                f"one row of each. If it belongs to no example, {instead}, or use another batch "
                "size.",
            )

    def has_example_axis(self, tensor: Tensor) -> bool:
        """Whether a tensor's example axis has the size of the batch."""
        return self.by_contract(tensor) is not None

    def by_contract(self, tensor: Tensor) -> Examples | None:
        """Return the layout of data by contract, if their shape fits it; else None."""
        if self._contract.fits(tensor):
            return self._contract
        axis, rows = self.batch_dim, self._contract.rows
        if self.packed and tensor.dim() > axis + 1:
            # Packed examples often keep a batch axis of size 1.
            if tensor.shape[axis] == 1 and tensor.shape[axis + 1] == rows:
                return self._behind_one
        return None

    def mark_constant(self, tensor: Tensor) -> None:
        """Remember that a tensor was computed without data."""
        if id(tensor) not in self._constants:
            # The callback is in C: inside a Python callback an interrupt would be swallowed.
            CONSTANTS[id(tensor)] = ref(tensor, partial(CONSTANTS.pop, id(tensor)))

    def mark_data(self, tensor: Tensor) -> None:
        """Remember that data were written into a tensor, and all others that share its memory."""
        if not self.is_data(tensor):
            self._written.add(tensor)

    def mark_blank(self, tensor: Tensor) -> None:
        """Remember that a tensor with the shape of data holds no example's values yet."""
        self._stamp(tensor, blank=True)

    def was_blank(self, tensor: Tensor, writes: int) -> bool:
        """Whether a tensor held no example's values before its last ``writes`` changes."""
        return "blank" in self._held(tensor, writes)

    def mark_sum(self, tensor: Tensor) -> None:
        """Remember that a marked tensor is a sum of terms that depend on one example each."""
        self._stamp(tensor, sum=True)

    def is_sum(self, tensor: Tensor, writes: int = 0) -> bool:
        """Whether a tensor of several examples was such a sum before its last changes."""
        return "sum" in self._held(tensor, writes)

    def is_additive(self, tensor: Tensor, writes: int = 0) -> bool:
        """Whether a tensor held values of one example each, or sums of such, before its changes.

        For parameters used inside the context, tensors from outside always count as such.
        """
        found = self.placed(tensor)
        apart = isinstance(found, APART) and not isinstance(found, Scores)
        return apart or not self.is_marked(tensor) or self.is_sum(tensor, writes)

    def mark_given(self, tensor: Tensor) -> None:
        """Remember that a tensor of given values counts as data because of its size."""
        self._stamp(tensor, given=True)

    def is_given(self, tensor: Tensor) -> bool:
        """Whether a tensor of given values counts as data only because of its size."""
        given = self.took_given and "given" in self._held(tensor)
        return given and not tensor.requires_grad

    def without_given(self, data: list[Tensor]) -> list[Tensor]:
        """Return the data operands that determine where the examples lie.

        Next to data of the batch, given values do not, whatever their size.
        """
        others = [item for item in data if not self.is_given(item)]
        known = any(self.layout_of(item) is not None for item in others)
        return others if known else data

    def mark_filling(self, tensor: Tensor, filling: Filling) -> None:
        """Remember what has been written into a tensor that was blank."""
        self._stamp(tensor, filling=filling)

    def filling_of(self, tensor: Tensor, writes: int) -> Filling | None:
        """Return what had been written into a blank tensor before its last ``writes`` changes."""
        return self._held(tensor, writes).get("filling")

    def keep_marks(self, tensor: Tensor) -> None:
        """Keep the properties of a tensor's values after a write that changed none of them."""
        self._stamp(tensor, **self._held(tensor, writes=1))

    def _stamp(self, tensor: Tensor, **found: Any) -> None:
        """Note properties of a tensor's values, which hold until they change."""
        if found and not tensor.is_inference():
            found = {**self._held(tensor), **found}
            setattr(tensor, VALUES, (self.serial, tensor._version, found))
            self._marked.append(ref(tensor))

    def _held(self, tensor: Tensor, writes: int = 0) -> dict[str, Any]:
        """Return the properties of a tensor's values before its last ``writes`` changes."""
        mark: Any = getattr(tensor, VALUES, None)
        # Check for marks first: inference tensors have no version.
        held = mark is not None and mark[:2] == (self.serial, tensor._version - writes)
        return mark[2] if held else NOTHING

    @contextmanager
    def mapping_examples(self, maps_examples: bool) -> Iterator[None]:
        """Note for a block whether the torch.vmap that runs there maps over examples."""
        self.maps_examples, self.maps_data = maps_examples, False
        try:
            yield
        finally:
            self.maps_examples = False

    def layout_of(self, tensor: Tensor) -> Examples | None:
        """Return where the examples lie in a tensor of data; None where that is not known."""
        mark = self._mark_of(tensor)
        if mark is None:
            if self._written.storages and tensor in self._written and not self.is_distinct(tensor):
                return None
            return self.by_contract(tensor)
        if self.batch_size == 1 and self._contract.fits(tensor):
            return self._contract  # everything belongs to the only example
        (layout,) = mark
        return layout if isinstance(layout, Examples) else None

    def rows_of_one(self, tensor: Tensor, axis: int) -> Examples | None:
        """Return the layout along ``axis`` of a tensor of a single example; else None."""
        owned = sole_of(self.owned(tensor))
        if not isinstance(owned, Whole):
            return None
        owner = torch.full((tensor.shape[axis],), owned.example, device=tensor.device)
        return Examples(self.batch_size, axis).owned_by(owner, axis)

    def _mark_of(self, tensor: Tensor) -> tuple[Examples | Whole | Mixed | Grid | None] | None:
        """Return the noted layout in a tuple of one; None if nothing was noted."""
        mark = getattr(tensor, LAYOUT, None)
        if mark is not None and mark[0] != self.serial:
            mark = None
        if self._rearranged.storages:
            since = -1 if mark is None else mark[3]
            if self._rearranged.touched(tensor, since):
                return (None,)
        return None if mark is None else mark[1:2]

    def note_rearranged(self, tensor: Tensor) -> None:
        """Note that a write moved the examples of a tensor.

        Layouts noted so far on other tensors that share its memory are invalid.
        """
        self._rearranged.add(tensor)
        self.follows_layouts = True

    def owned(self, tensor: Tensor) -> Examples | Whole | Mixed | None:
        """Return to which examples a tensor of data belongs; None where that is not known."""
        found = self.placed(tensor)
        return None if isinstance(found, Grid) else found  # which few operations can follow

    def placed(self, tensor: Tensor) -> Examples | Whole | Mixed | Grid | None:
        """Return to which examples a tensor belongs, even along two axes."""
        mark = self._mark_of(tensor)
        found = self.layout_of(tensor) if mark is None else mark[0]
        return Whole(0) if found is None and self.batch_size == 1 else found

    def grid_of(self, tensor: Tensor) -> Grid | None:
        """Return the layout of a data tensor whose examples lie along two axes; else None."""
        mark = self._mark_of(tensor) if self.has_grids else None
        return mark[0] if mark is not None and isinstance(mark[0], Grid) else None

    def is_distinct(self, tensor: Tensor) -> bool:
        """Whether exactly one axis has the size of the batch, or of all its packed rows."""
        return sum(size == self._contract.rows for size in tensor.shape) == 1

    def is_lost(self, tensor: Tensor) -> bool:
        """Whether it is unknown which examples a computed data tensor belongs to.

        Tensors computed inside an autograd Function, unseen, have no mark.
        """
        if self.owned(tensor) is not None:
            return False
        return self.is_marked(tensor) or tensor.grad_fn is not None

    def lost_at(self, tensor: Tensor) -> str | None:
        """Return the operation at which the examples of a tensor of data were lost, if known."""
        known = self._mark_of(tensor)
        if known is None or isinstance(known[0], (Examples, Whole, Mixed)):
            return None
        mark: Any = getattr(tensor, LAYOUT, None)
        if mark is None or mark[:2] != (self.serial, *known):
            return "a write into another tensor that shows its memory"
        return mark[2]

    def place(
        self,
        tensor: Tensor,
        layout: Examples | Whole | Mixed | Grid | None,
        at: str | None = None,
    ) -> None:
        """Note where the examples lie in a tensor of data.

        Args:
            tensor: of data.
            layout: where they lie; None where that is not known.
            at: the name of the operation at which the layout was lost, or the axis divided.
        """
        known = layout == self.by_contract(tensor) and self._mark_of(tensor) is None
        # A tensor without an example axis that was computed from trained data has lost its
        # examples.
        lost = layout is None and tensor.requires_grad and self.batch_size > 1
        if not known or lost or (self._written.storages and tensor in self._written):
            self._mark(tensor, layout, at)

    def _mark(self, tensor: Tensor, layout: Any, at: str | None = None) -> None:
        if isinstance(layout, Examples):
            layout = layout.on(tensor.device)  # it may be a copy from another device
        self.has_grids |= isinstance(layout, Grid)
        setattr(tensor, LAYOUT, (self.serial, layout, at, self._rearranged.count))
        self._marked.append(ref(tensor))
        self.follows_layouts = True
        if KEPT_APPLY_IS_UNSEEN and tensor.grad_fn is not None:
            if layout is None or layout != self.by_contract(tensor):
                self.noted_nodes.add(tensor.grad_fn._sequence_nr())

    def known_of(self, rows: int) -> Iterator[Examples]:
        """Yield where packed examples lie in living tensors of so many rows, each layout once."""
        seen: list[Examples] = []
        for reference in self._marked:
            marked = reference()
            mark = None if marked is None else self._mark_of(marked)
            own = None if mark is None else mark[0]
            if type(own) is not Examples or own.rows != rows:
                continue
            if not any(same_rows(own, other) for other in seen):
                seen.append(own)
                yield own

    def is_marked(self, tensor: Tensor) -> bool:
        """Whether anything was noted about a tensor of data."""
        return self._mark_of(tensor) is not None

    def is_unusual(self, tensor: Tensor) -> bool:
        """Whether anything beyond the contract is known about a data tensor."""
        written = bool(self._written.storages) and tensor in self._written
        return written or self.is_marked(tensor) or hasattr(tensor, VALUES)

    def note_of(self, tensor: Tensor) -> Note | None:
        """Return what is known about a tensor; None if it holds for this tensor only."""
        if not self.is_data(tensor):
            return Note(True, None, NOTHING)
        if self.filling_of(tensor, 0) is not None or self.is_given(tensor):
            return None
        mark = self._mark_of(tensor)
        place = None if mark is None else mark[0]
        if mark is not None and place is None:
            return None
        if isinstance(place, Grid) or (isinstance(place, Examples) and place.segments is not None):
            return None  # it depends on this tensor's values
        return Note(False, place, self._held(tensor))

    def note_as(self, tensor: Tensor, note: Note) -> None:
        """Note on a tensor what is known about one that was computed in the same way."""
        if note.constant:
            self.mark_constant(tensor)
        if note.place is not None:
            self._mark(tensor, note.place)
        self._stamp(tensor, **note.held)
