"""Operations that the compiler does not show function modes while it traces, made visible.

What is traced is followed as it is in eager code, from what modes are shown of it. From the first
context on that finds the compiler imported, they are shown these operations as well; where no mode
is traced, graphs compute what they did.
"""

from __future__ import annotations

import torch
from torch.utils._device import _device_constructors

from gradstats.capture._operations import TRANSPOSING_GETTERS

# Functions that the compiler of no PyTorch lists as overridable.
HIDDEN = (torch.as_strided, torch.fill, torch.vander, torch.addmv_, torch._weight_norm)

# What the compiler of PyTorch 2.14 shows in place of the getters that transpose.
TRANSPOSES = {
    "T": torch.ops.aten.numpy_T,
    "mT": torch.ops.aten.mT,
    "H": torch.ops.aten.matrix_H,
    "mH": torch.ops.aten.mH,
}
GETTERS = dict(zip(TRANSPOSES.values(), TRANSPOSING_GETTERS, strict=True))


def show_what_is_traced() -> None:
    """Have the compiler show modes all that they are shown of eager code."""
    _show_functions()
    _show_transposes()
    _show_assignments()
    _show_rows()


def _show_functions() -> None:
    """Show them functions that are missing in the compiler's table.

    With PyTorch 2.11 these are torch.arange and most others that make tensors, besides ``HIDDEN``.
    """
    shown = torch._dynamo.variables.torch.get_overridable_functions()
    shown.update(_device_constructors(), HIDDEN)


def _show_transposes() -> None:
    """Show them the getters that transpose, as the compiler of PyTorch 2.14 does."""
    from torch._dynamo.variables import TensorVariable, TorchInGraphFunctionVariable

    if hasattr(TensorVariable, "method_attr_T"):
        return
    own = TensorVariable.var_getattr
    operations = {name: TorchInGraphFunctionVariable(each) for name, each in TRANSPOSES.items()}

    def attribute(self, tx, name):
        operation = operations.get(name)
        return own(self, tx, name) if operation is None else operation.call_function(tx, [self], {})

    TensorVariable.var_getattr = attribute  # type: ignore[method-assign]


def _show_assignments() -> None:
    """Show them what is assigned to places of a tensor.

    The compiler of PyTorch 2.15 has a handler for it beside that of methods, which are shown.
    """
    from torch._dynamo.variables import TensorVariable

    own = vars(TensorVariable).get("mp_ass_subscript_impl")
    if own is None:
        return

    def assign(self, tx, key, value):
        if value is None:
            return own(self, tx, key, value)  # to delete it, an error
        return self.call_method(tx, "__setitem__", [key, value], {})

    TensorVariable.mp_ass_subscript_impl = assign  # type: ignore[method-assign]


def _show_rows() -> None:
    """Show them how a tensor is taken apart into rows, by loops, ``list`` and assignments."""
    from torch._dynamo.variables import ConstantVariable, TensorVariable
    from torch._dynamo.variables.torch_function import can_dispatch_torch_function

    own = TensorVariable.unpack_var_sequence

    def rows(self, tx, idxes=None):
        if not can_dispatch_torch_function(tx, (self,), {}):
            return own(self, tx, idxes)
        found = self.call_method(tx, "unbind", [ConstantVariable.create(0)], {})
        return found.unpack_var_sequence(tx)

    TensorVariable.unpack_var_sequence = rows  # type: ignore[method-assign]
