"""PyTorch's operations, modes and graphs, classified.

_operations  sets of operations, by what they do to their operands; _names, their names for users;
_operators   operators of ``torch.ops``, converted to the functions that users call
_call        an operation with its arguments and result
_rowwise     functions that keep rows apart; others may do anything
_einsum      contractions as equations
_opened      functions of PyTorch that run so that the operations inside are seen
_formats     memory formats that strides leave ambiguous
_memory      memory that several tensors share
_nested      nested tuples, lists and dicts
_modes       the thread's stack of function modes
_graph       types of autograd nodes, and walks over graphs
_engine      the autograd engine
"""
