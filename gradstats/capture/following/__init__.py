"""Untracked tensors: which are constant, and where the examples lie in the others, data.

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
_writes      what an operation writes, and where; _written the layout afterwards;
_filled      tensors that are written piece by piece
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
