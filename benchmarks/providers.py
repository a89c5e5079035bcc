"""Everything that computes per-example gradient norms, each in its best supported form.

A provider turns a workload into one call that does the whole step and returns the (B,) squared
norms. `checking` says which of these calls are right.

The other libraries: pip install --no-deps opacus backpack-for-pytorch torchjd, and what they need
beside torch: scipy opt-einsum einops unfoldNd. (With --no-deps, because BackPACK asks for
torchvision, which replaces a CPU build of PyTorch.)
"""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import gradstats as gs
from benchmarks.workloads import Workload

Call = Callable[[], Tensor | None]


@dataclass(frozen=True)
class Provider:
    """One way to get the norms.

    Attributes:
        label: as tables name it.
        make: workload → the call.
        package: the distribution that it needs beside PyTorch and gradstats.
        gradients: whether ``param.grad`` is left as a training step leaves it.
        held: elements of per-example gradients that it holds at once.
        form: how it runs where not eagerly: "compiled", "reduced" (compiled, with launches reduced
            to those of CUDA graphs), or "recorded", the whole step as one CUDA graph.
    """

    label: str
    make: Callable[[Workload], Call]
    package: str | None = None
    gradients: bool = False
    held: Callable[[Workload], int] = lambda work: 0
    form: str = ""

    @property
    def ours(self) -> bool:
        """Return whether it is gradstats."""
        return self.label.startswith("norms")

    @property
    def title(self) -> str:
        """Return the label, with the library's name where it is gradstats."""
        return f"gradstats, {self.label}" if self.ours else self.label

    @property
    def version(self) -> str:
        """Return the version of the package, "" without one."""
        if self.package is None:
            return ""
        try:
            return f"{self.package} {importlib.metadata.version(self.package)}"
        except importlib.metadata.PackageNotFoundError:
            return ""


def plain(work: Workload) -> Call:
    """Return a training step without norms."""

    def step() -> None:
        work.model.zero_grad()
        work.loss_fn(work.model, work.batch).mean().backward()

    return step


def norms(work: Workload, nonfinite: str = "raise") -> Call:
    """Return gradstats' norms, no weight gradients."""
    measure = partial(gs.per_example_norms, nonfinite=nonfinite, cu_seqlens=work.cu_seqlens)
    return lambda: measure(work.model, work.batch, work.loss_fn).sqnorm


def training(work: Workload) -> Call:
    """Return gradstats' norms beside a training step."""

    def step() -> Tensor:
        work.model.zero_grad()
        with gs.track(work.model, batch_size=work.examples, cu_seqlens=work.cu_seqlens) as tracker:
            tracker.backward(work.loss_fn(work.model, work.batch))
        return tracker.stats.sqnorm

    return step


def compiled(
    make: Callable[[Workload], Call], mode: str | None = None
) -> Callable[[Workload], Call]:
    """Return the same provider with the model compiled, in one of PyTorch's modes."""

    return lambda work: make(work.replace_model(torch.compile(work.model, mode=mode)))


def recorded(make: Callable[[Workload], Call]) -> Callable[[Workload], Call]:
    """Return the same provider with its step recorded in a CUDA graph, which is replayed."""

    def make_recorded(work: Workload) -> Call:
        step = make(work)
        # Kernels are compiled and chosen before, on a stream of their own as recording wants it.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()

        def replay() -> Tensor | None:
            graph.replay()
            return found

        return replay

    return make_recorded


def loop(work: Workload) -> Call:
    """Return one forward and backward for each example."""
    parameters = trainable(work.model)

    def step() -> Tensor:
        found = []
        for example in range(len(work.batch[0])):
            single = tuple(part[example : example + 1] for part in work.batch)
            loss = work.loss_fn(work.model, single).sum()
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            found.append(sum_of_squares(each for each in gradients if each is not None))
        return torch.stack(found)

    return step


def vmap(work: Workload, chunk_size: int | None = None) -> Call:
    """Return per-example gradients by ``torch.func``, squared inside the mapped function."""
    parameters = {
        name: parameter.detach()
        for name, parameter in work.model.named_parameters()
        if parameter.requires_grad
    }
    whole = Loss(work)

    def loss_of_one(parameters: dict[str, Tensor], single: tuple[Tensor, ...]) -> Tensor:
        named = {f"model.{name}": each for name, each in parameters.items()}
        batch = tuple(part[None] for part in single)
        return torch.func.functional_call(whole, named, (batch,)).sum()

    def square_of_one(single: tuple[Tensor, ...]) -> Tensor:
        return sum_of_squares(torch.func.grad(loss_of_one)(parameters, single).values())

    mapped = torch.func.vmap(square_of_one, chunk_size=chunk_size)
    return lambda: mapped(work.batch)


