"""Factors: lean descriptions of one use's per-example gradient of one parameter.

Symbols, here and everywhere: B examples, T positions, K groups, ``left`` and ``right`` the two
operands whose outer products, summed over positions, are the gradient. A factor holds tensors that
the training step has anyway; it never holds a (B, d) gradient.

"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import mul
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gradstats._cost import patches_are_cheap, product


class Factor(Protocol):
    """What every description of per-example gradients of one parameter offers."""

    @property
    def batch(self) -> int:
        """The number of examples it describes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""

    def select(self, rows) -> Factor:
        """Return the same restricted to some examples: a slice or ascending indices."""

    def dense(self) -> Tensor:
        """Return the per-example gradients themselves, (B, *shape).

        This is the definition that every contraction agrees with, called on a few examples.
        """

    @property
    def granule(self) -> int:
        """How many neighbouring rows of the parameter ``narrow`` must keep together; 0 for all."""

    def narrow(self, start: int, stop: int) -> Factor:
        """Return the factor of rows start … stop of the parameter, multiples of the granule."""


def tensors_of(factor) -> list[Tensor]:
    """Return the tensors that a factor holds."""
    values = [getattr(factor, field.name) for field in fields(factor)]
    nested = [tensor for value in values if is_dataclass(value) for tensor in tensors_of(value)]
    return [value for value in values if isinstance(value, Tensor)] + nested


