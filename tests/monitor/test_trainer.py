"""The callback of Hugging Face's Trainer in real runs: what it logs against the oracle."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import pickle
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

import gradstats as gs
from tests.losses import losses_of
from tests.monitor.digits import Digits, classifier
from tests.monitor.expected import gradient_rows, metrics_of
from tests.oracle import assert_unchanged, snapshot

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from gradstats.integrations._forwards import bounds_in, without_padding  # noqa: E402
from gradstats.integrations._trainer import from_json, to_json  # noqa: E402
from gradstats.integrations.transformers import GradStatsCallback  # noqa: E402
from tests.monitor.text import (  # noqa: E402
    IGNORED,
    LENGTH,
    Lines,
    Recorder,
    assert_close,
    language_model,
    logged,
    normalised_losses,
    trainer_for,
)

pytestmark = [
    # The Trainer asks the data loader to pin memory even on a machine without an accelerator.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),
]

NAMES = ("grad_norm", "example_grad_norm/p50", "gns/tr_sigma", "gns/g2", "m_coherence")
# The loss of causal language models is computed in float32.
RTOL = 1e-5


def rows_of(recorder, number: int):
    weights, batch = recorder.whole(number)
    model = language_model()
    model.load_state_dict(weights)
    return gradient_rows(model, batch[:3], normalised_losses), batch


def test_token_counts_and_accumulation_against_the_oracle(tmp_path):
    """Lines of different lengths: the mean is over the tokens of all micro-batches together."""
    recorder, callback = Recorder(), GradStatsCallback(every=2, ids="line")
    trainer = trainer_for(
        language_model(), [recorder, callback], tmp_path, max_grad_norm=0.01, max_steps=6
    )
    ours, own = logged(trainer, "gns/tr_sigma"), logged(trainer, "loss")
    assert list(ours) == [1, 3, 5] and list(own) == [1, 2, 3, 4, 5, 6]
    expected = np.zeros(16)
    for number in (0, 2, 4):
        rows, batch = rows_of(recorder, number)
        metrics = ours[number + 1]
        assert_close(metrics, metrics_of(rows), NAMES, RTOL)
        # Step 2 ends the epoch: four lines are left for two micro-batches.
        assert len(rows) == (4 if number == 2 else 6)
        assert metrics["grad_norm"] == pytest.approx(own[number + 1]["grad_norm"], rel=RTOL)
        assert metrics["batch_loss"] == pytest.approx(own[number + 1]["loss"], rel=RTOL)
        assert metrics["epoch"] == own[number + 1]["epoch"]
        rate = own[number + 1]["learning_rate"]
        np.add.at(expected, batch[3].numpy() - 500, rate * (rows**2).sum(1))
    assert callback.monitor.steps == 6  # of which the last was not measured
    table = callback.monitor.self_influence
    assert table.ids.tolist() == (np.flatnonzero(expected) + 500).tolist()
    np.testing.assert_allclose(table.values, expected[expected > 0], rtol=RTOL)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("ours_first", [True, False])
def test_a_copy_of_the_model_is_not_measured(tmp_path, copied, ours_first):
    """As of a callback that keeps an average of the weights."""

    class Average(transformers.TrainerCallback):
        model = None

        def on_step_begin(self, args, state, control, model=None, **kwargs):
            self.model = self.model or copied(model)

    average, callback, recorder = Average(), GradStatsCallback(every=1), Recorder()
    callbacks = [callback, average] if ours_first else [average, callback]
    trainer = trainer_for(language_model(), [recorder, *callbacks], tmp_path, max_steps=1)
    assert list(logged(trainer, "gns/tr_sigma")) == [1]
    rows, batch = rows_of(recorder, 0)
    copy_of_it = average.model
    for _ in range(2):
        normalised_losses(copy_of_it, batch[:3]).mean().backward()
    assert _get_current_function_mode_stack() == []
    norms = gs.per_example_norms(copy_of_it, batch[:3], normalised_losses)
    np.testing.assert_allclose(norms.sqnorm.numpy(), (rows**2).sum(1), rtol=RTOL)


class Whole(torch.utils.data.Dataset):
    """Lines without padding."""

    def __init__(self, count: int):
        self.lines = Lines(count).lines

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": [*self.lines[index]]}


class Packed:
    """Packs lines into one row and, as TRL's collator does, fills it up to a multiple.

    Attributes:
        order: the lines of each batch.
    """

    pad_token_id = 0

    def __init__(self, named: bool, start: int, multiple: int | None):
        self.pack = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=named)
        self.start, self.pad_to_multiple_of = start, multiple
        self.order: list[list[bytes]] = []

    def __call__(self, rows):
        self.order.append([bytes(row["input_ids"]) for row in rows])
        batch = self.pack(rows)
        if self.pad_to_multiple_of is not None:
            self.fill_up(batch, -batch["input_ids"].shape[1] % self.pad_to_multiple_of)
        return {**batch, "position_ids": batch["position_ids"] + self.start}

    def fill_up(self, batch, short):
        assert short > 1
        for name, filling in (("input_ids", 0), ("labels", IGNORED), ("position_ids", 0)):
            batch[name] = functional.pad(batch[name], (0, short), value=filling)
        if (bounds := batch.get("cu_seq_lens_q")) is not None:
            each = bounds[-1] + torch.arange(1, short + 1, dtype=bounds.dtype)
            batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = torch.cat([bounds, each])


@pytest.mark.parametrize("multiple", [None, 20])
@pytest.mark.parametrize(
    ("named", "start"),
    [(False, 0), (False, 2), (True, 0)],
    ids=["position_ids", "position_ids from two", "cu_seq_lens_q"],
)
def test_lines_packed_into_one_row(tmp_path, named, start, multiple):
    """As many examples as lines, each as it is alone, whatever fills the row up."""
    data, collate = Whole(5), Packed(named, start, multiple)
    model, callback = language_model(LENGTH + start), GradStatsCallback(every=1)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = trainer_for(
        model, [callback], tmp_path, data, collator=collate, max_steps=1, max_grad_norm=0.0
    )
    model.load_state_dict(weights)
    lines = [line for batch in collate.order for line in batch]
    assert len(lines) == 5
    tokens = sum(len(line) - 1 for line in lines)

    def loss(model, ids):
        share = (ids.shape[1] - 1) / tokens
        places = torch.arange(ids.shape[1])[None] + start
        whole = model(input_ids=ids, labels=ids, position_ids=places).loss
        return whole[None] * share * len(lines)

    rows = np.concatenate([gradient_rows(model, torch.tensor([[*line]]), loss) for line in lines])
    metrics = logged(trainer, "gns/tr_sigma")[1]
    assert_close(metrics, metrics_of(rows), NAMES, RTOL)
    assert metrics["grad_norm"] == pytest.approx(np.linalg.norm(rows.mean(0)), rel=RTOL)


def test_bounds_of_packed_lines_by_their_positions():
    row = torch.tensor([[0, 1, 2, 0, 1, 0]])
    # Models such as RoBERTa count positions from two, and their padding is at one.
    for start in (0, 2):
        assert bounds_in({"position_ids": row + start}).tolist() == [0, 3, 5, 6]
    padded = torch.tensor([[2, 3, 4, 2, 3, 1, 1]])
    given = torch.tensor([0, 4, 6])
    assert bounds_in({"position_ids": row, "cu_seq_lens_q": given}) is given
    # Padding may begin anew too, a line may begin elsewhere, and be alone.
    assert bounds_in({"position_ids": row, "attention_mask": row}) is None
    for positions in (row[:, 1:], row[:, :3], row[:, :3] + 2, padded, row[0], None):
        assert bounds_in({"position_ids": positions}) is None


def test_what_fills_a_packed_row_up_belongs_to_its_last_example():
    tokens = torch.tensor([5, 6, 7, 0, 5, 8, 0, 0])
    bounds = torch.tensor([0, 3, 4, 5, 6, 7, 8], dtype=torch.int32)
    assert without_padding(bounds, tokens, 0).tolist() == [0, 3, 4, 5, 8]
    assert without_padding(bounds, tokens, 9) is bounds
    alone = torch.tensor([0, 1, 2])
    assert without_padding(alone, torch.zeros(2, dtype=torch.long), 0).tolist() == [0, 2]


def test_lines_packed_into_one_row_are_no_pairs(tmp_path):
    model, callback = language_model(), GradStatsCallback(every=1, rows_per_example=2)
    state = snapshot(model)
    with pytest.raises(gs.TrackingError, match=r"packed 3 examples .* without rows_per_example="):
        trainer_for(
            model, [callback], tmp_path, Whole(5),
            collator=transformers.DataCollatorWithFlattening(),
        )  # fmt: skip
    assert_unchanged(model, state)


def test_one_padded_line_is_one_example(tmp_path):
    """Its positions begin anew in the padding, which the attention mask leaves out."""

    def collate(rows):
        batch = transformers.default_data_collator(rows)
        mask = (batch["labels"] != IGNORED).long()
        positions = (mask.cumsum(1) - 1) * mask
        return {**batch, "attention_mask": mask, "position_ids": positions}

    lines = Lines(16)
    padded = [line for line in map(lines.__getitem__, range(16)) if line["labels"][-1] == IGNORED]
    callback = GradStatsCallback(every=1, ids="line")
    trainer = trainer_for(
        language_model(), [callback], tmp_path, padded, collator=collate, max_steps=1,
        per_device_train_batch_size=1, gradient_accumulation_steps=2,
    )  # fmt: skip
    assert len(callback.monitor.histograms()["example_grad_norm"]) == 2
    ours, own = logged(trainer, "gns/tr_sigma")[1], logged(trainer, "loss")[1]
    assert ours["grad_norm"] == pytest.approx(own["grad_norm"], rel=RTOL)


class Classifier(nn.Module):
    """A model that knows nothing of token counts: it returns the mean of its batch."""

    main_input_name = "images"

    def __init__(self):
        super().__init__()
        self.net = classifier()

    def forward(self, images, labels, fail=None):
        loss = functional.cross_entropy(self.net(images), labels)
        if fail is not None:
            raise fail
        return {"loss": loss}


class TakesAnything(Classifier):
    """The Trainer takes it to divide by a token count, which it is given, and does not divide."""

    def forward(self, images, labels, num_items_in_batch=None, **others):
        assert num_items_in_batch is not None and not others
        return super().forward(images, labels)


class Images(Digits):
    def __getitem__(self, index: int) -> dict:
        return {"images": self.images[index], "labels": self.labels[index]}


@pytest.mark.parametrize("kind", [Classifier, TakesAnything])
def test_means_over_micro_batches_against_the_oracle(tmp_path, kind):
    seen: list = []
    model = kind()

    class Keep(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            weights = {name: value.clone() for name, value in model.net.state_dict().items()}
            seen.append((weights, []))

    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen[-1][1].append((kwargs["images"], kwargs["labels"])),
        with_kwargs=True,
    )
    callback = GradStatsCallback(every=2, layers="net.*")
    trainer = trainer_for(model, [Keep(), callback], tmp_path, Images(14), max_steps=5)
    ours, own = logged(trainer, "gns/tr_sigma"), logged(trainer, "loss")
    for number in (0, 2, 4):
        weights, batches = seen[number]
        network = classifier()
        network.load_state_dict(weights)
        whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
        # The last step of an epoch has a micro-batch of two, whose examples weigh as much.
        weight = torch.cat([torch.ones(len(y), dtype=torch.float64) / len(y) for _, y in batches])
        weight *= len(whole[1]) / (len(batches) if kind is Classifier else 1)
        rows = gradient_rows(
            network, (*whole, weight), lambda m, batch: losses_of(m, batch) * batch[2]
        )
        metrics = ours[number + 1]
        assert_close(metrics, metrics_of(rows), NAMES, 1e-9)
        assert metrics["batch_loss"] == pytest.approx(own[number + 1]["loss"])
        assert "gns/net.2/b_simple" in metrics


@pytest.mark.parametrize("fused", [False, True])
def test_training_and_checkpoints_are_the_same(tmp_path, fused):
    models = [language_model(), language_model()]
    for model, callbacks in zip(models, ([GradStatsCallback(2, fused=fused)], []), strict=True):
        trainer_for(model, callbacks, tmp_path / str(len(callbacks)), save_strategy="steps",
                    save_steps=5)  # fmt: skip
    files = [tmp_path / name / "checkpoint-5" / "model.safetensors" for name in ("1", "0")]
    if not fused:
        assert files[0].read_bytes() == files[1].read_bytes()
    for got, want in zip(*(model.parameters() for model in models), strict=True):
        if fused:
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)
        else:
            assert torch.equal(got, want)


def test_a_resumed_run_continues(tmp_path):
    whole = GradStatsCallback(every=2, ids="line")
    trainer_for(language_model(), [whole], tmp_path, save_strategy="steps", save_steps=3)
    options = {"resume": tmp_path / "checkpoint-3"}
    trainer = trainer_for(
        language_model(), [GradStatsCallback(every=2, ids="line")], tmp_path,
        restore_callback_states_from_checkpoint=True, **options,
    )  # fmt: skip
    (second,) = (c for c in trainer.callback_handler.callbacks if type(c) is GradStatsCallback)
    assert second.monitor.history["step"] == whole.monitor.history["step"] == [0, 2, 4]
    for name, values in whole.monitor.history.items():
        np.testing.assert_allclose(second.monitor.history[name], values, rtol=1e-9, err_msg=name)
    table, other = whole.monitor.self_influence, second.monitor.self_influence
    assert table.ids.tolist() == other.ids.tolist()
    np.testing.assert_allclose(other.values, table.values)
    with pytest.warns(UserWarning, match="restore_callback_states_from_checkpoint=True"):
        trainer_for(language_model(), [GradStatsCallback(every=2, ids="line")], tmp_path, **options)


def test_another_train_of_the_model_continues(tmp_path):
    model, callback = Classifier(), GradStatsCallback(every=2)
    trainer = trainer_for(model, [callback], tmp_path, Images(14), max_steps=3)
    monitor = callback.monitor
    before = {name: list(values) for name, values in monitor.history.items()}
    assert before["step"] == [0, 2]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    trainer.train()
    assert callback.monitor is monitor
    assert monitor.history["step"] == [0, 2, 0, 2]
    for name, values in before.items():
        np.testing.assert_array_equal(monitor.history[name][:2], values)
    assert not torch.equal(weights[0], model.net[0].weight)
    trainer_for(Classifier(), [callback], tmp_path, Images(14), max_steps=1)
    assert callback.monitor is not monitor and callback.monitor.history["step"] == [0]


class Small(transformers.Trainer):
    """Has no memory for batches of eight, as it finds in its third step."""

    def compute_loss(self, model, inputs, **options):
        loss = super().compute_loss(model, inputs, **options)
        if len(inputs["labels"]) == 8 and self.state.global_step == 2:
            raise RuntimeError("CUDA out of memory.")
        return loss


def test_a_smaller_batch_is_found(tmp_path):
    """Like the Trainer's log, the records start again with it; those of an earlier run stay."""
    options = {"gradient_accumulation_steps": 1, "max_steps": 5, "auto_find_batch_size": True}
    model, callback = Classifier(), GradStatsCallback(every=2)
    trainer_for(model, [callback], tmp_path, Images(48), per_device_train_batch_size=4, **options)
    monitor = callback.monitor
    before = {name: list(values) for name, values in monitor.history.items()}
    assert before["step"] == [0, 2, 4]
    trainer = trainer_for(
        model, [callback], tmp_path, Images(48), trainer=Small, per_device_train_batch_size=8,
        **options,
    )  # fmt: skip
    assert callback.monitor is monitor and monitor.history["step"] == [0, 2, 4] * 2
    ours = logged(trainer, "gns/tr_sigma")
    assert list(ours) == [1, 3, 5]
    for name, values in before.items():
        own = [entry.get(name) for entry in ours.values()]
        np.testing.assert_array_equal(monitor.history[name][:3], values)
        if name != "step":
            np.testing.assert_array_equal(monitor.history[name][3:], own)


