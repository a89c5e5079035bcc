"""The README's Python, run from its beginning to its end in one session."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

BLOCKS = re.findall(
    r"^```python\n(.*?)^```",
    Path(__file__).parents[1].joinpath("README.md").read_text(),
    re.DOTALL | re.MULTILINE,
)
# A trainer of the reader's own stands there: its tests run whole trainings.
TRAINERS = "gradstats.integrations"


def test_the_readme_runs_from_beginning_to_end(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {}
    for number, block in enumerate(BLOCKS):
        code = compile(block, f"README block {number}", "exec")
        if TRAINERS not in block:
            exec(code, names)
        if "gs.Monitor" in block:
            model, monitor = names["model"], names["monitor"]
            assert [record.id for record in monitor.examples(8)] != []
            assert (tmp_path / "run.png").stat().st_size > 0
            assert len(monitor.self_influence) == 16 and monitor.steps == 2
    assert sum(TRAINERS in block for block in BLOCKS) == 1
    # The last statistics leave out the activation, which the ones before them measured.
    assert names["model"] is model
    assert list(names["stats"].by_parameter) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert np.isfinite(names["stats"].norm.numpy()).all()
