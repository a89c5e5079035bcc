"""The errors for refused operations, and their remedies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from gradstats.capture.operations._names import function_name
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.parameters._tensors import first_node, node_of
from gradstats.errors import UnsupportedOperationError

# The remedy for nested tensors.
PACK = (
    "Pack the examples into one row: a jagged tensor's values() as the batch, with "
    "cu_seqlens=x.offsets()."
)

# The remedy for hooks that change gradients on their way to a parameter.
HOOK_ELSEWHERE = (
    "If the hook is for training alone, register it on the parameter; if it is part of the "
    "gradients to measure, change them in the backward of a torch.autograd.Function that returns "
    "the tensor."
)


def refuse(
    func,
    node: Node,
    reason: str = "has no rule",
    remedy: str = "",
    cause: Exception | None = None,
) -> NoReturn:
    """Raise the error for an operation whose factor is not known."""
    raise UnsupportedOperationError(
        f"{function_name(func)} {reason} for {node.describe()}, so its per-example gradient is not "
        "known. Expected an operation that gradstats has a rule for. "
        + (
            remedy
            or 'Have per_example_norms compute it one example at a time with fallback="vmap", or '
            f"leave the parameter out by name with exclude={node.names!r}."
        ),
        node.names,
    ) from cause


def check_nested(func, operands: Sequence[Tensor]) -> None:
    """Refuse an operation on nested tensors and parameters."""
    if any(item.is_nested for item in operands):
        refuse(func, first_node(*operands), "of nested tensors has no rule", PACK)


def check_has_sizes(func, result: Tensor) -> None:
    """Refuse a nested tensor of data without sizes, which say where the examples lie."""
    if result.layout == torch.strided:
        raise UnsupportedOperationError(
            f"{function_name(func)} makes a nested tensor of the strided layout, which has no "
            f"sizes that say where the examples lie. Expected layout=torch.jagged. {PACK}"
        )


def refuse_change(func, node: Node) -> NoReturn:
    """Refuse an in-place change of a tensor that belongs to no example."""
    reason = "changes a tensor in place that belongs to no example, which has no rule"
    refuse(func, node, reason, "Write it out of place.")


def refuse_on_derived(func, tensor: Tensor, remedy: str) -> None:
    """Refuse an operation that changes how gradients pass a tensor derived from parameters."""
    node = node_of(tensor)
    if isinstance(node, Derived):
        refuse(func, node, "changes its gradient in a way that is not followed", remedy)
