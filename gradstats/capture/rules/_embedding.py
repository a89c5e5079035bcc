"""Table look-ups: embedding, embedding_bag, and parameters indexed by integer data."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from gradstats._compiler import is_compiling
from gradstats._factors import Lookup, Rows, cast, compute_dtype, embedding_rows, rows_looked_up
from gradstats.capture.following._examples import Examples
from gradstats.capture.following._indexing import axis_of, found_at, items_of
from gradstats.capture.following._sequences import layout_of_bags, starts_of_bags
from gradstats.capture.operations._nested import is_among, operands_of
from gradstats.capture.parameters._derived import derive
from gradstats.capture.parameters._nodes import Node, Root
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import first_node, node_of, value_of
from gradstats.capture.rules._common import as_data, lined_up, locate
from gradstats.capture.uses._decided import decide
from gradstats.capture.uses._grafted import Composed, watched
from gradstats.capture.uses._hooked import LOOKED_UP, hook, may_hook
from gradstats.capture.uses._tap import Factors, tap
from gradstats.capture.uses._together import Joinable
from gradstats.contractions import FEW, Contraction, _triton, sqnorm_of_few

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def embedding(
    tracker: Context,
    func,
    input,
    weight,
    padding_idx=None,
    max_norm=None,
    norm_type=2.0,
    scale_grad_by_freq=False,
    sparse=False,
):
    """Rows(ids, g), without the positions of ``padding_idx``."""
    node = first_node(weight)
    _refuse_frequency_scale(func, node, scale_grad_by_freq)
    examples = locate(tracker, func, node, input, folds=True)
    _shorten(func, node, input, max_norm, norm_type)

    def run(ids: Tensor, table: Tensor) -> Tensor:
        return func(ids, table, padding_idx, None, norm_type, scale_grad_by_freq, sparse)

    if may_hook():
        operands = input, (weight,), examples, padding_idx, run
        if max_norm is None:
            result = decide(tracker, _hook, *operands)
        else:  # not to be repeated: rows are shortened each time
            result = _hook(tracker, *operands)
        if result is not None:
            return result
    lookup = _lookup_of(examples, input) if isinstance(node, Root) else None
    factors = TableFactors(examples, tuple(weight.shape), padding_idx, lookup)
    return tap([node], run(input, value_of(weight)), factors, input, lookup=lookup)


def _hook(tracker: Context, ids, parameters, examples: Examples, padding_idx, run):
    """Return PyTorch's result of a look-up, with a hook on its node; None if not possible."""
    lookup = _lookup_of(examples, ids)
    factors = TableFactors(examples, tuple(parameters[0].shape), padding_idx, lookup)
    return hook(tracker, ids, parameters, examples, LOOKED_UP, factors, run, lookup)


def _lookup_of(examples: Examples, ids: Tensor) -> Lookup:
    even = examples.batch if examples.segments is None else None
    return Lookup(partial(looked_up, examples, ids), even)


@dataclass(frozen=True)
class TableFactors(Joinable):
    """The factor of a parameter whose slices are looked up by ids of shape (B, *).

    Attributes:
        examples: where the examples lie in the ids.
        shape: of the parameter, with the axis that is looked up in front.
        padding_idx: the slice that gets no gradient; None for none.
        lookup: what cross terms need to know of the look-up; None where there are none.
        before: how many of the parameter's axes come before the ids' in the result.
    """

    examples: Examples
    shape: tuple[int, ...]
    padding_idx: int | None = None
    lookup: Lookup | None = None
    before: int = 0

    def __call__(self, grad: Tensor, ids: Tensor) -> list:
        rows = table_rows(self.examples, ids, self._found(grad, ids), self.shape, self.padding_idx)
        return [replace(rows, lookup=self.lookup)]

    def norms(self, grad: Tensor, ids: Tensor) -> list[Contraction] | None:
        """Return squared norms without sorting ids; None if sorting is faster."""
        examples, padding = self.examples, self.padding_idx
        positions = ids.numel() // examples.batch
        if examples.segments is not None or not 0 < positions <= FEW or _triton.runs(grad, grad):
            return None
        grad = examples.first(self._found(grad, ids)).reshape(examples.batch, positions, -1)
        ids = examples.first(ids).reshape(examples.batch, positions)
        if padding is not None:
            grad = grad.masked_fill((ids == padding % self.shape[0]).unsqueeze(2), 0)
        return [sqnorm_of_few(ids, grad)]

    def likeness(self) -> Hashable:
        return self.shape, self.padding_idx

    def _found(self, grad: Tensor, ids: Tensor) -> Tensor:
        """Return the gradient of the slices that the ids found, (*ids, *rest)."""
        if not self.before:
            return grad
        axes = range(ids.dim())
        return grad.movedim([self.before + axis for axis in axes], list(axes))


