"""What gs.verify returns, and its text."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from gradstats._notebooks import Printed
from gradstats._tables import aligned
from gradstats.errors import GradStatsError

MARKS = {True: "ok", False: "FAILED", None: "-"}
# Columns of text: what a check found may be a paragraph.
WIDTH = 100


@dataclass(frozen=True)
class ParameterRow:
    """What verify found about one parameter.

    Attributes:
        name: as in model.named_parameters().
        shape: of the parameter.
        status: "counted"; "unused" by the loss; "excluded" by the caller; "fallback" if its
            per-example gradients are formed; "refused", for a reason that the checks give; or
            "unknown" if the loss could not be computed.
        operations: names of the operations that used it, in order.
        error: largest relative error of its squared norms over the compared examples, with a
            millionth of the example's total squared norm added to the denominator; None if
            nothing was compared.
        ok: whether the parameter is accounted for and its error within the tolerance.
    """

    name: str
    shape: tuple[int, ...]
    status: str
    operations: tuple[str, ...]
    error: float | None
    ok: bool


@dataclass(frozen=True)
class Check:
    """One check of the model, loss and batch as a whole.

    Attributes:
        name: "loss", "coverage", "exactness", "coupling", "padding", "determinism", "precision".
        ok: whether it passed; None if nothing could be, or had to be, checked.
        detail: what was found and, if the check failed, what to do.
    """

    name: str
    ok: bool | None
    detail: str


@dataclass(frozen=True)
class VerifyReport(Printed):
    """The result of gs.verify: ``print`` shows it as tables, and its truth value is ``ok``.

    Attributes:
        rows: one for each parameter that requires grad, in the model's order.
        checks: of model, loss and batch as a whole.
        examples: which examples were compared with plain autograd.
        reference: the precision of that comparison, and whether a copy of the model was used.
    """

    rows: tuple[ParameterRow, ...]
    checks: tuple[Check, ...]
    examples: tuple[int, ...]
    reference: str

    @property
    def ok(self) -> bool:
        """Whether no check and no parameter failed."""
        return all(row.ok for row in self.rows) and all(c.ok is not False for c in self.checks)

    def __bool__(self) -> bool:
        # So that ``assert gs.verify(...)`` means what it says.
        return self.ok

    def check(self, name: str) -> Check:
        """Return one of the checks.

        Args:
            name: "loss", "coverage", "exactness", "coupling", "determinism" or "precision"; and
                "padding" where the batch has an ``attention_mask``.

        Returns:
            Check: ``name``, ``ok`` and ``detail``.

        Raises:
            KeyError: the report has no check of that name.
        """
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"no check {name!r}, only {[check.name for check in self.checks]}")

    def __repr__(self) -> str:
        failed = [check.name for check in self.checks if check.ok is False]
        return f"VerifyReport(ok={self.ok}, parameters={len(self.rows)}, failed={failed})"

    def __str__(self) -> str:
        listed = ", ".join(map(str, self.examples)) or "none"
        checks = [
            ("check", "", "found"),
            *((check.name, MARKS[check.ok], check.detail) for check in self.checks),
        ]
        parameters = [("parameter", "shape", "", "status", "error", "operations")]
        for row in self.rows:
            shape = "×".join(map(str, row.shape)) or "scalar"
            error = "-" if row.error is None else f"{row.error:.1e}"
            operations = ", ".join(row.operations)
            parameters.append((row.name, shape, MARKS[row.ok], row.status, error, operations))
        lines = [f"gradstats.verify: {MARKS[self.ok]}"]
        if len(self.checks) > 1:  # else there were no losses to compare
            lines.append(f"compared with plain autograd: examples {listed}; {self.reference}")
        lines += [
            "",
            *_wrapped(aligned(checks, left=3)),
            "",
            *aligned(parameters, left=6),
        ]
        return "\n".join(lines)


def _wrapped(table: list[str]) -> list[str]:
    """Return a table's lines, wrapping long ones within the last column."""
    indent = " " * table[0].index("found")
    return [
        part
        for line in table
        for part in textwrap.wrap(
            line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    ]


def summary(error: BaseException) -> str:
    """Return an error's type and message on one line; messages that are not ours are cut short."""
    message = " ".join(str(error).split())
    if len(message) > 400 and not isinstance(error, GradStatsError):
        message = message[:400] + " …"
    return f"{type(error).__name__}: {message}"