def map_tensors(factor, change: Callable[[Tensor], Tensor]):
    """Return a factor with every tensor that it holds replaced by ``change(tensor)``."""
    changed = {}
    for field in fields(factor):
        value = getattr(factor, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = change(value)
        elif is_dataclass(value):
            changed[field.name] = map_tensors(value, change)
    return replace(factor, **changed)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor.to(dtype)``; nothing is asked of PyTorch where there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the accumulation dtype: float64 where any input is float64, else float32."""
    for tensor in tensors:
        if tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


@dataclass(eq=False)
class Outer:
    """G_i[k] = Σ_t left[i,k,t] right[i,k,t]ᵀ: linear layers and every matrix product.

    Attributes:
        left: (B, K, T, p), any strides.
        right: (B, K, T, q), any strides.
        shape: shape of the parameter; ``G`` of shape (K, p, q) holds the same numbers.
        permutation: order of the axes of ``unfolded`` that gives ``shape``; None where they agree.
        unfolded: sizes of K, p and q, each written out axis by axis; None without permutation.
    """

    left: Tensor
    right: Tensor
    shape: tuple[int, ...]
    permutation: tuple[int, ...] | None = None
    unfolded: tuple[int, ...] | None = None

    @property
    def batch(self) -> int:
        return self.left.shape[0]

    def select(self, rows) -> Outer:
        return replace(self, left=self.left[rows], right=self.right[rows])

    def dense(self) -> Tensor:
        dtype = compute_dtype(self.left, self.right)
        gradient = self.left.to(dtype).mT @ self.right.to(dtype)  # (B, K, p, q)
        if self.permutation is not None:
            assert self.unfolded is not None
            gradient = gradient.reshape(self.batch, *self.unfolded)
            gradient = gradient.permute(0, *(axis + 1 for axis in self.permutation))
        return gradient.reshape(self.batch, *self.shape)

    @property
    def granule(self) -> int:
        if self.permutation is not None or not self.shape:
            return 0
        groups, p = self.left.shape[1], self.left.shape[3]
        unit = groups * p // self.shape[0]  # rows of (K, p) for each row of the parameter
        if unit * self.shape[0] != groups * p or (groups > 1 and p % unit and unit % p):
            return 0
        return p // unit if groups > 1 and p % unit == 0 else 1

    def narrow(self, start: int, stop: int) -> Outer:
        groups, p = self.left.shape[1], self.left.shape[3]
        unit = groups * p // self.shape[0]
        shape = (stop - start, *self.shape[1:])
        if groups == 1:
            return replace(self, left=self.left[..., start * unit : stop * unit], shape=shape)
        kept = slice(start * unit // p, stop * unit // p)
        return replace(self, left=self.left[:, kept], right=self.right[:, kept], shape=shape)

    @property
    def layout(self) -> tuple:
        """What two factors must share for their positions to stand one after the other."""
        sizes = (self.left.shape[1], self.left.shape[3], self.right.shape[3])
        return (*sizes, self.permutation, self.unfolded)

    @property
    def spans_rows(self) -> bool:
        """Whether ``left`` spans the first axis of the parameter and nothing else."""
        one_group = self.left.shape[1] == 1 and self.permutation is None
        return one_group and self.left.shape[3] == self.shape[0]

    def transposed(self) -> Outer:
        """Return the factor of the transpose of a two-dimensional parameter."""
        return Outer(self.right, self.left, (self.shape[1], self.shape[0]))


class Path(NamedTuple):
    """How a tensor picks and arranges elements of the parameter it is derived from.

    Attributes:
        steps: (operation, its arguments, which of its results) for each step from the parameter.
        first, last: between these places in the parameter's memory lie all the elements.
    """

    steps: tuple[tuple, ...]
    first: int
    last: int

    def is_disjoint(self, other: Path) -> bool:
        """Whether the two tensors share no element, as far as can be told."""
        if self.last < other.first or other.last < self.first:
            return True
        for step, its in zip(self.steps, other.steps, strict=False):
            if step != its:
                # Different pieces of the same split.
                return step[:2] == its[:2] and None not in (step[2], its[2])
        return False


class Segments:
    """Which example each row of an axis belongs to, where rows of examples differ in number.

    Attributes:
        owner: (rows,) int64, the example of each row.
        offsets: (B + 1,) where each example's rows begin and end, once sorted by example.
        order: (rows,) the rows in that order; None where they stand so already.
    """

    def __init__(self, owner: Tensor, batch: int):
        self.owner = owner
        self.counts = torch.bincount(owner, minlength=batch)
        self.offsets = (0, *self.counts.cumsum(0).tolist())
        ascending = owner.numel() < 2 or bool((owner[1:] >= owner[:-1]).all())
        self.order = None if ascending else torch.argsort(owner, stable=True)

    @property
    def rows(self) -> int:
        return self.offsets[-1]

    @cached_property
    def most(self) -> int:
        """The largest number of rows that an example has."""
        return max(end - start for start, end in pairwise(self.offsets))

    @cached_property
    def sole(self) -> int | None:
        """The example that has all rows; None where several have some, or none has any."""
        counts = (end - start for start, end in pairwise(self.offsets))
        owners = [example for example, count in enumerate(counts) if count]
        return owners[0] if len(owners) == 1 else None

    def offsets_of(self, rows: int) -> tuple[int, ...]:
        """Return ``offsets`` where each row stands for several, and there are ``rows`` of them."""
        each = rows // max(1, self.rows)
        return tuple(each * bound for bound in self.offsets)

    def sorted(self, tensor: Tensor) -> Tensor:
        """Return (rows, *) in the order of the examples."""
        return tensor if self.order is None else tensor.index_select(0, self.order)

    def filled_up(self, tensor: Tensor) -> Tensor:
        """Return (rows, *) with as many rows for each example, zeros where it has fewer."""
        return filled_up(self.sorted(tensor), *padding(self.offsets))

    def sum(self, tensor: Tensor) -> Tensor:
        """Return Σ over each example's rows of (rows, *): (B, *); no rows give zero."""
        if tensor.dim() == 1:
            return self.sum(tensor.unsqueeze(1)).squeeze(1)
        return segment_sum(self.sorted(tensor), self.counts)


def padding(
    offsets: tuple[int, ...], examples: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Return how examples' rows are filled up to one length: (n, longest) both.

    Args:
        offsets: (B + 1,) where each example's rows begin and end.
        examples: those that are wanted; None for all.

    Returns:
        The rows to take, and which of them stand for rows that an example does not have.
    """
    bounds = torch.tensor(offsets)
    starts, ends = bounds[:-1], bounds[1:]
    if examples is not None:
        starts, ends = starts[examples], ends[examples]
    place = torch.arange(max(1, int((ends - starts).max())))
    index = starts.unsqueeze(1) + place
    missing = index >= ends.unsqueeze(1)
    return index.masked_fill_(missing, 0), missing


def filled_up(rows: Tensor, index: Tensor, missing: Tensor) -> Tensor:
    """Return (n, *), sorted by example, with zeros for ``missing`` rows: (B, longest, *)."""
    if not len(rows):
        return rows.new_zeros(*index.shape, *rows.shape[1:])
    found = rows[index.to(rows.device)]
    missing = missing.view(*index.shape, *(1 for _ in rows.shape[1:]))
    return found.masked_fill_(missing.to(rows.device), 0)


def segment_sum(values: Tensor, counts: Tensor) -> Tensor:
    """Return the sums over consecutive rows of (rows, *), ``counts`` (n,) of them each: (n, *)."""
    if values.is_cpu:  # where segment_reduce takes 5 to 10 times as long
        index = torch.arange(len(counts)).repeat_interleave(counts, output_size=len(values))
        return added(values, index, len(counts))
    return torch.segment_reduce(values, "sum", lengths=counts, axis=0, unsafe=True, initial=0)


def added(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Return the sums of the rows of (n, *) that have the same index: (size, *).

    The same bits in every run: on CUDA ``index_add_`` adds atomically, in any order, and an
    embedding's backward does not.
    """
    if values.is_cpu:
        return values.new_zeros(size, *values.shape[1:]).index_add_(0, index, values)
    rows = values.unsqueeze(1) if values.dim() == 1 else values.flatten(1)
    result = torch.ops.aten.embedding_dense_backward(rows, index, size, -1, False)
    return result.view(size, *values.shape[1:])


def add_at(result: Tensor, index: Tensor, values: Tensor) -> None:
    """Add the rows of (n, *) to those of ``result`` at an index; the same bits in every run."""
    if result.is_cpu:
        result.index_add_(0, index, values)
    else:
        result += added(values, index, len(result))


@dataclass(frozen=True)
class Ragged:
    """G_i = Σ_t left_t right_tᵀ over the rows t of example i: products on packed examples.

    Attributes:
        left: (rows, p), sorted by example, and right: (rows, q).
        offsets: (B + 1,) where each example's rows begin and end.
        shape: shape of the parameter, (p, q), or (p, …) with q elements to each of the p.
    """

    left: Tensor
    right: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def batch(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in pairwise(self.offsets)]

    def select(self, rows) -> Ragged:
        chosen = torch.arange(self.batch)[rows.cpu() if isinstance(rows, Tensor) else rows]
        bounds = torch.tensor(self.offsets)
        lengths = bounds.diff()[chosen]
        offsets = (0, *lengths.cumsum(0).tolist())
        place = torch.arange(offsets[-1])
        index = place + (bounds[chosen] - torch.tensor(offsets[:-1])).repeat_interleave(lengths)
        index = index.to(self.left.device)
        return Ragged(self.left[index], self.right[index], offsets, self.shape)

    def dense(self) -> Tensor:
        return self.padded().dense()

    @property
    def granule(self) -> int:
        return 1

    def narrow(self, start: int, stop: int) -> Ragged:
        shape = (stop - start, *self.shape[1:])
        return replace(self, left=self.left[:, start:stop], shape=shape)

    def padded(self, examples: Sequence[int] | None = None) -> Outer:
        """Return the same with each example's rows filled up by zeros to the longest's number.

        Args:
            examples: those that are wanted; None for all.
        """
        if examples is not None and len(examples) == 1:
            start, end = self.offsets[examples[0] : examples[0] + 2]
            left, right = (side[None, None, start:end] for side in (self.left, self.right))
            return Outer(left, right, self.shape)
        index, missing = padding(self.offsets, examples)
        left, right = (
            filled_up(side, index, missing).unsqueeze(1) for side in (self.left, self.right)
        )
        return Outer(left, right, self.shape)

    def transposed(self) -> Ragged:
        """Return the factor of the transpose of a two-dimensional parameter."""
        return Ragged(self.right, self.left, self.offsets, (self.shape[1], self.shape[0]))


@dataclass(frozen=True)
class Experts:
    """G_i[e] = Σ_t left_t right_tᵀ over the rows t of example i that expert e takes.

    Attributes:
        pairs: the products of each expert with each example's rows, E·B of them: the first
            expert's with all examples, then the next one's.
        batch: number of examples B.
        shape: shape of the parameter, (E, p, q).
    """

    pairs: Ragged
    batch: int
    shape: tuple[int, ...]

    @property
    def busy(self) -> list[int]:
        """The experts that take any rows."""
        bounds = self.pairs.offsets[:: self.batch]
        return [number for number, (a, b) in enumerate(pairwise(bounds)) if b > a]

    def of_expert(self, number: int) -> Ragged:
        """Return the factor of one expert's slice."""
        first = number * self.batch
        offsets = self.pairs.offsets[first : first + self.batch + 1]
        own = slice(offsets[0], offsets[-1])
        relative = tuple(offset - offsets[0] for offset in offsets)
        return Ragged(self.pairs.left[own], self.pairs.right[own], relative, self.shape[1:])

    def select(self, rows) -> Experts:
        chosen = torch.arange(self.batch)[rows.cpu() if isinstance(rows, Tensor) else rows]
        experts = torch.arange(self.shape[0]).unsqueeze(1) * self.batch
        return Experts(self.pairs.select((experts + chosen).flatten()), len(chosen), self.shape)

    def dense(self) -> Tensor:
        return self.pairs.dense().unflatten(0, (-1, self.batch)).transpose(0, 1)

    @property
    def granule(self) -> int:
        return 1

    def narrow(self, start: int, stop: int) -> Experts:
        pairs = self.pairs.select(slice(start * self.batch, stop * self.batch))
        return Experts(pairs, self.batch, (stop - start, *self.shape[1:]))

    def transposed(self) -> Experts:
        """Return the factor of the parameter with its last two axes exchanged."""
        experts, p, q = self.shape
        return Experts(self.pairs.transposed(), self.batch, (experts, q, p))


@dataclass(frozen=True)
class ConvolutionGeometry:
    """Stride, padding and dilation per spatial axis, and the number of groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class Patches:
    """G_i = Σ_t grad[i,·,t] patch_t(input_i)ᵀ: convolutions, patches addressed implicitly.

    A transposed convolution is the same with its input and its output gradient exchanged.

    Attributes:
        input: (B, C, *spatial).
        grad: (B, O, *positions), the gradient with respect to the convolution's output.
        shape: (O, C / groups, *kernel).
        geometry: how patches are cut; it may have one more axis in front of the kernel's own, over
            frames that are convolved one by one.
    """

    input: Tensor
    grad: Tensor
    shape: tuple[int, ...]
    geometry: ConvolutionGeometry

    @property
    def batch(self) -> int:
        return self.input.shape[0]

    @property
    def positions(self) -> int:
        return product(self.grad.shape[2:])

    @property
    def kernel(self) -> tuple[int, ...]:
        """The kernel's size along each axis of the geometry."""
        own = self.shape[2:]
        return (1,) * (len(self.geometry.stride) - len(own)) + own

    def select(self, rows) -> Patches:
        return replace(self, input=self.input[rows], grad=self.grad[rows])

    @property
    def cheap(self) -> bool:
        """Whether gradients are best formed of patches written out."""
        return patches_are_cheap(self.shape[1], product(self.kernel), self.geometry.groups)

    @property
    def pointwise(self) -> bool:
        """Whether the patches are the input as it stands, so that none need be written."""
        geometry = self.geometry
        return {*self.kernel, *geometry.stride} == {1} and not any(geometry.padding)

    def dense(self) -> Tensor:
        if self.cheap:
            return self.unfolded().dense()
        # The examples become the groups of one grouped convolution, so that the backend's own
        # weight-gradient kernel produces all per-example gradients without unfolding the input.
        dtype = compute_dtype(self.input, self.grad)
        examples, geometry = self.batch, self.geometry
        spatial = self.input.shape[2:]
        x = self.input.to(dtype).reshape(1, examples * self.input.shape[1], *spatial)
        g = self.grad.to(dtype).reshape(1, examples * self.shape[0], *self.grad.shape[2:])
        # Only the weight's shape is read: one number stands for all of it.
        weight = x.new_empty(1).expand(examples * self.shape[0], self.shape[1], *self.kernel)
        gradient = torch.ops.aten.convolution_backward(
            g,
            x,
            weight,
            None,
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            False,
            [0] * len(spatial),
            examples * geometry.groups,
            [False, True, False],
        )[1]
        return gradient.view(examples, *self.shape)

    @property
    def granule(self) -> int:
        # The rows of one group share their input channels.
        return 1 if self.geometry.groups == 1 else self.shape[0] // self.geometry.groups

    def narrow(self, start: int, stop: int) -> Patches:
        grad, shape = self.grad[:, start:stop], (stop - start, *self.shape[1:])
        if self.geometry.groups == 1:
            return replace(self, grad=grad, shape=shape)
        first, last = start // self.granule, stop // self.granule
        channels = self.input[:, first * self.shape[1] : last * self.shape[1]]
        geometry = replace(self.geometry, groups=last - first)
        return Patches(channels, grad, shape, geometry)

    def unfolded(self) -> Outer:
        """Return the same factor with its patches written out: T·q numbers an example."""
        geometry, kernel = self.geometry, self.kernel
        pad = [amount for side in reversed(geometry.padding) for amount in (side, side)]
        x = torch.nn.functional.pad(self.input, pad) if any(pad) else self.input
        examples, channels = x.shape[:2]
        groups, positions = geometry.groups, self.grad.shape[2:]
        apart, between, *steps = x.stride()
        sizes = (channels // groups, *kernel)
        strides = (between, *map(mul, steps, geometry.dilation))
        jumps = tuple(map(mul, steps, geometry.stride))
        # What is copied in one go is longer along the longer of the two last axes.
        rows_last = positions[-1] > kernel[-1]
        order = (sizes, positions) if rows_last else (positions, sizes)
        step = (*strides, *jumps) if rows_last else (*jumps, *strides)
        windows = x.as_strided(
            (examples, groups, *order[0], *order[1]), (apart, between * sizes[0], *step)
        )
        right = windows.reshape(examples, groups, product(order[0]), product(order[1]))
        left = self.grad.reshape(examples, groups, self.shape[0] // groups, product(positions)).mT
        return Outer(left, right.mT if rows_last else right, self.shape)


class Lookup:
    """One look-up of a table, by ids that are known in the forward pass.

    Attributes:
        ids: (N,) row of each, and example: (N,) whose each is, ascending.
    """

    def __init__(self, find: Callable[[], tuple[Tensor, Tensor]]):
        self._find = find

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        return self._find()

    @property
    def ids(self) -> Tensor:
        return self._rows[0]

    @property
    def example(self) -> Tensor:
        return self._rows[1]


@dataclass(frozen=True)
class Rows:
    """G_i = Σ_n e_{ids[n]} grad[n]ᵀ over the rows n of example i: embeddings and integer indexing.

    Attributes:
        ids: (N,) row of the parameter that each gradient row belongs to.
        grad: (N, width).
        example: (N,) example of each row, ascending.
        examples: number of examples B.
        shape: shape of the parameter, (rows, ...) with width = product of the rest.
        longest: most rows that one example has, None where only ``example`` knows.
        lookup: the look-up that this is the gradient of, where it was noted in the forward pass.
    """

    ids: Tensor
    grad: Tensor
    example: Tensor
    examples: int
    shape: tuple[int, ...]
    longest: int | None = None
    lookup: Lookup | None = None

    @property
    def batch(self) -> int:
        return self.examples

    def select(self, rows) -> Rows:
        number = torch.full((self.examples,), -1, device=self.ids.device)
        chosen = torch.arange(self.examples, device=self.ids.device)[rows]
        number[chosen] = torch.arange(chosen.numel(), device=self.ids.device)
        keep = (number[self.example] >= 0).nonzero().squeeze(1)
        # Ascending order of examples survives: callers select ascending rows.
        return Rows(
            self.ids[keep],
            self.grad[keep],
            number[self.example[keep]],
            chosen.numel(),
            self.shape,
            self.longest,
        )

    @property
    def granule(self) -> int:
        return 1

    def narrow(self, start: int, stop: int) -> Rows:
        keep = ((self.ids >= start) & (self.ids < stop)).nonzero().squeeze(1)
        shape = (stop - start, *self.shape[1:])
        return Rows(
            self.ids[keep] - start, self.grad[keep], self.example[keep], self.examples, shape
        )

    def dense(self) -> Tensor:
        place = self.example * self.shape[0] + self.ids
        values = cast(self.grad, compute_dtype(self.grad))
        gradient = added(values, place, self.examples * self.shape[0])
        return gradient.view(self.examples, *self.shape)


@dataclass(eq=False)
class Vector:
    """G_i = values[i]: biases, scales and everything that broadcasts.

    Attributes:
        values: (B, *shape) without ``axis``; with it (B, *shape without that axis).
        shape: shape of the parameter.
        axis: the parameter's own example axis, where each example touches only its own slice: then
            G_i is ``values[i]`` at that slice and zero elsewhere.
        slices: (B,) index along ``axis`` of each example's slice; None for 0, 1, …, B − 1.
    """

    values: Tensor
    shape: tuple[int, ...]
    axis: int | None = None
    slices: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.values.shape[0]

    def select(self, rows) -> Vector:
        slices = self.slices
        if self.axis is not None:
            if slices is None:
                slices = torch.arange(self.batch, device=self.values.device)
            slices = slices[rows]
        return replace(self, values=self.values[rows], slices=slices)

    @property
    def granule(self) -> int:
        return 0 if self.axis == 0 or not self.shape else 1

    def narrow(self, start: int, stop: int) -> Vector:
        values = self.values
        if self.axis is None:
            values = values.reshape(self.batch, *self.shape)
        shape = (stop - start, *self.shape[1:])
        return replace(self, values=values[:, start:stop], shape=shape)

    def dense(self) -> Tensor:
        if self.axis is None:
            return self.values.to(compute_dtype(self.values)).reshape(self.batch, *self.shape)
        slices = self.slices
        if slices is None:
            slices = torch.arange(self.batch, device=self.values.device)
        gradient = self.values.new_zeros(self.batch, *self.shape, dtype=compute_dtype(self.values))
        own = torch.arange(self.batch, device=self.values.device)
        gradient.movedim(self.axis + 1, 1)[own, slices] = self.values.to(gradient.dtype)
        return gradient


@dataclass(eq=False)
class Elementwise:
    """G_i = Σ_t input[i,t] ∘ grad[i,t]: scales that broadcast; without input shifts and biases.

    It is made where kernels contract it, which write neither products nor sums; elsewhere, and
    where it must be kept, ``Vector`` with the sum over positions is the leaner description.

    Attributes:
        grad: (B, T, C), or packed (rows, C) with offsets.
        input: of the same shape; None for ones.
        shape: shape of the parameter, of C elements, or of one that all channels share.
        offsets: (B + 1,) where each example's rows begin and end; None where all have T.
    """

    grad: Tensor
    input: Tensor | None
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None = None

    @property
    def batch(self) -> int:
        return self.grad.shape[0] if self.offsets is None else len(self.offsets) - 1

    @property
    def shared(self) -> bool:
        """Whether all channels share one element of the parameter."""
        return product(self.shape) != self.grad.shape[-1]

    def select(self, rows) -> Elementwise:
        if self.offsets is None:
            chosen = None if self.input is None else self.input[rows]
            return replace(self, grad=self.grad[rows], input=chosen)
        # As many positions for all: rows past the end are zero.
        lengths = torch.tensor([end - start for start, end in pairwise(self.offsets)])
        starts = torch.tensor(self.offsets[:-1])
        place = torch.arange(max([1, *lengths.tolist()]))
        inside = (place < lengths[:, None])[rows].to(self.grad.device)
        index = (starts[:, None] + place)[rows].to(self.grad.device)
        index = torch.where(inside, index, 0)
        grad = torch.where(inside[..., None], self.grad[index], 0)
        chosen = None if self.input is None else self.input[index]
        return Elementwise(grad, chosen, self.shape)

    @property
    def granule(self) -> int:
        return 0

    def narrow(self, start: int, stop: int) -> Elementwise:
        raise NotImplementedError

    def dense(self) -> Tensor:
        if self.offsets is not None:
            return self.select(slice(None)).dense()
        values = self.grad.to(compute_dtype(self.grad))
        if self.input is not None:
            values = values * self.input.to(values.dtype)
        values = values.sum((1, 2) if self.shared else 1)
        return values.reshape(self.batch, *self.shape)