def embedding_bag(
    tracker: Context,
    func,
    input,
    weight,
    offsets=None,
    max_norm=None,
    norm_type=2.0,
    scale_grad_by_freq=False,
    mode="mean",
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=None,
):
    """Rows(ids, g of the id's bag × its weight); each bag belongs to one example."""
    if node_of(per_sample_weights) is not None:
        refuse(func, first_node(per_sample_weights), "with tracked per-sample weights has no rule")
    node = first_node(weight)
    _refuse_frequency_scale(func, node, scale_grad_by_freq)
    bags = offsets, include_last_offset
    examples = _locate_bags(tracker, func, node, input, per_sample_weights, *bags)
    _shorten(func, node, input, max_norm, norm_type)
    if mode == "max":
        begins = {"offsets": offsets, "include_last_offset": include_last_offset}
        return Composed(partial(largest_of_bags, tracker, examples))(
            tracker, func, input, weight, mode=mode, padding_idx=padding_idx, **begins
        )
    bag = _bag_of_each(input, *bags)
    ids = input.reshape(-1)
    # Not in half precision, which cannot count beyond a few hundred.
    share = torch.ones(ids.shape, dtype=compute_dtype(weight), device=ids.device)
    if padding_idx is not None:
        share = share * (ids != padding_idx % weight.shape[0])
    if mode == "mean":
        counts = torch.zeros(examples.rows, dtype=share.dtype, device=ids.device)
        share = share / counts.index_add(0, bag, share).clamp(min=1)[bag]
    if per_sample_weights is not None:
        share = share * per_sample_weights.detach().reshape(-1)
    result = func(
        input, value_of(weight), offsets, None, norm_type, scale_grad_by_freq, mode, sparse,
        per_sample_weights, include_last_offset, padding_idx,
    )  # fmt: skip
    return tap([node], result, BagFactors(examples, tuple(weight.shape)), ids, bag, share)


def _locate_bags(
    tracker: Context, func, node: Node, ids, shares, offsets, include_last_offset
) -> Examples:
    """Return to which examples the bags of ids belong, or raise."""
    if offsets is None:
        return locate(tracker, func, node, ids, axis=0, folds=True)
    examples = layout_of_bags(tracker.marks, ids, shares, offsets, include_last_offset)
    if examples is None:
        refuse(
            func, node, "of bags whose ids are of several examples, or of unknown ones,",
            "All ids of a bag must be of one example. The batch size is taken from the batch's "
            "first tensor: put labels before packed ids, or pass the bounds of the examples "
            "among the ids as cu_seqlens=.",
        )  # fmt: skip
    return examples


def _bag_of_each(ids: Tensor, offsets: Tensor | None, include_last_offset: bool) -> Tensor:
    """Return the number of the bag that each id is in."""
    places = torch.arange(ids.shape[0], device=ids.device)
    if offsets is None:
        return places.repeat_interleave(ids.shape[1])
    starts = starts_of_bags(offsets, include_last_offset)
    return torch.searchsorted(starts.contiguous(), places, right=True) - 1


