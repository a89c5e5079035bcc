"""Rules for the autograd Functions in which TRL's trainers compute their losses."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradstats.capture._registered import register_rule
from gradstats.capture.rules import is_registered

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def register_rules() -> ExitStack:
    """Register rules for imported Functions of TRL whose arguments are those known here.

    Functions that already have a rule keep it.

    Returns:
        ExitStack: removes the rules again, on ``close()`` or at the end of a with block.
    """
    registered = ExitStack()
    for module, name, rule in RULES:
        function = getattr(sys.modules.get(module), name, None)
        if function is None or is_registered(function.apply):
            continue
        taken = list(inspect.signature(function.forward).parameters)[1:]
        if taken == list(inspect.signature(rule).parameters):
            registered.enter_context(register_rule(function, rule))
    return registered


def log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: Sequence[str] = OUTPUTS,
) -> tuple[Any, ...]:
    """log p(target) of each token, and the statistics of p that ``outputs`` names.

    p = softmax(z / temperature) with z = logit_scale · (hidden Wᵀ + bias), soft-capped if
    ``final_logit_softcapping`` is given.
    """
    logits = logits_of(hidden, weight, bias, logit_scale, final_logit_softcapping, temperature)
    logs = logits.log_softmax(-1)

    found = logs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    constant = logits.detach()  # only the entropy has a gradient
    more: dict[str, Callable[[], Tensor]] = {
        "entropy": lambda: -(logs.exp() * logs).sum(-1),
        "log_sum_sq_probs": lambda: (2 * logs.detach()).logsumexp(-1),
        "mean_logits": lambda: constant.mean(-1),
        "is_top1": lambda: constant.argmax(-1) == targets,
    }
    return (found, *(form() if name in outputs else None for name, form in more.items()))


def divergences(
    student_hidden: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    beta: float,
    temperature: float = 1.0,
    student_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_final_logit_softcapping: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Divergence of each token's distribution p from the teacher's q, and the entropy of p.

    KL(q‖p) for β = 0, KL(p‖q) for β = 1, else β KL(q‖m) + (1 − β) KL(p‖m) with the mixture
    m = (1 − β) p + β q. Neither the teacher nor the entropy has a gradient.
    """
    p = logits_of(
        student_hidden, student_weight, student_bias,
        student_logit_scale, student_final_logit_softcapping, temperature,
    ).log_softmax(-1)  # fmt: skip
    with torch.no_grad():
        q = logits_of(
            teacher_hidden, teacher_weight, teacher_bias,
            teacher_logit_scale, teacher_final_logit_softcapping, temperature,
        ).log_softmax(-1)  # fmt: skip
        entropy = -(p.exp() * p).sum(-1)
    if beta == 0:
        return (q.exp() * (q - p)).sum(-1), entropy
    if beta == 1:
        return (p.exp() * (p - q)).sum(-1), entropy
    m = torch.logaddexp(p + math.log(1 - beta), q + math.log(beta))
    return (beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m)).sum(-1), entropy


def logits_of(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    cap: float | None,
    temperature: float,
) -> Tensor:
    """z / temperature, with z = scale · (hidden Wᵀ + bias), soft-capped if ``cap`` is given."""
    logits = functional.linear(hidden, weight, bias).float() * scale
    if cap is not None:
        cap = cap or 1.0  # the Functions take a cap of zero for one
        logits = cap * torch.tanh(logits / cap)
    return logits / temperature


# TRL's modules, their Functions, and what these compute.
RULES: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("trl.kernels.chunked_logprob", "ChunkedLogProbFunction", log_probabilities),
    ("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction", divergences),
)
