"""Derived tensors: what is computed from parameters alone, and how to compute it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gradstats._comparison import same_bits
from gradstats._compiler import is_compiling
from gradstats._complex import as_real
from gradstats.capture.operations._formats import NORMALISATIONS
from gradstats.capture.operations._names import function_class_of, function_name
from gradstats.capture.operations._nested import flatten, rebuild
from gradstats.capture.operations._operations import (
    ADDS,
    CASTS,
    JOINS,
    RESHAPES,
    TRANSPOSES,
    variants,
)
from gradstats.capture.parameters._drawn import Draw
from gradstats.capture.parameters._nodes import Node, Root, same_storage, unique_roots
from gradstats.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from gradstats.capture._context import Context

# Operations of quantisation-aware training. Autograd saves which elements were in range, but not
# the scales, which observers overwrite at every use of the weight.
QUANTISES = variants(
    "fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine",
    "fused_moving_avg_obs_fake_quant",
)  # fmt: skip

# Operations that may change operands other than the first, such as running statistics.
UPDATES = NORMALISATIONS | {torch.fused_moving_avg_obs_fake_quant}

# The backward of a matrix exponential computes the exponential of a matrix with twice as many rows
# and columns, which takes this many elements for each element of the result.
EXPONENTIALS = {*variants("matrix_exp"), torch.linalg.matrix_exp}
ELEMENTS_OF_EXPONENTIAL = 8

# Operations that only add, move or cast: their derivative is constant, or their result shows every
# change of an operand. The derivative of any other may change while its result stays the same, as
# of a square whose operand changes its sign, or of a multiple of zeros.
SHOWS_CHANGES = ADDS | CASTS | JOINS.keys() | TRANSPOSES | RESHAPES


class Derived(Node):
    """A tensor computed from parameters and constants only, and how it was computed.

    Attributes:
        function, args, kwargs: the operation, with nodes in place of tracked operands.
        operands: these nodes, each once.
        parents: the operands that this result depends on, repeated if they were given repeatedly;
            of a derivative, the parameters.
        index: which of the operation's outputs this is; None for a single output.
        shown: returns the tensor that the user's code has for this; None once it is gone.
        aliased: whether a tensor that is not tracked shares its memory.
        version: version counter of the shown tensor if that has memory of its own: if the counter
            has moved on, the tensor was changed unseen.
        widest: elements of the largest tensor that a backward from here to the roots holds.
        has_function: whether it was computed with the help of a custom autograd Function.
        depth: length of the longest chain of operations from a parameter to this.
    """

    def __init__(
        self,
        tracker: Context,
        value: Tensor,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        index: int | None,
    ):
        self.tracker = tracker
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.index = index
        self.shown: Callable[[], Tensor | None] = lambda: None
        self.aliased = False
        self.version: int | None = None
        self._products: tuple[Any, Any] | None = None
        self._checked = False
        leaves = flatten((args, kwargs))
        self._constants = [item for item in leaves if isinstance(item, Tensor)]
        self._versions = _versions_of(self._constants)
        operands = [node for node in leaves if isinstance(node, Node)]
        self.operands = tuple(dict.fromkeys(operands))
        self._parameter_versions = self._versions_of_parameters()
        # A derivative depends on what its operands were computed from.
        differentiates = function is torch.autograd.grad
        # An operand may give only a dtype or a shape, or matter only to another result.
        self.parents = tuple(reached(value, unique_roots(operands) if differentiates else operands))
        self.paths = {}
        for node in self.parents:
            for root, count in node.paths.items():
                self.paths[root] = self.paths.get(root, 0) + count
        self.roots = tuple(self.paths)
        self.widest = value.numel() * (ELEMENTS_OF_EXPONENTIAL if function in EXPONENTIALS else 1)
        self.has_function = function_class_of(function) is not None
        self.depth = 1
        for node in operands if differentiates else self.parents:
            if isinstance(node, Derived):
                self.widest = max(self.widest, node.widest)
                self.has_function = self.has_function or node.has_function
                self.depth = max(self.depth, 1 + node.depth)
        self._value = value
        device = value.device.type
        enabled = torch.is_autocast_enabled(device)
        self._autocast = device, torch.get_autocast_dtype(device) if enabled else None

    @property
    def value(self) -> Tensor:
        shown = None if self.version is None else self.shown()
        if shown is not None and shown._version != self.version:
            raise UnsupportedOperationError(
                f"{self.describe()} was changed in place under torch.no_grad(), or through a "
                "tensor that shares its memory, so its per-example gradients are not known. "
                "Expected a tensor that is left as it was computed: write the change out of place.",
                self.names,
            )
        return self._value

    def once(self, factor: Any, compute: Callable[[], Any]) -> Any:
        """Return ``compute()``, computed once from a factor of this for all operands."""
        if self._products is None or self._products[0] is not factor:
            self._products = factor, compute()
        return self._products[1]

    def forget(self) -> None:
        """Forget what ``once`` computed, when all operands have it."""
        self._products = None

    def take_numbers(self, numbers: Tensor) -> None:
        """Take other values with the same gradient, as ``tensor.data = numbers`` gives them.

        Pulling gradients back by computing this again is refused from then on.
        """
        self._value.data = numbers.detach()

    def is_alone(self) -> bool:
        """Whether no other tensor that is still in use shares its memory."""
        if self.aliased or any(same_storage(root.value, self._value) for root in self.roots):
            return False
        visible = self.tracker.visible
        for gone in [node for node in visible if not node.aliased and node.shown() is None]:
            del visible[gone]  # so that later changes do not visit it again
        return not any(
            node is not self and same_storage(node.value, self._value) for node in visible
        )

    def describe(self) -> str:
        name, roots = function_name(self.function), list(self.roots)
        first = ", ".join(root.describe() for root in roots[:4])
        rest = f" and {len(roots) - 4} more" if len(roots) > 4 else ""
        return f"a tensor derived by {name} from {first}{rest}"

    def replay(self, known: dict[Any, Tensor], copies: bool = False) -> Tensor:
        """Compute this tensor again from the given values of some of the nodes it depends on.

        Args:
            known: node → value. Values computed on the way are added: each node is computed once,
                however many paths lead to it, and operands that were one tensor are one again,
                which attention and recurrent layers ask for.
            copies: copy all other tensors, so that they may change later.
        """
        # A loop, since thousands of steps may lie between a parameter and this.
        waiting: list[Node] = [self]
        while waiting:
            node = waiting.pop()
            if node in known:
                continue
            operands = node.operands if isinstance(node, Derived) else ()
            missing = [item for item in operands if item not in known]
            if missing:
                waiting += [node, *reversed(missing)]
            elif isinstance(node, Derived):
                known[node] = node._again(known, copies)
            else:
                value = node.value.detach()
                # It requires grad as in the forward: PyTorch chooses the kernel of a product by
                # that, and so its rounding.
                known[node] = (value.clone() if copies else value).requires_grad_()
        return known[self]

    def _again(self, known: dict[Any, Tensor], copies: bool) -> Tensor:
        """Run the operation again on known values of its operands."""
        updates = self.function in UPDATES or function_class_of(self.function) is not None

        def resolve(item):
            if isinstance(item, Node):
                return known[item]
            if not isinstance(item, Tensor):
                return item
            if updates:
                return item.clone()
            if not copies:
                return item
            if id(item) not in known:
                known[id(item)] = item.clone()
            return known[id(item)]

        args, kwargs = rebuild(self.args, resolve), rebuild(self.kwargs, resolve)
        device, dtype = self._autocast
        with torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False):
            result = self.function(*args, **kwargs)
        if self.index is None:
            return result
        if function_class_of(self.function) is None:
            return result[self.index]
        chosen = result[self.index]
        others = [item for item in result if isinstance(item, Tensor) and item is not chosen]
        return OneOfSeveral.apply(chosen, *others)

    def replay_from(
        self, roots: Sequence[Root], copies: bool = False
    ) -> tuple[list[Tensor], Tensor]:
        """Return new leaves with the roots' values, and this tensor computed from them.

        Complex tensors are returned as pairs of real numbers, along a last axis of size 2.
        """
        leaves, known = [], {}
        with torch.enable_grad():
            for root in roots:
                parameter = root.parameter.detach()
                value = as_real(parameter)
                leaf = (value.clone() if copies else value).requires_grad_()
                leaves.append(leaf)
                known[root] = torch.view_as_complex(leaf) if parameter.is_complex() else leaf
            again = self.replay(known, copies)
            seen = as_real(again)
        self.check_same(again)
        for node in self.behind():
            node._check_operands()
        return leaves, seen

    def check_step(self) -> None:
        """Raise unless this tensor's operands still give its values.

        Checked once for all uses: hooks that update a parameter during the backward run after it
        has passed all of these.
        """
        if not self._checked:
            self.step()

    def slope(self, operand: Node) -> Tensor:
        """Return the derivative with respect to each element of an operand.

        Each must enter one element of this alone, as with elementwise functions and reductions.
        """
        again, known = self.step()
        value, ones = known[operand], torch.ones_like(again)
        (slope,) = torch.autograd.grad(again, value, ones, allow_unused=True)
        # The sign of a determinant, for one, has no derivative.
        return torch.zeros_like(value) if slope is None else slope

    def step(self) -> tuple[Tensor, dict[Any, Tensor]]:
        """Return this tensor computed again from its operands, and their values."""
        with torch.enable_grad():
            known = {parent: parent.value.detach().requires_grad_() for parent in self.parents}
            again = self.replay(known)
        self.check_same(again)
        self._check_operands()
        self._checked = True
        return again, known

    def _versions_of_parameters(self) -> list[int]:
        return [node.parameter._version for node in self.operands if isinstance(node, Root)]

    def _check_operands(self) -> None:
        """Raise if an operand has been written into since, as autograd would.

        Where every change shows in the result, comparing values is enough.
        """
        # With alpha=, which may be a tensor, additions multiply too.
        if self.function in SHOWS_CHANGES and "alpha" not in self.kwargs:
            return
        if self._is_written() or self._parameter_versions != self._versions_of_parameters():
            raise self._differs()

    def _is_written(self) -> bool:
        """Whether a constant operand has been written into since."""
        return self._versions != _versions_of(self._constants)

    def check_constants(self) -> None:
        """Raise if a constant operand has been written into since, as autograd would.

        It compares version counters: comparing values would wait for the GPU.
        """
        if self._is_written():
            raise self._differs()

    def _check_fixed(self) -> None:
        """Raise unless the operation surely gives the same again: a graph compares no values."""
        custom = function_class_of(self.function) is not None
        random = isinstance(self.function, Draw)
        if custom or random or self.function in UPDATES or self._is_written():
            raise UnsupportedOperationError(
                f"{self.describe()} cannot be computed again in a compiled graph, which compares "
                "no values: it is the result of a random operation, an autograd Function or a "
                "normalisation, or an operand was changed in place. Expected none of these.",
                self.names,
            )

    def behind(self) -> dict[Derived, None]:
        """Return this tensor and all derived ones that it was computed from."""
        found: dict[Derived, None] = {}
        waiting: list[Node] = [self]
        while waiting:
            node = waiting.pop()
            if isinstance(node, Derived) and node not in found:
                found[node] = None
                waiting += node.parents
        return found

    def check_same(self, again: Tensor) -> None:
        """Raise unless this tensor, computed again, has the same values."""
        if is_compiling():
            for node in self.behind():
                node._check_fixed()
            return
        if not same_bits(again.detach(), self._value.detach()):
            raise self._differs()

    def _differs(self) -> UnsupportedOperationError:
        return UnsupportedOperationError(
            f"{self.describe()} cannot be computed again with the same result, so per-example "
            "gradients cannot be pulled back through it: the operation is random, or an input was "
            "changed in place or through .data. Expected inputs that stay as they are: pass a copy "
            "of what changes (int(counter), buffer.clone()), write x + (numbers - x).detach() "
            "instead of x.data = numbers, or leave the parameter out with exclude=."
        )


class OneOfSeveral(torch.autograd.Function):
    """One of a custom Function's results, which gives the others gradients of zeros.

    Without it they would have None, and the Function's backward might take another branch than in
    the backward of the batch.
    """

    @staticmethod
    def forward(ctx, chosen, *others):
        ctx.others = [other.detach() for other in others]
        return chosen.view_as(chosen)

    @staticmethod
    def backward(ctx, grad):
        return grad, *map(torch.zeros_like, ctx.others)


def _versions_of(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if item.is_inference() else item._version for item in tensors]


def reached(value: Tensor, parents: Sequence[Node]) -> list[Node]:
    """Return the operands that one of an operation's results depends on."""

    def edge_of(tensor: Tensor) -> tuple[Any, int]:
        node: Any = tensor.grad_fn
        return (get_gradient_edge(tensor).node if node is None else node), tensor.output_nr

    edges = [edge_of(parent.value) for parent in parents]
    ends, visited, pending = {*edges}, set(), [edge_of(value)]
    while pending:
        edge = pending.pop()
        if edge not in visited and edge[0] is not None:
            visited.add(edge)
            pending += [] if edge in ends else edge[0].next_functions
    return [parent for parent, edge in zip(parents, edges, strict=True) if edge in visited]
