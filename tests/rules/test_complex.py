"""Complex parameters, complex data, and complex numbers made of real parameters."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import assert_sqnorms, flat, oracle_gradients, oracle_sqnorms
from tests.rules.operation import check_operation, check_refused, normal, uneven_loss
from tests.zoo.spectral import SpectralConvolution

BATCH, POSITIONS, WIDTH, OUT = 3, 4, 5, 2


def numbers(*shape: int) -> torch.Tensor:
    """Return complex numbers in double precision."""
    return torch.randn(shape, dtype=torch.complex128)


def real(out: torch.Tensor) -> torch.Tensor:
    """Return a result as real numbers, in which both parts count."""
    return torch.view_as_real(out.resolve_conj()) if out.is_complex() else out


def complex_of(x: torch.Tensor) -> torch.Tensor:
    """Return complex numbers of data."""
    return torch.complex(x, x.sin())


BROADCASTS = {
    "z * w": lambda z, w: z * w,
    "w * z": lambda z, w: w * z,
    "z / w": lambda z, w: z / w,
    "w / z": lambda z, w: w / z,
    "z + w": lambda z, w: z + w,
    "z - w.conj()": lambda z, w: z - w.conj(),
    "w - z": lambda z, w: w - z,
    "z * w.exp()": lambda z, w: z * w.exp(),
    "z ** w": lambda z, w: z**w,
    "w ** z": lambda z, w: w**z,
    "abs": lambda z, w: (z * w).abs(),
    "angle": lambda z, w: (z + w).angle(),
    "where": lambda z, w: torch.where(z.real > 0, z, w),
    "addcmul": lambda z, w: torch.addcmul(z, z, w, value=0.5),
    "in place": lambda z, w: (z * 1).mul_(w),
    "real times": lambda z, w: z.real * w.real + z.imag * w.imag,
    "real data": lambda z, w: z.real * w,
    "cat": lambda z, w: torch.cat([z, w.expand(BATCH, POSITIONS, WIDTH)], 1),
}


@pytest.mark.parametrize("function", BROADCASTS.values(), ids=BROADCASTS)
@pytest.mark.parametrize("shape", [(), (WIDTH,), (POSITIONS, 1), (1, POSITIONS, WIDTH)], ids=str)
def test_what_broadcasts(function, shape):
    check_operation(
        lambda m, x: real(function(complex_of(x), m.w)),
        {"w": numbers(*shape)},
        normal(BATCH, POSITIONS, WIDTH),
    )


PRODUCTS = {
    "einsum": (lambda z, w: torch.einsum("bti,io->bto", z, w), (WIDTH, OUT)),
    "einsum transposed": (lambda z, w: torch.einsum("bti,oi->bto", z, w), (OUT, WIDTH)),
    "einsum in groups": (lambda z, w: torch.einsum("bti,iot->bot", z, w), (WIDTH, OUT, POSITIONS)),
    "einsum of a sum": (lambda z, w: torch.einsum("bti,io->bo", z, w), (WIDTH, OUT)),
    "einsum of three": (lambda z, w: torch.einsum("bti,io,o->bto", z, w, w[0]), (WIDTH, OUT)),
    "matmul": (lambda z, w: z @ w, (WIDTH, OUT)),
    "matmul from the left": (lambda z, w: w @ z, (OUT, POSITIONS)),
    "matmul of conjugates": (lambda z, w: z.conj() @ w.conj(), (WIDTH, OUT)),
    "matmul with the adjoint": (lambda z, w: z @ w.mH, (OUT, WIDTH)),
    "a matrix for each position": (lambda z, w: z.unsqueeze(2) @ w, (POSITIONS, WIDTH, OUT)),
    "a vector": (lambda z, w: z @ w, (WIDTH,)),
    "two axes": (lambda z, w: z.flatten(1) @ w, (POSITIONS * WIDTH, OUT)),
    "rows": (lambda z, w: z[:, 0] @ w, (WIDTH, OUT)),
    "folded": (lambda z, w: (z.flatten(0, 1) @ w).unflatten(0, (BATCH, -1)), (WIDTH, OUT)),
    "linear": (lambda z, w: functional.linear(z, w), (OUT, WIDTH)),
    "linear with bias": (lambda z, w: functional.linear(z, w, w[:, 0] * 1j), (OUT, WIDTH)),
    "tensordot": (lambda z, w: torch.tensordot(z, w, 1), (WIDTH, OUT)),
    "addmm": (lambda z, w: torch.addmm(w[0], z[:, 0], w), (WIDTH, OUT)),
    "addmm of multiples": (lambda z, w: z[:, 1:].sum(1).addmm(z[:, 0], w, beta=2), (WIDTH, WIDTH)),
    "baddbmm": (lambda z, w: torch.baddbmm(w[:1], z, w.expand(len(z), -1, -1)), (WIDTH, OUT)),
    "addr": (lambda z, w: torch.addr(w.sum(), z[:, 0, 0], w), (WIDTH,)),
    "addmv": (lambda z, w: torch.addmv(w[:1], z[:, 0], w), (WIDTH,)),
    "twice": (lambda z, w: z @ w + (z * 2).conj() @ w.conj(), (WIDTH, OUT)),
    "square": (lambda z, w: z @ w @ w, (WIDTH, WIDTH)),
}


@pytest.mark.parametrize(("function", "shape"), PRODUCTS.values(), ids=PRODUCTS)
def test_products(function, shape):
    check_operation(
        lambda m, x: real(function(complex_of(x), m.w)),
        {"w": numbers(*shape)},
        normal(BATCH, POSITIONS, WIDTH),
    )


OF_BOTH_KINDS = {
    "elementwise": (lambda x, w: torch.einsum("bti,i->bti", x, w), (WIDTH,)),
    "outer": (lambda x, w: torch.einsum("bti,k->btik", x, w), (OUT,)),
    "of the examples": (lambda x, w: torch.outer(x[:, 0, 0], w), (OUT,)),
    "of one example each": (lambda x, w: torch.stack([torch.outer(w, e[0]) for e in x]), (OUT,)),
    "of three": (lambda x, w: torch.einsum("bti,i,i->bti", x, w, w.real), (WIDTH,)),
}


@pytest.mark.parametrize("trained", ["real", "complex"])
@pytest.mark.parametrize(("function", "shape"), OF_BOTH_KINDS.values(), ids=OF_BOTH_KINDS)
def test_products_without_sums_of_real_and_complex_numbers(function, shape, trained):
    weight = numbers(*shape)
    check_operation(
        lambda m, x: real(function(complex_of(x) if trained == "real" else x, m.w)),
        {"w": weight.real.clone() if trained == "real" else weight},
        normal(BATCH, POSITIONS, WIDTH),
    )


MADE = {
    "view": (lambda w: torch.view_as_complex(w), (WIDTH, 2)),
    "view of a part": (lambda w: torch.view_as_complex(w[1:]), (WIDTH + 1, 2)),
    "complex": (lambda w: torch.complex(w, w.square()), (WIDTH,)),
    "polar": (lambda w: torch.polar(w.exp(), w), (WIDTH,)),
    "product": (lambda w: 1j * w, (WIDTH,)),
    "cast": (lambda w: w.to(torch.complex128), (WIDTH,)),
    "fft": (lambda w: torch.fft.fft(w), (WIDTH,)),
    "real fft": (lambda w: torch.fft.rfft(w, norm="ortho"), (2 * WIDTH - 1,)),
    "exponential": (lambda w: torch.exp(-w.exp() + 1j * w), (WIDTH,)),
}


@pytest.mark.parametrize(("make", "shape"), MADE.values(), ids=MADE)
def test_complex_numbers_made_of_real_parameters(make, shape):
    check_operation(
        lambda m, x: real(complex_of(x) * make(m.w)),
        {"w": shape},
        normal(BATCH, POSITIONS, WIDTH),
    )


def test_a_complex_matrix_made_of_two_real_ones():
    check_operation(
        lambda m, x: real(torch.complex(x, x) @ torch.complex(m.first, m.second)),
        {"first": (WIDTH, OUT), "second": (WIDTH, OUT)},
        normal(BATCH, POSITIONS, WIDTH),
    )


RETURNS = {
    "real part": lambda w: w.real,
    "imaginary part": lambda w: w.imag,
    "pairs": lambda w: torch.view_as_real(w).flatten(-2),
    "size": lambda w: w.abs(),
    "inverse fft": lambda w: torch.fft.irfft(w, dim=0),
    "transposed pairs": lambda w: torch.view_as_real(w.mT).sum(-1).mT,
}


@pytest.mark.parametrize("make", RETURNS.values(), ids=RETURNS)
def test_real_numbers_made_of_a_complex_parameter(make):
    check_operation(
        lambda m, x: x[..., : len(make(m.w))] @ make(m.w),
        {"w": numbers(3, 3)},
        normal(BATCH, POSITIONS, WIDTH),
    )


REAL_ON_COMPLEX = {
    "gate": lambda m, z: z * m.w,
    "bias": lambda m, z: z + m.w,
    "cast": lambda m, z: z @ torch.diag(m.w).to(z.dtype),
    "complex of data and parameter": lambda m, z: torch.complex(z.real, m.w.expand_as(z.real)),
    "polar": lambda m, z: torch.polar(z.real.exp(), z.imag * m.w),
}


@pytest.mark.parametrize("function", REAL_ON_COMPLEX.values(), ids=REAL_ON_COMPLEX)
def test_real_parameters_on_complex_data(function):
    check_operation(
        lambda m, x: real(function(m, complex_of(x))),
        {"w": (WIDTH,)},
        normal(BATCH, POSITIONS, WIDTH),
    )


def test_complex_data_from_outside():
    check_operation(
        lambda m, z: real(z @ m.w + m.b),
        {"w": numbers(WIDTH, OUT), "b": numbers(OUT)},
        numbers(BATCH, POSITIONS, WIDTH),
    )


@pytest.mark.parametrize("batch", [POSITIONS, WIDTH, 1])
def test_as_many_examples_as_other_sizes(batch):
    check_operation(
        lambda m, x: real(torch.fft.rfft(x, dim=1).mT @ m.w * m.scale),
        {"w": numbers(POSITIONS // 2 + 1, WIDTH), "scale": numbers(WIDTH, WIDTH)},
        normal(batch, POSITIONS, WIDTH),
    )


def test_verify_of_a_fourier_neural_operator():
    model = nn.Sequential(
        nn.Conv2d(1, 3, 1), SpectralConvolution(3, 2), nn.GELU(), SpectralConvolution(3, 2),
        nn.Conv2d(3, 1, 1),
    ).double()  # fmt: skip
    images = (normal(BATCH, 1, 6, 6),)
    report = gs.verify(model, images, uneven_loss)
    assert report.ok, report


def test_single_precision():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), SpectralRows(8), nn.Linear(8, OUT))
    batch = (torch.randn(BATCH, POSITIONS, WIDTH),)
    expected = oracle_sqnorms(doubled(model), batch, uneven_loss)
    assert_sqnorms(gs.per_example_norms(model, batch, uneven_loss), expected, 1e-4)
    assert gs.verify(model, batch, uneven_loss).ok


class SpectralRows(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.complex64) / width)

    def forward(self, x):
        return torch.fft.ifft(torch.fft.fft(x, dim=1) @ self.weight, dim=1).real


def doubled(model: nn.Module) -> nn.Module:
    """Return a copy with complex parameters in double precision, the others as they are."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        if parameter.is_complex():
            parameter.data = parameter.data.cdouble()
    return copied


