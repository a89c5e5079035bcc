"""What two processes do in ``test_distributed`` when Hugging Face's Trainer runs them with DDP."""

from __future__ import annotations

import os
import tempfile
import warnings

import numpy as np
import torch
import torch.distributed as dist
from transformers import Trainer

from gradstats.integrations.transformers import GradStatsCallback
from tests.monitor.expected import gradient_rows, metrics_of
from tests.monitor.processes import RANKS
from tests.monitor.text import (
    Recorder,
    assert_close,
    language_model,
    logged,
    normalised_losses,
    trainer_for,
)


def trainers(rank: int) -> None:
    """Tell the Trainer which of the processes this is, and train twice."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
        ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    for body in (train, train_in_eval_mode):
        with tempfile.TemporaryDirectory() as folder:
            body(rank, folder)


def train(rank: int, folder: str) -> None:
    recorder, callback = Recorder(), GradStatsCallback(every=2, ids="line", alignment=False)
    trainer = trainer_for(
        language_model(), [recorder, callback], folder, max_steps=3, ddp_backend="gloo",
        per_device_train_batch_size=2,
    )  # fmt: skip
    assert trainer.args.world_size == RANKS
    # Both processes together: what each saw of the step, in one batch.
    for number in (0, 2):
        weights, (tokens, labels, count, lines) = recorder.whole(number)
        mine = [tokens, labels, lines]
        theirs = [[torch.empty_like(item) for _ in range(RANKS)] for item in mine]
        for received, item in zip(theirs, mine, strict=True):
            dist.all_gather(received, item)
        tokens, labels, lines = map(torch.cat, theirs)
        model = language_model()
        model.load_state_dict(weights)
        rows = gradient_rows(model, (tokens, labels, count), normalised_losses)
        names = ("grad_norm", "gns/tr_sigma", "gns/g2", "example_grad_norm/max")
        metrics = logged(trainer, "gns/tr_sigma")[number + 1]
        assert_close(metrics, metrics_of(rows), names, 1e-5)
        own = logged(trainer, "loss")[number + 1]
        np.testing.assert_allclose(metrics["grad_norm"], own["grad_norm"], rtol=1e-5)
        np.testing.assert_allclose(metrics["batch_loss"], own["loss"], rtol=1e-5)
    last = callback.monitor.examples(len(lines))
    assert {record.id for record in last} == set(lines.tolist()) and len(lines) == 8


class EvaluatesOnce(Trainer):
    """Runs the first micro-batch of the first process with the model in evaluation mode."""

    def training_step(self, model, *args, **kwargs):
        if dist.get_rank() or self.state.global_step or model.require_backward_grad_sync:
            return super().training_step(model, *args, **kwargs)
        model.eval()
        model.train = lambda mode=True: model
        try:
            return super().training_step(model, *args, **kwargs)
        finally:
            del model.train


def train_in_eval_mode(rank: int, folder: str) -> None:
    """Train where one process cannot measure a step that the other one does."""
    callback = GradStatsCallback(every=2, alignment=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_for(
            language_model(), [callback], folder, max_steps=3, ddp_backend="gloo",
            per_device_train_batch_size=2, trainer=EvaluatesOnce,
        )  # fmt: skip
    assert list(logged(trainer, "gns/tr_sigma")) == [3]
    said = [str(each.message) for each in caught if "step 0" in str(each.message)]
    reason = "another process ran no backward" if rank else "no forward of the model in"
    assert len(said) == 1 and reason in said[0], said
