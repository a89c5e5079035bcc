"""Every operation of PyTorch on trained data: followed, or lost, and never silently wrong.

Each function that can be overridden is called in all the ways below that it accepts. If it is known
afterwards where the examples lie in its result, each row must depend on its own example alone.
"""

from functools import wraps

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import get_overridable_functions

import gradstats as gs
from gradstats.capture.following._examples import Examples
from gradstats.capture.following._signatures import BY_PLACE, names_of

BATCH = 4  # of every axis, so that no size explains anything

# Functions that do nothing to a tensor's numbers, or not to tensors of this machine.
LEFT_OUT = {
    "__get__", "__set__", "__delete__", "backward", "register_hook", "__reduce_ex__", "__repr__",
    "__deepcopy__", "__setstate__", "__dlpack__", "share_memory_", "__format__", "retain_grad",
    "requires_grad_", "set_", "__array__", "save", "load", "grad", "seed", "manual_seed", "vmap",
    "from_file", "pin_memory", "cuda", "xpu", "to", "record_stream", "__array_wrap__",
}  # fmt: skip
# It hands its work to an autograd Function, which nobody sees.
LEFT_OUT |= {"lobpcg"}
ELSEWHERE = ("cuda", "mkldnn", "miopen", "fbgemm", "cudnn", "quantize", "xpu")

# PyTorch does not list its functions that change an operand in place, other than methods.
IN_PLACE = [
    getattr(owner, name)
    for owner in (torch, nn.functional)
    for name in dir(owner)
    if name.endswith("_") and not name.startswith("_")
]

FUNCTIONS = list(
    dict.fromkeys(
        function
        for functions in (*get_overridable_functions().values(), IN_PLACE)
        for function in functions
        if function.__name__ not in LEFT_OUT
        and not any(part in function.__name__ for part in ELSEWHERE)
    )
)

LAYOUTS = {
    "in order": lambda h: h * 1.0,
    "positions first": lambda h: h.transpose(0, 1),
    "in another order": lambda h: h[[2, 0, 3, 1]],
}


# Of one, two and three axes.
CONSTANTS = [torch.linspace(0, 40, BATCH**axes).sin().abs().double().view((BATCH,) * axes) + 0.1
             for axes in (1, 2, 3)]  # fmt: skip


def calls(dims: int):
    """Yield ways to call a function on hidden values h, all of whose sizes are the batch's."""
    c = CONSTANTS[dims - 1]
    places = torch.tensor([1, 0, 3, 2])
    masked = torch.zeros(BATCH, BATCH, dtype=torch.bool)
    masked[0, :2] = masked[2, 1] = masked[3, 0] = True
    yield lambda f, h: f(h)
    yield lambda f, h: f(h, h)
    yield lambda f, h: f([h, c.clone()])
    yield lambda f, h: f(list(h.unbind()))
    yield lambda f, h: f(h, masked)
    yield lambda f, h: f(h, masked, c)
    yield lambda f, h: f(c.clone(), masked, h)
    yield lambda f, h: f(h, places)
    yield lambda f, h: f(places, h)
    yield lambda f, h: f(h, (places,), h)
    yield lambda f, h: f(h, 0.5)
    yield lambda f, h: f(h, 3, 1, 1)
    for size in ((0, 1), (1, 0), (BATCH,), (BATCH, BATCH)):
        yield lambda f, h, size=size: f(h, size)
    for axis in (0, 1, -1):
        yield lambda f, h, axis=axis: f(h, axis)
        yield lambda f, h, axis=axis: f(h, dim=axis)
        yield lambda f, h, axis=axis: f(h, 2, axis)
        yield lambda f, h, axis=axis: f(h, axis, 2)
        yield lambda f, h, axis=axis: f(h, axis, 2, 1)
        yield lambda f, h, axis=axis: f(h, axis, places)
        yield lambda f, h, axis=axis: f(h, axis, places, h)
        yield lambda f, h, axis=axis: f(c.clone(), axis, places, h)
        yield lambda f, h, axis=axis: f(h, c, axis)
        yield lambda f, h, axis=axis: f([h, h], axis)
    for other in CONSTANTS:
        yield lambda f, h, other=other: f(other.clone(), h)
        yield lambda f, h, other=other: f(h, other)
        yield lambda f, h, other=other: f(h, other, h)
        yield lambda f, h, other=other: f(h, h, other)
        yield lambda f, h, other=other: f(other.clone(), h, h)
        yield lambda f, h, other=other: f(other.clone(), other.clone(), h)
        yield lambda f, h, other=other: f(other.clone(), h, other.clone())


def tensors_of(result) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [t for item in result for t in tensors_of(item)] if type(result) in (list, tuple) else []


