"""Capture: from a parameter's use in the user's forward to factors, and back as statistics.

One context
    _tracker     entering and leaving it, what it knows
    _context     what operations, rules and uses ask of it
    _selection   which parameters are measured; what is to be known of a model beforehand
    _sharded     parameters that fully_shard shards
    _attributes  what modules keep in plain attributes
    _coverage    what the autograd graph says about uses that were not seen
    _threads     the thread that a context belongs to
    _loaders     batches that are fetched inside of it
    _survey      one forward that finds out what happens to every parameter
    _reports     from the factors of all uses to squared norms
    _consumers   what is done with the factors beside norms

What is tracked
    _nodes       parameters (roots), and what their uses have delivered
    _derivation  what is computed from them alone (derived), and how to compute it again
    _tensors     the tensor classes whose operations are seen
    _derived     operations on parameters and constants alone, in place or not
    _functions   custom autograd Functions of parameters alone, made visible as operations
    _transforms  torch.vmap, made visible; other transforms of torch.func
    _scripts     functions of TorchScript, made visible as operations
    _replay      a derived tensor computed again, to pull gradients back through it
    _drawn       operations that draw random numbers, drawn again
    _slices      what was repeated for the batch, pulled back as data are
    _lineage     pulling a derived tensor's factors back to its parameters; _parts those of several
                 uses at once
    _lean_steps, _lean_products, _lean_reductions, _lean_normalisations, _lean_selections  the steps
                 of that way that keep factors lean

What is not tracked: constants, and data with the examples in them
    _constants   the mode that sees every operation; _modes on the thread's stack of them
    _derivatives backward and torch.autograd.grad inside a context
    _checkpoints activation checkpoints
    _batch_norm  batch normalisation, refused where it mixes the examples
    _marks       what is noted on tensors; _memory what was written into memory that they show
    _meetings    in which operations trained values of different examples met
    _results     which results of an operation are constant, which are data
    _following   where the examples lie in these; _families of operations on several operands,
                 _grids of data whose examples lie along two axes; with
    _layout      the rules for operations on one operand, and those of
    _reindexed, _indexing, _reductions, _multiplied, _joins, _sequences, _einsum
    _apart       whether packed examples are kept apart where rows meet rows
    _flex_attention  what the functions take that change its scores, or mask them
    _writes      what an operation writes, and where; _written whose the rows are afterwards;
    _filled      tensors that are written row by row
    _separable   which values of several examples are sums of terms of one each
    _data        what autograd Functions and ``grad`` return; the losses
    _call, _signatures  an operation as it was called; operands that are given by name
    _repeated    what following came to, noted again for operations that are alike
    _examples    whose the rows of a tensor are
    _assigned    rows that the caller says it of
    _enclosed    tensors that functions take from where they were written
    _operations  operations by what they do to their operands; _names, under which users know them;
    _operators   those of ``torch.ops``, made the functions that users call
    _rowwise     which functions keep rows apart; of others nobody knows what they do
    _formats     memory formats that strides leave open
    _nested      nested tuples, lists and dicts

Where a parameter meets data
    _dispatch    what happens to an operation that touches a tracked tensor
    _refusals    the error where nothing is known of it, and the remedy
    rules/       one file for each family of operations
    _registered  users' own operations
    _uses        what all uses share, and how their factors reach the parameters
    _hooked      uses as a hook on the node of PyTorch's own operation; small ones are contracted
    _together    together; as autograd Functions:
    _linear      products with a weight matrix
    _convolution convolutions
    _normalization, _broadcast   normalisation layers, scales and shifts on chip
    _views, _product             everything that broadcasts; products index by index
    _recomputed  operations that backward takes apart: recurrent layers, whose gates have their
    _recurrence, _gates          gradients step by step, or on a GPU from one call
    _opened, _grafted            functions of PyTorch's taken apart; operations beside others
    _graph       nodes of autograd graphs that are known by their type
    _engine      the autograd engine

Compiled models
    _graphs      what the compiler calls in place of a graph that it recorded inside a context
    _followed    what such a graph consists of, followed while its backend traces it
    _skipped     functions that run as graphs outside of contexts alone
"""
