"""Real data that ships with scikit-learn, in an order that depends on the epoch alone."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, Sampler


class Digits(Dataset):
    """The first ``count`` handwritten digits as (pixels, label, id); ids are not positions."""

    def __init__(self, count: int, dtype: torch.dtype = torch.float64):
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images[:count] / 16, dtype=dtype)
        self.labels = torch.tensor(labels[:count])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return self.images[index], self.labels[index], index + 1000


class Shuffled(Sampler):
    """A permutation drawn from the epoch's number."""

    def __init__(self, count: int):
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(self.count, generator=generator).tolist())


def classifier(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10)).to(dtype)
