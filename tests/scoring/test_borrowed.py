"""Models that are lent to a computation: what moves with a checkpoint's weights, and comes back."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import weight_norm

import gradstats as gs
from tests.oracle import (
    assert_sqnorms,
    assert_unchanged,
    flat,
    gradients_of,
    oracle_on_the_batch,
    oracle_sqnorms,
    snapshot,
)
from tests.scoring.setting import loss_fn


class Aliased(nn.Module):
    """Computes with a view of its weight that it keeps as an attribute."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.views = {"encoder": [self.encoder.weight.detach().T]}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).tanh() + x @ self.views["encoder"][0])


class Caching(nn.Module):
    """Keeps what it computes from a frozen weight until its mode is set."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)
        self.encoder.requires_grad_(False)
        self.cache = None

    def train(self, mode: bool = True):
        self.cache = None
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = functional.normalize(self.encoder.weight)
        return self.head((x @ self.cache.T).tanh())


class Temperature(nn.Module):
    """Derives a number from what is loaded, and makes an attribute in its first forward."""

    def __init__(self):
        super().__init__()
        self.head, self.temperature = nn.Linear(4, 3), 1.0
        self.register_buffer("logarithm", torch.zeros(()))
        self.register_load_state_dict_post_hook(Temperature.derive)

    def derive(self, _) -> None:
        self.temperature = float(self.logarithm.exp())

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "first"):
            self.first = self.head.bias.detach().clone()
        return self.head(x) / self.temperature


class Prepared(nn.Module):
    """Derives a number when its mode is set, and counts how often it was trained."""

    def __init__(self):
        super().__init__()
        self.head, self.temperature, self.begun = nn.Linear(4, 3), 1.0, 0
        self.register_buffer("logarithm", torch.zeros(()))

    def train(self, mode: bool = True):
        self.temperature, self.begun = float(self.logarithm.exp()), self.begun + mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) / self.temperature


class Sparse(nn.Module):
    """Multiplies by a sparse buffer."""

    def __init__(self, layout: Callable[[Tensor], Tensor]):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("mixing", layout(torch.eye(4) + torch.eye(4).roll(1, 0)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sparse.mm(self.mixing, x.T).T)


class Rotary(nn.Module):
    """Makes a buffer in its first forward, which is one without gradients."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("cosines", None, persistent=False)
        with torch.inference_mode():
            self(torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.cosines is None:
            self.cosines = torch.arange(4.0).cos()
        return self.head(x * self.cosines)


class Scripted(nn.Module):
    """A trained head on a frozen part in TorchScript, with a buffer that each forward replaces."""

    def __init__(self):
        super().__init__()
        self.body = torch.jit.script(nn.Linear(4, 4).requires_grad_(False))
        self.head = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.head(self.body(x).tanh())


class Turned(nn.Linear):
    """Saves its weight in another form than it holds it in."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].T.contiguous()

    def _load_from_state_dict(self, state_dict, prefix, *args):
        turned = {**state_dict, f"{prefix}weight": state_dict[f"{prefix}weight"].T}
        super()._load_from_state_dict(turned, prefix, *args)


class Joined(nn.Module):
    """Saves two layers that a hook may take from one entry, and looks for both."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3)
        self.register_load_state_dict_pre_hook(self._split)

    @staticmethod
    def _split(module, state_dict, prefix, *_):
        if state_dict[f"{prefix}encoder.weight"].shape[0] == 7:
            raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).tanh())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a view of a weight": Aliased,
    "a cache": Caching,
    "a number derived": Temperature,
    "a number derived for a mode": Prepared,
    "sparse": lambda: Sparse(Tensor.to_sparse),
    "sparse rows": lambda: Sparse(Tensor.to_sparse_csr),
    "made without gradients": Rotary,
    "a scripted part": Scripted,
    "a weight that hooks compute": lambda: weight_norm(nn.Linear(4, 3)),
    "saved in another form": lambda: Turned(4, 3),
    "a hook on loading": Joined,
}


