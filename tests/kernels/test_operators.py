"""The registered operators: schemas, fakes, compiled use, values on the CPU, lazy imports."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from gradstats.kernels import _calls, direct, operators

from tests.kernels import reference
from tests.kernels.reference import assert_close
from tests.kernels.samples import operator_samples

SAMPLES = list(operator_samples(torch.float64))
IDS = [f"{index}-{name}" for index, (name, *_) in enumerate(SAMPLES)]


def test_every_operator_has_a_sample():
    assert {name for name, *_ in SAMPLES} == set(operators.OPERATORS)


# each operator once in half precision too
FIRST = [
    next(i for i, (name, *_) in enumerate(SAMPLES) if name == one) for one in operators.OPERATORS
]


@pytest.mark.parametrize(
    ("index", "dtype"),
    [(index, torch.float64) for index in range(len(SAMPLES))]
    + [(index, torch.bfloat16) for index in FIRST],
    ids=lambda value: IDS[value] if isinstance(value, int) else str(value),
)
def test_opcheck(index, dtype):
    name, arguments, options = list(operator_samples(dtype))[index]
    operator = getattr(torch.ops.gradstats, name).default
    # What registers an operator is seen once; what follows from its arguments, with each of them.
    checks = ("test_schema", "test_faketensor")
    if index in FIRST and dtype == torch.float64:
        checks += ("test_autograd_registration", "test_aot_dispatch_dynamic")
    result = torch.library.opcheck(operator, arguments, options, test_utils=checks)
    assert result == dict.fromkeys(checks, "SUCCESS")


@pytest.mark.parametrize("name", operators.OPERATORS)
def test_compiles_into_one_graph(name):
    _, arguments, options = next(sample for sample in SAMPLES if sample[0] == name)
    operator = getattr(operators, name)

    def doubled(*operands):
        return torch.utils._pytree.tree_map(lambda out: out * 2, operator(*operands, **options))

    torch.compiler.reset()
    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager")(*arguments)
    torch.testing.assert_close(compiled, doubled(*arguments))


def test_values_on_the_cpu():
    wants = {
        "rank_one_sqnorm": lambda a, g: reference.sqnorm_reference(a[:, None], g[:, None]),
        "vector_sqnorm": reference.bias_sqnorm_reference,
        "gram_sqnorm": lambda a, g, *_, cu_seqlens=None: reference.sqnorm_reference(
            a, g, cu_seqlens
        ),
        "direct_sqnorm": reference.sqnorm_reference,
        "weight_gradient_sqnorm": reference.weight_gradient_reference,
        "direct_inner": reference.diagonal_reference,
        "pairwise_gram": reference.pairwise_reference,
        "pairwise_direct": reference.pairwise_reference,
        "direction_inner": reference.direction_reference,
    }
    ignored = ("max_seqlen", "workspace", "gradient_dtype")
    checked = set()
    for name, arguments, options in SAMPLES:
        if name not in wants or (name == "gram_sqnorm" and arguments[2] > 1):
            continue
        got = getattr(operators, name)(*arguments, **options)
        got = got[0] if isinstance(got, tuple) else got
        kept = {key: value for key, value in options.items() if key not in ignored}
        want = wants[name](*arguments, **kept)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
        checked.add(name)
    assert checked == set(wants)


def test_convolutions_of_no_examples_on_the_cpu():
    for name, arguments, options in SAMPLES:
        if name in ("convolution_direction", "convolution_weight_gradient_sqnorm"):
            continue
        if "convolution" in name:
            none = [item[:0] if isinstance(item, torch.Tensor) else item for item in arguments]
            results = getattr(operators, name)(*none, **options)
            for result in results if isinstance(results, tuple) else (results,):
                assert result.shape == (0,) * result.dim()


def test_second_results_on_the_cpu():
    a, g, *_ = next(arguments for name, arguments, _ in SAMPLES if name == "gram_sqnorm")
    _, magnitude, size = reference.gram_sums(
        lambda *rounding: operators.gram_sqnorm(a, g, 1, *rounding)
    )
    assert_close(magnitude, reference.magnitude_reference(a, g))
    assert_close(size, reference.size_reference(a, g))
    _, sqnorm = operators.weight_gradient_sqnorm(a, g)
    assert_close(sqnorm, reference.sqnorm_reference(a, g))
    paired, _ = operators.diagonal_gram(a, g, a, g)
    assert_close(paired, reference.sqnorm_reference(a, g))


def test_bad_segments_are_refused_on_the_cpu():
    a, g = torch.ones(4, 2), torch.ones(4, 3)
    with pytest.raises(ValueError, match="must not decrease"):
        operators.direct_sqnorm(a, g, torch.tensor([0, 3, 2]))
    with pytest.raises(ValueError, match="within the 4 packed rows"):
        operators.direct_sqnorm(a, g, torch.tensor([0, 3, 5]))


def test_a_launch_goes_to_the_device_of_its_operands(monkeypatch):
    current, launched = [0], []

    class Device:
        def __init__(self, device):
            self.index = device.index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *error):
            current.pop()

    monkeypatch.setattr(_calls, "_has_one_device", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(
        direct, "direct_sqnorm", lambda *args, **named: launched.append(current[-1])
    )
    launch = operators._launcher("direct_sqnorm")
    for index in (0, 1):
        operand = SimpleNamespace(device=torch.device("cuda", index))
        launch(operand, operand)
    assert launched == [0, 1] and current == [0]


def test_importing_operators_imports_no_triton_and_cuda_without_it_says_so():
    program = (
        "import sys, torch\n"
        "loaded_by_torch = 'triton' in sys.modules\n"
        "from gradstats.kernels import operators\n"
        "assert loaded_by_torch or 'triton' not in sys.modules\n"
        "assert not any(name.startswith('gradstats.kernels.gram') for name in sys.modules)\n"
        "sys.modules['triton'] = None\n"
        "launch = operators._launch('direct_sqnorm')\n"
        "try:\n"
        "    launch(None, None)\n"
        "except RuntimeError as error:\n"
        "    assert 'install triton' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('no error without triton')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
