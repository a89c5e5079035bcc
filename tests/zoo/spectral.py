"""Models that compute with complex numbers: Fourier transforms and states that turn."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.awkward import WIDTH, data, losses
from tests.zoo.case import Case


class SpectralConvolution(nn.Module):
    """Mixes the channels of the lowest frequencies of an image, with complex weights."""

    def __init__(self, channels: int, modes: int):
        super().__init__()
        shape = (channels, channels, modes, modes)
        self.low = nn.Parameter(torch.randn(shape, dtype=torch.complex128) / channels)
        self.high = nn.Parameter(torch.randn(shape, dtype=torch.complex128) / channels)
        self.modes = modes

    def forward(self, images: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(images)
        mixed = torch.zeros_like(spectrum)
        modes = slice(self.modes)
        for rows, weight in ((modes, self.low), (slice(-self.modes, None), self.high)):
            part = spectrum[:, :, rows, modes]
            mixed[:, :, rows, modes] = torch.einsum("bixy,ioxy->boxy", part, weight)
        return torch.fft.irfft2(mixed, s=images.shape[-2:])


class StateSpace(nn.Module):
    """Convolves each channel with a sum of damped oscillations, by way of their transforms."""

    def __init__(self, channels: int, states: int):
        super().__init__()
        self.decay = nn.Parameter(torch.randn(channels, states))
        self.frequency = nn.Parameter(torch.randn(channels, states))
        self.mix = nn.Parameter(torch.randn(channels, states, 2))
        self.skip = nn.Parameter(torch.randn(channels))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        rate = torch.complex(-self.decay.exp(), self.frequency)
        powers = (rate.unsqueeze(-1) * torch.arange(length)).exp()
        kernel = torch.einsum("cn,cnt->ct", torch.view_as_complex(self.mix), powers).real
        spectrum = torch.fft.rfft(kernel, n=2 * length) * torch.fft.rfft(x.mT, n=2 * length)
        return torch.fft.irfft(spectrum, n=2 * length)[..., :length].mT + x * self.skip


class FrequencyFilter(nn.Module):
    """Multiplies every frequency of a sequence by a trained complex number, kept as a pair."""

    def __init__(self, length: int, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length // 2 + 1, channels, 2))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1, norm="ortho") * torch.view_as_complex(self.weight)
        return torch.fft.irfft(spectrum, n=x.shape[1], dim=1, norm="ortho")


CASES = [
    Case(
        "Fourier neural operator, complex weights",
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 1), SpectralConvolution(3, 2), nn.GELU(), SpectralConvolution(3, 2)
        ),
        data((1, 6, 6)),
        losses,
    ),
    Case(
        "diagonal state space",
        lambda: nn.Sequential(nn.Linear(WIDTH, 4), StateSpace(4, 2), nn.Linear(4, 2)),
        data((5, WIDTH)),
        losses,
    ),
    Case(
        "global filter, T = B",
        lambda: nn.Sequential(nn.LayerNorm(WIDTH), FrequencyFilter(3, WIDTH), nn.Linear(WIDTH, 2)),
        data((3, WIDTH)),
        losses,
    ),
]
