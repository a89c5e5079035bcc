"""Real text in lines of different lengths, character by character, and a Trainer that reads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

LICENSE = Path(__file__).parents[2] / "LICENSE"
LENGTH, IGNORED = 24, -100


class Lines(torch.utils.data.Dataset):
    """The first lines of the licence, cut to LENGTH characters and padded."""

    def __init__(self, count: int):
        lines = [line.strip() for line in LICENSE.read_text().splitlines() if len(line) > 4]
        self.lines = [line[:LENGTH].encode("ascii") for line in lines[:count]]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict:
        padding = LENGTH - len(self.lines[index])
        tokens = torch.tensor([*self.lines[index], *[0] * padding])
        labels = torch.tensor([*self.lines[index], *[IGNORED] * padding])
        return {"input_ids": tokens, "labels": labels, "line": index + 500}


def language_model(positions: int = LENGTH) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128, n_positions=positions, n_embd=8, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def token_losses(model, batch) -> torch.Tensor:
    """Return the sum of each line's token losses, (B,)."""
    logits = model(input_ids=batch[0]).logits[:, :-1].transpose(1, 2)
    labels = batch[1][:, 1:]
    return functional.cross_entropy(
        logits, labels, ignore_index=IGNORED, reduction="none"
    ).sum(1)  # fmt: skip


def normalised_losses(model, batch) -> torch.Tensor:
    """Return N / #tokens times each line's sum: their mean is the mean over all tokens."""
    return token_losses(model, batch) * len(batch[0]) / batch[2]


class Recorder(TrainerCallback):
    """Keeps the weights and the batches of every optimizer step."""

    def __init__(self):
        self.steps: list[tuple[dict, list]] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.hook = model.register_forward_pre_hook(self.record, with_kwargs=True)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        self.steps.append((weights, []))

    def record(self, model, args, kwargs):
        self.steps[-1][1].append({k: v.clone() for k, v in kwargs.items() if v is not None})

    def on_train_end(self, args, state, control, **kwargs):
        self.hook.remove()

    def whole(self, number: int) -> tuple[dict, tuple]:
        """Return weights and (tokens, labels, number of tokens, lines) of one optimizer step."""
        weights, batches = self.steps[number]
        tokens, labels, lines = (
            torch.cat([batch[column] for batch in batches])
            for column in ("input_ids", "labels", "line")
        )
        return weights, (tokens, labels, batches[0]["num_items_in_batch"], lines)


def trainer_for(
    model, callbacks, folder, data=None, resume=None, collator=None, trainer=Trainer, **options
) -> Trainer:
    settings = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "max_steps": 5,
        "save_strategy": "no",
        **options,
    }
    arguments = TrainingArguments(
        str(folder), use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
        report_to=settings.pop("report_to", "none"), **settings,
    )  # fmt: skip
    data = Lines(16) if data is None else data
    made = trainer(
        model, arguments, train_dataset=data, data_collator=collator, callbacks=callbacks
    )
    made.train(resume_from_checkpoint=resume)
    return made


def logged(trainer, name: str) -> dict[int, dict[str, float]]:
    """Return step → the entries of the Trainer's log that have a value of this name."""
    return {entry["step"]: entry for entry in trainer.state.log_history if name in entry}


def assert_close(metrics: dict, truth: dict, names, rtol: float) -> None:
    for name in names:
        np.testing.assert_allclose(metrics[name], truth[name], rtol=rtol, err_msg=name)
