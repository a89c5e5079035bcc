"""Mixtures of experts: rows sorted by expert, and one product for each expert's rows."""

import copy

import pytest
import torch
import transformers
from torch.nn import functional

import gradstats as gs
from tests.oracle import assert_sqnorms, oracle_sqnorms
from tests.rules.operation import check_operation, check_refused, normal
from tests.zoo.case import tokens
from tests.zoo.hugging_face import DECODER, language_losses

BATCH, POSITIONS, WIDTH, EXPERTS, CHOSEN = 3, 3, 4, 5, 2

grouped_mm = getattr(functional, "grouped_mm", torch._grouped_mm)


SINGLE = {"rtol": 1e-5, "gradient_rtol": 1e-6}


def multiply(x, weights, ends):
    """Return the product, which PyTorch has for single precision and less."""
    return grouped_mm(x.float(), weights.float(), offs=ends).to(x.dtype)


def sorted_by_expert(scores):
    """Return weights and experts of each row, and the order in which experts take the rows."""
    weights, expert = scores.softmax(-1).topk(CHOSEN, dim=-1)
    expert = expert.reshape(-1)
    expert, order = torch.sort(expert)
    ends = torch.bincount(expert, minlength=EXPERTS).cumsum(0, dtype=torch.int32)
    return weights.reshape(-1)[order], expert, order, ends


def mixture(m, x):
    rows = x.flatten(0, 1)
    weights, expert, order, ends = sorted_by_expert(rows @ m.router)
    hidden = multiply(rows[order // CHOSEN], m.up, ends)
    if hasattr(m, "bias"):
        hidden.add_(m.bias[expert])
    out = multiply(torch.tanh(hidden), m.down.transpose(1, 2), ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    out = (out * weights[:, None])[back]
    return out.view(len(rows), CHOSEN, -1).sum(1).unflatten(0, x.shape[:2])


PARAMETERS = {
    "router": (WIDTH, EXPERTS),
    "up": (EXPERTS, WIDTH, 8),
    "down": (EXPERTS, WIDTH, 8),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("positions", [1, POSITIONS, 4])
def test_rows_sorted_by_expert(positions, bias):
    parameters = {**PARAMETERS, **({"bias": (EXPERTS, 8)} if bias else {})}
    check_operation(mixture, parameters, normal(BATCH, positions, WIDTH), **SINGLE)


def test_experts_that_get_no_rows_and_rows_that_no_expert_gets():
    def function(m, x):
        ends = torch.tensor([0, 2, 2, 4, 4], dtype=torch.int32)
        kept = (torch.arange(len(x)) < 4)[:, None]
        # What lies behind the last expert's rows is not written, in either direction.
        rows = multiply(x.masked_fill(~kept, 0), m.up, ends)
        return torch.where(kept, rows, 0.0) + x @ m.rest

    parameters = {"up": (EXPERTS, WIDTH, 8), "rest": (WIDTH, 8)}
    check_operation(function, parameters, normal(6, WIDTH), **SINGLE)


def test_one_expert_used_twice():
    def function(m, x):
        ends = torch.tensor([2, 6, 6, 6, 6], dtype=torch.int32)
        rows = multiply(x, m.up, ends)
        return multiply(torch.tanh(rows), m.up, ends) + rows @ m.up[1]

    check_operation(function, {"up": (EXPERTS, WIDTH, WIDTH)}, normal(6, WIDTH), **SINGLE)


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (2, 1, 0), (0, 2, 1)])
def test_experts_along_another_axis_of_a_parameter(order):
    ends = torch.tensor([2, 3, 3, 5, 6], dtype=torch.int32)
    sizes = EXPERTS, WIDTH, 8
    shape = tuple(sizes[order.index(axis)] for axis in range(3))
    check_operation(
        lambda m, x: multiply(x, m.w.permute(order).contiguous(), ends),
        {"w": shape},
        normal(6, WIDTH),
        **SINGLE,
    )


def test_products_of_groups_of_columns_are_refused():
    check_refused(
        lambda m, x: grouped_mm(x, m.w, offs=torch.tensor([2, 4], dtype=torch.int32)),
        {"w": (WIDTH, 6)},
        normal(BATCH, WIDTH),
        match="grouped_mm.*'w'",
    )


def test_mixtral_as_it_comes():
    """Hugging Face's experts multiply in groups unless told otherwise, in single precision."""
    settings = transformers.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)
    model = transformers.MixtralForCausalLM(settings).eval()
    batch = tokens(6)
    other = copy.deepcopy(model)
    other.set_experts_implementation("eager")
    expected = oracle_sqnorms(other, batch, language_losses)
    assert_sqnorms(gs.per_example_norms(model, batch, language_losses), expected, 1e-5)
