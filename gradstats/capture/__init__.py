"""Capture: from a parameter's use in the user's forward to factors, and back as statistics.

_nodes       what is tracked: parameters (roots) and what is computed from them alone (derived)
_tensors     the tensor classes whose operations are seen
_lineage     pulling a derived tensor's factors back to its parameters
_constants   which other tensors belong to no example
_layout      where the examples lie in tensors of data
_sharded     parameters that fully_shard shards
_dispatch    what happens to an operation that touches a tracked tensor
rules/       one file for each family of operations
_uses        the autograd Functions that turn output gradients into factors
_tracker     one context: entering, leaving, coverage, results
"""
