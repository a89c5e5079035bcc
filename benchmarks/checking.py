"""Checking providers before they are timed, against plain autograd, one example at a time.

A provider that is wrong, refuses, fails or takes too long gets a note instead of a time.
"""

from __future__ import annotations

import contextlib
import copy
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.providers import PROVIDERS, Call, Provider, trainable
from benchmarks.workloads import Workload

GIBIBYTE = 2**30

# Seconds that a first call may take, without and with compilation. BackPACK loops over the rows of
# an embedding: for minutes if there are fifty thousand.
PATIENCE, COMPILING = 10.0, 300.0

# The relative error that a squared norm may have: this much, or this many times that of plain
# autograd in the same precision. In deep models and bfloat16 the gradients themselves are rounded.
TOLERANCE, TIMES_ROUNDING = 1e-3, 5.0


@dataclass(frozen=True)
class Prepared:
    """A provider on one workload, checked.

    Attributes:
        call: the call to time; None if there is none.
        error: largest relative error of the squared norms; NaN for a plain step.
        note: why there is no call.
    """

    call: Call | None
    error: float = float("nan")
    note: str = ""


@dataclass(frozen=True)
class Oracle:
    """Squared norms by plain autograd in float64, one example at a time.

    Attributes:
        squares: example → squared norm.
        tolerance: relative error beyond which a squared norm counts as wrong.
    """

    squares: dict[int, float]
    tolerance: float

    def error(self, found: Tensor) -> float:
        """Return the largest relative error of (B,) squared norms; infinite if one is NaN."""
        errors = [abs(found[at].item() - value) / value for at, value in self.squares.items()]
        return max(errors) if all(each == each for each in errors) else float("inf")


def oracle(work: Workload) -> Oracle:
    """Return the squared norms of four examples, from first to last, and their tolerance."""
    size = len(work.batch[0])
    examples = sorted({round(each) for each in torch.linspace(0, size - 1, 4).tolist()})
    exact = work.replace_model(copy.deepcopy(work.model).double())
    expected = {at: square_of(exact, at) for at in examples}
    rounded = [abs(square_of(work, at) - value) / value for at, value in expected.items()]
    return Oracle(expected, max(TOLERANCE, TIMES_ROUNDING * max(rounded)))


def square_of(work: Workload, example: int) -> float:
    """Return one example's squared norm in the model's precision, the squares summed in float64."""
    kind = trainable(work.model)[0].dtype
    single = (part[example : example + 1] for part in work.batch)
    batch = tuple(part.to(kind) if part.is_floating_point() else part for part in single)
    loss = work.loss_fn(work.model, batch).sum()
    gradients = torch.autograd.grad(loss, trainable(work.model), allow_unused=True)
    squares = [each.double().square().sum() for each in gradients if each is not None]
    return float(torch.stack(squares).sum())


def prepare(
    provider: Provider,
    work: Workload,
    expected: Oracle,
    *,
    limit: float = 4 * GIBIBYTE,
) -> Prepared:
    """Run a provider once and compare it with the oracle.

    Args:
        provider: one of ``PROVIDERS``.
        work: the model and batch; providers that hook into a model take a copy.
        expected: of ``oracle``.
        limit: bytes of per-example gradients that a provider may hold.

    Returns:
        The call to time, or why there is none.
    """
    if provider.package is not None and not provider.version:
        return Prepared(None, note="not installed")
    held = provider.held(work) * trainable(work.model)[0].itemsize
    if held > limit:
        return Prepared(None, note=f"not run: would hold {held / GIBIBYTE:.0f} GiB")
    with warnings.catch_warnings():
        # Libraries warn about themselves; only whether the numbers are right matters here.
        warnings.simplefilter("ignore")
        try:
            call = provider.make(work)
            compiles = provider.form or provider.ours  # graphs, and kernels on a GPU
            with time_limit(COMPILING if compiles else PATIENCE):
                found = call()
        except ImportError as error:
            return Prepared(None, note=f"cannot be imported: {first_line(error)}")
        except TimeoutError as error:
            return Prepared(None, note=f"not run: {error}")
        except Exception as error:  # whatever another library raises becomes its note
            return Prepared(None, note=f"{type(error).__name__}: {first_line(error)}")
    if found is None:
        return Prepared(quietly(call))
    if tuple(found.shape) != (len(work.batch[0]),):
        return Prepared(None, note=f"wrong (shape {tuple(found.shape)})")
    error = expected.error(found)
    if not error <= expected.tolerance:
        return Prepared(None, error, note=f"wrong (relative error {error:.2g})")
    return Prepared(quietly(call), error)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside the context when it lasts too long."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach only the main thread
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ready(build: Callable[[], Workload], name: str) -> Call:
    """Return the call of one of ``PROVIDERS`` on a new workload."""
    return quietly(PROVIDERS[name].make(build()))


def quietly(call: Call) -> Call:
    """Return a call whose warnings are not shown."""

    def silent() -> Tensor | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call()

    return silent


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, cut to the width of a cell."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return text if len(text) <= 90 else text[:89] + "…"
