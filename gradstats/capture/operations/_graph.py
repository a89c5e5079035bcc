"""PyTorch's autograd graphs: types of nodes, found by running one operation of each, and walks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node as GraphNode
from torch.nn import functional

# Independent of the modes and default device that are set when this is imported.
with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
    _leaf = torch.zeros(1, 1, requires_grad=True)
    _changed = _leaf.clone()
    _changed[:1].mul_(1)
    # Accumulates the gradient of a leaf.
    ACCUMULATE_GRAD = type(torch.autograd.graph.get_gradient_edge(_leaf).node)
    # Wraps an operation that changed a part of its operand in place.
    COPY_SLICES = type(_changed.grad_fn)
    # A linear layer on rows, with and without a bias.
    ADDMM = type(functional.linear(_leaf, _leaf, torch.zeros(1)).grad_fn)
    MM = type(functional.linear(_leaf, _leaf).grad_fn)
    # On more axes, the rows are multiplied and the result is viewed.
    _rows = torch.zeros(1, 1, 1)
    VIEWS = frozenset(
        type(each.grad_fn)
        for each in (functional.linear(_rows, _leaf), functional.linear(_rows, _leaf, _leaf[0]))
    )
    CONVOLUTION = type(torch.conv1d(_rows, _leaf[None]).grad_fn)
    LAYER_NORM = type(functional.layer_norm(_leaf, (1,)).grad_fn)
    GROUP_NORM = type(torch.group_norm(_leaf, 1).grad_fn)
    EMBEDDING = type(functional.embedding(torch.zeros(1, dtype=torch.int64), _leaf).grad_fn)
    MUL = type((_leaf * _leaf).grad_fn)
    ADD = type((_leaf + _leaf).grad_fn)

# The C function that applies an autograd Function, below PyTorch's wrappers in Python.
INNERMOST = torch._C._FunctionBase.__dict__["apply"]

# Whether ``apply`` is this C function itself, as from PyTorch 2.14 on: then calls of an ``apply``
# that was looked up before the first context are not seen.
KEPT_APPLY_IS_UNSEEN = vars(torch.autograd.Function).get("apply") is INNERMOST


def hooks_on_saved() -> Any:
    """Return the innermost hooks on saved tensors, as checkpoints set; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def nodes_behind(tensor: Tensor) -> Iterator[GraphNode]:
    """Yield the nodes of the autograd graph behind a tensor."""
    stack = [] if tensor.grad_fn is None else [tensor.grad_fn]
    seen = set(stack)
    try:
        while stack:
            node = stack.pop()
            yield node
            for child, _ in node.next_functions:
                if child is not None and child not in seen:
                    seen.add(child)
                    stack.append(child)
    finally:
        free_in_order(seen)


# Longer graphs are freed in order: freeing this many nodes recursively takes 1.3 MB of the stack.
_LONG = 8_192
# The most graphs to keep at once, if all stay in use, as do those of losses kept in a list.
_MOST = 64

_kept: list[list[GraphNode]] = []
_changing = RLock()  # freeing a node may run the user's code


def free_in_order(nodes: set[GraphNode]) -> None:
    """Have the nodes of a graph freed one after the other, if there are many.

    PyTorch frees nodes that Python has seen recursively, which exhausts the stack if a graph is
    long. So the nodes are kept until nothing else refers to them; ``let_go``, which also runs
    whenever a graph was walked, then frees them.
    """
    let_go()
    if len(nodes) > _LONG:
        with _changing:
            # No node twice: two lists that share one would wait for each other. No leaves either,
            # which lead to nothing.
            new = [n for n in nodes.difference(*_kept) if type(n) is not ACCUMULATE_GRAD]
            # Nodes made later have greater numbers.
            new.sort(key=lambda node: node._sequence_nr())  # type: ignore[attr-defined]
            _kept.append(new)


def let_go() -> None:
    """Free the kept nodes that nothing else refers to any more."""
    if not _kept:
        return
    by_us_alone = [object()]
    fewest = sys.getrefcount(by_us_alone[-1])
    with _changing:
        for nodes in reversed([*_kept]):  # newer graphs may lead to older ones
            while nodes and sys.getrefcount(nodes[-1]) <= fewest:
                nodes.pop()
        _kept[:] = [nodes for nodes in _kept if nodes][-_MOST:]
