"""Random losses over all examples, with as many positions and features as examples.

Axes have names, which say what stands beside what. In half of the programs, a trained value that
has a row for each example is put beside inputs as if its rows were those of positions. What is
right is the loss of a batch of one example: programs whose loss is no sum of such must be refused,
and all others must be served.
"""

import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradstats as gs

PROGRAMS = 100
SIZES = {"positions": (3, 3, 4), "features": (3, 4, 3), "both": (3, 3, 3)}


class Skipped(Exception):
    """The names drawn do not admit the operation drawn."""


def aligned(tensor: Tensor, names: list[str], out: list[str]) -> Tensor:
    """Return a tensor with its axes in the order of ``out``, of size 1 where it has none."""
    tensor = tensor.permute([names.index(name) for name in out if name in names])
    for axis, name in enumerate(out):
        if name not in names:
            tensor = tensor.unsqueeze(axis)
    return tensor


ELEMENTWISE = (
    torch.mul,
    lambda h, x: (h - x).square(),
    lambda h, x: torch.where(x > 0, h, h / 2),
    lambda h, x: torch.lerp(h, x, 0.3).sin(),
    lambda h, x: torch.addcmul(h, h, x),
    lambda h, x: h.expand(torch.broadcast_shapes(h.shape, x.shape)).masked_fill(x > 0, 0.1),
    lambda h, x: torch.stack(torch.broadcast_tensors(h, x)).prod(0),
)
ALONG_LAST = (
    lambda h, x: functional.cosine_similarity(h, x, dim=-1),
    lambda h, x: torch.linalg.vecdot(h, x),
    lambda h, x: functional.pairwise_distance(h, x),
    lambda h, x: functional.bilinear(h, x, torch.ones(1, h.shape[-1], h.shape[-1]).double())[
        ..., 0
    ],
    lambda h, x: h.gather(-1, x.argsort(-1)[..., :1]).sin()[..., 0] * x[..., 0],
    lambda h, x: functional.cross_entropy(
        h.flatten(0, -2), x.argmax(-1).flatten(), reduction="none"
    ).view(x.shape[:-1]),
    lambda h, x: functional.cross_entropy(
        h.movedim(-1, 1), x.softmax(-1).movedim(-1, 1), reduction="none"
    ),
)


def program(seed: int, crossed: bool, model: nn.Module, batch) -> Tensor:
    """Return a loss that sums those of the examples."""
    draw = random.Random(seed)
    x, w = batch
    inputs = [(x, "btd"), (w, "bt"), (w[:, 0], "b"), (x[:, 1], "bd")]
    trained = [(model(x), "btd"), (model(x[:, 0]), "bd"), (model(x[:, 0])[:, 0], "b")]
    h, names = draw.choice(trained)
    steps = draw.randint(1, 3)
    at = draw.randrange(steps) if crossed else None
    for step in range(steps):
        item, other = draw.choice(inputs)
        own, other = list(names), list(other)
        if step == at:
            taken = draw.choice("td")
            if "b" not in own or taken in own or taken not in other:
                raise Skipped
            own[own.index("b")] = taken
        out = list(dict.fromkeys(own + other))
        draw.shuffle(out)
        kind = draw.choice(["elementwise", "einsum", "along", "vmap"])
        if kind == "elementwise":
            h = draw.choice(ELEMENTWISE)(aligned(h, own, out), aligned(item, other, out))
        elif kind == "einsum":
            out = [name for name in out if name == "b" or draw.random() < 0.6]
            h = torch.einsum(f"{''.join(own)},{''.join(other)}->{''.join(out)}", h, item)
        elif kind == "along":
            if "d" not in out or out == ["d"]:
                raise Skipped
            out = [name for name in out if name != "d"] + ["d"]
            pair = torch.broadcast_tensors(aligned(h, own, out), aligned(item, other, out))
            h, out = draw.choice(ALONG_LAST)(*(each.contiguous() for each in pair)), out[:-1]
        else:
            inside = [[name for name in each if name != "b"] for each in (own, other)]
            out = list(dict.fromkeys(inside[0] + inside[1]))
            mapped = own.index("b") if "b" in own else None

            def of_one(h, x, inside=inside, out=out):
                return aligned(h, inside[0], out) * aligned(x, inside[1], out)

            h, out = torch.vmap(of_one, (mapped, other.index("b")))(h, item), ["b", *out]
        names = out
        if draw.random() < 0.5:
            h = draw.choice((torch.sin, torch.square, torch.tanh))(h)
        if "t" in names and draw.random() < 0.3:
            h = h.sum(names.index("t"))
            names = [name for name in names if name != "t"]
    return h.sum()


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_losses_over_all_examples(sizes, crossed):
    examples, positions, features = sizes
    served = refused = 0
    for seed in range(PROGRAMS):
        torch.manual_seed(seed)
        model = nn.Linear(features, features).double()
        batch = torch.randn(*sizes).double(), torch.randn(examples, positions).double()
        try:
            total = program(seed, crossed, model, batch)
        except (Skipped, RuntimeError):
            continue  # names or shapes do not fit
        parts, expected = [], []
        try:
            for i in range(examples):
                parts.append(program(seed, crossed, model, [x[i : i + 1] for x in batch]))
                found = torch.autograd.grad(parts[-1], [*model.parameters()], allow_unused=True)
                expected.append(sum(each.square().sum() for each in found if each is not None))
            is_sum = torch.allclose(sum(parts), total)
        except (RuntimeError, ValueError):
            is_sum = False
        try:
            with gs.track(model, batch_size=examples, loss_reduction="sum") as tracker:
                program(seed, crossed, model, batch).backward()
        except gs.GradStatsError:
            assert crossed, f"program {seed} is refused"
            refused += 1
            continue
        assert is_sum, f"program {seed} is served, though its loss is no sum"
        torch.testing.assert_close(tracker.stats.sqnorm, torch.stack(expected))
        served += 1
    assert refused > 2 if crossed else served > 75
