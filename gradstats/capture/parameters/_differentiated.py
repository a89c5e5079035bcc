"""``grad``, ``vjp`` and ``jvp`` of torch.func, by plain autograd, so that operations are seen.

From the first context on, all calls of these pass through here, also those that ``jacrev``,
``jacfwd`` and ``hessian`` make. Inside a context, and outside of ``torch.vmap``, PyTorch's own
functions run with helpers that enter no transform, but differentiate by aliases of the arguments.

    grad, vjp    torch.autograd.grad of the outputs by the aliases
    jvp          the vjp of the vjp: that is linear in its cotangents, and its own vjp by these is
                 the derivative along tangents
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, wraps
from inspect import unwrap
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._functorch import eager_transforms as functorch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gradstats.capture.operations._graph import ACCUMULATE_GRAD, nodes_behind
from gradstats.capture.operations._modes import innermost_mode
from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._nested import operands_of, tensors_in
from gradstats.capture.operations._operations import variants
from gradstats.capture.parameters._refusals import HOOK_ELSEWHERE, refuse_on_derived
from gradstats.capture.parameters._tensors import node_of
from gradstats.capture.parameters._transforms import transform_level
from gradstats.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from gradstats.capture._context import Context

GRAD_AND_VALUE = functorch.grad_and_value_impl
VJP = functorch._vjp_with_argnums
JVP = functorch._jvp_with_argnums

# Operations that stop derivatives both forward and backward.
STOPS = frozenset({*variants("detach"), Tensor.data.__get__})  # type: ignore[attr-defined]

# Operations whose derivatives, or those of whose backward, differ forward and backward in PyTorch
# (2.13).
UNLIKE = frozenset(
    variants("cholesky_inverse", "cholesky_solve", "scatter_reduce", "scatter_reduce_")
)

# Operations through which PyTorch differentiates tangents wrongly: it takes what they save for
# constant.
WRONG_TWICE = frozenset(
    {
        *variants("layer_norm", "native_layer_norm", "instance_norm", "batch_norm"),
        *variants("native_batch_norm", "det", "logdet", "slogdet", "orgqr", "ormqr"),
        *(getattr(functional, f"{name}_norm") for name in ("layer", "instance", "batch")),
        *(getattr(torch.linalg, name) for name in ("det", "slogdet", "solve", "solve_ex")),
        torch.linalg.tensorsolve,
        torch.linalg.householder_product,
    }
)


@cache
def replace_derivatives() -> None:
    """From now on, run grad, vjp and jvp of torch.func by plain autograd inside contexts."""
    functorch.grad_and_value_impl = _inside(GRAD_AND_VALUE, grad_and_value)
    functorch._vjp_with_argnums = _inside(VJP, vjp)
    functorch._jvp_with_argnums = _inside(JVP, jvp)


def _inside(native: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """Return PyTorch's function, replaced inside contexts."""

    @wraps(native)
    def run(*args, **kwargs):
        if torch.compiler.is_dynamo_compiling():
            return native(*args, **kwargs)
        mode = innermost_mode()
        if mode is None or transform_level() is not None:
            return native(*args, **kwargs)
        # Between graphs the compiler would trace every call; there is nothing to trace here.
        chosen = instead if get_eval_frame_callback() is None else torch.compiler.disable(instead)
        return chosen(mode.tracker, *args, **kwargs)

    return run


