"""torch.nn's own attention, Transformer and recurrent models, and convolutional networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gradstats as gs
from tests.zoo.case import BATCH, Case, classify, labelled, sequence_loss, tokens

WIDTH = 8


class Encoder(nn.Module):
    """A text classifier from nn.TransformerEncoder."""

    def __init__(self, batch_first: bool, norm_first: bool):
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Embedding(40, WIDTH, padding_idx=0)
        self.position = nn.Parameter(torch.randn(1, 5, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 12, 0.0, batch_first=batch_first, norm_first=norm_first
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.layers(x, src_key_padding_mask=ids == 0)
        return self.head(x.mean(1 if self.batch_first else 0))


class Translator(nn.Module):
    """nn.Transformer with tied embeddings and head."""

    def __init__(self, batch_first: bool):
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Embedding(40, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 1, 2, 12, 0.0, batch_first=batch_first)
        self.head = nn.Linear(WIDTH, 40)
        self.head.weight = self.embed.weight

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        x, y = self.embed(source), self.embed(ids)
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]).to(x.dtype)
        if not self.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        out = self.transformer(x, y, tgt_mask=causal)
        return self.head(out if self.batch_first else out.transpose(0, 1))


def translate(model: nn.Module, batch) -> Tensor:
    source, ids, targets = batch
    return sequence_loss(model(source, ids), targets)


class Pooled(nn.Module):
    """Attention pooling: trained queries that look at the tokens, the tokens' widths differing."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, WIDTH))
        self.attention = nn.MultiheadAttention(
            WIDTH, 2, batch_first=True, kdim=6, vdim=5, add_bias_kv=True, add_zero_attn=True
        )
        self.head = nn.Linear(2 * WIDTH, 4)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        queries = self.queries.expand(len(keys), -1, -1)
        return self.head(self.attention(queries, keys, values)[0].flatten(1))


class Recurrent(nn.Module):
    """A sequence classifier on the last hidden state."""

    def __init__(self, layer: nn.Module, width: int):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        output, state = self.layer(x if self.layer.batch_first else x.transpose(0, 1))
        hidden = state[0] if isinstance(state, tuple) else state
        output = output if self.layer.batch_first else output.transpose(0, 1)
        return self.head(torch.cat([output.mean(1), hidden[-1]], 1))


class Packed(nn.Module):
    """Sequences of unequal length through a bidirectional LSTM."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 6)
        self.layer = nn.LSTM(6, WIDTH, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        lengths = torch.tensor([3, 5, 2])
        packed = pack_padded_sequence(self.embed(ids), lengths, True, enforce_sorted=False)
        output, (hidden, _) = self.layer(packed)
        output, _ = pad_packed_sequence(output, batch_first=True)
        return self.head(output.sum(1) + torch.cat([hidden[-2], hidden[-1]], 1))


class Cells(nn.Module):
    """The cell classes, step by step."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.randn(WIDTH))
        self.first, self.second = nn.LSTMCell(6, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.third = nn.RNNCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        state, hidden, last = None, self.start.expand(len(x), WIDTH), None
        for step in x.unbind(1):
            state = self.first(step, state)
            hidden = self.second(state[0], hidden)
            last = self.third(hidden, last)
        return self.head(last)


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self, channels: int, norm):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm(channels), nn.ReLU(True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.body(x).add_(x))


def residual_network(norm, training: bool):
    def build() -> nn.Module:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), norm(8), nn.ReLU(True), nn.MaxPool2d(2),
            Residual(8, norm), Residual(8, norm), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, 4),
        )  # fmt: skip
        return model.train(training)

    return build


def text():
    ids, _ = tokens(5)
    ids[1, 3:] = 0
    return ids, torch.randint(4, (BATCH,))


def source_and_target():
    return tokens(6)[0], *tokens(5)


CASES = [
    *(
        Case(
            f"nn.TransformerEncoder, {'batch' if first else 'sequence'} first"
            + (", norm first" if norm else ""),
            lambda first=first, norm=norm: Encoder(first, norm),
            text,
            classify,
        )
        for first, norm in ((True, False), (True, True), (False, False))
    ),
    *(
        Case(
            f"nn.Transformer, {'batch' if first else 'sequence'} first, tied",
            lambda first=first: Translator(first),
            source_and_target,
            translate,
        )
        for first in (True, False)
    ),
    Case(
        "nn.MultiheadAttention, kdim, vdim, bias_kv, trained queries",
        Pooled,
        lambda: (torch.randn(BATCH, 5, 6), torch.randn(BATCH, 5, 5), torch.randint(4, (BATCH,))),
        classify,
    ),
    Case(
        "nn.LSTM, 2 layers, bidirectional, projected",
        lambda: Recurrent(
            nn.LSTM(6, WIDTH, 2, batch_first=True, bidirectional=True, proj_size=3), 9
        ),
        labelled(5, 6),
        classify,
    ),
    Case(
        "nn.GRU, sequence first, as many layers as examples",
        lambda: Recurrent(nn.GRU(6, WIDTH, BATCH), 2 * WIDTH),
        labelled(5, 6),
        classify,
    ),
    Case(
        "nn.RNN, as many steps as examples",
        lambda: Recurrent(nn.RNN(6, WIDTH, batch_first=True, nonlinearity="relu"), 2 * WIDTH),
        labelled(BATCH, 6),
        classify,
    ),
    Case(
        "nn.LSTM on packed sequences",
        Packed,
        lambda: (tokens()[0], tokens()[0][:, 0] % 4),
        classify,
    ),
    Case("nn.LSTMCell, GRUCell, RNNCell", Cells, labelled(4, 6), classify),
    Case(
        "ResNet with GroupNorm, training",
        residual_network(lambda channels: nn.GroupNorm(2, channels), True),
        labelled(3, 8, 8),
        classify,
    ),
    Case(
        "ResNet with BatchNorm, evaluation",
        residual_network(nn.BatchNorm2d, False),
        labelled(3, 8, 8),
        classify,
    ),
    Case(
        "ResNet with BatchNorm, training",
        residual_network(nn.BatchNorm2d, True),
        labelled(3, 8, 8),
        classify,
        refused=(gs.CoupledExamplesError, "batch normalisation in training mode"),
    ),
]
