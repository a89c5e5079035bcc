"""Find flipped labels among scikit-learn's digits, by self-influence and by cheaper scores.

_command     the command line and the files it writes
_settings    the numbers of a run
_data, _training     digits with flipped labels; a model and its checkpoints
_experiment  the run and its scores
_report, _pictures   the printed report and the CSV file; the figures
"""

from gradstats.demo._command import add_command as add_command
from gradstats.demo._command import run_demo as run_demo
from gradstats.demo._settings import DemoError as DemoError
from gradstats.demo._settings import Settings as Settings