def test_directions_are_complex_where_parameters_are():
    model = nn.Sequential(SpectralRows(WIDTH))
    batch = (torch.randn(BATCH, POSITIONS, WIDTH),)
    for wrong in (torch.zeros(WIDTH, WIDTH), torch.zeros(WIDTH, 2, dtype=torch.complex64)):
        with pytest.raises(gs.CoverageError, match=r"0\.weight"):
            gs.alignment(model, batch, uneven_loss, {"0.weight": wrong})


def test_derivatives_in_the_loss():
    def loss_fn(model, batch):
        (x,) = batch
        x = x.detach().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return uneven_loss(model, batch) + slope.square().flatten(1).sum(1)

    check_operation(
        lambda m, x: real(complex_of(x) @ m.w * m.scale),
        {"w": numbers(WIDTH, OUT), "scale": numbers(OUT)},
        normal(BATCH, POSITIONS, WIDTH),
        loss_fn=loss_fn,
        fusing=(True,),
    )


def test_operations_without_a_rule_for_complex_numbers_are_refused():
    check_refused(
        lambda m, x: real(functional.conv1d(complex_of(x), m.w)),
        {"w": numbers(OUT, POSITIONS, 2)},
        normal(BATCH, POSITIONS, WIDTH),
        match=r"conv1d of complex numbers has no rule for parameter 'w'",
    )


