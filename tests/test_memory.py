"""Memory: no tensor of B·d elements, and no more than the plain step needs plus the workspace."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from benchmarks.ledger import MemoryLedger, peak_memory
from benchmarks.workloads import Transformer, classification, next_token
from gradstats import _cost
from gradstats._factors import ConvolutionGeometry, Outer, Patches
from gradstats.contractions import _outer, _patches, _rows, sqnorm
from gradstats.statistics._kept import keep
from tests.dispatched import Operations
from tests.oracle import assert_sqnorms, oracle_sqnorms

MIB = 1024 * 1024

pytestmark = pytest.mark.usefixtures("quick_collections")  # each peak is measured after one


def test_the_ledger_sees_what_is_allocated():
    with MemoryLedger() as ledger:
        kept = torch.zeros(1000)
        for _ in range(3):
            torch.ones(5000).add_(1).view(50, 100).expand(9, 50, 100)
    assert ledger.largest == 5000
    assert ledger.peak == 4 * 6000
    assert ledger.alive == 4000
    del kept
    assert ledger.alive == 0


def workloads():
    """Return (name, model, batch, loss_fn, workspace) with large per-example gradients."""
    mlp = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 10))
    yield "mlp", mlp, (torch.randn(64, 64), torch.randint(10, (64,))), classification, 1 * MIB
    cnn = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3, stride=2), nn.ReLU(),
        nn.Conv2d(64, 128, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    yield (
        "cnn",
        cnn,
        (torch.randn(32, 3, 12, 12), torch.randint(10, (32,))),
        classification,
        2 * MIB,
    )
    gpt = Transformer(layers=2, width=64, heads=2, vocabulary=500, positions=24)
    gpt.head.weight = gpt.tokens.weight
    tokens = torch.randint(500, (24, 25))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    yield "gpt", gpt, batch, next_token, 2 * MIB


@pytest.mark.parametrize("work", list(workloads()), ids=lambda work: work[0])
def test_lean(work):
    _, model, batch, loss_fn, workspace = work
    batch_size = len(batch[0])
    elements = sum(p.numel() for p in model.parameters())

    def plain():
        loss_fn(model, batch).mean().backward()

    def norms():
        gs.per_example_norms(model, batch, loss_fn, workspace=workspace)

    def training():
        with gs.track(model, batch_size=batch_size, workspace=workspace) as tracker:
            tracker.backward(loss_fn(model, batch))

    peaks = {}
    for run in (plain, norms, training):
        model.zero_grad()
        ledger = peak_memory(run)
        peaks[run] = ledger.peak
        assert ledger.largest < batch_size * elements / 8, run.__name__
    # Reports and their intermediates: a few float64 numbers for each example and parameter.
    reports = 64 * 8 * batch_size * len(list(model.parameters()))
    assert peaks[norms] <= peaks[plain] + workspace + reports
    assert peaks[training] <= peaks[plain] + workspace + reports


@pytest.mark.parametrize("work", list(workloads()), ids=lambda work: work[0])
def test_inner_products_are_lean(work):
    """Neither side's gradients are formed; kept factors go as the other backward uses them."""
    _, model, batch, loss_fn, workspace = work
    workspace //= 2
    batch_size = len(batch[0])
    elements = sum(p.numel() for p in model.parameters())
    other = copy.deepcopy(model)
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    arguments = (model, batch, other, batch, loss_fn)

    def plain():
        loss_fn(model, batch).mean().backward()

    runs = {
        "pairs": lambda: gs.inner_products(*arguments, workspace=workspace),
        "diagonal": lambda: gs.inner_products(*arguments, pairs="diagonal", workspace=workspace),
        "gram": lambda: gs.inner_products(*arguments[:2], *arguments[:2], loss_fn,
                                          workspace=workspace),
        "alignment": lambda: gs.alignment(model, batch, loss_fn, direction, workspace=workspace),
        "mean": lambda: gs.alignment(model, batch, loss_fn, "mean", workspace=workspace),
    }  # fmt: skip
    kept = keep(model, batch, loss_fn, workspace=workspace).nbytes
    step = peak_memory(plain).peak
    model.zero_grad()
    products = 8 * 8 * batch_size**2
    reports = 64 * 8 * batch_size * len(list(model.parameters()))
    assert kept < step
    for name, run in runs.items():
        ledger = peak_memory(run)
        held = kept if name in ("pairs", "diagonal") else 0
        assert ledger.largest < batch_size * elements / 8, name
        assert ledger.peak <= step + held + 2 * workspace + products + reports, name


