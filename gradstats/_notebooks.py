"""What notebooks show of results whose ``print`` is a table."""

from __future__ import annotations

from typing import Any


class Printed:
    """Shown by IPython and notebooks as by ``print``; a plain shell shows the one line of repr."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))
