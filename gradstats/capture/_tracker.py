"""Tracking contexts: opening and closing them, and their backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.autograd.graph import Node as GraphNode

from gradstats._compiler import called_from_compiled, running_eagerly
from gradstats._factors import Segments
from gradstats.capture._context import Context
from gradstats.capture._coverage import (
    check_coverage,
    check_data,
    is_in_unseen_checkpoint,
    leaves_of,
    unseen_checkpoint,
)
from gradstats.capture._mode import FollowingMode
from gradstats.capture._replaced import replace_in_compiler, replace_in_pytorch
from gradstats.capture._reports import ONE_OF_SEVERAL, Reports
from gradstats.capture._selection import anatomy_of
from gradstats.capture._tracking import Tracking
from gradstats.capture._visibility import Visibility
from gradstats.capture.compiled._graphs import admits
from gradstats.capture.compiled._skipped import skipping
from gradstats.capture.compiled._used import compiler_is_used, graphs_run_on
from gradstats.capture.following._enclosed import caches_of
from gradstats.capture.following._losses import check_start, order_of
from gradstats.capture.operations._engine import (
    BackwardListener,
    gradients_aside,
    run_backward,
    without_hooks,
)
from gradstats.capture.operations._graph import nodes_behind
from gradstats.capture.operations._nested import tensors_in
from gradstats.capture.parameters._attributes import kept_by, restore_attributes, tensors_kept
from gradstats.capture.parameters._consumers import Consumer
from gradstats.capture.parameters._nodes import Root
from gradstats.capture.parameters._slices import take_slices
from gradstats.capture.uses._uses import Settings
from gradstats.contractions._precision import without_autocast
from gradstats.errors import (
    CoverageError,
    TrackingError,
    UnsupportedOperationError,
)

DEFAULT_WORKSPACE = 256 * 1024 * 1024


def _check_not_compiled() -> None:
    """Raise in a function that the compiler traces, or has compiled."""
    if called_from_compiled():
        raise TrackingError(
            "a tracking context was opened inside a function that torch.compile compiles. Compile "
            "the model instead of the step, or run the step as torch.compiler.disable(step)."
        )


class Tracker(Context):
    """Follows the uses of a model's parameters for the duration of one batch.

    Attributes:
        listener: called before the backward, and after it before anything changes the gradients.
    """

    visibility: Visibility
    listener: BackwardListener | None = None
    backward_ran = False

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int,
        batch_dim: int,
        segments: Segments | None = None,
        settings: Settings,
        parameters: Sequence[str] | str | None,
        exclude: Sequence[str] | str,
        doubtful_are_data: bool = True,
    ):
        _check_not_compiled()  # before the compiler traces the rest, which may fail
        super().__init__(batch_size, batch_dim, segments, settings)
        self.marks.doubtful_are_data = doubtful_are_data
        self.visibility = Visibility()
        self._undo = ExitStack()
        anatomy = anatomy_of(model)
        self.modules = [module for _, module in anatomy.modules]
        named = anatomy.select(parameters, exclude)
        self.roots = [Root(self, name, parameter) for name, parameter in named.items()]
        self._tracking = Tracking(anatomy, self.roots, self.marks)
        # Tensors that modules keep belong to no example: buffers, untracked parameters, and tensors
        # in plain attributes and caches.
        tracked = set(map(id, named.values()))
        kept: list[Tensor] = [p for p in self._tracking.parameters if id(p) not in tracked]
        self.attributes: list[Any] = []  # until the context closes
        for module in self.modules:
            self.attributes += kept_by(module).values()
            if module._buffers:
                kept += [item for item in module._buffers.values() if isinstance(item, Tensor)]
        caches = caches_of(set(map(type, self.modules)))
        attributes = tensors_kept([self.attributes, caches])
        self.marks.keep_constant((*kept, *attributes))
        # An attribute may also keep a batch. If one has the size of a batch, the arguments of the
        # model's call tell whether it is the current one.
        self._model = model if any(map(self.marks.has_example_axis, attributes)) else None
        self._compiler = anatomy.compiled or compiler_is_used()
        selection = (len(named), parameters, exclude, model.training)
        if self._compiler:
            self.form = self._form_of_graphs(selection)
        self.reports = Reports(self.roots, settings, batch_size)
        self._mode = FollowingMode(self)
        self._tasks: set[int] = set()

    def _form_of_graphs(self, selection: tuple[Any, ...]) -> str:
        """Return a key of everything that recorded graphs depend on; "" if none can run here.

        Graphs cannot call a consumer or pass on which examples packed rows belong to, and a hook
        that sees the arguments of the model's call would be compiled with the model.

        Args:
            selection: which parameters are tracked, and the model's training mode.
        """
        settings = self.settings
        if settings.consumer is not None or self.marks.packed or self._model is not None:
            return ""
        if not graphs_run_on(self.roots[0].parameter):
            return ""
        asked = settings.weight_gradients, settings.fused, settings.workspace
        doubtful = self.marks.doubtful_are_data
        form = repr((self.batch_size, self.batch_dim, doubtful, *asked, *selection))
        return form if admits(self._tracking.parameters[0], form) else ""

    @property
    def device(self) -> torch.device:
        """The device of the first tracked parameter."""
        return self.roots[0].parameter.device

    @property
    def spans_devices(self) -> bool:
        """Whether the model's parameters are on several devices."""
        with torch._C.DisableTorchFunction():
            return len({each.device for each in self._tracking.parameters}) > 1

    def open(self) -> None:
        """Give the parameters their tracked class and start following constants."""
        _check_not_compiled()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self.visibility.begin()
        self._tracking.begin(self.roots)
        if self.form:
            replace_in_compiler()
            self._undo.enter_context(skipping())
        elif self._compiler:
            self._undo.enter_context(running_eagerly())
        if self._model is not None:
            hooked = self._model.register_forward_pre_hook
            self._undo.enter_context(hooked(self._take_data, with_kwargs=True))
        replace_in_pytorch()
        self.first_node = torch._C._autograd._get_sequence_nr()
        self._mode.remove()
        self._mode.__enter__()

    def expect_compiler(self) -> None:
        if not self._compiler:  # the next context may run graphs
            self._compiler = True
            self._undo.enter_context(running_eagerly())

    def until_closed(self, undo: AbstractContextManager[Any]) -> None:
        """Undo something, such as a hook of the model, when the context closes."""
        self._undo.enter_context(undo)

    def _take_data(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Treat the arguments of the model's call as data, even if the model keeps them too."""
        self.marks.take_batch(filter(self.marks.is_kept, tensors_in((args, kwargs))))

    def note_training(self, tensor: Tensor, trained: bool) -> None:
        self._tracking.note_training(tensor, trained)

    def check_known(self, leaves: Sequence[Tensor]) -> None:
        self._tracking.check_known(leaves)

    def close(self) -> None:
        """Restore the parameters, leaving no trace of the context."""
        if self.closed:
            return
        try:
            self._close()
        except BaseException:
            self._close()  # finish after an interrupt
            raise

    def _close(self) -> None:
        """Close; may be called again after an interrupt."""
        self._mode.remove()
        self.visibility.end()
        self._tracking.end()
        self._undo.close()
        self.attributes.clear()
        if self.derived:
            for module in self.modules:
                restore_attributes(module)
        self.shown.clear()
        self.visible.clear()
        self.renumbered.clear()
        self.transformed_nodes = []
        self.marks.forget()
        self.followed = None
        self.together.close()
        for root in self.roots:
            root.release()
        self.closed = True
        # These refer back to the context, which would stay alive until garbage is collected.
        del self._mode, self._tracking, self._model

    def watching(self) -> FollowingMode:
        """Return the context's mode, for code that runs while it is off."""
        return self._mode

    def note_losses(self, losses: Tensor) -> None:
        """Note which example each loss is of, if the model reordered the examples."""
        order = order_of(self.marks, losses)
        self.reports.order = None if order is None else order.to(self.device)
        self.marks.knows_losses = True
        meetings = self.marks.meetings
        if meetings.added:
            mixed = [node for node in nodes_behind(losses) if node in meetings.added]
            if mixed:
                raise meetings.refusal(mixed[-1])  # the first in the forward

    def targets(self, reporting: Sequence[GraphNode]) -> tuple:
        """Return the ``inputs`` for a backward that computes nothing but reports.

        Args:
            reporting: the nodes of the graph that report uses.
        """
        probes = [report.probe for report in self.reports.of_graphs.values()]
        return (*probes, *(GradientEdge(node, 0) for node in reporting))

    def keeps_values(self, roots: Sequence[Root]) -> bool:
        """Whether parameters have the same values after the backward as in the forward.

        Sharded parameters are resharded, and hooks may update a parameter as soon as it has its
        gradient.
        """
        hooked = any(root.parameter._post_accumulate_grad_hooks for root in roots)
        return not (hooked or self._tracking.sharded.any)

    def is_backward_of_losses(self) -> bool:
        """Whether the running backward is that of the losses, not of an inner autograd.grad."""
        return torch._C._current_graph_task_id() in self._tasks

    def backward_without_gradients(self, total: Tensor) -> None:
        """Run a backward that computes the reports and nothing else: no weight gradient."""
        with torch._C.DisableTorchFunction():
            one = torch.ones_like(total)
            reporting = self.before_backward([total], [one], create_graph=False)
        if not (self.functions.inside or self.trains):
            targets = self.targets(reporting)
            if targets:  # an empty list would make the engine compute all leaves' gradients
                with without_autocast():
                    run_backward((total,), (one,), inputs=targets, in_threads=self.spans_devices)
            self.after_backward()
            return
        # The backwards of autograd Functions use parameters, so that the nodes to reach are not
        # known, or hooks may change gradients. Run the whole backward, with gradients set aside.
        probes = self.reports.of_graphs.keys()
        parameters = self._tracking.parameters
        leaves = [leaf for leaf in (*parameters, *leaves_of(total)) if id(leaf) not in probes]
        with gradients_aside(leaves), without_hooks(parameters), without_autocast():
            run_backward((total,), (one,), in_threads=self.spans_devices)
        self.after_backward()

    def before_backward(
        self,
        losses: Sequence[Tensor],
        start: Sequence[Tensor | None],
        create_graph: bool,
        inputs: Sequence[Tensor] | None = None,
    ) -> list[GraphNode]:
        """Check, before a backward changes anything, that all of it can be accounted for.

        Args:
            losses: the tensors that the backward starts from.
            start: the gradient of each that it starts with; None for a tensor without a graph,
                which PyTorch will refuse.
            create_graph: whether the backward is to be differentiated.
            inputs: the only tensors that get a gradient; None for all leaves.

        Returns:
            The nodes of the graph that report uses.
        """
        if create_graph:
            raise UnsupportedOperationError(
                "the backward of a tracking context was given create_graph=True, but what is "
                "computed from the training gradient mixes the examples. Expected "
                "create_graph=False. Run such a backward outside the context."
            )
        nested = torch._C._current_graph_task_id() != -1
        if self.backward_ran and not nested:
            raise TrackingError(
                "a second backward was started in one tracking context, which serves one batch and "
                "one backward. For several losses of a batch, run the backward of their sum. To "
                "accumulate gradients, open one context for each micro-batch. For gradients that "
                "the losses are computed from (adversarial examples), use torch.autograd.grad. "
                f"{ONE_OF_SEVERAL}"
            )
        if inputs is not None and self.functions.inside:
            names = sorted(self.functions.inside)
            raise CoverageError(
                f"the backward was given inputs=, but parameters, {names[:4]}, are used inside of "
                "an autograd Function, as checkpoints of another library are, which such a "
                "backward may leave out. Expected a backward without inputs=: freeze the "
                "parameters that are to get no gradient by requires_grad_(False), or use "
                f"torch.utils.checkpoint.checkpoint, or exclude the parameters: exclude={names!r}."
            )
        if not nested:
            check_data(losses)
            if self.weight is not None and self.weight < 1:
                check_start(self.marks, losses, start)
        nodes = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
        meetings = self.marks.meetings
        for node in nodes:
            # A nested backward starts inside the model, from what later parts use.
            if node in meetings.roots_of_sums or (nested and node in meetings.added):
                raise meetings.refusal(node)
        reporting = check_coverage(self, nodes, () if nested else losses)
        if reporting and nested and is_in_unseen_checkpoint():
            raise unseen_checkpoint()
        self.backward_ran = True
        tasks = self._tasks

        def begin(_) -> None:
            tasks.add(torch._C._current_graph_task_id())

        for node in nodes:
            node.register_prehook(begin)
        if self.listener is not None and not nested:
            with torch._C.DisableTorchFunction():
                self.listener.before_backward(losses, start, inputs)
        return reporting

    def after_backward(self) -> None:
        """Contract what has waited; show the listener the gradients before others change them."""
        # In a backward inside an autograd Function's own: the outer one is still running.
        if torch._C._current_graph_task_id() != -1:
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self.together.contract()
            waiting = [root for root in self.roots if root.postponed or root.of_slices]
            if waiting:
                take_slices([root for root in waiting if root.of_slices], self._apart)
                for root in waiting:
                    root.contract()
            self.reports.deliver()
        if self.listener is not None:
            with torch._C.DisableTorchFunction():
                self.listener.after_backward()

    def _apart(self, model: nn.Module, batch_size: int, consumer: Consumer) -> Tracker:
        """Return a context for another model, whose factors a consumer takes."""
        settings = replace(self.settings, weight_gradients=False, fused=True, consumer=consumer)
        return Tracker(
            model, batch_size=batch_size, batch_dim=0, settings=settings, parameters=None,
            exclude=(),
        )  # fmt: skip
