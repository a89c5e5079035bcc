"""A train × query matrix of gradient products: time and peak memory beside other implementations.

python -m benchmarks.influence [mlp cnn] [--train 512 2048 8192] [--widths 512 1024] [--no-csv]

The same work in one run: every product of N training and Q query examples at one checkpoint, all
parameters, learning rate 1. The checkpoint's weights are in memory before anyone begins, so that
peak memory is what the work itself takes: tensors, arrays and Python's objects at once, the N × Q
result among them (gradstats' holds both forms in float64). The others are captum's TracInCP (pip
install captum), kronfluence with its identity strategy (pip install kronfluence, which fetches
torchvision; with --no-deps accelerate einops einconv opt_einsum psutil a CPU build of PyTorch
stays), and per-example gradients by vmap. Those that cannot be imported are named and left out.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import gradstats as gs
from benchmarks.harness import interleave, machine, one_of, parser_of, write_csv
from benchmarks.ledger import host_peak
from benchmarks.workloads import classification

BATCH, CLASSES = 128, 10


@dataclass(frozen=True)
class Task:
    """A model at one checkpoint, and its two data sets.

    Attributes:
        train, query: inputs and labels.
        folder: for what a rival writes.
    """

    model: nn.Module
    train: tuple[Tensor, Tensor]
    query: tuple[Tensor, Tensor]
    folder: Path

    def batches(self, side: tuple[Tensor, Tensor]) -> list[tuple[Tensor, ...]]:
        """Return a data set in batches."""
        return list(zip(*(each.split(BATCH) for each in side), strict=True))


def mlp(width: int) -> tuple[nn.Module, tuple[int, ...]]:
    """Return an MLP with two hidden layers, and the shape of its inputs."""
    layers = nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, CLASSES),
    )  # fmt: skip
    return layers, (784,)


def cnn(width: int) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a small convolutional network, and the shape of its inputs."""
    channels = width // 16
    layers = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(2 * channels * 64, CLASSES),
    )  # fmt: skip
    return layers, (3, 16, 16)


MODELS = {"mlp": mlp, "cnn": cnn}


def with_gradstats(task: Task) -> Callable[[], gs.InfluenceScores]:
    """Return gradstats' call."""
    checkpoints = gs.Checkpoints(task.model.state_dict(), lr=1.0)
    train, query = task.batches(task.train), task.batches(task.query)

    def run() -> gs.InfluenceScores:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gs.GradStatsWarning)
            return gs.influence(
                task.model, train, query, classification, checkpoints, progress=False
            )

    return run


def with_vmap(task: Task) -> Callable[[], Tensor]:
    """Return per-example gradients by vmap, the query side's held."""

    def loss_of_one(parameters, x, y):
        output = torch.func.functional_call(task.model, parameters, (x[None],))
        return functional.cross_entropy(output, y[None])

    each = torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0))
    parameters = {name: p.detach() for name, p in task.model.named_parameters()}

    def gradients(batch) -> Tensor:
        found = each(parameters, *batch)
        return torch.cat([gradient.flatten(1) for gradient in found.values()], 1)

    def run() -> Tensor:
        held = torch.cat([gradients(batch) for batch in task.batches(task.query)])
        return torch.cat([gradients(batch) @ held.T for batch in task.batches(task.train)])

    return run


def with_captum(task: Task) -> Callable[[], Tensor]:
    """Return captum's TracInCP."""
    from captum.influence import TracInCP

    def load(model, state):
        model.load_state_dict(state)
        return 1.0

    tracin = TracInCP(
        task.model, TensorDataset(*task.train), [task.model.state_dict()],
        checkpoints_load_func=load, loss_fn=nn.CrossEntropyLoss(reduction="sum"),
        batch_size=BATCH, sample_wise_grads_per_batch=True,
    )  # fmt: skip

    def run() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return tracin.influence(task.query).T

    return run


