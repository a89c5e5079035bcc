"""Importing gradstats is cheap, and does not need Triton."""

import ast
import re
import subprocess
import sys
import types
from pathlib import Path

import gradstats as gs


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_without_triton_and_under_modes_of_the_importer():
    code = (
        "import sys, torch; sys.modules['triton'] = None\n"
        "with torch.inference_mode(), torch.device('meta'):\n"
        "    import gradstats as gs\n"
        "layer = torch.nn.Linear(2, 1)\n"
        "stats = gs.per_example_norms(layer, torch.ones(3, 2), lambda m, x: m(x).sum(1))\n"
        "from gradstats.capture.uses._hooked import KINDS, VIEWS\n"
        "print(stats.sqnorm.tolist(), *sorted(kind.__name__ for kind in KINDS))\n"
        "print(all(kind.__name__.endswith('ViewBackward0') for kind in VIEWS))"
    )
    assert run(code).strip() == (
        "[3.0, 3.0, 3.0] AddBackward0 AddmmBackward0 ConvolutionBackward0 EmbeddingBackward0 "
        "MmBackward0 MulBackward0 NativeGroupNormBackward0 NativeLayerNormBackward0\nTrue"
    )


def test_a_class_that_stood_in_for_one_of_pytorchs_before_the_import_is_searched_for_caches():
    code = (
        "import functools, torch\n"
        "class Shifted(torch.nn.Linear):\n"
        "    shifts = functools.cache(lambda size: torch.arange(4.0).double().view(size, size))\n"
        "    def forward(self, x):\n"
        "        return super().forward(x + Shifted.shifts(2) @ self.weight.diag())\n"
        "torch.nn.Linear = Shifted\n"
        "import gradstats as gs\n"
        "from tests.oracle import assert_sqnorms, oracle_sqnorms\n"
        "layer, x = Shifted(2, 2).double(), torch.randn(2, 3, 2).double()\n"
        "losses = lambda model, x: model(x).exp().sum((1, 2))\n"
        "expected = oracle_sqnorms(layer, x, losses)\n"
        "with gs.track(layer, batch_size=2) as tracker:\n"
        "    tracker.backward(losses(layer, x))\n"
        "assert_sqnorms(tracker.stats, expected, 1e-12)\n"
        "print(*tracker.stats.names)"
    )
    assert run(code).strip() == "weight bias"


def test_what_is_imported():
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import gradstats; print(*sorted(set(sys.modules) - before))"
    )
    imported = run(code).split()
    assert "gradstats.statistics._norms" in imported
    for package in ("triton", "matplotlib", "sklearn", "transformers", "torch._inductor"):
        assert not any(name.split(".")[0] == package or name == package for name in imported)


def test_help_lists_every_function():
    listed = re.findall(r"^    gs\.(\w+)", gs.__doc__, re.MULTILINE)
    results = {"GradientNorms", "InfluenceScores", "SelfInfluence", "TopScores", "VerifyReport"}
    here = {name for name in dir(gs) if getattr(gs, name).__class__ in (type, types.FunctionType)}
    errors = {name for name in here if name in dir(gs.errors)}
    assert sorted(listed) == sorted({*(here - errors - results), "errors"})


def test_every_package_is_installed():
    root = Path(__file__).parents[1]
    folders = {path.parent.relative_to(root) for path in (root / "gradstats").rglob("__init__.py")}
    declared = (root / "pyproject.toml").read_text()
    for folder in folders:
        assert f'    "{".".join(folder.parts)}",\n' in declared


def test_every_module_is_on_the_map_of_its_folder():
    root = Path(__file__).parents[1]
    for folder in (root / "kernels", *(root / "gradstats").rglob("*")):
        init = folder / "__init__.py"
        if not init.exists():
            continue
        words = re.findall(r"\w+", ast.get_docstring(ast.parse(init.read_text())) or "")
        modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        assert not modules.difference(words), folder
