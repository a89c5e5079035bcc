"""One tracking context: entering and leaving it, what it knows, and what it collects."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from gradstats._factors import Factor
from gradstats.capture._constants import ConstantTracking
from gradstats.capture._consumers import Arrival
from gradstats.capture._dispatch import dispatch
from gradstats.capture._layout import MOVES, RESHAPES, Examples, follow
from gradstats.capture._lineage import Pulled, pulled_sqnorm
from gradstats.capture._nodes import COUNT, VALUE, Root
from gradstats.capture._tensors import TrackedParameter
from gradstats.capture._uses import Settings
from gradstats.capture.rules import RULES
from gradstats.contractions import Contraction, Fused, sqnorm
from gradstats.errors import CoverageError, TrackingError, UnsupportedOperationError

DEFAULT_WORKSPACE = 256 * 1024 * 1024

# Prefixes that wrappers (DistributedDataParallel, torch.compile) put before parameter names.
WRAPPER_PREFIXES = ("module.", "_orig_mod.")

ACCUMULATE_GRAD = type(
    torch.autograd.graph.get_gradient_edge(torch.zeros(1, requires_grad=True)).node
)


class Tracker:
    """Follows the uses of a model's parameters for the duration of one batch."""

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int,
        batch_dim: int,
        settings: Settings,
        parameters: Sequence[str] | str | None,
        exclude: Sequence[str] | str,
    ):
        self.batch_size = batch_size
        self.batch_dim = batch_dim
        self.settings = settings
        self._contract = Examples(batch_size, batch_dim)
        # Set once any tensor has a layout of its own, so that most models pay nothing for it.
        self.follows_layouts = False
        self.closed = False
        self._backward_ran = False
        self._mode = ConstantTracking(self)
        self._eagerly = ExitStack()
        named = select_parameters(model, parameters, exclude)
        self.roots = [
            Root(self, name, parameter, _probe(batch_size, parameter.device))
            for name, parameter in named.items()
        ]
        device = self.roots[0].probe.device
        # What uses report beside their numbers: that they reported, or that their root will.
        self.once = torch.ones(batch_size, dtype=torch.float64, device=device)
        self.nothing = torch.zeros((), dtype=torch.float64, device=device).expand(3, batch_size)
        tracked = {id(parameter) for parameter in named.values()}
        # What a module keeps belongs to no example: buffers, parameters that are not tracked, and
        # tensors in plain attributes.
        attributes = [item for module in model.modules() for item in vars(module).values()]
        self._constant_ids = {
            id(tensor)
            for tensor in [*model.parameters(), *model.buffers(), *attributes]
            if isinstance(tensor, Tensor) and id(tensor) not in tracked
        }
        self._classes: list[tuple[nn.Parameter, type]] = []

    def open(self) -> None:
        """Give the parameters their tracked class and start following constants."""
        for root in self.roots:
            check_trackable(root)
        for root in self.roots:
            self._classes.append((root.parameter, type(root.parameter)))
            root.parameter.__class__ = TrackedParameter
            root.parameter._gradstats = root  # type: ignore[attr-defined]
        # A compiled graph has no place for a consumer. Without the compiler nothing is compiled.
        if self.settings.consumer is not None and "torch._dynamo" in sys.modules:
            self._eagerly.enter_context(torch.compiler.set_stance("force_eager"))
        self._mode.__enter__()

    def close(self) -> None:
        """Give the parameters back as they were; nothing of the context is left on them."""
        self._mode.__exit__(None, None, None)
        self._eagerly.close()
        for parameter, original in self._classes:
            del parameter._gradstats  # type: ignore[attr-defined]
            parameter.__class__ = original
        self._classes.clear()
        for root in self.roots:
            root.release()
        self.closed = True

    def dispatch(self, func, args: tuple[Any, ...], kwargs: dict[str, Any]):
        """Run one operation on a tensor that this context tracks."""
        return dispatch(self, RULES, func, args, kwargs)

    def is_data(self, tensor: Tensor) -> bool:
        """Whether a plain tensor may carry examples: it is not known to be constant."""
        if torch.compiler.is_compiling():
            return True
        if id(tensor) in self._constant_ids:
            return False
        return getattr(tensor, "_gradstats_constant", None) is not self

    def has_example_axis(self, tensor: Tensor) -> bool:
        """Whether a tensor's example axis has the size of the batch."""
        return tensor.dim() > self.batch_dim and tensor.shape[self.batch_dim] == self.batch_size

    def mark_constant(self, tensor: Tensor) -> None:
        """Remember that a tensor was computed without data."""
        if id(tensor) in self._constant_ids:
            return
        tensor._gradstats_constant = self  # type: ignore[attr-defined]

    def mark_data(self, tensor: Tensor) -> None:
        """Remember that data were written into a tensor."""
        if getattr(tensor, "_gradstats_constant", None) is self:
            del tensor._gradstats_constant  # type: ignore[attr-defined]
        self._constant_ids.discard(id(tensor))

    def layout_of(self, tensor: Tensor) -> Examples | None:
        """Return where the examples of a tensor of data lie, None where that is not known."""
        if not torch.compiler.is_compiling():
            owner, layout = getattr(tensor, "_gradstats_layout", (None, None))
            if owner is self:
                return layout
        return self._contract if self.has_example_axis(tensor) else None

    def follow_layout(self, func, args: tuple[Any, ...], source: Tensor, result: Tensor) -> None:
        """Note where the examples lie in the result of an operation on data."""
        marked = getattr(source, "_gradstats_layout", (None, None))[0] is self
        if not marked and func not in MOVES and func not in RESHAPES:
            return
        layout = self.layout_of(source)
        if layout is None and not marked:
            return
        after = follow(func, args, source, layout, result)
        if after is None and layout is not None and self.has_example_axis(result):
            # Where nothing else has the batch's size, shape can decide after all.
            if sum(size == self.batch_size for size in source.shape) == 1:
                return
        if after != self._contract or not self.has_example_axis(result):
            result._gradstats_layout = (self, after)  # type: ignore[attr-defined]
            self.follows_layouts = True

    @property
    def reported(self) -> bool:
        """Whether a backward has reached any tracked parameter."""
        return any(root.probe.grad is not None for root in self.roots)

    def backward_without_gradients(self, total: Tensor) -> None:
        """Run a backward that computes the reports and nothing else: no weight gradient."""
        total.backward(inputs=[root.probe for root in self.roots])

    def contract(self, root: Root, delivered: Sequence[Factor | Fused]) -> Contraction:
        """Return the squared norms of the sum of one root's factors, and pass the factors on."""
        consumer, fused = self.settings.consumer, delivered[0]
        factors = [item.factor if isinstance(item, Fused) else item for item in delivered]
        total = None
        if isinstance(fused, Fused) and len(delivered) == 1:
            norms, total = fused.norms, fused.total
        elif consumer is None or consumer.needs_norms:
            norms = self._sqnorm(factors)
        else:
            norms = Contraction(self.nothing[0], self.nothing[0])
        if consumer is not None:
            consumer.take(Arrival(root.name, factors, norms.value, total, self.settings.workspace))
        return norms

    def _sqnorm(self, factors: list[Factor]) -> Contraction:
        workspace = self.settings.workspace
        if len(factors) == 1 and isinstance(factors[0], Pulled):
            return pulled_sqnorm(factors[0], workspace)
        return sqnorm(factors, workspace)

    def before_backward(self, losses: Sequence[Tensor]) -> None:
        """Check, before a backward changes anything, that it can be accounted for."""
        if self._backward_ran:
            raise TrackingError(
                "a second backward was started in one tracking context. One context serves one "
                "batch and one backward; to accumulate gradients, open one context for each "
                "micro-batch."
            )
        self.check_coverage([loss.grad_fn for loss in losses if loss.grad_fn is not None])
        self._backward_ran = True

    def check_coverage(self, start: list) -> None:
        """Raise if the graph from ``start`` uses a tracked parameter in a way that was not seen.

        Operations that PyTorch does not report (a custom autograd Function that takes a parameter)
        show in the autograd graph as an edge to the parameter that does not come from its alias.
        """
        roots = {id(root.parameter): root for root in self.roots}
        # Tracked uses lead to an alias or a carrier; there the walk can stop.
        known = {root.alias_node for root in self.roots} | {root.hub_node for root in self.roots}
        stack = list(start)
        seen = set(start)
        while stack:
            node = stack.pop()
            for child, _ in node.next_functions:
                if child is None or child in known or child in seen:
                    continue
                if type(child) is not ACCUMULATE_GRAD:
                    seen.add(child)
                    stack.append(child)
                    continue
                root = roots.get(id(child.variable))  # type: ignore[attr-defined]
                # A compiled graph takes the parameter itself: inside it every use is tracked.
                if root is not None and node.name() != "CompiledFunctionBackward":
                    raise UnsupportedOperationError(
                        f"{node.name()} uses {root.describe()} without passing through a PyTorch "
                        "operation that can be tracked (a custom autograd Function?), so its "
                        "per-example gradient is not known. Exclude the parameter by name with "
                        f"exclude=[{root.name!r}], or write the operation with PyTorch's own."
                    )

    @property
    def sqnorm(self) -> Tensor:
        """The squared norms over all parameters that the backward reported, (B,) float64."""
        return self.reports()[:, VALUE].sum(0)

    def reports(self) -> Tensor:
        """Return what the backward reported, (parameters, 3, B) float64; zeros for unused ones."""
        if not self.reported:
            raise TrackingError(
                "no backward reached the tracked parameters. Run tracker.backward(losses), or your "
                "own loss.backward(), inside the context, on losses computed inside it."
            )
        device = self.roots[0].probe.device
        unused = torch.zeros(3, self.batch_size, dtype=torch.float64, device=device)
        grads = [root.probe.grad for root in self.roots]
        reports = torch.stack([unused if grad is None else grad.to(device) for grad in grads])
        if bool((reports[:, COUNT] > 1).any()):
            counts = reports[:, COUNT].amax(1).tolist()
            names = [r.name for r, n in zip(self.roots, counts, strict=True) if n > 1]
            raise CoverageError(
                f"{', '.join(map(repr, names))} contributed more than once to a compiled graph: a "
                "shared parameter's uses must meet before their norm is taken, which a compiled "
                "graph cannot do. Run this step without torch.compile."
            )
        return reports


