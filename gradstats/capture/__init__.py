"""Capture: from a parameter's use in the user's forward to factors, and back as statistics.

    operations/  PyTorch's operations, modes and graphs, classified
    parameters/  tracked tensors: parameters, and what is computed from them alone
    following/   all other tensors: constants, and where the examples lie in data
    uses/        how an operation on a parameter and data delivers factors
    rules/       which use an operation is; one file for each family of operations
    compiled/    compiled models

A tracking context
    _tracker     opening and closing a context, and its backward
    _mode        the context's function mode, which sees every operation
    _context     what operations, rules and uses ask of a context
    _selection   which parameters are measured, and the names by which users know them
    _tracking    which are tracked while a context is open: frozen, unfrozen and new parameters
    _sharded     parameters that fully_shard shards
    _registered  rules for users' own operations
    _coverage    the walk over the losses' graph, which finds uses that were not seen
    _visibility  whether a context sees everything: threads, later contexts, loaders
    _loaders     batches that are fetched inside a context
    _replaced    the functions of PyTorch that are replaced so that contexts see them
    _survey      a forward that records what happens to every parameter
    _reports     from the factors of all uses to squared norms
"""
