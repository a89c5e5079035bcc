"""Per-example gradient norms and inner products, and what follows from these two alone.

_arguments      what a caller may pass
_batches        batches: looked into, divided into examples, in another precision
_state          what a forward changes without being asked
_loss           losses, example axes and weights, checked
_backward       the forward and backward behind every function that is given a loss function
_result         GradientNorms, and how it is made of what a backward reported
_norms          per_example_norms, and track inside a training step
_fallback       parameters without a rule, one example at a time
_kept           the gradients of a batch kept as factors, and their products with another batch's
_inner_products, _alignment    products of two batches, and with a direction
_training       statistics of a training step: noise scale, diversity, coherence, tests
_reference      plain autograd, one example at a time
_differentiable the same of models that are trained by backward()
_elsewhere      whether an example is the same in another batch
_verify, _verify_report    both on the user's own model, and the report
"""
