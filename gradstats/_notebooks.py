"""How notebooks show results whose ``print`` is a table."""

from __future__ import annotations

from typing import Any


class Printed:
    """Shown by IPython and notebooks as ``print`` shows it; a plain shell shows the short repr."""

    # Not _repr_pretty_: to one that is inherited, IPython prefers the __repr__ of the class itself.
    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": str(self)}
