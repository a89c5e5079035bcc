"""The table that gs.self_influence returns, and how well its columns find known errors."""

from __future__ import annotations

import importlib
import reprlib
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from gradstats._notebooks import Printed
from gradstats._requirements import require
from gradstats._tables import aligned
from gradstats._values import unlike_numbers
from gradstats.errors import ScoreError
from gradstats.scoring._folder import path_of, read_results
from gradstats.scoring._metrics import Detection, detect
from gradstats.scoring._rankings import check_k
from gradstats.scoring._work import plural

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

# What is measured of an example at a checkpoint.
FIELDS = ("weighted", "sqnorm", "loss", "margin", "el2n", "label", "predicted", "classes")
SQNORM = FIELDS.index("sqnorm")
# The columns that rank examples: 1 if large values are suspicious, else -1, and a title.
SCORES = {
    "self_influence": (1, "self-influence"),
    "grad_norm": (1, "mean gradient norm"),
    "loss": (1, "mean loss"),
    "margin": (-1, "mean margin"),
    "el2n": (1, "mean EL2N"),
}
# The columns that need a classification.
OF_CLASSES = ("margin", "el2n")

# From here on float64 cannot hold every integer.
EXACT = 2.0**53

# A checkpoint that predicts this share of the labels that it was trained on, or of the known bad
# ones, has fitted their errors too.
MEMORISED = 0.995
MEMORISED_BAD = 0.5
# A network whose mean loss is at least this share of that of guessing is taken for untrained.
UNTRAINED = 0.95
EARLIER = "Use earlier checkpoints too."


