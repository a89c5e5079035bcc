"""Exact per-example gradient norms and inner products for unmodified PyTorch models.

A (batch, d) gradient is never materialised. After ``import gradstats as gs``, ``help`` on any of
these names gives its formula, arguments, cost and source:

    gs.per_example_norms    the gradient norm of every example of a batch
    gs.track                the same inside your own training step
    gs.inner_products       products of per-example gradients, between batches and checkpoints
    gs.alignment            products with the mean gradient or with a direction of your own
    gs.Checkpoints          the checkpoints of a training run, with their learning rates
    gs.self_influence       scores of every training example, beside its loss, margin and EL2N
    gs.influence            the influence of every training example on every query
    gs.Monitor              norms, noise scale and alignment while training; gs.monitor.plot
    gs.verify               a check of all this on your own model
    gs.register_rule        support for your own operations
    gs.assign_rows          support for data whose rows are assigned to examples by an index
    gs.errors               every error that is raised, and when

Callbacks for trainers are in ``gradstats.integrations.lightning`` and
``gradstats.integrations.transformers``.
"""

from gradstats import monitor as monitor
from gradstats.capture._registered import register_rule as register_rule
from gradstats.capture.following._assigned import assign_rows as assign_rows
from gradstats.errors import BackendError as BackendError
from gradstats.errors import CheckpointError as CheckpointError
from gradstats.errors import CoupledExamplesError as CoupledExamplesError
from gradstats.errors import CoverageError as CoverageError
from gradstats.errors import ExampleAxisError as ExampleAxisError
from gradstats.errors import GradStatsError as GradStatsError
from gradstats.errors import GradStatsWarning as GradStatsWarning
from gradstats.errors import LoaderError as LoaderError
from gradstats.errors import LossShapeError as LossShapeError
from gradstats.errors import MissingPackageError as MissingPackageError
from gradstats.errors import NonFiniteGradientError as NonFiniteGradientError
from gradstats.errors import ScoreError as ScoreError
from gradstats.errors import StoreError as StoreError
from gradstats.errors import TrackingError as TrackingError
from gradstats.errors import UnsupportedOperationError as UnsupportedOperationError
from gradstats.monitor import Monitor as Monitor
from gradstats.scoring._checkpoints import Checkpoints as Checkpoints
from gradstats.scoring._influence import influence as influence
from gradstats.scoring._scores import InfluenceScores as InfluenceScores
from gradstats.scoring._self_influence import self_influence as self_influence
from gradstats.scoring._table import SelfInfluence as SelfInfluence
from gradstats.scoring._top import TopScores as TopScores
from gradstats.statistics._alignment import alignment as alignment
from gradstats.statistics._inner_products import inner_products as inner_products
from gradstats.statistics._norms import per_example_norms as per_example_norms
from gradstats.statistics._norms import track as track
from gradstats.statistics._result import GradientNorms as GradientNorms
from gradstats.statistics._verify import verify as verify
from gradstats.statistics._verify_report import VerifyReport as VerifyReport

__version__ = "0.1.0"
