"""Warnings attributed to the caller's line."""

from __future__ import annotations

import os
import sys
import warnings

from gradstats.errors import GradStatsWarning

PACKAGE = os.path.join(os.path.dirname(__file__), "")


def warn(message: str) -> None:
    """Warn, attributing the warning to the innermost line outside gradstats that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, GradStatsWarning, stacklevel=level)
