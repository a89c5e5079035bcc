"""Inner products of per-example gradients: between batches, between checkpoints, with a direction.

The factors of one batch are kept; the backward of another batch consumes them layer by layer.
Neither side's gradients are formed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from gradstats._complex import any_double, as_real, real_shape
from gradstats._factors import map_tensors
from gradstats.capture._consumers import (
    Against,
    Along,
    Consumer,
    Keep,
    KeptParameter,
    Together,
    storages_of,
)
from gradstats.capture._nodes import tensors_in
from gradstats.capture._selection import matching_names, select_parameters
from gradstats.capture._tracker import Tracker
from gradstats.capture._uses import Settings
from gradstats.errors import CoverageError, ExampleAxisError, NonFiniteGradientError, TrackingError
from gradstats.statistics._arguments import (
    check_call,
    check_choice,
    check_model,
    check_workspace,
)
from gradstats.statistics._batches import on_a_copy
from gradstats.statistics._loss import differentiate_losses, examples_in
from gradstats.statistics._result import check_finite

LossFunction = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class KeptGradients:
    """The per-example gradients of one batch, kept as factors.

    They do not depend on the model any more: its weights may change, or be replaced by those of
    another checkpoint.

    Attributes:
        losses: (B,) the losses.
        sqnorm: (B,) float64 squared norms of the gradients.
        shapes: name → shape of every parameter that was tracked.
        parameters: name → factors and norms, for every parameter that the losses depend on.
    """

    losses: Tensor
    sqnorm: Tensor
    shapes: Mapping[str, tuple[int, ...]]
    parameters: dict[str, KeptParameter]

    @property
    def names(self) -> list[str]:
        """The names of the tracked parameters."""
        return list(self.shapes)

    @property
    def nbytes(self) -> int:
        """Bytes that the factors hold, each storage counted once.

        Copies of the parameters that derived tensors (weight_norm, 1 + w) are computed from stay
        on the device and are not counted.
        """
        factors = [f for parameter in self.parameters.values() for f in parameter.factors]
        return sum(storages_of(factors).values())

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.losses)

    def to(self, device: torch.device | str) -> KeptGradients:
        """Return the same with its factors on another device."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device)

        parameters = {
            name: KeptParameter([map_tensors(f, move) for f in kept.factors], move(kept.sizes))
            for name, kept in self.parameters.items()
        }
        return replace(
            self, losses=move(self.losses), sqnorm=move(self.sqnorm), parameters=parameters
        )


@dataclass(frozen=True)
class Products:
    """Inner products of one batch's gradients with kept ones.

    Attributes:
        values: (B_kept, B) float64, or (B,) on the diagonal.
        losses: (B,) the losses of this batch.
        sqnorm: (B,) float64 squared norms of this batch's gradients.
        by_parameter: name → the parameter's part of ``values``; None unless asked for.
    """

    values: Tensor
    losses: Tensor
    sqnorm: Tensor
    by_parameter: Mapping[str, Tensor] | None


def keep(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    *,
    batch_dim: int = 0,
    cu_seqlens: Tensor | None = None,
    parameters: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    workspace: int | None = None,
    nonfinite: str = "raise",
    device_bytes: int | None = None,
) -> KeptGradients:
    """Return the per-example gradients of a batch as factors, for any number of later products.

    Args:
        model, batch, loss_fn, batch_dim, cu_seqlens, parameters, exclude, workspace, nonfinite: as
            for per_example_norms.
        device_bytes: bytes of factors that may stay on the device; what is beyond moves to pinned
            memory of the host. None leaves all on the device.

    Cost:
        A forward and a backward without weight gradients, and per-example norms. The factors take
        about the memory of the activations; for a layer whose gradients are smaller than its
        factors, that of the gradients.
    """
    borrowed = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
    consumer = Keep(borrowed, device_bytes)
    tracker, losses = run(
        model, batch, loss_fn, consumer, batch_dim, cu_seqlens, parameters, exclude, workspace
    )
    check_finite(tracker, nonfinite)
    shapes = {root.name: real_shape(root.parameter) for root in tracker.roots}
    return KeptGradients(losses.detach(), tracker.reports.sqnorm, shapes, consumer.kept)


