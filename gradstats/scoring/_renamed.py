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
    """Return a checkpoint's weights under the model's names, if its library saved other ones."""
    inner = model.get_submodule(wrapper_prefix(model).rstrip("."))
    own_names = inner.state_dict().keys()
    names = matching_names(saved, own_names)
    weights = {names[name]: value for name, value in saved.items()}
    if weights.keys() <= own_names:
        return saved
    modelling, peft = (sys.modules.get(name) for name in ("transformers.modeling_utils", "peft"))
    found = None
    if peft is not None and isinstance(inner, peft.PeftModel):
        found = _with_adapters(inner, weights, peft)
    elif modelling is not None and isinstance(inner, modelling.PreTrainedModel):
        found = _loaded(inner, weights, modelling.logging)
    return saved if found is None else found


def _with_adapters(model: Any, weights: dict[str, Any], peft: Any) -> dict[str, Any] | None:
    """Return a state dict with peft's adapters; None if they are not all that is trained.

    All other weights are the model's: peft applies adapters to whatever model it is given.
    """
    state, adapter = model.state_dict(), model.active_adapters[0]
    saved = peft.get_peft_model_state_dict(
        model, state, adapter_name=adapter, save_embedding_layers=False
    )
    names = {id(value): name for name, value in state.items()}
    own_names = {name: names.get(id(value), "") for name, value in saved.items()}
    # Of a prompt peft saves the values: a copy of a table, unless a network makes them.
    if "prompt_embeddings" in own_names:
        own_names["prompt_embeddings"] = f"prompt_encoder.{adapter}.embedding.weight"
    adapters = {own_names[name]: value for name, value in weights.items() if name in saved}
    # Embeddings below adapters are saved with them, under the model's names.
    below = {name: value for name, value in weights.items() if name not in saved}
    named = [*model.named_parameters(remove_duplicate=False)]
    loaded = {id(each) for name, each in named if name in adapters}
    if (
        not own_names.keys() <= weights.keys()
        or not below.keys() <= state.keys() - adapters.keys()
        or not adapters.keys() <= state.keys()
        or any(each.requires_grad and id(each) not in loaded for _, each in named)
    ):
        return None
    # Tied adapters are saved once; the model's values under other names are those of before.
    tied = {name for name, each in named if id(each) in loaded} - adapters.keys()
    return {name: value for name, value in state.items() if name not in tied} | below | adapters


def _loaded(model: Any, weights: dict[str, Any], logging: Any) -> dict[str, Any] | None:
    """Return the state dict of a copy with these weights; None if they do not fit.

    ``save_pretrained`` saves many models (ViT, Swin) under the names, and experts (Mixtral) in the
    shapes, of earlier versions; ``from_pretrained`` converts them.
    """
    floating = [
        value.dtype
        for value in weights.values()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)  # the caller has an error for names that do not fit
    try:
        made, misfits = _made_as(model).from_pretrained(
            None,
            config=copy.deepcopy(model.config),
            state_dict=weights,
            # Whatever the configuration says, no digits are lost.
            dtype=functools.reduce(torch.promote_types, floating, torch.float32),
            output_loading_info=True,
        )
    except Exception:  # of any class: the weights do not fit, as the caller's error says
        return None
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
    return None if any(misfits.values()) else made.state_dict()


def _made_as(model: Any) -> Any:
    """Return a class whose instances, whatever their arguments, are a copy of a model on "meta".

    The model's own class will not do: the model may have been changed since it was made, such as
    by a new head, and its class may need arguments beside a configuration.
    """
    empty = copy.deepcopy(
        model,
        {
            id(each): nn.Parameter(each.detach().to("meta"), requires_grad=each.requires_grad)
            for each in model.parameters()
        }
        | {id(each): each.to("meta") for each in model.buffers()},
    )
    empty._keys_to_ignore_on_load_missing = None  # missing weights would be made up
    return type(type(model).__name__, (type(model),), {"__new__": lambda *_, **__: empty})
