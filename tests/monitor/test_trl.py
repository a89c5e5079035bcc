"""What TRL's trainers do that others do not: pairs under each other, and a fused output layer."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from tests.monitor.expected import gradient_rows, metrics_of
from tests.oracle import check_model, check_products
from tests.rules.operation import uneven_loss

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from gradstats.capture.rules import is_registered  # noqa: E402
from gradstats.integrations import _trl  # noqa: E402
from gradstats.integrations.transformers import GradStatsCallback  # noqa: E402
from tests.monitor.text import (  # noqa: E402
    IGNORED,
    LENGTH,
    Lines,
    assert_close,
    language_model,
    logged,
    trainer_for,
)

NAMES = ("grad_norm", "example_grad_norm/mean", "example_grad_norm/max", "gns/tr_sigma", "gns/g2")
# The loss is computed in float32.
RTOL = 1e-5


class Pairs(torch.utils.data.Dataset):
    """Each line beside the one that comes eight lines later, as an answer and a worse one."""

    def __init__(self):
        self.lines = Lines(16)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[dict]:
        return [self.lines[index], self.lines[index + 8]]


def one_under_the_other(pairs):
    rows = [row for answers in zip(*pairs, strict=True) for row in answers]
    return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}


def preference_losses(model, tokens, labels):
    """Return −log σ(log p(answer) − log p(worse one)) of each pair, (B,)."""
    logits = model(input_ids=tokens).logits[:, :-1]
    wanted = labels[:, 1:]
    logs = -functional.cross_entropy(logits.mT, wanted, ignore_index=IGNORED, reduction="none")
    better, worse = logs.sum(1).chunk(2)
    return -functional.logsigmoid((better - worse) / LENGTH)


def losses_of_pairs(model, batch):
    """Return the same, of pairs (B, 2, T)."""
    tokens, labels = (torch.cat([*each.unbind(1)]) for each in batch)
    return preference_losses(model, tokens, labels)


class Preference(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return preference_losses(model, inputs["input_ids"], inputs["labels"]).mean()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_pairs_whose_rows_stand_under_each_other(tmp_path):
    model, callback = language_model(), GradStatsCallback(every=1, rows_per_example=2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    seen: list = []

    def collate(pairs):
        seen.append(one_under_the_other(pairs))
        return seen[-1]

    trainer = trainer_for(
        model, [callback], tmp_path, Pairs(), collator=collate, trainer=Preference, max_steps=1,
        per_device_train_batch_size=4, gradient_accumulation_steps=1,
    )  # fmt: skip
    (batch,) = seen[:1]
    pairs = tuple(torch.stack(batch[name].chunk(2), 1) for name in ("input_ids", "labels"))
    model.load_state_dict(weights)
    rows = gradient_rows(model, pairs, losses_of_pairs)
    ours, own = logged(trainer, "gns/tr_sigma")[1], logged(trainer, "loss")[1]
    assert len(rows) == len(callback.monitor.histograms()["example_grad_norm"]) == 4
    assert_close(ours, metrics_of(rows), NAMES, RTOL)
    assert ours["grad_norm"] == pytest.approx(own["grad_norm"], rel=RTOL)
    assert callback.state()["args"]["rows_per_example"] == 2
    np.testing.assert_allclose(ours["batch_loss"], own["loss"], rtol=RTOL)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_pairs_taken_for_examples_are_refused_with_what_to_pass(tmp_path):
    model, callback = language_model(), GradStatsCallback(every=1)
    with pytest.raises(gs.CoupledExamplesError, match=r"LogSigmoid.*rows_per_example=2\)"):
        trainer_for(
            model, [callback], tmp_path, Pairs(), collator=one_under_the_other,
            trainer=Preference, max_steps=1,
        )  # fmt: skip
    assert not model._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_rows_that_are_no_whole_number_of_examples(tmp_path):
    callback = GradStatsCallback(every=1, rows_per_example=2)
    with pytest.raises(gs.TrackingError, match="1 more than 1 times the 2 rows"):
        trainer_for(language_model(), [callback], tmp_path, max_steps=1)
    with pytest.raises(gs.TrackingError, match="ids is 3, expected the name of an input"):
        GradStatsCallback(ids=3)
    for number in (0, -1, 1.5, "2"):
        with pytest.raises(gs.TrackingError, match="rows_per_example is"):
            GradStatsCallback(rows_per_example=number)


class ChunkedLogProbFunction(torch.autograd.Function):
    """As TRL's of that name is called, and as it can be differentiated; in one chunk."""

    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        bias,
        targets,
        temperature,
        chunk_size,
        final_logit_softcapping=None,
        logit_scale=1.0,
        outputs=_trl.OUTPUTS,
    ):
        z = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
        z = z * logit_scale
        cap = final_logit_softcapping
        slope = torch.ones_like(z) if cap is None else 1 - (z / cap).tanh().square()
        z = (z if cap is None else cap * (z / cap).tanh()) / temperature
        p = z.softmax(1)
        entropy = -(p * p.log()).sum(1)
        ctx.save_for_backward(hidden, weight, bias, targets, p, entropy, slope)
        ctx.scale = logit_scale / temperature
        other = {
            "entropy": entropy.float(),
            "log_sum_sq_probs": p.square().sum(1).log().float(),
            "mean_logits": z.mean(1).float(),
            "is_top1": z.argmax(1) == targets,
        }
        found = [other[name] if name in outputs else None for name in _trl.OUTPUTS]
        ctx.mark_non_differentiable(*(each for each in found[1:] if each is not None))
        return (p.log().gather(1, targets[:, None])[:, 0].float(), *found)

    @staticmethod
    def backward(ctx, grad, grad_entropy, *others):
        hidden, weight, bias, targets, p, entropy, slope = ctx.saved_tensors
        chosen = functional.one_hot(targets, p.shape[1])
        dz = grad.double()[:, None] * (chosen - p)
        if grad_entropy is not None:
            dz = dz - grad_entropy.double()[:, None] * p * (p.log() + entropy[:, None])
        dz = (dz * slope * ctx.scale).to(hidden.dtype)
        of_bias = None if bias is None else dz.sum(0)
        return dz @ weight, dz.T @ hidden, of_bias, *(None for _ in range(6))


