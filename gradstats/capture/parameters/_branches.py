"""``torch.cond``, replaced by the branch that it takes, whose operations are then seen.

Its operator would hide them. ``torch.cond`` itself compiles the branches first, which contexts that
run operation by operation do not allow, so from the first context on every call passes through
here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gradstats._compiler import is_compiling
from gradstats.capture.operations._modes import ContextMode, innermost_mode
from gradstats.capture.parameters._transforms import hidden, transform_level

COND: Any = torch.ops.higher_order.cond


@cache
def replace_cond() -> None:
    """From now on, show calls of torch.cond to contexts without compiling the branches."""
    torch.cond = _shown(torch.cond)


def _shown(cond: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(cond)
    def run(pred, true_fn, false_fn, operands=()):
        if is_compiling() or innermost_mode() is None or not isinstance(pred, Tensor):
            return cond(pred, true_fn, false_fn, operands)
        leaves, spec = pytree.tree_flatten(operands)  # the operator takes no nested operands
        return COND(pred, _of_leaves(true_fn, spec), _of_leaves(false_fn, spec), tuple(leaves))

    return run


def _of_leaves(branch: Callable[..., Any], spec: pytree.TreeSpec) -> Callable[..., Any]:
    return lambda *leaves: branch(*pytree.tree_unflatten(leaves, spec))


def take_branch(mode: ContextMode, pred, true_fn, false_fn, operands):
    """Run a branch in place of the operator of torch.cond."""
    if transform_level() is not None:
        raise hidden("torch.cond inside a torch.func transform")
    with mode:
        return (true_fn if pred else false_fn)(*operands)
