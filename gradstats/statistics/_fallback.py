"""Parameters without a rule, whose per-example gradients are formed.

They are formed for as many examples at a time as the workspace holds, squared and freed. All other
parameters are measured as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from gradstats._complex import any_double
from gradstats._cost import fitting
from gradstats.capture._selection import select_parameters
from gradstats.capture._survey import survey
from gradstats.capture.operations._engine import without_hooks
from gradstats.capture.operations._formats import SettledFormats
from gradstats.capture.operations._graph import nodes_behind
from gradstats.capture.operations._nested import tensors_in
from gradstats.errors import (
    CoupledExamplesError,
    ExampleAxisError,
    UnsupportedOperationError,
)
from gradstats.statistics._arguments import LossFunction, excluding
from gradstats.statistics._backward import NothingUsedError
from gradstats.statistics._batches import map_tensors
from gradstats.statistics._differentiable import differentiable
from gradstats.statistics._division import Division
from gradstats.statistics._loss import check_losses
from gradstats.statistics._result import GradientNorms, summarise
from gradstats.statistics._state import State
from gradstats.statistics._verify_report import summary

# The relative difference allowed between an example alone and in its batch, by the coarsest dtype
# among losses and gradients. A float32 loss may have been computed in half precision.
TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 1e-2,
    torch.float16: 3e-2,
    torch.bfloat16: 1e-1,
}


class LossOfModel(nn.Module):
    """The user's loss function as a module, so that its parameters can be given as arguments."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction):
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, batch: Any) -> Tensor:
        return self.loss_fn(self.model, batch)


@dataclass(frozen=True)
class Gradients:
    """What is kept of the examples' gradients.

    Attributes:
        losses: (B,).
        total: name → the weighted sum of the examples' gradients.
        sqnorms: name → (B,) squared norms, float64; empty for a batch that was not taken apart.
    """

    losses: Tensor
    total: dict[str, Tensor]
    sqnorms: dict[str, Tensor]

    def in_order(self, order: Tensor) -> Gradients:
        """Return the same with the examples in another order."""
        rows = {name: row[order.to(row.device)] for name, row in self.sqnorms.items()}
        return Gradients(self.losses[order.to(self.losses.device)], self.total, rows)


