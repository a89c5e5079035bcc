"""What the lanes that run Triton's interpreter change in it."""

import operator
from functools import cache

import numpy as np
import triton


def settle_interpreter() -> None:
    """Make the interpreter of every Triton alike, and several times as fast."""
    from triton.runtime import interpreter

    if triton.__version__.startswith("3.6."):
        _settle_scalars(interpreter)
    _patch_once(interpreter)
    _look_types_up(interpreter)
    _remember_shapes(interpreter.tl.core)
    _convert_bfloat16(interpreter)
    _take_equal_types(type(interpreter.interpreter_semantic))
    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = _check_overflow


def _settle_scalars(interpreter) -> None:
    """Have Triton 3.6 make scalars as later versions do.

    It calls ``int`` on arrays of one element, which NumPy deprecates and refuses from 2.4 on.
    """
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _patch_once(interpreter) -> None:
    """Have the interpreter take over Triton's language once, for as long as the process lives.

    It does so, and gives it back, at every launch and at every call of one ``@triton.jit`` function
    by another, which takes as long as all that the kernels compute.
    """
    patch_language, language = interpreter._patch_lang, interpreter.tl
    modules = (language, language.core)
    done = set()

    def patch(kernel):
        seen = frozenset(
            position
            for position, module in enumerate(modules)
            if any(value is module for value in kernel.__globals__.values())
        )
        if seen not in done:
            patch_language(kernel)
            done.add(seen)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch


def _look_types_up(interpreter) -> None:
    """Have NumPy's name for a type looked up in one table, which is otherwise made at each call."""
    pointer, find = interpreter.tl.pointer_type, interpreter._get_np_dtype
    find_once = cache(find)

    def numpy_type(dtype):
        scalar = dtype.scalar
        return find(scalar) if isinstance(scalar, pointer) else find_once(scalar)

    interpreter._get_np_dtype = numpy_type


def _remember_shapes(core) -> None:
    """Have what follows from a shape computed once, not for each type and tensor that has it."""
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[tuple, dict] = {}
    shapes: dict[tuple, tuple] = {}

    known: dict[int, tuple] = {}  # shapes of the types above, which stay alive, and their sizes

    def sizes_of(shape):
        sizes = known.get(id(shape))
        if sizes is None:
            values = getattr(shape, "values", shape)
            sizes = tuple([getattr(size, "value", size) for size in values])
        return sizes

    def block_type(self, element_ty, shape):
        # types of pointers are made anew each time
        if type(element_ty) is not core.dtype:
            make_type(self, element_ty, shape)
            return
        key = (element_ty.name, *sizes_of(shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)
            known[id(self.shape)] = key[1:]
        self.__dict__.update(types[key])

    def tensor(self, handle, type):
        key = sizes_of(type.shape) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[key]

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _convert_bfloat16(interpreter) -> None:
    """Have bfloat16 made of float32, by cutting off, and back in one operation on the bits."""
    convert, language = interpreter._convert_float, interpreter.tl

    def converted(array, dtype, wanted, rounding):
        if dtype == language.bfloat16 and wanted == language.float32:
            return array.view(np.uint16).astype(np.uint32) << 16
        if dtype == language.float32 and wanted == language.bfloat16 and rounding is None:
            return (array.view(np.uint32) >> 16).astype(np.uint16)
        return convert(array, dtype, wanted, rounding)

    interpreter._convert_float = converted


def _take_equal_types(semantic) -> None:
    """Have operands of one type, which need no conversion, and of one shape taken as they are."""
    check = semantic.binary_op_type_checking_impl

    def checked(self, left, right, *options, **named):
        both = isinstance(left, self.tensor) and isinstance(right, self.tensor)
        # the fourth option, or the one by name, is for division, which converts
        if (
            not both
            or named
            or len(options) > 3
            or left.dtype.is_ptr()
            or left.dtype != right.dtype
        ):
            return check(self, left, right, *options, **named)
        if left.shape is right.shape:  # as _remember_shapes has it
            return left, right
        return self.broadcast_impl_value(left, right)

    semantic.binary_op_type_checking_impl = checked


def _check_overflow(left, right, operation) -> None:
    """Raise where a sum, difference or product of integers leaves their range.

    So does Triton's own check, by a dozen operations of its language for each in a kernel.
    """
    integers = np.iinfo(left.handle.data.dtype)
    if integers.bits < 64:
        wide = (each.handle.data.astype(np.int64) for each in (left, right))
        exact = getattr(operator, operation.__name__)(*wide)
        within = exact.min() >= integers.min and exact.max() <= integers.max
        assert within, f"{operation.__name__} of {integers.dtype} overflows"