class Level:
    """Stands for the level of a transform.

    Attributes:
        differentiable: whether the code outside may differentiate the results.
        aliases: those of the arguments by which the transform differentiates.
        leaves: ids of aliases that are leaves, since their arguments do not require grad. Results
            that depend on no other leaf do not require grad outside.
    """

    def __init__(self, tracker: Context) -> None:
        if torch.is_inference_mode_enabled():
            raise UnsupportedOperationError(
                "a transform of torch.func (grad, vjp, jvp, jacrev …) runs in the context under "
                "torch.inference_mode, where plain autograd, by which it is computed here, records "
                "nothing. Expected torch.no_grad() around it."
            )
        self.tracker = tracker
        self.differentiable = torch.is_grad_enabled()
        if tracker.along_tangents and not self.differentiable:
            raise differs("a transform of torch.func under torch.no_grad")
        self.aliases: list[Tensor] = []
        self.leaves: set[int] = set()

    def aliased(self, args: tuple[Any, ...], argnums: int | tuple[int, ...] | None):
        """Return the arguments, with aliases to differentiate by for the chosen ones, or all."""
        if argnums is None:
            return pytree.tree_map(self._alias, args)
        chosen = pytree.tree_map(self._alias, functorch._slice_argnums(args, argnums))
        places = functorch._validate_and_wrap_argnums(argnums, len(args))
        return functorch._replace_args(args, chosen, places)

    def _alias(self, item: Any) -> Tensor:
        if not isinstance(item, Tensor):
            raise ValueError(f"Thing passed to transform API must be Tensor, got {type(item)}")
        with torch.enable_grad():
            trained = item.requires_grad
            alias = item.view_as(item) if trained else item.detach().requires_grad_()
        self.aliases.append(alias)
        if not trained:
            self.leaves.add(id(alias))
        return alias

    def outside(self, results: Any) -> Any:
        """Return results as the code outside of the transform gets them."""
        return pytree.tree_map_only(Tensor, self._outside, results)

    def _outside(self, result: Tensor) -> Tensor:
        kept = not result.requires_grad or (self.differentiable and self._has_other_leaves(result))
        return result if kept else result.detach()

    def _has_other_leaves(self, result: Tensor) -> bool:
        if result.grad_fn is None:
            return id(result) not in self.leaves
        leaves: Any = (node for node in nodes_behind(result) if type(node) is ACCUMULATE_GRAD)
        return any(id(leaf.variable) not in self.leaves for leaf in leaves)

    def run(self, transform: Callable[..., Any], function: Callable[..., Any], *args, **kwargs):
        """Run one of PyTorch's transforms on aliases of the arguments."""

        def unchanging(*args, **kwargs):
            before = [alias._version for alias in self.aliases]
            transformed, self.tracker.transformed = self.tracker.transformed, True
            try:
                result = function(*args, **kwargs)
            finally:
                self.tracker.transformed = transformed
            if before != [alias._version for alias in self.aliases]:
                raise UnsupportedOperationError(
                    "a function under a torch.func transform (grad, vjp, jvp, jacrev …) changed "
                    "an argument in place. Expected a function that does not: clone the argument, "
                    "or write the change out of place."
                )
            return result

        native: Any = unwrap(transform)  # without its check for hooks on saved tensors
        helpers = {
            "grad_increment_nesting": lambda: nullcontext(self),
            "_wrap_all_tensors": lambda tensors, level: tensors,
            "_create_differentiable": lambda tensors, level: tensors,
            "_autograd_grad": self.gradients,
            "_undo_create_differentiable": lambda tensors, level: self.outside(tensors),
        }
        names = {**native.__globals__, **helpers}
        copy = FunctionType(native.__code__, names, native.__name__)
        copy.__kwdefaults__ = native.__kwdefaults__
        return copy(unchanging, *args, **kwargs)

    def gradients(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        grad_outputs: Sequence[Tensor | None] | None = None,
        retain_graph: bool = True,
        create_graph: bool = True,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of outputs by inputs, zeros by those that they do not depend on.

        The graph is kept in any case, since the values outside have the same one.
        """
        vectors = [None] * len(outputs) if grad_outputs is None else grad_outputs
        pairs = [pair for pair in zip(outputs, vectors, strict=True) if pair[0].requires_grad]
        if not pairs:
            return tuple(map(torch.zeros_like, inputs))
        found, start = zip(*pairs, strict=True)
        options = {"retain_graph": True, "create_graph": create_graph, "materialize_grads": True}
        return self.outside(torch.autograd.grad(found, inputs, start, **options))


def grad_and_value(tracker: Context, function, argnums, has_aux, args, kwargs) -> Any:
    """Run ``grad_and_value`` of torch.func, and ``grad`` with it."""
    level = Level(tracker)
    args = level.aliased(args, argnums)
    return level.run(GRAD_AND_VALUE, function, argnums, has_aux, args, kwargs)


def vjp(tracker: Context, function, *primals, argnums=None, has_aux=False) -> Any:
    """Run ``vjp`` of torch.func, and ``jacrev`` with it."""
    level = Level(tracker)
    primals = level.aliased(primals, argnums)
    return level.run(VJP, function, *primals, argnums=argnums, has_aux=has_aux)


def jvp(
    tracker: Context, function, primals, tangents, argnums=None, *, strict=False, has_aux=False
) -> Any:
    """Run ``jvp`` of torch.func, and ``jacfwd`` with it."""
    chosen = primals if argnums is None else functorch._slice_argnums(primals, argnums)
    along, structure = pytree.tree_flatten(tangents)
    alike = isinstance(primals, tuple) and pytree.tree_structure(chosen) == structure
    if strict or not alike:
        return JVP(function, primals, tangents, argnums, strict=strict, has_aux=has_aux)
    level = Level(tracker)
    primals = level.aliased(primals, argnums)
    with torch.enable_grad():
        watch = AlongTangents(tracker, function)
        outputs, pull, *rest = vjp(tracker, watch.run, *primals, argnums=argnums, has_aux=has_aux)
        values, structure = pytree.tree_flatten(outputs)
        cotangents = [torch.ones_like(each, requires_grad=True) for each in values]
        level.leaves.update(map(id, cotangents))
        pulled = pytree.tree_leaves(pull(pytree.tree_unflatten(cotangents, structure)))
        found = [watch.checked(each) for each in level.gradients(pulled, cotangents, along)]
        slopes = pytree.tree_unflatten(found, structure)
        return tuple(map(level.outside, (outputs, slopes, *rest)))


class AlongTangents(TorchFunctionMode):
    """Runs a function under jvp; refuses what has another derivative forward than backward."""

    def __init__(self, tracker: Context, function: Callable[..., Any]) -> None:
        super().__init__()
        self.tracker, self.function = tracker, function
        self.wrong_twice: Any = None

    def run(self, *args, **kwargs) -> Any:
        before, self.tracker.along_tangents = self.tracker.along_tangents, True
        try:
            with self:
                return self.function(*args, **kwargs)
        finally:
            self.tracker.along_tangents = before

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in UNLIKE:
            raise differs(function_name(func))
        if func in WRONG_TWICE:
            self.wrong_twice = func
        result = func(*args, **kwargs)
        # Without a graph gradients stop, but tangents pass.
        if func not in STOPS and (not torch.is_grad_enabled() or func is torch.autograd.grad):
            stops = any(i.is_floating_point() and not i.requires_grad for i in tensors_in(result))
            given = [item for item in operands_of(args, kwargs) if node_of(item) is None]
            if stops and any(item.requires_grad for item in given):
                raise differs(f"{function_name(func)} without a graph (torch.no_grad)")
        return result

    def checked(self, tangent: Tensor) -> Tensor:
        """Return a tangent, and refuse to pass on a gradient that PyTorch would compute wrongly."""
        if self.wrong_twice is not None and tangent.requires_grad:
            if node_of(tangent) is not None:
                self._refuse_derivatives()
            with torch._C.DisableTorchFunction():
                tangent.register_hook(self._refuse_derivatives)
        return tangent

    def _refuse_derivatives(self, *_) -> NoReturn:
        raise UnsupportedOperationError(
            "the gradient of the losses depends on tangents of torch.func.jvp (or jacfwd, hessian) "
            f"through {function_name(self.wrong_twice)}, which PyTorch differentiates wrongly. "
            "Expected detached tangents, or the operation written out: a layer norm as "
            "centred = x - x.mean(-1, keepdim=True) and what follows."
        )


def check_hook(tracker: Context, tensor: Tensor) -> None:
    """Refuse a hook on a derived tensor, or one that the losses' backward would run as well."""
    check_hooks(tracker)
    refuse_on_derived(Tensor.register_hook, tensor, HOOK_ELSEWHERE)


def check_hooks(tracker: Context) -> None:
    """Refuse a hook in a function that PyTorch would transform."""
    if tracker.transformed or tracker.slicewise:
        raise hook_in_transform()


def hook_in_transform() -> UnsupportedOperationError:
    """Return the error about a hook in a function that PyTorch would transform."""
    return UnsupportedOperationError(
        "a hook was set on a tensor, its autograd node (grad_fn) or a module inside a function "
        "under a torch.func transform (grad, vjp, jvp, jacrev …) or under torch.vmap. PyTorch runs "
        "it for the transform alone, or not at all, but here it would change the gradients of the "
        "losses too. Expected a function without hooks."
    )


def differs(what: str) -> UnsupportedOperationError:
    """Return the error about what has another derivative forward than backward."""
    return UnsupportedOperationError(
        f"{what} inside a function under torch.func.jvp (or jacfwd, hessian): tangents pass there "
        "otherwise than gradients do, by which the context computes them. Expected a function "
        "without it: write x.detach() for what has no derivative, or have per_example_norms "
        'compute one example at a time with fallback="vmap".'
    )