def products(
    kept: KeptGradients | Sequence[KeptGradients],
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    *,
    batch_dim: int = 0,
    cu_seqlens: Tensor | None = None,
    parameters: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    workspace: int | None = None,
    nonfinite: str = "raise",
    pairs: str = "all",
    per_parameter: bool = False,
    consume: bool = False,
) -> Any:
    """Return the inner products of a batch's gradients with kept ones, in one backward.

    Args:
        kept: what ``keep`` returned for another batch, or several of them.
        model, batch, loss_fn, batch_dim, cu_seqlens, parameters, exclude, workspace, nonfinite: as
            for per_example_norms; the same parameters as were kept.
        pairs: "all", or "diagonal" for the i-th kept example with the i-th of the batch.
        per_parameter: return each parameter's part too.
        consume: let go of the kept factors as they are used; they serve no second batch.

    Returns:
        Products; a list of them, one for each, where several were given.
    """
    blocks = [kept] if isinstance(kept, KeptGradients) else list(kept)
    check_choice("pairs", pairs, ("all", "diagonal"))
    diagonal = pairs == "diagonal"
    shapes = shapes_of(model, parameters, exclude)
    batch_size, _ = examples_in(batch, batch_dim, cu_seqlens, model)
    for block in blocks:
        check_same_parameters(block.shapes, shapes)
        if diagonal:
            check_equal_sizes(len(block), batch_size)
        if not block.parameters:
            raise TrackingError(
                "these kept gradients were consumed by an earlier call: keep them again, or pass "
                "consume=False."
            )
    consumer = Against(
        [block.parameters for block in blocks],
        diagonal=diagonal,
        per_parameter=per_parameter,
        consume=consume,
    )
    try:
        tracker, losses = run(
            model, batch, loss_fn, consumer, batch_dim, cu_seqlens, parameters, exclude, workspace
        )
    finally:
        if consume:
            for block in blocks:
                block.parameters.clear()
    check_finite(tracker, nonfinite)
    loss, sqnorm = losses.detach(), tracker.reports.sqnorm
    results = []
    for block, value, parts in zip(blocks, consumer.values, consumer.by_parameter, strict=True):
        size = (batch_size,) if diagonal else (len(block), batch_size)
        unused = sqnorm.new_zeros(size)
        every = {name: parts.get(name, unused) for name in shapes} if per_parameter else None
        results.append(Products(unused if value is None else value, loss, sqnorm, every))
    return results[0] if isinstance(kept, KeptGradients) else results


@overload
def inner_products(
    model_a: nn.Module,
    batch_a: Any,
    model_b: nn.Module,
    batch_b: Any,
    loss_fn: LossFunction,
    *,
    pairs: str = "all",
    batch_dim: int = 0,
    cu_seqlens: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    parameters: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    workspace: int | None = None,
    nonfinite: str = "raise",
    per_parameter: Literal[False] = False,
) -> Tensor: ...


@overload
def inner_products(
    model_a: nn.Module,
    batch_a: Any,
    model_b: nn.Module,
    batch_b: Any,
    loss_fn: LossFunction,
    *,
    pairs: str = "all",
    batch_dim: int = 0,
    cu_seqlens: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    parameters: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    workspace: int | None = None,
    nonfinite: str = "raise",
    per_parameter: Literal[True],
) -> dict[str, Tensor]: ...


