"""Weights that transformers saves under other names than the model's own."""

from __future__ import annotations

import copy
import functools
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradstats.capture._selection import matching_names, wrapper_prefix
from gradstats.scoring._checkpoints import Checkpoint


def in_own_names(model: nn.Module, checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the names of the model, where transformers saved it under others.

    ``save_pretrained`` gives the weights of many models (ViT, Swin) the names, and those of experts
    (Mixtral) the shapes, that they had in earlier versions. ``from_pretrained`` knows them all. It
    makes a second model, of which only the weights are taken, and only if every one was given.
    """
    modelling = sys.modules.get("transformers.modeling_utils")
    inner = model.get_submodule(wrapper_prefix(model).rstrip("."))
    if modelling is None or not isinstance(inner, modelling.PreTrainedModel):
        return checkpoint
    names = matching_names(checkpoint.weights, own := inner.state_dict().keys())
    weights = {names[name]: value for name, value in checkpoint.weights.items()}
    if weights.keys() <= own:
        return checkpoint
    found = _loaded(inner, weights, modelling.logging)
    return checkpoint if found is None else replace(checkpoint, weights=found)


def _loaded(model: Any, weights: dict[str, Any], logging: Any) -> dict[str, Any] | None:
    """Return the state dict of a new model with these weights, None where they do not fit."""
    dtypes = [value.dtype for value in weights.values() if isinstance(value, Tensor)]
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)  # names that do not fit are an error of our own
    try:
        made, misfits = type(model).from_pretrained(
            None,
            config=copy.deepcopy(model.config),
            state_dict=weights,
            # No digits are lost, whatever the configuration says.
            dtype=functools.reduce(torch.promote_types, floating, torch.float32),
            output_loading_info=True,
        )
    except Exception:  # of whichever class: the names do not fit, which the caller says
        return None
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
    state = made.state_dict()
    # Some classes initialise what is missing without a word. No conversion changes the count.
    own = {value.data_ptr(): value.numel() for value in state.values()}
    given = sum(value.numel() for value in weights.values() if isinstance(value, Tensor))
    return None if any(misfits.values()) or sum(own.values()) > given else state
