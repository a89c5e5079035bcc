"""PyTorch's operations, modes and graphs, by what they are.

_operations  operations by what they do to their operands; _names, under which users know them;
_operators   those of ``torch.ops``, made the functions that users call
_call        an operation as it was called
_rowwise     which functions keep rows apart; of others nobody knows what they do
_einsum      contractions as equations
_opened      functions of PyTorch's that run so that the operations inside are seen
_formats     memory formats that strides leave open
_memory      memory that several tensors show
_nested      nested tuples, lists and dicts
_modes       the thread's stack of function modes
_graph       nodes of autograd graphs that are known by their type
_engine      the autograd engine
"""