def test_alignment_and_gram_beside_training_are_lean():
    _, model, batch, loss_fn, workspace = next(workloads())
    batch_size = len(batch[0])
    largest = max(p.numel() for p in model.parameters())

    def plain():
        loss_fn(model, batch).mean().backward()

    def training():
        options = {"workspace": workspace, "alignment": True, "gram": True}
        with gs.track(model, batch_size=batch_size, **options) as tracker:
            tracker.backward(loss_fn(model, batch))

    step = peak_memory(plain).peak
    model.zero_grad()
    ledger = peak_memory(training)
    assert ledger.largest <= largest
    assert ledger.peak <= step + 2 * workspace + 8 * 8 * batch_size**2


def test_memory_does_not_grow_with_the_width_of_the_gradient():
    """Doubling d at equal activations may cost what the plain step costs, and no more."""
    extra = []
    for width in (256, 512):
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 10))
        batch = torch.randn(32, width), torch.randint(10, (32,))

        def plain(model=model, batch=batch):
            losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
            losses.mean().backward()

        def norms(model=model, batch=batch):
            gs.per_example_norms(model, batch, classification)

        baseline = peak_memory(plain).peak
        extra.append(peak_memory(norms).peak - baseline)
    assert extra[0] <= 0 and extra[1] <= 0


class Adapted(nn.Module):
    """A linear layer whose weight is a frozen matrix and a product of two narrow ones."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width), requires_grad=False)
        self.up = nn.Parameter(torch.randn(width, rank))
        self.down = nn.Parameter(torch.randn(rank, width))

    def forward(self, x):
        return functional.linear(x, self.weight + 2.0 * (self.up @ self.down))


def test_of_a_merged_low_rank_update_no_gradient_of_the_whole_is_formed():
    model, batch = Adapted(256, 4), torch.randn(16, 8, 256)
    ledger = peak_memory(
        lambda: gs.per_example_norms(model, batch, lambda m, x: m(x).square().mean((1, 2)))
    )
    assert ledger.largest == 256 * 256  # the weight itself, as the forward has it


def test_gradients_that_are_pulled_back_stay_within_the_workspace_however_small_the_parameter():
    class Shifted(nn.Module):
        """A frozen matrix that one trained number shifts."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(256, 256), requires_grad=False)
            self.shift = nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return functional.linear(x, self.weight + self.shift)

    model, batch = Shifted(), torch.randn(16, 8, 256)
    ledger = peak_memory(
        lambda: gs.per_example_norms(
            model, batch, lambda m, x: m(x).square().mean((1, 2)), workspace=MIB
        )
    )
    assert 4 * ledger.largest <= MIB


def test_gradients_that_are_pulled_back_through_larger_tensors_stay_within_the_workspace():
    class Mixed(nn.Module):
        """Few vectors, each mixed with all others: the weights of the mixture are what is large."""

        def __init__(self):
            super().__init__()
            self.vectors = nn.Parameter(torch.randn(512, 4))

        def forward(self, ids):
            mixture = torch.softmax(self.vectors @ self.vectors.T, dim=1)
            return functional.embedding(ids, mixture @ self.vectors)

    model, batch = Mixed(), torch.randint(512, (16, 8))

    def losses(model, ids):
        return model(ids).square().mean((1, 2))

    def norms():
        gs.per_example_norms(model, batch, losses, workspace=MIB)

    def products():
        gs.inner_products(model, batch, model, batch, losses, workspace=MIB)

    for run in (norms, products):
        assert 4 * peak_memory(run).largest <= MIB


def test_matrix_exponentials_are_pulled_back_for_so_few_examples_as_the_workspace_holds():
    model = nn.utils.parametrizations.orthogonal(nn.Linear(64, 64, bias=False))
    batch = torch.randn(32, 16, 64)

    def losses(model, batch):
        return model(batch).cos().sum((1, 2))

    def plain():
        losses(model, batch).mean().backward()

    def norms():
        return gs.per_example_norms(model, batch, losses, workspace=MIB)

    exact = copy.deepcopy(model).double()
    assert_sqnorms(norms(), oracle_sqnorms(exact, batch.double(), losses), 1e-4)
    step = peak_memory(plain).peak
    # PyTorch holds some powers of what it exponentiates beside it.
    assert peak_memory(norms).peak <= step + 3 * MIB // 2