def largest_of_bags(
    tracker: Context, examples, input, weight, *, mode, padding_idx, offsets, include_last_offset
) -> Tensor:
    """The maximum of each bag's rows in every column, ties broken as PyTorch breaks them."""
    if offsets is None:
        bags, count = input.shape
        offsets = torch.arange(bags, dtype=input.dtype, device=input.device) * count
    _, _, sizes, chosen = torch.embedding_bag(
        weight.detach(), input.flatten(), offsets, False, 2, False, None, include_last_offset,
        padding_idx,
    )  # fmt: skip
    tracker.marks.place(chosen, examples)
    columns = torch.arange(weight.shape[1], device=input.device)
    return weight[chosen, columns].masked_fill(sizes[: len(chosen), None] == 0, 0)


@dataclass(frozen=True)
class BagFactors(Factors):
    """The factor of a table whose rows are summed into bags, weighted by their shares."""

    examples: Examples
    shape: tuple[int, ...]

    def __call__(self, grad: Tensor, ids: Tensor, bag: Tensor, share: Tensor) -> list:
        rows = cast(grad, compute_dtype(grad, share))[bag].mul_(share.unsqueeze(1))
        owner = self.examples.owner(bag.device)[bag]
        factor = Rows(ids.long(), rows, owner, self.examples.batch, self.shape)
        return [factor if self.examples.order is None else factor.in_order()]


def index(tracker: Context, func, input, indices):
    """A parameter indexed by integer data: an embedding without a module.

    Several index tensors, as for a table of transitions, become one index into their axes together.
    """
    given = operands_of((indices,), {})
    node = first_node(input, *given)
    if node_of(input) is None:
        refuse(func, node, "with a tracked index has no rule")  # PyTorch refuses it too
    if not any(index.dim() and tracker.marks.is_data(index) for index in given):
        # A number picks one slice for all examples, wherever it comes from.
        return derive(tracker, func, (input, indices), {})
    items = [_as_index(tracker, item, given) for item in items_of(input, indices)]
    mask = next((index for index in given if index.dtype == torch.bool and index.dim()), None)
    if mask is not None and tracker.marks.is_data(mask):
        return _masked(tracker, func, node, input, indices, axis_of(items, mask), mask)
    places = [place for place, item in enumerate(items) if isinstance(item, Tensor)]
    chosen = [items[place] for place in places]
    integers = all(index.dtype in (torch.int32, torch.int64) for index in chosen)
    if not integers or any(item != slice(None) for item in items if not isinstance(item, Tensor)):
        refuse(func, node, "with other than integer indices has no rule")
    examples = lined_up(tracker, func, node, [index for index in chosen if index.dim()]).examples
    result = func(value_of(input), indices)
    table = leading_axes(tracker, input, places)
    # PyTorch accepts indices on the host too.
    chosen = [index.to(input.device) for index in chosen]
    ids = numbered(chosen, [input.shape[place] for place in places])
    before, _ = found_at(items)
    factors = TableFactors(examples.on(input.device), tuple(table.shape), before=before)
    return tap([first_node(table)], result, factors, ids)


def _masked(tracker: Context, func, node: Node, input, indices, axis: int, mask: Tensor) -> Tensor:
    """Elements that a mask of data selects from a tensor with a slice for each example.

    Args:
        axis: the first of the input's axes that the mask covers.
        mask: of data.
    """
    examples = locate(tracker, func, node, mask, folds=True)
    data = as_data(tracker, func, node, input, examples.along(axis + examples.axis))
    # Data indexed by data, which the mode follows.
    return watched(tracker, func, data, indices)


def _as_index(tracker: Context, item, given: Sequence[Tensor]):
    """Return an item of an index; integers and lists as tensors, which are marked constant."""
    if type(item) is int:
        item = torch.tensor(item)
    if isinstance(item, Tensor) and not is_among(item, given):
        item = item.to(given[0].device)
        tracker.marks.mark_constant(item)
    return item