def disturbed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with other numbers."""
    return {
        name: value + 0.3 * torch.randn_like(value) if value.layout == torch.strided else value * 2
        for name, value in state.items()
    }


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_checkpoint_is_computed_with_its_own_weights(name, training):
    torch.manual_seed(0)
    model = MODELS[name]().train(training)
    batch = torch.randn(6, 4), torch.randint(3, (6,))
    states = [disturbed(model.state_dict()) for _ in range(2)]
    expected = torch.zeros(6, dtype=torch.float64)
    for state in states:
        loaded = MODELS[name]()
        loaded.load_state_dict(state)
        expected += sum(oracle_on_the_batch(loaded.eval(), batch, loss_fn).values())
    model(batch[0])
    before, attributes = snapshot(model), dict(vars(model))
    checkpoints = gs.Checkpoints(states, lr=1.0)
    found = gs.self_influence(model, [batch], loss_fn, checkpoints, progress=False)
    torch.testing.assert_close(
        torch.tensor(found.self_influence), expected, rtol=1e-4, atol=0, check_dtype=False
    )
    assert_unchanged(model, before)
    assert dict(vars(model)).keys() == attributes.keys()
    assert all(vars(model)[key] is value for key, value in attributes.items())
    matrix = gs.influence(model, [batch], [batch], loss_fn, checkpoints, progress=False)
    for place in range(6):
        assert matrix[place, place] == pytest.approx(expected[place].item(), rel=1e-4)
    assert gs.verify(model, batch, loss_fn).ok


@pytest.mark.parametrize("make", [Joined, lambda: nn.Sequential(nn.Linear(4, 4), Turned(4, 3))])
def test_some_entries_of_a_checkpoint_are_others(make):
    """A hook on loading may look for the rest."""
    torch.manual_seed(0)
    model, batch = make(), (torch.randn(6, 4), torch.randint(3, (6,)))
    own, changed = model.state_dict(), disturbed(model.state_dict())
    last = [name for name in own if name.startswith(("head", "1"))]
    state = {**own, **{name: changed[name] for name in last}}
    loaded = make()
    loaded.load_state_dict(state)
    before = snapshot(model)
    checkpoints = gs.Checkpoints([state], lr=1.0)
    found = gs.self_influence(model, [batch], loss_fn, checkpoints, progress=False)
    expected = gs.per_example_norms(loaded.eval(), batch, loss_fn)
    torch.testing.assert_close(torch.tensor(found.grad_norm).float(), expected.norm)
    assert_unchanged(model, before)


class Registering(nn.Module):
    """Registers a buffer in its first forward, computed from the weights that it has then."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "shift"):
            self.register_buffer("shift", self.head.weight.detach().sum(1), persistent=False)
        return self.head(x) + self.shift


def test_a_buffer_that_a_forward_registers_goes_with_the_checkpoint():
    model, batch = Registering(), (torch.randn(6, 4), torch.randint(3, (6,)))
    checkpoints = gs.Checkpoints([disturbed(model.state_dict())], lr=1.0)
    gs.self_influence(model, [batch], loss_fn, checkpoints, progress=False)
    assert not model._buffers and not model._non_persistent_buffers_set
    model(batch[0])
    torch.testing.assert_close(model.shift, model.head.weight.detach().sum(1))


class Remembering(nn.Module):
    """Keeps what its first forward computes of its weights without gradients, whatever the mode."""

    def __init__(self, empty):
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.kept = empty

    def features(self) -> Tensor:
        return self.encoder.weight.detach().cos()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.kept, tuple):  # a container inside another
            kept = self.kept[0]
            kept.setdefault("features", self.features())
            return self.head(x @ kept["features"])
        if isinstance(self.kept, dict):
            return self.head(x @ self.kept.setdefault("features", self.features()))
        if isinstance(self.kept, (list, deque)):
            self.kept.append(self.features())
            return self.head(x @ self.kept[0])
        if self.kept is None:
            self.kept = self.features()
        return self.head(x @ self.kept)


def circular() -> dict:
    """A dict that holds itself, as nodes of a tree do that know their parents."""
    kept: dict = {}
    kept["self"] = kept
    return kept


KEEPING: dict[str, Callable[[], nn.Module]] = {
    "an attribute": lambda: Remembering(None),
    "a dict": lambda: Remembering({}),
    "a dict that holds itself": lambda: Remembering(circular()),
    "a list": lambda: Remembering([]),
    "a deque": lambda: Remembering(deque()),
    "a dict in a tuple": lambda: Remembering(({},)),
    "a buffer": Registering,
}


