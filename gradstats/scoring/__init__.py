"""Scores of whole data sets: self-influence and influence over a run's checkpoints.

_checkpoint_files, _rates, _checkpoints    reading checkpoints and their learning rates; _renamed:
                the names under which transformers and peft save them
_borrowed       the user's model, borrowed for other weights; _renewal: what it caches from weights
_weights        fitting a checkpoint to the model, and loading it
_content, _loaders    data that are read several times, and identified; _order: which examples the
                batches of a loader hold; _batches: where their examples lie
_work           a model with its loss, and the options of a call
_recognition    identifying checkpoints, models and losses
_tiles, _folder    results on disk, from which a killed call resumes
_memory         continuing with smaller batches when memory runs out
_usage          whether the losses use any of the parameters that are scored
_ranks          work shared by several processes
_stream         train × query products, tile by tile, and an estimate of their cost
_top            the strongest examples without the matrix
_passes, _influence    influence; _scores: what it returns; _rankings: who helps and who harms
_confidence     margin and EL2N, seen while losses run
_self_influence    self-influence; _table: what it returns
_metrics, _pictures    how well a score finds known errors; figures
"""
