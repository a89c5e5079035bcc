"""Scores of whole data sets: self-influence, and influence between examples, over the checkpoints of a training run."""
