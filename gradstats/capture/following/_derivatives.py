"""backward and torch.autograd.grad inside a context.

Each public function here replaces one of PyTorch's. Its first argument is the context's mode, which
is off while the function runs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradstats.capture.following._results import follow_results
from gradstats.capture.operations._engine import run_backward
from gradstats.capture.operations._memory import unwrapped
from gradstats.capture.operations._modes import ContextMode
from gradstats.capture.parameters._derived import derive
from gradstats.capture.parameters._nodes import Root, unique_roots
from gradstats.capture.parameters._tensors import node_of, nodes_of, value_of
from gradstats.capture.parameters._transforms import hidden, transform_level
from gradstats.errors import CoupledExamplesError, UnsupportedOperationError

if TYPE_CHECKING:
    from gradstats.capture._context import Context
    from gradstats.capture._tracker import Tracker


def backward_of_one(
    mode: ContextMode, loss, gradient=None, retain_graph=None, create_graph=False, inputs=None
) -> None:
    """Run ``loss.backward()``."""
    backward(mode, loss, gradient, retain_graph, create_graph, None, inputs)


def backward(
    mode: ContextMode,
    tensors,
    grad_tensors=None,
    retain_graph=None,
    create_graph=False,
    grad_variables=None,
    inputs=None,
) -> None:
    """Run ``torch.autograd.backward`` of losses, as the backward of the context."""
    tensors = _as_tuple(tensors)
    given = grad_tensors if grad_tensors is not None else grad_variables
    start = _as_tuple(given) if given is not None else (None,) * len(tensors)
    start = torch.autograd._make_grads(tensors, start, is_grads_batched=False)
    if inputs is not None:
        inputs = _as_tuple(inputs)
    tracker = cast("Tracker", mode.tracker)  # a graph's own context runs no backward
    reporting = tracker.before_backward(tensors, start, create_graph, inputs)
    chosen = () if inputs is None else (*inputs, *tracker.targets(reporting))
    # Checkpoints run parts of the forward again in the backward, and need the mode on. But with the
    # mode on, every public way into the engine would lead back here.
    with mode:
        run_backward(tensors, start, retain_graph, chosen, in_threads=tracker.spans_devices)
    tracker.after_backward()


def gradients(
    mode: ContextMode,
    outputs,
    inputs,
    grad_outputs=None,
    retain_graph=None,
    create_graph=False,
    only_inputs=True,
    allow_unused=None,
    is_grads_batched=False,
    materialize_grads=False,
) -> tuple[Tensor | None, ...]:
    """Run ``torch.autograd.grad`` inside the context, also for tracked inputs."""
    tracker = mode.tracker
    outputs, inputs = (_checked(items) for items in (outputs, inputs))
    if transform_level() is not None and any(
        unwrapped(item) is item and tracker.marks.is_data(item) for item in (*outputs, *inputs)
    ):
        raise hidden("torch.autograd.grad of what the surrounding torch.vmap does not map")
    vectors = () if grad_outputs is None else _as_tuple(grad_outputs)
    if _is_of_no_example(tracker, outputs, inputs, vectors, create_graph):
        options = {
            "create_graph": True, "allow_unused": allow_unused,
            "is_grads_batched": is_grads_batched, "materialize_grads": materialize_grads,
        }  # fmt: skip
        return _derived_gradients(tracker, (outputs, inputs, vectors or None), options)
    _check_inputs(tracker, inputs, create_graph)
    find: Any = partial(
        torch.autograd.grad,
        [value_of(item) for item in outputs],
        [_differentiable(item) for item in inputs],
        create_graph=create_graph,
        only_inputs=only_inputs,
        allow_unused=allow_unused or materialize_grads,
    )
    if is_grads_batched and _are_stacks(vectors):
        found = _along_each(find, vectors, create_graph if retain_graph is None else retain_graph)
    else:
        options = {"retain_graph": retain_graph, "is_grads_batched": is_grads_batched}
        found = find(grad_outputs=grad_outputs, **options)
    followed = transform_level() is None
    if followed:
        told = {"grad_outputs": grad_outputs, "is_grads_batched": is_grads_batched}
        follow_results(tracker, torch.autograd.grad, (outputs, inputs), told, (*found,))
    if materialize_grads:
        found = [
            _zeros_like(tracker, item, create_graph, followed) if each is None else each
            for each, item in zip(found, inputs, strict=True)
        ]
    return (*found,)


def _derived_gradients(
    tracker: Context, args: tuple, options: dict[str, Any]
) -> tuple[Tensor | None, ...]:
    """Return derivatives of tensors that belong to no example, which belong to none either."""
    found = derive(tracker, torch.autograd.grad, args, options)
    for item in found:
        if item is not None and node_of(item) is None:
            tracker.marks.mark_constant(item)
    return found


def _zeros_like(tracker: Context, item, requires_grad: bool, followed: bool) -> Tensor:
    """Return the gradient by an input that the outputs do not depend on."""
    zeros = torch.zeros_like(value_of(item), requires_grad=requires_grad)
    if followed:
        follow_results(tracker, torch.zeros_like, (item,), {}, zeros)
    return zeros


def refuse_forward_mode(mode: ContextMode, *args, **kwargs) -> None:
    """Raise for dual numbers: the graph does not show what their tangents depend on."""
    if transform_level() is not None:
        return  # made by torch.func.jvp, which is refused where it meets a parameter
    raise UnsupportedOperationError(
        "torch.autograd.forward_ad (also torch.func.linearize) inside the context makes dual "
        "numbers, and how their tangents depend on the parameters is not known. Expected "
        "torch.func.jvp(function, (x,), (tangent,)), or torch.autograd.grad(..., "
        "create_graph=True). With forward_ad, but not with linearize, per_example_norms with "
        'fallback="vmap" works too: it computes one example at a time.'
    )


def _is_of_no_example(
    tracker: Context, outputs: tuple, inputs: tuple, vectors: tuple, create_graph: bool
) -> bool:
    """Whether derivatives are of and by tensors that hold no data; raise for mixtures."""

    def is_data(item) -> bool:
        return node_of(item) is None and tracker.marks.is_data(item)

    without_data = [item for item in inputs if not is_data(item)]
    derived = nodes_of(outputs)
    if not without_data or not (derived or tracker.derived_from_leaves):
        return False
    given = [item for item in vectors if isinstance(item, Tensor)]
    names = [root.name for root in unique_roots(derived)]
    if len(derived) == len(outputs) and not any(map(is_data, (*inputs, *given))):
        return create_graph  # without a graph, derivatives are numbers like any others
    if all(node_of(item) is not None for item in without_data) and not derived:
        return False  # gradients of the losses with respect to parameters
    raise UnsupportedOperationError(
        "torch.autograd.grad inside the context differentiates with respect to a tensor that "
        "belongs to no example (made by zeros, linspace …), but its outputs were computed from "
        "this tensor and data. Expected a tensor that belongs to the examples: pass it in the "
        "batch, or make it from the batch, as torch.zeros_like does.",
        names,
    )


def _are_stacks(vectors: tuple) -> bool:
    """Whether all outputs got the same number of vectors; if not, PyTorch raises."""
    if not all(isinstance(vector, Tensor) and vector.dim() for vector in vectors):
        return False
    counts = {len(vector) for vector in vectors}
    return len(counts) == 1 and counts != {0}


def _along_each(find, stacks: tuple[Tensor, ...], retain_graph: bool) -> list[Tensor | None]:
    """Return gradients along each of several vectors, stacked as ``is_grads_batched=True`` does.

    PyTorch maps the engine over the vectors. Under that map, the gradients' graph would not show
    the uses of parameters in the backward, so here the engine runs once for each vector.

    Args:
        find: ``torch.autograd.grad``, given all but the vectors and ``retain_graph``.
        stacks: for each output, its vectors along the first axis.
        retain_graph: whether to keep the graph after the last vector.
    """
    count = len(stacks[0])
    each = [
        find(grad_outputs=vectors, retain_graph=retain_graph or number < count)
        for number, vectors in enumerate(zip(*stacks, strict=True), start=1)
    ]
    columns = zip(*each, strict=True)
    return [None if column[0] is None else torch.stack(column) for column in columns]


def _check_inputs(tracker: Context, inputs: tuple, create_graph: bool) -> None:
    """Refuse gradients of tracked parameters that become part of the loss, or of its gradient."""
    in_backward = torch._C._current_graph_task_id() != -1
    for item in inputs:
        node = node_of(item)
        if node is None:
            continue
        if in_backward:  # such as that of an autograd Function that runs its layers again
            raise UnsupportedOperationError(
                f"torch.autograd.grad inside a backward asks for the gradient of "
                f"{node.describe()}, which sums over the examples: what is added to .grad by hand "
                "is not measured. Expected torch.autograd.backward there, which is followed and "
                f"adds to .grad by itself, or exclude={node.names!r}.",
                node.names,
            )
        if create_graph or not tracker.settings.weight_gradients:
            as_numbers = " If it only sets the weights of losses, use gs.track, which computes it."
            raise CoupledExamplesError(
                f"torch.autograd.grad inside the context asks for the gradient of "
                f"{node.describe()}, which sums over the examples: a loss that contains it has "
                f"no per-example gradient.{'' if create_graph else as_numbers} If each example "
                "adapts its own copy of a matrix w (MAML), write the copy as w + delta and "
                "differentiate by delta, which for x (B, d) is torch.zeros_like(x[:, :1, None])"
                ".expand(-1, *w.shape).clone().requires_grad_(); or have per_example_norms compute "
                'one example at a time with fallback="vmap". Otherwise compute the gradient '
                f"outside the context, or exclude the parameter: exclude={node.names!r}.",
                node.names,
            )


def _differentiable(item):
    """Return what stands for an input of ``torch.autograd.grad`` in the graph."""
    if not isinstance(node_of(item), Root):
        return value_of(item)
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(item)


def _as_tuple(tensors) -> tuple:
    return (tensors,) if isinstance(tensors, (Tensor, GradientEdge)) else tuple(tensors)


def _checked(tensors) -> tuple:
    """Return outputs or inputs of ``torch.autograd.grad``; raise for those that are no tensors."""
    items = _as_tuple(tensors)
    if any(isinstance(item, GradientEdge) for item in items):
        raise UnsupportedOperationError(
            "torch.autograd.grad inside the context was given a GradientEdge, which does not show "
            "where the examples lie. Expected tensors: pass the tensor that the edge is of."
        )
    return items