@pytest.mark.parametrize("make", KEEPING.values(), ids=KEEPING)
def test_what_a_first_forward_keeps_goes_with_its_checkpoint(make):
    """It is of one checkpoint's weights, and neither of the next one's nor of the user's."""
    torch.manual_seed(0)
    model, batch = make(), (torch.randn(6, 4), torch.randint(3, (6,)))
    own, states = copy.deepcopy(model), [disturbed(model.state_dict()) for _ in range(2)]
    expected = torch.zeros(6, dtype=torch.float64)
    for state in states:
        loaded = make()
        loaded.load_state_dict(state)
        expected += gs.per_example_norms(loaded, batch, loss_fn).sqnorm
    data, checkpoints = [batch], gs.Checkpoints(states, lr=1.0)
    found = gs.self_influence(model, data, loss_fn, checkpoints, progress=False)
    matrix = gs.influence(model, data, data, loss_fn, checkpoints, progress=False)
    for got in (torch.tensor(found.self_influence), torch.tensor(matrix.raw[:]).diagonal()):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(model(batch[0]), own(batch[0]), rtol=0, atol=0)


class Preparing(nn.Module):
    """Registers a hook and a module in its first forward, which a plain attribute says is done."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head, self.prepared = nn.Linear(4, 4), nn.Linear(4, 3), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.prepared:
            self.encoder.register_forward_hook(lambda module, given, features: 2 * features)
            self.add_module("activation", nn.Tanh())
            self.prepared = True
        return self.head(self.activation(self.encoder(x)))


def test_what_a_first_forward_registers_is_registered_once_at_each_checkpoint():
    torch.manual_seed(0)
    model, batch = Preparing(), (torch.randn(6, 4), torch.randint(3, (6,)))
    states, expected = [disturbed(model.state_dict()) for _ in range(3)], torch.zeros(6).double()
    for state in states:
        loaded = Preparing()
        loaded.load_state_dict(state)
        expected += gs.per_example_norms(loaded, batch, loss_fn).sqnorm
    checkpoints = gs.Checkpoints(states, lr=1.0)
    found = gs.self_influence(model, [batch], loss_fn, checkpoints, progress=False)
    torch.testing.assert_close(torch.tensor(found.self_influence), expected, rtol=1e-4, atol=0)
    assert not model.encoder._forward_hooks and not hasattr(model, "activation")


@pytest.mark.parametrize("top_k", [None, 6])
def test_what_a_load_derives_stays_where_the_other_side_has_the_same_weights(top_k):
    """Nothing is loaded for it then that would derive it again."""
    torch.manual_seed(0)
    model, batch = Temperature().double(), (torch.randn(6, 4).double(), torch.arange(6) % 3)
    states = [disturbed(model.state_dict()) for _ in range(2)]
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for state in states:
        loaded = Temperature().double()
        loaded.load_state_dict(state)
        expected += gs.inner_products(loaded, batch, loaded, copy.deepcopy(batch), loss_fn)
    scores = gs.influence(
        model, [batch], [batch], loss_fn, gs.Checkpoints(states, lr=1.0),
        query_checkpoints=states, top_k=top_k, progress=False,
    )  # fmt: skip
    for query in range(6):
        found = scores.proponents(query, 6)
        got, places = torch.tensor(found.scores), torch.tensor(found.positions)
        torch.testing.assert_close(got, expected[places, query], rtol=1e-9, atol=0)


class Sealed(OrderedDict):
    """Can be written to one entry at a time alone, as outputs of Hugging Face's models can."""

    def update(self, *entries, **named):
        raise TypeError("one entry at a time")


class Latest(nn.Module):
    """Keeps by its input, which has no order and no equality that is one truth value."""

    def __init__(self, empty):
        super().__init__()
        self.head, self.latest = nn.Linear(4, 3), empty

    def forward(self, x: Tensor) -> Tensor:
        self.latest.clear()
        self.latest[x] = len(x)
        return self.head(x)


@pytest.mark.parametrize("kind", [dict, Sealed])
def test_what_is_kept_by_tensors_comes_back(kind):
    model, batch = Latest(kind()), (torch.randn(6, 4), torch.arange(6) % 3)
    model(batch[0][:2])
    (before,) = model.latest
    states = [disturbed(model.state_dict()) for _ in range(2)]
    checkpoints = gs.Checkpoints(states, lr=1.0)
    gs.self_influence(model, [batch], loss_fn, checkpoints, progress=False)
    assert [*map(id, model.latest)] == [id(before)] and model.latest[before] == 2


