"""Which scores find flipped labels: raw products, cosines, or self-influence?

    python -m benchmarks.wrong_labels [--rounds 5] [--no-csv]

The demo's network and another are trained on scikit-learn's digits, 10 % of whose labels are
flipped, once for each seed and way of training. Scores are of seven checkpoints; queries are the
held-out digits, whose labels are right. AUROC is of flipped against other training digits.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradstats as gs
from benchmarks.harness import machine, parser_of, write_csv
from gradstats.demo._data import NoisyDigits, load_noisy_digits
from gradstats.demo._experiment import EXAMPLES_PER_BATCH, one_thread
from gradstats.demo._settings import Settings
from gradstats.demo._training import digit_network, loss_fn, run_epoch
from gradstats.scoring._metrics import detect

DIGITS, FEW = 1797, 600
DEMO = Settings()


def momentum(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of the demo."""
    return torch.optim.SGD(parameters, lr=DEMO.learning_rate, momentum=DEMO.momentum)


def adam(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam with its usual learning rate."""
    return torch.optim.Adam(parameters, lr=1e-3)


def perceptron(seed: int) -> nn.Module:
    """Return a network without convolutions, with weights drawn from ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(),
            nn.Linear(64, 10),
        )  # fmt: skip


# Name → network, optimizer and fraction of the digits that is held out.
WAYS: dict[str, tuple[Callable[..., nn.Module], Callable[..., torch.optim.Optimizer], float]] = {
    "CNN, SGD": (digit_network, momentum, DEMO.held_out),
    "CNN, Adam": (digit_network, adam, DEMO.held_out),
    "MLP, SGD": (perceptron, momentum, DEMO.held_out),
    "MLP, Adam": (perceptron, adam, DEMO.held_out),
    f"MLP, SGD, {FEW} digits": (perceptron, momentum, 1 - FEW / DIGITS),
}


def checkpoints_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: NoisyDigits,
    random: np.random.Generator,
) -> gs.Checkpoints:
    """Train on the given labels, at a constant rate, and return the demo's checkpoints."""
    given, kept = torch.from_numpy(data.given), []
    for epoch in range(1, DEMO.epochs + 1):
        run_epoch(model, optimizer, data.images, given, DEMO.batch_size, random)
        if epoch in DEMO.checkpoints:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            kept.append(copy.deepcopy(state))
    return gs.Checkpoints(kept, lr="optimizer")


@one_thread()
def found(way: str, seed: int) -> dict[str, float]:
    """Return the AUROC of each score in one run."""
    network, make, held_out = WAYS[way]
    random = np.random.default_rng(seed)
    data = load_noisy_digits(random, held_out, DEMO.noise_rate)
    model = network(seed)
    run = checkpoints_of(model, make(model.parameters()), data, random)
    given, clean = torch.from_numpy(data.given), torch.from_numpy(data.held_out_labels)
    train = DataLoader(TensorDataset(data.images, given), EXAMPLES_PER_BATCH)
    query = DataLoader(TensorDataset(data.held_out_images, clean), EXAMPLES_PER_BATCH)
    with warnings.catch_warnings():
        # That the lists of raw products are alike is what is measured here.
        warnings.simplefilter("ignore", gs.GradStatsWarning)
        scores = gs.influence(model, train, query, loss_fn, run, progress=False)
    table = gs.self_influence(model, train, loss_fn, run, progress=False)
    suspicious = {
        "raw products, mean": -scores.raw[:, :].mean(1),
        "cosines, mean": -scores.cosine[:, :].mean(1),
        "raw products, lowest": -scores.raw[:, :].min(1),
        "self-influence": table.self_influence,
        "mean loss": table.loss,
    }
    return {name: detect(each, data.flipped).auroc for name, each in suspicious.items()}


def main() -> None:
    options = parser_of(__doc__, rounds=5).parse_args()
    print(
        f"{machine('cpu')}, torch {torch.__version__}; lowest to highest of {options.rounds} runs"
    )
    for way in WAYS:
        runs = [found(way, seed) for seed in range(options.rounds)]
        print(f"\n{way}")
        for score in runs[0]:
            values = [each[score] for each in runs]
            print(f"  {score:22} {min(values):.2f} to {max(values):.2f}", flush=True)
        if not options.no_csv:
            rows = [
                {
                    "way": way,
                    "seed": seed,
                    **{score: f"{auroc:.4f}" for score, auroc in each.items()},
                    "rounds": options.rounds,
                }
                for seed, each in enumerate(runs)
            ]
            write_csv("wrong_labels", rows, folder=options.out)


if __name__ == "__main__":
    main()
