"""Per-example gradient norms and inner products, and what follows from these two alone.

_arguments      checks of the caller's arguments
_batches        batches: searched, copied, converted to another precision
_division       how they divide into examples
_state          side effects of a forward, and undoing them; _surroundings those on attributes
                and containers of modules
_loss           losses, example axes and weights, checked
_backward       the forward and backward behind every function that is given a loss function
_result         GradientNorms, and how it is made from a backward's reports
_norms          per_example_norms, and track inside a training step
_fallback       parameters without a rule, one example at a time
_kept           a batch's gradients kept as factors, and their products with another batch's
_inner_products, _alignment    products of two batches, and with a direction
_training       statistics of a training step: noise scale, diversity, coherence, tests
_reference      plain autograd, one example at a time
_differentiable torch.autograd.grad on models that are meant for backward()
_elsewhere      whether an example is the same in another batch
_verify, _verify_report    checks on the user's own model, and their report
"""