class EvalCache(nn.Module):
    """Keeps what it computes of a trained parameter in eval mode, until it is trained again."""

    def __init__(self):
        super().__init__()
        self.head, self.table = nn.Linear(4, 3), nn.Parameter(torch.randn(5, 4))
        self.cache: dict[str, Tensor] = {}
        # Which setting the mode leaves as they are.
        self.scale, self.threshold, self.sizes = torch.full((4,), 1.5), float("nan"), [4, 3]

    def train(self, mode: bool = True):
        if mode:
            self.cache = {}
            self.sizes = [4, 3]
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            bias = self.table[[1, 3]].sum(0)
        else:
            if "bias" not in self.cache:
                self.cache["bias"] = self.table[[1, 3]].sum(0)
            bias = self.cache["bias"]
        return self.head((self.scale * x + bias).tanh())


class CalibratedCache(EvalCache):
    """Drops a number too, which no forward makes again."""

    def __init__(self):
        super().__init__()
        self.temperature = torch.tensor(1.7).double()

    def train(self, mode: bool = True):
        if mode:
            self.temperature = None
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result if self.temperature is None else result / self.temperature


class BySize(EvalCache):
    """Keeps it for many and for few examples apart."""

    def __init__(self):
        super().__init__()
        self.many = self.few = None

    def train(self, mode: bool = True):
        if mode:
            self.many = self.few = None
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        name = "many" if len(x) > 3 else "few"
        if getattr(self, name) is None:
            setattr(self, name, self.table[[1, 3]].sum(0).sin())
        bias = self.table[[1, 3]].sum(0).sin() if self.training else getattr(self, name)
        return super().forward(x) + bias[:3]


class Counting(EvalCache):
    """Counts how often it was trained."""

    begun = 0

    def train(self, mode: bool = True):
        self.begun += mode
        return super().train(mode)


