"""Gradient statistics of a training run.

_layers     groups of parameters by a pattern
_ranks      what several processes tell each other
_measured   one measured optimizer step on the host
_arguments  what a caller may pass
_step       one optimizer step being measured, until it goes to the host in one copy
_context    the context around one forward and backward
_metrics    the metrics of one step
_records    what is said about single examples
_run        what is remembered over the measured steps: averages, spikes, history
_monitor    the public face: which steps are measured
_plot       pictures of a run
"""

from gradstats.monitor._monitor import Monitor as Monitor
from gradstats.monitor._plot import plot as plot
from gradstats.monitor._records import ExampleRecord as ExampleRecord
from gradstats.monitor._records import RunningSelfInfluence as RunningSelfInfluence
from gradstats.monitor._records import Spike as Spike
