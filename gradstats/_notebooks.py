"""Results that notebooks show as ``print`` does."""

from __future__ import annotations

from typing import Any


class Printed:
    """Base of results that IPython and notebooks print; a plain shell shows their short repr."""

    # Not _repr_pretty_: if inherited, IPython prefers the class's own __repr__ to it.
    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": str(self)}
