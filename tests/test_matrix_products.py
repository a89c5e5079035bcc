"""Matrix products by oneDNN, where a processor's vectors are wider there than in PyTorch's own."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from gradstats import _cost
from gradstats._factors import Outer
from gradstats.capture.uses import _hooked
from gradstats.contractions import _multiply, _outer, sqnorm
from tests.dispatched import Operations
from tests.losses import losses_of

from .oracle import assert_sqnorms, check_model, flat, oracle_gradients, oracle_sqnorms

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="PyTorch was built without oneDNN"
)


@pytest.fixture
def products(monkeypatch):
    """Have oneDNN multiply everything that it can, in small pieces, and record the sizes."""
    found = []
    real = _multiply._product

    def record(left, right):
        found.append((*left.shape, right.shape[1]))
        return real(left, right)

    monkeypatch.setattr(_multiply, "_product", record)
    monkeypatch.setattr(_multiply, "has_faster_products", lambda: True)
    monkeypatch.setattr(_multiply, "WORTH_CALLING", 0)
    monkeypatch.setattr(_multiply, "WORTH_CALLING_ON_ROWS", 0)
    monkeypatch.setattr(_multiply, "WORTH_PREPARING", 0)
    return found


def of_onednn(name, inputs, result):
    """Find whether oneDNN gets a weight that it can put in its order fast."""
    if name == "mkldnn::_linear_pointwise":
        return inputs[1].is_contiguous() or inputs[1].t().is_contiguous()
    return None


LAYOUTS = {
    "contiguous": lambda n, m: torch.randn(n, m),
    "transposed": lambda n, m: torch.randn(m, n).t(),
    "rows apart": lambda n, m: torch.randn(n, m + 3)[:, 1:-2],
    "columns apart": lambda n, m: torch.randn(m + 3, n)[1:-2].t(),
    "transposed, apart": lambda n, m: torch.randn(m, n + 3)[:, 1:-2].t(),
    "every other": lambda n, m: torch.randn(n, 2 * m)[:, ::2],
    "one row": lambda n, m: torch.randn(1, m).expand(n, m),
    "one column": lambda n, m: torch.randn(n, 1).expand(n, m),
}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_any_matrices(left, right, whole, products, monkeypatch):
    if not whole:
        monkeypatch.setattr(_multiply, "SCRATCH", 3000)
        monkeypatch.setattr(_multiply, "LENGTH_BLOCK", 7)
        monkeypatch.setattr(_multiply, "BLOCK_ELEMENTS", 1)
    for n, k, m in ((5, 33, 40), (1, 20, 3), (17, 1, 19), (31, 64, 1)):
        one, two = LAYOUTS[left](n, k), LAYOUTS[right](k, m)
        with Operations(of_onednn) as weights:
            got = _multiply.multiply(one, two)
        assert weights.found and all(weights.found)
        expected = one.double() @ two.double()
        bound = (k + 2) * 2**-24 * (one.double().abs() @ two.double().abs())
        assert got.dtype == torch.float32 and bool(((got - expected).abs() <= bound).all())
    assert len(products) == 4 if whole else len(products) > 4


def test_large_operands_are_multiplied_in_pieces(products, monkeypatch):
    monkeypatch.setattr(_multiply, "SCRATCH", 4096)
    monkeypatch.setattr(_multiply, "LENGTH_BLOCK", 16)
    monkeypatch.setattr(_multiply, "BLOCK_ELEMENTS", 1)
    weight = torch.randn(32, 60)  # twice 7680 bytes: what a piece's two copies may take, four times
    _multiply.multiply(torch.randn(9, 32), weight)
    assert products == [(9, 32, 15)] * 4
    del products[:]
    _multiply.multiply(torch.randn(40, 9).t(), torch.randn(40, 8))
    assert products == [(9, 16, 8), (9, 16, 8), (9, 8, 8)]
    del products[:]
    # A sum of parts takes a result more.
    _multiply.multiply(torch.randn(40, 33).t(), torch.randn(40, 32))
    assert products == []


def test_what_pytorch_multiplies(products):
    """Nothing of which oneDNN would lose a gradient or digits, or bypass a subclass."""
    a, b = torch.randn(6, 5), torch.randn(5, 4)
    weight = torch.randn(5, 4, requires_grad=True)
    _multiply.multiply(a, weight).sum().backward()
    assert torch.allclose(weight.grad, a.sum(0)[:, None].expand(5, 4))
    for dtype in (torch.float64, torch.bfloat16):
        assert _multiply.multiply(a.to(dtype), b.to(dtype)).dtype == dtype
    _multiply.multiply(a.to("meta"), b.to("meta"))
    assert not _multiply.pays(120, a.to_sparse())

    class Subclass(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    assert not _multiply.pays(120, a.as_subclass(Subclass))
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns where there is no GPU
    try:
        _multiply.multiply(a, b)
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert products == []
    with torch.no_grad():
        _multiply.multiply(a, weight)
    assert products == [(6, 5, 4)]


def test_small_products_are_pytorchs(monkeypatch):
    monkeypatch.setattr(_multiply, "has_faster_products", lambda: True)
    threads = torch.get_num_threads()
    large = torch.empty(256 * threads, 256)
    work = 256 * threads * 256 * 256
    assert _multiply.pays(work, large) and not _multiply.pays(work - 1, large)
    # What is asked for often repays its preparation sooner, but never where it is tiny.
    assert _multiply.pays(_multiply.WORTH_CALLING, large, times=threads)
    assert not _multiply.pays(_multiply.WORTH_CALLING - 1, large, times=10**6)
    least = _multiply.WORTH_CALLING_ON_ROWS
    assert _multiply.pays(least, large, times=10**6, on_rows=True)
    assert not _multiply.pays(least - 1, large, times=10**6, on_rows=True)
    monkeypatch.setattr(_multiply, "has_faster_products", lambda: False)
    assert not _multiply.pays(work, large)


@pytest.mark.parametrize(
    "name, wide, capability, faster",
    [
        ("AMD EPYC", True, "AVX512", True), ("AMD Ryzen 9 9950X", True, "AVX512", True),
        ("AMD EPYC", True, "AVX2", False), ("Intel(R) Xeon(R)", True, "AVX512", False),
        ("AMD Ryzen 9 7950X", False, "AVX512", False), (None, None, "AVX512", False),
    ],
)  # fmt: skip
def test_processors(name, wide, capability, faster, monkeypatch):
    known = {} if name is None else {"cpu_name": name, "avx_vnni": wide}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert _multiply.has_faster_products.__wrapped__() is faster


class Blocks(nn.Module):
    """Linear layers on rows, on positions, with a weight stored either way, and one shared."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(12, 24)
        self.mix = nn.Linear(24, 24, bias=False)
        self.turned = nn.Parameter(torch.randn(24, 10) / 5)
        self.head = nn.Linear(50, 6)

    def forward(self, x):
        h = self.embed(x).tanh()
        h = self.mix(self.mix(h).tanh()) @ self.turned
        return self.head(h.flatten(1).tanh())


