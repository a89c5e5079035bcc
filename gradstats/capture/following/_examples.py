"""Layouts: which examples the rows of a tensor belong to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradstats._factors import Segments

# For messages about an unexpected number of rows.
IF_A_CONSTANT = (
    "If a constant with as many rows as there are examples was taken for data, keep it in the "
    "model (register_buffer)."
)
MORE_REMEDIES = "help(gs.ExampleAxisError) lists more causes and remedies."
IF_KNOWN = (
    "If you know which example each row belongs to, say so with gs.assign_rows. " + MORE_REMEDIES
)
MORE_IF_COUPLED = "help(gs.CoupledExamplesError) lists more causes and remedies."

IF_ATTENDING = (
    "Packed rows need a mask that lets them attend to rows of their own example only. Hugging "
    "Face's models make one from position_ids if they are passed use_cache=False."
)

WHERE_THE_NUMBER_IS_FROM = (
    "If the number of examples is wrong: it is batch_size= of a context, elsewhere the size of the "
    "batch's first tensor along batch_dim=, and for packed examples what cu_seqlens= says."
)


@dataclass(frozen=True)
class Examples:
    """Where the examples of a tensor lie.

    Attributes:
        batch: number of examples B.
        axis: the example axis.
        fold: how many adjacent rows of ``axis`` belong to each example.
        segments: the example of each row, if examples differ in their number of rows or the rows of
            an example are not adjacent; None if ``fold`` describes the layout.
    """

    batch: int
    axis: int
    fold: int = 1
    segments: Segments | None = None

    @property
    def plain(self) -> bool:
        """Whether each row of the axis is one example, in order."""
        return self.fold == 1 and self.segments is None

    @property
    def rows(self) -> int:
        """The size of the example axis."""
        return self.batch * self.fold if self.segments is None else self.segments.rows

    @property
    def most(self) -> int:
        """The largest number of rows that an example has."""
        return self.fold if self.segments is None else self.segments.most

    @property
    def even(self) -> bool:
        """Whether all examples have the same number of rows."""
        return self.most * self.batch == self.rows

    @property
    def order(self) -> Tensor | None:
        """The rows sorted by example; None if they are sorted already."""
        return None if self.segments is None else self.segments.order

    def along(self, axis: int) -> Examples:
        """Return this layout with the examples along another axis."""
        return self if axis == self.axis else replace(self, axis=axis)

    def behind(self, axes: int) -> Examples:
        """Return this layout for a tensor with ``axes`` more axes in front."""
        return self.along(self.axis + axes)

    @property
    def joinable(self) -> bool:
        """Whether batches can be concatenated along the example axis."""
        return self.axis == 0 and self.segments is None

    def times(self, count: int) -> Examples:
        """Return the layout of ``count`` concatenated batches; only for joinable layouts."""
        return Examples(self.batch * count, 0, self.fold)

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has the expected number of rows along the axis."""
        return self.axis < tensor.dim() and tensor.shape[self.axis] == self.rows

    def lead(self, tensor: Tensor) -> Tensor:
        """Return a view with the example axis in front: (rows, *)."""
        return tensor if self.axis == 0 else tensor.movedim(self.axis, 0)

    def first(self, tensor: Tensor) -> Tensor:
        """Return the tensor as (B, *), or as (B, most, *) where an example may have several rows.

        The result is a view, unless examples differ in their number of rows: then they are padded
        with zeros.
        """
        tensor = self.lead(tensor)
        if self.segments is not None:
            return self.segments.padded(tensor)
        return tensor if self.fold == 1 else self._apart(tensor)

    def positions(self, tensor: Tensor) -> Tensor:
        """Return (…, width) as (B, T, width); only for layouts without segments."""
        axes = tensor.dim()
        if self.axis != 0:
            tensor = self.lead(tensor)
        if axes == 2:
            return tensor.view(self.batch, self.fold, tensor.shape[1])
        if self.fold != 1:
            return self._apart(tensor).flatten(1, -2)
        return tensor if axes == 3 else tensor.flatten(1, -2)

    def reduce(self, values: Tensor) -> Tensor:
        """Return the sum over each example's rows of (rows, *): (B, *)."""
        if self.segments is not None:
            return self.segments.sum(values)
        return values if self.fold == 1 else self._apart(values).sum(1)

    def _apart(self, tensor: Tensor) -> Tensor:
        # This takes a third of the time of unflatten.
        return tensor.view(self.batch, self.fold, *tensor.shape[1:])

    def on(self, device: torch.device) -> Examples:
        """Return this layout with its tensors on a device."""
        if self.segments is None or self.segments.owner.device == device:
            return self
        return replace(self, segments=self.segments.on(device))

    def owner(self, device: torch.device) -> Tensor:
        """Return the example of each row, (rows,) int64."""
        if self.segments is not None:
            return self.segments.owner.to(device)
        return torch.arange(self.batch, device=device).repeat_interleave(self.fold)

    def of_elements(self, tensor: Tensor) -> Tensor:
        """Return the example of each element of a tensor: int32, expanded to the tensor's shape."""
        owner = self.owner(tensor.device).int()
        return owner.view([-1, *(1 for _ in tensor.shape[self.axis + 1 :])]).expand(tensor.shape)

    def owned_by(self, owner: Tensor, axis: int) -> Examples:
        """Return the layout of rows along ``axis``, given the example that each belongs to."""
        batch = self.batch
        if owner.numel() and owner.numel() % batch == 0:
            fold = owner.numel() // batch
            regular = torch.arange(batch, device=owner.device).repeat_interleave(fold)
            if torch.equal(owner, regular):
                return Examples(batch, axis, fold)
        return Examples(batch, axis, 1, Segments(owner, batch))

    def in_pieces(self, starts: Tensor) -> Examples | None:
        """Return the layout along axis 0 of a tensor with one row for each piece of these rows.

        Args:
            starts: the first row of each of the consecutive pieces; the last one ends with the
                rows.

        Returns:
            The layout; None unless each piece has rows of one example only. A piece without rows
            belongs to the example with its number, provided that there is one piece for each
            example, in order.
        """
        owner = self.owner(starts.device)
        lengths = torch.diff(starts, append=starts.new_tensor([self.rows]))
        pieces = torch.arange(len(starts), device=owner.device)
        owners, has_rows = pieces.clone(), lengths > 0
        owners[has_rows] = owner[starts[has_rows]]
        if not torch.equal(owners.repeat_interleave(lengths), owner):
            return None
        if not bool(has_rows.all()) and not (
            len(pieces) == self.batch and torch.equal(owners, pieces)
        ):
            return None
        return self.owned_by(owners, 0)

    def whole(self, row: int) -> Whole:
        """Return the layout of one row of the axis, taken alone."""
        row %= self.rows
        owner = row // self.fold if self.segments is None else self.segments.owner[row]
        return Whole(int(owner))


