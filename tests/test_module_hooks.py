"""Backward hooks of modules that are given parameters: tables of positions, weight norm."""

from __future__ import annotations

from typing import ClassVar
from weakref import ReferenceType, ref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import gradstats as gs
from tests.losses import losses_of
from tests.oracle import (
    assert_sqnorms,
    assert_unchanged,
    check_model,
    check_products,
    oracle_sqnorms,
    snapshot,
)

B, T, WIDTH, CLASSES = 5, 5, 4, 3


class Positions(nn.Module):
    """Looks up a row for each place, the same for all examples; its norm is given these alone."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(T, WIDTH), nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, count):
        return self.norm(self.table(torch.arange(count))) * self.scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, WIDTH), Positions()
        self.layer = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        h = self.tokens(ids) + self.positions(ids.shape[1])
        return self.head(self.layer(h).tanh().mean(1))


class Pairs(nn.Module):
    """Two results of one module, which is given a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * CLASSES, 7))
        self.halves = Halves()

    def forward(self, ids):
        first, second = self.halves(self.weight)
        x = functional.one_hot(ids, 7).double().sum(1)
        return functional.linear(x, first).tanh() + functional.linear(x, second)


class Halves(nn.Module):
    def forward(self, weight):
        return weight.chunk(2)


class Add(nn.Module):
    def forward(self, x, shift, weight):
        return functional.linear(x + shift, weight), weight


class Beside(nn.Module):
    """Data, a parameter and a tensor derived from one beside each other."""

    def __init__(self):
        super().__init__()
        self.tokens, self.add = nn.Embedding(7, WIDTH), Add()
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH))

    def forward(self, ids):
        scores, weight = self.add(self.tokens(ids).mean(1), self.shift.exp(), self.weight)
        return scores.tanh() + self.tokens(ids).sum(1) @ weight.T


class Seen:
    """Writes down what the hooks of all modules are given."""

    def __init__(self, model: nn.Module):
        self.gradients: dict[str, list[torch.Tensor]] = {}
        for name, module in model.named_modules():
            module.register_full_backward_pre_hook(self.note(f"{name} before"))
            module.register_full_backward_hook(self.note(name))

    def note(self, name):
        def hook(module, *gradients):
            found = [each for group in gradients for each in group if each is not None]
            self.gradients.setdefault(name, []).extend(each.clone() for each in found)

        return hook


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


@pytest.fixture
def batch():
    return torch.randint(7, (B, T)), torch.randint(CLASSES, (B,))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", [Model, Pairs, Beside])
def test_the_modules_are_followed(kind, batch):
    model = made(kind)
    Seen(model)
    expected = oracle_sqnorms(made(kind), batch, losses_of)
    assert all(value.all() for value in expected.values())
    check_model(model, batch, losses_of)
    check_products(model, batch, losses_of)
    report = gs.verify(model, batch, losses_of)
    assert report.ok, report


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [Model, Pairs, Beside])
def test_the_hooks_see_the_training_gradient(kind, fused, batch):
    plain, model = made(kind), made(kind)
    expected, seen = Seen(plain), Seen(model)
    losses_of(plain, batch).mean().backward()
    with gs.track(model, batch_size=B, fused=fused) as tracker:
        tracker.backward(losses_of(model, batch))
    assert seen.gradients.keys() == expected.gradients.keys()
    assert ("positions.table" in seen.gradients) == (kind is Model)
    for name, gradients in expected.gradients.items():
        torch.testing.assert_close(seen.gradients[name], gradients, rtol=1e-12, atol=1e-15)