def blocks():
    return Blocks(), (torch.randn(7, 5, 12), torch.randint(6, (7,)))


def rows():
    model = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 20, bias=False), nn.Tanh())
    return nn.Sequential(*model, nn.Linear(20, 6)), (torch.randn(9, 12), torch.randint(6, (9,)))


class LastState(nn.Module):
    """Two recurrent layers, the first without biases, and their last state."""

    def __init__(self):
        super().__init__()
        self.lower = nn.LSTM(12, 20, bias=False, batch_first=True)
        self.upper = nn.GRU(20, 6, batch_first=True)

    def forward(self, x):
        return self.upper(self.lower(x)[0])[0][:, -1]


def sequences():
    return LastState(), (torch.randn(7, 5, 12), torch.randint(6, (7,)))


@pytest.mark.parametrize("make", [blocks, rows, sequences])
def test_norms_and_gradients(make, products):
    model, batch = make()
    check_model(model, batch, losses_of, rtol=2e-5, gradient_rtol=1e-6)
    kinds = {size[:2] for size in products}
    assert len(kinds) > 3  # gradients of the data and of weights, of several layers


def test_gates_of_recurrent_layers(products):
    """Of all steps at once, from what the input and the state before give to them."""
    model, batch = sequences()
    gs.per_example_norms(model, batch, losses_of)
    gates = [(35, 12, 80), (35, 20, 80), (35, 20, 18), (35, 6, 18)]
    data = (35, 18, 20)
    assert {*gates, data} <= set(products)


def test_steps_of_recurrent_layers(products):
    """Backward through the states, unless each step would have a size of its own."""
    model, (x, labels) = sequences()
    steps = [(7, 80, 20), (7, 18, 6)]
    gs.per_example_norms(model, (x, labels), losses_of)
    assert [products.count(step) for step in steps] == [5, 5]
    del products[:]

    def packed_losses(model, batch):
        x, lengths, labels = batch
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        hidden = model.upper(model.lower(packed)[0])[1][0]
        return functional.cross_entropy(hidden, labels, reduction="none")

    lengths = torch.tensor([5, 5, 4, 3, 3, 2, 1])
    check_model(model, (x, lengths, labels), packed_losses, rtol=2e-5, gradient_rtol=1e-6)
    assert products and not {*steps} & {*products}


