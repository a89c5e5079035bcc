"""What of PyTorch is replaced, so that contexts see what it shows to no function mode.

Each is replaced once, when a context first needs it, and passes on to PyTorch's own. None is put
back: every change to a class makes Python drop the lookup caches of all its subclasses, while
outside of contexts even ``apply``, called most often, takes a third of a microsecond longer.
"""

from __future__ import annotations

from functools import cache

from gradstats.capture._loaders import replace_fetches
from gradstats.capture._registered import follow_through
from gradstats.capture.compiled._graphs import replace_call_of_backend
from gradstats.capture.compiled._skipped import replace_frame_conversion
from gradstats.capture.operations._opened import show_weight_of_l1_loss
from gradstats.capture.parameters._branches import replace_cond
from gradstats.capture.parameters._checkpoints import replace_checkpoint
from gradstats.capture.parameters._differentiated import replace_derivatives
from gradstats.capture.parameters._functions import replace_apply
from gradstats.capture.parameters._scripts import replace_script_calls
from gradstats.capture.parameters._tensors import (
    replace_as_subclass,
    replace_parameter_constructor,
    replace_variable_constructor,
)
from gradstats.capture.parameters._transforms import replace_vmap


@cache
def replace_in_pytorch() -> None:
    """Replace what runs or changes operations out of sight."""
    # autograd.Function.apply: what a Function computes is not shown.
    replace_apply()
    # Inside torch.utils.checkpoint.checkpoint: arguments get copied, without what is noted on them.
    replace_checkpoint()
    # __iter__ of DataLoader, __next__ of its iterators: what they return is data, however made.
    replace_fetches()
    # Inside functions that torch.vmap returned: there tensors lack axes.
    replace_vmap()
    # Inside grad, vjp and jvp of torch.func: there tensors are wrapped.
    replace_derivatives()
    # torch.cond: it compiles its branches.
    replace_cond()
    # __call__ of TorchScript's functions and methods: what they compute is not shown.
    replace_script_calls(follow_through)
    # Parameter.__new__: of a tensor of a subclass it makes no plain parameter.
    replace_parameter_constructor()
    # Inside torch.nn.functional.l1_loss: the call that modes get is without the weight.
    show_weight_of_l1_loss()
    # Variable.__new__: it detaches a tensor out of sight.
    replace_variable_constructor()
    # Tensor.as_subclass: it shows the same values as another tensor.
    replace_as_subclass()


def replace_in_compiler() -> None:
    """Replace what settles how compiled code runs from then on, inside contexts and outside."""
    # OutputGraph.call_user_compiler: backends take graphs whose operations were only recorded.
    replace_call_of_backend()
    # ConvertFrame.__call__, torch._dynamo.reset: what cannot be compiled is never tried again.
    replace_frame_conversion()