def test_off_steps_touch_nothing(tmp_path):
    model = language_model()
    found: list[tuple] = []

    class Look(transformers.TrainerCallback):
        """Looks at the model before each forward and before each optimizer step."""

        def on_step_begin(self, args, state, control, **kwargs):
            self.look()

        on_substep_end = on_step_begin

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            self.look()
            found.append(tuple(self.seen))
            self.seen = []

        seen: list = []  # noqa: RUF012

        def look(self):
            state = snapshot(model)
            hooks = any(any(counts) for counts in state["hooks"].values())
            self.seen.append(hooks or bool(_get_current_function_mode_stack()))

    trainer = trainer_for(model, [GradStatsCallback(every=2), Look()], tmp_path, max_steps=4)
    waits, idle = (True, True, False), (False, False, False)
    assert found == [waits, idle, waits, idle]
    assert list(logged(trainer, "gns/tr_sigma")) == [1, 3]
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_an_exception_leaves_nothing_behind(tmp_path):
    model, callback = Classifier(), GradStatsCallback(every=1)
    state = snapshot(model)

    def collate(rows):
        batch = transformers.default_data_collator(rows)
        return {**batch, "fail": RuntimeError("the user's own")}

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Images(8), callbacks=[callback], data_collator=collate
    )
    with pytest.raises(RuntimeError, match="the user's own"):
        trainer.train()
    assert_unchanged(model, state)
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize("own", [False, True])
def test_an_exception_in_backward_leaves_nothing_behind(tmp_path, own):
    model, callback = Classifier(), GradStatsCallback(every=1)
    state = snapshot(model)
    handle = model.net[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError), pytest.warns(UserWarning, match="hooks on 'net.0.w"):
        trainer_for(model, [callback], tmp_path, Images(14))
    handle.remove()
    model.zero_grad()
    assert_unchanged(model, state)
    assert not _get_current_function_mode_stack()
    callback = callback if own else GradStatsCallback(every=1)
    trainer = trainer_for(model, [callback], tmp_path, Images(14), max_steps=1)
    assert list(logged(trainer, "gns/tr_sigma")) == [1]
    assert "training_step" not in vars(trainer)


