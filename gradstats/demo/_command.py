"""The command ``demo``: its arguments, their checks, and the files it writes."""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
import time
from pathlib import Path

from gradstats._requirements import require
from gradstats.demo._experiment import Outcome, run_experiment
from gradstats.demo._pictures import draw_curves, draw_suspicious_digits
from gradstats.demo._report import report, write_csv
from gradstats.demo._settings import DemoError, Settings

LARGEST_SEED = 2**32 - 1
WRITERS = {
    "suspicious-digits.png": draw_suspicious_digits,
    "curves.png": draw_curves,
    "scores.csv": write_csv,
}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``demo`` to the command line's commands."""
    parser = commands.add_parser(
        "demo",
        help="find flipped labels among scikit-learn's digits",
        description=(
            "Flip 10% of the labels of scikit-learn's bundled digits, train a small convolutional "
            "network, and rank the training digits by self-influence, from exact per-example "
            "gradient norms at several checkpoints, beside cheaper scores."
        ),
    )
    parser.add_argument(
        "--out",
        type=_folder,
        default=Path("gradstats-demo"),
        metavar="DIR",
        help=f"folder for {', '.join(WRITERS)}; made if missing (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="seed of everything random (default: 0)"
    )
    parser.set_defaults(run=_run)


def run_demo(settings: Settings, folder: Path) -> Outcome:
    """Run the experiment, print the report and write the files.

    Args:
        settings: the numbers of the run.
        folder: where the files go; made if missing.

    Returns:
        Outcome: what was found.

    Raises:
        MissingPackageError, DemoError: before any training, where a package is missing or the
            folder cannot be used.
    """
    with require("demo"):
        for module in ("sklearn.datasets", "matplotlib.figure"):
            importlib.import_module(module)
    check_folder(folder)
    start = time.perf_counter()
    outcome = run_experiment(settings)
    print(f"\n{report(outcome)}\n")
    for name, write in WRITERS.items():
        try:
            write(folder / name, outcome)
        except OSError as error:
            raise DemoError(f"cannot write {folder / name}: {error.strerror}.") from error
        print(f"wrote {folder / name}")
    print(f"took {time.perf_counter() - start:.0f} s")
    return outcome


def check_folder(folder: Path) -> None:
    """Make the folder, and raise DemoError unless the demo's files can be written there."""
    try:
        if folder.exists() and not folder.is_dir():
            raise DemoError(f"--out {folder} is a file: name a folder, existing or new.")
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DemoError(
            f"cannot write to --out {folder} ({error.strerror}): name a folder that can be written."
        ) from error
    for path in (folder / name for name in WRITERS):
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise DemoError(f"{path} is in the way: remove it, or name another folder with --out.")


def _run(arguments: argparse.Namespace) -> None:
    run_demo(Settings(seed=arguments.seed), arguments.out)


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("the folder's name is empty.")
    return Path(text)


def _seed(text: str) -> int:
    expected = f"expected a whole number from 0 to {LARGEST_SEED}"
    try:
        seed = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: {expected}.") from None
    if not 0 <= seed <= LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{seed} is out of range: {expected}.")
    return seed
