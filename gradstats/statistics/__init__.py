"""Per-example gradient norms and inner products, and what follows from these two alone.

_arguments      checks of the caller's arguments
_batches        searching and copying batches, and converting them to another precision
_division       how a batch divides into examples
_state          side effects of a forward, and undoing them; _surroundings for the attributes of
                modules and the containers in these
_loss           checks of losses, example axes and weights
_backward       the forward and backward behind every function that is given a loss function
_result         GradientNorms, and how it is made from what a backward reports
_norms          per_example_norms, and track for training steps
_fallback       parameters without a rule, one example at a time
_kept           a batch's gradients kept as factors, and their products with another batch's
_inner_products, _alignment    products of two batches, and products with a direction
_training       statistics of a training step: noise scale, diversity, coherence, tests
_reference      plain autograd, one example at a time
_differentiable torch.autograd.grad on models that are meant for backward()
_elsewhere      whether an example is the same in another batch
_verify, _verify_report    checks of the user's own model, and their report
"""
