"""Uses: where a parameter meets data, and the factors that it delivers.

_dispatch    what happens to an operation that touches a tracked tensor
_uses        what all uses share, and how their factors reach the parameters
_decided     what was done, to be done again for operations that are alike
_hooked      uses as a hook on the node of PyTorch's own operation
_together    small ones contracted together
_prepared    what their backward does on a GPU, decided once for operands that lie alike
             and uses as autograd Functions:
_layer       a weight and a bias: of _linear, products with a matrix, and of _convolution
_normalization, _broadcast   normalisation layers, scales and shifts on chip
_views, _product             everything that broadcasts; products index by index
_recomputed  operations that backward takes apart: recurrent layers, whose gates have their
_recurrence, _steps, _gates  gradients step by step, or on a GPU from one call
_slots       operations of rows along two axes, taken apart along one
_grafted     operations followed through a decomposition, which runs instead or beside
"""