class Flagged(EvalCache):
    """Has a flag that says whether it keeps anything."""

    def __init__(self, ready: bool):
        super().__init__()
        self.ready, self.flag = ready, not ready

    def train(self, mode: bool = True):
        if mode:
            self.flag = not self.ready
        return nn.Module.train(self, mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.flag != self.ready:
            self.cache = {"bias": self.table[[1, 3]].sum(0)}
            self.flag = self.ready
        return self.head((self.scale * x + self.cache["bias"]).tanh())


class InAnObject(EvalCache):
    """Keeps it in an object of its own, too, which stays the same."""

    def __init__(self):
        super().__init__()
        self.held = SimpleNamespace(bias=None)

    def train(self, mode: bool = True):
        if mode:
            self.held.bias = None
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.table[[1, 3]].sum(0).sin()
        if not self.training:
            bias = self.held.bias = bias if self.held.bias is None else self.held.bias
        return super().forward(x) + bias[:3]


EVAL_CACHES = {
    "a cache": EvalCache,
    "in an object": InAnObject,
    "by size": BySize,
    "and a count": Counting,
    "kept if a flag is set": lambda: Flagged(True),
    "kept unless a flag is set": lambda: Flagged(False),
}


@pytest.mark.parametrize("kind", EVAL_CACHES.values(), ids=EVAL_CACHES)
@pytest.mark.parametrize("with_graph", [None, False, True])
def test_what_was_kept_in_eval_mode_is_computed_anew(kind, with_graph, tmp_path):
    torch.manual_seed(0)
    model, x, labels = kind().double(), torch.randn(6, 4).double(), torch.arange(6) % 3
    states = [disturbed(model.state_dict()) for _ in range(2)]
    expected, el2n = torch.zeros(6, 6, dtype=torch.float64), []
    for state in states:
        trained = kind().double()
        trained.load_state_dict(state)
        away = trained(x).softmax(1) - functional.one_hot(labels, 3)
        el2n.append(away.norm(dim=1).detach().numpy())
        rows = flat(gradients_of(trained, loss_fn(trained, (x, labels))))
        expected += rows @ rows.T
    model.eval()
    if with_graph is not None:
        with torch.set_grad_enabled(with_graph):
            for given in (x, x[:2]):  # as where its accuracy was looked at before
                model(given)
    kept = dict(model.cache)
    data = [(x[:4], labels[:4]), (x[4:], labels[4:])]
    checkpoints = gs.Checkpoints(states, lr=1.0)
    for out in (None, tmp_path / "self"):
        found = gs.self_influence(model, data, loss_fn, checkpoints, out=out, progress=False)
        torch.testing.assert_close(torch.tensor(found.self_influence), expected.diagonal())
        np.testing.assert_allclose(found.by_checkpoint["el2n"], el2n, rtol=1e-10)
    scores = gs.influence(model, data, data, loss_fn, checkpoints, progress=False)
    torch.testing.assert_close(torch.tensor(scores.raw[:]), expected)
    assert model.cache == kept and not model.training


@pytest.mark.parametrize("kind", EVAL_CACHES.values(), ids=EVAL_CACHES)
def test_what_a_call_keeps_in_eval_mode_does_not_outlive_it(kind):
    torch.manual_seed(0)
    model = kind().double()
    batch = torch.randn(6, 4).double(), torch.arange(6) % 3
    expected = oracle_sqnorms(model.train(), batch, loss_fn)
    model.eval()
    state = dict(vars(model))
    for _ in range(1 if kind is InAnObject else 2):
        assert_sqnorms(gs.per_example_norms(model, batch, loss_fn), expected, 1e-10)
        assert vars(model) == state and model.cache == {}


def test_what_an_earlier_forward_kept_in_eval_mode_is_refused_until_the_model_drops_it():
    torch.manual_seed(0)
    model = EvalCache().double().eval()
    batch = torch.randn(6, 4).double(), torch.arange(6) % 3
    loss_fn(model, batch)
    with pytest.raises(gs.UnsupportedOperationError, match=r"'table'.*earlier forward in eval mod"):
        gs.per_example_norms(model, batch, loss_fn)
    expected = oracle_sqnorms(model.train(), batch, loss_fn)
    assert_sqnorms(gs.per_example_norms(model.eval(), batch, loss_fn), expected, 1e-10)


@pytest.mark.parametrize("kind", [EvalCache, CalibratedCache])
def test_what_was_kept_in_eval_mode_is_refused_where_the_losses_are_others_without_it(kind):
    """It may be of other weights, or be dropped together with what no forward makes again."""
    torch.manual_seed(0)
    model, batch = kind().double().eval(), (torch.randn(6, 4).double(), torch.arange(6) % 3)
    with torch.no_grad():
        model(batch[0])
    if kind is EvalCache:
        model.load_state_dict(disturbed(model.state_dict()))
    before, kept = snapshot(model), dict(model.cache)
    checkpoints = gs.Checkpoints([disturbed(model.state_dict())], lr=1.0)
    with pytest.raises(gs.CheckpointError, match=r"drops 'cache'.*model\.train\(\) and"):
        gs.self_influence(model, [batch], loss_fn, checkpoints, progress=False)
    with pytest.raises(gs.CheckpointError, match="drops 'cache'"):
        gs.influence(model, [batch], [batch], loss_fn, checkpoints, progress=False)
    assert_unchanged(model, before)
    assert model.cache == kept and not model.training


class ThawedCache(EvalCache):
    """Trains all of its parts when it is trained."""

    def train(self, mode: bool = True):
        if mode:
            self.requires_grad_(True)
        return super().train(mode)


def test_what_was_kept_in_eval_mode_is_refused_where_the_mode_does_more():
    model, batch = ThawedCache().double().eval(), (torch.randn(6, 4).double(), torch.arange(6) % 3)
    model.head.requires_grad_(False)
    with torch.no_grad():
        model(batch[0])
    checkpoints = gs.Checkpoints([disturbed(model.state_dict())], lr=1.0)
    with pytest.raises(gs.CheckpointError, match=r"drops 'cache'.* losses or parts also change"):
        gs.self_influence(model, [batch], loss_fn, checkpoints, progress=False)
    assert not model.head.weight.requires_grad


class Averaged(nn.Linear):
    """Computes with an average of its weights in eval mode, when that begins."""

    def __init__(self):
        super().__init__(4, 3)
        self.live, self.average = None, [each.detach().clone() for each in self.parameters()]

    def train(self, mode: bool = True):
        own = [each.data for each in self.parameters()]
        if mode and not self.training and self.live is not None:
            for each, value in zip(own, self.live, strict=True):
                each.copy_(value)
        elif not mode and self.training:
            self.live = [each.clone() for each in own]
            for each, value in zip(own, self.average, strict=True):
                each.copy_(value)
        return super().train(mode)


class Thawed(nn.Sequential):
    """Trains all of its parts when it is trained."""

    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        self[0].requires_grad_(False)

    def train(self, mode: bool = True):
        if mode:
            self.requires_grad_(True)
        return super().train(mode)


class Calibrated(nn.Linear):
    """Has a number, a tensor or a list for eval mode alone, which training replaces."""

    def __init__(self, temperature, trained=None):
        super().__init__(4, 3)
        self.temperature, self.trained = temperature, trained

    def train(self, mode: bool = True):
        if mode:
            self.temperature = self.trained
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        own = self.temperature
        scale = sum(own) if isinstance(own, list) else own
        return super().forward(x) / (1 if scale is None else scale)


class ForInference(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        super().train(False)

    def train(self, mode: bool = True):
        if mode:
            raise RuntimeError("it cannot be trained")
        return super().train(mode)


class Resets(nn.Module):
    """Begins its statistics anew when it is trained."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", torch.ones(3))

    def train(self, mode: bool = True):
        if mode:
            self.mean.zero_()
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) - self.mean).tanh()


class ResetsForSome(Resets):
    """Has statistics that the examples of the first batch do not need."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) - self.mean * (x[:, :1] < 0)).tanh()


class Forgets(nn.Module):
    """Drops in place what no checkpoint has when it is trained, or sets what it had not."""

    def __init__(self, what: str):
        super().__init__()
        self.what = what
        self.layer, self.factors = nn.Linear(4, 3), {"all": 0.3, "inner": {"all": 1.7}}
        self.register_buffer("scale", torch.tensor([1.5, -0.5, 2.0]), persistent=False)

    def train(self, mode: bool = True):
        if mode and self.what == "scale":
            self.scale.zero_()
        elif mode and self.what == "factors":
            self.factors["all"] = 1.0
        elif mode and self.what == "inner":
            self.factors["inner"].clear()
        elif mode:
            self.slope = 0.1
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factors["all"] * self.factors["inner"].get("all", 1)
        return self.layer(x) * self.scale * factor * getattr(self, "slope", 1)


class Begins(nn.Linear):
    """Begins with another weight, or one more, when it is trained."""

    def __init__(self, name: str):
        super().__init__(4, 3)
        self.name = name

    def train(self, mode: bool = True):
        if mode:
            setattr(self, self.name, nn.Parameter(torch.zeros(3, 4)))
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(self._parameters) == 2 else x[:, 1:]


class Recent(nn.Linear):
    """Scales by what it measured last, until it is trained."""

    def __init__(self):
        super().__init__(4, 3)
        self.recent = deque([1.7, 1.9], maxlen=2)

    def train(self, mode: bool = True):
        if mode:
            self.recent.clear()
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (sum(self.recent) or 1.0)


class Needed(Calibrated):
    """Cannot be run without its number."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.Linear.forward(self, x) / self.temperature


class Became(nn.Linear):
    """Scales by something that training replaces."""

    def __init__(self, held, trained, scale: Callable):
        super().__init__(4, 3)
        self.held, self.trained, self.scale = held, trained, scale

    def train(self, mode: bool = True):
        if mode:
            self.held = self.trained
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale(self.held)


class Rebuilt(nn.Module):
    """Has another activation, or a hook, once it is trained."""

    def __init__(self, hooked: bool):
        super().__init__()
        self.layer, self.activation, self.hooked = nn.Linear(4, 3), nn.Tanh(), hooked

    def train(self, mode: bool = True):
        super().train(mode)
        if mode and self.hooked:
            self.layer.register_forward_hook(lambda module, given, features: 2 * features)
        elif mode:
            self.activation = nn.Sigmoid()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layer(x))


class Parts(Enum):
    ONE, TWO = 1.3, 1.7


def doubled() -> float:
    return 2.0


USERS_MODES = {
    "an average": Averaged,
    "frozen parts": Thawed,
    "a number": lambda: Calibrated(1.7),
    "another number": lambda: Calibrated(1.7, 0.5),
    "an integer": lambda: Calibrated(1.0, 2),
    "a deque": Recent,
    "a number of NumPy": lambda: Calibrated(np.float64(1.7), np.float64(0.5)),
    "a list": lambda: Calibrated([1.7], [0.5]),
    "a longer list": lambda: Calibrated([1.7], [1.7, 0.5]),
    "a tensor": lambda: Calibrated(torch.tensor(1.7)),
    "another tensor": lambda: Calibrated(torch.tensor(1.7), torch.tensor(0.5)),
    "no tensor": lambda: Calibrated(None, torch.tensor(0.5)),
    "for inference": ForInference,
    "statistics": Resets,
    "statistics for some examples": ResetsForSome,
    "a buffer that no checkpoint has": lambda: Forgets("scale"),
    "a dict": lambda: Forgets("factors"),
    "another attribute": lambda: Forgets("slope"),
    "another parameter": lambda: Begins("weight"),
    "one more parameter": lambda: Begins("scale"),
    "a tensor that it needs": lambda: Needed(torch.tensor(1.7)),
    "an array": lambda: Became(np.full(2, 1.7), np.ones(2), np.sum),
    "a dict inside a dict": lambda: Forgets("inner"),
    "a function": lambda: Became(doubled, float, lambda held: held()),
    "one of a kind": lambda: Became(Parts.TWO, Parts.ONE, lambda held: held.value),
    "an object": lambda: Became(
        SimpleNamespace(scale=1.7), SimpleNamespace(scale=1.0), lambda held: held.scale
    ),
    "a frozen set": lambda: Became(frozenset("ab"), frozenset("a"), len),
    "a slice": lambda: Became(slice(2), slice(1), lambda held: held.stop),
    "another module": lambda: Rebuilt(hooked=False),
    "a hook": lambda: Rebuilt(hooked=True),
}


@pytest.mark.parametrize("make", USERS_MODES.values(), ids=USERS_MODES)
def test_what_training_mode_does_beside_is_left_undone(make):
    """In scoring the mode is that of evaluation, whatever a model drops where it is another."""
    torch.manual_seed(0)
    model, x, labels = make(), torch.randn(6, 4), torch.arange(6) % 3
    nn.Module.train(model, False)
    states = [disturbed(model.state_dict()) for _ in range(2)]
    expected, own = torch.zeros(6).double(), copy.deepcopy(model.state_dict())
    for state in states:
        model.load_state_dict(state)
        expected += sum(oracle_on_the_batch(model, (x, labels), loss_fn).values())
    model.load_state_dict(own)
    before, frozen = snapshot(model), [each.requires_grad for each in model.parameters()]
    data, checkpoints = [(x[:4], labels[:4]), (x[4:], labels[4:])], gs.Checkpoints(states, lr=1.0)
    found = gs.self_influence(model, data, loss_fn, checkpoints, progress=False)
    torch.testing.assert_close(
        torch.tensor(found.self_influence), expected, rtol=1e-4, atol=0, check_dtype=False
    )
    scores = gs.influence(model, data, data, loss_fn, checkpoints, progress=False)
    torch.testing.assert_close(
        torch.tensor(scores.raw[:]).diagonal(), expected, rtol=1e-4, atol=0, check_dtype=False
    )
    assert_unchanged(model, before)
    assert [each.requires_grad for each in model.parameters()] == frozen


def test_what_training_mode_drops_comes_back_where_the_first_forward_needs_too_much_memory():
    torch.manual_seed(0)
    model = nn.Module.train(Calibrated(torch.tensor(1.7)), False)
    batch = torch.randn(6, 4), torch.arange(6) % 3

    def of_few(model, batch):
        if len(batch[0]) > 3:
            raise MemoryError("a batch of so many")
        return loss_fn(model, batch)

    expected = gs.per_example_norms(model, batch, loss_fn).sqnorm
    checkpoints = gs.Checkpoints([model.state_dict()], lr=1.0)
    found = gs.self_influence(model, [batch], of_few, checkpoints, progress=False)
    torch.testing.assert_close(torch.tensor(found.self_influence).float(), expected)
    assert model.temperature == torch.tensor(1.7)


def test_a_graph_that_was_kept_and_freed_is_reported():
    model, batch = EvalCache().double().eval(), (torch.randn(6, 4).double(), torch.arange(6) % 3)
    loss_fn(model, batch).sum().backward()
    report = gs.verify(model, batch, loss_fn)
    assert not report.ok
    assert "backward through the graph a second time" in " ".join(str(report).split())