def with_kronfluence(task: Task) -> Callable[[], Tensor]:
    """Return kronfluence with the identity strategy, its files included."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments
    from kronfluence.task import Task as KronfluenceTask

    class Classification(KronfluenceTask):
        def compute_train_loss(self, batch, model, sample=False):
            return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

        def compute_measurement(self, batch, model):
            return self.compute_train_loss(batch, model)

    own = Classification()
    # Its preparation freezes the parameters of the model that it is given.
    model = prepare_model(copy.deepcopy(task.model), own)
    analyzer = Analyzer(
        "benchmark", model, own, output_dir=str(task.folder / "kronfluence"),
        disable_tqdm=True, log_level=logging.ERROR, cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    sets = TensorDataset(*task.train), TensorDataset(*task.query)
    analyzer.fit_all_factors(
        "identity", sets[0], factor_args=FactorArguments(strategy="identity"),
        per_device_batch_size=BATCH, overwrite_output_dir=True,
    )  # fmt: skip

    def run() -> Tensor:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            analyzer.compute_pairwise_scores(
                "pairs", "identity", sets[1], sets[0],
                per_device_query_batch_size=len(sets[1]), per_device_train_batch_size=BATCH,
                overwrite_output_dir=True,
            )  # fmt: skip
            return analyzer.load_pairwise_scores("pairs")["all_modules"].T

    return run


IMPLEMENTATIONS = {
    "gradstats": with_gradstats,
    "captum TracInCP": with_captum,
    "kronfluence identity": with_kronfluence,
    "vmap": with_vmap,
}


def make_task(name: str, width: int, count: int, queries: int, folder: Path) -> Task:
    """Return a model with random data, the same each time."""
    torch.manual_seed(0)
    model, shape = MODELS[name](width)
    train, query = (
        (torch.randn(size, *shape), torch.randint(CLASSES, (size,))) for size in (count, queries)
    )
    return Task(model, train, query, folder)


def prepare(task: Task) -> dict[str, Callable[[], Any]]:
    """Return the calls of those that can be imported."""
    calls = {}
    for name, make in IMPLEMENTATIONS.items():
        try:
            calls[name] = make(task)
        except ImportError as error:
            print(f"  without {name}: {error}")
    return calls


def reference(task: Task, rows: int, columns: int) -> Tensor:
    """Return some of the products in float64, one example at a time."""
    model = copy.deepcopy(task.model).double()
    sides = []
    for (inputs, labels), count in ((task.train, rows), (task.query, columns)):
        losses = classification(model, (inputs[:count].double(), labels[:count]))
        found = []
        for loss in losses:
            gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            found.append(torch.cat([gradient.flatten() for gradient in gradients]))
        sides.append(torch.stack(found))
    return sides[0] @ sides[1].T


def measure(task: Task, rounds: int) -> list[dict[str, object]]:
    """Return one row for each implementation: error, time and peak memory."""
    calls = prepare(task)
    expected = reference(task, 8, 8).numpy()
    timings = interleave(calls, "gradstats", rounds, warmup=1)
    errors, peaks = {}, {}
    # After the first calls, whose imports and caches are no part of what the work holds.
    for name, call in calls.items():
        result: list[Any] = []
        peaks[name] = host_peak(lambda call=call, result=result: result.append(call()))
        off = np.abs(np.asarray(result[0][:8, :8], dtype=np.float64) - expected).max()
        errors[name] = off / np.abs(expected).max()
    return [
        {
            "implementation": name,
            "milliseconds": f"{timing.milliseconds:.1f}",
            "ratio": f"{timing.ratio:.3f}",
            "low": f"{timing.low:.3f}",
            "high": f"{timing.high:.3f}",
            "peak_bytes": peaks[name],
            "relative_error": f"{errors[name]:.2e}",
            "rounds": rounds,
        }
        for name, timing in timings.items()
    ]


def main() -> None:
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument(
        "models", nargs="*", type=one_of(MODELS), help=f"of {', '.join(MODELS)}; all by default"
    )
    parser.add_argument("--train", type=int, nargs="+", default=[512, 2048, 8192], metavar="N")
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 1024], metavar="W")
    parser.add_argument("--queries", type=int, default=128, metavar="Q")
    options = parser.parse_args()
    print(f"{machine()}, torch {torch.__version__}")
    for name in options.models or MODELS:
        for width in options.widths:
            for count in options.train:
                with tempfile.TemporaryDirectory() as folder:
                    task = make_task(name, width, count, options.queries, Path(folder))
                    elements = sum(p.numel() for p in task.model.parameters())
                    print(f"\n{name} width {width}, d = {elements:,}, N = {count}, "
                          f"Q = {options.queries}")  # fmt: skip
                    rows = []
                    for row in measure(task, options.rounds):
                        print(
                            f"  {row['implementation']:21} {row['milliseconds']:>9} ms   "
                            f"{row['ratio']:>6} [{row['low']}, {row['high']}]   "
                            f"{int(str(row['peak_bytes'])) / 1e6:8.1f} MB   error "
                            f"{row['relative_error']}"
                        )
                        size = {"model": name, "width": width, "parameters": elements}
                        rows.append({**size, "train": count, "queries": options.queries, **row})
                # Case by case: the slowest take many minutes, and a run may be cut short.
                if not options.no_csv:
                    write_csv("influence", rows, folder=options.out)


if __name__ == "__main__":
    main()
