"""How notebooks show results whose ``print`` is a table."""

from __future__ import annotations

from typing import Any


class Printed:
    """Shown by IPython and notebooks as ``print`` shows it; a plain shell shows the short repr."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))