@pytest.mark.parametrize("make", [blocks, rows])
def test_gradients_of_data_are_pytorchs_beside_training(make, products):
    """Other bits of one layer's would be more in the next, down to the first weight gradient."""
    model, (x, labels) = make()
    x.requires_grad_()
    losses_of(model, (x, labels)).mean().backward()
    plain, x.grad = x.grad, None
    with gs.track(model, batch_size=len(x)) as tracker:
        tracker.backward(losses_of(model, (x, labels)))
    assert products and torch.equal(x.grad, plain)
    del products[:]
    gs.per_example_norms(model, (x, labels), losses_of)
    first = model.embed if make is blocks else model[0]
    size = (x[..., 0].numel(), first.out_features, first.in_features)
    assert size in products  # for norms alone they may be anyone's
    assert (len(labels) * 5, 24, 12) in products or (len(labels), 30, 12) in products


@pytest.mark.parametrize("make", [blocks, rows])
def test_inner_products(make, products):
    model, batch = make()
    gradients = flat(oracle_gradients(model, batch, losses_of))
    expected = gradients @ gradients.T
    size = expected.diagonal().sqrt()
    allowed = 2e-6 * size[:, None] * size
    other = copy.deepcopy(model)
    for got in (
        gs.inner_products(model, batch, other, batch, losses_of),
        gs.per_example_norms(model, batch, losses_of, gram=True).gram,
    ):
        assert bool(((got.double() - expected).abs() <= allowed).all())
    mean = gs.alignment(model, batch, losses_of, "mean")
    assert bool(((mean.double() - expected.mean(1)).abs() <= allowed.mean(1)).all())
    assert products


def test_gradients_are_formed_alone_where_their_products_are_faster(products):
    factor = Outer(torch.randn(3, 1, 70, 20), torch.randn(3, 1, 70, 16), (20, 16))
    expected = factor.dense().double().flatten(1).square().sum(1)
    for result, total in (
        (_outer.direct(factor, 2**28), None),
        _outer.direct_and_sum(factor, 2**28),
    ):
        torch.testing.assert_close(result.value, expected, rtol=1e-5, atol=0)
        if total is not None:
            torch.testing.assert_close(total, factor.dense().sum(0), rtol=1e-5, atol=1e-4)
    assert products == [(20, 70, 16)] * 6
    # Of several groups they are one product, and PyTorch's.
    del products[:]
    groups = Outer(torch.randn(3, 2, 70, 20), torch.randn(3, 2, 70, 16), (2, 20, 16))
    sqnorm([groups], 2**28)
    assert products == []


def test_forms_where_gradients_are_formed_faster():
    """Where the faster one was found to be by a tenth and more (benchmarks/crossover.py)."""
    for positions, p, q, form in (
        (128, 256, 256, "gram"), (256, 256, 256, "direct"), (128, 1024, 256, "gram"),
        (256, 1024, 256, "direct"), (256, 768, 768, "gram"), (512, 768, 768, "direct"),
        (256, 2048, 512, "gram"), (512, 2048, 512, "direct"),
    ):  # fmt: skip
        sizes = {"examples": 16, "alone": True}
        assert _cost.choose_outer_form(positions, p, q, **sizes) == form
    assert _cost.choose_outer_form(64, 768, 768, with_sum=True, alone=True) == "gram"
    assert _cost.choose_outer_form(128, 768, 768, with_sum=True, alone=True) == "direct"


def test_layers_on_rows_are_hooked_where_a_function_gains_nothing(monkeypatch):
    """Beside training to the bit, products are PyTorch's everywhere."""
    model, batch = rows()

    def hooked(**options) -> bool:
        with gs.track(model, batch_size=9, **options) as tracker:
            logits = model(batch[0])
            found = _hooked.hooked_on(logits.grad_fn) is not None
            tracker.backward(functional.cross_entropy(logits, batch[1], reduction="none"))
        expected = oracle_sqnorms(model, batch, losses_of)
        assert_sqnorms(tracker.stats, expected, 2e-5)
        return found

    assert hooked()
    monkeypatch.setattr(_multiply, "has_faster_products", lambda: True)
    monkeypatch.setattr(_multiply, "WORTH_CALLING", 0)
    monkeypatch.setattr(_multiply, "WORTH_CALLING_ON_ROWS", 0)
    monkeypatch.setattr(_multiply, "WORTH_PREPARING", 0)
    assert not hooked()
    assert hooked(fused=False)