def inner_products(
    model_a: nn.Module,
    batch_a: Any,
    model_b: nn.Module,
    batch_b: Any,
    loss_fn: LossFunction,
    *,
    pairs: str = "all",
    batch_dim: int = 0,
    cu_seqlens: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    parameters: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    workspace: int | None = None,
    nonfinite: str = "raise",
    per_parameter: bool = False,
) -> Tensor | dict[str, Tensor]:
    """Return the exact inner products ⟨∇ℓ_i(w_a), ∇ℓ_j(w_b)⟩ without forming the gradients.

    The two models are one architecture with different weights, say two checkpoints, or one model
    given twice. A model and batch with themselves (the same objects) take one backward, and
    products are computed once for ⟨i, j⟩ and ⟨j, i⟩. Everything else takes one backward for either
    side, one after the other.

    Args:
        model_a, model_b: modules with the same parameters; both are left as they were found.
        batch_a, batch_b: what ``loss_fn`` takes; their sizes and lengths may differ.
        loss_fn: ``loss_fn(model, batch) -> (B,)`` unreduced losses.
        pairs: "all" for every i of ``batch_a`` with every j of ``batch_b``, or "diagonal" for the
            i-th with the i-th.
        batch_dim: the example axis of the data.
        cu_seqlens: bounds of packed examples (see per_example_norms): one for both batches, or a
            pair, either of which may be None.
        parameters, exclude: fnmatch patterns over parameter names; all that require grad by
            default.
        workspace: bytes of scratch memory; 256 MiB by default.
        nonfinite: "raise" for gradients with NaN or infinity, or "keep" to return what they give.
        per_parameter: return name → inner products over that parameter instead of their sum.

    Returns:
        (B_a, B_b), or (B,) on the diagonal; float32, float64 for float64 models; in units of loss².

    Raises:
        CoverageError: the models' parameters differ in name or shape.
        ExampleAxisError: ``pairs="diagonal"`` with batches of different sizes.
        See gradstats.errors for what both batches are checked for.

    Cost:
        A forward and a backward without weight gradients for either side. Each weight then takes
        the least of T·T'·(d_in + d_out) for every pair and d_in·d_out·(T·B_a + T'·B_b + B_a·B_b).
        Memory: the layer inputs and output gradients of ``batch_a`` are kept until the backward of
        ``batch_b`` has consumed them, layer by layer; and the workspace.

    Source:
        Pruthi et al., arXiv 2002.08484 (TracIn); the identity ⟨g aᵀ, g' a'ᵀ⟩ = (a·a')(g·g') of
        Goodfellow, arXiv 1510.01799.
    """
    check_model(model_a, "model_a")
    check_model(model_b, "model_b")
    check_call(model_a, loss_fn)
    check_choice("pairs", pairs, ("all", "diagonal"))
    check_choice("nonfinite", nonfinite, ("raise", "keep"))
    check_same_parameters(
        shapes_of(model_a, parameters, exclude), shapes_of(model_b, parameters, exclude)
    )
    bounds = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    if len(bounds) != 2:
        raise ExampleAxisError(
            f"cu_seqlens has {len(bounds)} entries, expected a pair, one for each batch; or one "
            "tensor for both."
        )
    sides = zip((batch_a, batch_b), bounds, (model_a, model_b), strict=True)
    sizes = [examples_in(batch, batch_dim, cu, model)[0] for batch, cu, model in sides]
    if pairs == "diagonal":
        check_equal_sizes(*sizes)
    options: dict[str, Any] = {
        "batch_dim": batch_dim,
        "parameters": parameters,
        "exclude": exclude,
        "workspace": workspace,
    }
    parts: Mapping[str, Tensor] | None
    if model_a is model_b and batch_a is batch_b and bounds[0] is bounds[1]:
        together = Together(alignment=False, gram=pairs == "all", per_parameter=per_parameter)
        tracker, _ = run(model_a, batch_a, loss_fn, together, cu_seqlens=bounds[0], **options)
        reports = check_finite(tracker, nonfinite)
        if together.pairs is not None:
            result, parts = together.pairs, together.pairs_by_parameter
        else:
            result = tracker.reports.sqnorm
            parts = {root.name: row for root, row in zip(tracker.roots, reports, strict=True)}
    else:
        loss_fn = on_a_copy(loss_fn)
        kept = keep(model_a, batch_a, loss_fn, nonfinite=nonfinite, cu_seqlens=bounds[0], **options)
        found = products(
            kept, model_b, batch_b, loss_fn, nonfinite=nonfinite, pairs=pairs,
            per_parameter=per_parameter, consume=True, cu_seqlens=bounds[1], **options,
        )  # fmt: skip
        result, parts = found.values, found.by_parameter
    dtype = result_dtype(model_a, model_b)
    narrow = result.to(dtype)
    if nonfinite == "raise" and not bool(narrow.isfinite().all()):
        raise NonFiniteGradientError(
            f"an inner product comes to {result.abs().max().item():.3g}, expected what {dtype} "
            "holds. Divide the losses by a constant, use model.double(), or pass "
            'nonfinite="keep" to have the values returned.'
        )
    if not per_parameter or parts is None:
        return narrow
    unused = torch.zeros_like(result)
    shapes = shapes_of(model_a, parameters, exclude)
    return {name: parts.get(name, unused).to(dtype) for name in shapes}


