"""Untracked tensors: which are constant, and where the examples lie in the others, data.

Terms
    data       a tensor that may hold values of examples; a *constant* holds none
    trained    data with a gradient to pass on; only of these must it be known whose they are
    layout     where the examples lie in a tensor, such as "along axis 0, three rows each"
    contract   the layout of what comes from outside: along the caller's ``batch_dim``, or packed
    mark       the layout that is noted on a tensor, where that is not what the contract says;
               ``marks`` is all that the context notes about tensors
    apart      each value belongs to one example
    meeting    an operation that combines values of different examples; no loss may depend on it
    crossed    combined along an axis that may be that of the examples in one operand alone
    taken      counted as data because of its size, though it may be a constant
    lost       data of which it is no longer known whose they are; losses of these are refused
    owner      the example that a row belongs to, by its number
    scores     values for pairs of rows of packed examples, before a softmax or a mask

Modules
_examples    layouts: which example each row of a tensor belongs to
_marks       what a context notes about tensors, which all functions below read and write; of it
             _values properties of values until they change, _meetings operations in which trained
             values of different examples met
_notes       what is known about a tensor, noted on another computed in the same way
_taken       which tensors count as data, though they may be constants
_results     which results of an operation are constant, which are data
_following   where the examples lie in the result of an operation; _operands which of several
             operands decide that; by these rules:
_layout      operations on one operand, with
_reindexed, _indexing, _reductions, _multiplied, _joins, _sequences
_families    operations on several operands
_apart       whether packed examples are kept apart where rows meet rows
_flex_attention  parameters in the functions that modify or mask its scores
_writes      what an operation writes, and where; _written the layout afterwards, by
_numbered    the examples' numbers, on which the write is repeated where forms do not tell it
_slots       rows along two axes, as those of experts' slots, told by the same numbers
_crossed     rows of examples that may have been taken for rows of positions
_separable   which values of several examples are sums of terms of one example each
_returned    results of autograd Functions, wrappers and ``grad``
_losses      which example each loss belongs to
_derivatives backward and torch.autograd.grad inside a context
_batch_norm  batch normalisation, refused where it mixes the examples
_signatures  operands that are given by name
_repeated    a cache of what was noted, and of what rules decided, for repeated operations
_assigned    rows that the caller assigns to examples
_enclosed    tensors in the closures and globals of functions, and caches that methods use
"""
