"""What is tracked: parameters, and what is computed from them alone.

_nodes       parameters (roots), and what their uses have delivered
_derivation  what is computed from them alone (derived), and how to compute it again
_tensors     the tensor classes whose operations are seen
_attributes  what modules keep in plain attributes
_refusals    the error where nothing is known of an operation on them, and the remedy
_derived     operations on parameters and constants alone, in place or not
_functions   custom autograd Functions of parameters alone, made visible as operations
_transforms  torch.vmap, made visible; other transforms of torch.func
_scripts     functions of TorchScript, made visible as operations
_checkpoints activation checkpoints
_replay      a derived tensor computed again, to pull gradients back through it
_drawn       operations that draw random numbers, drawn again
_slices      what was repeated for the batch, pulled back as data are
_lineage     pulling a derived tensor's factors back to its parameters; _parts those of several
             uses at once
_lean_steps, _lean_products, _lean_reductions, _lean_normalisations, _lean_selections  the steps
             of that way that keep factors lean
_consumers   what is done with the factors beside norms
"""
