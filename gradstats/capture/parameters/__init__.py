"""Tracked tensors: parameters, and what is computed from them alone.

Terms
    root         a parameter of the model inside a context
    derived      computed from parameters and constants alone, so that it belongs to no example yet
    node         what stands for either of them: where it comes from, and its value
    use          an operation of a tracked tensor and data; it delivers a factor in the backward
    pulling back turning a factor of a derived tensor into factors of its roots
    lean         said of a factor that is no larger than the data it is made of; per-example
                 gradients of the parameter's size are not lean
    alias        the plain tensor through which all uses read a parameter

Modules
_nodes       parameters (roots), and what their uses have delivered
_derivation  derived tensors, and how to compute them again
_tensors     the tensor classes whose operations are seen
_attributes  tensors in plain attributes of modules
_refusals    the errors for unsupported operations, with remedies
_derived     operations on parameters and constants alone, also in place
_functions   custom autograd Functions of parameters alone, made visible as operations
_transforms  torch.vmap, made visible; refusals of what other torch.func transforms hide
_differentiated  torch.func.grad, vjp and jvp, by plain autograd
_branches    torch.cond, replaced by the branch that it takes
_scripts     functions of TorchScript, made visible as operations
_checkpoints activation checkpoints
_replay      a derived tensor computed again, to pull gradients back through it
_drawn       random operations, repeated with the same random numbers
_watched     hooks that the user's code has set on autograd nodes
_slices      parameters repeated for the batch, whose slices are treated as data
_lineage     pulling a derived tensor's factors back to its parameters; _parts: several uses at once
_lean_steps, _lean_products, _lean_reductions, _lean_normalisations, _lean_selections
             the steps back that keep factors lean
_consumers   what a backward computes from factors besides norms
"""