class Fallback:
    """The norms of a batch, parameters without a rule included; ``options`` are Tracker's."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: LossFunction,
        options: dict[str, Any],
        workspace: int,
    ):
        self._model, self._batch, self._loss_fn = model, batch, loss_fn
        self._options, self._workspace = options, workspace
        self._selected = select_parameters(model, options["parameters"], options["exclude"])
        bounds = None if options["segments"] is None else options["segments"].offsets
        self._division = Division(options["batch_size"], options["batch_dim"], bounds)
        # The state that every forward starts from, so that all see the same buffers and batch.
        self._before = State(model, batch=tensors_in(batch))
        # The parameters without a rule.
        self._unserved: dict[str, nn.Parameter] = {}
        # Whether some of these may be used where torch.autograd.grad finds no gradient; None if
        # only the losses' graph can tell.
        self._hidden: bool | None = False
        # The example of each loss; None if the losses are in the batch's order, or not known to be
        # in another.
        self._order: Tensor | None = None
        # The weights of the sums of gradients that are compared, exact in all dtypes. A plain sum
        # would not show that losses are in another order than the examples.
        size, generator = (options["batch_size"],), torch.Generator().manual_seed(0)
        drawn = torch.randint(-24, 25, size, generator=generator, device="cpu")
        self._multipliers = (2 * drawn + 1) / 16

    def norms(
        self, lean: Callable[..., tuple[GradientNorms, Tensor | None]], nonfinite: str
    ) -> GradientNorms:
        """Return the norms.

        Args:
            lean: takes Tracker's options and returns the norms, and the example of each loss if
                the model reordered them. Its errors name the parameters that have no rule.
            nonfinite: as for per_example_norms.
        """
        stats = self._lean_part(lean)
        if stats is not None and not self._unserved:
            return stats
        self._before.restore()
        with differentiable(self._model):
            together = self._together()
        after = State(self._model, batch=tensors_in(self._batch))
        try:
            with differentiable(self._model):
                alone = self._one_by_one()
        finally:
            self._before.restore()  # attributes may hold the graph of any of these forwards
            after.restore(attributes=False)
        alone = alone if self._order is None else alone.in_order(self._order)
        check_same(alone, together)
        values = alone.sqnorms
        bound: Tensor | float = 0.0
        if stats is not None:
            values.update({name: row.double() for name, row in stats.by_parameter.items()})
            bound = stats.error_bound.double() * stats.norm.double().square()
        unused = torch.zeros_like(next(iter(values.values())))
        names, wide = list(self._selected), any_double(self._selected.values())
        rows = torch.stack([values.get(name, unused) for name in names])
        total = rows.sum(0)
        return summarise(
            names, rows, total, lambda: torch.where(total != 0, bound / total, 0.0),
            together.losses, nonfinite, wide,
        )  # fmt: skip

    def _lean_part(
        self, lean: Callable[..., tuple[GradientNorms, Tensor | None]]
    ) -> GradientNorms | None:
        """Return the norms over all parameters that have a rule, and note those that have none.

        None if the losses use no parameter that has a rule.
        """
        stats = None
        while stats is None and len(self._unserved) < len(self._selected):
            exclude = excluding(self._options["exclude"], sorted(self._unserved))
            # PyTorch differentiates the parameters that are left to the fallback.
            native = differentiable(self._model) if self._unserved else nullcontext()
            try:
                with native:
                    stats, self._order = lean(**{**self._options, "exclude": exclude})
            except NothingUsedError:
                if not self._unserved:
                    raise
                break
            except (UnsupportedOperationError, ExampleAxisError, CoupledExamplesError) as error:
                # An error about whose the losses are names no parameter.
                named = set(error.parameters) or set(self._selected)
                if not self._selected.keys() & (named - self._unserved.keys()):
                    raise
                # Coupled examples cannot be taken apart, unless only the gradients of some
                # parameters could not be told apart.
                if isinstance(error, CoupledExamplesError) and not error.parameters:
                    raise
                self._before.restore()
                refused = {*self._unserved, *named, *self._refused()}
                self._unserved = {n: p for n, p in self._selected.items() if n in refused}
                self._before.restore()
        return stats

    def _refused(self) -> set[str]:
        """Return the parameters that a survey refuses; all of them if the survey itself fails."""
        lists = self._division.lists_of_entries(self._batch)
        try:
            found = survey(self._model, self._batch, self._loss_fn, lists, **self._options)
        except (UnsupportedOperationError, CoupledExamplesError):
            self._hidden = None
            return set(self._selected)
        self._hidden = self._hidden or bool(found.functions.inside)
        return set(found.refused)

    def _together(self) -> Gradients:
        """Return the losses of the whole batch, and the weighted sum of their gradients."""
        with torch.enable_grad(), SettledFormats():
            losses = self._loss_fn(self._model, self._batch)
            losses = check_losses(losses, self._division.batch_size)
            hidden = self._hidden
            if hidden is None:
                hidden = any(isinstance(node, BackwardCFunction) for node in nodes_behind(losses))
            weights = self._multipliers
            if self._order is not None:
                weights = weights[self._order.cpu()]
            total = self._gradients(losses * weights.to(losses), hidden=hidden)
            return Gradients(losses.detach(), total, {})

    def _one_by_one(self) -> Gradients:
        """Return losses, squared norms and the weighted sum of gradients of each example alone."""
        try:
            return self._in_chunks()
        except Exception:
            # torch.func refuses control flow on values, checkpoints, autograd Functions without
            # vmap, in-place changes of buffers and randomness, each in its own way. An error of the
            # user's own code is raised again below.
            return self._singly()

    def _in_chunks(self) -> Gradients:
        division, batch = self._division, self._batch
        module = LossOfModel(self._model, self._loss_fn)
        parameters = list(self._unserved.values())
        if any(type(parameter) is not nn.Parameter for parameter in parameters):
            raise TypeError("torch.func would take a parameter of a subclass for a plain tensor")
        if division.bounds is not None:
            raise TypeError("packed examples differ in length")
        if division.has_entries(batch):
            raise TypeError("vmap would give each example all entries of a list")
        # A chunk's gradients, a copy of them in the accumulation dtype, and their squares may exist
        # at once.
        numbers = 3 * sum(parameter.numel() for parameter in parameters)
        chunk = fitting(8 * numbers, division.batch_size, self._workspace)
        tensors = tensors_in(batch)  # in the order of ``map_tensors``
        dims = tuple(map(division.axis, tensors))
        # Under the names that the given model, wrapped or not, has for them.
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        detached = {names[id(parameter)]: parameter.detach() for parameter in parameters}

        def loss_of_one(values, *items):
            # vmap removes the example axis: put one of size 1 back, for a batch of one.
            example = iter(
                item if dim is None else item.unsqueeze(dim)
                for item, dim in zip(items, dims, strict=True)
            )
            losses = torch.func.functional_call(
                module, values, (map_tensors(batch, lambda _: next(example)),)
            )
            if not isinstance(losses, Tensor) or tuple(losses.shape) != (1,):
                raise TypeError("a batch of one did not give one loss")
            return losses.sum(), losses.sum().detach()

        every = torch.func.vmap(torch.func.grad(loss_of_one, has_aux=True), in_dims=(None, *dims))
        losses: list[Tensor] = []
        rows: list[list[Tensor]] = []
        totals: list[Tensor] = []
        with torch.no_grad():
            for start in range(0, division.batch_size, chunk):
                self._before.restore()
                stop = min(start + chunk, division.batch_size)
                part = (
                    tensor if dim is None else tensor.narrow(dim, start, stop - start)
                    for tensor, dim in zip(tensors, dims, strict=True)
                )
                gradients, loss = every(detached, *part)
                losses.append(loss)
                found = list(gradients.values())
                rows.append([torch.func.vmap(sqnorm_of)(gradient) for gradient in found])
                weights = self._multipliers[start:stop]
                sums = [torch.tensordot(weights.to(gradient), gradient, 1) for gradient in found]
                totals = [a.add_(b) for a, b in zip(totals, sums, strict=True)] if totals else sums
                del gradients, found
        sqnorms = (torch.cat(column) for column in zip(*rows, strict=True))
        return Gradients(
            torch.cat(losses),
            dict(zip(self._unserved, totals, strict=True)),
            dict(zip(self._unserved, sqnorms, strict=True)),
        )

    def _singly(self) -> Gradients:
        losses: list[Tensor] = []
        rows: list[list[Tensor]] = []
        total: dict[str, Tensor] = {}
        for number in range(self._division.batch_size):
            self._before.restore()
            with torch.enable_grad(), SettledFormats():
                loss = self._loss_of_one(number)
                gradients = self._gradients(loss)
            losses.append(loss.detach().reshape(()))
            rows.append([sqnorm_of(gradient).to(loss.device) for gradient in gradients.values()])
            weight = float(self._multipliers[number])
            total = {
                name: torch.add(total[name], gradient, alpha=weight) if total else weight * gradient
                for name, gradient in gradients.items()
            }
        columns = map(torch.stack, zip(*rows, strict=True))
        sqnorms = dict(zip(self._unserved, columns, strict=True))
        return Gradients(torch.stack(losses), total, sqnorms)

    def _loss_of_one(self, number: int) -> Tensor:
        example = self._division.take(self._batch, [number])
        try:
            return check_losses(self._loss_fn(self._model, example), 1)
        except Exception as error:
            obstacle = self._division.obstacle(self._batch)
            if obstacle is None:
                raise ExampleAxisError(
                    f"the loss function takes the batch, but not example {number} alone "
                    f'({summary(error)}), so fallback="vmap" cannot compute gradients one example '
                    "at a time. Expected a function that takes any number of examples. Or leave "
                    "the parameters without a rule out by name with exclude=."
                ) from error
            raise ExampleAxisError(
                f'{obstacle}, so fallback="vmap" cannot compute gradients one example at a time '
                f"(example {number} alone: {summary(error)}). Expected nested tuples, lists, "
                "mappings or dataclasses of tensors that hold rows of examples, or labels. Or "
                "leave the parameters without a rule out by name with exclude=."
            ) from error

    def _gradients(self, losses: Tensor, *, hidden: bool = False) -> dict[str, Tensor]:
        """Return name → gradient of the sum of losses; zeros for parameters that they do not use.

        Args:
            losses: to be differentiated.
            hidden: whether a parameter may have a gradient that torch.autograd.grad does not find.
        """
        leaves = list(self._unserved.values())
        # As with rules, gradients are taken before hooks on the parameters change them.
        with without_hooks(leaves):
            gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        named = dict(zip(self._unserved, gradients, strict=True))
        missing = [name for name, found in named.items() if found is None]
        if missing and hidden:
            raise UnsupportedOperationError(
                f"no gradient was found for {missing[:4]}. Either the losses do not use them: then "
                f"leave them out by name with exclude={missing!r}. Or an autograd Function runs a "
                "part of the model and, in its backward, a backward of its own, as checkpoints of "
                "other libraries do: then use torch.utils.checkpoint.checkpoint, or register a "
                "rule for the Function (gs.register_rule).",
                missing,
            )
        return {
            name: torch.zeros_like(self._unserved[name]) if found is None else found.detach()
            for name, found in named.items()
        }


def check_same(alone: Gradients, together: Gradients) -> None:
    """Raise if losses, or weighted sums of gradients, differ between examples alone and batch."""
    dtypes = {together.losses.dtype, *(total.dtype.to_real() for total in together.total.values())}
    tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
    _check_same_losses(alone.losses.double(), together.losses.double(), tolerance)
    sizes = {name: row.sum().item() ** 0.5 for name, row in alone.sqnorms.items()}
    whole = sum(size**2 for size in sizes.values()) ** 0.5
    for name, size in sizes.items():
        expected = together.total[name]
        gap = sqnorm_of(alone.total[name] - expected).item() ** 0.5
        allowed = tolerance * (size + sqnorm_of(expected).item() ** 0.5 + tolerance * whole)
        # Gradients that are not finite cannot be compared: NaN exceeds nothing.
        if gap > allowed:
            raise CoupledExamplesError(
                f"the gradients of {name!r} computed one example at a time do not add up to that "
                f"of the batch: they are {gap:.6g} apart, expected {allowed:.2g} at most. So "
                f"{_NOT_ALONE}"
            )


_NOT_ALONE = (
    'fallback="vmap" cannot compute gradients one example at a time. Is the forward random '
    "(dropout: call model.eval())? Do examples depend on each other, or is the loss divided by a "
    "quantity of the whole batch? Are the losses in another order than the batch? Does the batch "
    "hold a tensor or list that has as many entries as there are examples by accident?"
)


def _check_same_losses(alone: Tensor, together: Tensor, tolerance: float) -> None:
    finite = together.isfinite()
    typical = together[finite].abs().mean()
    allowed = tolerance * (together.abs() + typical)
    different = ~((alone - together).abs() <= allowed) & finite
    if bool(different.any()):
        worst = int(different.nonzero()[0])
        raise CoupledExamplesError(
            f"the loss of example {worst} is {alone[worst].item():.6g} when it is computed alone "
            f"and {together[worst].item():.6g} in its batch, so {_NOT_ALONE}"
        )


def sqnorm_of(gradient: Tensor) -> Tensor:
    """Return ‖gradient‖² in float64; the gradient may be sparse or complex."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return torch.linalg.vector_norm(gradient.abs(), dtype=torch.float64).square()
