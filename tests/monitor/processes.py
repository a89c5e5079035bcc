"""What two processes do in ``test_distributed``: importable, so that they can be started anew."""

from __future__ import annotations

import copy
import os
import socket
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import gradstats as gs
from gradstats.capture._selection import data_parallel_in
from tests.monitor.expected import assert_metrics, gradient_rows, metrics_of
from tests.oracle import assert_unchanged, snapshot

RANKS, B, POSITIONS, VOCABULARY = 2, 4, 5, 7


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def process(rank: int, port: int, *bodies) -> None:
    """Run each ``body(rank)`` as one of the processes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for body in bodies:
        body(rank)
    # Whoever leaves first would break what the other is still receiving.
    dist.barrier()
    leave()


def leave() -> None:
    """End a process that has succeeded, without the end of its interpreter.

    Threads of gloo that then still let go of a tensor abort the process: pytorch/pytorch#179291.
    """
    dist.destroy_process_group()
    os._exit(0)


class Block(nn.Module):
    """A linear layer, a norm and a scale that is derived before it meets data."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.full((8,), 0.1))

    def forward(self, x):
        return x + self.norm(self.linear(x).tanh() * (1 + self.scale).exp())


class Network(nn.Module):
    """Embedding and head are tied across the blocks between them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


def losses_of(model, batch):
    logits = model(batch[0]).transpose(1, 2)
    return functional.cross_entropy(logits, batch[1], reduction="none").mean(1)


def whole_batch(generator, size: int = RANKS * B):
    shape = (size, POSITIONS)
    return tuple(torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))


def same_network(count: int):
    torch.manual_seed(0)
    model = Network().double()
    return [copy.deepcopy(model) for _ in range(count)]


def check_training(rank: int, wrap, micro_batches: int, fused: bool) -> None:
    """Train a wrapped model with and without the monitor, and alone on all the data."""
    alone, monitored, plain = same_network(3)
    monitored, plain = wrap(monitored), wrap(plain)
    models = (alone, monitored, plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    options = {"every": 2, "fused": fused, "layers": "blocks.*"}
    one = gs.Monitor(alone, optimizer=optimizers[0], **options)
    many = gs.Monitor(monitored, optimizer=optimizers[1], **options)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        batch = whole_batch(generator)
        ids = torch.randperm(100, generator=generator)[: RANKS * B]
        rows = gradient_rows(alone, batch, losses_of)
        size = B // micro_batches
        parts = [
            [slice(r * B + k * size, r * B + (k + 1) * size) for k in range(micro_batches)]
            for r in range(RANKS)
        ]
        with one.step(batch_size=RANKS * B, ids=ids):
            losses_of(alone, batch).mean().backward()
        for model, monitor in ((monitored, many), (plain, None)):
            untouched = snapshot(model) if isinstance(model, DistributedDataParallel) else None
            for k, part in enumerate(parts[rank]):
                mine = tuple(item[part] for item in batch)
                synchronise(model, k == micro_batches - 1)
                if monitor is None:
                    (losses_of(model, mine).mean() / micro_batches).backward()
                    continue
                with monitor.step(size, ids[part], accumulation=(k, micro_batches)) as context:
                    assert context.measured == (step % 2 == 0)
                    if untouched is not None and step % 2 and k == 0:
                        assert_unchanged(model, untouched)
                    (losses_of(model, mine).mean() / micro_batches).backward()
        expected, got = one.metrics(), many.metrics()
        assert bool(expected) == bool(got) == (step % 2 == 0)
        if got:
            check_metrics(got, expected, rows, parts)
            norms = {record.id: record.norm for record in many.examples(RANKS * B)}
            np.testing.assert_allclose(
                [norms[i] for i in ids.tolist()], np.linalg.norm(rows, axis=1), rtol=1e-9
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare(monitored, plain, 1e-6 if fused else 0)
    compare_tables(one.self_influence, many.self_influence)


def synchronise(model, last: bool) -> None:
    """Reduce gradients over processes with the last micro-batch only."""
    parallel = data_parallel_in(model)
    if parallel is not None:
        parallel.require_backward_grad_sync = last
    else:
        model.set_requires_gradient_sync(last)


def check_metrics(got, expected, rows, parts) -> None:
    assert got.keys() == expected.keys()
    within = ("align", "inner", "ortho")
    assert_metrics(
        got, {k: v for k, v in metrics_of(rows).items() if k.startswith(("gns", "grad"))}
    )
    for name, value in expected.items():
        if not name.startswith(within):
            np.testing.assert_allclose(
                got[name], value, rtol=1e-6 if name.endswith("_se") else 1e-9, atol=1e-7
            )
    batches = [metrics_of(rows[part]) for own in parts for part in own]
    for name in ("align/mean_cos_to_mean", "align/fraction_negative"):
        assert got[name] == pytest.approx(np.mean([batch[name] for batch in batches]))


def compare(first, second, rtol: float) -> None:
    """Compare what a checkpoint of each model would hold."""
    states = [model.state_dict() for model in (first, second)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        other = states[1][name]
        if isinstance(value, DTensor):
            value, other = value.to_local(), other.to_local()
        if rtol:
            torch.testing.assert_close(value, other, rtol=rtol, atol=1e-12)
        else:
            assert torch.equal(value, other), name


def compare_tables(first, second) -> None:
    assert first.ids.tolist() == second.ids.tolist() and len(first) > 8
    np.testing.assert_allclose(first.values, second.values, rtol=1e-9)
    np.testing.assert_array_equal(first.visits, second.visits)


def data_parallel(rank: int) -> None:
    for micro_batches, fused in ((1, True), (2, False)):
        check_training(rank, DistributedDataParallel, micro_batches, fused)
    check_training(rank, compiled, 2, True)
    check_uneven_batches(rank)
    check_a_mean_over_the_step(rank)
    check_a_step_that_is_skipped(rank)
    check_gradients_that_are_not_averaged(rank)
    check_a_part_of_a_model(rank)
    check_the_module_in_it(rank)
    check_norms_before_training_a_static_graph(rank)
    check_join_is_refused()


def check_a_part_of_a_model(rank: int) -> None:
    """That is parallel: its backward averages over the processes, as that of the whole would."""
    alone, model = same_network(2)
    whole = nn.Sequential(DistributedDataParallel(model))
    batch = whole_batch(torch.Generator().manual_seed(2))
    rows = gradient_rows(alone, batch, losses_of)
    mine = tuple(item[rank * B : rank * B + B] for item in batch)
    for alignment in (True, False):
        whole.zero_grad()
        monitor = gs.Monitor(whole, every=1, alignment=alignment)
        with monitor.step(B):
            losses_of(whole, mine).mean().backward()
        kept = {k: v for k, v in metrics_of(rows).items() if k.startswith(("gns", "grad"))}
        assert_metrics(monitor.metrics(), kept)
    group = dist.new_group(range(RANKS))
    other = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    refused = pytest.raises(gs.TrackingError, match=r"different process groups.*process_group=")
    with refused, gs.Monitor(nn.Sequential(whole, other), every=1).step(B):
        pass


def check_the_module_in_it(rank: int) -> None:
    """Of which a monitor sees no processes, but whose gradients the backward averages."""
    alone, model = same_network(2)
    wrapped = DistributedDataParallel(model)
    batch = whole_batch(torch.Generator().manual_seed(2))
    mine = tuple(item[rank * B : rank * B + B] for item in batch)
    before = snapshot(wrapped)
    for alignment in (True, False):
        monitor = gs.Monitor(model, every=1, alignment=alignment)
        refused = pytest.raises(gs.TrackingError, match=r"the module in it.*process_group=")
        with refused, monitor.step(B):
            losses_of(wrapped, mine)
        assert monitor.steps == 0
        assert_unchanged(wrapped, before)

    class Training(nn.Module):
        """Whose forward is a step of training, as Lightning's modules have one."""

        def __init__(self):
            super().__init__()
            self.network = same_network(1)[0]
            self.monitor = gs.Monitor(self, every=1)

        def forward(self, batch):
            with self.monitor.step(B):
                return losses_of(self.network, batch)

    with pytest.raises(gs.TrackingError, match="the module in it"):
        DistributedDataParallel(Training())(mine)
    rows = gradient_rows(alone, batch, losses_of)
    whole = gs.Monitor(model, every=1, process_group=dist.group.WORLD)
    with whole.step(B):
        losses_of(wrapped, mine).mean().backward()
    assert whole.metrics()["grad_norm"] == pytest.approx(np.linalg.norm(rows.mean(0)))
    by_itself = gs.Monitor(model, every=1)  # without the wrapper, nothing averages
    model.zero_grad()
    with by_itself.step(B):
        losses_of(model, mine).mean().backward()
    own = rows[rank * B : rank * B + B].mean(0)
    assert by_itself.metrics()["grad_norm"] == pytest.approx(np.linalg.norm(own))


