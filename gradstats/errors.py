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
    """It is not known which rows of a tensor belong to which example."""


class CoupledExamplesError(GradStatsError):
    """An operation mixes the examples of a batch, so per-example gradients do not exist."""


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
