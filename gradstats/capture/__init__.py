"""Capture: from a parameter's use in the user's forward to factors, and back as statistics.

    operations/  PyTorch's operations, modes and graphs, classified
    parameters/  tracked tensors: parameters, and what is computed from them alone
    following/   all other tensors: constants, and where the examples lie in data
    uses/        how an operation of a parameter and data delivers factors
    rules/       which use an operation is; one file for each family of operations
    compiled/    compiled models

One context
    _tracker     opening and closing it, its backward
    _mode        its function mode, which sees every operation
    _context     what operations, rules and uses ask of it
    _selection   which parameters are measured, and the names by which users know them
    _tracking    which are tracked while it is open: frozen, unfrozen and new ones
    _sharded     parameters that fully_shard shards
    _registered  users' own operations
    _coverage    the walk over the losses' graph, which finds uses that were not seen
    _visibility  whether it sees everything: its thread, later contexts, loaders
    _loaders     batches that are fetched inside it
    _replaced    what of PyTorch is replaced so that contexts see it
    _survey      one forward that records what happens to every parameter
    _reports     from the factors of all uses to squared norms
"""
