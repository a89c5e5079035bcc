"""Deliberately broken kernels: one line of the source replaced, everything else as shipped."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def mutant(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """`module` with its only occurrence of `old` replaced by `new`, imported from `folder`."""
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {module.__file__}"
    path = folder / f"mutant_{module.__name__.rpartition('.')[2]}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    broken = importlib.util.module_from_spec(spec)
    # dataclasses and jitted functions look their own module up
    sys.modules[path.stem] = broken
    spec.loader.exec_module(broken)
    return broken
