"""Convolutions and transposed convolutions in one, two and three dimensions."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import gradstats as gs
from gradstats._factors import Images
from tests.oracle import assert_sqnorms, oracle_sqnorms
from tests.rules.operation import check_operation, check_refused, normal

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
FUNCTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


def check_layer(layer: nn.Module, *shape: int) -> None:
    check_operation(lambda m, x: m.layer(x), {"layer": layer}, normal(*shape))


@st.composite
def geometry(draw, dims):
    """Return keyword arguments of a layer, and the shape of an input that they fit."""

    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    groups = draw(st.integers(1, 3))
    options = {
        "kernel_size": each(1, 3),
        "stride": each(1, 3),
        "padding": each(0, 2),
        "dilation": each(1, 2),
        "groups": groups,
        "bias": draw(st.booleans()),
        "in_channels": groups * draw(st.integers(1, 2)),
        "out_channels": groups * draw(st.integers(1, 2)),
    }
    extents = [
        max(1, d * (k - 1) + 1 - 2 * p) + draw(st.integers(0, 4 if dims < 3 else 2))
        for d, k, p in zip(
            options["dilation"], options["kernel_size"], options["padding"], strict=True
        )
    ]
    return options, (draw(st.integers(1, 4)), options["in_channels"], *extents)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolution_sweep(dims):
    @settings(max_examples=15)
    @given(geometry(dims))
    def check(case):
        options, shape = case
        check_layer(CONVOLUTIONS[dims](**options), *shape)

    check()


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolution_sweep(dims):
    @settings(max_examples=15)
    @given(geometry(dims), st.data())
    def check(case, data):
        options, shape = case
        # The output must keep at least one element, and output_padding stay below the stride.
        options["padding"] = tuple(
            min(p, d * (k - 1) // 2)
            for p, d, k in zip(
                options["padding"], options["dilation"], options["kernel_size"], strict=True
            )
        )
        options["output_padding"] = tuple(
            data.draw(st.integers(0, stride - 1)) for stride in options["stride"]
        )
        check_layer(TRANSPOSED[dims](**options), *shape)

    check()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@settings(max_examples=15)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.integers(1, 3),
    st.sampled_from(["same", "valid"]),
    st.booleans(),
)
def test_padding_given_as_a_word(kernel, dilation, padding, bias):
    # Even kernels need one more element at the end than at the start.
    layer = nn.Conv2d(2, 3, kernel, padding=padding, dilation=dilation, bias=bias)
    check_layer(layer, 3, 2, 10, 11)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate", "zeros"])
def test_padding_modes(dims, mode):
    layer = CONVOLUTIONS[dims](2, 2, 3, padding=2, padding_mode=mode, groups=2)
    check_layer(layer, 2, 2, *(4 for _ in range(dims)))
    layer = CONVOLUTIONS[dims](2, 2, 2, padding="same", padding_mode=mode)
    check_layer(layer, 2, 2, *(4 for _ in range(dims)))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_depthwise_and_grouped(groups, transposed):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    check_layer(kind(4, 8, 3, groups=groups, padding=1), 3, 4, 5, 6)


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"stride": 2}, {"padding": 1}], ids=str)
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
def test_one_by_one(kind, options):
    dims = 1 if kind is nn.Conv1d else 3 if kind is nn.Conv3d else 2
    check_layer(kind(4, 6, 1, **options), 3, 4, *range(3, dims + 3))


def test_many_positions_and_many_channels():
    check_layer(
        nn.Conv2d(1, 2, 3), 2, 1, 14, 15
    )  # as many positions as make the direct form cheaper
    check_layer(nn.Conv2d(24, 32, 3), 2, 24, 4, 4)  # few positions: patches against patches
    check_layer(nn.Conv2d(24, 32, 3, stride=2, groups=2), 40, 24, 6, 6)


def test_channels_last():
    data = normal(3, 4, 5, 6).to(memory_format=torch.channels_last)
    layer = nn.Conv2d(4, 6, 3, groups=2).to(memory_format=torch.channels_last)
    check_operation(lambda m, x: m.layer(x), {"layer": layer}, data)
    check_operation(lambda m, x: m.layer(x), {"layer": nn.Conv2d(4, 6, 1)}, data)
    transposed = nn.ConvTranspose2d(4, 6, 3, groups=2)
    check_operation(lambda m, x: m.layer(x), {"layer": transposed}, data)


def test_data_that_are_not_contiguous():
    data = normal(3, 6, 5, 4).transpose(1, 3)[:, :, ::2]
    check_operation(lambda m, x: m.layer(x), {"layer": nn.Conv2d(4, 6, 2, groups=2)}, data)
    expanded = normal(3, 1, 5, 6).expand(3, 4, 5, 6)
    check_operation(lambda m, x: m.layer(x), {"layer": nn.Conv2d(4, 6, 2)}, expanded)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_functional_calls_with_keywords_and_lists(dims):
    convolve = FUNCTIONS[dims]
    shape = (3, 2, *(5 for _ in range(dims)))
    parameters = {"w": (4, 1, *(2 for _ in range(dims))), "b": (4,)}
    check_operation(
        lambda m, x: convolve(input=x, weight=m.w, bias=m.b, stride=[2], groups=2),
        parameters,
        normal(*shape),
    )
    check_operation(
        lambda m, x: convolve(x, m.w, m.b, 1, [1] * dims, 2, 2), parameters, normal(*shape)
    )


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_torch_level_functions(dims):
    convolve = getattr(torch, f"conv{dims}d")
    parameters = {"w": (4, 2, *(2 for _ in range(dims))), "b": (4,)}
    check_operation(
        lambda m, x: convolve(x, m.w, m.b), parameters, normal(3, 2, *(4 for _ in range(dims)))
    )


def test_an_image_without_a_batch_axis_is_refused():
    check_refused(
        lambda m, x: m.layer(x),
        {"layer": nn.Conv2d(3, 3, 2)},
        normal(3, 5, 5),
        match="unbatched.*layer",
    )


def test_unbatched_images_by_the_remedies_of_their_refusal():
    layer, images = nn.Conv1d(4, 2, 2).double(), [normal(4, 8) for _ in range(3)]

    def losses(model, batch):
        return model(batch).square().sum((1, 2))

    def alone():
        return torch.stack([layer(each).square().sum() for each in images])

    def assigned():
        for number, each in enumerate(images):
            gs.assign_rows(each, torch.full((len(each),), number))
        return alone()

    message = r"unbatched.*torch\.stack.*assign_rows"
    with pytest.raises(gs.UnsupportedOperationError, match=message):
        with gs.track(layer, batch_size=3):
            alone()
    expected = oracle_sqnorms(layer, torch.stack(images), losses)
    for served in (assigned, lambda: losses(layer, torch.stack(images))):
        with gs.track(layer, batch_size=3) as tracker:
            tracker.backward(served())
        assert_sqnorms(tracker.stats, expected, 1e-12)


def test_a_tracked_image_is_refused():
    check_refused(
        lambda m, x: functional.conv2d(m.image.expand(3, 2, 5, 5), x).flatten(1),
        {"image": (1, 2, 5, 5)},
        normal(3, 2, 2, 2),
        match="conv2d.*'image'",
    )


@pytest.mark.parametrize("kind", ["conv", "conv_transpose"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_kernel_for_each_example(batch, kind):
    """Modulated and conditional convolutions: examples and channels folded, in groups."""
    convolve = getattr(functional, f"{kind}2d")

    def function(m, x):
        rows, channels = x.shape[:2]
        kernels = torch.einsum("be,eoihw->boihw", x.mean((2, 3)), m.experts)
        shift = (x.mean((2, 3)) @ m.shifts).flatten()
        folded = x.reshape(1, rows * channels, *x.shape[2:])
        if kind == "conv_transpose":
            kernels = kernels.transpose(1, 2)
        out = convolve(folded, kernels.flatten(0, 1), shift, 2, groups=rows)
        blur = torch.ones(out.shape[1], 1, 2, 1).double()
        out = functional.conv2d(out, weight=blur, groups=len(blur))
        return m.last(out.view(rows, 4, *out.shape[2:]))

    parameters = {"experts": (2, 4, 2, 2, 2), "shifts": (2, 4), "last": nn.Conv2d(4, 2, 1)}
    check_operation(function, parameters, normal(batch, 2, 5, 4))


def in_groups(m, kind, folded, kernels):
    """Convolve examples folded into channels, (1, B * C, *), with a kernel for each of them."""
    if kind == "conv_transpose":
        kernels = kernels.transpose(1, 2)
    rows = len(kernels)
    convolve = getattr(functional, f"{kind}2d")
    out = convolve(folded, kernels.flatten(0, 1), m.shift.repeat(rows), 2, groups=rows)
    return m.last(out.view(rows, 4, *out.shape[2:]))


@pytest.mark.parametrize("kind", ["conv", "conv_transpose"])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_kernel_that_was_repeated_for_the_batch(batch, kind):
    """Filters that take a kernel for each image: a learned one is expanded to them."""

    def function(m, x):
        rows, channels = x.shape[:2]
        folded = x.reshape(1, rows * channels, *x.shape[2:])
        blurred = m.blur.softmax(0).expand(rows, channels, 3).reshape(-1, 1, 1, 3)
        folded = functional.conv2d(folded, blurred, padding="same", groups=len(blurred))
        kernels = m.kernels[None].expand(rows, -1, -1, -1, -1)
        return in_groups(m, kind, folded, kernels)

    parameters = {
        "blur": (3,), "kernels": (4, 2, 2, 2), "shift": (4,), "last": nn.Conv2d(4, 2, 1),
    }  # fmt: skip
    check_operation(function, parameters, normal(batch, 2, 5, 4))


@pytest.mark.parametrize("kind", ["conv", "conv_transpose"])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_an_input_that_was_repeated_for_the_batch(batch, kind):
    """Generators begin with a constant, under a kernel that each example's style modulates."""

    def function(m, x):
        rows = len(x)
        folded = m.constant.repeat(rows, 1, 1, 1).view(1, -1, 4, 3)
        kernels = m.kernels * (x @ m.style)[:, None, :, None, None]
        return in_groups(m, kind, folded, kernels)

    parameters = {
        "constant": (1, 2, 4, 3), "kernels": (4, 2, 2, 2), "style": (5, 2), "shift": (4,),
        "last": nn.Conv2d(4, 2, 1),
    }  # fmt: skip
    check_operation(function, parameters, normal(batch, 5))


