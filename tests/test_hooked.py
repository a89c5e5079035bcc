"""Operations that stay PyTorch's own: the nodes that it makes, and what hooks on them do."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import gradstats as gs
from gradstats.capture.rules import _elementwise, _products
from gradstats.capture.uses import _hooked
from tests.dispatched import Operations
from tests.losses import losses_of

from .functions import ScaleGradient
from .oracle import assert_sqnorms, check_model, oracle_sqnorms

BATCH = 6


class Product(nn.Module):
    """x W + b, the weight stored the other way round."""

    def __init__(self, inputs: int, outputs: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None

    def forward(self, x):
        if self.bias is None:
            return x @ self.weight
        return torch.addmm(self.bias, x, self.weight)


def network(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4, bias=bias), nn.Tanh(), Product(4, 3, bias)).double()


class Affine(nn.Module):
    """A table, a scale on either side of its data, a shift, and both kinds of normalisation."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.groups = nn.GroupNorm(2, 4)
        self.left, self.right = (nn.Parameter(torch.randn(4)) for _ in range(2))
        self.shift = nn.Parameter(torch.randn(3, 1))

    def forward(self, ids):
        h = self.left * self.table(ids)
        h = self.norm(h * self.right) + self.shift
        return self.groups(h.mT).flatten(1)


def affine():
    torch.manual_seed(0)
    model = Affine().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model, (torch.randint(7, (BATCH, 3)), torch.randint(12, (BATCH,)))


KINDS = {"linear": lambda: (network(), data()), "affine": affine}


def data():
    torch.manual_seed(1)
    return torch.randn(BATCH, 5, dtype=torch.float64), torch.randint(3, (BATCH,))


def tracked(model, batch, losses=losses_of, **options):
    with gs.track(model, batch_size=BATCH, **options) as tracker:
        tracker.backward(losses(model, batch))
    return tracker.stats


@pytest.mark.parametrize("bias", [True, False])
def test_the_operations_stay_pytorchs(bias):
    """The training gradients are PyTorch's to the bit, whatever ``fused`` says."""
    model, batch = network(bias), data()
    plain = [p.grad.clone() for p in trained(model, batch)]
    model.zero_grad()
    with gs.track(model, batch_size=BATCH) as tracker:
        logits = model(batch[0])
        assert _hooked.hooked_on(logits.grad_fn) is not None
        tracker.backward(functional.cross_entropy(logits, batch[1], reduction="none"))
    assert_sqnorms(tracker.stats, oracle_sqnorms(model, batch, losses_of), 1e-12)
    for parameter, grad in zip(model.parameters(), plain, strict=True):
        assert torch.equal(parameter.grad, grad)


def trained(model, batch):
    losses_of(model, batch).mean().backward()
    return list(model.parameters())


def test_all_of_them_are_hooked():
    model, batch = affine()
    with gs.track(model, batch_size=BATCH) as tracker:
        losses = losses_of(model, batch)
        stack, found = [losses.grad_fn], []
        while stack:
            node = stack.pop()
            use = _hooked.hooked_on(node)
            found += [] if use is None else [root.name for root in use.roots]
            stack += [child for child, _ in node.next_functions if child is not None]
        tracker.backward(losses)
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())
    check_model(*affine(), losses_of)


def of_changed(h):
    """A view whose node is made anew because what it shows has changed."""
    view = h[:, :]
    h.mul_(2)
    return view


