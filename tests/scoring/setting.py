"""A small classifier, its data, two checkpoints, and what plain autograd says of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from tests.oracle import oracle_gradients

RATES = (0.1, 0.3)


def loss_fn(model: nn.Module, batch) -> Tensor:
    """One cross-entropy for each example."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels, reduction="none")


def by_size(batch) -> Tensor:
    """Return the examples sorted, as sequences are by their lengths."""
    return batch[0][:, 0].argsort()


def sorted_losses(model: nn.Module, batch) -> Tensor:
    """The same losses in another order than the batch."""
    order = by_size(batch)
    return functional.cross_entropy(model(batch[0][order]), batch[1][order], reduction="none")


def put_back(model: nn.Module, batch) -> Tensor:
    """The same losses in the batch's order, of logits in another."""
    return sorted_losses(model, batch)[by_size(batch).argsort()]


class Rows(Dataset):
    """Examples of a data set of one's own, of which nothing is known before they are read."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data[0])

    def __getitem__(self, index):
        return tuple(each[index] for each in self.data)


@dataclass(frozen=True)
class Setting:
    """What the scoring functions take.

    Attributes:
        model: float64, with weights of its own.
        train, query: whole sets, as one batch each.
        states: state dicts of two checkpoints.
    """

    model: nn.Module
    train: tuple[Tensor, Tensor]
    query: tuple[Tensor, Tensor]
    states: list[dict[str, Tensor]]

    @property
    def train_batches(self) -> list[tuple[Tensor, ...]]:
        """Batches of four, the last one smaller."""
        return batches(self.train, 4)

    @property
    def query_batches(self) -> list[tuple[Tensor, ...]]:
        """Batches of four, the last one smaller."""
        return batches(self.query, 4)


def batches(data: tuple[Tensor, Tensor], size: int) -> list[tuple[Tensor, ...]]:
    """Return a data set in batches."""
    return list(zip(*(each.split(size) for each in data), strict=True))


def make_setting(seed: int = 0) -> Setting:
    """Return a setting whose every number follows from the seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(normal(*parameter.shape))
    states = [
        {name: value + 0.3 * normal(*value.shape) for name, value in model.state_dict().items()}
        for _ in range(2)
    ]
    return Setting(
        model,
        (normal(11, 5), torch.randint(3, (11,), generator=generator)),
        (normal(6, 5), torch.randint(3, (6,), generator=generator)),
        states,
    )


def setting_state(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return a model's weights with noise that follows from the seed; integers stay."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + torch.randn(value.shape, generator=generator, dtype=value.dtype)
        if value.is_floating_point()
        else value.clone()
        for name, value in model.state_dict().items()
    }


def gradients_at(setting: Setting, state: dict[str, Tensor], data) -> dict[str, Tensor]:
    """Return name → (N, d) per-example gradients at a checkpoint."""
    model = copy.deepcopy(setting.model)
    model.load_state_dict(state)
    found = oracle_gradients(model, data, loss_fn)
    return {name: gradient.flatten(1) for name, gradient in found.items()}


def oracle_influence(
    setting: Setting,
    rates=RATES,
    query_states=None,
    cosine: bool = False,
) -> Tensor:
    """Return Σ_c Σ_p η_cp ⟨g_p, g'_p⟩ (N, Q), each checkpoint divided by the norms for the cosine.

    Args:
        setting: the model and the data.
        rates: for each checkpoint a number or name → number.
        query_states: of the query side; the train side's by default.
        cosine: whether to divide.
    """
    total = torch.zeros(len(setting.train[0]), len(setting.query[0]), dtype=torch.float64)
    sides = zip(setting.states, query_states or setting.states, rates, strict=True)
    for state, query_state, rate in sides:
        train = gradients_at(setting, state, setting.train)
        query = gradients_at(setting, query_state, setting.query)
        part = sum(
            (rate[name] if isinstance(rate, dict) else rate) * train[name] @ query[name].T
            for name in train
        )
        if cosine:
            lengths = [torch.cat(list(each.values()), 1).norm(dim=1) for each in (train, query)]
            part = part / (lengths[0][:, None] * lengths[1][None])
        total += part
    return total
