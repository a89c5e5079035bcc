"""Several uses of tensors derived from parameters, pulled back at once.

Uses of one tensor are merged first. If parts of a tensor were used, as a hypernetwork's weights are
parts of its output, their gradients are assembled into one of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradstats._factors import Factor
from gradstats.capture.operations._operations import CASTS
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._lineage import Pulled, is_isometric, sqnorms_together
from gradstats.capture.parameters._nodes import Node, Root
from gradstats.contractions import Contraction, merge


def merge_uses(factors: list[Factor]) -> list[Factor]:
    """Return factors with the same sum, merging those of one derived tensor before the way back."""
    uses: dict[Node, list[Pulled]] = {}
    found: list[Factor] = []
    for factor in factors:
        if type(factor) is Pulled:
            uses.setdefault(factor.node, []).append(factor)
        else:
            found.append(factor)
    for first, *more in uses.values():
        merged = merge([each.inner for each in (first, *more)])
        found += [replace(first, inner=inner) for inner in merged]
    return found


@dataclass(frozen=True)
class Parts:
    """The gradients of parts of a derived tensor, as one of the whole.

    Attributes:
        parts: the factor of each part, and the elements of the tensor in it, (n,).
        shape: the whole's.
    """

    parts: Sequence[tuple[Factor, Tensor]]
    shape: tuple[int, ...]

    @property
    def batch(self) -> int:
        return self.parts[0][0].batch

    def select(self, rows) -> Parts:
        return Parts([(factor.select(rows), places) for factor, places in self.parts], self.shape)

    def dense(self) -> Tensor:
        whole: Tensor | None = None
        for factor, places in self.parts:
            own = factor.dense().reshape(self.batch, -1)
            if whole is None:
                whole = own.new_zeros(self.batch, *self.shape)
            whole.view(self.batch, -1)[:, places] += own
        assert whole is not None
        return whole


def parts_sqnorm(root: Root, delivered: Sequence, workspace: int) -> Contraction | None:
    """Return the squared norms of a parameter used through parts of one derived tensor, or None.

    The parts' gradients are pulled back at once, to all parameters with the same deliveries.
    """
    nodes = {item.node for item in delivered if type(item) is Pulled}
    if len(nodes) < 2 or any(type(item) is not Pulled for item in delivered):
        return None
    first = delivered[0]
    known = first.together.get(root)
    if known is not None:
        return known
    (whole, *more) = {_whole_of(node) for node in nodes}
    if more or is_isometric(whole) or whole.value.is_complex():
        return None
    numbers = torch.arange(whole.value.numel(), device=whole.value.device).view(whole.shape)
    places = [item.node.replay({whole: numbers}).reshape(-1) for item in delivered]
    inners = [item.inner for item in delivered]
    inner = Parts(list(zip(inners, places, strict=True)), tuple(whole.shape))
    alike = [
        other
        for other in first.together
        if other is root or (other.is_complete and _are_same(other.delivered, delivered))
    ]
    norms = sqnorms_together(inner, whole, alike, workspace)
    first.together.update(zip(alike, norms, strict=True))
    return first.together[root]


def _whole_of(node: Derived) -> Derived:
    """Return the largest derived tensor of which another is a part; that one if there is none."""
    while is_isometric(node) and node.function not in CASTS:
        parent = node.parents[0]
        if not isinstance(parent, Derived):
            break
        node = parent
    return node


def _are_same(one: Sequence, other: Sequence) -> bool:
    """Whether two parameters have factors of the same tensors."""
    pairs = zip(one, other)  # noqa: B905
    return len(one) == len(other) and all(
        type(a) is Pulled and a.inner is b.inner and a.node is b.node for a, b in pairs
    )