def test_a_kernel_of_which_each_example_has_its_part():
    """As many groups of kernels as examples: each meets its own."""

    def function(m, x):
        folded = x.reshape(1, 6, 5)
        return functional.conv1d(folded, m.w, m.b, groups=3).view(3, 4, -1)

    check_operation(function, {"w": (12, 2, 2), "b": (12,)}, normal(3, 2, 5))


# Convolutions of which a network makes the kernel or the bias, each example its own.
MADE_OF_DATA = {
    "kernel": lambda m, x, made: functional.conv1d(x, made.view(2, 3, 2), m.b),
    "bias": lambda m, x, made: functional.conv1d(x, m.w, made[0, :2]),
    "kernel, strided in groups": lambda m, x, made: functional.conv1d(
        x[:, :2], made.view(2, 1, 6)[..., :2], m.b, stride=2, padding=1, groups=2
    ),
    "kernel, transposed": lambda m, x, made: functional.conv_transpose1d(
        x, made.view(3, 2, 2), m.b, stride=2
    ),
    "bias, transposed": lambda m, x, made: functional.conv_transpose1d(
        x, m.w.transpose(0, 1), made[0, :2]
    ),
}


@pytest.mark.parametrize("function", MADE_OF_DATA.values(), ids=MADE_OF_DATA)
def test_convolutions_of_which_each_example_makes_its_own(function):
    def one_by_one(m, x):
        rows = (x[i : i + 1] for i in range(len(x)))
        return torch.cat([function(m, row, m.made(row.mean(2))) for row in rows])

    parameters = {"made": nn.Linear(3, 12), "w": (2, 3, 2), "b": (2,)}
    check_operation(one_by_one, parameters, normal(3, 3, 5))


