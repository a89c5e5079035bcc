"""Scores of whole data sets: self-influence and influence over a run's checkpoints.

_checkpoint_files, _rates, _checkpoints    reading checkpoints, and their learning rates
_borrowed       lending the user's model to other weights; _renewal what it keeps of them
_surroundings   what modules hold beside the numbers of their tensors, put back as it was
_weights        checkpoints fitted to the model, and loaded
_content, _loaders, _batches    data that are read several times, and recognised
_layout         where the examples of their batches lie
_work           a model with its loss, and the options of a call
_recognition    telling checkpoints, models and losses apart
_tiles, _folder    results on disk that a killed call goes on with
_memory         going on with smaller batches
_ranks          what several processes do together
_stream         train × query products, a tile at a time
_estimate       what all tiles take, from one of them
_top            the strongest examples without the matrix, and what is returned of them
_passes, _influence    influence; _scores what it returns, _rankings who helps and harms
_confidence     margin and EL2N, seen while losses run
_self_influence    self-influence; _table what it returns
_metrics, _pictures    how well a score finds known errors; figures
"""
