"""Loss functions that several tests use: unreduced losses (B,) of a model on a batch (x, y)."""

from torch.nn import functional


def losses_of(model, batch):
    """Cross-entropies of a classifier."""
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def mean_square(model, batch):
    """Losses of a model whose outputs are squared and averaged."""
    output = model(batch[0]).flatten(1)
    return functional.mse_loss(output.square().mean(1), batch[1], reduction="none")