def test_a_bias_that_one_example_makes_for_all_is_refused():
    check_refused(
        lambda m, x: functional.conv1d(x, m.w, m.made(x.mean(2))[0]),
        {"made": nn.Linear(3, 2), "w": (2, 3, 2)},
        normal(3, 3, 5),
        error=gs.GradStatsError,
        match="example",
    )


def written(x: torch.Tensor) -> torch.Tensor:
    """Return a batch of one image, in memory that may be larger, as detection models have it."""
    out = x.new_full((1, *(size + 2 for size in x.shape)), 0)
    out[0][tuple(slice(size) for size in x.shape)].copy_(x)
    return out[(slice(None), *(slice(size) for size in x.shape))]


PARTS = {
    "of two": lambda layer, x: torch.cat([layer(part) for part in x.split(2)]),
    "of one": lambda layer, x: torch.cat([layer(x[i : i + 1]) for i in range(len(x))]),
    "taken out": lambda layer, x: torch.stack([layer(image[None])[0] for image in x]),
    "written": lambda layer, x: torch.cat([layer(written(image)) for image in x]),
    "in another order": lambda layer, x: layer(x[[2, 0, 1]])[[1, 2, 0]],
}


@pytest.mark.parametrize(
    ("name", "dims"),
    [*((name, 2) for name in PARTS), ("of one", 1), ("written", 1), ("of two", 3), ("written", 3)],
)
def test_parts_of_the_batch(name, dims):
    """One after the other, which are several uses of the layers."""
    part = PARTS[name]
    layers = nn.Sequential(
        CONVOLUTIONS[dims](2, 4, 2, groups=2),
        nn.GroupNorm(2, 4),
        nn.SiLU(inplace=True),
        TRANSPOSED[dims](4, 2, 2, stride=2, output_padding=1),
    )
    check_operation(
        lambda m, x: part(m.layers, x), {"layers": layers}, normal(3, 2, *(4, 3, 2)[:dims])
    )


