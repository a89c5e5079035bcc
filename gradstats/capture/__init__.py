"""Capture: from a parameter's use in the user's forward to factors, and back as statistics.

_nodes       what is tracked: parameters (roots) and what is computed from them alone (derived)
_tensors     the tensor classes whose operations are seen
_functions   custom autograd Functions of parameters alone, made visible as operations
_replay      a derived tensor computed again, to pull gradients back through it
_lineage     pulling a derived tensor's factors back to its parameters
_constants   which other tensors belong to no example
_data        whose every row of a tensor of data is, followed with the rules of
_layout      where the examples lie after each operation
_rowwise     which operations keep rows apart; of others nobody knows what they do
_opened      functions of PyTorch's own, taken apart into the operations in them
_sequences   the same for attention, recurrent layers, packed sequences and sorts
_formats     memory formats that strides leave open
_selection   which parameters are measured
_sharded     parameters that fully_shard shards
_dispatch    what happens to an operation that touches a tracked tensor
rules/       one file for each family of operations
_uses        what the autograd Functions share that turn output gradients into factors; they are
_linear      products with a weight matrix
_convolution convolutions
_views       everything that broadcasts
_recomputed  operations that backward takes apart
_grafted     operations as they are, beside others that are tracked in their stead
_registered  users' own operations
_consumers   what is done with the factors beside norms
_coverage    what the autograd graph says about uses that were not seen
_survey      one forward that finds out what happens to every parameter
_tracker     one context: entering, leaving, coverage, results
"""
