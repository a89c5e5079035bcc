"""Find flipped labels among scikit-learn's digits, by self-influence and by cheaper scores.

_command     the command line, and what is written where
_settings    what is run, in numbers
_data, _training     digits with flipped labels; a model and its checkpoints
_experiment  the run and its scores
_report, _pictures   what is said and drawn of it
"""

from gradstats.demo._command import add_command as add_command
from gradstats.demo._command import run_demo as run_demo
from gradstats.demo._settings import DemoError as DemoError
from gradstats.demo._settings import Settings as Settings
