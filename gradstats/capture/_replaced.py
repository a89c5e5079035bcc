"""The functions of PyTorch that are replaced, so that contexts see what no function mode sees.

Each is replaced once, when a context first needs it, by a function that calls PyTorch's own. None
is put back: every change to a class makes Python drop the lookup caches of all its subclasses,
while outside contexts the most frequent one, ``apply``, takes only 0.3 µs longer.
"""

from __future__ import annotations

from functools import cache

from gradstats.capture._loaders import replace_fetches
from gradstats.capture._registered import follow_through
from gradstats.capture.compiled._graphs import replace_call_of_backend
from gradstats.capture.compiled._skipped import replace_frame_conversion
from gradstats.capture.compiled._used import replace_compile
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
    """Replace functions that run or change operations out of sight."""
    # autograd.Function.apply: modes do not see what a Function computes.
    replace_apply()
    # Inside torch.utils.checkpoint.checkpoint: it copies arguments, without the notes on them.
    replace_checkpoint()
    # DataLoader.__iter__ and __next__ of its iterators: what they return is data, however made.
    replace_fetches()
    # Inside functions that torch.vmap returned: their tensors lack axes.
    replace_vmap()
    # Inside grad, vjp and jvp of torch.func: their tensors are wrapped.
    replace_derivatives()
    # torch.compile: a context may be the first that has to prepare for the compiler.
    replace_compile()
    # torch.cond: it compiles its branches.
    replace_cond()
    # __call__ of TorchScript's functions and methods: modes do not see what they compute.
    replace_script_calls(follow_through)
    # Parameter.__new__: given a tensor of a subclass, it does not make a plain parameter.
    replace_parameter_constructor()
    # Inside torch.nn.functional.l1_loss: the call that modes see lacks the weight.
    show_weight_of_l1_loss()
    # Variable.__new__: it detaches a tensor out of sight.
    replace_variable_constructor()
    # Tensor.as_subclass: its result has the same values as another tensor, out of sight.
    replace_as_subclass()


def replace_in_compiler() -> None:
    """Replace functions of the compiler, which from then on apply outside contexts too."""
    # OutputGraph.call_user_compiler: it gives a backend the graphs that were recorded.
    replace_call_of_backend()
    # ConvertFrame.__call__, torch._dynamo.reset: a frame that cannot be compiled is not retried.
    replace_frame_conversion()
