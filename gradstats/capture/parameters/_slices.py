"""Parameters that were repeated for the batch, treated as data from there on.

Learned queries and latents are expanded to the batch, and may pass through layers before they meet
data. Each example's gradient is then that of its own slice, but pulling one back costs as much as
pulling back all. So the computation from the repeated parameters runs again in a separate context,
in which the slices are data and rules give factors as lean as for any data. That context refuses
if slices of different examples meet; then examples are pulled back one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradstats._compiler import is_compiling
from gradstats._factors import Factor, Vector
from gradstats.capture.following._losses import order_of
from gradstats.capture.operations._modes import without_contexts
from gradstats.capture.operations._nested import flatten
from gradstats.capture.operations._operations import EXPANDS, variants
from gradstats.capture.parameters._consumers import Arrival, Consumer
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._lineage import Pulled
from gradstats.capture.parameters._nodes import Node, Root
from gradstats.contractions import lean, total
from gradstats.errors import GradStatsError

REPEATS = EXPANDS | frozenset(variants("repeat"))


def repeated_in(node: Node, batch: int) -> list[Derived]:
    """Return the expansions and repeats behind a node that hold a copy for each example.

    The copies lie along the first axis, which what was repeated lacks, or has with size 1.

    Args:
        batch: number of examples.
    """
    found: dict[Derived, None] = {}
    waiting, seen = [node], set()
    while waiting:
        item = waiting.pop()
        if not isinstance(item, Derived) or item in seen:
            continue
        seen.add(item)
        if item.function in REPEATS and item.shape[:1] == (batch,):
            source = item.parents[0].shape
            if len(source) < len(item.shape) or source[0] == 1:
                found[item] = None
                continue
        waiting += item.parents
    return list(found)


@dataclass(frozen=True)
class Slices(Pulled):
    """The factor of a parameter that is given by gradients of slices, one for each example."""


def as_slices(factor: Factor, node: Derived) -> dict[Root, list[Factor]] | None:
    """Return the factors of all parameters behind a tensor that has a slice for each example.

    They wait until the backward has ended (see ``Root.of_slices``).

    Returns:
        The factors; None if the tensor is not known to have a slice for each example.
    """
    tracker, factor = node.tracker, lean(factor)
    if is_compiling() or tracker.marks.packed or tracker.settings.consumer is not None:
        return None
    if not isinstance(factor, Vector) or factor.axis != 0:
        return None
    if node.has_function or node.value.is_complex() or factor.batch < 2:
        return None
    if not (tracker.keeps_values(node.roots) and repeated_in(node, factor.batch)):
        return None
    for root in node.roots:
        root.of_slices = True
    together: dict = dict.fromkeys(node.roots)
    return {root: [Slices(factor, node, root, together)] for root in node.roots}


class Collected:
    """Holds the factors of each parameter."""

    needs_norms = False

    def __init__(self) -> None:
        self.factors: dict[str, Sequence[Factor]] = {}

    def take(self, arrival: Arrival) -> None:
        replays: dict = {}
        self.factors[arrival.name] = [
            factor.frozen(replays) if isinstance(factor, Pulled) else factor
            for factor in arrival.factors
        ]


# Called with a model, its number of examples and a consumer of its factors; returns a context.
MakeTracker: TypeAlias = Callable[[nn.Module, int, Consumer], Any]


def take_slices(roots: Sequence[Root], make_tracker: MakeTracker) -> None:
    """Replace the factors of parameters that were repeated for the batch by lean ones."""
    slices = (each for root in roots for each in root.delivered if isinstance(each, Slices))
    # Each use has a factor for each of its parameters; one of them is enough.
    pulled = {(id(each.inner), each.node): each for each in slices}
    found = factors_of_slices(make_tracker, pulled.values()) if pulled else None
    if found is None:
        return
    for root in roots:
        kept = [each for each in root.delivered if not isinstance(each, Slices)]
        root.delivered = (*kept, *found[root])


def factors_of_slices(
    make_tracker: MakeTracker, pulled: Iterable[Slices]
) -> dict[Root, Sequence[Factor]] | None:
    """Return lean factors of all parameters that some slices were computed from.

    None if a slice does not belong to exactly one example.
    """
    pulled = list(pulled)
    batch = pulled[0].batch
    roots = list(dict.fromkeys(root for each in pulled for root in each.node.roots))
    weights = nn.ParameterList([nn.Parameter(root.parameter.detach()) for root in roots])
    repeated = dict.fromkeys(r for each in pulled for r in repeated_in(each.node, batch))
    zeros = [torch.zeros(r.shape, dtype=r.value.dtype, device=r.value.device) for r in repeated]
    collected = Collected()
    tracker = make_tracker(weights, batch, collected)
    tracker.marks.keep_constant(_constants_behind(pulled))
    try:
        with without_contexts(), torch.enable_grad():
            tracker.open()
            known: dict[Any, Tensor] = dict(zip(roots, weights, strict=True))
            for copies, zero in zip(repeated, zeros, strict=True):
                # Adding the zeros makes data of it: tensors from outside a context are data.
                known[copies] = copies.replay(known) + zero
            losses = reduce(add, (_losses(each, known) for each in pulled))
            if order_of(tracker.marks, losses) is not None:
                return None
            tracker.backward_without_gradients(losses.sum())
    except torch.OutOfMemoryError:
        raise
    except (GradStatsError, RuntimeError):  # a RuntimeError if a backward cannot run again
        return None
    finally:
        tracker.close()
        # The factors' graphs lead back to the context, and that to ``collected``: break the cycle.
        factors, collected.factors = collected.factors, {}
    return {root: factors.get(str(number), ()) for number, root in enumerate(roots)}


def _losses(pulled: Slices, known: dict[Any, Tensor]) -> Tensor:
    """Return the inner product of each example's slice with its gradient, (B,)."""
    again = pulled.node.replay(known)
    with torch._C.DisableTorchFunction():
        pulled.node.check_same(again)
    gradient = total([pulled.inner])  # whose slices are the gradients of the examples
    return (again.to(gradient.dtype) * gradient).reshape(pulled.batch, -1).sum(1)


def _constants_behind(pulled: Sequence[Slices]) -> list[Tensor]:
    """Return the constants that slices were computed with."""
    behind = (node for each in pulled for node in each.node.behind())
    leaves = (item for node in behind for item in flatten((node.args, node.kwargs)))
    return [*{id(item): item for item in leaves if isinstance(item, Tensor)}.values()]