def _probe(batch_size: int, device: torch.device) -> Tensor:
    return torch.zeros(3, batch_size, dtype=torch.float64, device=device, requires_grad=True)


def select_parameters(
    model: nn.Module, parameters: Sequence[str] | str | None, exclude: Sequence[str] | str
) -> dict[str, nn.Parameter]:
    """Return the parameters to track by name, in the model's order, each under its first name."""
    trainable = {
        clean_name(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    if not trainable:
        raise CoverageError(
            "the model has no parameter that requires grad, so there is no gradient to measure. "
            "Set requires_grad on the parameters whose gradients you want."
        )
    include = _patterns(parameters) if parameters is not None else ("*",)
    leave_out = _patterns(exclude)
    for pattern in (*include, *leave_out):
        if not any(fnmatchcase(name, pattern) for name in trainable):
            raise CoverageError(
                f"the pattern {pattern!r} matches no parameter that requires grad. Expected a "
                f"pattern of one of {list(trainable)[:8]}{' …' if len(trainable) > 8 else ''}."
            )
    selected = {
        name: parameter
        for name, parameter in trainable.items()
        if _matches(name, include) and not _matches(name, leave_out)
    }
    if not selected:
        raise CoverageError(
            f"parameters={parameters!r} and exclude={exclude!r} leave no parameter to measure."
        )
    return selected


def clean_name(name: str) -> str:
    """Return a parameter's name as the unwrapped model knows it."""
    for prefix in WRAPPER_PREFIXES:
        if name.startswith(prefix):
            return clean_name(name[len(prefix) :])
    return name.replace("._orig_mod.", ".")


def check_trackable(root: Root) -> None:
    """Raise for parameters whose class cannot be changed for the duration of a context."""
    parameter = root.parameter
    if type(parameter) is TrackedParameter:
        raise TrackingError(
            f"{root.describe()} is already tracked by another open context. Close that one first."
        )
    if type(parameter) is not nn.Parameter:
        raise UnsupportedOperationError(
            f"{root.describe()} is a {type(parameter).__name__}, expected a plain "
            "torch.nn.Parameter: a subclass may compute with hidden values. If it is a lazy "
            f"parameter, run one forward first; otherwise exclude it by name with "
            f"exclude=[{root.name!r}]."
        )
    if not parameter.is_floating_point():
        raise UnsupportedOperationError(
            f"{root.describe()} has dtype {parameter.dtype}, expected a real floating-point dtype. "
            f"Exclude it by name with exclude=[{root.name!r}]."
        )


def _patterns(patterns: Sequence[str] | str) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