def test_an_operation_without_a_rule_whose_results_are_complex_is_refused():
    """Its results were taken for such as have no gradient."""

    def spectra(m, x):
        found = torch.stft(x, 16, window=m.window, return_complex=True)
        return found.abs().flatten(1) * m.scale

    check_refused(
        spectra,
        {"window": (16,), "scale": ()},
        normal(2, 64),
        match="stft has no rule for parameter 'window'",
    )


@pytest.mark.parametrize("batch", [2, 9])
def test_losses_of_spectra(batch):
    """Of signals as generators of sound make them, with as many examples as frequencies too."""
    window = torch.hann_window(16).double()

    def spectra(m, x):
        signals = functional.hardswish(x @ m.w)
        found = torch.stft(signals, 16, window=window, return_complex=True)
        back = torch.istft(found, 16, window=window, length=signals.shape[1])
        return torch.cat([found.abs().flatten(1), back * m.v], 1)

    check_operation(spectra, {"w": (WIDTH, 64), "v": (64,)}, normal(batch, WIDTH))


def test_the_spectrum_of_a_batch_as_one_signal_is_refused():
    check_refused(
        lambda m, x: torch.stft((x * m.w).sum(1), 14, window=torch.ones(14).double(),
                                return_complex=True).abs(),
        {"w": (WIDTH,)}, normal(8, WIDTH), error=gs.CoupledExamplesError, match="several examples",
    )  # fmt: skip