@dataclass(frozen=True)
class Scores(Examples):
    """The layout of scores: values for pairs of rows of packed examples.

    Attributes:
        columns: the layout of the second rows of the pairs, along another axis. Columns that stand
            for no row, such as attention sinks, are nobody's: their owner is ``batch``.
        fixed: whether scores between different examples are independent of trained values, as they
            are after masking.
    """

    columns: Examples = field(kw_only=True)
    fixed: bool = field(kw_only=True)

    @property
    def sides(self) -> tuple[Examples, Examples]:
        """The layouts of the rows and of the columns."""
        return Examples(self.batch, self.axis, self.fold, self.segments), self.columns

    def fits(self, tensor: Tensor) -> bool:
        return super().fits(tensor) and self.columns.fits(tensor)

    def behind(self, axes: int) -> Scores:
        return replace(self, axis=self.axis + axes, columns=self.columns.behind(axes))


@dataclass(frozen=True)
class Whole:
    """The layout of a tensor that belongs to one example as a whole."""

    example: int

    def row(self, batch: int, device: torch.device) -> Examples:
        """Return the layout of the tensor with an axis of size one in front."""
        return Examples(batch, 0).owned_by(torch.tensor([self.example], device=device), 0)


class Mixed:
    """The layout of a tensor in which each element depends on all examples."""


MIXED = Mixed()

# All layouts of tensors; None if the layout is not known.
Layout = Examples | Whole | Mixed | None

# Layouts in which each value belongs to one example; a score belongs to that of its row.
APART = (Examples, Whole)


def spread(owner: Tensor, batch: int) -> Examples | Whole | None:
    """Return the layout of a tensor, given the example of each of its elements.

    Args:
        owner: the examples, in the tensor's shape.
        batch: number of examples B.

    Returns:
        The layout; None if the examples differ along several axes.
    """
    axes = axes_of(owner)
    if len(axes) > 1:
        return None
    if not axes and (batch > 1 or not owner.dim()):
        return Whole(int(owner.flatten()[0]))
    axis = axes[0] if axes else 0
    return Examples(batch, axis).owned_by(rows_along(owner, axis).long(), axis)


def axes_of(owner: Tensor) -> list[int]:
    """Return the axes along which the examples of elements differ."""
    return [
        axis
        for axis in range(owner.dim())
        if owner.shape[axis] > 1 and not bool((owner == owner.narrow(axis, 0, 1)).all())
    ]


def rows_along(owner: Tensor, axis: int) -> Tensor:
    """Return the example of the first element of each row along an axis."""
    return owner.movedim(axis, -1)[(0,) * (owner.dim() - 1)]


def same_rows(first: Examples, second: Examples) -> bool:
    """Whether two layouts have the same examples in the same order, along any axes."""
    segments = first.segments or second.segments
    if segments is None or first.segments is second.segments:
        return first.fold == second.fold
    device = segments.owner.device
    return first.rows == second.rows and torch.equal(first.owner(device), second.owner(device))


def sole_of(owned: Layout) -> Layout:
    """Return a layout, or a ``Whole`` in its place if all of its rows belong to one example."""
    if isinstance(owned, Examples) and owned.segments is not None:
        sole = owned.segments.sole
        if sole is None or (isinstance(owned, Scores) and sole_of(owned.columns) != Whole(sole)):
            return owned
        return Whole(sole)
    return owned


def same_layout(first: Layout, second: Layout) -> bool:
    """Whether two layouts have the same examples in the same places."""
    if not isinstance(first, Examples) or not isinstance(second, Examples):
        return first == second
    if isinstance(first, Scores) and isinstance(second, Scores):
        if not same_layout(first.columns, second.columns):
            return False
    return first.axis == second.axis and same_rows(first, second)