def leading_axes(tracker: Context, table: Tensor, axes: Sequence[int]) -> Tensor:
    """Return a tracked tensor with some of its axes moved to the front and merged."""
    places = list(range(len(axes)))
    if list(axes) != places:
        table = derive(tracker, Tensor.movedim, (table, list(axes), places), {})
    if len(axes) > 1:
        table = derive(tracker, Tensor.flatten, (table, 0, places[-1]), {})
    return table


def numbered(indices: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the indices into several axes as one index into these axes merged."""
    ids = indices[0].new_zeros(())
    for index, size in zip(indices, sizes, strict=True):
        ids = ids * size + torch.where(index < 0, index + size, index)
    return ids


def table_rows(examples: Examples, ids: Tensor, grad: Tensor, shape, padding_idx) -> Rows:
    """Return the factor of a table, from ids of any layout and the gradients of their slices."""
    if examples.segments is None:
        return embedding_rows(examples.first(ids), examples.first(grad), shape, padding_idx)
    segments = examples.segments
    ids, grad = (segments.sorted(examples.lead(tensor)) for tensor in (ids, grad))
    rows = embedding_rows(ids, grad, shape, padding_idx)
    owner = segments.sorted(segments.owner)
    assert rows.longest is not None
    return replace(
        rows,
        example=owner[rows.example],
        batch=examples.batch,
        longest=rows.longest * segments.most,
    )


def looked_up(examples: Examples, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that ids look up and the example of each, in the order of ``table_rows``."""
    if examples.segments is None:
        return rows_looked_up(examples.first(ids))
    segments = examples.segments
    flat, row = rows_looked_up(segments.sorted(examples.lead(ids)))
    return flat, segments.sorted(segments.owner)[row]


def index_select(tracker: Context, func, input, dim, index):
    """A look-up along an axis given by its number."""
    node = first_node(input, index)
    if input.dim() == 0:
        refuse(func, node, "of a single number has no rule", "Expand it instead: w.expand(n).")
    dim %= input.dim()
    examples = locate(tracker, func, node, index, folds=True)
    result = func(value_of(input), dim, index)
    table = leading_axes(tracker, input, [dim])
    factors = TableFactors(examples, tuple(table.shape), before=dim)
    return tap([first_node(table)], result, factors, index)


def gather(tracker: Context, func, input, dim, index, **kwargs):
    """Elements of a tracked tensor that has a slice for each example, from the example's own."""
    node = first_node(input, index)
    if input.dim() < 2:
        return index_select(tracker, func, input, dim, index)  # the same on vectors
    examples = locate(tracker, func, node, index, folds=True)
    if dim % input.dim() == examples.axis:
        refuse(func, node, "along the example axis has no rule")
    return func(as_data(tracker, func, node, input, examples), dim, index, **kwargs)


def _shorten(func, node: Node, ids: Tensor, max_norm: float | None, norm_type: float) -> None:
    """Shorten the rows that ids look up: PyTorch's look-up would change the alias that it reads."""
    if max_norm is None:
        return
    if is_compiling() or not isinstance(node, Root):
        where = "in a compiled graph" if is_compiling() else "of a table that is not a parameter"
        refuse(func, node, f"with max_norm {where} has no rule")
    torch.embedding_renorm_(node.value.detach(), ids.contiguous(), max_norm, norm_type)


def _refuse_frequency_scale(func, node, scale_grad_by_freq: bool) -> None:
    if scale_grad_by_freq:
        refuse(
            func,
            node,
            "with scale_grad_by_freq divides by counts over the whole batch: it couples examples,",
            "Pass scale_grad_by_freq=False.",
        )


RULES = {
    functional.embedding: embedding,
    functional.embedding_bag: embedding_bag,
    Tensor.__getitem__: index,
    Tensor.index_select: index_select,
    torch.index_select: index_select,
    Tensor.gather: gather,
    torch.gather: gather,
}