def check_norms_before_training_a_static_graph(rank: int) -> None:
    """Its first backward in training is its first: with it begins the averaging of gradients."""
    batch = whole_batch(torch.Generator().manual_seed(2))
    mine = tuple(item[rank * B : rank * B + B] for item in batch)
    weights = []
    calls = (
        lambda model: None,
        lambda model: gs.per_example_norms(model, mine, losses_of, gram=True),
        lambda model: gs.per_example_norms(model, mine, losses_of, fallback="vmap"),
        lambda model: gs.inner_products(model, mine, model, mine, losses_of),
        lambda model: gs.verify(model, mine, losses_of),
    )
    # Lightning's Fabric puts the parallel model into another module.
    for call, inside in [*((call, False) for call in calls), (calls[1], True)]:
        torch.manual_seed(0)
        wrapped = DistributedDataParallel(same_network(2)[1], static_graph=True)
        if inside:
            wrapped = nn.Sequential(wrapped)
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
        call(wrapped)
        for _ in range(3):
            optimizer.zero_grad()
            losses_of(wrapped, mine).mean().backward()
            optimizer.step()
        weights.append(torch.cat([each.detach().flatten() for each in wrapped.parameters()]))
        torch.testing.assert_close(weights[-1], weights[0], rtol=0, atol=0)
    everywhere = [torch.empty_like(weights[0]) for _ in range(RANKS)]
    dist.all_gather(everywhere, weights[0])
    torch.testing.assert_close(everywhere[0], everywhere[1], rtol=0, atol=0)


