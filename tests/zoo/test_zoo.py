"""Every model of the zoo, exact or refused by name."""

import dataclasses
from pathlib import Path

import pytest
import torch

import gradstats as gs
from tests.oracle import check_model
from tests.zoo import CASES, awkward, hugging_face
from tests.zoo.__main__ import main
from tests.zoo.case import Case
from tests.zoo.measure import measure, table

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
    pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning"),
]


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_zoo(case: Case, size: str):
    if case in hugging_face.CASES or "Hugging Face" in case.name:
        pytest.importorskip("transformers")
    model, batch = case.prepare()
    if case.refused is None:
        check_model(model, batch, case.loss_fn, size=size, **case.tolerances, **case.options)
        return
    error, text = case.refused
    with pytest.raises(error, match=text):
        gs.per_example_norms(model, batch, case.loss_fn, **case.options)
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())


def test_names_are_distinct():
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_readme_shows_every_model():
    section = Path(__file__).with_name("README.md").read_text()
    shown = [line.split(" | ")[0].strip("| ") for line in section.splitlines() if line[:2] == "| "]
    assert shown[1:] == [case.name for case in CASES]
    for case in CASES:
        refused = f"| {case.name} | 0 of" in section
        assert refused == (case.refused is not None), case.name


def test_the_table(capsys):
    assert main(["Conv1d", "a custom autograd Function with a parameter"]) == 0
    head, _, exact, refused = capsys.readouterr().out.splitlines()
    assert head == "| model | parameters covered | worst relative error |"
    assert exact.startswith("| Conv1d | 4 of 4 | ") and "e-1" in exact
    assert refused.endswith("| 0 of 1 | refused: UnsupportedOperationError |")
    assert main(["unheard of"]) == 2


class Coupled(torch.autograd.Function):
    """Multiplies each loss with the sum of all."""

    @staticmethod
    def forward(ctx, losses):
        ctx.save_for_backward(losses)
        return losses * losses.sum()

    @staticmethod
    def backward(ctx, grad):
        (losses,) = ctx.saved_tensors
        return grad * losses.sum() + (grad * losses).sum()


def test_the_table_tells_what_is_not_as_expected():
    case = awkward.CASES[0]
    assert measure(case).as_expected
    # A loss that couples the examples out of sight is not what one example alone gives.
    coupled = dataclasses.replace(case, loss_fn=lambda m, b: Coupled.apply(case.loss_fn(m, b)))
    row = measure(coupled)
    assert not row.as_expected and row.error > 1e-3
    assert not measure(dataclasses.replace(case, refused=(gs.ExampleAxisError, "x"))).as_expected
    assert str(row) in table([row])
