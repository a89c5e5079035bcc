"""The Python of the README and of ``gradstats/docs/``, run as a reader would; links of all."""

from __future__ import annotations

import copy
import importlib.util
import re

import numpy as np
import pytest
import torch

import gradstats as gs
from tests.pages import GUIDE, PAGES, README, blocks

# A trainer of the reader's own stands there: its tests run whole trainings.
TRAINERS = "gradstats.integrations"


def check_language_model_loss(loss_fn):
    """Compare with what Hugging Face's model returns for one example without its padding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=6, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).eval()
    ids, lengths = torch.randint(11, (3, 6)), torch.tensor([6, 4, 2])
    mask = (torch.arange(6) < lengths[:, None]).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    rows = [row[None, :length] for row, length in zip(ids, lengths, strict=True)]
    alone = [model(input_ids=row, labels=row).loss for row in rows]
    torch.testing.assert_close(loss_fn(model, batch), torch.stack(alone))
    assert gs.verify(model, batch, loss_fn).ok


def check_packed_language_model_loss(loss_fn, bounds):
    """Compare norms and losses with those of each example in a batch of its own."""
    from transformers import DataCollatorWithFlattening, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=6, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).eval()
    lines = [torch.randint(11, (length,)).tolist() for length in (6, 2, 4)]
    batch = DataCollatorWithFlattening()([{"input_ids": line} for line in lines])
    stats = gs.per_example_norms(model, batch, loss_fn, cu_seqlens=bounds(batch))
    for line, loss, norm in zip(lines, stats.loss, stats.norm, strict=True):
        ids = torch.tensor([line])
        alone = model(input_ids=ids, labels=ids).loss * (len(line) - 1)
        gradients = torch.autograd.grad(alone, model.parameters())
        torch.testing.assert_close(loss, alone.detach())
        torch.testing.assert_close(norm, torch.cat([each.flatten() for each in gradients]).norm())


def check_through_adam(through_adam):
    """Compare with what leaving single examples out of one of Adam's steps does to the loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model.frozen = torch.nn.Parameter(torch.zeros(1), requires_grad=False)  # as below adapters
    model.double()
    rate, size, options = 1e-5, 16, {"betas": (0.0, 0.999), "eps": 1e-4}
    # Groups of their own, in another order than the model's.
    groups = [{"params": model[2].parameters(), "eps": 1.0}, {"params": model[0].parameters()}]
    optimizer = torch.optim.Adam(groups, lr=rate, **options)

    def loss_fn(model, batch):
        return (model(batch[0]) - batch[1]).square().sum(1)

    def batch():
        x = torch.randn(size, 4, dtype=torch.float64) * torch.tensor([4.0, 1.0, 0.5, 0.1])
        return x, x.sin().sum(1, keepdim=True)

    for _ in range(300):
        optimizer.zero_grad()
        loss_fn(model, batch()).mean().backward()
        optimizer.step()
    last, validation = batch(), batch()
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def after(weights):
        model.load_state_dict(start[0])
        optimizer.load_state_dict(copy.deepcopy(start[1]))
        optimizer.zero_grad()
        (loss_fn(model, last) @ weights / size).backward()
        optimizer.step()
        with torch.no_grad():
            return loss_fn(model, validation).mean()

    whole = torch.ones(size, dtype=torch.float64)
    without = whole - torch.eye(size, dtype=torch.float64)
    lowered = torch.stack([after(weights) for weights in without]) - after(whole)

    model.load_state_dict(start[0])
    optimizer.load_state_dict(start[1])
    optimizer.zero_grad()
    loss_fn(model, validation).mean().backward()
    scores = gs.alignment(model, last, loss_fn, through_adam(model, optimizer))
    error = (scores * rate / size - lowered).norm() / lowered.norm()
    # Of what an example changes in the mean of squares.
    assert error < 0.01, error


def run(page, names: dict) -> None:
    """Run a page's code from top to bottom, and check what its functions compute."""
    for number, block in enumerate(blocks(page)):
        code = compile(block, f"{page.name}, block {number}", "exec")
        if TRAINERS not in block:
            exec(code, names)
        if "def through_adam" in block:
            check_through_adam(names["through_adam"])
        if importlib.util.find_spec("transformers"):
            if "def language_model_loss" in block:
                check_language_model_loss(names["language_model_loss"])
            if "def packed_language_model_loss" in block:
                check_packed_language_model_loss(
                    names["packed_language_model_loss"], names["bounds"]
                )