def chunk(batch_size: int) -> int:
    """Return how many examples vmap takes at once when it works in chunks."""
    return max(1, batch_size // 8)


class Loss(nn.Module):
    """A model with its loss: ``functional_call`` replaces parameters inside a module."""

    def __init__(self, work: Workload):
        super().__init__()
        self.model = work.model
        self.loss_fn = work.loss_fn

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        return self.loss_fn(self.model, batch)


def expanded_weights(work: Workload) -> Call:
    """Return PyTorch's ExpandedWeights."""
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    parameters = trainable(work.model)
    size = len(work.batch[0])

    def step() -> Tensor:
        clear(parameters, "grad_sample")
        model = call_for_per_sample_grads(work.model, batch_size=size, loss_reduction="sum")
        with work.precision():
            work.loss_fn(model, work.batch).sum().backward()
        found = sum(each.grad_sample.flatten(1).square().sum(1) for each in parameters)
        clear(parameters, "grad_sample")
        return found

    return step


def opacus(work: Workload, ghost: bool) -> Call:
    """Return Opacus' norms before clipping, of layers' norms (ghost) or of layers' gradients."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.validators import ModuleValidator

    # A copy in which recurrent layers are Opacus' own, with the same weights.
    model = ModuleValidator.fix(copy.deepcopy(work.model))
    model = GradSampleModuleFastGradientClipping(
        model, loss_reduction="mean", strict=False, use_ghost_clipping=ghost
    )
    parameters = trainable(model)

    def step() -> Tensor:
        model.zero_grad()
        work.loss_fn(model, work.batch).mean().backward()
        found = model.get_norm_sample().square()
        clear(parameters, "_norm_sample")
        return found

    return step


def backpack(work: Workload) -> Call:
    """Return BackPACK's ``BatchL2Grad``."""
    from backpack import backpack as extensions
    from backpack import extend
    from backpack.extensions import BatchL2Grad

    model = extend(copy.deepcopy(work.model))
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}

    def step() -> Tensor:
        model.zero_grad()
        with extensions(BatchL2Grad()), work.precision():
            losses = work.loss_fn(model, work.batch)
            losses.mean().backward()
        missing = [name for name, each in named.items() if not hasattr(each, "batch_l2")]
        if missing:
            raise NotImplementedError(f"no norms of {len(missing)} parameters, {missing[0]} first")
        found = sum(each.batch_l2 for each in named.values()) * len(losses) ** 2
        clear(named.values(), "batch_l2")
        return found

    return step


def torchjd(work: Workload) -> Call:
    """Return the diagonal of TorchJD's Gramian, its only way to norms."""
    from torchjd.autogram import Engine

    model = copy.deepcopy(work.model)
    engine = Engine(model, batch_dim=0)

    def step() -> Tensor:
        with work.precision():
            return engine.compute_gramian(work.loss_fn(model, work.batch)).diagonal()

    return step


def elements(work: Workload) -> int:
    """Return d, the number of parameters' elements."""
    return sum(parameter.numel() for parameter in trainable(work.model))


def whole_batch(work: Workload) -> int:
    """Return what those hold that form the gradients of all examples."""
    return len(work.batch[0]) * elements(work)


def one_module(work: Workload) -> int:
    """Return what those hold that form the gradients of one module, and square them."""
    return 2 * len(work.batch[0]) * max(each.numel() for each in trainable(work.model))


# The mode of torch.compile in which it makes CUDA graphs of what it compiles.
REDUCED = "reduce-overhead"

PROVIDERS = {
    "plain": Provider("plain", plain, gradients=True),
    "norms": Provider("norms", norms),
    "training": Provider("norms and gradients", training, gradients=True),
    "plain-compiled": Provider("plain, compiled", compiled(plain), gradients=True, form="compiled"),
    "norms-compiled": Provider("norms, compiled", compiled(norms), form="compiled"),
    "training-compiled": Provider(
        "norms and gradients, compiled", compiled(training), gradients=True, form="compiled"
    ),
    "plain-reduced": Provider(
        "plain, reduce-overhead", compiled(plain, REDUCED), gradients=True, form="reduced"
    ),
    "norms-reduced": Provider("norms, reduce-overhead", compiled(norms, REDUCED), form="reduced"),
    "training-reduced": Provider(
        "norms and gradients, reduce-overhead",
        compiled(training, REDUCED),
        gradients=True,
        form="reduced",
    ),
    "plain-recorded": Provider(
        "plain, CUDA graph", recorded(plain), gradients=True, form="recorded"
    ),
    # Nothing that is recorded can ask whether all norms are finite, and wait for the answer.
    "norms-recorded": Provider(
        "norms, CUDA graph", recorded(partial(norms, nonfinite="keep")), form="recorded"
    ),
    "training-recorded": Provider(
        "norms and gradients, CUDA graph", recorded(training), gradients=True, form="recorded"
    ),
    "loop": Provider("loop", loop, held=elements),
    "vmap": Provider("vmap(grad)", vmap, held=whole_batch),
    "vmap-chunks": Provider(
        "vmap(grad), chunks of B/8",
        lambda work: vmap(work, chunk(len(work.batch[0]))),
        held=lambda work: chunk(len(work.batch[0])) * elements(work),
    ),
    "expanded-weights": Provider("ExpandedWeights", expanded_weights, held=whole_batch),
    "opacus-ghost": Provider(
        "Opacus, ghost", lambda work: opacus(work, ghost=True), "opacus", gradients=True
    ),
    "opacus-fast": Provider(
        "Opacus, fast gradient clipping",
        lambda work: opacus(work, ghost=False),
        "opacus",
        gradients=True,
        held=one_module,
    ),
    "backpack": Provider("BackPACK BatchL2Grad", backpack, "backpack-for-pytorch", gradients=True),
    "torchjd": Provider("TorchJD Gramian", torchjd, "torchjd", held=one_module),
}
OURS = ("plain", "norms", "training")
COMPILED, REDUCED_LAUNCHES, RECORDED = (
    tuple(name for name, each in PROVIDERS.items() if each.form == form)
    for form in ("compiled", "reduced", "recorded")
)
PEERS = tuple(name for name, each in PROVIDERS.items() if not each.form and name not in OURS)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require grad."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def sum_of_squares(gradients: Iterable[Tensor]) -> Tensor:
    """Return the squared norm of gradients together, in float32 at least."""
    return torch.stack(
        [torch.linalg.vector_norm(each, dtype=wide(each.dtype)).square() for each in gradients]
    ).sum()


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which squares of another are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def clear(parameters: Iterable[nn.Parameter], attribute: str) -> None:
    """Take off what a library leaves on parameters, which a later step would find or add to."""
    for parameter in parameters:
        if hasattr(parameter, attribute):
            delattr(parameter, attribute)
