"""Scalars in Triton's interpreter."""

import triton


def settle_scalars() -> None:
    """Have the interpreter of Triton 3.6 make scalars as those of later versions do.

    It calls ``int`` on arrays of one element, which NumPy deprecates and refuses from 2.4 on.
    """
    if not triton.__version__.startswith("3.6."):
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
