"""Caches that a model computes from its weights in eval mode, and renewing them.

Some models in eval mode cache what they compute from their parameters, such as relative positions.
At another checkpoint's weights the cache would be wrong, and a cache that is part of one forward's
graph cannot be differentiated in the next. Such models drop their caches when the mode is set to
training and back. But this may do more: exchange weights, reset statistics, or lose calibrated
values. So it is tried out first, and done only if a batch has the same losses afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gradstats._comparison import half_the_digits, same_bits
from gradstats.capture._selection import quoted
from gradstats.capture.operations._memory import parts_of
from gradstats.capture.parameters._attributes import kept_by, tensors_kept
from gradstats.errors import CheckpointError
from gradstats.statistics._state import Versions
from gradstats.statistics._surroundings import Surroundings


class Renewal:
    """Makes a borrowed model drop what it computed from other weights."""

    def __init__(self) -> None:
        self._resets_mode = False
        self._surroundings: Surroundings | None = None

    def begin(self, surroundings: Surroundings) -> None:
        """Keep what a model holds before the first forward at a checkpoint's weights."""
        self._surroundings = surroundings

    def begin_anew(self) -> None:
        """Undo what forwards have cached since ``begin``: it belongs to other weights."""
        assert self._surroundings is not None
        self._surroundings.restore()

    def renew(self, model: nn.Module) -> None:
        """Set the mode to training and back, if in the trial this did nothing but drop caches."""
        if self._resets_mode:
            model.train(True)
            model.eval()

    def try_out(
        self,
        model: nn.Module,
        memory: Sequence[tuple[Tensor, Tensor]],
        losses: Callable[[], Tensor],
    ) -> None:
        """Find out what setting the mode of a model to training and back does, and undo it.

        Args:
            model: in eval mode.
            memory: each of its tensors with one that holds its original values.
            losses: computes the losses of a batch.

        Raises:
            CheckpointError: if eval mode changes weights that training mode changes back, or if
                setting the mode drops tensors that a forward makes again, but changes more.
        """
        surroundings = Surroundings(model)
        modes = [(module, module.training) for module in model.modules()]
        trained = [(each, each.requires_grad) for each in model.parameters()]
        dropped: set[str] = set()
        merged: list[Tensor] = []
        try:
            before = losses()
            parts, held = _parts(model), _tensors_held(model)
            versions = Versions((*model.parameters(), *model.buffers()))
            model.train(True)
            changed = [each for each, values in memory if not same_bits(each.detach(), values)]
            unmerged = [each.detach().clone() for each in changed]
            model.eval()
            pairs = zip(changed, unmerged, strict=True)
            merged = [each for each, values in pairs if not same_bits(each.detach(), values)]
            now = _tensors_held(model)
            dropped = held.keys() - now.keys()
            known = {id(tensor) for tensors in held.values() for tensor in tensors}
            # Setting the mode may have computed new tensors from the weights.
            made = any(id(tensor) not in known for tensors in now.values() for tensor in tensors)
            more = made or versions.changed or _parts(model) != parts
            self._resets_mode = _agree(losses(), before, model) and not more
        except Exception:  # of the user's code, such as a model that cannot be put in training mode
            pass
        made_again = dropped & _tensors_held(model).keys()
        surroundings.restore()
        for module, training in modes:
            module.training = training
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)
        for tensor, values in memory:
            if not same_bits(tensor.detach(), values):
                tensor.detach().copy_(values)
        if merged:
            raise merging(model, merged)
        if made_again and not self._resets_mode:
            raise CheckpointError(
                f"the model drops {quoted(sorted(made_again))} in training mode and computes it "
                "anew in eval mode, but its losses or parts also change, so it is not known what "
                "was computed from its weights. If these are caches of earlier weights, call "
                "model.train() and model.eval() before. If training mode changes something else "
                "too, prevent that."
            )


def merging(model: nn.Module, changed: Sequence[Tensor]) -> CheckpointError:
    """Return the error for a model whose tensors eval mode changes."""
    named = (*model.named_parameters(), *model.named_buffers())
    places = set(map(id, changed))
    names = [name for name, each in named if not places.isdisjoint(map(id, parts_of(each)))]
    return CheckpointError(
        f"model.eval() changes {quoted(names)}, so it would change a checkpoint's weights too. "
        "Expected weights that do not depend on the mode: do not merge adapters into them "
        "(loralib: merge_weights=False)."
    )


def _parts(model: nn.Module) -> list[object]:
    """Return identifiers of a model's modules and parameters, with which of these are trained."""
    trained = ((id(each), each.requires_grad) for each in model.parameters())
    return [*map(id, model.modules()), *trained]


def _tensors_held(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return the tensors in each buffer and plain attribute, by its name."""
    found = {name: [buffer] for name, buffer in model.named_buffers(remove_duplicate=False)}
    for path, module in model.named_modules():
        for name, held in kept_by(module).items():
            if tensors := tensors_kept(held):
                found[f"{path}.{name}".lstrip(".")] = tensors
    return found


def _agree(losses: Tensor, before: Tensor, model: nn.Module) -> bool:
    """Whether losses are the same up to rounding."""
    scale = before.where(before.isfinite(), 0).abs().max().item()
    bound = scale * half_the_digits(before, *model.parameters())
    return torch.allclose(losses, before, rtol=0, atol=bound, equal_nan=True)
