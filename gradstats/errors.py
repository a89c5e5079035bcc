"""The errors of gradstats: each says what happened, what was got and expected, and what to do."""

from collections.abc import Sequence


class GradStatsError(Exception):
    """Base of every error that gradstats raises on purpose.

    Attributes:
        parameters: names of the parameters whose gradient could not be had; empty for other errors.
    """

    def __init__(self, message: str, parameters: Sequence[str] = ()):
        super().__init__(message)
        self.parameters = tuple(parameters)


class LossShapeError(GradStatsError):
    """The loss is not a vector of one unreduced, differentiable loss per example."""


class ExampleAxisError(GradStatsError):
    """A tensor does not say which of its rows belong to which example."""


class CoupledExamplesError(GradStatsError):
    """An operation mixes the examples of a batch, so per-example gradients do not exist."""


class UnsupportedOperationError(GradStatsError):
    """A parameter meets data in an operation for which no exact rule exists."""


class CoverageError(GradStatsError):
    """A parameter's gradient would be missing from, or counted twice in, the statistics."""


class NonFiniteGradientError(GradStatsError):
    """A per-example gradient contains NaN or infinity."""


class BackendError(GradStatsError):
    """The contractions cannot run on this device as the machine is set up."""


class TrackingError(GradStatsError):
    """A tracking context was used in a way that it cannot serve."""


class CheckpointError(GradStatsError):
    """A checkpoint cannot be read, does not fit the model, or has no learning rate."""


class LoaderError(GradStatsError):
    """A data loader does not say which example is which, or cannot be read again."""


class StoreError(GradStatsError):
    """What is on disk does not belong to this call, cannot be read, or cannot be written."""


class ScoreError(GradStatsError):
    """Scores were asked for something that they cannot answer."""


class MissingPackageError(GradStatsError):
    """A package that only some results need cannot be imported."""


class GradStatsWarning(UserWarning):
    """A result is as asked for, and may not mean what it seems to mean."""