def check_join_is_refused() -> None:
    """A process without data would leave the others waiting."""
    wrapped = DistributedDataParallel(same_network(2)[1])
    monitor = gs.Monitor(wrapped, every=1)
    refused = pytest.raises(gs.TrackingError, match=r"model\.join\(\)")
    with wrapped.join(), refused, monitor.step(B):
        pass


def compiled(model):
    """Return a model wrapped in the order that PyTorch recommends."""
    return torch.compile(DistributedDataParallel(model), backend="eager")


def check_uneven_batches(rank: int) -> None:
    """Processes with batches of different sizes: examples weigh as in the averaged gradient."""
    alone, wrapped = same_network(2)
    wrapped = DistributedDataParallel(wrapped)
    batch = whole_batch(torch.Generator().manual_seed(2), 6)
    rows = gradient_rows(alone, batch, losses_of)
    part = (slice(0, 2), slice(2, 6))[rank]
    monitor = gs.Monitor(wrapped, every=1)
    with monitor.step(batch_size=part.stop - part.start):
        losses_of(wrapped, tuple(item[part] for item in batch)).mean().backward()
    share = np.array([1 / 4] * 2 + [1 / 8] * 4)
    gram, products = rows @ rows.T, np.outer(share, share)
    apart = ~np.eye(6, dtype=bool)
    metrics = monitor.metrics()
    assert metrics["grad_norm"] == pytest.approx(np.linalg.norm(share @ rows))
    expected = (products * gram)[apart].sum() / products[apart].sum()
    assert metrics["gns/g2"] == pytest.approx(expected)


