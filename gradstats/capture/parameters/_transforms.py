"""The transforms of torch.func, and torch.vmap of data and of parameters.

Function modes do not see what enters and leaves a transform, and inside one tensors lack axes that
they have outside. From the first context on, every call of ``torch.vmap`` passes through here. One
that maps over the examples alone runs as usual. Any other calls its function on one slice after the
other, as vmap is defined, so that each operation is seen with its true shapes. Uses of parameters
inside other transforms are refused (but see ``_differentiated``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._functorch import apis

# Functions of this module are looked up at each call, since other libraries replace them for their
# own types of operands.
from torch._functorch import vmap as functorch
from torch.utils import _pytree as pytree

from gradstats.capture.following._examples import Examples
from gradstats.capture.following._marks import Marks
from gradstats.capture.operations._memory import unwrapped
from gradstats.capture.operations._modes import innermost_mode
from gradstats.capture.operations._names import function_name
from gradstats.capture.operations._nested import operands_of, tensors_in
from gradstats.capture.parameters._tensors import node_of
from gradstats.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from gradstats.capture._context import Context

AT_ONCE = apis.vmap_impl

# Returns the number of transforms around the running code; None outside of any.
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level


def wraps_results() -> bool:
    """Whether a transform other than torch.vmap runs.

    Even results of parameters alone are then wrapped by it, and of no use afterwards.
    """
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() != torch._C._functorch.TransformType.Vmap for level in stack)


class HiddenError(UnsupportedOperationError):
    """A transform hides which values belong to which example, and they depend on parameters."""


def check_hidden(tracker: Context, func, args, kwargs, result) -> None:
    """Refuse what a transform computes from trained data, whose axes are hidden there.

    Also note whether it uses data that are not its arguments.
    """
    tracker.maps_data = tracker.maps_data or any(
        unwrapped(item) is item and tracker.marks.is_data(item)
        for item in operands_of(args, kwargs)
    )
    if not any(unwrapped(item).requires_grad for item in tensors_in(result)):
        return
    for item in operands_of(args, kwargs):
        inner = unwrapped(item)
        if tracker.maps_examples and inner is not item:
            continue  # torch.vmap shows one example at a time
        if tracker.marks.is_trained(inner):
            raise hidden(f"{function_name(func)} inside a torch.func transform (grad, jacrev, …)")


def hidden(what: str) -> HiddenError:
    """Return the error about what a transform hides; a torch.vmap then runs slice by slice."""
    return HiddenError(
        f"{what} computes with values that depend on parameters, and hides which of them belong to "
        "which example. Expected plain autograd: write derivatives with "
        "torch.autograd.grad(..., create_graph=True) on the whole batch, detach the values, or "
        'have per_example_norms compute one example at a time with fallback="vmap".'
    )


@cache
def replace_vmap() -> None:
    """From now on, show contexts the calls of what torch.vmap has returned or will return."""
    apis.vmap_impl = vmapped  # type: ignore[assignment]


class Vmap(NamedTuple):
    """A call of a function that torch.vmap returned, with the options vmap was given."""

    function: Callable[..., Any]
    in_dims: Any
    out_dims: Any
    randomness: str
    chunk_size: int | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def at_once(self) -> Any:
        """Return the result of PyTorch's own vmap."""
        *told, args, kwargs = self
        return AT_ONCE(*told, *args, **kwargs)


def vmapped(function, in_dims, out_dims, randomness, chunk_size, *args, **kwargs):
    """Run a function that torch.vmap returned. Replaces PyTorch's ``vmap_impl``."""
    call = Vmap(function, in_dims, out_dims, randomness, chunk_size, args, kwargs)
    if torch.compiler.is_dynamo_compiling():
        return call.at_once()
    mode = innermost_mode()
    if mode is None:
        return call.at_once()
    if transform_level() is not None:
        whole = [item for item in operands_of(args, kwargs) if unwrapped(item) is item]
        if mode.tracker.maps_examples and any(map(mode.tracker.marks.is_trained, whole)):
            raise hidden("torch.vmap inside torch.vmap, of tensors not mapped by the outer one,")
        return call.at_once()
    # Between graphs the compiler would trace every call; there is nothing to trace here.
    run = _run if get_eval_frame_callback() is None else torch.compiler.disable(_run)
    return run(mode.tracker, call)


