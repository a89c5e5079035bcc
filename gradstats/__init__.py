"""Exact per-example gradient norms for unmodified PyTorch models, without a (batch, d) gradient."""

from gradstats.errors import BackendError as BackendError
from gradstats.errors import CoupledExamplesError as CoupledExamplesError
from gradstats.errors import CoverageError as CoverageError
from gradstats.errors import ExampleAxisError as ExampleAxisError
from gradstats.errors import GradStatsError as GradStatsError
from gradstats.errors import LossShapeError as LossShapeError
from gradstats.errors import NonFiniteGradientError as NonFiniteGradientError
from gradstats.errors import TrackingError as TrackingError
from gradstats.errors import UnsupportedOperationError as UnsupportedOperationError
from gradstats.statistics._inner_products import alignment as alignment
from gradstats.statistics._inner_products import inner_products as inner_products
from gradstats.statistics._norms import per_example_norms as per_example_norms
from gradstats.statistics._norms import track as track
from gradstats.statistics._result import GradientNorms as GradientNorms

__version__ = "0.1.0"
