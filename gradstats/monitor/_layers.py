"""Groups of parameters by a pattern over module paths."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from gradstats.capture._selection import patterns_of
from gradstats.errors import CoverageError


class Layers:
    """Which layer each parameter belongs to.

    A pattern is matched path component by path component with the beginning of a parameter's name:
    ``"blocks.*"`` makes one layer of all that lies in ``blocks.0``, another of ``blocks.1``;
    ``"*"`` makes one of each top-level module. The first pattern that matches decides; parameters
    that none matches belong to no layer. A pattern may match none of them: others may be frozen.

    Attributes:
        names: the layers, in the model's order.
        index: for each parameter, the number of its layer, or None.
    """

    def __init__(self, parameters: Sequence[str], patterns: Sequence[str] | str | None):
        wanted = () if patterns is None else patterns_of("layers", patterns)
        paths = [_layer(name, wanted) for name in parameters]
        self.names = list(dict.fromkeys(path for path in paths if path is not None))
        self.index = [None if path is None else self.names.index(path) for path in paths]


def check_layers(parameters: Sequence[str], patterns: Sequence[str] | str | None) -> None:
    """Raise unless each pattern makes a layer of some parameters, if all of them are trained."""
    for pattern in () if patterns is None else patterns_of("layers", patterns):
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
