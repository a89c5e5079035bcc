"""A batch's gradients kept as factors, and their inner products with another batch's gradients.

The backward of the other batch uses the factors layer by layer. No gradients are formed on either
side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gradstats._complex import real_shape
from gradstats._factors import tensors_of
from gradstats.capture.parameters._consumers import Against, Keep, KeptParameter
from gradstats.errors import CoverageError
from gradstats.statistics._arguments import LossFunction, Options, shapes_of
from gradstats.statistics._backward import run
from gradstats.statistics._result import finite_sqnorms

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class KeptGradients:
    """The per-example gradients of one batch, kept as factors.

    They no longer depend on the model: its weights may change, or be replaced by another
    checkpoint's.

    Attributes:
        sqnorm: (B,) float64 squared norms of the gradients.
        shapes: name → shape of every parameter that was tracked.
        parameters: name → factors and norms, for every parameter that the losses depend on.
    """

    sqnorm: Tensor
    shapes: Mapping[str, tuple[int, ...]]
    parameters: dict[str, KeptParameter]

    @property
    def nbytes(self) -> int:
        """Bytes that the factors hold, each storage counted once.

        Not counted are copies of the parameters that derived tensors (weight_norm, 1 + w) are
        computed from; they stay on the device.
        """
        factors = (f for parameter in self.parameters.values() for f in parameter.factors)
        storages = [tensor.untyped_storage() for f in factors for tensor in tensors_of(f)]
        return sum({each.data_ptr(): each.nbytes() for each in storages}.values())

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.sqnorm)


@dataclass(frozen=True)
class Products:
    """Inner products of one batch's gradients with kept ones.

    Attributes:
        values: (B_kept, B) float64, or (B,) on the diagonal.
        sqnorm: (B,) float64 squared norms of this batch's gradients.
        by_parameter: name → the parameter's part of ``values``; None unless requested.
    """

    values: Tensor
    sqnorm: Tensor
    by_parameter: Mapping[str, Tensor] | None


def keep(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    *,
    nonfinite: str = "raise",
    **options: Unpack[Options],
) -> KeptGradients:
    """Return the per-example gradients of a batch as factors, for any number of later products.

    Args:
        model, batch, loss_fn, nonfinite, options: as for per_example_norms.

    Cost:
        A forward and a backward without weight gradients, and per-example norms. The factors take
        about as much memory as the activations; where a layer's gradients are smaller than its
        factors, the gradients are kept instead.
    """
    consumer = Keep()
    tracker, _ = run(model, batch, loss_fn, consumer, **options)
    consumer.copy_shared()
    sqnorm = finite_sqnorms(tracker, nonfinite).sum(0)
    shapes = {root.name: real_shape(root.parameter) for root in tracker.roots}
    return KeptGradients(sqnorm, shapes, consumer.kept)


def products(
    kept: Sequence[KeptGradients],
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    *,
    nonfinite: str = "raise",
    diagonal: bool = False,
    per_parameter: bool = False,
    consume: bool = False,
    **options: Unpack[Options],
) -> list[Products]:
    """Return the inner products of a batch's gradients with kept ones, in one backward.

    Args:
        kept: what ``keep`` returned for each of some other batches.
        model, batch, loss_fn, nonfinite, options: as for per_example_norms; they must select the
            parameters that were kept.
        diagonal: pair only the i-th kept example with the i-th of the batch; sizes must be equal.
        per_parameter: also return each parameter's part.
        consume: free the kept factors as they are used; they serve no second batch.

    Returns:
        The products with each of the kept batches.
    """
    shapes = shapes_of(model, options)
    for block in kept:
        check_same_parameters(block.shapes, shapes)
    consumer = Against(
        [block.parameters for block in kept],
        diagonal=diagonal,
        per_parameter=per_parameter,
        consume=consume,
    )
    tracker, _ = run(model, batch, loss_fn, consumer, **options)
    sqnorm = finite_sqnorms(tracker, nonfinite).sum(0)
    results = []
    for block, value, parts in zip(kept, consumer.values, consumer.by_parameter, strict=True):
        size = sqnorm.shape if diagonal else (len(block), len(sqnorm))
        unused = sqnorm.new_zeros(size)
        every = {name: parts.get(name, unused) for name in shapes} if per_parameter else None
        results.append(Products(unused if value is None else value, sqnorm, every))
    return results


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
