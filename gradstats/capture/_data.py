"""What a context knows of plain tensors: which are data, and where their examples lie."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gradstats._factors import Segments
from gradstats.capture._layout import (
    BROADCASTS,
    CHANGES,
    JOINS,
    PRODUCTS,
    REINDEXES,
    WRITES,
    Examples,
    contracted,
    follow,
    joined,
    same_rows,
)
from gradstats.capture._tensors import node_of
from gradstats.errors import ExampleAxisError

SERIALS = itertools.count()

# The mark of constants that a compiled graph computes.
IN_GRAPH = "in graph"


def leave_graph(what: str) -> None:
    """Stop a graph from being traced: what comes next has to be remembered in Python."""
    if torch.compiler.is_dynamo_compiling():
        # The compiler takes this for the end of the graph, or says it where one graph is demanded.
        raise RuntimeError(
            f"a compiled graph holds {what}, which is followed outside of graphs only. Compile "
            "without fullgraph=True: then this part runs eagerly inside a context."
        )


class Data:
    """Constants and data of one batch.

    Attributes:
        batch_size, batch_dim: as the caller gave them.
        serial: tensors are marked with this number: they may be copied, and may outlive the
            context.
        follows_layouts: set once any tensor has a layout of its own, so that most models pay
            nothing for it.
        coupled: autograd nodes in which examples met that a loss may not depend on together.
        loss_order: (B,) the example of each loss; None where they stand in the batch's order.
    """

    def __init__(self, batch_size: int, batch_dim: int, segments: Segments | None):
        self.serial = next(SERIALS)
        self.batch_size = batch_size
        self.batch_dim = batch_dim
        self.follows_layouts = False
        self.coupled: set = set()
        self.loss_order: Tensor | None = None
        self._contract = Examples(batch_size, batch_dim, 1, segments)
        # Held, not only numbered: a freed tensor's number may come back as that of data.
        self._constants: dict[int, Tensor] = {}

    def keep_constant(self, tensors: Iterable[Tensor]) -> None:
        """Remember tensors of the model's, on which no mark may be left, as constants."""
        self._constants.update((id(tensor), tensor) for tensor in tensors)

    def mark_kept(self) -> None:
        """Let graphs that are traced from now on see the model's own tensors as constants."""
        for tensor in self._constants.values():
            tensor._gradstats_constant = IN_GRAPH  # type: ignore[attr-defined]

    def forget_constants(self) -> None:
        """Leave no mark on tensors of the model's."""
        for tensor in self._constants.values():
            if getattr(tensor, "_gradstats_constant", None) == IN_GRAPH:
                del tensor._gradstats_constant  # type: ignore[attr-defined]
        self._constants.clear()

    def is_data(self, tensor: Tensor) -> bool:
        """Whether a plain tensor may carry examples: it is not known to be constant."""
        compiling = torch.compiler.is_dynamo_compiling()
        if not compiling and id(tensor) in self._constants:
            return False
        if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter):
            return False  # a parameter that a forward makes holds no examples either
        mark = getattr(tensor, "_gradstats_constant", None)
        if compiling:
            # A graph serves many contexts and batches: it cannot depend on their numbers.
            return mark is None
        return mark != self.serial and mark != IN_GRAPH

    def has_example_axis(self, tensor: Tensor) -> bool:
        """Whether a tensor's example axis has the size of the batch."""
        return self.by_contract(tensor) is not None

    def by_contract(self, tensor: Tensor) -> Examples | None:
        """Return where the examples of data lie that nothing else is known of."""
        axis, rows = self.batch_dim, self._contract.rows
        if tensor.dim() > axis and tensor.shape[axis] == rows:
            return self._contract
        if self._contract.segments is not None and tensor.dim() > axis + 1:
            # Packed examples often keep a batch axis of size 1.
            if tensor.shape[axis] == 1 and tensor.shape[axis + 1] == rows:
                return self._contract.along(axis + 1)
        return None

    def mark_constant(self, tensor: Tensor) -> None:
        """Remember that a tensor was computed without data."""
        if torch.compiler.is_dynamo_compiling():
            tensor._gradstats_constant = IN_GRAPH  # type: ignore[attr-defined]
        elif id(tensor) not in self._constants:
            tensor._gradstats_constant = self.serial  # type: ignore[attr-defined]

    def mark_data(self, tensor: Tensor) -> None:
        """Remember that data were written into a tensor."""
        if getattr(tensor, "_gradstats_constant", None) in (self.serial, IN_GRAPH):
            del tensor._gradstats_constant  # type: ignore[attr-defined]
        self._constants.pop(id(tensor), None)

    def layout_of(self, tensor: Tensor) -> Examples | None:
        """Return where the examples of a tensor of data lie, None where that is not known."""
        mark = getattr(tensor, "_gradstats_layout", None)
        if mark is None:
            return self.by_contract(tensor)
        leave_graph("data whose examples do not lie along batch_dim")
        owner, layout = mark
        return layout if owner == self.serial else self.by_contract(tensor)

    def place(self, tensor: Tensor, layout: Examples | None) -> None:
        """Note where the examples of a tensor of data lie; None for what nobody knows."""
        if layout != self.by_contract(tensor):
            leave_graph("data whose examples do not lie along batch_dim")
            tensor._gradstats_layout = (self.serial, layout)  # type: ignore[attr-defined]
            self.follows_layouts = True

    def follow_layout(
        self, func, args: tuple[Any, ...], kwargs: dict[str, Any], data: list[Tensor], result
    ) -> None:
        """Note where the examples lie in the result of an operation on some tensors of data."""
        if func in JOINS:
            after = self._joined(func, args, kwargs, result)
        elif func in PRODUCTS and self.follows_layouts:
            after = self._multiplied(args, result)
        elif func is torch.einsum:
            after = self._contracted(args, data, result)
        elif func in BROADCASTS and (len(data) > 1 or self._is_marked(data[0])):
            after = self._broadcast(data, result)
        else:
            changes = func in CHANGES
            if func in REINDEXES:
                # What is indexed decides. A constant indexed by data lies as its indices do; rows
                # of data written into a constant lie where the contract says.
                changes = any(tensor is args[0] for tensor in data)
                data = [args[0]] if changes else data
                if not changes and func in WRITES:
                    return
            source, layout = self._deciding(data)
            if not self._is_marked(source) and (not changes or layout is None):
                return
            if func in REINDEXES and not changes:
                func = None
            after = follow(func, args, kwargs, source, layout, result)
            if after is None and layout is not None and func not in REINDEXES:
                # Where nothing else has the batch's size, shape can decide after all.
                both = (source.shape, result.shape)
                alone = all(sum(s == self.batch_size for s in shape) == 1 for shape in both)
                if alone and layout.plain and self.has_example_axis(result):
                    return
        self.place(result, after)

    def _is_marked(self, tensor: Tensor) -> bool:
        mark = getattr(tensor, "_gradstats_layout", None)
        return mark is not None and mark[0] == self.serial

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
        aligned = []
        for tensor in data:
            layout = self.layout_of(tensor)
            if layout is not None:
                layout = layout.along(layout.axis + result.dim() - tensor.dim())
                aligned.append((tensor, layout))
            elif tensor.requires_grad and tensor.dim() and self._is_marked(tensor):
                return None
        if not aligned:
            return self.by_contract(result)
        trained = [layout for tensor, layout in aligned if tensor.requires_grad]
        deciding = trained or [layout for _, layout in aligned]
        first = deciding[0]
        if any(layout.axis != first.axis for layout in deciding):
            return None  # examples against examples
        if all(same_rows(first, layout) for layout in deciding[1:]):
            return first
        # Inputs of several examples meet: by contract the batch's own order says whose it is.
        return None if trained else next((layout for layout in deciding if layout.plain), None)

    def _multiplied(self, args: tuple[Any, ...], result: Tensor) -> Examples | None:
        """Return the layout of a matrix product: rows of the first operand stay where they are."""
        kept: list[tuple[Tensor, Examples]] = []
        for tensor, summed in zip(args, (-1, -2), strict=False):
            if node_of(tensor) is not None or tensor.dim() < 2 or not self.is_data(tensor):
                continue
            layout = self.layout_of(tensor)
            if layout is not None and layout.axis != tensor.dim() + summed:
                layout = layout.along(layout.axis + result.dim() - tensor.dim())
                kept.append((tensor, layout))
            elif kept and self._contract.segments is not None:
                break  # attention among packed examples: the model keeps them apart
            elif layout is not None or self._is_marked(tensor):
                return None
        return self._product(kept, result)

    def _contracted(self, args: tuple[Any, ...], data: list[Tensor], result: Tensor):
        """Return the layout of a contraction in Einstein's notation."""
        kept = []
        for tensor in data:
            layout = self.layout_of(tensor)
            if layout is None:
                if self._is_marked(tensor):
                    return None
                continue
            after = contracted(args, tensor, layout)
            if after is None:
                return None
            kept.append((tensor, after))
        return self._product(kept, result)

    def _product(self, kept: list[tuple[Tensor, Examples]], result: Tensor) -> Examples | None:
        """Return the layout of a product of operands whose examples lie in the result as given."""
        trained = [layout for tensor, layout in kept if tensor.requires_grad]
        found = trained or [layout for _, layout in kept]
        if not found:
            return self.by_contract(result)
        plain = {layout.axis for layout in trained if layout.plain}
        if self.batch_size > 1 and len(plain) > 1:
            # Every example meets every other. Whether a loss depends on it shows in its graph.
            self.coupled.add(result.grad_fn)
        return found[0]

    def _joined(self, func, args, kwargs, result: Tensor) -> Examples | None:
        tensors = list(args[0] if args else kwargs["tensors"])
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % result.dim()
        layouts = [
            self.layout_of(t) if node_of(t) is None and self.is_data(t) else None for t in tensors
        ]
        known = [layout for layout in layouts if layout is not None]
        if not known:
            return self.by_contract(result)
        if func is torch.stack:
            shifted = [layout.along(layout.axis + (dim <= layout.axis)) for layout in known]
            return joined(shifted, -1, result.device)
        if dim != known[0].axis:
            # Along other axes constants may stand beside the data.
            return joined(known, dim, result.device)
        return joined(layouts, dim, result.device)

    def note_losses(self, losses: Tensor) -> None:
        """Remember whose each loss is, where the model put the examples in another order."""
        layout = self.layout_of(losses)
        moved = self._is_marked(losses) and not (layout is not None and layout.plain)
        if self._contract.segments is not None or not moved:
            return
        if layout is None:
            raise ExampleAxisError(
                "which loss belongs to which example was lost on the way: the losses were moved "
                "along the example axis by an operation that is not followed. Expected losses in "
                "the order of the batch: reduce each example's own rows, or put rows back by "
                "indexing."
            )
        owner = layout.owner(losses.device)
        if owner.numel() != self.batch_size or owner.unique().numel() != self.batch_size:
            raise ExampleAxisError(
                f"the losses belong to the examples {owner.tolist()}, as followed through the "
                f"model: expected one loss for each of {self.batch_size} examples. Sum the losses "
                "of each example."
            )
        self.loss_order = owner
