"""The errors of gradstats: each says what happened, what was expected, and what to do."""

from collections.abc import Sequence


class GradStatsError(Exception):
    """Base of every error that gradstats raises on purpose.

    Attributes:
        parameters: names of the parameters whose gradients could not be computed; else empty.
    """

    def __init__(self, message: str, parameters: Sequence[str] = ()):
        super().__init__(message)
        self.parameters = tuple(parameters)


class LossShapeError(GradStatsError):
    """The loss is not a vector of one unreduced, differentiable loss per example."""


class ExampleAxisError(GradStatsError):
    """It is not known which rows of a tensor belong to which example.

    Causes, and what to do about each:

    The number of examples is wrong.
        It is ``batch_size=`` of a context, elsewhere the size of the batch's first tensor along
        ``batch_dim=``, and for packed examples the number of segments of ``cu_seqlens=``.
    The examples lie along another axis than the first.
        Pass ``batch_dim=``. If only one input differs, such as a mask (B, T) beside (T, B, d), say
        so: ``gs.assign_rows(mask, torch.arange(B), 0)``.
    A constant was taken for data, because it has as many rows as there are examples.
        Keep it in the model (``register_buffer``; an attribute will do), or compute it inside the
        call if it is made of parameters. In a context, buffers of another module count as data
        whatever their size, such as those of a discriminator's spectral norms: open the context on
        ``torch.nn.ModuleList([model, other])`` with ``parameters="0.*"``.
    Zeros with a row for each example were joined to the examples' values.
        Make them from the batch, ``torch.zeros_like(x)``, as for the log-density of a flow.
    Examples were merged with positions, or moved in a way that is not followed.
        Keep the example axis as it is; take single examples as ``x[i : i + 1]``; put rows back by
        indexing.
    You know which example each row belongs to.
        Say so with ``gs.assign_rows``: for the edges of graphs; for ``x``, the i-th of a list with
        one tensor for each example, ``gs.assign_rows(x, torch.full((len(x),), i))``.
    None of these.
        ``per_example_norms(..., fallback="vmap")`` computes one example at a time, and
        ``exclude=`` leaves a parameter out.
    """


class CoupledExamplesError(GradStatsError):
    """An operation mixes the examples of a batch, so per-example gradients do not exist.

    Causes, and what to do about each:

    Batch normalisation in training mode.
        ``model.eval()``, ``.eval()`` on these layers alone, or GroupNorm in their place.
    A loss over pairs of examples or over the whole batch (contrastive losses).
        No gradient of one example exists. Detach what comes from other examples to take their
        values as given.
    Predictions (B, 1) beside targets (B,), which combine to (B, B).
        Give both one shape.
    A normaliser or a weight computed from all examples.
        Detach it, and write the loss as a sum, a mean or a weighted sum over the examples.
    A term that is a mean of one value for each example, such as a load-balancing loss.
        Add these values to the losses, or run the backward of one scalar inside ``gs.track``.
    A constant was taken for data.
        See ``help(gs.ExampleAxisError)``, which also says how to assign rows to examples.
    """


class UnsupportedOperationError(GradStatsError):
    """A parameter is used with data in an operation for which no exact rule exists."""


class CoverageError(GradStatsError):
    """A parameter's gradient would be missing from the statistics, or counted twice."""


class NonFiniteGradientError(GradStatsError):
    """A per-example gradient contains NaN or infinity."""


class BackendError(GradStatsError):
    """A package that the computation needs on this device is not installed."""


class TrackingError(GradStatsError):
    """A function or a tracking context was given or used in a way that it does not support."""


class CheckpointError(GradStatsError):
    """A checkpoint cannot be read, does not fit the model, or has no learning rate."""


class LoaderError(GradStatsError):
    """A data loader does not identify its examples, or cannot be read a second time."""


class StoreError(GradStatsError):
    """A results folder belongs to another call, or cannot be read or written."""


class ScoreError(GradStatsError):
    """Scores were asked for something that they do not hold, or in an invalid way."""


class MissingPackageError(GradStatsError):
    """An optional package that this call needs cannot be imported."""


class GradStatsWarning(UserWarning):
    """A result is what was asked for, but may not mean what it seems to."""
