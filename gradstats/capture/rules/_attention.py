"""Attention (Vaswani et al., arXiv 1706.03762). Multi-head attention is split into projections.

Symbols: N examples, L queries, S keys, H heads, E features. Sequence first: (L, N, E).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from gradstats.capture.following._examples import Examples
from gradstats.capture.operations._nested import argument_of
from gradstats.capture.parameters._derived import derive
from gradstats.capture.parameters._nodes import Node
from gradstats.capture.parameters._refusals import refuse
from gradstats.capture.parameters._tensors import first_node, node_of, nodes_of
from gradstats.capture.rules._common import as_data, rows_along, run
from gradstats.capture.rules._per_example import per_example
from gradstats.capture.uses._views import ExampleLayout

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def multi_head_attention(
    tracker: Context,
    func,
    query,
    key,
    value,
    embed_dim_to_check,
    num_heads,
    in_proj_weight,
    in_proj_bias,
    bias_k,
    bias_v,
    add_zero_attn,
    dropout_p,
    out_proj_weight,
    out_proj_bias,
    training=True,
    key_padding_mask=None,
    need_weights=True,
    attn_mask=None,
    use_separate_proj_weight=False,
    q_proj_weight=None,
    k_proj_weight=None,
    v_proj_weight=None,
    static_k=None,
    static_v=None,
    average_attn_weights=True,
    is_causal=False,
):
    """Projections of query, key and value, attention between them, and the output projection.

    Calls with unusual arguments do not arrive here: they are followed inside PyTorch's function
    (see ``is_out_of_the_ordinary``).
    """
    operands = (
        query, key, value, in_proj_weight, in_proj_bias, out_proj_weight, out_proj_bias, attn_mask,
        q_proj_weight, k_proj_weight, v_proj_weight,
    )  # fmt: skip
    node = first_node(*operands)
    if is_causal and attn_mask is None:
        refuse(func, node, "with is_causal=True and without attn_mask, which PyTorch refuses too,")

    examples = rows_along(tracker, func, node, (query, key, value), 1)
    # Convert each distinct operand once: ``_project`` asks which of them are the same tensor.
    views = {id(item): as_data(tracker, func, node, item, examples) for item in (query, key, value)}
    query, key, value = (views[id(item)] for item in (query, key, value))
    length, rows, width = query.shape
    if use_separate_proj_weight:
        separate = (q_proj_weight, k_proj_weight, v_proj_weight)
        biases = _split(tracker, in_proj_bias, [width] * 3)
        q, k, v = [
            run(tracker, functional.linear, x, weight, bias)
            for x, weight, bias in zip((query, key, value), separate, biases, strict=True)
        ]
    else:
        q, k, v = _project(tracker, (query, key, value), in_proj_weight, in_proj_bias)

    parts = rows * num_heads, width // num_heads
    q, k, v = (x.view(len(x), *parts).transpose(0, 1) for x in (q, k, v))

    is_causal = is_causal and key_padding_mask is None and not need_weights
    if is_causal:
        attn_mask = None
    along = examples.along(0)
    mask = _merged_mask(tracker, func, node, attn_mask, key_padding_mask, along, num_heads, q.dtype)
    dropout_p = dropout_p if training else 0.0
    if need_weights:
        logits = _logits(tracker, along, q * math.sqrt(1.0 / q.shape[2]), k, mask)
        attended = logits.softmax(-1)
        if dropout_p > 0.0:
            attended = functional.dropout(attended, dropout_p)
        mixed = torch.bmm(attended, v).transpose(0, 1).reshape(length * rows, width)
        attended = attended.view(rows, num_heads, *attended.shape[1:])
        weights = attended.mean(1) if average_attn_weights else attended
    else:
        heads = [x.view(rows, num_heads, *x.shape[1:]) for x in (q, k, v)]
        for item in heads:  # for the rule of a trained mask
            tracker.marks.place(item, along)
        mixed = run(
            tracker, functional.scaled_dot_product_attention, *heads, mask, dropout_p, is_causal
        )
        mixed = mixed.permute(2, 0, 1, 3).contiguous()
        weights = None
    # With rows adjacent in memory, as in PyTorch, gradients are summed in PyTorch's order.
    mixed = mixed.view(length, rows, width)
    tracker.marks.place(mixed, examples)
    return run(tracker, functional.linear, mixed, out_proj_weight, out_proj_bias), weights


def _project(tracker: Context, inputs, weight, bias):
    """Return q, k and v from a packed weight, with one product for each distinct input."""
    query, key, value = inputs
    width = query.shape[-1]
    if key is not value:
        groups = [(query, 1), (key, 1), (value, 1)]
    elif query is not key:
        groups = [(query, 1), (key, 2)]
    else:
        groups = [(query, 3)]
    sizes = [count * width for _, count in groups]
    projected: list[Tensor] = []
    for (x, count), w, b in zip(
        groups, _split(tracker, weight, sizes), _split(tracker, bias, sizes), strict=True
    ):
        result = run(tracker, functional.linear, x, w, b)
        projected += [result] if count == 1 else torch.stack(result.chunk(count, dim=-1))
    return projected


def _split(tracker: Context, packed, sizes: list[int]):
    """Return consecutive parts of a packed parameter; the parameter itself if there is only one."""
    if packed is None or len(sizes) == 1:
        return [packed] * len(sizes)
    return run(tracker, Tensor.split, packed, sizes)


def _merged_mask(
    tracker: Context, func, node: Node, mask, padding, examples: Examples, heads, dtype
):
    """Return what is added to the logits, (1, 1, L, S) or (N, H, L, S); None for nothing.

    Args:
        mask: attn_mask (L, S) or (N·H, L, S), boolean or to be added.
        padding: key_padding_mask (N, S).
    """
    if mask is not None:
        shape = (1, 1) if mask.dim() == 2 else (examples.rows, heads)
        mask = run(tracker, Tensor.reshape, _added(mask, dtype), (*shape, *mask.shape[-2:]))
    if padding is None:
        return mask
    if node_of(padding) is not None:
        refuse(func, node, "with a tracked key_padding_mask has no rule")
    rows_along(tracker, func, node, (padding,), 0)
    padding = _added(padding, dtype)
    # Expanded to each head, as in PyTorch, a trained mask's gradient is summed in PyTorch's order.
    padding = padding.view(examples.rows, 1, 1, -1).expand(-1, heads, -1, -1)
    tracker.marks.place(padding, examples)
    return padding if mask is None else run(tracker, torch.add, mask, padding)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers to add to the logits; a boolean one is true where not to attend."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _logits(tracker: Context, examples: Examples, q: Tensor, k: Tensor, mask) -> Tensor:
    """Return q kᵀ + mask, (N·H, L, S)."""
    k = k.mT
    if mask is None:
        return torch.bmm(q, k)
    mask = run(tracker, Tensor.flatten, mask, 0, 1)
    if node_of(mask) is not None:  # for its rule
        owner = examples.owner(q.device).repeat_interleave(len(q) // examples.rows)
        for item in (q, k):
            tracker.marks.place(item, examples.owned_by(owner, 0))
    return run(tracker, torch.baddbmm, mask, q, k)


def scaled_dot_product(tracker: Context, func, query, key, value, *args, **kwargs):
    """Attention with a tracked query, key, value or mask: latents, relative position biases."""
    operands = (query, key, value)
    node = first_node(*operands, *args, *kwargs.values())
    dims = max(item.dim() for item in operands)
    examples = rows_along(tracker, func, node, operands, 0)
    query, key, value = (_for_each(tracker, func, node, item, dims, examples) for item in operands)
    mask = next(iter(nodes_of((*args, *kwargs.values()))), None)
    if mask is None:
        return func(query, key, value, *args, **kwargs)
    dropout = argument_of(args, kwargs, 1, "dropout_p", 0.0)
    if dropout and tracker.settings.exact:
        refuse(func, mask, "with dropout has no rule under fused=False", "Pass fused=True.")
    layout = ExampleLayout(dims, examples)
    return per_example(tracker, func, layout, (query, key, value, *args), kwargs)


def _for_each(
    tracker: Context, func, node: Node, item: Tensor, dims: int, examples: Examples
) -> Tensor:
    """Return an operand of attention as data with a slice for each example, expanded if shared."""
    of_data = tracker.marks.is_of_data(item)
    if dims < 3 or (of_data and item.dim() < dims):
        refuse(func, node, "whose examples do not lie along the first axis has no rule")
    shape = (1,) * (dims - item.dim()) + tuple(item.shape)
    sizes = (examples.rows, *shape[1:])
    if shape[0] == 1 and sizes != item.shape and not of_data:
        if node_of(item) is None:
            item = item.expand(sizes)
            tracker.marks.mark_constant(item)
        elif tracker.settings.exact:
            # For expanded operands PyTorch may choose a kernel that rounds differently.
            refuse(func, node, "with an operand that all examples share has no rule under "
                   "fused=False", "Pass fused=True.")  # fmt: skip
        else:
            item = derive(tracker, Tensor.expand, (item, sizes), {})
    return as_data(tracker, func, node, item, examples)


RULES = {
    functional.multi_head_attention_forward: multi_head_attention,
    functional.scaled_dot_product_attention: scaled_dot_product,
}