class Shifted(nn.Module):
    """Modules that are given parameters alone, parameters and data, and data alone."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(T, WIDTH))
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tokens, self.head = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        shift = self.inner(self.norm(2 * self.table))
        return self.head((self.tokens(ids) + shift).tanh().mean(1))


def doubled(gradients):
    return tuple(None if each is None else 2 * each for each in gradients)


def doubled_in_place(gradients):
    for each in gradients:
        if each is not None:
            each.mul_(2)


HOOKS = {
    "full": lambda module, change: module.register_full_backward_hook(
        lambda module, before, after: change(before)
    ),
    "before": lambda module, change: module.register_full_backward_pre_hook(
        lambda module, after: change(after)
    ),
    "deprecated": lambda module, change: module.register_backward_hook(
        lambda module, before, after: change(before)
    ),
    "node": lambda module, change: module.register_forward_hook(
        lambda module, args, result: (result.grad_fn.register_hook(lambda g, _: change(g)), None)[1]
    ),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:Using .*non-full")
@pytest.mark.parametrize("change", [doubled, doubled_in_place], ids=["new", "in place"])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("name", ["norm", "inner"])
def test_hooks_that_change_gradients_of_parameters_alone_are_refused(name, hook, change, batch):
    model = made(Shifted)
    hook(model.get_submodule(name), change)
    state = snapshot(model)
    for run in (
        lambda: gs.per_example_norms(model, batch, losses_of),
        lambda: gs.inner_products(model, batch, model, batch, losses_of),
        lambda: gs.alignment(model, batch, losses_of, "mean"),
        lambda: tracked(model, batch, fused=True),
        lambda: tracked(model, batch, fused=False),
    ):
        with pytest.raises(gs.UnsupportedOperationError, match=r"a hook on .*'table'.* changed"):
            run()
        model.zero_grad()
        assert_unchanged(model, state)


@pytest.mark.filterwarnings("ignore:Using .*non-full")
@pytest.mark.parametrize("hook", ["deprecated", "node"])
@pytest.mark.parametrize("name", ["tokens", "head"])
def test_hooks_that_change_what_an_operation_of_parameters_hands_on_are_refused(name, hook, batch):
    for change in (doubled, doubled_in_place):
        model = made(Shifted)
        HOOKS[hook](model.get_submodule(name), change)
        for run in (
            lambda model=model: gs.per_example_norms(model, batch, losses_of),
            lambda model=model: tracked(model, batch, fused=True),
        ):
            with pytest.raises(
                gs.UnsupportedOperationError, match=rf"a hook on .*'{name}.* changed"
            ):
                run()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:Using .*non-full")
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("name", ["norm", "inner", "tokens", "head"])
def test_hooks_that_read_gradients_get_those_of_training(name, hook, batch):
    plain, model = made(Shifted), made(Shifted)
    expected, seen = [], []
    for each, read in ((plain, expected), (model, seen)):
        hook(each.get_submodule(name), lambda given, read=read: read.extend(given))
    check = oracle_sqnorms(made(Shifted), batch, losses_of)
    assert_sqnorms(gs.per_example_norms(model, batch, losses_of), check, 1e-9)
    seen.clear()
    assert_sqnorms(tracked(model, batch, fused=True), check, 1e-9)
    losses_of(plain, batch).mean().backward()
    wanted, found = ([each for each in given if each is not None] for given in (expected, seen))
    for one in wanted:
        assert any(one.shape == each.shape and torch.allclose(one, each) for each in found)


def nodes_found(losses):
    """Return the nodes of the losses' graph as code finds them that walks it."""
    found, stack = [], [losses.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in found and "Accumulate" not in node.name():
            found.append(node)
            stack += [child for child, _ in node.next_functions]
    return found


def hooked_where(kind, hook):
    """Return losses that set a hook on the nodes of a kind, found by a walk."""

    def losses(model, batch):
        result = losses_of(model, batch)
        for node in nodes_found(result):
            if node.name().startswith(kind):
                hook(node)
        return result

    return losses


CHANGES = {
    "given": lambda node: node.register_prehook(doubled),
    "handed on": lambda node: node.register_hook(lambda handed, _: doubled(handed)),
    "in place": lambda node: node.register_hook(lambda handed, _: doubled_in_place(handed)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_hooks_on_nodes_of_parameters_that_a_walk_finds_are_refused(change, batch):
    # Those of layers on data are given the gradients that the factors are made of.
    kinds = ["NativeLayerNorm", "TBackward"] + ["Addmm"] * (change is not CHANGES["given"])
    for kind in kinds:
        losses = hooked_where(kind, change)
        model = made(Shifted)
        state = snapshot(model)
        for run in (
            lambda losses=losses, model=model: gs.per_example_norms(model, batch, losses),
            lambda losses=losses, model=model: tracked(model, batch, fused=True, losses_of=losses),
        ):
            with pytest.raises(gs.UnsupportedOperationError, match=r"a hook on .* changed"):
                run()
            model.zero_grad()
            assert_unchanged(model, state)


@pytest.mark.parametrize("kind", ["Tanh", "Mean"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_hooks_on_nodes_of_data_that_a_walk_finds_change_the_gradients(change, kind, batch):
    losses = hooked_where(kind, change)
    expected = oracle_sqnorms(made(Shifted), batch, losses)
    plain = oracle_sqnorms(made(Shifted), batch, losses_of)
    torch.testing.assert_close(expected["tokens.weight"], 4 * plain["tokens.weight"])
    for fused in (True, False):
        stats = tracked(made(Shifted), batch, fused=fused, losses_of=losses)
        assert_sqnorms(stats, expected, 1e-9)
    assert_sqnorms(gs.per_example_norms(made(Shifted), batch, losses), expected, 1e-9)


def test_hooks_on_all_nodes_that_a_walk_finds_may_read(batch):
    def read(node):
        node.register_hook(lambda handed, given: None)
        node.register_prehook(lambda given: None)

    losses = hooked_where("", read)
    expected = oracle_sqnorms(made(Shifted), batch, losses_of)
    assert_sqnorms(gs.per_example_norms(made(Shifted), batch, losses), expected, 1e-9)
    assert_sqnorms(tracked(made(Shifted), batch, fused=True, losses_of=losses), expected, 1e-9)


@pytest.mark.usefixtures("graphs_run_on_cpus")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_hooks_behind_a_compiled_model_change_the_gradients(change, batch):
    """A graph takes the parameters themselves, as operations on these alone do."""
    model = made(Shifted)
    model.compile(backend="aot_eager")

    def losses(model, batch):
        result = functional.cross_entropy(model(batch[0]).tanh(), batch[1], reduction="none")
        for node in nodes_found(result):
            if node.name().startswith("Tanh"):
                change(node)
                break  # in the graph there is another
        return result

    expected = oracle_sqnorms(made(Shifted), batch, losses)
    assert_sqnorms(tracked(model, batch, fused=True, losses_of=losses), expected, 1e-9)
    assert_sqnorms(gs.per_example_norms(model, batch, losses), expected, 1e-9)


@pytest.mark.usefixtures("graphs_run_on_cpus")
def test_hooks_on_the_node_of_a_compiled_model_are_refused_where_they_change_gradients(batch):
    model = made(Shifted)
    model.compile(backend="aot_eager")
    with pytest.raises(gs.UnsupportedOperationError, match=r"a hook on .* changed"):
        tracked(model, batch, fused=True, losses_of=hooked_where("Compiled", CHANGES["handed on"]))
    losses = hooked_where("Compiled", lambda node: node.register_hook(lambda *_: None))
    expected = oracle_sqnorms(made(Shifted), batch, losses_of)
    assert_sqnorms(tracked(model, batch, fused=True, losses_of=losses), expected, 1e-9)


class Written(nn.Module):
    """Parameters written into data in place, by a function of these and the parameter."""

    def __init__(self, write):
        super().__init__()
        self.tokens, self.layer = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.row = nn.Parameter(torch.randn(WIDTH))
        self.head, self.write = nn.Linear(WIDTH, CLASSES), write

    def forward(self, ids):
        h = self.layer(self.tokens(ids))
        self.write(h, self.row, ids > 3)
        return self.head(h.tanh()).mean(1)


WRITES = {
    "where a mask says": lambda h, row, mask: h.__setitem__(mask, row),
    "at one position": lambda h, row, mask: h.__setitem__((slice(None), 0), row),
    "added to one position": lambda h, row, mask: h[:, 0].add_(row),
    "multiplied": lambda h, row, mask: h[:, 1:].mul_(row),
    "copied": lambda h, row, mask: h[:, :1].copy_(row.expand(B, 1, WIDTH)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_hooks_behind_parameters_written_into_data_change_the_gradients(write, batch):
    torch.manual_seed(0)
    model = Written(write).double()
    handle = model.head.register_full_backward_hook(lambda module, given, _: doubled(given))
    expected = oracle_sqnorms(model, batch, losses_of)
    assert_sqnorms(gs.per_example_norms(model, batch, losses_of), expected, 1e-9)
    for fused in (True, False):
        assert_sqnorms(tracked(model, batch, fused=fused), expected, 1e-9)
    handle.remove()
    plain = oracle_sqnorms(model, batch, losses_of)
    torch.testing.assert_close(expected["row"], 4 * plain["row"])


def test_gradients_that_hooks_read_are_freed(batch):
    """While the graph is still there, as where the losses are."""
    found = []
    losses = hooked_where("", lambda node: node.register_hook(lambda handed, _: note(handed)))

    def note(handed):
        found.extend(ref(each) for each in handed if each is not None)

    model = made(Shifted)
    with gs.track(model, batch_size=B) as tracker:
        result = losses(model, batch)
        tracker.backward(result)
    model.zero_grad()
    assert found
    assert not any(each() is not None for each in found)
    del result


class Passed(torch.autograd.Function):
    """The identity; ``made`` are its nodes, which hold what was computed before them."""

    made: ClassVar[list[ReferenceType]] = []

    @staticmethod
    def forward(ctx, x):
        Passed.made.append(ref(ctx))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.tokens = nn.Embedding(7, WIDTH)

    def forward(self, ids):
        h = self.tokens(ids).mean(1)
        for layer in self.layers:
            h = checkpoint(self.part, h, layer, use_reentrant=False)
        return h

    def part(self, h, layer):
        return layer(Passed.apply(h)).tanh()


@pytest.mark.filterwarnings("ignore:Using .*non-full")
@pytest.mark.parametrize("hook", ["deprecated", "node"])
def test_what_checkpoints_compute_again_is_freed_under_hooks(hook, batch):
    model, alive = made(Recomputed), []

    def count(gradients):
        again = Passed.made[len(model.layers) :]  # after those of the forward
        alive.append(sum(each() is not None for each in again))

    for layer in model.layers:
        HOOKS[hook](layer, count)
    Passed.made.clear()
    tracked(model, batch, fused=True)
    assert alive == [0] * len(model.layers)


def test_hooks_of_modules_that_a_vmap_runs_slice_by_slice_are_refused():
    """PyTorch's vmap calls none; one over examples, which runs as usual, calls none either."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).double()
    batch = torch.randn(B, T, WIDTH, dtype=torch.float64), torch.randint(CLASSES, (B,))

    def at_once(model, batch):
        x = model[2](torch.vmap(model[1])(model[0](batch[0])))
        return functional.cross_entropy(x.mean(1), batch[1], reduction="none")

    def by_slices(model, batch):
        x = torch.vmap(model)(batch[0])
        return functional.cross_entropy(x.mean(1), batch[1], reduction="none")

    model[1].register_full_backward_hook(lambda module, inner, outer: (inner[0] * 2,))
    check_model(model, batch, at_once, fusing=(True,))
    with pytest.raises(gs.UnsupportedOperationError, match=r"a hook.*a module.*torch\.vmap"):
        gs.per_example_norms(model, batch, by_slices)


def tracked(model, batch, *, fused, losses_of=losses_of):
    with gs.track(model, batch_size=B, fused=fused) as tracker:
        tracker.backward(losses_of(model, batch))
    return tracker.stats
