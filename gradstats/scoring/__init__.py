"""Scores of whole data sets: self-influence and influence over a run's checkpoints.

_checkpoint_files, _rates, _checkpoints    reading checkpoints, and their learning rates; _renamed
                names under which transformers and peft save them
_borrowed       lending the user's model to other weights; _renewal what it caches from them
_weights        checkpoints fitted to the model, and loaded
_content, _loaders    data that are read several times, and identified; _order what a loader's
                samplers choose, and its order; _batches where their examples lie
_work           a model with its loss, and the options of a call
_recognition    identifying checkpoints, models and losses
_tiles, _folder    results on disk, with which a killed call resumes
_memory         continuing with smaller batches when memory runs out
_usage          whether the losses use any of the parameters that are scored
_ranks          work shared by several processes
_stream         train × query products, a tile at a time, and an estimate of what all take
_top            the strongest examples without the matrix, and what is returned of them
_passes, _influence    influence; _scores what it returns, _rankings who helps and harms
_confidence     margin and EL2N, seen while losses run
_self_influence    self-influence; _table what it returns
_metrics, _pictures    how well a score finds known errors; figures
"""
