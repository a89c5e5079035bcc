"""Find flipped labels among scikit-learn's digits, by self-influence and by cheaper scores."""

from gradstats.demo._command import add_command as add_command
from gradstats.demo._command import run_demo as run_demo
from gradstats.demo._settings import DemoError as DemoError
from gradstats.demo._settings import Settings as Settings