def test_after_an_exception_of_another_callback_the_model_is_free(tmp_path):
    class Broken(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            raise RuntimeError("no connection")

    model = Classifier()
    hooks = snapshot(model)["hooks"]
    with pytest.raises(RuntimeError, match="no connection"):
        trainer_for(model, [GradStatsCallback(every=1), Broken()], tmp_path, Images(14))
    images, labels = (torch.stack([Images(14)[n][key] for n in range(3)]) for key in Images(14)[0])
    for _ in range(2):
        model.train()(images, labels)["loss"].backward()
    assert not _get_current_function_mode_stack()
    # Another run of the model removes what waits for its next forward.
    trainer_for(model, [GradStatsCallback(every=1)], tmp_path, Images(14), max_steps=1)
    assert snapshot(model)["hooks"] == hooks


class CallsTwice(transformers.Trainer):
    """Calls its model with one row, and then with the batch."""

    def compute_loss(self, model, inputs, **kwargs):
        first = {name: value[:1] for name, value in inputs.items()}
        return model(**first)["loss"] + model(**inputs)["loss"]


class CallsWithAll(transformers.Trainer):
    """Calls its model several times with the whole batch, by name or not."""

    named: tuple[bool, ...] = ()

    def compute_loss(self, model, inputs, **kwargs):
        calls = [
            model if named else lambda input_ids, **others: model(input_ids, **others)
            for named in self.named
        ]
        own = super().compute_loss
        return sum(own(call, inputs, **kwargs) for call in calls)


@pytest.mark.parametrize("named", [(True, True), (False, True), (True, False)])
def test_several_forwards_in_one_step(tmp_path, monkeypatch, named):
    monkeypatch.setattr(CallsWithAll, "named", named)
    recorder, model = Recorder(), language_model()
    trainer = trainer_for(
        model, [recorder, GradStatsCallback(every=1)], tmp_path, trainer=CallsWithAll,
        gradient_accumulation_steps=1, max_steps=1,
    )  # fmt: skip
    seen = recorder.steps[0][1]
    seen[:] = [inputs for inputs in seen if "input_ids" in inputs][:1]
    rows, _ = rows_of(recorder, 0)
    assert_close(logged(trainer, "gns/tr_sigma")[1], metrics_of(2 * rows), NAMES, RTOL)


def test_another_number_of_rows_in_one_step_is_refused(tmp_path):
    model = language_model()
    with pytest.raises(
        gs.TrackingError, match=r"with 1 rows and then, .* with 3, so it is not known"
    ):
        trainer_for(model, [GradStatsCallback(every=1)], tmp_path, trainer=CallsTwice)
    assert not _get_current_function_mode_stack()


def test_another_number_of_rows_by_names_that_are_not_known_is_refused(tmp_path):
    """A model that is no transformers model does not say which input is the main one."""
    model = Classifier()
    model.main_input_name = "input_ids"
    message = r"with 1 rows and then, .* with \d+, so it is not known.*torch\.no_grad\(\)"
    with pytest.raises(gs.TrackingError, match=message):
        callback = GradStatsCallback(every=1)
        trainer_for(model, [callback], tmp_path, Images(14), trainer=CallsTwice, max_steps=1)
    assert not _get_current_function_mode_stack()


class LooksFirst(transformers.Trainer):
    """Calls its model with one row, without gradients, before each batch."""

    def compute_loss(self, model, inputs, **kwargs):
        with torch.no_grad():
            model(**{name: value[:1] for name, value in inputs.items()})
        return super().compute_loss(model, inputs, **kwargs)


def test_forwards_without_gradients_are_not_looked_at(tmp_path):
    callbacks = [GradStatsCallback(every=1) for _ in range(2)]
    for callback, trainer in zip(callbacks, (transformers.Trainer, LooksFirst), strict=True):
        trainer_for(Classifier(), [callback], tmp_path, Images(14), trainer=trainer, max_steps=1)
    plain, looking = (callback.monitor.history for callback in callbacks)
    np.testing.assert_equal(looking, plain)
    assert plain["step"] == [0]


class Sometimes(transformers.Trainer):
    """Calls its model in evaluation mode, or not at all, in the second and third step."""

    way = "evaluation mode"

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.state.global_step not in (1, 2):
            return super().training_step(model, inputs, num_items_in_batch)
        if self.way == "no forward":
            return torch.zeros(())
        loss = model.eval()(**inputs)["loss"]
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("way", ["evaluation mode", "no forward"])
def test_steps_whose_forward_is_not_seen(tmp_path, monkeypatch, way):
    """Nothing is logged of them, least of all what an earlier step measured."""
    monkeypatch.setattr(Sometimes, "way", way)
    message = "optimizer step [12] was not measured: .* call of the whole model"
    with pytest.warns(gs.GradStatsWarning, match=message):
        trainer = trainer_for(
            Classifier(), [GradStatsCallback(every=1)], tmp_path, Images(14), max_steps=4,
            gradient_accumulation_steps=1, trainer=Sometimes,
        )  # fmt: skip
    ours, own = logged(trainer, "gns/tr_sigma"), logged(trainer, "loss")
    assert list(ours) == [1, 4]
    for step, metrics in ours.items():
        assert metrics["grad_norm"] == pytest.approx(own[step]["grad_norm"])


class Stream(torch.utils.data.IterableDataset):
    """Lines whose number is not known beforehand."""

    def __init__(self, count: int):
        self.lines = Lines(count)

    def __iter__(self):
        return iter([self.lines[index] for index in range(len(self.lines))])


def test_an_epoch_that_ends_within_a_step(tmp_path):
    """The Trainer adds what was left of it to the next step, of which no statistic is known."""
    model, callback = language_model(), GradStatsCallback(every=1)
    state = snapshot(model)
    with pytest.warns(gs.GradStatsWarning, match="optimizer step [24] was not measured: it spans"):
        trainer = trainer_for(model, [callback], tmp_path, Stream(15), max_steps=6)
    ours, own = logged(trainer, "gns/tr_sigma"), logged(trainer, "loss")
    assert list(ours) == [1, 2, 4, 6] and list(own) == [1, 2, 3, 4, 5, 6]
    for step, metrics in ours.items():
        assert metrics["grad_norm"] == pytest.approx(own[step]["grad_norm"], rel=RTOL)
    model.zero_grad()
    assert snapshot(model)["hooks"] == state["hooks"]


def test_a_step_of_the_trainers_own_stays(tmp_path):
    class Own(transformers.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.own = self.training_step = functools.partial(super().training_step)

    callback = GradStatsCallback(every=1)
    trainer = trainer_for(Classifier(), [callback], tmp_path, Images(14), trainer=Own, max_steps=1)
    assert list(logged(trainer, "gns/tr_sigma")) == [1]
    assert vars(trainer)["training_step"] is trainer.own


def test_a_state_without_ids_is_kept_as_json():
    model = nn.Linear(4, 3)
    first, second = (gs.Monitor(model, every=1) for _ in range(2))
    with first.step(2):
        losses_of(model, (torch.randn(2, 4), torch.tensor([0, 2]))).mean().backward()
    second.load_state_dict(from_json(json.loads(json.dumps(to_json(first.state_dict())))))
    assert len(first.history["step"]) == 1
    np.testing.assert_equal(second.history, first.history)


def test_two_callbacks_on_one_trainer(tmp_path):
    """The second finds the model tracked, and says so; nothing is left of either."""
    model = Classifier()
    state = snapshot(model)
    with pytest.raises(gs.TrackingError, match="already tracked by another open context"):
        trainer_for(model, [GradStatsCallback(1), GradStatsCallback(2)], tmp_path, Images(14))
    assert_unchanged(model, state)
    assert not _get_current_function_mode_stack()


def test_tensorboard_shows_what_was_measured(tmp_path, monkeypatch):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    callback = GradStatsCallback(every=2)
    trainer_for(language_model(), [callback], tmp_path, report_to="tensorboard")
    events = reader.EventAccumulator(str(tmp_path / "board")).Reload()
    for name in ("gns/b_simple", "example_grad_norm/max", "align/mean_cos_to_mean"):
        points = events.Scalars(f"train/{name}")
        assert [point.step for point in points] == [1, 3, 5]
        values = callback.monitor.history[name]
        np.testing.assert_allclose([point.value for point in points], values, rtol=1e-6)


def test_an_input_that_the_model_was_not_given_is_refused(tmp_path):
    model = language_model()
    state = snapshot(model)
    callback = GradStatsCallback(every=1, ids="page")
    with pytest.raises(gs.TrackingError, match="was not given the input 'page'"):
        trainer_for(model, [callback], tmp_path)
    assert_unchanged(model, state)


def test_a_model_that_cannot_be_measured_is_refused(tmp_path):
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    arguments._n_gpu = 2
    with pytest.raises(gs.TrackingError, match="DataParallel"):
        GradStatsCallback().on_train_begin(arguments, None, None, model=language_model())


def compiled_run(folder, **options) -> tuple[dict, dict]:
    """Return what a run logged by step, and the weights at its end."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Classifier()
    callback = GradStatsCallback(every=2, alignment=False)  # which graphs cannot report
    trainer = trainer_for(model, [callback], folder, Images(14), max_steps=4, **options)
    ours = logged(trainer, "gns/tr_sigma")
    assert not model.net._forward_pre_hooks and not _get_current_function_mode_stack()
    return ours, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("graphs", [False, True])
def test_compiled_models(tmp_path, request, graphs):
    """Measured steps run them eagerly or, where that is quicker, as graphs; others as ever."""
    expected, weights = compiled_run(tmp_path)
    if graphs:
        request.getfixturevalue("graphs_run_on_cpus")
    backend = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    ours, trained = compiled_run(tmp_path, **backend)
    assert list(ours) == list(expected) == [1, 3]
    for step, metrics in ours.items():
        assert metrics.keys() == expected[step].keys()
        assert_close(metrics, expected[step], ("gns/g2", "example_grad_norm/p50"), RTOL)
    for name, value in trained.items():
        torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-7)
    assert graphs or torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_options_must_fit_into_the_saved_state():
    callback = GradStatsCallback(every=torch.tensor(5), rows_per_example=np.int64(2))
    assert json.loads(json.dumps(callback.state()))["args"] == {
        "every": 5, "ids": None, "rows_per_example": 2,
    }  # fmt: skip
    with pytest.raises(gs.TrackingError, match="JSON"):
        GradStatsCallback(parameters={"a set"})


def test_what_no_monitor_takes_is_named_at_once():
    with pytest.raises(TypeError, match=r"no option 'evry', .* of gs\.Monitor: loss_reduction, "):
        GradStatsCallback(evry=10)
    with pytest.raises(gs.TrackingError, match="every is 0"):
        GradStatsCallback(every=0)
    with pytest.raises(gs.TrackingError, match="decay is 2"):
        GradStatsCallback(decay=2)


def test_it_must_be_called_by_a_trainer(tmp_path):
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(gs.TrackingError, match=r"not called by a transformers\.Trainer"):
        GradStatsCallback().on_train_begin(arguments, None, None, model=language_model())


def test_the_extra_is_named_where_transformers_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.trainer_callback", None)
    monkeypatch.delitem(sys.modules, "gradstats.integrations.transformers")
    with pytest.raises(gs.MissingPackageError, match=r"gradstats\[transformers\]"):
        importlib.import_module("gradstats.integrations.transformers")
