"""Experts of a fixed capacity: rows of all examples in a tensor (experts, slots, width)."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradstats as gs
from tests.oracle import assert_sqnorms, check_model, check_products, oracle_sqnorms

EXPERTS, EXAMPLES, TOKENS, WIDTH = 3, 4, 3, 4
ALL = EXAMPLES * TOKENS


class Mixture(nn.Module):
    """A layer of experts between two others.

    Attributes:
        experts: called with the module, the tokens (n, width), the probabilities of the experts
            (n, experts), the chosen expert of each token and its place among its tokens, (n,) both;
            returns what is added to the tokens.
    """

    def __init__(self, experts):
        super().__init__()
        self.embed, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.first = nn.Parameter(0.5 * torch.randn(EXPERTS, WIDTH, 5))
        self.second = nn.Parameter(0.5 * torch.randn(EXPERTS, 5, WIDTH))
        self.shift, self.last = nn.Parameter(torch.randn(EXPERTS, 5)), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH))
            for _ in range(EXPERTS)
        )
        self.norm, self.experts = nn.LayerNorm(WIDTH), experts

    def forward(self, x):
        hidden = self.embed(x).reshape(-1, WIDTH)
        shares = self.gate(hidden).softmax(-1)
        chosen = shares.argmax(-1)
        one_hot = functional.one_hot(chosen, EXPERTS)
        place = ((one_hot.cumsum(0) - 1) * one_hot).sum(1)
        added = self.experts(self, hidden, shares, chosen, place)
        return self.last(hidden + added).view(x.shape)


def losses(model, x):
    return model(x).sin().square().flatten(1).sum(1)


def filled(hidden, chosen, place, slots=ALL):
    """The tokens at the slots of their experts, by an assignment."""
    slots = hidden.new_zeros(EXPERTS, slots, WIDTH)
    slots[chosen, place] = hidden
    return slots


def read(out, shares, chosen, place):
    """The tokens' own slots, multiplied by the shares of their experts."""
    return out[chosen, place] * shares.gather(1, chosen[:, None])


def both(m, slots):
    return (slots @ m.first).relu() @ m.second


def by(change):
    """Experts that change the slots of all tokens."""

    def experts(m, h, shares, chosen, place):
        return read(change(m, filled(h, chosen, place)), shares, chosen, place)

    return experts


def put(m, h, shares, chosen, place):
    slots = h.new_zeros(EXPERTS, ALL, WIDTH).index_put((chosen, place), h)
    return read(both(m, slots), shares, chosen, place)


def added_flat(m, h, shares, chosen, place):
    flat = h.new_zeros(EXPERTS * ALL, WIDTH).index_add(0, chosen * ALL + place, h)
    out = both(m, flat.view(EXPERTS, ALL, WIDTH)).reshape(-1, WIDTH)
    return out[chosen * ALL + place] * shares.gather(1, chosen[:, None])


def of_limited_capacity(m, h, shares, chosen, place):
    """Tokens beyond the second of each expert are dropped."""
    kept = place < 2
    slots = h.new_zeros(EXPERTS, 2, WIDTH)
    slots[chosen[kept], place[kept]] = h[kept]
    added = torch.zeros_like(h)
    added[kept] = read(both(m, slots), shares[kept], chosen[kept], place[kept])
    return added


def sorted_first(m, h, shares, chosen, place):
    """As many slots as the busiest expert needs, of the tokens sorted by expert."""
    order, counts = chosen.argsort(stable=True), torch.bincount(chosen, minlength=EXPERTS)
    most = int(counts.max())
    start = counts.cumsum(0) - counts
    slot = torch.arange(len(h)) - start[chosen[order]]
    flat = h.new_zeros(EXPERTS * most, WIDTH)
    flat[chosen[order] * most + slot] = h[order]
    slots = flat.view(EXPERTS, most, WIDTH)
    out = torch.bmm(torch.bmm(slots, m.first).relu(), m.second).view(-1, WIDTH)
    added = torch.zeros_like(h)
    added[order] = out[chosen[order] * most + slot]
    return added * shares.gather(1, chosen[:, None])


def masks(shares, chosen, place, slots):
    """Which token goes to which slot of which expert, (n, experts, slots), and with which share."""
    sent = functional.one_hot(chosen, EXPERTS)[..., None] * functional.one_hot(place, ALL)[:, None]
    sent = sent[..., :slots].to(shares)
    return sent, sent * shares.gather(1, chosen[:, None])[..., None]


def dispatched(slots):
    def experts(m, h, shares, chosen, place):
        sent, combined = masks(shares, chosen, place, slots)
        out = both(m, torch.einsum("tec,td->ecd", sent, h))
        return torch.einsum("tec,ecd->td", combined, out)

    return experts


def dispatched_flat(m, h, shares, chosen, place):
    sent, combined = masks(shares, chosen, place, ALL)
    slots = (sent.flatten(1).T @ h).view(EXPERTS, ALL, WIDTH)
    return combined.flatten(1) @ both(m, slots).view(-1, WIDTH)