@pytest.fixture
def after_the_readme(tmp_path, monkeypatch):
    """What the README's code leaves: its names, and its files in the working directory."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {}
    run(README, names)
    return names


def test_the_readme_runs_from_beginning_to_end(after_the_readme, tmp_path):
    names = after_the_readme
    model, monitor = names["model"], names["monitor"]
    assert [record.id for record in monitor.examples(8)] != []
    assert (tmp_path / "run.png").stat().st_size > 0
    assert len(monitor.self_influence) == 32 and monitor.steps == 100
    assert len(monitor.self_influence.top(20)) == 20
    assert sum(TRAINERS in block for block in blocks(README)) == 1
    assert monitor.model is model
    # The last statistics leave out the activation, which the ones before them measured.
    assert list(names["stats"].by_parameter) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert np.isfinite(names["stats"].norm.numpy()).all()


@pytest.mark.parametrize("page", [p for p in GUIDE[1:] if blocks(p)], ids=lambda page: page.stem)
def test_a_page_goes_on_from_the_readme(page, after_the_readme):
    said = "The code on this page goes on from that of the [README](../../README.md"
    assert said in " ".join(page.read_text().split())
    run(page, after_the_readme)


def rows_of_tokens(rows):
    """Pad rows as DataCollatorForLanguageModeling does, which makes all labels anew."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(values, filling):
        return torch.tensor([[*each, *[filling] * (longest - len(each))] for each in values])

    tokens = [row["input_ids"] for row in rows]
    return {
        "input_ids": padded(tokens, 0),
        "attention_mask": padded([[1] * len(row) for row in tokens], 0),
        "labels": padded(tokens, -100),
    }


@pytest.mark.parametrize("packed", [False, True])
def test_the_recipe_for_a_folder_of_checkpoints(packed, after_the_readme, tmp_path):
    """On the files that Hugging Face's Trainer leaves; scores as of single gradients."""
    transformers = pytest.importorskip("transformers")
    (page,) = [page for page in GUIDE if page.stem == "language-models"]
    (recipe,) = blocks(page, "py")
    names = after_the_readme
    run(page, names)
    config = transformers.GPT2Config(
        vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=9, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    for number, rate in (5, 0.1), (10, 0.01):
        folder = tmp_path / "output" / f"checkpoint-{number}"
        model.save_pretrained(folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    data = [{"input_ids": torch.randint(1, 11, (length,)).tolist()} for length in (6, 4, 9, 5)]
    collator = transformers.DataCollatorWithFlattening() if packed else rows_of_tokens
    if packed:  # what the page says to change
        recipe = recipe.replace("language_model_loss", "packed_language_model_loss")
        recipe = recipe.replace("loss)) ", "loss, cu_seqlens=bounds(next(iter(loader))))) ")
        recipe = recipe.replace("loss, run", "loss, run, cu_seqlens=bounds")
    names |= {"model": model, "train_dataset": data, "collator": collator}
    names |= {"prompt": [1, 2], "completion": [3, 4, 5]}
    exec(compile(recipe, "the recipe", "exec"), names)

    want = np.zeros(len(data))
    for number, rate in (5, 0.1), (10, 0.01):
        saved = type(model).from_pretrained(tmp_path / "output" / f"checkpoint-{number}")
        for place, row in enumerate(data):
            ids = torch.tensor([row["input_ids"]])
            loss = saved.double()(input_ids=ids, labels=ids).loss
            loss = loss * (ids.shape[1] - 1) if packed else loss
            gradients = torch.autograd.grad(loss, saved.parameters())
            want[place] += rate * sum(each.square().sum().item() for each in gradients)
    np.testing.assert_allclose(names["table"].self_influence, want, rtol=1e-4)
    assert names["query"]["labels"].tolist() == [[-100, -100, 3, 4, 5]]
    assert names["scores"].shape == (4, 1) and names["table"].reason is not None


def links_of(page) -> list[tuple[str, str]]:
    """Return the file, from the page, and the heading that each link within the project names."""
    return re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: "/".join(page.parts[-2:]))
def test_links_lead_somewhere(page):
    for place, heading in links_of(page):
        target = page.parent / place if place else page
        assert target.exists(), place
        if heading:
            text = re.sub(r"^```.*?^```", "", target.read_text(), flags=re.DOTALL | re.MULTILINE)
            titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            names = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert names.count(heading) == 1, heading


def test_the_readme_leads_to_every_page():
    linked = {(README.parent / place).resolve() for place, _ in links_of(README) if place}
    assert {page.resolve() for page in PAGES[1:]} <= linked
