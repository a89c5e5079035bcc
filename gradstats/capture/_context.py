"""What operations, rules and uses ask of their context."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node as GraphNode

from gradstats._factors import Segments
from gradstats.capture._reports import Reports
from gradstats.capture._visibility import Visibility
from gradstats.capture.following._examples import Examples, Scores
from gradstats.capture.following._marks import Marks
from gradstats.capture.following._returned import Functions
from gradstats.capture.parameters._derivation import Derived
from gradstats.capture.parameters._nodes import Root
from gradstats.capture.rules import RULES, is_registered
from gradstats.capture.uses._decided import Decided
from gradstats.capture.uses._dispatch import run_on_tracked
from gradstats.capture.uses._grafted import Grafted
from gradstats.capture.uses._together import Together
from gradstats.capture.uses._uses import Settings
from gradstats.contractions._triton import BACKEND_VARIABLE


class Context:
    """Follows the uses of some parameters: a model's for one batch, or those of one graph.

    Attributes:
        batch_size, batch_dim: as the caller gave them.
        marks: what is noted about tensors that are not tracked.
        functions: the autograd Functions that run inside the context.
        settings: what the context asks of the uses.
        asked: the settings, the context's and PyTorch's, that rules depend on.
        roots, reports: the parameters, and what they report.
        modules: the model and its submodules; empty if a graph is followed.
        closed: whether the context has ended.
        derived: whether any tensor was derived from parameters.
        derived_from_leaves: whether one was derived with the help of an untracked tensor that
            requires grad and belongs to no example.
        shown: autograd node → tracked tensor. The user's code holds a tensor with this node in the
            tracked tensor's place; a use that was not seen has an edge to such a node.
        visible: derived tensors that the user's code may still hold.
        shows_graph: whether the user's code has asked for autograd nodes, and may have set hooks.
        transformed_nodes: those of functions under transforms; see ``hook_in_transform``.
        trains: whether gradients of parameters are formed, for training or for such hooks.
        renumbered: (autograd node, index of the result) of each tensor that was given other values
            through ``.data`` → the sequence number of the first node made afterwards.
        first_node: the sequence number of the first autograd node made inside the context.
        together: the small operations that wait for each other.
        visibility: whether the context sees everything; None if nothing can hide from it.
        followed: the last result of a rule that has already noted where its examples lie, so that
            the mode need not follow it.
        decided: what the last rule decided, if that can be repeated; None once it was read.
        maps_examples: whether the running torch.vmap maps everything it was given over examples;
            None if no torch.vmap runs.
        maps_data: whether the function of that torch.vmap has used data that it was not given.
        slicewise: whether the function of a torch.vmap runs slice by slice.
        transformed: whether a function is running that a torch.func transform differentiates.
        along_tangents: whether that transform is torch.func.jvp.
        fetching: how many nested DataLoaders are fetching inside the context.
        weight: the weight of every example's loss in the training loss; None if they differ.
        rules: operation of parameters and data → rule.
        dispatch: runs an operation on at least one tensor of this context.
        form: a key of everything that a recorded graph depends on; empty if no graph may run.
    """

    roots: list[Root]
    reports: Reports
    modules: Sequence[nn.Module] = ()
    visibility: Visibility | None = None
    followed: Any = None
    decided: Decided | None = None
    maps_examples: bool | None = None
    maps_data = False
    slicewise = False
    transformed = False
    along_tangents = False
    fetching = 0
    closed = False
    derived = False
    derived_from_leaves = False
    weight: float | None = 1.0
    shows_graph = False
    first_node = 0
    form = ""
    rules: Mapping[Any, Any] = RULES
    dispatch = run_on_tracked

    def __init__(
        self, batch_size: int, batch_dim: int, segments: Segments | None, settings: Settings
    ):
        self.batch_size, self.batch_dim = batch_size, batch_dim
        self.marks = Marks(batch_size, batch_dim, segments)
        self.functions = Functions(self.marks)
        self.settings, self.trains = settings, settings.weight_gradients
        self.asked = (
            (settings.weight_gradients, settings.fused, settings.consumer is None),
            (torch.get_num_threads(), torch._C._get_mkldnn_enabled()),
            # Read only if CUDA is in use: it matters nowhere else, and reading it is slow.
            os.environ.get(BACKEND_VARIABLE) if torch.cuda.is_initialized() else None,
        )
        self.shown: dict[GraphNode | None, Derived | Root] = {}
        self.visible: dict[Derived, None] = {}
        self.renumbered: dict[tuple[GraphNode, int], int] = {}
        self.transformed_nodes: list[GraphNode] = []
        self.together = Together(settings)

    def registered(self, func) -> Grafted | None:
        """Return the rule that a user registered for an operation, if any."""
        return RULES[func] if is_registered(func) else None

    def note_followed(self, result: Tensor, examples: Examples) -> None:
        """Note where the examples lie in a rule's result, so that it need not be followed."""
        if examples.segments is not None or isinstance(examples, Scores):
            return  # the mode follows packed rows, and what the columns of scores become
        if examples is not self.marks.contract:
            self.marks.place(result, examples)
        self.followed = result

    def note_training(self, tensor: Tensor, trained: bool) -> None:
        """Stop tracking a parameter that is being frozen; resume when it requires grad again."""
        raise NotImplementedError

    def expect_compiler(self) -> None:
        """Run what is compiled from now on as this context can follow it."""

    def watching(self) -> Any:
        """Return the context's mode, for code that runs while it is off."""
        raise NotImplementedError

    def check_known(self, leaves: Sequence[Tensor]) -> None:
        """Raise for leaves of the graph that should be tracked and are not."""

    def keeps_values(self, roots: Sequence[Root]) -> bool:
        """Whether parameters have the same values after the backward as in the forward."""
        return False

    def is_backward_of_losses(self) -> bool:
        """Whether the running backward is that of the losses, not of an inner autograd.grad."""
        raise NotImplementedError
