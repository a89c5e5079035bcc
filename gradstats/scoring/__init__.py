"""Scores of whole data sets: self-influence and influence over a run's checkpoints."""