def influence_peak(model, inputs) -> int:
    """Return the bytes that scores of 32 training and 16 query examples take."""
    labels = torch.randint(10, (32,))
    train, query = [(inputs, labels)], [(inputs[:16], labels[:16])]
    checkpoints = gs.Checkpoints(model.state_dict(), lr=1.0)
    return peak_memory(
        lambda: gs.influence(model, train, query, classification, checkpoints, progress=False)
    ).peak


def test_influence_takes_memory_for_activations_and_not_for_gradients():
    """Sixteen times as many parameters, four times the activations: no more than these."""
    peaks = []
    for width in (256, 1024):
        model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
        peaks.append(influence_peak(model, torch.randn(32, width)))
    assert peaks[1] < 4.2 * peaks[0]


def test_tiles_of_gradients_do_not_grow_with_d(monkeypatch):
    """A convolution's products of all pairs: whatever the workspace, a tile stays a tile."""
    monkeypatch.setattr(_cost, "PAIR_TILE_BYTES", 4 * MIB)
    peaks = []
    for channels in (64, 128):
        model = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2), nn.Conv2d(channels, channels, 3),
            nn.Flatten(), nn.Linear(25 * channels, 10),
        )  # fmt: skip
        peaks.append(influence_peak(model, torch.randn(32, 3, 16, 16)))
    assert peaks[1] < peaks[0] + 6 * MIB


def test_the_gradient_of_tied_logits_is_not_kept():
    """The head's gradient (B, T, vocabulary) is freed long before the embedding delivers."""
    gpt = Transformer(layers=1, width=16, heads=2, vocabulary=2000, positions=16)
    gpt.head.weight = gpt.tokens.weight
    tokens = torch.randint(2000, (16, 17))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    logits = 4 * 16 * 16 * 2000

    alive = []

    def look(module, gradients):
        alive.append(ledger.alive)

    handle = gpt.blocks[0].register_full_backward_pre_hook(look)
    with MemoryLedger() as ledger:
        gs.per_example_norms(gpt, batch, next_token, workspace=MIB)
    handle.remove()
    assert alive and max(alive) < logits