class Head(nn.Module):
    """Log-probabilities of the next tokens, and their entropy."""

    def __init__(self, bias: bool, **options):
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=bias)
        self.options = options

    def forward(self, tokens):
        hidden = self.table(tokens[:, :-1]).tanh()
        found = ChunkedLogProbFunction.apply(
            hidden.flatten(0, 1), self.head.weight, self.head.bias, tokens[:, 1:].flatten(), 0.7, 4,
            *self.options.values(),
        )  # fmt: skip
        assert not (found[2].requires_grad or found[3].requires_grad)
        both = torch.stack([found[0], found[1] + 0.3 * found[2] * found[3]], 1)
        return both.view(len(tokens), -1)


class ChunkedDivergenceFunction(torch.autograd.Function):
    """As TRL's of that name is called; in one chunk, in float64, with sums in place of log p."""

    @staticmethod
    def forward(
        ctx,
        student_hidden,
        student_weight,
        student_bias,
        teacher_hidden,
        teacher_weight,
        teacher_bias,
        beta,
        temperature=1.0,
        student_logit_scale=1.0,
        student_final_logit_softcapping=None,
        teacher_logit_scale=1.0,
        teacher_final_logit_softcapping=None,
    ):
        def probabilities(hidden, weight, bias, scale, cap):
            z = scale * (hidden.double() @ weight.double().T + (0 if bias is None else bias))
            z = z if cap is None else cap * (z / cap).tanh()
            return (z / temperature).exp() / (z / temperature).exp().sum(1, keepdim=True)

        given = [student_hidden, student_weight, student_bias]
        with torch.enable_grad():
            copies = [each if each is None else each.detach().requires_grad_() for each in given]
            p = probabilities(*copies, student_logit_scale, student_final_logit_softcapping)
            q = probabilities(
                teacher_hidden, teacher_weight, teacher_bias,
                teacher_logit_scale, teacher_final_logit_softcapping,
            ).detach()  # fmt: skip
            m = (1 - beta) * p + beta * q
            if beta == 0:
                found = (q * (q / p).log()).sum(1)
            elif beta == 1:
                found = (p * (p / q).log()).sum(1)
            else:
                found = (beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum(1)
        ctx.copies, ctx.found = copies, found
        entropy = -(p * p.log()).sum(1).detach().float()
        ctx.mark_non_differentiable(entropy)
        return found.detach().float(), entropy

    @staticmethod
    def backward(ctx, grad, _):
        known = [each for each in ctx.copies if each is not None]
        rows = iter(torch.autograd.grad(ctx.found, known, grad.double(), retain_graph=True))
        return *(None if each is None else next(rows) for each in ctx.copies), *(None,) * 9


class Taught(nn.Module):
    """Divergences of the next token's distribution from a teacher's."""

    def __init__(self, bias: bool, beta: float, *options):
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=bias)
        self.options = (beta, 0.7, *options)
        self.register_buffer("teacher_table", torch.randn(11, 4))
        self.register_buffer("teacher_weight", torch.randn(11, 4))

    def forward(self, tokens):
        with torch.no_grad():
            teacher = self.teacher_table[tokens].tanh().flatten(0, 1)
        hidden = self.table(tokens).tanh().flatten(0, 1)
        found, entropy = ChunkedDivergenceFunction.apply(
            hidden, self.head.weight, self.head.bias, teacher, self.teacher_weight, None,
            *self.options,
        )  # fmt: skip
        assert not entropy.requires_grad
        return found.view(len(tokens), -1)


@pytest.fixture
def registered(monkeypatch):
    functions = (ChunkedLogProbFunction, ChunkedDivergenceFunction)
    for (name, _, _), function in zip(_trl.RULES, functions, strict=True):
        module = ModuleType(name)
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
    with _trl.register_rules():
        assert all(is_registered(each.apply) for each in functions)
        _trl.register_rules().close()  # of what another has registered
        assert all(is_registered(each.apply) for each in functions)
        yield
    assert not any(is_registered(each.apply) for each in functions)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("capping", [None, 2.0])
def test_the_output_layer_that_forms_no_logits(registered, bias, capping):
    model = Head(bias, capping=capping, scale=1.5)
    tokens = torch.randint(11, (3, 5))
    # The Function computes in float32 whatever the model's dtype is.
    check_model(model, (tokens,), uneven_loss, rtol=2e-3, gradient_rtol=1e-5)
    check_products(model, (tokens,), uneven_loss, rtol=1e-3)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("capping", [None, 2.0])
def test_the_divergence_that_forms_no_logits(registered, bias, beta, capping):
    model = Taught(bias, beta, 1.5, capping, 0.5, capping)
    tokens = torch.randint(11, (3, 5))
    check_model(model, (tokens,), uneven_loss, rtol=2e-3, gradient_rtol=1e-5)
    check_products(model, (tokens,), uneven_loss, rtol=1e-3)


def test_a_function_that_takes_other_arguments_gets_no_rule(monkeypatch):
    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, targets):
            return hidden

    module = ModuleType(_trl.RULES[0][0])
    module.ChunkedLogProbFunction = Other
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with _trl.register_rules():
        assert not is_registered(Other.apply)
