"""Several uses of tensors derived from parameters, pulled back at once.

Uses of one tensor are merged before the way back. Gradients of parts of one tensor, such as the
weights that a hypernetwork returns in one vector, are assembled into one gradient of the whole.
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
    """Return factors with the same sum, with those of one derived tensor merged."""
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
    """The gradients of parts of a derived tensor, as one gradient of the whole.

    Attributes:
        parts: the factor of each part, and the numbers of its elements in the whole, (n,).
        shape: of the whole.
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
            part = factor.dense().reshape(self.batch, -1)
            if whole is None:
                whole = part.new_zeros(self.batch, *self.shape)
            whole.view(self.batch, -1)[:, places] += part
        assert whole is not None
        return whole


def parts_sqnorm(root: Root, delivered: Sequence, workspace: int) -> Contraction | None:
    """Return the squared norms of a parameter that is used through parts of one derived tensor.

    The parts' gradients are pulled back at once, to all parameters with the same factors. None if
    the parameter is used in any other way.
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
    found = sqnorms_together(inner, whole, alike, workspace)
    first.together.update(found)
    return found[root]


def _whole_of(node: Derived) -> Derived:
    """Return the largest derived tensor that a derived tensor is a part of, perhaps itself."""
    while is_isometric(node) and node.function not in CASTS:
        parent = node.parents[0]
        if not isinstance(parent, Derived):
            break
        node = parent
    return node


def _are_same(one: Sequence, other: Sequence) -> bool:
    """Whether two parameters have factors of the same derived tensors."""
    return len(one) == len(other) and all(
        type(a) is Pulled and a.inner is b.inner and a.node is b.node
        for a, b in zip(one, other, strict=True)
    )
