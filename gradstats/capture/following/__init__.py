"""What is not tracked: constants, and where the examples lie in data.

_examples    whose the rows of a tensor are
_marks       what is noted on tensors
_meetings    in which operations trained values of different examples met
_results     which results of an operation are constant, which are data
_following   where the examples lie in these; _families of operations on several operands,
             _grids of data whose examples lie along two axes; with
_layout      the rules for operations on one operand, and those of
_reindexed, _indexing, _reductions, _multiplied, _joins, _sequences
_apart       whether packed examples are kept apart where rows meet rows
_flex_attention  what the functions take that change its scores, or mask them
_writes      what an operation writes, and where; _written whose the rows are afterwards;
_filled      tensors that are written row by row
_separable   which values of several examples are sums of terms of one each
_data        what autograd Functions and ``grad`` return; the losses
_derivatives backward and torch.autograd.grad inside a context
_batch_norm  batch normalisation, refused where it mixes the examples
_signatures  operands that are given by name
_repeated    what following came to, noted again for operations that are alike
_assigned    rows that the caller says it of
_enclosed    tensors that functions take from where they were written
"""
