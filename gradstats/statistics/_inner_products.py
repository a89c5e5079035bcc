"""Inner products of per-example gradients: of two batches, or of two checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from gradstats._compiler import in_python
from gradstats.capture.operations._nested import tensors_in
from gradstats.capture.parameters._consumers import WithinBatch
from gradstats.errors import ExampleAxisError, NonFiniteGradientError, TrackingError
from gradstats.statistics._arguments import (
    Choices,
    LossFunction,
    Options,
    check_call,
    check_choice,
    check_flags,
    check_model,
    shapes_of,
)
from gradstats.statistics._backward import run
from gradstats.statistics._batches import on_a_copy
from gradstats.statistics._kept import check_same_parameters, keep, products
from gradstats.statistics._loss import check_batch_dim, examples_in
from gradstats.statistics._result import finite_sqnorms, result_dtype
from gradstats.statistics._state import Contents, Versions

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def inner_products(
    model_a: nn.Module,
    batch_a: Any,
    model_b: nn.Module,
    batch_b: Any,
    loss_fn: LossFunction,
    *,
    pairs: str = "all",
    cu_seqlens: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    nonfinite: str = "raise",
    per_parameter: Literal[False] = False,
    **choices: Unpack[Choices],
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
    cu_seqlens: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    nonfinite: str = "raise",
    per_parameter: Literal[True],
    **choices: Unpack[Choices],
) -> dict[str, Tensor]: ...


@in_python
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

    The models are two checkpoints of one architecture, or one model given twice. If both models
    and both batches are the same objects, one backward is run, and each ⟨i, j⟩ = ⟨j, i⟩ is computed
    once. Otherwise each side runs one forward and one backward, one side after the other.

    Args:
        model_a, model_b: modules with parameters of the same names and shapes. Both are left
            unchanged, except for buffers that their own forwards write to.
        batch_a, batch_b: whatever ``loss_fn`` takes; their sizes and lengths may differ.
        loss_fn: ``loss_fn(model, batch) -> (B,)`` unreduced losses.
        pairs: "all" for every i of ``batch_a`` with every j of ``batch_b``, or "diagonal" for the
            i-th with the i-th.
        batch_dim: the example axis of the data.
        cu_seqlens: bounds of packed examples (see per_example_norms): one tensor for both batches,
            or a pair, either of which may be None.
        parameters, exclude: fnmatch patterns over parameter names; all that require grad by
            default.
        workspace: bytes of scratch memory; 256 MiB by default.
        nonfinite: "raise" an error for gradients with NaN or infinity, or "keep" what they give.
        per_parameter: return name → inner products over that parameter instead of their sum.

    Returns:
        (B_a, B_b), or (B,) for the diagonal; float32, or float64 for float64 models; in units of
        loss².

    Raises:
        CoverageError: the models' parameters differ in name or shape.
        ExampleAxisError: ``pairs="diagonal"`` with batches of different sizes.
        TrackingError: an argument has the wrong type or value, or the losses use none of the
            parameters.
        The other errors that per_example_norms raises.

    Cost:
        For each side a forward and a backward without weight gradients. For all pairs, each weight
        then costs the smaller of B_a·B_b·T·T'·(d_in + d_out) and d_in·d_out·(T·B_a + T'·B_b +
        B_a·B_b) multiply-adds. Memory: the workspace, and the layer inputs and output gradients of
        ``batch_a``, which the backward of ``batch_b`` frees layer by layer.

    Source:
        Pruthi et al., arXiv 2002.08484 (TracIn); the identity ⟨g aᵀ, g' a'ᵀ⟩ = (a·a')(g·g') of
        Goodfellow, arXiv 1510.01799.
    """
    check_model(model_a, "model_a")
    check_model(model_b, "model_b")
    check_call(model_a, loss_fn)
    check_choice("pairs", pairs, ("all", "diagonal"))
    check_choice("nonfinite", nonfinite, ("raise", "keep"))
    check_flags(per_parameter=per_parameter)
    batch_dim = check_batch_dim(batch_dim)
    options: Options = {
        "batch_dim": batch_dim,
        "parameters": parameters,
        "exclude": exclude,
        "workspace": workspace,
    }
    shapes = shapes_of(model_a, options)
    check_same_parameters(shapes, shapes_of(model_b, options))
    bounds = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    if len(bounds) != 2:
        raise ExampleAxisError(
            f"cu_seqlens is a tuple of {len(bounds)}, expected a pair, one for each batch, or one "
            "tensor for both."
        )
    size_a, _ = examples_in(batch_a, batch_dim, bounds[0], model_a)
    size_b, _ = examples_in(batch_b, batch_dim, bounds[1], model_b)
    diagonal = pairs == "diagonal"
    if diagonal and size_a != size_b:
        raise ExampleAxisError(
            f'pairs="diagonal" pairs the i-th examples of both batches, but these have {size_a} '
            f'and {size_b} examples. Pass batches of equal size, or pairs="all".'
        )
    options_a: Options = {**options, "cu_seqlens": bounds[0]}
    options_b: Options = {**options, "cu_seqlens": bounds[1]}
    parts: Mapping[str, Tensor] | None
    if model_a is model_b and batch_a is batch_b and bounds[0] is bounds[1]:
        within = WithinBatch(alignment=False, gram=not diagonal, per_parameter=per_parameter)
        tracker, _ = run(model_a, batch_a, loss_fn, within, **options_a)
        sqnorms = finite_sqnorms(tracker, nonfinite)
        if within.pairs is not None:
            result, parts = within.pairs, within.pairs_by_parameter
        else:
            result = sqnorms.sum(0)
            parts = {root.name: row for root, row in zip(tracker.roots, sqnorms, strict=True)}
    else:
        loss_fn = on_a_copy(loss_fn)
        tensors = tensors_in(batch_b)
        before = Versions(tensors)
        kept = keep(model_a, batch_a, loss_fn, nonfinite=nonfinite, **options_a)
        shared = Contents(tensors) if before.changed else None
        (found,) = products(
            [kept], model_b, batch_b, loss_fn, nonfinite=nonfinite, diagonal=diagonal,
            per_parameter=per_parameter, consume=True, **options_b,
        )  # fmt: skip
        if shared is not None and shared.changed:
            raise TrackingError(
                "loss_fn writes into the batch, of which both sides were given the same tensors, "
                "so the second side was of other data than the first. Expected a function that "
                "leaves the batch as it is: let it work on a copy."
            )
        result, parts = found.values, found.by_parameter
    dtype = result_dtype(model_a, model_b)
    narrow = result.to(dtype)
    if nonfinite == "raise" and not bool(narrow.isfinite().all()):
        raise NonFiniteGradientError(
            f"an inner product is {result.abs().max().item():.3g}, which {dtype} cannot hold. "
            'Divide the losses by a constant, use model.double(), or pass nonfinite="keep" to get '
            "the values as they are."
        )
    if not per_parameter or parts is None:
        return narrow
    unused = torch.zeros_like(result)
    return {name: parts.get(name, unused).to(dtype) for name in shapes}