DATA = {
    "computed": torch.tanh,
    "one of several results": lambda h: torch.cat([h, h], 1).chunk(2, 1)[1],
    "view of what changed": of_changed,
    "leaf": lambda h: h.detach().requires_grad_(),
    "without a gradient": torch.Tensor.detach,
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("make", DATA.values(), ids=DATA)
def test_the_node_behind_the_data_is_found_without_those_of_parameters(make, bias):
    model = network(bias)
    with gs.track(model, batch_size=BATCH) as tracker:
        node = model[2](make(model[0](data()[0]))).grad_fn
        use = _hooked.hooked_on(node)
        found = [use.edges_to_data(node) for _ in range(2)]  # of two walks
        (expected, _) = node.next_functions[use.place.edge]
        assert [edge for ((edge, _),) in found] == [expected, expected]
        tracker.backward(losses_of(model, data()))


@pytest.mark.parametrize("bias", [True, False])
def test_the_walk_finds_what_is_behind_changed_data(bias):
    model = network(bias)

    def losses(model, batch):
        logits = model[2](of_changed(model[0](batch[0])))
        return functional.cross_entropy(logits, batch[1], reduction="none")

    assert_sqnorms(tracked(model, data(), losses), oracle_sqnorms(model, data(), losses), 1e-12)


def test_whether_operations_wait_is_remembered_for_their_sizes_alone():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()
    waited = []
    for positions in (2, 2, 500, 2, 500):
        x = torch.randn(BATCH, positions, 4, dtype=torch.float64)
        with gs.track(model, batch_size=BATCH, fused=False) as tracker:
            out = model(x)
            node = out.grad_fn.next_functions[0][0]
            use = _hooked.hooked_on(node)
            waited.append(use is not None and use.group is not None)
            tracker.backward(model(x).square().sum((1, 2)))
        expected = oracle_sqnorms(model, x, lambda model, x: model(x).square().sum((1, 2)))
        assert_sqnorms(tracker.stats, expected, 1e-12)
    assert waited == [True, True, False, True, False]


def test_gradients_of_affine_operations_are_pytorchs():
    model, batch = affine()
    plain = [p.grad.clone() for p in trained(model, batch)]
    model.zero_grad()
    tracked(model, batch)
    for parameter, grad in zip(model.parameters(), plain, strict=True):
        assert torch.equal(parameter.grad, grad)


def test_one_parameter_as_scale_and_as_shift():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.both = nn.Parameter(torch.randn(5, dtype=torch.float64))

        def forward(self, x):
            return functional.layer_norm(x, (5,), self.both, self.both)

    check_model(Both(), data(), losses_of)


def test_large_data_are_read_once_beside_training():
    """A second pass over them, for the norms, would take longer than an autograd Function."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(64))

        def forward(self, x):
            return x * self.scale

    torch.manual_seed(0)
    model, x = Scale(), torch.randn(BATCH, 200, 64)
    assert x.numel() > _elementwise.SMALL
    hooked = []

    def losses(model, x):
        result = model(x)
        hooked.append(_hooked.hooked_on(result.grad_fn) is not None)
        return result.sum((1, 2))

    expected = x.double().sum(1).square().sum(1)
    for stats in (gs.per_example_norms(model, x, losses), tracked(model, x, losses)):
        torch.testing.assert_close(stats.sqnorm.double(), expected, rtol=1e-5, atol=0)
    assert hooked == [True, False]


@pytest.mark.parametrize("bias", [True, False])
def test_nodes_that_nobody_knows(bias, monkeypatch):
    """A PyTorch that computed linear layers otherwise would be served by an autograd Function."""
    for name in ("LINEAR", "LINEAR_WITHOUT_BIAS"):
        monkeypatch.setattr(_products, name, getattr(_hooked, name)._replace(kind=type(None)))
    check_model(network(bias), data(), losses_of)


def test_norms_alone_form_no_weight_gradient():
    model, batch = network(), data()
    with Operations() as operations:
        gs.per_example_norms(model, batch, losses_of)
    products = [name for name in operations.found if name in ("mm", "addmm")]
    assert len(products) == 3  # two layers forward, and the gradient of what lies between them


@pytest.mark.parametrize("kind", KINDS)
def test_saved_tensors_are_taken_out_once(kind):
    """As checkpoints demand, and whoever keeps saved tensors elsewhere may."""
    taken = []

    def pack(tensor):
        return [tensor]

    def unpack(box):
        taken.append(1)
        return box.pop()

    def losses(model, batch):
        with saved_tensors_hooks(pack, unpack):
            return losses_of(model, batch)

    model, batch = KINDS[kind]()
    expected = oracle_sqnorms(model, batch, losses_of)
    assert_sqnorms(tracked(model, batch, losses), expected, 1e-12)
    assert_sqnorms(gs.per_example_norms(model, batch, losses), expected, 1e-12)
    assert taken


@pytest.mark.parametrize("kind", ["node", "tensor"])
def test_a_users_hook_changes_the_gradient_first(kind):
    def double(grad):
        return 2 * grad

    def losses(model, batch):
        hidden = model[0](batch[0])
        if kind == "node":
            hidden.grad_fn.register_prehook(lambda grads: (double(grads[0]),))
        else:
            hidden.register_hook(double)
        return functional.cross_entropy(model[2](hidden.tanh()), batch[1], reduction="none")

    def doubled(model, batch):
        hidden = ScaleGradient.apply(model[0](batch[0]), 2)
        return functional.cross_entropy(model[2](hidden.tanh()), batch[1], reduction="none")

    model, batch = network(), data()
    expected = oracle_sqnorms(model, batch, doubled)
    assert_sqnorms(tracked(model, batch, losses), expected, 1e-12)
    assert_sqnorms(gs.per_example_norms(model, batch, losses), expected, 1e-12)


def test_a_result_that_gets_no_gradient():
    def losses(model, batch):
        through = losses_of(model, batch)
        stopped = ScaleGradient.apply(model[0](batch[0] + 1), None)
        return through + stopped.sum(1)

    check_model(network(), data(), losses)


def test_a_layer_of_which_only_a_part_is_trained():
    for name in ("weight", "bias"):
        model = network()
        getattr(model[0], name).requires_grad_(False)
        getattr(model[2], name).requires_grad_(False)
        check_model(model, data(), losses_of)


def test_data_that_change_after_they_were_used():
    """PyTorch's own error, as without tracking."""

    def losses(model, batch):
        x = batch[0] * 1
        result = model(x)
        x += 1
        return functional.cross_entropy(result, batch[1], reduction="none")

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gs.per_example_norms(network(), data(), losses)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        tracked(network(), data(), losses)


def test_inner_gradients_report_nothing():
    def losses(model, batch):
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        return functional.cross_entropy(out, batch[1], reduction="none") * slope.square().sum(1)

    check_model(network(), data(), losses)


class Mark:
    """What can be seen to have been freed."""


def test_activations_are_freed_while_the_losses_live():
    model, batch = network(), data()
    gc.collect()
    gc.disable()
    try:
        with gs.track(model, batch_size=BATCH) as tracker:
            first = model[0](batch[0])
            mark = Mark()
            first.grad_fn.metadata["test"] = mark
            graph = weakref.ref(mark)
            hidden = model[1](first)
            seen = weakref.ref(hidden.untyped_storage())
            losses = functional.cross_entropy(model[2](hidden), batch[1], reduction="none")
            del first, hidden, mark
            assert seen() is not None
            tracker.backward(losses)
            assert seen() is None
        assert graph() is not None
        del losses
        assert graph() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("kind", KINDS)
def test_under_anomaly_detection(kind):
    with torch.autograd.detect_anomaly(check_nan=False):
        check_model(*KINDS[kind](), losses_of)
