"""Capture: from a parameter's use in the user's forward to factors, and back as statistics.

    operations/  PyTorch's operations, modes and graphs, by what they are
    parameters/  what is tracked: parameters, and what is computed from them alone
    following/   what is not: constants, and where the examples lie in data
    uses/        where a parameter meets data, and what its use delivers
    rules/       which use an operation is; one file for each family of operations
    compiled/    compiled models

One context
    _tracker     entering and leaving it, what it knows
    _mode        its function mode, which sees every operation
    _context     what operations, rules and uses ask of it
    _selection   which parameters are measured, and the names by which users know them
    _sharded     parameters that fully_shard shards
    _registered  users' own operations
    _coverage    what the autograd graph says about uses that were not seen
    _threads     the thread that a context belongs to
    _loaders     batches that are fetched inside of it
    _survey      one forward that finds out what happens to every parameter
    _reports     from the factors of all uses to squared norms
"""