def check_images(owner: list[int], dims: int) -> None:
    """Check a convolution of images that belong to three examples."""
    rows = torch.tensor(owner)

    def function(m, x):
        out = m.layer(x[rows])
        return torch.zeros(3, *out.shape[1:], dtype=x.dtype).index_add(0, rows, out.square())

    check_operation(
        function, {"layer": CONVOLUTIONS[dims](2, 4, 2)}, normal(3, 2, *(4, 3, 2)[:dims])
    )


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_examples_with_images_of_their_own_number(dims):
    check_images([2, 0, 0, 2, 2], dims)


@pytest.mark.parametrize("owner", [[0, 0, 1, 1, 2, 2], [2, 0, 1, 1, 0, 2]], ids=str)
@pytest.mark.parametrize("dims", [1, 2])
def test_as_many_images_for_each_example_are_not_told_apart(dims, owner, monkeypatch):
    """Piece by piece they would take several times as long."""
    monkeypatch.delattr(Images, "alike")
    check_images(owner, dims)


@pytest.mark.parametrize("owner", [[0, 0, 1, 1, 2, 2], [2, 0, 1]], ids=str)
def test_as_many_volumes_for_each_example(owner):
    check_images(owner, 3)


@pytest.mark.parametrize(
    "kernels",
    [
        lambda m, x: m.layer(x.mean((2, 3))).view(6, 1, 1, 1).roll(2, 0),
        lambda m, x: torch.ones(6, 6, 1, 1).double(),
    ],
    ids=["kernels of other examples", "channels of all examples summed"],
)
def test_folded_channels_in_which_examples_meet_are_refused(kernels):
    def function(m, x):
        x = x * m.scale
        weight = kernels(m, x)
        folded = functional.conv2d(x.reshape(1, 6, 5, 4), weight, groups=6 // weight.shape[1])
        return m.last(folded.view(3, 40))

    check_refused(
        function,
        {"scale": (5, 4), "layer": nn.Linear(2, 2), "last": nn.Linear(40, 2)},
        normal(3, 2, 5, 4),
        error=gs.ExampleAxisError,
        match="linear.*'last.weight'",
    )


def test_examples_along_another_axis_are_refused():
    check_refused(
        lambda m, x: m.layer(x),
        {"layer": nn.Conv1d(3, 3, 2)},
        normal(4, 3, 5),
        batch_dim=1,
        error=gs.ExampleAxisError,
        match="layer",
    )


@pytest.mark.parametrize(("kernel", "padding"), list(itertools.product([1, 2, 3], [0, 1, 2])))
def test_output_padding_of_a_stride_or_more(kernel, padding):
    """Legal where it is less than the dilation."""
    layer = nn.ConvTranspose2d(
        2, 4, kernel, stride=(1, 2), dilation=3, output_padding=2, padding=padding, groups=2
    )
    check_operation(lambda m, x: m.layer(x), {"layer": layer}, normal(3, 2, 6, 4))


ROWS = {
    "two views one after the other": lambda f, x: sum(f(torch.cat([x, x.flip(-1)])).chunk(2)),
    "frames": lambda f, x: f(x.repeat_interleave(2, 0)).unflatten(0, (-1, 2)).flatten(1, 2),
    "one at a time": lambda f, x: torch.cat([f(row) for row in x.split(1)]),
    "some": lambda f, x: torch.cat([f(torch.cat([x[:1], x[2:], x[:1]])), f(x[1:2])])[[2, 3, 1]],
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", [*CONVOLUTIONS.values(), nn.ConvTranspose2d])
def test_rows_of_examples_in_any_number_and_order(kind, rows):
    dims = 1 if kind is nn.Conv1d else 3 if kind is nn.Conv3d else 2
    check_operation(
        lambda m, x: ROWS[rows](m.layer, x),
        {"layer": kind(2, 3, 2, stride=2, padding=1)},
        normal(3, 2, *range(3, dims + 3)),
    )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv3d])
def test_rows_of_examples_in_groups(kind, rows):
    layer, dims = kind(4, 6, 2, groups=2, padding=1), 2 if kind is nn.Conv2d else 3
    check_operation(
        lambda m, x: ROWS[rows](m.layer, x), {"layer": layer}, normal(3, 4, *range(2, dims + 2))
    )


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
def test_a_layer_used_twice_on_sequences_of_one_position(kind):
    """Whose channels may stand behind the position: then any stride is as good as another."""
    layer = kind(8, 8, 3, padding=1, groups=2)
    check_operation(
        lambda m, x: m.layer(m.layer(x.transpose(1, 2)).tanh()), {"layer": layer}, normal(2, 1, 8)
    )
