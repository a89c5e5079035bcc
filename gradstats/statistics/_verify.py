"""Checking gradstats, and the loss, on the user's own model."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from gradstats._comparison import same_bits
from gradstats.capture._selection import select_parameters
from gradstats.capture._survey import Survey, survey
from gradstats.errors import GradStatsError, TrackingError
from gradstats.statistics._arguments import LossFunction, check_call, check_choice, integer
from gradstats.statistics._batches import (
    Division,
    State,
    map_tensors,
    model_to_float64,
    on_a_copy,
    state_kept,
    to_float64,
)
from gradstats.statistics._fallback import recurrence_differentiable
from gradstats.statistics._loss import check_losses, examples_in, packed_segments
from gradstats.statistics._norms import per_example_norms
from gradstats.statistics._reference import (
    TOLERANCE,
    Example,
    Subject,
    gradients_of,
    too_large,
)
from gradstats.statistics._result import GradientNorms
from gradstats.statistics._verify_report import Check, ParameterRow, VerifyReport


def verify(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    *,
    batch_dim: int = 0,
    cu_seqlens: Tensor | None = None,
    parameters: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    fallback: str | None = None,
    examples: int = 3,
    tolerance: float | None = None,
) -> VerifyReport:
    """Check on your own model that its per-example norms are complete, exact and meaningful.

        print(gs.verify(model, batch, loss_fn))

    - *loss*: ``loss_fn`` returns one differentiable loss for each example;
    - *coverage*: every parameter that requires grad is counted, unused or excluded, and which
      operations used it;
    - *exactness*: ‖∂ℓ_i/∂w‖² of each parameter against plain autograd of ``losses[i]``, for a
      sample of examples, in float64 on a copy of the model where one can be made;
    - *coupling*: each example's loss and gradient alone are those it has in its batch. They are not
      with batch normalisation in training mode, contrastive losses, or losses divided by
      something of the whole batch. While the forward is random (dropout), the example is compared
      with itself among other examples under the same random numbers instead;
    - *padding*: where the batch is a mapping with an ``attention_mask``, an example without its
      trailing padding has the same loss and gradient;
    - *determinism*: two runs on the model itself give the same bits;
    - *precision*: what the model's own dtype does to the norms.

    Args:
        model, batch, loss_fn, batch_dim, cu_seqlens, parameters, exclude, fallback: as for
            per_example_norms. The model's parameters, buffers, gradients, mode and the random
            generators are left as they were; hooks of yours run as in any forward.
        examples: how many examples to compare, spread over the batch.
        tolerance: largest relative error of a squared norm; by default 1e-6 in float64, 1e-3 in
            float32, 0.05 in float16, 0.1 in bfloat16.

    Returns:
        VerifyReport: ``ok``, ``rows``, ``checks``; ``print`` shows them as tables.

    Raises:
        ExampleAxisError, CoverageError, TrackingError: for arguments that cannot be served. A model
        or a loss that cannot be served is reported, not raised.

    Cost:
        About ten forwards of the batch and two backwards for each compared example; memory for the
        copy and two whole gradients in float64.
    """
    check_call(model, loss_fn)
    check_choice("fallback", fallback, (None, "vmap"))
    wanted = integer(examples)
    if wanted is None or wanted < 1:
        raise TrackingError(f"examples is {examples!r}, expected a positive number of examples.")
    if tolerance is not None and not (isinstance(tolerance, Real) and tolerance > 0):
        raise TrackingError(f"tolerance is {tolerance!r}, expected a positive relative error.")
    batch_size, segments = examples_in(batch, batch_dim, cu_seqlens, model)
    bounds = None if segments is None else segments.offsets
    division = Division(batch_size, batch_dim, bounds)
    selected = select_parameters(model, parameters, exclude)
    count = min(wanted, batch_size)
    chosen = sorted({round(k * (batch_size - 1) / max(1, count - 1)) for k in range(count)})
    options: dict[str, Any] = {
        "batch_dim": batch_dim,
        "cu_seqlens": cu_seqlens,
        "parameters": parameters,
        "exclude": exclude,
        "fallback": fallback,
    }
    with state_kept(model) as state, torch.enable_grad():
        verification = Verification(
            model, batch, on_a_copy(loss_fn), options, selected, division, chosen, tolerance, state
        )
        return verification.run()


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
        self.subject = self._choose_subject()
        self.tolerance = TOLERANCE[self.subject.dtype] if tolerance is None else tolerance

    def run(self) -> VerifyReport:
        """Run every check that can be run, in order."""
        losses = self._losses()
        if losses is None:
            return self._report(computed=False)
        random = self._is_random(losses)
        found = self._survey()
        stats = self._stats(found)
        examples, coupled = self._examples(random)
        self._coverage(stats)
        self._exactness(stats, examples, coupled)
        self.checks.append(coupled)
        if not random:
            self._padding(examples)
        self._runs(stats, random)
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
                served = self.options["fallback"] is not None and error is not None
                status, ok = ("fallback", True) if served else ("refused", False)
            else:
                status, ok = ("counted" if operations else "unused"), True
            if error is not None:
                ok = ok and error <= self.tolerance
            rows.append(ParameterRow(name, tuple(parameter.shape), status, operations, error, ok))
        return VerifyReport(
            tuple(rows), tuple(self.checks), tuple(self.examples), self.subject.description
        )

    def _choose_subject(self) -> Subject:
        """Return a float64 copy of model and batch where that works, else the model itself."""
        # Compiled code is checked by the runs on the model itself.
        inner = getattr(self.model, "_orig_mod", self.model)
        reason = too_large(inner)
        if reason is None:
            try:
                subject = Subject(
                    model_to_float64(inner), to_float64(self.batch), torch.float64,
                    "float64 on a copy of the model",
                )  # fmt: skip
                with recurrence_differentiable(subject.model):
                    losses = self.loss_fn(subject.model, subject.batch)
                copied = list(select_parameters(subject.model, None, ()).values())
                reached = torch.autograd.grad(losses.sum(), copied, allow_unused=True)
                if any(gradient is not None for gradient in reached):
                    subject.state.restore()
                    self.state.restore()
                    return subject
                reason = "loss_fn does not use the model that it is given"
            except Exception as error:
                reason = f"a float64 copy failed with {_short(error)}"
            self.state.restore()
        dtypes = [p.dtype for p in self.model.parameters() if p.dtype in TOLERANCE]
        dtype = max(dtypes, key=TOLERANCE.__getitem__, default=torch.float32)
        name = str(dtype).removeprefix("torch.")
        return Subject(
            self.model, self.batch, dtype, f"{name} on the model itself, because {reason}"
        )

    def _losses(self) -> Tensor | None:
        """Return the losses of the whole batch, checked."""
        try:
            losses = check_losses(self.subject.losses(self.loss_fn), self.batch_size)
        except Exception as error:
            self.checks.append(Check("loss", False, _short(error)))
            return None
        bad = (~losses.isfinite()).nonzero().flatten().tolist()
        if bad:
            detail = (
                f"the losses of examples {bad[:8]} are not finite, which spoils plain autograd's "
                "gradients of all. Leave them out of this batch"
            )
            self.checks.append(Check("loss", False, detail))
            return None
        self.checks.append(Check("loss", True, f"{self.batch_size} losses"))
        return losses

    def _is_random(self, losses: Tensor) -> bool:
        """Whether another forward, the random generators moved on, gives other losses."""
        subject = self.subject
        subject.state.restore(generators=False)
        with recurrence_differentiable(subject.model):
            again = self.loss_fn(subject.model, subject.batch)  # which may take gradients itself
        return not same_bits(losses.detach(), again.detach())

    def _survey(self) -> Survey | None:
        self.subject.state.restore()
        options = {name: self.options[name] for name in ("batch_dim", "parameters", "exclude")}
        if self.division.bounds is not None:
            options["segments"] = packed_segments(self.options["cu_seqlens"], self.subject.model)
        try:
            found = survey(
                self.subject.model, self.subject.batch, self.loss_fn,
                batch_size=self.batch_size, **options,
            )  # fmt: skip
        except GradStatsError as error:
            self.refused = dict.fromkeys(self.selected, str(error))
            return None
        self.operations, self.refused = found.operations, dict(found.refused)
        return found

    def _stats(self, found: Survey | None) -> GradientNorms | None:
        """Return gradstats' own numbers, parameters that are refused left out."""
        if found is None:
            return None
        try:
            return self._norms(self.subject.model, self.subject.batch, self.subject.state)
        except GradStatsError as error:
            for name in error.parameters or self.selected:
                self.refused.setdefault(name, str(error))
            return None

    def _norms(self, model: nn.Module, batch: Any, state: State) -> GradientNorms:
        options = dict(self.options)
        if options["fallback"] is None:
            given = options["exclude"]
            names = [glob.escape(name) for name in self.refused]
            options["exclude"] = [*([given] if isinstance(given, str) else given), *names]
        state.restore()
        return per_example_norms(model, batch, self.loss_fn, nonfinite="keep", **options)

    def _coverage(self, stats: GradientNorms | None) -> None:
        served = set() if stats is None else set(stats.by_parameter)
        unused = [n for n in self.selected if n not in self.refused and not self.operations.get(n)]
        left_out = [n for n in self.refused if n not in served]
        excluded = len(select_parameters(self.model, None, ())) - len(self.selected)
        counted = len(self.selected) - len(unused) - len(left_out)
        detail = f"{counted} counted, {len(unused)} unused, {excluded} excluded"
        for reason in dict.fromkeys(self.refused[name] for name in left_out):
            detail += f"; refused: {reason}"
        self.checks.append(Check("coverage", not left_out, detail))

    def _examples(self, random: bool) -> tuple[list[Example], Check]:
        """Return the reference of each chosen example, and whether the examples are coupled."""
        parameters = self.subject.parameters(self.selected)
        found: list[Example] = []
        checks: list[Check] = []
        for number in self.examples:
            # A forward of its own: restoring buffers spoils the graph of an earlier one.
            loss = self.subject.losses(self.loss_fn)[number]
            example = Example(number, loss.detach(), gradients_of(loss, parameters))
            found.append(example)
            if self.batch_size > 1:
                checks.append(self._coupling(example, parameters, random))
            # Only one example's whole gradient is kept: the padding check makes its own again.
            example.release()
        if self.batch_size == 1:
            return found, Check("coupling", None, "a batch of one example: nothing to couple with")
        # What is known to fail says most, then what is not known.
        return found, min(checks, key=lambda check: (check.ok is not False, check.ok is not None))

    def _coupling(self, example: Example, parameters: list[nn.Parameter], random: bool) -> Check:
        """Return whether an example is the same without its batch."""
        number, reason = example.number, "the forward is random"
        if not random:
            try:
                alone = self._elsewhere([number], 0, parameters)
            except Exception as error:
                reason = f"a batch of one failed with {_short(error)}"
            else:
                problem = example.difference(alone, self._same, "alone")
                how = "each checked loss and gradient alone is that in the batch"
                return Check("coupling", problem is None, problem or how)
        obstacle = self.division.obstacle(self.subject.batch)
        if obstacle is not None:
            return Check("coupling", None, f"not checked: {obstacle} ({reason})")
        # The random numbers of an example's place in the batch stay the same, so its neighbours
        # are exchanged for copies of itself.
        try:
            among = self._elsewhere([number] * self.batch_size, number, parameters)
        except Exception as error:
            detail = f"example {number} among copies of itself failed with {_short(error)}"
            return Check("coupling", False, detail)
        problem = example.difference(among, self._same, "among copies of itself")
        how = (
            f"each checked example among copies of itself is as in the batch ({reason}, so a "
            "constant factor that comes from the size of the batch cannot be seen; call "
            "model.eval() to check that too)"
        )
        return Check("coupling", problem is None, problem or how)

    def _elsewhere(self, rows: list[int], place: int, parameters: list[nn.Parameter]) -> Example:
        """Return what the loss at ``place`` of a batch of some of the examples is."""
        batch = self.division.take(self.subject.batch, rows)
        losses = check_losses(self.subject.losses_of(batch, self.loss_fn), len(rows))
        return Example(place, losses[place].detach(), gradients_of(losses[place], parameters))

    @property
    def _same(self) -> float:
        """Up to which relative difference two losses or gradients count as the same."""
        return TOLERANCE[self.subject.dtype]

    def _exactness(
        self, stats: GradientNorms | None, examples: list[Example], coupled: Check
    ) -> None:
        if stats is None:
            detail = "not compared: nothing was computed (see coverage)"
            self.checks.append(Check("exactness", None, detail))
            return
        for column, name in enumerate(self.selected):
            if name not in stats.by_parameter:
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
        worst = max(self.errors, key=self.errors.__getitem__)
        error = self.errors[worst]
        detail = f"worst relative error {error:.1e} ({worst}), tolerance {self.tolerance:.0e}"
        if error > self.tolerance:
            operations = ", ".join(self.operations.get(worst, ())) or "no operation"
            detail += (
                ". The examples are coupled (see below): their losses have no gradients of their "
                "own"
                if coupled.ok is False
                else f". The examples are not coupled, so gradstats, or a rule registered with it, "
                f"is wrong here: {worst} is used by {operations}. Exclude it, and please report it"
            )
        self.checks.append(Check("exactness", error <= self.tolerance, detail))

    def _padding(self, examples: list[Example]) -> None:
        """Compare an example with itself without its trailing padding."""
        mask = _attention_mask(self.subject.batch)
        if mask is None or tuple(mask.shape)[:1] != (self.batch_size,) or mask.dim() != 2:
            return
        lengths = (mask != 0).long().cumsum(1).argmax(1) + 1
        number = int(lengths.argmin())
        length, positions = int(lengths[number]), mask.shape[1]
        if length == positions:
            self.checks.append(Check("padding", None, "no example has trailing padding"))
            return

        def trim(tensor: Tensor) -> Tensor:
            padded = tensor.dim() > 1 and tuple(tensor.shape[:2]) == (1, positions)
            return tensor[:, :length] if padded else tensor

        parameters = self.subject.parameters(self.selected)
        one = self.division.take(self.subject.batch, [number])
        try:
            references = []
            for variant in (one, map_tensors(one, trim)):
                losses = check_losses(self.subject.losses_of(variant, self.loss_fn), 1)
                gradients = gradients_of(losses[0], parameters)
                references.append(Example(number, losses[0].detach(), gradients))
        except Exception as error:
            detail = f"example {number} without its padding failed with {_short(error)}"
            self.checks.append(Check("padding", None, detail))
            return
        problem = references[0].difference(references[1], self._same, "without its padding")
        if problem:
            problem += ". Its loss depends on how long the other examples are: is the mask used?"
        detail = problem or f"example {number} without its padding is the same"
        self.checks.append(Check("padding", not problem, detail))

    def _runs(self, reference: GradientNorms | None, random: bool) -> None:
        """Run the model itself twice; compare the runs with each other and with the reference."""
        if reference is None:
            detail = "not compared: nothing was computed (see coverage)"
            self.checks.append(Check("determinism", None, detail))
            return
        try:
            first, second = (self._norms(self.model, self.batch, self.state) for _ in range(2))
        except Exception as error:
            self.checks.append(Check("determinism", False, _short(error)))
            return
        assert first.loss is not None and second.loss is not None
        if not same_bits(first.loss, second.loss):
            detail = (
                "two forwards with the same random numbers gave other losses: the model itself is "
                "not deterministic. Try torch.use_deterministic_algorithms(True)"
            )
            self.checks.append(Check("determinism", False, detail))
            return
        different = [
            name
            for name, row in first.by_parameter.items()
            if not same_bits(row, second.by_parameter[name])
        ]
        detail = f"two runs differ in {different[:3]}" if different else "two runs, the same bits"
        self.checks.append(Check("determinism", not different, detail))
        if self.subject.model is self.model or random:
            return
        scale = reference.sqnorm.double().clamp(min=1e-300)
        gap = ((first.sqnorm.double() - reference.sqnorm.double()).abs() / scale).max().item()
        own = next(iter(self.model.parameters())).dtype
        detail = f"{str(own).removeprefix('torch.')} against float64: {gap:.1e} of a squared norm"
        limit = 30 * TOLERANCE.get(own, 1e-1)
        # Low precision changes the gradient itself, at every layer: that is for information.
        ok = None if own in (torch.float16, torch.bfloat16) else not gap > limit
        if ok is False:
            detail += (
                ". The model in its own precision has other gradients than in float64: is its loss "
                "badly conditioned, or is part of it computed in lower precision?"
            )
        self.checks.append(Check("precision", ok, detail))


def _relative_error(got: float, expected: float, total: float) -> float:
    if got == expected or (got != got and expected != expected):
        return 0.0
    error = abs(got - expected) / max(expected + 1e-6 * total, 1e-300)
    return error if error == error else float("inf")


def _attention_mask(batch: Any) -> Tensor | None:
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    for part in parts:
        if isinstance(part, Mapping) and isinstance(part.get("attention_mask"), Tensor):
            return part["attention_mask"]
    return None


def _short(error: BaseException) -> str:
    """Return an error's name and the first lines of its message."""
    message = " ".join(str(error).split())
    if len(message) > 400 and not isinstance(error, GradStatsError):
        message = message[:400] + " …"
    return f"{type(error).__name__}: {message}"
