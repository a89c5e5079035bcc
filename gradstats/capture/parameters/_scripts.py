"""Functions and methods of TorchScript, made visible as opaque operations.

PyTorch does not show function modes what TorchScript runs. From the first context on, every call
passes through here.
"""

from __future__ import annotations

from functools import cache

from gradstats._compiler import is_compiling
from gradstats.capture.following._results import follow_results
from gradstats.capture.operations._modes import innermost_mode
from gradstats.capture.operations._operations import SCRIPTS
from gradstats.capture.parameters._transforms import transform_level


@cache
def replace_script_calls() -> None:
    """From now on, show calls of TorchScript to contexts, even if it was compiled before."""
    for kind in SCRIPTS:
        kind.__call__ = _following(kind.__call__)  # type: ignore[method-assign]


def _following(call):
    def run(script, *args, **kwargs):
        result = call(script, *args, **kwargs)
        mode = innermost_mode()
        outside = transform_level() is None and not is_compiling()
        if mode is not None and outside:
            follow_results(mode.tracker, script, args, kwargs, result)
        return result

    return run
