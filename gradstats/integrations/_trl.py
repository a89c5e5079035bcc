"""The rule of the autograd Function in which TRL's trainers compute log-probabilities."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradstats.capture._registered import RuleHandle, register_rule
from gradstats.capture.rules import is_registered

MODULE, FUNCTION = "trl.kernels.chunked_logprob", "ChunkedLogProbFunction"
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def register_rules() -> RuleHandle | None:
    """Register the rule where TRL has been imported, and has the Function that is known here.

    Returns:
        The handle; None where there is nothing to register, or a rule already.
    """
    function = getattr(sys.modules.get(MODULE), FUNCTION, None)
    if function is None or is_registered(function.apply):
        return None
    taken = list(inspect.signature(function.forward).parameters)[1:]
    known = list(inspect.signature(log_probabilities).parameters)
    return register_rule(function, log_probabilities) if taken == known else None


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
    """log p(target) of each token, and more of its distribution where that is asked for.

    Of p = softmax(z / temperature) with z = logit_scale · (hidden Wᵀ + bias), capped where
    ``final_logit_softcapping`` says so.
    """
    logits = functional.linear(hidden, weight, bias).float() * logit_scale
    if final_logit_softcapping is not None:
        cap = final_logit_softcapping or 1.0  # as the Function takes a cap of zero
        logits = cap * torch.tanh(logits / cap)
    logits = logits / temperature
    logs = logits.log_softmax(-1)

    given = logits.detach()  # what else is asked for has no gradient

    def asked_for(name: str) -> Tensor | None:
        if name not in outputs:
            return None
        if name == "entropy":
            return -(logs.exp() * logs).sum(-1)
        if name == "log_sum_sq_probs":
            return (2 * logs.detach()).logsumexp(-1)
        return given.mean(-1) if name == "mean_logits" else given.argmax(-1) == targets

    found = logs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (found, *map(asked_for, OUTPUTS))
