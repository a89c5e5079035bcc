"""Weights that transformers and peft save under other names than the model's own."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradstats.capture._selection import matching_names, wrapper_prefix


def in_own_names(model: nn.Module, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a checkpoint's weights by the model's names, where its library saved others."""
    inner = model.get_submodule(wrapper_prefix(model).rstrip("."))
    names = matching_names(saved, own := inner.state_dict().keys())
    weights = {names[name]: value for name, value in saved.items()}
    if weights.keys() <= own:
        return saved
    modelling, peft = (sys.modules.get(name) for name in ("transformers.modeling_utils", "peft"))
    found = None
    if peft is not None and isinstance(inner, peft.PeftModel):
        found = _with_adapters(inner, weights, peft)
    elif modelling is not None and isinstance(inner, modelling.PreTrainedModel):
        found = _loaded(inner, weights, modelling.logging)
    return saved if found is None else found


def _with_adapters(model: Any, weights: dict[str, Any], peft: Any) -> dict[str, Any] | None:
    """Return a state dict with peft's adapters, None where these are not all that is trained.

    The rest is the model's own: peft applies adapters to whatever model they are given.
    """
    state, adapter = model.state_dict(), model.active_adapters[0]
    saved = peft.get_peft_model_state_dict(
        model, state, adapter_name=adapter, save_embedding_layers=False
    )
    names = {id(value): name for name, value in state.items()}
    own = {name: names.get(id(value), "") for name, value in saved.items()}
    # Of a prompt peft saves the values: a copy of a table, where no network makes them.
    if "prompt_embeddings" in own:
        own["prompt_embeddings"] = f"prompt_encoder.{adapter}.embedding.weight"
    # Embeddings that adapters were put on are saved with these, under their own names.
    others = {name: value for name, value in weights.items() if name not in saved}
    held = {own[name]: value for name, value in weights.items() if name in saved}
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    if not (own.keys() <= weights.keys() and others.keys() <= state.keys() - held.keys()):
        return None
    return {**state, **others, **held} if trained <= held.keys() <= state.keys() else None


def _loaded(model: Any, weights: dict[str, Any], logging: Any) -> dict[str, Any] | None:
    """Return the state dict of a copy with these weights, None where they do not fit.

    ``save_pretrained`` gives the weights of many models (ViT, Swin) the names, and those of experts
    (Mixtral) the shapes, that they had in earlier versions, and ``from_pretrained`` knows them.
    """
    floating = [
        value.dtype
        for value in weights.values()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)  # names that do not fit are an error of our own
    try:
        made, misfits = _made_as(model).from_pretrained(
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
    return None if any(misfits.values()) else made.state_dict()


def _made_as(model: Any) -> Any:
    """Return a class that makes, of whatever arguments, a copy of a model without its numbers.

    A model may have been changed since it was made, such as by another head, and its class may need
    other arguments than a configuration.
    """
    empty = copy.deepcopy(
        model,
        {
            id(each): nn.Parameter(each.detach().to("meta"), requires_grad=each.requires_grad)
            for each in model.parameters()
        }
        | {id(each): each.to("meta") for each in model.buffers()},
    )
    empty._keys_to_ignore_on_load_missing = None  # these would be made up
    return type(type(model).__name__, (type(model),), {"__new__": lambda *_, **__: empty})
