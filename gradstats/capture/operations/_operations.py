"""Sets of PyTorch's operations, by what they do to their operands."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradstats.capture.operations._nested import tensors_in
from gradstats.capture.operations._operators import OPERATORS, exchanges, is_own_operator
from gradstats.capture.operations._rowwise import POINTWISE_OF_SEVERAL


def function_variants(*names: str) -> list[Any]:
    """Return the functions, methods and operators of these operations that return a new tensor."""
    keys = [f"__{side}{name}__" for name in names for side in ("", "r")]
    return [*variants(*names), *(getattr(Tensor, key) for key in keys if hasattr(Tensor, key))]


def variants(*names: str) -> list[Any]:
    """Return the functions and methods of these names."""
    keys = [(owner, name) for name in names for owner in (torch, Tensor)]
    return [getattr(owner, name) for owner, name in keys if hasattr(owner, name)]


def in_place_variants(*names: str) -> list[Any]:
    """Return the methods and operators of these operations that change their first operand."""
    keys = [key for name in names for key in (f"{name}_", f"__i{name}__")]
    return [getattr(Tensor, key) for key in keys if hasattr(Tensor, key)]


# Differences of two operands; and sums as well.
SUBTRACTS = frozenset([*function_variants("sub", "subtract"), torch.rsub])
ADDS = SUBTRACTS | frozenset(function_variants("add"))
ADDS_IN_PLACE = frozenset(in_place_variants("add", "sub", "subtract"))

MULTIPLIES = frozenset(function_variants("mul", "multiply"))

# Quotients of the first operand and the second.
DIVIDES = frozenset([*variants("div", "divide", "true_divide"), Tensor.__div__, Tensor.__truediv__])

# Operations that copy the first operand's values to the same places, perhaps rounded.
CASTS = frozenset(
    [
        *variants("clone"),
        Tensor.to, Tensor.type_as, Tensor.type, Tensor.contiguous, Tensor.float, Tensor.double,
        Tensor.half, Tensor.bfloat16, Tensor.cpu, Tensor.cuda,
    ]
)  # fmt: skip

# Padding, by a constant or otherwise.
PADS = frozenset({torch.nn.functional.pad, torch._C._nn.pad, torch.constant_pad_nd})

# Getters that return a view; all others read a property.
TRANSPOSING_GETTERS = tuple(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH"))
VIEW_GETTERS = (*TRANSPOSING_GETTERS, Tensor.real.__get__, Tensor.imag.__get__)  # type: ignore[attr-defined]

TRANSPOSES = frozenset(
    [
        *variants(
            "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "adjoint"
        ),
        *TRANSPOSING_GETTERS,
    ]
)  # fmt: skip

# An einsum of one operand may move its axes too.
MOVES = TRANSPOSES | {torch.einsum}

RESHAPES = frozenset(
    variants(
        "view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "unsqueeze", "squeeze",
        "ravel",
    )
)  # fmt: skip

# Operations whose results are slices of their operand, told by numbers.
SLICES = frozenset(variants("chunk", "split", "split_with_sizes", "unbind", "narrow", "select"))

# Operations that repeat an operand without a copy.
EXPANDS = frozenset(variants("expand", "expand_as", "broadcast_to"))

# Operations that may repeat the same row for each example.
REPEATS_ROWS = EXPANDS.union(variants("repeat", "tile", "repeat_interleave"))

PRODUCTS = frozenset(
    [
        *variants("matmul", "mm", "bmm", "mv"), Tensor.__matmul__, torch.linalg.matmul,
        torch.sparse.mm, torch.spmm, torch.dsmm,
    ]
)  # fmt: skip

# Those whose operands have a given number of axes each.
AXES_OF_FACTORS = {
    **dict.fromkeys(variants("mm"), (2, 2)),
    **dict.fromkeys(variants("bmm"), (3, 3)),
    **dict.fromkeys(variants("mv"), (2, 1)),
}

# Losses that are computed element by element, before their reduction.
ELEMENT_LOSSES = frozenset(
    {
        functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss,
        functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits,
        functional.gaussian_nll_loss, functional.poisson_nll_loss, functional.kl_div,
    }
)  # fmt: skip

# Products of the rows of both operands.
ROW_PRODUCTS = frozenset({functional.linear, torch.cdist})

# Products of all elements of two vectors.
OUTER_PRODUCTS = frozenset(variants("outer", "ger"))

# Contractions of two operands along axes that the caller chooses; otherwise along their last ones.
TENSOR_PRODUCTS = frozenset({torch.tensordot, *variants("inner", "dot", "vdot")}) | OUTER_PRODUCTS

# Products added to their first operand.
ADDED_PRODUCTS = frozenset(variants("addmm", "baddbmm"))

# Element-by-element operations on several operands.
ELEMENTWISE = (
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "truediv", "pow",
    "maximum", "minimum", "lerp", "addcmul", "addcdiv", "where", "atan2", "fmod", "remainder",
    "hypot", "logaddexp", "logaddexp2", "xlogy", "fmax", "fmin", "float_power", "copysign", "ldexp",
    "clamp", "clip", "clamp_min", "clamp_max",
)  # fmt: skip

BROADCASTS = POINTWISE_OF_SEVERAL | frozenset(
    [
        *function_variants(*ELEMENTWISE, "and", "or", "xor", "mod", "floordiv"),
        torch.broadcast_tensors,
        *ELEMENT_LOSSES,
    ]
)  # fmt: skip

# Operations that join tensors, with the axis they join along; None where the caller gives it.
JOINS: dict[Any, int | None] = {
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.stack), None),
    **dict.fromkeys((torch.vstack, torch.row_stack), 0),
    **dict.fromkeys((torch.hstack, torch.column_stack), 1),
    torch.dstack: 2,
}

# Pads sequences to one length and stacks them.
PAD_SEQUENCE = torch._C._nn.pad_sequence

# Operations after which the layout is unknown, whatever the sizes of the result: some add axes that
# their first operand lacks, others move or mix rows.
UNFOLLOWED = frozenset(
    [torch.linalg.multi_dot, functional.pdist, *variants(
        "meshgrid", "kron", "cartesian_prod", "block_diag", "combinations", "vander",
        "chain_matmul", "cov", "corrcoef", "addr", "put", "select_scatter", "slice_scatter",
        "diagonal_scatter", "as_strided_scatter", "addmv", "addbmm", "renorm", "pdist",
        "bincount", "histc", "histogram", "histogramdd", "nonzero_static",
        *(name for name in dir(torch) if name.endswith("_copy") and name[0] != "_"),
    )]
).difference(variants("index_copy"))  # fmt: skip

# Solvers of (batches of) linear systems, with the position of the right-hand sides among their
# arguments.
SOLVES: dict[Any, int] = {
    torch.linalg.solve: 1,
    torch.linalg.solve_ex: 1,
    torch.linalg.lstsq: 1,
    torch.linalg.solve_triangular: 1,
    torch.linalg.lu_solve: 2,
    **dict.fromkeys(variants("cholesky_solve", "triangular_solve", "lu_solve"), 0),
}

# Solvers whose right-hand sides may be vectors.
SOLVES_VECTORS = frozenset({torch.linalg.solve, torch.linalg.solve_ex, torch.linalg.lstsq})


def solves_vector(func: Any, args: Sequence[Any]) -> bool:
    """Whether the shapes make a solver treat its right-hand sides as vectors."""
    if func not in SOLVES_VECTORS or len(args) < 2:
        return False
    return args[1].dim() == 1 or args[1].shape == args[0].shape[:-1]


# Convolutions, with the number of axes they run over. Data with only one more axis are a single
# example to PyTorch, with the channels in front.
CONVOLUTIONS = {
    getattr(functional, f"conv{kind}{axes}d"): axes
    for kind in ("", "_transpose")
    for axes in (1, 2, 3)
}

TRANSPOSED_CONVOLUTIONS = frozenset(
    {functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d}
)

# Operations whose first operand decides where the examples lie, unless it is constant; all examples
# share the other operands.
LOOKS_AT_FIRST = frozenset(
    {functional.linear, functional.embedding, *variants("prelu", "isin"), *CONVOLUTIONS}
)

# Operations on several data operands that sum over the last axis of the first, with the position of
# the operand that all examples share.
SHARED_WEIGHT = {
    functional.bilinear: 2,
    functional.embedding_bag: 1,
    functional.grouped_mm: 1,
    torch._grouped_mm: 1,
}

# Operations whose rules serve complex numbers.
COMPLEX = (
    PRODUCTS
    | TENSOR_PRODUCTS
    | ADDED_PRODUCTS
    | frozenset([*function_variants(*ELEMENTWISE), *variants("addr", "addmv")])
    | frozenset(in_place_variants(*ELEMENTWISE))
    | JOINS.keys()
    | {
        functional.linear, torch.einsum, torch.linalg.vecdot,
        torch.broadcast_tensors, torch.rsub, Tensor.__setitem__, Tensor.copy_,
    }
)  # fmt: skip

# Reductions if given one operand, elementwise if given two.
EXTREMES = frozenset({torch.max, Tensor.max, torch.min, Tensor.min})

# Operations that treat the first axis as examples and the second as channels.
BATCH_FIRST = frozenset(
    getattr(owner, name)
    for owner in (functional, torch)
    for name in dir(owner)
    if name.startswith(
        ("conv1d", "conv2d", "conv3d", "conv_transpose", "avg_pool", "max_pool", "max_unpool",
         "fractional_max_pool", "lp_pool", "adaptive_", "grid_sample", "affine_grid")
    )
    or name in ("group_norm", "instance_norm", "batch_norm", "interpolate", "local_response_norm",
                "channel_shuffle", "native_channel_shuffle")
    or (owner is functional and name in ("unfold", "fold"))
)  # fmt: skip

# Pooling, which keeps channels apart too, with the number of axes it runs over.
POOLS = {
    getattr(owner, name): int(found[1])
    for owner in (functional, torch)
    for name in dir(owner)
    if (found := re.search(r"_pool([123])d", name)) and getattr(owner, name) in BATCH_FIRST
}

# Types of the functions and methods that TorchScript compiles.
SCRIPTS = (torch.jit.ScriptFunction, torch.ScriptMethod)

# Types of operations about which nothing is known: custom operators, and TorchScript's.
OPAQUE = OPERATORS | frozenset(SCRIPTS)


def is_trusted(func) -> bool:
    """Whether an operation is an opaque one of the user's own.

    Such operations are trusted to keep the examples apart and in their places. PyTorch's own
    operators are not: some move or mix examples, or send them to other processes.
    """
    return type(func) in OPAQUE and not (is_own_operator(func) or exchanges(func))


# Other operations that keep the rows of their operand apart, and change the sizes of its last axes.
REGROUPS = frozenset({functional.glu, functional.pixel_shuffle, functional.pixel_unshuffle})

# Operations that create a tensor of another's form, with a row for each of its rows.
FORMS = frozenset(getattr(torch, name) for name in dir(torch) if name.endswith("_like"))

# Operations that make tensors from given values. Others, such as ``from_numpy`` and
# ``torch.Tensor([...])``, are not shown to function modes.
GIVEN_VALUES = frozenset({torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor})

# These, and operations that draw random values.
CALLERS_VALUES = GIVEN_VALUES | {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli,
    torch.rand_like, torch.randn_like, torch.randint_like,
}  # fmt: skip

# Operations that create a tensor of a given size.
FACTORIES = frozenset(
    {
        torch.zeros, torch.ones, torch.empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full,
        Tensor.new_empty,
    }
)  # fmt: skip

# Operations that use only the form of their operand, none of its values.
BLANKS = frozenset({torch.zeros_like, torch.empty_like})

# Operations that replace all values of their operand by a number or by drawn ones.
FILLS = frozenset({Tensor.fill_, Tensor.zero_, Tensor.normal_, Tensor.uniform_})

# Frequent queries about a tensor that do not return tensors.
QUESTIONS = frozenset(
    getattr(Tensor, name)
    for name in ("size", "dim", "numel", "stride", "is_floating_point", "data_ptr")
) | frozenset(
    getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "is_cuda")
)

# Operations on the tensor object, which must reach the parameter itself, not its alias.
ON_THE_OBJECT = frozenset(
    {
        "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad",
        "backward", "detach_", "share_memory_", "set_", "__set__", "__delete__", "__repr__",
        "__deepcopy__", "__reduce_ex__", "__hash__",
    }
)  # fmt: skip


def reads_property(func) -> bool:
    """Whether an operation is the getter of a property that is no view."""
    return getattr(func, "__name__", "") == "__get__" and func not in VIEW_GETTERS


def is_about_object(func) -> bool:
    """Whether an operation reads or changes a property of the tensor object."""
    return reads_property(func) or getattr(func, "__name__", "") in ON_THE_OBJECT


# Operations that read only the shape, dtype or device of operands after the first.
READS_ONLY_FIRST = frozenset(
    {
        Tensor.to, Tensor.type_as, Tensor.view_as, Tensor.reshape_as, Tensor.expand_as,
        Tensor.new_tensor, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full,
    }
)  # fmt: skip

# Operations that change their first operand.
IN_PLACE = frozenset(
    getattr(Tensor, name)
    for name in dir(Tensor)
    if name == "__setitem__"
    or (name.startswith("__i") and name.endswith("__") and hasattr(Tensor, f"__{name[3:]}"))
) | frozenset(
    getattr(owner, name)
    for owner in (Tensor, torch, functional)
    for name in dir(owner)
    if name.endswith("_") and not name.startswith("_") and name not in ON_THE_OBJECT
)


def places_changed(func) -> tuple[tuple[int, str], ...]:
    """Return position and name of each operand that an operation changes, if not in ``IN_PLACE``.

    The schemas of operators list these. Functions on lists of tensors that change their first
    operand are named like methods that do.
    """
    if isinstance(func, torch._ops.OpOverloadPacket) and len(func.overloads()) == 1:
        func = getattr(func, func.overloads()[0])
    if isinstance(func, torch._ops.OpOverload):
        places = enumerate(func._schema.arguments)
        return tuple((place, each.name) for place, each in places if each.is_write)
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    known = func in IN_PLACE or name in ON_THE_OBJECT
    return ((0, "self"),) if in_place and not known else ()


def changed_by(func, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the operands that an operation changes, if it is not in ``IN_PLACE``."""
    places = places_changed(func)
    changed = [args[at] if at < len(args) else kwargs.get(name) for at, name in places]
    return tensors_in(changed)


# Operations on lists of tensors, each with the operation that does the same to a single tensor.
# Containers of tensors and optimizers use them.
ON_EACH = {
    getattr(torch, key): getattr(torch, name)
    for key in dir(torch)
    if key.startswith("_foreach_") and not key.endswith(("_", "norm"))  # takes other arguments
    if hasattr(torch, name := key.removeprefix("_foreach_"))
}
# The in-place ones return the list that they change.
ON_EACH |= {
    getattr(torch, key): getattr(Tensor, name)
    for key in dir(torch)
    if key.startswith("_foreach_") and key.endswith("_")
    if hasattr(Tensor, name := key.removeprefix("_foreach_"))
}

# In-place methods that only move axes, with the methods that return such a view.
MOVES_IN_PLACE = {
    getattr(Tensor, f"{name}_"): getattr(Tensor, name)
    for name in ("transpose", "swapaxes", "swapdims", "t", "squeeze", "unsqueeze")
}
