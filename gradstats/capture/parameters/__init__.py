"""Tracked tensors: parameters, and what is computed from them alone.

_nodes       parameters (roots), and what their uses have delivered
_derivation  tensors computed from them alone (derived), and how to compute these again
_tensors     the tensor classes whose operations are seen
_attributes  tensors that modules keep in plain attributes
_refusals    the errors for unsupported operations, with remedies
_derived     operations on parameters and constants alone, in place or not
_functions   custom autograd Functions of parameters alone, made visible as operations
_transforms  torch.vmap, made visible; other transforms of torch.func
_branches    torch.cond, run as the branch that it takes
_scripts     functions of TorchScript, made visible as operations
_checkpoints activation checkpoints
_replay      a derived tensor computed again, to pull gradients back through it
_drawn       operations that draw random numbers, drawn again
_slices      parameters repeated for the batch, whose slices are treated as data
_lineage     pulling a derived tensor's factors back to its parameters; _parts: several uses at once
_lean_steps, _lean_products, _lean_reductions, _lean_normalisations, _lean_selections
             the steps back that keep factors lean
_consumers   what is done with factors besides norms
"""
