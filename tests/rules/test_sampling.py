"""Samples of one image for all examples, as neural fields take them of grids and planes."""

import itertools

import pytest
import torch
from torch.nn import functional

import gradstats as gs
from tests.oracle import assert_sqnorms, oracle_sqnorms
from tests.rules.operation import Operation, check_operation, check_refused, uneven_loss

MODES = [
    (mode, padding, corners)
    for mode in ("bilinear", "nearest")
    for padding in ("zeros", "border")
    for corners in (True, False)
]


def places(*shape: int) -> torch.Tensor:
    """Return places of which some lie outside of the image, some far, and none on a point."""
    return 1.3 * torch.randn(shape, dtype=torch.float64)


# Of planes alone.
CUBIC = list(itertools.product(["bicubic"], ["zeros", "border"], [True, False]))

# As many points as rows of the image, and as channels: only the grid tells them apart.
SIZES = ((3, 4, 5), (2, 3, 3), (2, 1, 4))


@pytest.mark.parametrize(
    "mode, padding, corners, sizes",
    [(*way, sizes) for way, sizes in zip(MODES + CUBIC, itertools.cycle(SIZES), strict=False)],
)
def test_points_of_all_examples_in_one_grid(mode, padding, corners, sizes):
    def function(m, x):
        grid = x.reshape(1, 1, -1, 2)
        found = functional.grid_sample(m.plane, grid, mode, padding, align_corners=corners)
        return found[0, :, 0].T * 2

    check_operation(function, {"plane": (1, *sizes)}, places(3, 2))


@pytest.mark.parametrize("mode, padding", [("bicubic", "reflection"), ("bilinear", "reflection")])
def test_other_samples_of_one_image_are_refused(mode, padding):
    def function(m, x):
        grid = x.reshape(1, 1, -1, 2)
        return functional.grid_sample(m.plane, grid, mode, padding, align_corners=False)[0, :, 0].T

    check_refused(function, {"plane": (1, 2, 4, 5)}, places(3, 2), match="one image")


@pytest.mark.parametrize("mode, padding, corners", MODES)
def test_points_in_space(mode, padding, corners):
    def function(m, x):
        grid = x.view(1, len(x), -1, 1, 3)
        found = functional.grid_sample(m.volume, grid, mode, padding, align_corners=corners)
        return found[0, ..., 0].transpose(0, 1)

    check_operation(function, {"volume": (1, 2, 3, 4, 2)}, places(3, 4, 3))


def test_planes_of_several_axes():
    """As triplanes are sampled: a stack of them, at the coordinates of each pair of axes."""

    def function(m, x):
        pairs = torch.stack([x[:, [0, 1]], x[:, [0, 2]], x[:, [1, 2]]])
        planes = m.planes.tanh() * 2
        found = functional.grid_sample(planes, pairs.unsqueeze(2), align_corners=True)
        return found.prod(0).squeeze(-1).T

    check_operation(function, {"planes": (3, 2, 4, 5)}, places(3, 3))
    check_operation(function, {"planes": (3, 2, 4, 5)}, places(7, 3))


def test_lines_and_planes_of_one_field():
    """As factorised fields are: a line times a plane, several points to each ray."""

    def function(m, x):
        points = x.flatten(0, 1)
        line = torch.stack([torch.zeros_like(points[:, 2]), points[:, 2]], -1)
        at_plane, at_line = points[:, :2].view(1, -1, 1, 2), line.view(1, -1, 1, 2)
        plane = functional.grid_sample(m.plane, at_plane, align_corners=True)
        along = functional.grid_sample(m.line, at_line, align_corners=True)
        features = (plane * along).view(-1, len(points)).T @ m.basis
        return features.view(*x.shape[:2], -1).relu().cumsum(1)

    parameters = {"plane": (1, 3, 4, 4), "line": (1, 3, 5, 1), "basis": (3, 2)}
    check_operation(function, parameters, places(3, 4, 3))


def test_places_that_were_moved_first():
    """Sampled twice: what was found moves the places, and both are parts of one gradient."""

    def function(m, x):
        grid = x.reshape(1, -1, 1, 2)
        moved = grid + functional.grid_sample(m.plane, grid, align_corners=False).movedim(1, -1)
        found = functional.grid_sample(m.plane, moved, align_corners=False)
        return found[0, :, :, 0].T

    check_operation(function, {"plane": (1, 2, 4, 5)}, places(3, 2))


def test_packed_rays():
    """Rays of different numbers of points."""
    bounds = torch.tensor([0, 4, 5, 8])

    def function(m, x):
        found = functional.grid_sample(m.plane, x.view(1, 1, -1, 2), align_corners=True)
        rows = found[0, :, 0].T.tanh()
        owner = torch.repeat_interleave(torch.arange(3), bounds.diff())
        return rows.new_zeros(3, rows.shape[1]).index_add(0, owner, rows)

    model = Operation(function, {"plane": (1, 3, 4, 4)}, upstream=False)
    x = places(8, 2)
    found = gs.per_example_norms(model, (x,), uneven_loss, cu_seqlens=bounds)
    assert_sqnorms(found, oracle_sqnorms(model, (x,), uneven_loss), 1e-9)


def test_an_image_of_which_each_example_has_its_own():
    def function(m, x):
        images = m.image.expand(len(x), -1, -1, -1)
        return functional.grid_sample(images, x, align_corners=True)

    check_operation(function, {"image": (1, 2, 4, 4)}, places(3, 2, 5, 2))
