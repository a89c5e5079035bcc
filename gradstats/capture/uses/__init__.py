"""Uses: where a parameter meets data, and the factors that it delivers.

_dispatch    what happens to an operation that has a tracked operand
_uses        what all uses share, and how their factors reach the parameters
_decided     what a rule decided, repeated for operations that are alike
_hooked      uses as hooks on the nodes of PyTorch's own operations
_together    small uses contracted together
_prepared    what a backward does on a GPU, decided once for operands that lie alike
             and uses as autograd Functions:
_tap         behind an operation that PyTorch computed as always
_layer       a weight and a bias: of _linear, products with a matrix, and of _convolution
_normalization, _broadcast   normalisation layers, scales and shifts by the kernels
_views, _product             everything that broadcasts; products index by index
_recomputed  operations that the backward takes apart: recurrent layers, whose gates get their
_recurrence, _steps, _gates  gradients step by step, or on a GPU from one call
_slots       operations on rows along two axes, taken apart along one of them
_grafted     operations followed through a decomposition, which runs instead of or beside them
"""
