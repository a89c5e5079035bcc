"""Measuring a model of the zoo, and the table that shows the measurements."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import gradstats as gs
from tests.oracle import oracle_sqnorms
from tests.zoo.case import Case

# A squared norm below this share of the model's has no correct digits to compare.
NEGLIGIBLE = 1e-6


@dataclass(frozen=True)
class Row:
    """What is known of one model.

    Attributes:
        case: the model.
        tensors: number of parameters that require a gradient.
        covered: number of those whose squared norms were computed.
        error: the largest relative error of any parameter's squared norm for any example.
        refusal: the error that refused the model, None where it was computed.
    """

    case: Case
    tensors: int
    covered: int
    error: float
    refusal: gs.GradStatsError | None = None

    @property
    def as_expected(self) -> bool:
        if self.case.refused is None or self.refusal is None:
            exact = self.error <= self.case.tolerances["rtol"] and self.covered == self.tensors
            return self.case.refused is None and self.refusal is None and exact
        error, text = self.case.refused
        return isinstance(self.refusal, error) and bool(re.search(text, str(self.refusal)))

    def __str__(self) -> str:
        if self.refusal is not None:
            outcome = f"refused: {type(self.refusal).__name__}"
            return f"| {self.case.name} | 0 of {self.tensors} | {outcome} |"
        mark = " (float32 inside)" if self.case.single else ""
        return f"| {self.case.name} | {self.covered} of {self.tensors} | {self.error:.0e}{mark} |"


def measure(case: Case) -> Row:
    """Compare the squared norms of one model with plain autograd, one example at a time."""
    model, batch = case.prepare()
    tensors = sum(parameter.requires_grad for parameter in model.parameters())
    try:
        got = gs.per_example_norms(model, batch, case.loss_fn, **case.options)
    except gs.GradStatsError as refusal:
        return Row(case, tensors, 0, float("nan"), refusal)
    expected = oracle_sqnorms(model, batch, case.loss_fn)
    total = sum(expected.values())
    worst = max(
        ((got.by_parameter[name].double() - value).abs() / (value + NEGLIGIBLE * total)).max()
        for name, value in expected.items()
        if name in got.by_parameter
    )
    return Row(case, tensors, len(got.by_parameter), float(worst))


def table(rows: Iterable[Row]) -> str:
    """Return the rows as the table of ``README.md``."""
    head = "| model | parameters covered | worst relative error |\n|---|---|---|"
    return "\n".join([head, *map(str, rows)])