def to_two(m, h, shares, chosen, place):
    """Each token goes to two experts."""
    kept, both_chosen = shares.topk(2)
    one_hot = functional.one_hot(both_chosen, EXPERTS)
    places = (one_hot.transpose(0, 1).reshape(-1, EXPERTS).cumsum(0) - 1).view(2, -1, EXPERTS)
    places = functional.one_hot((places.transpose(0, 1) * one_hot).sum(-1), 2 * ALL).to(h)
    sent = torch.einsum("tke,tkc->tec", one_hot.to(h), places)
    combined = torch.einsum("tk,tke,tkc->tec", kept, one_hot.to(h), places)
    out = both(m, torch.einsum("tec,td->ecd", sent, h))
    return torch.einsum("tec,ecd->td", combined, out)


def chosen_by_experts(m, h, shares, chosen, place):
    """Each expert takes the four tokens that it has the largest share of."""
    kept, tokens = shares.T.topk(4, dim=1)
    out = both(m, h[tokens]) * kept[..., None]
    return torch.zeros_like(h).index_add(0, tokens.flatten(), out.flatten(0, 1))


def slots_first(m, h, shares, chosen, place):
    slots = h.new_zeros(ALL, EXPERTS, WIDTH)
    slots[place, chosen] = h
    out = torch.einsum("ced,edf->cef", slots, m.first).relu()
    out = torch.einsum("cef,efd->ced", out, m.second)
    return out[place, chosen] * shares.gather(1, chosen[:, None])


SERVED = {
    "assigned": by(both),
    "put": put,
    "added to flat slots": added_flat,
    "limited capacity": of_limited_capacity,
    "sorted first": sorted_first,
    "dispatched by an equation": dispatched(ALL),
    "dispatched, limited capacity": dispatched(2),
    "dispatched as matrices": dispatched_flat,
    "sent to two": to_two,
    "chosen by experts": chosen_by_experts,
    "slots first": slots_first,
    "layers in a list": by(
        lambda m, slots: torch.stack([layer(slots[k]) for k, layer in enumerate(m.layers)])
    ),
    "layers of chunks": by(
        lambda m, slots: torch.cat(
            [layer(own) for layer, own in zip(m.layers, slots.chunk(EXPERTS), strict=True)]
        )
    ),
    "with shifts": by(lambda m, s: (s @ m.first + m.shift[:, None]).tanh() @ m.second),
    "with added shifts": by(
        lambda m, s: torch.baddbmm(m.shift[:, None], s, m.first).relu() @ m.second
    ),
    "gated": by(lambda m, s: ((s @ m.first).sigmoid() * (s @ m.first.flip(1))) @ m.second),
    "layers that all share": by(lambda m, s: m.last(m.norm(s)) * m.last.bias + s),
    "normalised without parameters": by(
        lambda m, s: both(m, functional.layer_norm(s, (WIDTH,)).softmax(-1))
    ),
    "derived weights": by(lambda m, s: both(m, s @ (m.last.weight / m.last.weight.norm()))),
}


def made(experts):
    torch.manual_seed(0)
    return Mixture(experts).double(), torch.randn(EXAMPLES, TOKENS, WIDTH).double()


@pytest.mark.parametrize("name", SERVED)
def test_experts_of_a_fixed_capacity(name):
    model, x = made(SERVED[name])
    check_model(model, x, losses)
    check_products(model, x, losses)


def test_experts_of_packed_examples():
    model, x = made(by(both))
    bounds = torch.tensor([0, 2, 5, 9])
    rows = x.flatten(0, 1)[:9]

    def packed(model, rows):
        return torch.stack([own.sin().square().sum() for own in model(rows).split([2, 3, 4])])

    expected = oracle_sqnorms(model, rows, packed)
    got = gs.per_example_norms(model, rows, packed, cu_seqlens=bounds)
    assert_sqnorms(got, expected, 1e-9)


def test_a_loss_over_all_examples_is_refused():
    """Slots that no token was sent to meet shifts: a single loss does not tell whose they are."""
    model, x = made(SERVED["with shifts"])
    with pytest.raises(gs.GradStatsError), gs.track(model, batch_size=EXAMPLES):
        losses(model, x).mean().backward()


def two_in_a_slot(m, h, shares, chosen, place):
    place = place // 2
    slots = h.new_zeros(EXPERTS, ALL, WIDTH).index_put((chosen, place), h, accumulate=True)
    return read(both(m, slots), shares, chosen, place)


def read_from(where):
    """Slots are read that ``where`` makes of the tokens' own."""

    def experts(m, h, shares, chosen, place):
        slots = filled(h, chosen, place)
        out = (slots @ m.first + m.shift[:, None]).relu() @ m.second
        return out[where(chosen, place)] * shares.gather(1, chosen[:, None])

    return experts


