"""A check of gradstats, and of the loss, on the user's own model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradstats._comparison import same_bits
from gradstats._compiler import in_python
from gradstats._values import integer, is_real
from gradstats.capture._selection import select_parameters
from gradstats.capture._sharded import is_sharded
from gradstats.capture._survey import Survey, survey
from gradstats.capture.following._enclosed import modules_beside
from gradstats.capture.operations._nested import tensors_in
from gradstats.errors import GradStatsError, TrackingError
from gradstats.statistics._arguments import (
    LossFunction,
    check_call,
    check_choice,
    check_workspace,
    excluding,
)
from gradstats.statistics._batches import on_a_copy
from gradstats.statistics._differentiable import differentiable
from gradstats.statistics._division import Division
from gradstats.statistics._elsewhere import Elsewhere
from gradstats.statistics._loss import check_batch_dim, check_losses, examples_in, packed_segments
from gradstats.statistics._norms import per_example_norms
from gradstats.statistics._reference import TOLERANCE, Example, choose_subject, lowest_precision
from gradstats.statistics._result import GradientNorms
from gradstats.statistics._state import State
from gradstats.statistics._verify_report import Check, ParameterRow, VerifyReport, summary

NOT_COMPARED = "not compared: nothing was computed (see coverage)"


@in_python
def verify(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    *,
    batch_dim: int = 0,
    cu_seqlens: Tensor | None = None,
    parameters: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    workspace: int | None = None,
    fallback: str | None = None,
    examples: int = 3,
    tolerance: float | None = None,
) -> VerifyReport:
    """Check that the per-example norms of your own model are complete, exact and meaningful.

        print(gs.verify(model, batch, loss_fn))

    - *loss*: ``loss_fn`` returns one differentiable loss for each example;
    - *coverage*: every parameter that requires grad is counted, unused or excluded; the report
      shows which operations used it;
    - *exactness*: ‖∂ℓ_i/∂w‖² of each parameter agrees with plain autograd of ``losses[i]``, for a
      sample of examples, in float64 on a copy of the model where one can be made;
    - *coupling*: each example has the same loss and gradient alone as in its batch. This fails with
      batch normalisation in training mode, contrastive losses, and losses divided by a quantity of
      the whole batch. If the forward is random (dropout), the example is instead compared with
      itself among its own copies, under the same random numbers; this needs examples of one size.
      If only other modules that the loss uses couple the examples, and only in training mode (a
      generator before a discriminator), their output is taken as given;
    - *padding*: an example without its trailing padding has the same loss and gradient, where the
      batch is a mapping with an ``attention_mask``;
    - *determinism*: two runs on the model itself give the same bits;
    - *precision*: how far the model's own dtype changes the norms.

    Args:
        model, batch, loss_fn, batch_dim, cu_seqlens, parameters, exclude, workspace, fallback: as
            for per_example_norms. Batch, parameters, buffers, gradients, training mode and random
            generators are left as they were, as are buffers of other modules that the loss uses;
            your hooks run as in any forward.
        examples: how many examples to compare, spread over the batch.
        tolerance: the largest relative error of a squared norm that passes; by default 1e-6 in
            float64, 1e-3 in float32, 0.05 in float16, 0.1 in bfloat16.

    Returns:
        VerifyReport: ``ok``, ``rows`` and ``checks``; ``print`` shows them as tables.

    Raises:
        ExampleAxisError, CoverageError, TrackingError: an argument is invalid. An unsupported model
            or loss is reported, not raised.

    Cost:
        About ten forwards of the batch and two backwards per compared example. Memory: the copy and
        two whole gradients in float64.
    """
    check_call(model, loss_fn)
    check_choice("fallback", fallback, (None, "vmap"))
    check_workspace(workspace)
    wanted = integer(examples, 1)
    if wanted is None:
        raise TrackingError(f"examples is {examples!r}, expected a positive number of examples.")
    if tolerance is not None:
        if not (is_real(tolerance) and tolerance > 0):
            raise TrackingError(f"tolerance is {tolerance!r}, expected a positive relative error.")
        tolerance = float(tolerance)
    batch_dim = check_batch_dim(batch_dim)
    batch_size, segments = examples_in(batch, batch_dim, cu_seqlens, model)
    bounds = None if segments is None else segments.offsets
    division = Division(batch_size, batch_dim, bounds)
    selected = select_parameters(model, parameters, exclude)
    sharded = [name for name, parameter in selected.items() if is_sharded(parameter)]
    if sharded:
        raise TrackingError(
            f"parameter {sharded[0]!r} is sharded over processes, so there is no plain gradient to "
            "compare with. Expected a whole model: call gs.verify before sharding it."
        )
    count = min(wanted, batch_size)
    chosen = sorted({round(k * (batch_size - 1) / max(1, count - 1)) for k in range(count)})
    options: dict[str, Any] = {
        "batch_dim": batch_dim,
        "cu_seqlens": cu_seqlens,
        "parameters": parameters,
        "exclude": exclude,
        "workspace": workspace,
        "fallback": fallback,
    }
    own = set(model.modules())
    beside = [module for module in modules_beside(loss_fn) if module not in own]
    state = State(model, beside, tensors_in(batch))
    try:
        with torch.enable_grad():
            return Verification(
                model, batch, on_a_copy(loss_fn), options, selected, division, chosen, tolerance,
                state, beside,
            ).run()  # fmt: skip
    finally:
        state.restore()


class Verification:
    """One run of gs.verify."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: LossFunction,
        options: dict[str, Any],
        selected: dict[str, nn.Parameter],
        division: Division,
        examples: list[int],
        tolerance: float | None,
        state: State,
        beside: list[nn.Module],
    ):
        self.model, self.batch, self.loss_fn = model, batch, loss_fn
        self.options, self.selected = options, list(selected)
        self.division, self.examples = division, examples
        self.batch_size = division.batch_size
        self.state = state
        self.checks: list[Check] = []
        self.refused: dict[str, str] = {}
        self.errors: dict[str, float] = {}
        self.operations: dict[str, list[str]] = {}
        # Parameters whose use neither a forward nor torch.autograd.grad shows.
        self.hidden: list[str] = []
        self.subject = choose_subject(model, batch, loss_fn, state, beside)
        self.tolerance = TOLERANCE[self.subject.dtype] if tolerance is None else tolerance

    def run(self) -> VerifyReport:
        """Run every check that can be run, in order."""
        with differentiable(self.subject.model):
            if not self._has_losses():
                return self._report(computed=False)
        found = self._survey()
        stats = self._stats(found)
        elsewhere = Elsewhere(self.subject, self.division, self.selected)
        try:
            with differentiable(self.subject.model):
                examples, coupling = elsewhere.compare(self.examples)
                padding = elsewhere.padding()
        except (torch.OutOfMemoryError, NotImplementedError, RecursionError):
            raise
        # For example, the model kept a graph of an earlier forward, or of one inside a context.
        except (RuntimeError, GradStatsError) as error:
            detail = f"plain autograd failed with {summary(error)}"
            self.checks += [self._coverage(stats), Check("exactness", False, detail)]
            return self._report(computed=False)
        if not examples:
            self.examples = []
        elif found is not None and stats is not None and found.functions.inside:
            self.hidden = self._not_reached(stats, examples)
        self.checks += [self._coverage(stats), self._exactness(stats, examples, coupling), coupling]
        self.checks += [*padding, *self._runs(stats, elsewhere.random)]
        return self._report(computed=True)

    def _report(self, *, computed: bool) -> VerifyReport:
        rows = []
        for name, parameter in select_parameters(self.model, None, ()).items():
            operations = tuple(self.operations.get(name, ()))
            error = self.errors.get(name)
            if name not in self.selected:
                status, ok = "excluded", True
            elif not computed:
                status, ok = "unknown", False
            elif name in self.refused:
                status, ok = ("refused", False) if error is None else ("fallback", True)
            else:
                used = operations or name in self.hidden
                status, ok = ("counted" if used else "unused"), True
            if error is not None:
                ok = ok and error <= self.tolerance
            rows.append(ParameterRow(name, tuple(parameter.shape), status, operations, error, ok))
        return VerifyReport(
            tuple(rows), tuple(self.checks), tuple(self.examples), self.subject.description
        )

    def _has_losses(self) -> bool:
        """Check the losses of the whole batch."""
        try:
            losses = check_losses(self.subject.losses(self.subject.batch), self.batch_size)
        except Exception as error:
            self.checks.append(Check("loss", False, summary(error)))
            return False
        bad = (~losses.isfinite()).nonzero().flatten().tolist()
        if bad:
            detail = (
                f"the losses of examples {bad[:8]} are not finite, which spoils the gradients that "
                "plain autograd computes for all. Leave these examples out of the batch"
            )
            self.checks.append(Check("loss", False, detail))
            return False
        self.checks.append(Check("loss", True, f"{self.batch_size} losses"))
        return True

    def _survey(self) -> Survey | None:
        """Return what happens to each parameter; None if no context can be opened."""
        self.subject.state.restore()
        options = {name: self.options[name] for name in ("batch_dim", "parameters", "exclude")}
        if self.division.bounds is not None:
            options["segments"] = packed_segments(self.options["cu_seqlens"], self.subject.model)
        try:
            found = survey(
                self.subject.model, self.subject.batch, self.loss_fn,
                self.division.lists_of_entries(self.subject.batch),
                batch_size=self.batch_size, **options,
            )  # fmt: skip
        except GradStatsError as error:
            # A survey lets refused operations pass, so this may be a consequence of one. The
            # measurement itself stops at, and names, the operation that is to blame.
            reason = str(error)
            try:
                self._norms(self.subject.model, self.subject.batch, self.subject.state)
            except GradStatsError as named:
                reason = str(named)
            self.refused = dict.fromkeys(self.selected, reason)
            return None
        self.operations, self.refused = found.operations, dict(found.refused)
        return found

    def _stats(self, found: Survey | None) -> GradientNorms | None:
        """Return the norms, refused parameters left out; None if the call itself is refused."""
        if found is None:
            return None
        try:
            return self._norms(self.subject.model, self.subject.batch, self.subject.state)
        except GradStatsError as error:
            for name in error.parameters or self.selected:
                self.refused.setdefault(name, str(error))
            return None

    def _norms(self, model: nn.Module, batch: Any, state: State) -> GradientNorms:
        """Return the norms; without a fallback, refused parameters are left out."""
        options = dict(self.options)
        if options["fallback"] is None:
            options["exclude"] = excluding(options["exclude"], self.refused)
        state.restore()
        return per_example_norms(model, batch, self.loss_fn, nonfinite="keep", **options)

    def _not_reached(self, stats: GradientNorms, examples: list[Example]) -> list[str]:
        """Return the parameters that have a norm, but no gradient by plain autograd."""
        return [
            name
            for column, name in enumerate(self.selected)
            if not any(example.reached[column] for example in examples)
            and name in stats.by_parameter
            and bool(stats.by_parameter[name].any())
        ]

    def _coverage(self, stats: GradientNorms | None) -> Check:
        """Whether every parameter is counted, unused or excluded."""
        served = set() if stats is None else set(stats.by_parameter)
        known = {*self.refused, *self.hidden}
        unused = [n for n in self.selected if n not in known and not self.operations.get(n)]
        left_out = [n for n in self.refused if n not in served]
        excluded = len(select_parameters(self.model, None, ())) - len(self.selected)
        counted = len(self.selected) - len(unused) - len(left_out)
        detail = f"{counted} counted, {len(unused)} unused, {excluded} excluded"
        for reason in dict.fromkeys(self.refused[name] for name in left_out):
            detail += f"; refused: {reason}"
        return Check("coverage", not left_out, detail)

    def _exactness(
        self, stats: GradientNorms | None, examples: list[Example], coupling: Check
    ) -> Check:
        """Compare squared norms with plain autograd, and note each parameter's error."""
        if stats is None:
            return Check("exactness", None, NOT_COMPARED)
        if not examples:
            return Check("exactness", False, coupling.detail)
        for column, name in enumerate(self.selected):
            if name not in stats.by_parameter or name in self.hidden:
                continue
            errors = [
                _relative_error(
                    stats.by_parameter[name][example.number].item(),
                    example.sqnorms[column],
                    sum(example.sqnorms),
                )
                for example in examples
            ]
            self.errors[name] = max(errors)
        left_out = (
            f"not compared: {self.hidden[:4]}, for which torch.autograd.grad finds no gradient: "
            "an autograd Function runs a part of the model and, in its backward, a backward of its "
            "own, as checkpoints of other libraries do"
        )
        if not self.errors:
            return Check("exactness", None, left_out)
        worst = max(self.errors, key=self.errors.__getitem__)
        error = self.errors[worst]
        detail = f"worst relative error {error:.1e} ({worst}), tolerance {self.tolerance:.0e}"
        if error > self.tolerance:
            operations = ", ".join(self.operations.get(worst, ())) or "no operation"
            detail += (
                ". The examples are coupled (see below), so their losses have no gradients of "
                "their own"
                if coupling.ok is False
                else f". The examples are not coupled, so gradstats, or a rule registered with it, "
                f"is wrong here: {worst} is used by {operations}. Exclude it, and please report it"
            )
        elif self.hidden:
            return Check("exactness", None, f"{detail}; {left_out}")
        return Check("exactness", error <= self.tolerance, detail)

    def _runs(self, reference: GradientNorms | None, random: bool) -> list[Check]:
        """Run the model itself twice; compare the runs with each other and with the reference."""
        if reference is None:
            return [Check("determinism", None, NOT_COMPARED)]
        try:
            first, second = (self._norms(self.model, self.batch, self.state) for _ in range(2))
        except Exception as error:
            return [Check("determinism", False, summary(error))]
        assert first.loss is not None and second.loss is not None
        if not same_bits(first.loss, second.loss):
            detail = (
                "two forwards with the same random numbers gave different losses: the model itself "
                "is not deterministic. Try torch.use_deterministic_algorithms(True); or, if it "
                "draws from a generator of its own (torch.Generator, numpy.random.default_rng), "
                "let it draw from the global one here"
            )
            return [Check("determinism", False, detail)]
        different = [
            name
            for name, row in first.by_parameter.items()
            if not same_bits(row, second.by_parameter[name])
        ]
        detail = f"two runs differ in {different[:3]}" if different else "two runs, the same bits"
        checks = [Check("determinism", not different, detail)]
        if self.subject.model is not self.model and not random:
            checks.append(self._precision(first, reference))
        return checks

    def _precision(self, found: GradientNorms, reference: GradientNorms) -> Check:
        """Compare the norms in the model's own precision with those in float64."""
        both = zip(found.sqnorm.tolist(), reference.sqnorm.tolist(), strict=True)
        gap = max(_relative_error(got, expected, 0.0) for got, expected in both)
        own = lowest_precision(self.model)
        detail = f"{str(own).removeprefix('torch.')} against float64: {gap:.1e} of a squared norm"
        limit = 30 * TOLERANCE[own]
        # Half precision changes the gradient itself, at every layer: information, not a failure.
        ok = None if own in (torch.float16, torch.bfloat16) else not gap > limit
        if ok is False:
            detail += (
                ". The model's gradients in its own precision differ from those in float64: is the "
                "loss badly conditioned, or is a part of it computed in lower precision?"
            )
        return Check("precision", ok, detail)


def _relative_error(got: float, expected: float, total: float) -> float:
    if got == expected or (got != got and expected != expected):
        return 0.0
    error = abs(got - expected) / max(expected + 1e-6 * total, 1e-300)
    return error if error == error else float("inf")