def test_long_texts_of_few_tied_characters_take_no_more_than_their_logits():
    """Of all pairs of positions, which characters they are is all that counts."""
    gpt = Transformer(layers=0, width=16, heads=2, vocabulary=8, positions=512)
    gpt.head.weight = gpt.tokens.weight
    characters = torch.randint(8, (4, 513))
    batch = (characters[:, :-1].contiguous(), characters[:, 1:].contiguous())
    expected = oracle_sqnorms(copy.deepcopy(gpt).double(), batch, next_token)
    ledger = peak_memory(lambda: gs.per_example_norms(gpt, batch, next_token))
    assert ledger.largest <= 4 * 512 * 16
    assert_sqnorms(gs.per_example_norms(gpt, batch, next_token), expected, 1e-4)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_rows_of_tables_are_added_up_for_a_few_examples_at_a_time(layer, monkeypatch):
    """Examples of many lengths, one of them empty but for padding, the others of equal ids too."""
    monkeypatch.setattr(_rows, "BLOCK", MIB // 16)
    model = layer(4000, 64, padding_idx=0)
    ids = torch.randint(1, 4000, (64, 128))
    ids[1:, 100:] = 7
    ids[3:9, 40:] = 0
    ids[5] = 0

    def losses(model, ids):
        return model(ids).flatten(1).square().sum(1)

    def plain():
        losses(model, ids).mean().backward()

    def norms():
        return gs.per_example_norms(model, ids, losses)

    def training():
        with gs.track(model, batch_size=len(ids)) as tracker:
            tracker.backward(losses(model, ids))

    expected = oracle_sqnorms(
        layer(4000, 64, padding_idx=0, _weight=model.weight.detach().double()), ids, losses
    )
    assert_sqnorms(norms(), expected, 1e-5)
    peaks = []
    for run in (plain, norms, training):
        model.zero_grad()
        peaks.append(peak_memory(run).peak)
    rows = ids.numel() * (64 * 4 if layer is nn.EmbeddingBag else 0)  # one for each of a bag's
    assert max(peaks) <= peaks[0] + rows + 8 * 8 * ids.numel() + 2 * MIB // 16


def one_by_one(model, batch):
    return torch.stack([model(example).square().mean() for example in batch])


def mapped(model, batch):
    return torch.vmap(lambda example: model(example).square().mean())(batch)


def recurrent(model, batch):
    hidden = batch.new_zeros(len(batch), 64)
    for position in batch.unbind(1):
        hidden = torch.tanh(model(position + hidden))
    return hidden.square().mean(1)


REPEATED = {
    "one by one": (one_by_one, (48, 64), 1.0),
    "vmap": (mapped, (48, 64), 1.0),
    # Gradients of all uses of a weight are needed until the last of them.
    "recurrent": (recurrent, (16, 40, 64), 1.2),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_of_many_uses_of_a_parameter_only_what_is_needed_is_held(kind):
    """Gradients of a bias are added up as they come; operands of a weight's uses are not copied."""
    loss_fn, shape, room = REPEATED[kind]
    model, batch = nn.Linear(64, 64), torch.randn(shape)
    alone = recurrent if loss_fn is recurrent else one_by_one
    expected = oracle_sqnorms(copy.deepcopy(model).double(), batch.double(), alone)

    def norms():
        return gs.per_example_norms(model, batch, loss_fn, workspace=MIB // 16)

    def plain():
        loss_fn(model, batch).mean().backward()

    assert_sqnorms(norms(), expected, 1e-4)
    step = peak_memory(plain).peak
    model.zero_grad()
    reports = 64 * 8 * len(batch) * 2
    assert peak_memory(norms).peak <= room * step + 2 * MIB // 16 + reports


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_frozen_weights_with_trained_biases_hold_no_data(fused, autocast):
    """As in plain PyTorch, which neither keeps a layer's data nor minds that they change."""
    model = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    batch = torch.randn(16, 4, 64)

    def loss_fn(model, x):
        with torch.autocast("cpu", enabled=autocast):
            for layer in model:
                y = layer(x)
                if x.requires_grad:
                    x.mul_(2)
                x = y
        return x.float().square().sum((1, 2))

    def plain():
        loss_fn(model, batch).mean().backward()

    def tracked():
        with gs.track(model, batch_size=16, fused=fused) as tracker:
            tracker.backward(loss_fn(model, batch))
        return tracker.stats

    expected = oracle_sqnorms(copy.deepcopy(model).double(), batch.double(), loss_fn)
    assert_sqnorms(tracked(), expected, 1e-4 if not autocast else 0.05)
    model.zero_grad()
    step = peak_memory(plain).peak
    model.zero_grad()
    # Two bytes of each number are an activation under autocast.
    assert peak_memory(tracked).peak <= step + batch.nbytes // 2


def images_one_by_one(model, batch):
    return torch.stack([model(image[None]).square().mean() for image in batch])


def images_cut_one_by_one(model, batch):
    """Images of different sizes, which no batch holds."""
    return torch.stack(
        [
            model(image[None, :, : 12 + number % 3, : 14 + number % 2]).square().mean()
            for number, image in enumerate(batch)
        ]
    )


def frames_one_by_one(model, batch):
    """Example after example has one image or several; each is used again, in two sizes."""
    losses = []
    for number, image in enumerate(batch):
        frames = torch.stack([image, image.flip(1), image.roll(3, 2)][: 1 + number % 3])
        halves = frames[:, :, ::2]
        losses.append(model(frames).square().mean() + model(halves).square().mean())
    return torch.stack(losses)


IMAGES = {
    "2d": (lambda: nn.Conv2d(8, 8, 3, padding=1), (24, 8, 16, 16)),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), (24, 8, 16, 16)),
    "strided": (lambda: nn.Conv2d(8, 8, 3, stride=2, dilation=2), (24, 8, 16, 16)),
    "pointwise": (lambda: nn.Conv2d(8, 8, 1), (24, 8, 16, 16)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 8, 4, 2, 1), (24, 8, 16, 16)),
    "3d": (lambda: nn.Conv3d(8, 8, 3, padding=1), (12, 8, 14, 14, 4)),
}