def _run(tracker: Context, call: Vmap):
    count, dims, operands, structure = functorch._process_batched_inputs(
        call.in_dims, call.args, call.function
    )
    mapped = list(zip(operands, dims, strict=True))
    slicewise, call = call.function, call._replace(function=_noted(tracker, call.function))
    layouts = _mapped_along(tracker.marks, mapped)
    if layouts is not None:
        tracker.maps_examples, tracker.maps_data = bool(layouts), False
        try:
            result = call.at_once()
        except HiddenError:
            pass  # the function uses tracked values that are not arguments
        else:
            data = bool(tracker.marks.data_among(operands))
            _place(tracker, data, layouts, result, call.out_dims)
            return result
        finally:
            tracker.maps_examples = None
    maps_others = any(dim is not None and not isinstance(item, Tensor) for item, dim in mapped)
    if call.randomness == "same" or count == 0:
        return call.at_once()
    if maps_others:
        try:
            return call.at_once()
        except HiddenError as error:
            raise HiddenError(
                "torch.vmap of containers other than tuples, lists and dicts, as a TensorDict is, "
                "hides which values belong to which example, and they depend on parameters. "
                "Expected a loop over their slices, in torchrl's losses deactivate_vmap=True. Or "
                'have per_example_norms compute one example at a time with fallback="vmap".'
            ) from error
    if tracker.settings.exact:
        raise UnsupportedOperationError(
            "torch.vmap over axes other than the examples', or of a function that uses parameters, "
            "runs slice by slice, which rounds differently, but with fused=False training "
            "gradients are PyTorch's own to the bit. Expected fused=True: pass that, or write the "
            "function for the whole batch."
        )
    parts = [[item] * count if dim is None else item.unbind(dim) for item, dim in mapped]
    before, tracker.slicewise = tracker.slicewise, True
    try:
        results = [
            slicewise(*pytree.tree_unflatten(list(slices), structure), **call.kwargs)
            for slices in zip(*parts, strict=True)
        ]
    finally:
        tracker.slicewise = before
    columns = zip(*map(pytree.tree_leaves, results), strict=True)
    joined = [
        column[0] if dim is None else torch.stack(column, dim)
        for column, dim in zip(columns, _dims_of(call.out_dims, results[0]), strict=True)
    ]
    return pytree.tree_unflatten(joined, pytree.tree_structure(results[0]))


def _noted(tracker: Context, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for vmap that refuses or notes data among its results that are not mapped.

    vmap repeats such results, whose examples lie along other axes than those of mapped ones.
    """

    @wraps(function)
    def noted(*args, **kwargs):
        result = function(*args, **kwargs)
        whole = [item for item in tensors_in(result) if unwrapped(item) is item]
        if any(node_of(item) is not None or tracker.marks.is_trained(item) for item in whole):
            raise hidden("a function under torch.vmap that returns a tensor that is not mapped")
        tracker.maps_data = tracker.maps_data or any(map(tracker.marks.is_data, whole))
        return result

    return noted


def _mapped_along(marks: Marks, mapped: list[tuple[Any, int | None]]) -> list[Examples] | None:
    """Return the layouts of the data among operands that are mapped over nothing but examples.

    Args:
        mapped: the operands, each with the axis along which it is mapped.

    Returns:
        The layouts. None if an operand is a parameter, or data that is mapped along another axis or
        not at all; empty if the data belong to no example, as masks do.
    """
    if any(node_of(item) is not None for item, _ in mapped):
        return None
    data = [(item, dim) for item, dim in mapped if marks.is_of_data(item)]
    layouts = [marks.layout_of(item) for item, _ in data]
    if not any(layouts) and not any(i.requires_grad or marks.is_marked(i) for i, _ in data):
        return []
    found: list[Examples] = []
    for layout, (_, dim) in zip(layouts, data, strict=True):
        if layout is None or not layout.plain or layout.axis != dim:
            return None
        found.append(layout)
    return found


def _place(tracker: Context, data: bool, layouts: list[Examples], result, out_dims) -> None:
    """Note where the examples lie in the results of a vmap.

    Results are constant if the function neither was given data nor used any.
    """
    leaves = pytree.tree_leaves(result)
    for leaf, dim in zip(leaves, _dims_of(out_dims, result), strict=True):
        if layouts and dim is not None:
            tracker.marks.place(leaf, layouts[0].along(dim % leaf.dim()))
        elif data and not layouts:
            tracker.marks.place(leaf, None)
        elif not (data or tracker.maps_data or leaf.requires_grad):
            tracker.marks.mark_constant(leaf)


def _dims_of(out_dims, result) -> list[int | None]:
    """Return the axis along which each result is mapped, reading ``out_dims`` as vmap does."""
    if isinstance(result, Tensor) and isinstance(out_dims, tuple) and len(out_dims) == 1:
        (out_dims,) = out_dims
    structure = pytree.tree_structure(result)
    dims = functorch._broadcast_to_and_flatten(out_dims, structure)
    if dims is None:
        raise ValueError(
            f"torch.vmap was given out_dims={out_dims}, expected an int, or one for each of the "
            f"results {structure}."
        )
    return dims