def test_scores_in_double_precision():
    model = SpectralRows(WIDTH)
    model.weight.data = model.weight.data.cdouble()
    loader = [(normal(BATCH, POSITIONS, WIDTH),)]
    run = gs.Checkpoints([model.state_dict()], lr=1.0)
    scores = gs.influence(model, loader, loader, uneven_loss, run, progress=False)
    rows = flat(oracle_gradients(model, loader[0], uneven_loss))
    assert scores[:, 0].dtype == np.float64
    np.testing.assert_allclose(scores[:, 0], rows @ rows[0], rtol=1e-12)


def test_parts_of_a_parameter_shown_as_complex_and_as_real_numbers():
    def function(m, x):
        pairs = functional.linear(x[..., :2], torch.view_as_real(m.w)[2:4]).sum(-1, keepdim=True)
        return pairs + functional.linear(x[..., :2].to(m.w.dtype), m.w[2:4].view(1, 2)).real

    check_operation(function, {"w": numbers(4)}, normal(BATCH, POSITIONS, WIDTH))
    check_operation(function, {"w": numbers(4)}, normal(BATCH, WIDTH))


def test_parts_of_what_was_computed_of_a_complex_parameter():
    def function(m, x):
        first, second = m.w.exp().split(2)
        return torch.view_as_real((x + 0j) @ first.mT * ((x + 0j) @ second.mT)).flatten(-2)

    check_operation(function, {"w": torch.randn(4, 3, dtype=torch.complex128)}, normal(3, 5, 3))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_numbers_in_half_precision():
    """PyTorch cannot tell whether two tensors of them are equal."""

    def function(m, x):
        return x * torch.view_as_real(m.w.chalf()).double().sum(-1)

    check_operation(function, {"w": (4,)}, normal(3, 5, 4), rtol=4e-3)