class SelfInfluence(Printed):
    """A table with one row per example: its self-influence, and cheaper scores.

    Attributes:
        ids: (N,) the examples' ids.
        checkpoints: the checkpoints' names, in order.
        self_influence: (N,) Σ_c η_c ‖∇ℓ_i(w_c)‖², in units of loss.
        grad_norm: (N,) mean of ‖∇ℓ_i(w_c)‖ over the checkpoints; early in training, GraNd.
        loss: (N,) mean over the checkpoints.
        margin: (N,) mean over the checkpoints of p_y - max_{k≠y} p_k; NaN if no classification was
            seen in the loss, if the label is ignored, or if the logits are not finite.
        el2n: (N,) mean over the checkpoints of ‖p - onehot(y)‖; NaN likewise.
        label: (N,) the given label; -1 if it is ignored or unknown.
        predicted: (N,) the class of highest probability at the last checkpoint; -1 if unknown.
        reason: why labels, and with them margins, are missing; None if none are.
        sqnorm: (C, N) ‖∇ℓ_i(w_c)‖² at each checkpoint.
        by_checkpoint: column → (C, N) its values at each checkpoint.
    """

    def __init__(
        self,
        ids: np.ndarray,
        checkpoints: tuple[str, ...],
        values: np.ndarray,
        reason: str | None,
        *,
        complete: bool = True,
    ):
        self.ids = ids
        self.checkpoints = checkpoints
        self._values = values
        self._complete = complete
        by_checkpoint = self.by_checkpoint
        self.self_influence = by_checkpoint["self_influence"].sum(0)
        self.sqnorm = values[:, :, SQNORM]
        self.grad_norm = by_checkpoint["grad_norm"].mean(0)
        self.loss = by_checkpoint["loss"].mean(0)
        self.margin = by_checkpoint["margin"].mean(0)
        self.el2n = by_checkpoint["el2n"].mean(0)
        self.predicted = by_checkpoint["predicted"][-1]
        label = values[:, :, FIELDS.index("label")]
        self.label = _whole(label[-1])
        missing = bool(np.isnan(label).any())
        self.reason = (reason or "the loss showed no classification") if missing else None

    @classmethod
    def load(cls, folder: str | Path) -> SelfInfluence:
        """Return the results of ``gs.self_influence(out=folder)``, over all checkpoints there.

        Checkpoints are in the order in which they were added to the folder.

        Args:
            folder: of the results; neither model nor data are needed.

        Returns:
            SelfInfluence: a table of N rows.

        Raises:
            StoreError: the folder holds something else, or an incomplete checkpoint.
        """
        names, (ids,), held = read_results(path_of(folder), "self-influence", ("ids",), ("values",))
        return cls(ids, names, np.stack([values for (values,) in held]), None)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The table's columns by name."""
        named = {name: getattr(self, name) for name in ("label", "predicted", *SCORES)}
        return {"id": self.ids, **named}

    @property
    def by_checkpoint(self) -> dict[str, np.ndarray]:
        """Column → (C, N): its values at each checkpoint, before they are summed or averaged.

        ``by_checkpoint["el2n"][0]`` is EL2N early in training. Mean and spread over the checkpoints
        show how an example was learned (data maps, Swayamdipta et al., arXiv 2009.10795).
        """
        field = {name: self._values[:, :, place] for place, name in enumerate(FIELDS)}
        return {
            "self_influence": field["weighted"],
            "grad_norm": np.sqrt(field["sqnorm"]),
            "loss": field["loss"],
            "margin": field["margin"],
            "el2n": field["el2n"],
            "predicted": _whole(field["predicted"]),
        }

    def top(self, k: int = 20, by: str = "self_influence") -> SelfInfluence:
        """Return the k most suspicious rows by one of the scores, the most suspicious first.

        Args:
            k: how many.
            by: "self_influence", "grad_norm", "loss" or "el2n", largest first; or "margin",
                smallest first.

        Returns:
            SelfInfluence: a table of these rows, at most k.

        Raises:
            ScoreError: k is not a positive integer, or the table has no score named ``by``.
        """
        if not isinstance(by, str) or by not in SCORES:
            raise ScoreError(f"by is {by!r}, expected one of {', '.join(SCORES)}.")
        if by in OF_CLASSES and self.reason is not None:
            raise ScoreError(
                f"there is no {by}: {self.reason}. Expected by= one of the scores that need no "
                "classification: self_influence, grad_norm, loss."
            )
        values = SCORES[by][0] * self.columns[by]
        order = np.argsort(-values, kind="stable")[: check_k(k)]
        return SelfInfluence(
            self.ids[order], self.checkpoints, self._values[:, order], self.reason, complete=False
        )

    def report(self, known_bad: Any) -> DetectionReport:
        """Return how well each score finds examples that are known to be bad.

        Args:
            known_bad: (N,) bool, or ids, each once, in a list, set or array.

        Returns:
            DetectionReport: AUROC, average precision and recall at the noise rate of self-influence
            and of each baseline from the same pass. Scores that are not finite for some example are
            left out, with the reason.

        Raises:
            ScoreError: known_bad holds an unknown id, an id twice, or bools for another number of
                examples, or it marks none or all examples.
        """
        bad = self._mask(known_bad)
        rows, missing = {}, {}
        for column, (sign, name) in SCORES.items():
            values = sign * self.columns[column]
            unknown = ~np.isfinite(values)
            if not unknown.any():
                rows[name] = detect(values, bad)
            elif column in OF_CLASSES and self.reason is not None:
                missing[name] = self.reason
            else:
                ids = self.ids[unknown]
                missing[name] = (
                    f"not finite for the examples with ids {ids[:8].tolist()}"
                    f"{' …' if len(ids) > 8 else ''}"
                )
        return DetectionReport(rows, missing, len(self), int(bad.sum()), self._warnings(bad))

    def to_pandas(self) -> pandas.DataFrame:
        """Return the table as a pandas DataFrame.

        Raises:
            MissingPackageError: without pandas.
        """
        with require("tables"):
            import pandas
        return pandas.DataFrame(self.columns)

    def to_parquet(self, path: str | Path) -> None:
        """Write the table to a Parquet file.

        Args:
            path: the file, which is overwritten.

        Raises:
            MissingPackageError: without pandas or pyarrow.
        """
        with require("tables"):
            # Imported here, because pandas' own error would not name our extra.
            importlib.import_module("pyarrow")
        self.to_pandas().to_parquet(path, index=False)

    def plot(self, known_bad: Any = None) -> Figure:
        """Return a figure of the sorted scores and, with ``known_bad``, of what each score finds.

        Args:
            known_bad: as for ``report``.

        Returns:
            A matplotlib figure: ``figure.savefig("scores.png")``.

        Raises:
            MissingPackageError: without matplotlib.
            ScoreError: as for ``report``.
        """
        from gradstats.scoring._pictures import draw_self_influence

        bad = None if known_bad is None else self._mask(known_bad)
        report = None if bad is None else self.report(bad)
        return draw_self_influence(self.self_influence, bad, report)

    def __str__(self) -> str:
        shown = dict(self.columns)
        if self.reason is not None:
            for name in ("label", "predicted", *OF_CLASSES):
                del shown[name]
        count = min(len(self), 20)
        checkpoints = plural(len(self.checkpoints), "checkpoint")
        lines = [f"self-influence of {plural(len(self), 'example')} over {checkpoints}"]
        rows = ([_cell(v[i]) for v in shown.values()] for i in range(count))
        lines += aligned([list(shown), *rows], left=1)
        if count < len(self):
            lines.append(f"… {len(self) - count:,} more; .top(k) ranks them")
        if self.reason is not None:
            lines.append(f"no margin and EL2N: {self.reason}")
        lines += [f"warning: {warning}" for warning in self._warnings(None)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        low, high = self.self_influence.min(), self.self_influence.max()
        return f"SelfInfluence(examples={len(self)}, self_influence={low:.4g}…{high:.4g})"

    def _mask(self, known_bad: Any) -> np.ndarray:
        """Return (N,) bool: which examples are known to be bad; or raise."""
        expected = "expected ids, or one bool for each example."
        plain = known_bad
        if isinstance(known_bad, Tensor):
            if (kind := unlike_numbers(known_bad)) is not None:
                raise ScoreError(f"known_bad is {kind}, {expected}")
            plain = known_bad.detach().cpu()
        try:
            given = np.asarray(list(plain) if isinstance(plain, Set) else plain)
            values, counts = np.unique(given, return_counts=True)
            listed = set(values.tolist())
        except (TypeError, ValueError, RuntimeError) as error:
            raise ScoreError(
                f"known_bad is {reprlib.repr(known_bad)} ({error}), {expected}"
            ) from error
        if given.dtype == bool:
            if given.shape != self.ids.shape:
                raise ScoreError(
                    f"known_bad has shape {given.shape}, expected ({len(self)},): one bool for "
                    "each example, or a list of ids."
                )
            mask = given
        else:
            if given.ndim != 1:
                raise ScoreError(
                    f"known_bad has shape {given.shape}, expected one axis: ids, or one bool for "
                    "each example."
                )
            if given.dtype.kind == "f" and (np.abs(given) >= EXACT).any():
                raise ScoreError(
                    f"known_bad has dtype {given.dtype}, which cannot hold every id from "
                    f"{EXACT:.0f} on exactly. Pass integers."
                )
            if (counts > 1).any():
                raise ScoreError(
                    f"known_bad lists {values[counts > 1][:4].tolist()} more than once, expected "
                    "each id once. For a mask of zeros and ones pass known_bad.astype(bool)."
                )
            # As Python's integers: NumPy compares signed with unsigned ones as float64.
            ids = self.ids.tolist()
            mask, known = np.array([each in listed for each in ids]), set(ids)
            if unknown := [each for each in values.tolist() if each not in known]:
                raise ScoreError(
                    f"known_bad lists {unknown[:4]}, which are not ids of the table ({ids[:4]} …). "
                    "Pass ids (without ids= these are positions in the loader's data set, in the "
                    "Subset if it is one), or one bool for each example."
                )
        if mask.all() or not mask.any():
            raise ScoreError(
                f"known_bad marks {int(mask.sum())} of {len(self)} examples, expected at least one "
                "and not all."
            )
        return mask

    def _warnings(self, bad: np.ndarray | None) -> list[str]:
        """Return what makes a checkpoint's scores doubtful."""
        if not self._complete:
            return []
        found: dict[str, list[tuple[str, str]]] = {}
        for name, rows in zip(self.checkpoints, self._values, strict=True):
            field = dict(zip(FIELDS, rows.T, strict=True))
            as_given = field["label"] == field["predicted"]
            guessing = np.log(field["classes"]).mean()
            finite = field["loss"][np.isfinite(field["loss"])]
            if len(finite) and finite.mean() >= UNTRAINED * guessing:
                what = f"has mean loss {finite.mean():.3g}, guessing gives {guessing:.3g}"
                why = (
                    "near the initialisation, gradient norms are no better than chance. Use "
                    "checkpoints that have learned more."
                )
            elif bad is not None and as_given[bad].mean() >= MEMORISED_BAD:
                share = f"{as_given[bad].mean():.0%} of the known bad examples"
                what = f"predicts the given label of {share}"
                why = f"it has memorised them, and their gradients have shrunk. {EARLIER}"
            elif as_given.mean() >= MEMORISED:
                what = f"predicts {as_given.mean():.1%} of the given labels"
                why = f"it may have memorised wrong ones, whose gradients then shrink. {EARLIER}"
            else:
                continue
            found.setdefault(why, []).append((name, what))
        warnings = []
        for why, ((name, what), *rest) in found.items():
            more = f", … ({len(rest)} in all)" if len(rest) > 3 else ""
            names = ", ".join(name for name, _ in rest[:3])
            shared = f" The same holds for {names}{more}." if rest else ""
            warnings.append(f"{name} {what}: {why}{shared}")
        return warnings


@dataclass(frozen=True)
class DetectionReport(Printed):
    """How well each score finds known bad examples, inspected in the order of the score.

    Attributes:
        rows: score → Detection, with ``auroc``, ``average_precision``, ``recall_at_noise_rate``.
        missing: score → why it could not be computed.
        examples: number of examples.
        bad: number of known bad examples.
        warnings: what makes a checkpoint's scores doubtful.
    """

    rows: dict[str, Detection]
    missing: dict[str, str]
    examples: int
    bad: int
    warnings: list[str]

    def __repr__(self) -> str:
        auroc = {name: round(detection.auroc, 4) for name, detection in self.rows.items()}
        return f"DetectionReport(bad={self.bad}, examples={self.examples}, auroc={auroc})"

    def __str__(self) -> str:
        lines = [f"{self.bad} known bad among {self.examples:,} examples"]
        table = [["score", "AUROC", "average precision", "recall at noise rate"]]
        for name, detection in self.rows.items():
            numbers = (
                detection.auroc, detection.average_precision, detection.recall_at_noise_rate,
            )  # fmt: skip
            table.append([name, *(f"{number:.4f}" for number in numbers)])
        lines += aligned(table, left=1)
        for reason in dict.fromkeys(self.missing.values()):
            names = [name for name, why in self.missing.items() if why == reason]
            lines.append(f"no {', '.join(names)}: {reason}")
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def _whole(values: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(values), -1, values).astype(np.int64)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (float, np.floating)) else str(value)
