"""Inner products of per-example gradients with one direction."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from gradstats._compiler import in_python
from gradstats._complex import as_real, real_shape
from gradstats._values import unlike_numbers
from gradstats.capture._selection import matching_names
from gradstats.capture.parameters._consumers import Along, WithinBatch
from gradstats.errors import CoverageError, NonFiniteGradientError, TrackingError
from gradstats.statistics._arguments import (
    LossFunction,
    Options,
    check_call,
    check_choice,
    check_flags,
    shapes_of,
)
from gradstats.statistics._backward import run
from gradstats.statistics._result import examples_named, result_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def alignment(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    direction: Mapping[str, Tensor | None] | str,
    *,
    nonfinite: str = "raise",
    per_parameter: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def alignment(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    direction: Mapping[str, Tensor | None] | str,
    *,
    nonfinite: str = "raise",
    per_parameter: Literal[True],
    **options: Unpack[Options],
) -> dict[str, Tensor]: ...


@in_python
def alignment(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    direction: Mapping[str, Tensor | None] | str,
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

    ⟨∇ℓ_i, v⟩ = Σ_p ⟨∇_p ℓ_i, v_p⟩ over the parameters p. To get cosines, divide by ‖v‖ and by the
    norms of ``per_example_norms``; cosines with the mean gradient are
    ``per_example_norms(..., alignment=True).cosine``.

        loss_fn(model, validation).mean().backward()
        named = model.named_parameters()
        direction = {name: p.grad for name, p in named if p.requires_grad}
        along = gs.alignment(model, batch, loss_fn, direction)     # positive: a step on i helps

    Args:
        model, batch, loss_fn, batch_dim, cu_seqlens, parameters, exclude, workspace, nonfinite: as
            for per_example_norms.
        direction: v as a mapping from the name of every tracked parameter to a tensor of its shape,
            or to None for zeros, as in ``.grad``: the mean gradient of validation data, an update,
            a task vector. Or "mean", for the mean of the batch's own gradients, (1/B) Σ_j ∇ℓ_j.
        per_parameter: return name → (B,) inner products over that parameter instead of their sum.

    Returns:
        (B,) float32, or float64 for float64 models; in units of loss times units of v, which for
        "mean" is loss².

    Raises:
        CoverageError: the direction's names or shapes are not those of the tracked parameters, or
            it is None for all of them.
        NonFiniteGradientError: an inner product is NaN or infinite.
        ExampleAxisError: it is not known which rows, or which losses, belong to which example.
        TrackingError: an argument has the wrong type or value, or the losses use none of the
            parameters.
        The other errors that per_example_norms raises.

    Cost:
        A forward and a backward without weight gradients, and about one more forward pass for the
        products with v; with "mean" also the weight gradients. Memory: that of the plain step, v,
        and the workspace.

    Source:
        Goodfellow, arXiv 1510.01799; Pruthi et al., arXiv 2002.08484.
    """
    check_call(model, loss_fn)
    check_choice("nonfinite", nonfinite, ("raise", "keep"))
    check_flags(per_parameter=per_parameter)
    options: Options = {
        "batch_dim": batch_dim,
        "cu_seqlens": cu_seqlens,
        "parameters": parameters,
        "exclude": exclude,
        "workspace": workspace,
    }
    shapes = shapes_of(model, options)
    if isinstance(direction, str):
        if direction != "mean":
            raise TrackingError(
                f'direction is {direction!r}, expected "mean" or a mapping from parameter names to '
                "tensors."
            )
        within = WithinBatch(alignment=True, gram=False)
        tracker, losses = run(model, batch, loss_fn, within, **options)
        # The consumer has products with the sum over the batch.
        values = {name: value / len(losses) for name, value in within.with_sum.items()}
    else:
        along = Along(check_direction(direction, shapes))
        tracker, losses = run(model, batch, loss_fn, along, **options)
        values = along.values
    device, dtype = tracker.device, result_dtype(model)
    unused = torch.zeros(len(losses), dtype=torch.float64, device=device)
    by_parameter = {name: values.get(name, unused).to(device) for name in shapes}
    whole = torch.stack(list(by_parameter.values())).sum(0).to(dtype)
    if nonfinite == "raise" and not bool(whole.isfinite().all()):
        raise NonFiniteGradientError(
            f"the inner product with the direction is not finite for {examples_named(whole)}. Look "
            'at their losses and at the direction, or pass nonfinite="keep" to get the values as '
            "they are."
        )
    if per_parameter:
        return {name: value.to(dtype) for name, value in by_parameter.items()}
    return whole


def check_direction(
    direction: Mapping[str, Tensor | None], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return a direction under the tracked parameters' names, or raise."""
    if not isinstance(direction, Mapping):
        raise TrackingError(
            f"the direction is {type(direction).__name__}, expected a mapping from parameter names "
            'to tensors, or "mean".'
        )
    for name in direction:
        if not isinstance(name, str):
            raise TrackingError(
                f"the direction holds {reprlib.repr(name)}, expected parameter names, as "
                "model.named_parameters() has them."
            )
    names = matching_names(direction, shapes)
    named = {names[name]: value for name, value in direction.items()}
    missing = [name for name in shapes if name not in named]
    extra = [name for name in named if name not in shapes]
    if missing or extra:
        both = ((missing, "are missing"), (extra, "are not tracked"))
        found = " and ".join(f"{which[:5]} {problem}" for which, problem in both if which)
        raise CoverageError(
            f"the direction does not name the tracked parameters: {found}. Expected one tensor, or "
            "None for zeros, for each name that model.named_parameters() has (tied parameters have "
            "one name, the first). To leave parameters out of both, pass exclude=."
        )
    given = {name: value for name, value in named.items() if value is not None}
    if not given:
        raise CoverageError(
            "the direction is None for every parameter, expected a tensor for at least one. If it "
            "is made of gradients, read them after the backward and before zero_grad() clears them."
        )
    for name, value in given.items():
        if not isinstance(value, Tensor):
            unfit: str | None = type(value).__name__
        else:
            unfit = None if value.is_sparse else unlike_numbers(value)
        if unfit is not None:
            raise TrackingError(
                f"the direction for {name!r} is {unfit}, expected a tensor of the parameter's "
                f"shape {shapes[name]}."
            )
        if real_shape(value) != shapes[name]:
            pairs = " (complex numbers count as pairs)" if value.is_complex() else ""
            raise CoverageError(
                f"the direction for {name!r} has shape {real_shape(value)}, expected the "
                f"parameter's {shapes[name]}{pairs}."
            )
        if not as_real(value).is_floating_point():
            raise TrackingError(
                f"the direction for {name!r} has dtype {value.dtype}, expected floating point."
            )
    # Gradients of embeddings with sparse=True are sparse.
    return {name: value.to_dense() if value.is_sparse else value for name, value in given.items()}
