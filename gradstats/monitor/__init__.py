"""Gradient statistics of a training run.

_layers     groups of parameters by patterns
_rates      learning rates of the optimizers
_gradients  the gradients that backwards leave in .grad
_ranks      communication between processes
_measured   one measured optimizer step on the host
_arguments  checks of the caller's arguments
_step       one optimizer step being measured, until one copy takes it to the host
_context    the context around one forward and backward
_metrics    the metrics of one step
_records    records of single examples
_run        averages, spikes and history over the measured steps
_monitor    the public class: which steps are measured
_plot       figures of a run
"""

from gradstats.monitor._monitor import Monitor as Monitor
from gradstats.monitor._plot import plot as plot
from gradstats.monitor._records import ExampleRecord as ExampleRecord
from gradstats.monitor._records import RunningSelfInfluence as RunningSelfInfluence
from gradstats.monitor._records import Spike as Spike
