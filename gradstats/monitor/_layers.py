"""Groups of parameters by patterns over module paths."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from gradstats.capture._selection import patterns_of
from gradstats.errors import CoverageError


def layers_of(
    parameters: Sequence[str], patterns: Sequence[str] | str | None
) -> dict[str, list[int]]:
    """Return the positions of each layer's parameters, in the model's order.

    A pattern must match the beginning of a parameter's name, component by component: ``"blocks.*"``
    makes one layer of everything in ``blocks.0``, another of ``blocks.1``; ``"*"`` makes one of
    each top-level module. The first pattern that matches decides; a parameter that none matches
    belongs to no layer. A pattern may match nothing here, because its parameters are frozen.
    """
    layers: dict[str, list[int]] = {}
    listed = patterns_of("layers", patterns)
    for place, name in enumerate(parameters):
        layer = _layer(name, listed)
        if layer is not None:
            layers.setdefault(layer, []).append(place)
    return layers


def check_layers(parameters: Sequence[str], patterns: Sequence[str] | str | None) -> None:
    """Raise unless each pattern matches some of these parameters, frozen ones included."""
    for pattern in patterns_of("layers", patterns):
        if not any(_layer(name, [pattern]) for name in parameters):
            raise CoverageError(
                f"the layer pattern {pattern!r} matches the beginning of no parameter's name. "
                f"Expected a pattern for module paths such as those of {list(parameters)[:6]}."
            )


def _layer(name: str, patterns: Sequence[str]) -> str | None:
    components = name.split(".")
    for pattern in patterns:
        wanted = pattern.split(".")
        path = components[: len(wanted)]
        if len(path) == len(wanted) and all(map(fnmatchcase, path, wanted)):
            return ".".join(path)
    return None
