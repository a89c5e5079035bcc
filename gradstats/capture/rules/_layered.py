"""Layers whose backward computes norms together with the weight gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from gradstats.capture.following._examples import Examples
from gradstats.capture.parameters._tensors import nodes_of
from gradstats.capture.rules._common import bare
from gradstats.capture.uses._decided import Decided
from gradstats.capture.uses._layer import Layer, LayerUse
from gradstats.capture.uses._uses import Use, attach

if TYPE_CHECKING:
    from gradstats.capture._context import Context


def layered(
    tracker: Context,
    x: Tensor,
    parameters: Sequence[Tensor | None],
    examples: Examples,
    layer: Layer,
    operands: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Run a layer whose backward computes norms together with the weight gradient.

    Args:
        x: the data.
        parameters: weight and bias.
        examples: where the examples lie in the result.
        operands: what it takes in place of the parameters; None where a decision is repeated.
    """
    given = [bare(item, False) for item in parameters] if operands is None else operands
    nodes = nodes_of(parameters)
    result = attach(LayerUse, Use(nodes), layer, x, *given)
    if len(nodes) == sum([item is not None for item in parameters]):
        tracker.note_followed(result, examples)
    if operands is not None:
        tracker.decided = Decided(result, layered, x, parameters, examples, (layer,))
    return result