def check_a_mean_over_the_step(rank: int) -> None:
    """ "step_mean": scalars add up over micro-batches and average over processes."""
    alone, wrapped = same_network(2)
    wrapped = DistributedDataParallel(wrapped)
    size = 6
    batch = whole_batch(torch.Generator().manual_seed(2), size)
    rows = gradient_rows(alone, batch, losses_of)
    parts = ((slice(0, 1), slice(1, 2)), (slice(2, 5), slice(5, 6)))[rank]
    monitor = gs.Monitor(wrapped, every=1, loss_reduction="step_mean")
    for k, part in enumerate(parts):
        synchronise(wrapped, k == 1)
        with monitor.step(part.stop - part.start, accumulation=(k, 2)):
            losses = losses_of(wrapped, tuple(item[part] for item in batch))
            (losses.sum() * RANKS / size).backward()
    metrics, expected = monitor.metrics(), metrics_of(rows)
    kept = ("gns", "grad", "example", "m_coherence", "norm_test")
    assert_metrics(metrics, {k: v for k, v in expected.items() if k.startswith(kept)})
    assert metrics["batch_loss"] == pytest.approx(losses_of(alone, batch).mean().item())
    averaged = [parameter.grad.flatten() for parameter in wrapped.parameters()]
    np.testing.assert_allclose(torch.cat(averaged).norm().item(), metrics["grad_norm"], rtol=1e-9)


def check_a_step_that_is_skipped(rank: int) -> None:
    """By all processes, as loops do where one of them has a loss that is not finite; or by one."""
    alone, model = same_network(2)
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    batch = whole_batch(torch.Generator().manual_seed(2))
    rows = gradient_rows(alone, batch, losses_of)
    mine = tuple(item[rank * B : rank * B + B] for item in batch)
    everybody, first = range(RANKS), range(1)
    for own, skipping, count in (
        (wrapped, everybody, 1), (wrapped, everybody, 3), (model, first, 1), (model, first, 3),
    ):  # fmt: skip
        monitor = gs.Monitor(own, every=1, process_group=dist.group.WORLD)
        # Alone, nothing averages the gradients: they agree where the examples do.
        examples = mine if own is wrapped else batch
        size = len(examples[0])
        for step in range(3):
            own.zero_grad()
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                for k in range(count):
                    if own is wrapped:
                        synchronise(own, k == count - 1)
                    with monitor.step(size, accumulation=(k, count)) as context:
                        loss = losses_of(own, examples).mean() / count
                        if not (step == 1 and k == count // 2 and rank in skipping):
                            loss.backward()
                metrics = monitor.metrics()
            told = [str(each.message) for each in heard if each.category is gs.GradStatsWarning]
            assert bool(metrics) == (step != 1)
            assert context.measured == (step != 1 or rank not in skipping)
            assert len(told) == (step == 1) and all("not measured" in each for each in told)
        assert monitor.steps == 3 and monitor.history["step"] == [0, 2]
        assert metrics["grad_norm"] == pytest.approx(np.linalg.norm(rows.mean(0)))


def check_gradients_that_are_not_averaged(rank: int) -> None:
    """By loops that average them after the backward, or not at all; or of some parameters."""
    batch = whole_batch(torch.Generator().manual_seed(2))
    mine = tuple(item[rank * B : rank * B + B] for item in batch)
    plain, waiting, partly = same_network(3)
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(partly, ["blocks.1.scale"])
    waiting, partly = DistributedDataParallel(waiting), DistributedDataParallel(partly)
    synchronise(waiting, False)
    every = (
        "'embedding.weight', 'blocks.0.scale', 'blocks.0.linear.weight', 'blocks.0.linear.bias' "
        "and 7 more"
    )
    for model, named in ((plain, every), (waiting, every), (partly, "'blocks.1.scale'")):
        monitor = gs.Monitor(model, every=1, process_group=dist.group.WORLD)
        with monitor.step(B):
            losses_of(model, mine).mean().backward()
        with pytest.raises(gs.TrackingError, match=f"gradient of {named} was not the same on all"):
            monitor.metrics()