def returned(function, call, h: Tensor) -> list[Tensor]:
    name = function.__name__
    if (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set")):
        h = h * 1.0
    result = call(function, h)
    return [h] if name == "__setitem__" else tensors_of(result)[:2]


def is_refused(tracker, out: Tensor, h: Tensor) -> bool:
    """Whether examples are known to have met in the graph between hidden values and a result."""
    pending, seen = [out.grad_fn], {h.grad_fn, None}
    while pending:
        node = pending.pop()
        if node in tracker.marks.meetings.coupled:
            return True
        if node not in seen:
            seen.add(node)
            pending += [before for before, _ in node.next_functions]
    return False


def owners(out: Tensor, h: Tensor, axis: int, along: int) -> list[set[int]]:
    """Return on which examples of h each row of a result depends, along their axes."""
    found = []
    size = out.numel() // out.shape[along]
    weight = torch.linspace(1, 2, size, dtype=out.dtype).view(out.select(along, 0).shape)
    for row in range(out.shape[along]):
        weights = torch.zeros_like(out)
        weights.select(along, row).copy_(weight)
        (gradient,) = torch.autograd.grad(out, h, weights, retain_graph=True)
        rows = gradient.movedim(axis, 0).flatten(1)
        found.append(set((rows.abs() > 1e-12 * rows.abs().max()).any(1).nonzero()[:, 0].tolist()))
    return found


# Calls that a function's signature does not allow.
NO_CALLS: set[tuple] = set()
# Calls on data in order, of so many axes, that fail or return what an earlier call has returned.
NOTHING_NEW: set[tuple] = set()


def problems(tracker, model, x: Tensor, function, layout: str):
    """Yield what is wrong with what is known of the results of all calls that a function takes."""
    seen: set[tuple] = set()
    dims = x.dim()
    h = None
    for number, call in enumerate(calls(dims)):
        if (function, number) in NO_CALLS or (function, number, dims) in NOTHING_NEW:
            continue
        if h is None or h._version:
            h = LAYOUTS[layout](torch.sigmoid(model(x)) + 0.1)
        try:
            results = returned(function, call, h)
        except TypeError:
            NO_CALLS.add((function, number))
            continue
        except BaseException:
            results = []  # not a way to call it
        before = len(seen)
        with torch._C.DisableTorchFunction():
            yield from wrong(tracker, results, h, layout, seen, f"{function.__name__}, {number}")
        if layout == "in order" and len(seen) == before:
            NOTHING_NEW.add((function, number, dims))


def wrong(tracker, results, h: Tensor, layout: str, seen: set, name: str):
    axis = int(layout == "positions first")
    order = [2, 0, 3, 1] if layout == "in another order" else list(range(BATCH))
    for out in results:
        if out.layout is not torch.strided or not out.requires_grad or not out.numel():
            continue
        value = (tuple(out.shape), *out.detach().flatten().tolist())
        if value in seen:
            continue
        seen.add(value)
        known = tracker.marks.owned(out)
        if isinstance(known, Examples) and known.axis >= out.dim():
            yield f"{name}: {known} of a result of shape {tuple(out.shape)}"
            continue
        if not isinstance(known, Examples) or out.numel() > 4 * BATCH**3 or not out.numel():
            continue
        claimed = [{int(example)} for example in known.owner(out.device)]
        try:
            found = owners(out, h, axis, known.axis)
        except RuntimeError:
            continue  # it has no derivative
        actual = [{order[row] for row in rows} for rows in found]
        agree = len(actual) == len(claimed) and all(
            mine <= own for mine, own in zip(actual, claimed, strict=True)
        )
        if not agree and not is_refused(tracker, out, h):
            yield (f"{name}: rows along axis {known.axis} depend on {actual}, expected {claimed}")


def check_all(functions, dims, layout):
    """Call functions with data of so many axes and assert that no row is another example's."""
    torch.manual_seed(0)
    model = nn.Linear(3, BATCH).double()
    x = torch.randn(*(BATCH,) * (dims - 1), 3).double()
    with gs.track(model, batch_size=BATCH) as tracker:
        found = [
            problem
            for function in functions
            for problem in problems(tracker._tracker, model, x, function, layout)
        ]
        tracker.backward(model(x).flatten(1).sum(1))
    assert not found, "\n".join(found)
    assert not any(each._version for each in CONSTANTS)


@pytest.mark.parametrize(("dims", "layouts"), [(2, ["in order"]), (3, LAYOUTS)])
@pytest.mark.filterwarnings("ignore")
def test_rows_are_those_of_their_examples(dims, layouts):
    """Of those in order first, which shows what is worth calling on the others."""
    for layout in layouts:
        check_all(FUNCTIONS, dims, layout)


def by_name(function, first: int):
    """Return a function that gives all arguments from the first of them on by name."""

    @wraps(function)
    def call(*args):
        for names in names_of(function):
            if first < len(args) <= len(names):
                try:
                    named = zip(names[first:], args[first:], strict=False)
                    return function(*args[:first], **dict(named))
                except (TypeError, RuntimeError, ValueError):
                    continue
        raise TypeError("no overload takes these arguments by name")

    return call


@pytest.mark.parametrize(("dims", "first"), [(2, 1), (3, 0)])
@pytest.mark.filterwarnings("ignore")
def test_operands_given_by_name(dims, first):
    functions = [
        by_name(function, first)
        for function in FUNCTIONS
        if function in BY_PLACE and names_of(function)
    ]
    assert len(functions) > 500
    check_all(functions, dims, "in order")