def trained_dispatch(m, h, shares, chosen, place):
    _, combined = masks(shares, chosen, place, ALL)
    return torch.einsum("tec,ecd->td", combined, both(m, torch.einsum("tec,td->ecd", combined, h)))


def leaking(sends, combines):
    """A small part of a token goes to another's slot, or comes from there."""

    def experts(m, h, shares, chosen, place):
        sent, combined = masks(shares, chosen, place, ALL)
        sent = sent + 1e-3 * sends * sent.roll(TOKENS, 0)
        combined = combined + 1e-3 * combines * combined.roll(TOKENS, 0)
        out = both(m, torch.einsum("tec,td->ecd", sent, h))
        return torch.einsum("tec,ecd->td", combined, out)

    return experts


def beside_the_tokens(m, h, shares, chosen, place):
    slots = filled(h, chosen, place)
    return read(both(m, slots + h[None]), shares, chosen, place)


def mean_of_all(m, h, shares, chosen, place):
    out = both(m, filled(h, chosen, place))
    return read(out, shares, chosen, place) + out.mean()


REFUSED = {
    "two in a slot": two_in_a_slot,
    "softmax over slots": by(lambda m, s: both(m, s.softmax(1))),
    "softmax over experts": by(lambda m, s: both(m, s.softmax(0))),
    "centred": by(lambda m, s: both(m, s - s.mean(1, keepdim=True))),
    "running sums": by(lambda m, s: both(m, s.cumsum(1))),
    "shifted before": by(lambda m, s: both(m, s + s.roll(1, 1))),
    "shifted after": by(lambda m, s: both(m, s).roll(1, 1)),
    "other experts'": by(lambda m, s: both(m, s + s.flip(0))),
    "attention": by(lambda m, s: both(m, (s @ s.mT).softmax(-1) @ s)),
    "pooled": by(lambda m, s: functional.avg_pool1d(both(m, s).mT, 3, 1, 1).mT),
    "another's slots": read_from(lambda chosen, place: (chosen.flip(0), place.flip(0))),
    "empty slots": read_from(lambda chosen, place: (chosen, ALL - 1 - place)),
    "trained dispatch": trained_dispatch,
    "a dispatch that leaks": leaking(1, 0),
    "a combination that leaks": leaking(0, 1),
    "beside the tokens": beside_the_tokens,
    "the mean of all": mean_of_all,
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_slots_in_which_examples_meet_are_refused(name, fused):
    model, x = made(SERVED["assigned"])
    gs.per_example_norms(model, x, losses)
    model.experts = REFUSED[name]
    with pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)):
        gs.per_example_norms(model, x, losses)
    with (
        pytest.raises((gs.ExampleAxisError, gs.CoupledExamplesError)),
        gs.track(model, batch_size=EXAMPLES, fused=fused) as tracker,
    ):
        tracker.backward(losses(model, x))


def penalised(model, x):
    """Losses with the gradient of the network's output for its input."""
    x = x.clone().requires_grad_()
    found = losses(model, x)
    (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    return found + slope.square().flatten(1).sum(1)


def straight_through(m, h, shares, chosen, place, *, flat=False):
    """Trained shares that are zero, whose derivatives read the slots of others."""
    one_hot = functional.one_hot(chosen, EXPERTS).to(h)
    through, places = one_hot + shares - shares.detach(), functional.one_hot(place, ALL).to(h)
    sent, combined = (torch.einsum("te,tc->tec", each, places) for each in (one_hot, through))
    out = both(m, torch.einsum("tec,td->ecd", sent, h))
    if flat:
        return combined.flatten(1) @ out.flatten(0, 1)
    return torch.einsum("tec,ecd->td", combined, out)


@pytest.mark.parametrize("flat", [False, True])
def test_derivatives_of_losses_of_slots(flat):
    model, x = made(SERVED["assigned"])
    assert_sqnorms(
        gs.per_example_norms(model, x, penalised), oracle_sqnorms(model, x, penalised), 1e-9
    )
    model.experts = partial(straight_through, flat=flat)
    check_model(model, x, losses)
    with pytest.raises(gs.CoupledExamplesError, match="part of a derivative"):
        gs.per_example_norms(model, x, penalised)


def test_one_example_has_all_slots():
    """Whatever happens among them."""
    torch.manual_seed(0)
    x = torch.randn(1, ALL, WIDTH).double()
    for experts in (SERVED["assigned"], REFUSED["attention"], REFUSED["empty slots"]):
        check_model(Mixture(experts).double(), x, losses)


def test_inputs_in_two_axes_and_back():
    torch.manual_seed(0)
    model, x = nn.Linear(2, 2).double(), torch.randn(3, 4, 2).double()

    def each(model, x):
        turned = x.transpose(0, 1).reshape(6, 2, 2)
        return model(turned.reshape(4, 3, 2)).sin().sum((0, 2))

    check_model(model, x, each)
