"""Orders and lengths of sequences that are found on the host, of data on the device."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.oracle import check_model

B = 5


def in_order(layer, x, lengths):
    order = lengths.cpu().argsort(descending=True).to(x.device)
    return layer(x[order])[0][order.argsort()]


def indexed_on_the_host(layer, x, lengths):
    order = lengths.cpu().argsort()
    return layer(x[order])[0][order.argsort()]


def packed(layer, x, lengths):
    rows = pack_padded_sequence(x, lengths.cpu(), True, enforce_sorted=False)
    return pad_packed_sequence(layer(rows)[0], True)[0]


def taken_out_of_padding(layer, x, lengths):
    mask = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    result = x.new_zeros(*x.shape[:2], layer.hidden_size)
    result[mask] = layer(x[mask][:, None])[0][:, 0]
    return result


class Model(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run
        self.before, self.after = nn.Linear(6, 4), nn.Linear(3, 2)
        self.layer = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x, lengths):
        return self.after(self.run(self.layer, self.before(x), lengths))


def losses_of(model, batch):
    return model(*batch).square().flatten(1).sum(1)


@pytest.mark.parametrize("run", [in_order, indexed_on_the_host, packed, taken_out_of_padding])
def test_uneven_sequences(run):
    batch = torch.randn(B, 4, 6).cuda(), torch.tensor([2, 4, 1, 4, 3]).cuda()
    check_model(Model(run).cuda(), batch, losses_of, rtol=1e-3, gradient_rtol=1e-4, fusing=(True,))


class Tables(nn.Module):
    """Rows of parameters picked by ids that lie on the host."""

    def __init__(self):
        super().__init__()
        self.table, self.pairs = nn.Parameter(torch.randn(7, 3)), nn.Parameter(torch.randn(4, 7, 3))

    def forward(self, x, ids):
        return self.table[ids] * x + self.pairs[(x[..., 0] > 0).long(), ids] + self.table[2]


def test_ids_on_the_host():
    batch = torch.randn(B, 4, 3).cuda(), torch.randint(7, (B, 4))
    check_model(Tables().cuda(), batch, losses_of, rtol=1e-3, gradient_rtol=1e-4, fusing=(True,))
