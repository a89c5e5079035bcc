"""What a context notes on tensors: that they are constant, and where the examples of others lie."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from gradstats._compiler import is_compiling
from gradstats._factors import Segments
from gradstats.capture._examples import Examples, Mixed, Whole
from gradstats.capture._names import function_name
from gradstats.capture._operations import GIVEN_VALUES
from gradstats.errors import CoupledExamplesError, ExampleAxisError, UnsupportedOperationError

SERIALS = itertools.count()


# Constants that some context found, by number, for as long as they live. What a model computed
# without data, and kept, stays constant; on the tensor, which its user may save, no mark is left.
CONSTANTS: dict[int, ref[Tensor]] = {}


# What is raised where it is not known, or not so, that each value is one example's.
ABOUT_EXAMPLES = (ExampleAxisError, CoupledExamplesError, UnsupportedOperationError)


def leave_graph(what: str | Callable[[], str]) -> None:
    """Stop a graph from being traced: what comes next has to be remembered in Python."""
    if torch.compiler.is_dynamo_compiling():
        what = what if isinstance(what, str) else what()
        # The compiler takes this for the end of the graph, or says it where one graph is demanded.
        raise RuntimeError(
            f"a compiled graph holds {what}, which is followed outside of graphs only. Compile "
            "without fullgraph=True: then this part runs eagerly inside a context."
        )


class Marks:
    """Which tensors are constant and whose the others are, noted on the tensors themselves.

    Attributes:
        batch_size, batch_dim: as the caller gave them.
        serial: layouts are marked with this number: a tensor may be copied with its mark.
        follows_layouts: set once any tensor has a layout of its own, so that most models pay
            nothing for it.
        packed: the rows of examples differ in number, as the caller gave them.
        coupled: autograd nodes in which examples met that a loss may not depend on together, with
            how they met there.
        taken: what made a tensor in the forward that counts as data for its size alone, and the
            tensor's shape.
        given_are_data: whether those made of values of the caller's do. Where they do not, numbers
            are exact as well, and what parameters make of such tensors takes longer.
        maps_examples: whether torch.vmap maps over the examples of all that it was given.
        maps_places: whether, while a graph is traced, it maps over what is not data.
        seen_by_graphs: graphs may be traced that look for the marks of constants on the tensors.
    """

    def __init__(self, batch_size: int, batch_dim: int, segments: Segments | None):
        self.serial = next(SERIALS)
        self.batch_size = batch_size
        self.batch_dim = batch_dim
        self.follows_layouts = False
        self.coupled: dict[Any, str] = {}
        self.packed = segments is not None
        self.taken: tuple[Callable[..., Any], tuple[int, ...]] | None = None
        self.given_are_data = True
        self.maps_examples = self.maps_places = False
        self.seen_by_graphs = False
        self._contract = Examples(batch_size, batch_dim, 1, segments)
        # Held, not only numbered: a freed tensor's number may come back as that of data.
        self._constants: dict[int, Tensor] = {}
        # The memory of constants that data were written into, under its address.
        self._written: dict[int, torch.UntypedStorage] = {}
        # Tensors of data that carry a mark.
        self._marked: list[ref[Tensor]] = []

    def keep_constant(self, tensors: Iterable[Tensor]) -> None:
        """Remember tensors of the model's, on which no mark may be left, as constants."""
        self._constants.update((id(tensor), tensor) for tensor in tensors)

    def keep_data(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors for data, also where the model keeps them from an earlier batch."""
        for tensor in tensors:
            _unmark(self._constants.pop(id(tensor), None))

    def take_batch(self, tensors: Iterable[Tensor]) -> None:
        """Take what a call was given for data, also where an earlier context made it of none."""
        for tensor in tensors:
            self._constants.pop(id(tensor), None)
            _unmark(tensor)

    def is_kept(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of the model's, which outlives the context."""
        return id(tensor) in self._constants

    def mark_kept(self) -> None:
        """Let graphs that are traced from now on see the model's own tensors as constants."""
        for tensor in self._constants.values():
            tensor._gradstats_constant = True  # type: ignore[attr-defined]

    def forget_marks(self) -> None:
        """Leave no mark on tensors of the model's, nor on data."""
        for reference in self._marked:
            marked = reference()
            if marked is None:
                continue
            for name in ("_gradstats_layout", "_gradstats_blank"):
                if getattr(marked, name, (None,))[0] == self.serial:
                    delattr(marked, name)
        self._marked.clear()
        for tensor in self._constants.values():
            _unmark(tensor)
        self._constants.clear()
        self._written.clear()

    def is_data(self, tensor: Tensor) -> bool:
        """Whether a plain tensor may carry examples: it is not known to be constant."""
        compiling = torch.compiler.is_dynamo_compiling()
        if not compiling and self._written and self._is_written(tensor):
            return True
        if not compiling and id(tensor) in self._constants:
            return False
        if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter):
            return False  # a parameter that a forward makes holds no examples either
        if not compiling and id(tensor) in CONSTANTS:
            return False
        return not hasattr(tensor, "_gradstats_constant")

    def _is_written(self, tensor: Tensor) -> bool:
        storage = _storage(tensor)
        return storage is not None and storage._cdata in self._written

    def takes_for_data(self, function: Callable[..., Any], tensor: Tensor) -> bool:
        """Note, and return, whether values given or drawn count as data for their size."""
        given = function in GIVEN_VALUES
        # Where rows of packed examples meet nobody notices that such values were taken for data.
        if self.packed or (given and not self.given_are_data):
            return False
        if not self.has_example_axis(tensor):
            return False
        if given or self.taken is None:
            self.taken = function, tuple(tensor.shape)
        return True

    @property
    def took_given(self) -> bool:
        """Whether values of the forward's own were taken for data by their number alone."""
        return self.taken is not None and self.taken[0] in GIVEN_VALUES

    def explain(self, error: BaseException | None) -> None:
        """Add to an error about the example axis what was taken for data by its size alone."""
        if self.taken is not None and isinstance(error, ABOUT_EXAMPLES):
            function, shape = self.taken
            error.args = (
                f"{error} In this forward {function_name(function)} made a tensor of shape "
                f"{shape}: with as many rows as there are examples, it was taken for a row of "
                "each. If it belongs to no example, keep it in the model (register_buffer), or use "
                "another batch size.",
            )

    def has_example_axis(self, tensor: Tensor) -> bool:
        """Whether a tensor's example axis has the size of the batch."""
        return self.by_contract(tensor) is not None

    def by_contract(self, tensor: Tensor) -> Examples | None:
        """Return where the examples of data lie that nothing else is known of."""
        if self._contract.fits(tensor):
            return self._contract
        axis, rows = self.batch_dim, self._contract.rows
        if self.packed and tensor.dim() > axis + 1:
            # Packed examples often keep a batch axis of size 1.
            if tensor.shape[axis] == 1 and tensor.shape[axis + 1] == rows:
                return self._contract.along(axis + 1)
        return None

    def mark_constant(self, tensor: Tensor) -> None:
        """Remember that a tensor was computed without data."""
        if torch.compiler.is_dynamo_compiling():
            tensor._gradstats_constant = True  # type: ignore[attr-defined]
        elif id(tensor) not in self._constants:
            # Forgotten with the tensor, by nothing of Python's: an interrupt would be lost there.
            CONSTANTS[id(tensor)] = ref(tensor, partial(CONSTANTS.pop, id(tensor)))
            if self.seen_by_graphs:
                tensor._gradstats_constant = True  # type: ignore[attr-defined]

    def mark_data(self, tensor: Tensor) -> None:
        """Remember that data were written into a tensor, and so into all that share its memory."""
        if torch.compiler.is_dynamo_compiling():
            _unmark(tensor)
        elif not self.is_data(tensor):
            storage = _storage(tensor)
            if storage is not None:
                self._written[storage._cdata] = storage

    def mark_blank(self, tensor: Tensor) -> None:
        """Remember that a tensor with the form of data holds nothing of any example yet."""
        if not (is_compiling() or tensor.is_inference()):
            tensor._gradstats_blank = (self.serial, tensor._version)  # type: ignore[attr-defined]
            self._marked.append(ref(tensor))

    def was_blank(self, tensor: Tensor, writes: int) -> bool:
        """Whether a tensor held nothing of any example before so many writes."""
        mark = getattr(tensor, "_gradstats_blank", None)
        return mark is not None and mark == (self.serial, tensor._version - writes)

    @contextmanager
    def mapping_examples(self, maps_examples: bool) -> Iterator[None]:
        """Note for a block what torch.vmap maps over there."""
        self.maps_examples = maps_examples
        try:
            yield
        finally:
            self.maps_examples = False

    def layout_of(self, tensor: Tensor) -> Examples | None:
        """Return where the examples of a tensor of data lie, None where that is not known."""
        mark = self._mark_of(tensor)
        if mark is None:
            if self._written and self._is_written(tensor) and not self.is_distinct(tensor):
                return None
            return self.by_contract(tensor)
        leave_graph("data whose examples do not lie along batch_dim")
        (layout,) = mark
        return layout if isinstance(layout, Examples) else None

    def rows_of_one(self, tensor: Tensor, axis: int) -> Examples | None:
        """Return where the rows of a tensor lie along an axis all of which are one example's."""
        owned = self.owned(tensor)
        if not isinstance(owned, Whole):
            return None
        owner = torch.full((tensor.shape[axis],), owned.example, device=tensor.device)
        return Examples(self.batch_size, axis).owned_by(owner, axis)

    def _mark_of(self, tensor: Tensor) -> tuple[Examples | Whole | Mixed | None] | None:
        """Return, in a tuple, what was noted of a tensor; None where nothing was."""
        mark = getattr(tensor, "_gradstats_layout", None)
        return mark[1:2] if mark is not None and mark[0] == self.serial else None

    def owned(self, tensor: Tensor) -> Examples | Whole | Mixed | None:
        """Return whose a tensor of data is, as far as that is known."""
        mark = self._mark_of(tensor)
        found = self.layout_of(tensor) if mark is None else mark[0]
        return Whole(0) if found is None and self.batch_size == 1 else found

    def note_meeting(self, result: Tensor) -> None:
        """Note that trained values of one example meet those of another."""
        if result.requires_grad and self.batch_size > 1:
            self.coupled[result.grad_fn] = "combines trained values of different examples"

    def is_distinct(self, tensor: Tensor) -> bool:
        """Whether one axis and no other has the batch's size."""
        return sum(size == self.batch_size for size in tensor.shape) == 1

    def is_lost(self, tensor: Tensor) -> bool:
        """Whether an operation left a tensor of data of which nobody knows whose it is.

        One that was trained unseen, in an autograd Function, carries no mark that says so.
        """
        if self.owned(tensor) is not None:
            return False
        return self.is_marked(tensor) or tensor.grad_fn is not None

    def lost_at(self, tensor: Tensor) -> str | None:
        """Return the operation after which nobody knew whose a tensor of data is, if one is."""
        mark: Any = getattr(tensor, "_gradstats_layout", None)
        return mark[2] if self._mark_of(tensor) == (None,) else None

    def place(
        self, tensor: Tensor, layout: Examples | Whole | Mixed | None, at: str | None = None
    ) -> None:
        """Note where the examples of a tensor of data lie; None for what nobody knows.

        Args:
            tensor: of data.
            layout: where they lie.
            at: the name of the operation after which nobody knows.
        """
        known = layout == self.by_contract(tensor) and self._mark_of(tensor) is None
        # Nor is a tensor without an example axis nobody's, where it was computed from trained data.
        lost = layout is None and tensor.requires_grad and self.batch_size > 1
        if not known or lost or (self._written and self._is_written(tensor)):
            self._mark(tensor, layout, at)

    def _mark(self, tensor: Tensor, layout: Any, at: str | None = None) -> None:
        leave_graph("data whose examples do not lie along batch_dim")
        tensor._gradstats_layout = (self.serial, layout, at)  # type: ignore[attr-defined]
        self._marked.append(ref(tensor))
        self.follows_layouts = True

    def is_marked(self, tensor: Tensor) -> bool:
        """Whether something was noted of a tensor of data."""
        return self._mark_of(tensor) is not None


def _unmark(tensor: Tensor | None) -> None:
    """Forget that a tensor is constant."""
    if not torch.compiler.is_dynamo_compiling():
        CONSTANTS.pop(id(tensor), None)
    if hasattr(tensor, "_gradstats_constant"):
        del tensor._gradstats_constant  # type: ignore[union-attr]


def unwrapped(tensor: Tensor) -> Tensor:
    """Return a tensor as it is outside the transforms of torch.func."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the memory of a tensor; None where it has none of its own, as sparse ones have."""
    tensor = unwrapped(tensor)
    return tensor.untyped_storage() if tensor.layout == torch.strided else None