@pytest.mark.parametrize(
    ("kind", "loss_fn"),
    [*((kind, frames_one_by_one) for kind in IMAGES), ("2d", images_one_by_one),
     ("2d", images_cut_one_by_one)],
)  # fmt: skip
def test_convolutions_of_one_example_at_a_time_write_out_no_patches(kind, loss_fn):
    """Input and output gradient of every use are held until the last; the step holds as much."""
    layer, shape = IMAGES[kind]
    model = nn.Sequential(layer(), nn.Tanh(), nn.Tanh())
    batch = torch.randn(shape)
    expected = oracle_sqnorms(model, batch, loss_fn)

    def norms():
        return gs.per_example_norms(model, batch, loss_fn, workspace=MIB // 16)

    def plain():
        loss_fn(model, batch).mean().backward()

    def training():
        with gs.track(model, batch_size=len(batch), workspace=MIB // 16) as tracker:
            tracker.backward(loss_fn(model, batch))
        return tracker.stats

    assert_sqnorms(norms(), expected, 1e-4)
    assert_sqnorms(training(), expected, 1e-4)
    model.zero_grad()
    step = peak_memory(plain).peak
    for run in (norms, training):
        model.zero_grad()
        assert peak_memory(run).peak <= 1.05 * step + 2 * MIB // 16, run.__name__


class Recurrent(nn.Module):
    """Two recurrent layers and the loss of the last step."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layers = kind(32, 64, num_layers=2, batch_first=True, **options)

    def forward(self, x):
        return self.layers(x)[0][:, -1].square().mean(1)


# Of a plain step's memory: norms, beside training, and where PyTorch's own backward runs as well.
RECURRENT = {nn.LSTM: (0.6, 0.6, 1.45), nn.GRU: (0.9, 0.9, 1.6), nn.RNN: (1.35, 1.35, 1.8)}


@pytest.mark.parametrize("kind", RECURRENT)
def test_gates_of_recurrent_layers_are_overwritten(kind):
    model, batch = Recurrent(kind), torch.randn(8, 64, 32)
    loss_fn = nn.Module.__call__
    expected = oracle_sqnorms(model, batch, loss_fn)

    def norms():
        return gs.per_example_norms(model, batch, loss_fn, workspace=MIB // 16)

    def plain():
        loss_fn(model, batch).mean().backward()

    def training(fused=True):
        options = {"workspace": MIB // 16, "fused": fused}
        with gs.track(model, batch_size=len(batch), **options) as tracker:
            tracker.backward(loss_fn(model, batch))
        return tracker.stats

    step = peak_memory(plain).peak
    found = []
    for run in (norms, training, lambda: training(fused=False)):
        model.zero_grad()
        assert_sqnorms(run(), expected, 1e-4)
        model.zero_grad()
        found.append(peak_memory(run).peak / step)
    assert all(own <= most for own, most in zip(found, RECURRENT[kind], strict=True)), found


@pytest.mark.parametrize("with_sum", [False, True])
def test_operands_that_are_cast_count_against_the_workspace(with_sum):
    """Long examples of narrow layers: their gradients are small, they themselves are not."""
    left, right = (torch.randn(64, 1, 512, 16).bfloat16() for _ in range(2))
    factor = Outer(left, right, (16, 16))
    expected = (left.double().mT @ right.double()).square().sum((1, 2, 3))
    contract = _outer.direct_and_sum if with_sum else _outer.direct
    found = []
    ledger = peak_memory(lambda: found.append(contract(factor, MIB // 4)))
    result = found[0][0] if with_sum else found[0]
    torch.testing.assert_close(result.value, expected, rtol=1e-5, atol=0)
    assert ledger.peak <= MIB // 4 + 64 * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_uses_that_are_formed_and_added_fit_the_workspace(dtype):
    """Of a matrix and its transpose, whose products have no rule."""
    sides = [torch.randn(64, 1, 3, 32, dtype=dtype) for _ in range(4)]
    uses = [Outer(*sides[:2], (32, 32)), Outer(*sides[2:], (32, 32), (1, 0), (32, 32))]
    expected = sum(use.dense().double() for use in uses).square().sum((1, 2))
    found = []
    ledger = peak_memory(lambda: found.append(sqnorm(uses, MIB // 4)))
    torch.testing.assert_close(found[0].value, expected, rtol=1e-5, atol=0)
    assert ledger.peak <= MIB // 4 + 16 * 1024


@pytest.mark.parametrize("with_sum", [False, True])
def test_patches_of_one_example_that_exceed_the_workspace_are_not_written(with_sum):
    """Many outputs at many positions: patches of 253 KiB for a gradient of 72 KiB."""
    x, grad = torch.randn(3, 8, 30, 30), torch.randn(3, 256, 30, 30)
    geometry = ConvolutionGeometry((1, 1), (1, 1), (1, 1), 1)
    factor = Patches(x, grad, (256, 8, 3, 3), geometry)
    assert factor.way == "patches"
    expected = factor.unfolded().dense().double().square().sum((1, 2, 3, 4))
    contract = _patches.sqnorm_and_sum if with_sum else _patches.sqnorm
    found = []
    ledger = peak_memory(lambda: found.append(contract(factor, MIB // 8)))
    result = found[0][0] if with_sum else found[0]
    torch.testing.assert_close(result.value, expected, rtol=1e-5, atol=0)
    assert ledger.peak <= MIB // 8 + 64 * 1024 + with_sum * 72 * 1024


def test_gradients_are_formed_without_patches_that_are_much_larger():
    """As for inner products, which count gradients alone: of 2.3 MiB for patches of 16.9."""
    geometry = ConvolutionGeometry((1, 1), (1, 1), (1, 1), 1)
    x, grad = torch.randn(1, 128, 62, 62), torch.randn(1, 512, 62, 62)
    factor = Patches(x, grad, (512, 128, 3, 3), geometry)
    assert factor.way == "patches"
    found = []
    ledger = peak_memory(lambda: found.append(factor.dense()))
    assert ledger.peak <= 2 * found[0].nbytes
    expected = factor.unfolded().dense()
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-2)


def test_the_sum_over_pieces_of_patches_is_one_tensor():
    """Patches that do not overlap, as of images for a transformer: a large weight, much cut up."""
    model, images = nn.Conv2d(3, 256, 16, 16), torch.randn(8, 3, 128, 128)

    def plain():
        model(images).square().mean().backward()

    def training():
        with gs.track(model, batch_size=8, workspace=MIB) as tracker:
            tracker.backward(model(images).square().mean((1, 2, 3)))

    step = peak_memory(plain).peak
    expected, model.weight.grad = model.weight.grad, None
    assert peak_memory(training).peak <= step + model.weight.nbytes // 2
    torch.testing.assert_close(model.weight.grad, expected)


def copied(name, inputs, result):
    """Find the number of elements of a copy."""
    return result.numel() if name in ("clone", "copy_") else None


class Layer(nn.Module):
    """One product, its weight stored in one of two ways."""

    def __init__(self, multiply, inputs: int, outputs: int, inputs_first: bool):
        super().__init__()
        self.multiply = multiply
        shape = (inputs, outputs) if inputs_first else (outputs, inputs)
        self.weight, self.bias = (
            nn.Parameter(torch.randn(shape)),
            nn.Parameter(torch.randn(outputs)),
        )

    def forward(self, x):
        return self.multiply(x, self.weight, self.bias)


LAYERS = {
    "linear": (functional.linear, False),
    "transposed": (lambda x, w, b: x @ w.t() + b, False),
    "product": (lambda x, w, b: x @ w + b, True),
    "addmm": (lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w).unflatten(0, x.shape[:2]), True),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("positions", "inputs", "outputs"), [(3, 40, 30), (60, 30, 40)], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_weight_gradients_become_grad_without_a_copy(kind, positions, inputs, outputs, fused):
    """They are laid out as the weight is, however the product is written."""
    model = Layer(LAYERS[kind][0], inputs, outputs, LAYERS[kind][1]).double()
    x = torch.randn(4, positions, inputs).double()
    with gs.track(model, batch_size=4, fused=fused) as tracker:
        losses = model(x).square().sum((1, 2))
        with Operations(copied) as copies:
            tracker.backward(losses)
    assert inputs * outputs not in copies.found
    got = model.weight.grad
    model.weight.grad = None
    model(x).square().sum((1, 2)).mean().backward()
    assert got.stride() == model.weight.stride()
    torch.testing.assert_close(got, model.weight.grad)


@pytest.mark.parametrize("measured", ["norms", "beside training", "forward alone", "pairs"])
@pytest.mark.parametrize("work", list(workloads()), ids=lambda work: work[0])
def test_nothing_is_left_to_the_garbage_collector(work, measured):
    """A step that left it something would now and then stop for all objects of the program."""
    _, model, batch, loss_fn, _ = work
    other = copy.deepcopy(model)

    def step():
        if measured == "norms":
            gs.per_example_norms(model, batch, loss_fn)
        elif measured == "pairs":
            gs.inner_products(model, batch, other, batch, loss_fn)
        else:
            with gs.track(model, batch_size=len(batch[0])) as tracker:
                losses = loss_fn(model, batch)
                if measured == "beside training":
                    tracker.backward(losses)
        model.zero_grad()

    step()  # what is done once may leave something
    gc.disable()
    gc.freeze()  # what there is already need not be looked through, here or by later tests
    try:
        step()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_closed_context_is_freed_at_once():
    """Without waiting for the garbage collector: on a GPU that would be memory."""
    model, batch = nn.Linear(4, 3), (torch.randn(5, 4), torch.randint(3, (5,)))
    gc.collect()
    gc.disable()
    try:
        with gs.track(model, batch_size=5) as tracker:
            tracker.backward(classification(model, batch))
        context = weakref.ref(tracker._tracker)
        del tracker
        assert context() is None
    finally:
        gc.enable()


def test_a_closed_context_lets_go_of_the_graph():
    """Even while the caller keeps it for its statistics: nodes keep activations."""
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    with gs.track(model, batch_size=5, loss_reduction="sum") as tracker:
        root = model(x).norm()
        marks = tracker._tracker.marks
        assert root.grad_fn in marks.meetings.roots_of_sums
        root.square().backward()
    meetings = marks.meetings
    assert not (meetings.roots_of_sums or meetings.coupled or meetings.added)


def test_of_a_loss_that_verify_finds_coupled_nothing_is_kept():
    model, x, kept = nn.Linear(4, 3), torch.randn(5, 4), []

    def losses(model, x):
        result = (model(x) @ model(x).T).sum(1)
        kept.append(weakref.ref(result))
        return result

    gc.collect()
    gc.disable()
    try:
        gs.verify(model, x, losses)
        assert all(reference() is None for reference in kept)
    finally:
        gc.enable()


LONG_GRAPHS = """
import gc, torch, gradstats as gs
from gradstats.capture.operations import _graph

torch.manual_seed(0)
model, x = torch.nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)

def loss_fn(model, x):
    h = model(x)
    for _ in range(20_000):
        h = h * 1.0001
    return h.sum(1)

expected = 1.0001 ** 40_000 * 2 * (x.square().sum(1) + 1)
torch.testing.assert_close(gs.per_example_norms(model, x, loss_fn).norm.square(), expected)
assert not _graph._kept

def step():
    with gs.track(model, batch_size=4) as tracker:
        losses = loss_fn(model, x)
        tracker.backward(losses)
    torch.testing.assert_close(tracker.stats.norm.square(), expected)
    return losses

for _ in range(3):
    losses = step()  # those of the step before are there until now
    gs.per_example_norms(model, x, lambda model, x: model(x).sum(1))
assert len(_graph._kept) <= 2
del losses
gs.per_example_norms(model, x, lambda model, x: model(x).sum(1))
assert not _graph._kept

def refused(model, x):
    h = loss_fn(model, x)
    return (h - h.mean()).square()

# One graph behind another, each walked twice.
state = torch.ones(3, requires_grad=True)
for _ in range(3):
    for _ in range(10_000):
        state = state * 1.0
    list(_graph.nodes_behind(state)), list(_graph.nodes_behind(state.sum()))
assert _graph._kept
del state
_graph.let_go()
assert not _graph._kept

try:
    gs.per_example_norms(model, x, refused)
except gs.CoupledExamplesError:
    print("freed")
"""


def test_long_graphs_are_freed_without_a_deep_stack():
    resource = pytest.importorskip("resource")  # of Unix alone
    limit = resource.getrlimit(resource.RLIMIT_STACK)[1]
    done = subprocess.run(
        [sys.executable, "-c", LONG_GRAPHS],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (2 << 20, limit)),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (0, "freed\n"), done.stderr