@overload
def alignment(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    direction: Mapping[str, Tensor] | str,
    *,
    batch_dim: int = 0,
    cu_seqlens: Tensor | None = None,
    parameters: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    workspace: int | None = None,
    nonfinite: str = "raise",
    per_parameter: Literal[False] = False,
) -> Tensor: ...


@overload
def alignment(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    direction: Mapping[str, Tensor] | str,
    *,
    batch_dim: int = 0,
    cu_seqlens: Tensor | None = None,
    parameters: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    workspace: int | None = None,
    nonfinite: str = "raise",
    per_parameter: Literal[True],
) -> dict[str, Tensor]: ...


def alignment(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    direction: Mapping[str, Tensor] | str,
    *,
    batch_dim: int = 0,
    cu_seqlens: Tensor | None = None,
    parameters: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    workspace: int | None = None,
    nonfinite: str = "raise",
    per_parameter: bool = False,
) -> Tensor | dict[str, Tensor]:
    """Return the exact inner product of every example's gradient with one direction.

    ⟨∇ℓ_i, v⟩ = Σ_p ⟨∇_p ℓ_i, v_p⟩ over the parameters p: not divided by any norm (the cosines with
    the mean gradient are ``per_example_norms(..., alignment=True).cosine``).

    Args:
        model, batch, loss_fn, batch_dim, cu_seqlens, parameters, exclude, workspace, nonfinite: as
            for per_example_norms.
        direction: v as name → tensor of the parameter's shape, for every tracked parameter: the
            mean gradient of validation data, an update, a task vector. Or "mean", the mean of the
            batch's own gradients, (1/B) Σ_j ∇ℓ_j.
        per_parameter: return name → (B,) inner products over that parameter instead of their sum.

    Returns:
        (B,) float32, float64 for float64 models; in units of loss times those of v for the weights,
        with "mean" of loss².

    Raises:
        CoverageError: the direction's names or shapes are not those of the tracked parameters.
        NonFiniteGradientError: an inner product is NaN or infinite.
        ExampleAxisError: among others, losses in another order than the batch.
        See gradstats.errors for what the batch is checked for.

    Cost:
        A forward and a backward without weight gradients, and as much as one forward pass for the
        products with v; with "mean" also the weight gradients. Memory: the plain step's, v and the
        workspace.

    Source:
        Goodfellow, arXiv 1510.01799; Pruthi et al., arXiv 2002.08484.
    """
    check_call(model, loss_fn)
    check_choice("nonfinite", nonfinite, ("raise", "keep"))
    shapes = shapes_of(model, parameters, exclude)
    consumer: Along | Together
    if isinstance(direction, str):
        if direction != "mean":
            raise TrackingError(
                f'direction is {direction!r}, expected "mean" or a mapping from parameter names to '
                "tensors."
            )
        consumer = Together(alignment=True, gram=False)
    else:
        consumer = Along(check_direction(direction, shapes))
    tracker, losses = run(
        model, batch, loss_fn, consumer, batch_dim, cu_seqlens, parameters, exclude, workspace
    )
    values = consumer.with_sum if isinstance(consumer, Together) else consumer.values
    device = tracker.device
    scale = 1 / len(losses) if isinstance(consumer, Together) else 1.0
    unused = torch.zeros(len(losses), dtype=torch.float64, device=device)
    by_parameter = {name: scale * values.get(name, unused).to(device) for name in shapes}
    dtype = result_dtype(model)
    whole = torch.stack(list(by_parameter.values())).sum(0).to(dtype)
    if nonfinite == "raise" and not bool(whole.isfinite().all()):
        bad = (~whole.isfinite()).nonzero().squeeze(1).tolist()
        raise NonFiniteGradientError(
            f"the inner product with the direction is not finite for example"
            f"{'s' if len(bad) > 1 else ''} {bad}. Look at these examples' losses and at the "
            'direction, or pass nonfinite="keep" to have the values returned.'
        )
    if per_parameter:
        return {name: value.to(dtype) for name, value in by_parameter.items()}
    return whole


