"""What must hold before the demo starts."""

from __future__ import annotations

import importlib

from gradstats.errors import GradStatsError


class DemoError(GradStatsError):
    """The demo cannot run as asked."""


def require_packages() -> None:
    """Raise DemoError unless the packages of the extra ``demo`` can be imported."""
    for package, module in (
        ("scikit-learn", "sklearn.datasets"),
        ("matplotlib", "matplotlib.figure"),
    ):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise DemoError(
                f"the demo needs {package}, which cannot be imported ({error}). "
                "Install the demo's extra: pip install 'gradstats[demo]'"
            ) from error