def run(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    consumer: Consumer,
    batch_dim: int = 0,
    cu_seqlens: Tensor | None = None,
    parameters: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    workspace: int | None = None,
) -> tuple[Tracker, Tensor]:
    """Run a forward and a backward without weight gradients that feed a consumer.

    Returns:
        The closed context and the losses.
    """
    batch_size, segments = examples_in(batch, batch_dim, cu_seqlens, model)
    settings = Settings(
        weight_gradients=False, fused=True, workspace=check_workspace(workspace), consumer=consumer
    )
    tracker = Tracker(
        model,
        batch_size=batch_size,
        batch_dim=batch_dim,
        segments=segments,
        settings=settings,
        parameters=parameters,
        exclude=exclude,
    )
    return tracker, differentiate_losses(tracker, model, batch, loss_fn)


def shapes_of(
    model: nn.Module, parameters: Sequence[str] | str | None, exclude: Sequence[str] | str
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter that is to be tracked, in real numbers, by name."""
    selected = select_parameters(model, parameters, exclude)
    return {name: real_shape(parameter) for name, parameter in selected.items()}


def check_same_parameters(
    first: Mapping[str, tuple[int, ...]], second: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise unless two models track parameters of the same names and shapes."""
    if first == second:
        return
    differences = [
        f"{name!r} is {_describe(first.get(name))} in the first and {_describe(second.get(name))} "
        "in the second"
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]
    more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
    raise CoverageError(
        "inner products need two models with the same trainable parameters, but "
        + "; ".join(differences[:3])
        + more
        + ". Pass two checkpoints of one architecture, with the same parameters tied and the same "
        "ones requiring grad, or choose those they share with parameters= and exclude=."
    )


def _describe(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"


def check_equal_sizes(first: int, second: int) -> None:
    """Raise unless two batches have the same number of examples."""
    if first != second:
        raise ExampleAxisError(
            f'pairs="diagonal" pairs the i-th examples of two batches, but these have {first} and '
            f'{second} examples. Pass batches of equal size, or pairs="all".'
        )


def check_direction(
    direction: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return a direction under the tracked parameters' names, or raise."""
    if not isinstance(direction, Mapping):
        raise CoverageError(
            f"the direction is {type(direction).__name__}, expected a mapping from parameter names "
            'to tensors, or "mean".'
        )
    names = matching_names(direction, shapes)
    named = {names[name]: value for name, value in direction.items()}
    missing = [name for name in shapes if name not in named]
    extra = [name for name in named if name not in shapes]
    if missing or extra:
        raise CoverageError(
            f"the direction does not name the tracked parameters: missing {missing[:5]}, not "
            f"tracked {extra[:5]}. Give one tensor for every parameter, zeros where you want none "
            "of it, or leave parameters out of both with exclude=."
        )
    for name, value in named.items():
        if not isinstance(value, Tensor) or real_shape(value) != shapes[name]:
            got = real_shape(value) if isinstance(value, Tensor) else type(value).__name__
            raise CoverageError(
                f"the direction for {name!r} is {got}, expected a tensor of the parameter's shape "
                f"{shapes[name]}, where complex numbers count as pairs."
            )
        if not as_real(value).is_floating_point():
            raise CoverageError(
                f"the direction for {name!r} has dtype {value.dtype}, expected floating point."
            )
    return named


def result_dtype(*models: nn.Module) -> torch.dtype:
    """Return float64 where a model has a float64 parameter, else float32."""
    wide = any(any_double(model.parameters()) for model in models)
    return torch.float64 if wide else torch.float32
