"""Which of a model's parameters are tracked while a context is open."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from gradstats.capture._selection import Anatomy, check_trackable
from gradstats.capture._sharded import ShardedParameters
from gradstats.capture.following._marks import Marks
from gradstats.capture.parameters._nodes import Root
from gradstats.capture.parameters._tensors import TrackedParameter, release
from gradstats.errors import CoverageError


class Tracking:
    """Gives parameters their tracked class, and follows what the user's code changes meanwhile.

    Attributes:
        parameters: all parameters of the model, tracked or not.
        sharded: those that ``fully_shard`` shards.
    """

    def __init__(self, anatomy: Anatomy, roots: Sequence[Root], marks: Marks):
        self.parameters = list(anatomy.parameters.values())
        self.sharded = ShardedParameters(anatomy, roots)
        self._model = anatomy.modules[0][1]
        self._marks = marks
        self._tracked: dict[int, nn.Parameter] = {}
        # Parameters that the user's code has frozen inside the context.
        self._frozen: dict[int, Root] = {}
        # Parameters that did not require grad at first, and those of them unfrozen since.
        self._untrained = {id(each) for each in self.parameters if not each.requires_grad}
        self._unfrozen: list[Tensor] = []

    def begin(self, roots: Sequence[Root]) -> None:
        """Track parameters."""
        for root in self.sharded.others(roots):
            self._track(root)
        self.sharded.open(self._meet_whole)

    def end(self) -> None:
        """Restore all parameters; may be called again after an interrupt."""
        for parameter in self._tracked.values():
            release(parameter)
        self.sharded.close()
        self._tracked.clear()
        self._frozen.clear()
        self._unfrozen.clear()

    def _track(self, root: Root) -> None:
        parameter = root.parameter
        check_trackable(root)
        if not parameter.numel():
            self._ignore(parameter)  # an empty parameter has no gradient
            return
        self._tracked[id(parameter)] = parameter
        parameter.__class__ = TrackedParameter
        parameter._gradstats = root  # type: ignore[attr-defined]

    def _ignore(self, parameter: nn.Parameter) -> None:
        """Treat a parameter as a constant."""
        self._marks.keep_constant([parameter])
        self._marks.written.discard(parameter)  # gathering its shards is seen as a write

    def _meet_whole(self, parameter: nn.Parameter, root: Root | None) -> None:
        """Track a whole parameter that appeared; one without a root is a constant."""
        if root is None:
            self._ignore(parameter)
        else:
            root.parameter = parameter
            self._track(root)

    def note_training(self, tensor: Tensor, trained: bool) -> None:
        """Stop tracking a parameter that is being frozen; resume when it requires grad again."""
        if trained and id(tensor) in self._frozen:
            self._track(self._frozen.pop(id(tensor)))
        elif not trained and id(tensor) in self._tracked:
            parameter = self._tracked.pop(id(tensor))
            self._frozen[id(tensor)] = parameter._gradstats  # type: ignore[attr-defined]
            release(parameter)
            self._marks.keep_constant([parameter])
        elif id(tensor) in self._untrained:
            self._unfrozen.append(tensor)

    def check_known(self, leaves: Sequence[Tensor]) -> None:
        """Raise for parameters that were unfrozen or created inside the context, or not seen.

        Args:
            leaves: the leaves of the graph that are not tracked.
        """
        self.sharded.check_known(leaves)
        unfrozen = {id(each) for each in self._unfrozen if each.requires_grad}
        if unfrozen:
            names = sorted(name for each, name in self._names().items() if each in unfrozen)
            raise CoverageError(
                f"parameters were unfrozen inside the context, {names[:4]}, so their gradients are "
                "not measured. Set requires_grad before the context is opened."
            )
        if not leaves:
            return  # most steps
        known = set(map(id, self.parameters))
        unknown = [leaf for leaf in leaves if not (id(leaf) in known or self.sharded.knows(leaf))]
        given = self._names() if unknown else {}
        new = [given[id(leaf)] for leaf in unknown if id(leaf) in given]
        if new:
            raise CoverageError(
                f"the model was given parameters inside the context, {sorted(set(new))[:4]}, whose "
                "gradients are not measured. Expected parameters that exist when the context is "
                "opened. If the first forward creates them, run one forward before. If every "
                "forward does, write into them instead (parameter.copy_ under torch.no_grad)."
            )

    def _names(self) -> dict[int, str]:
        """Return the names of the parameters that the model has now, by their ids."""
        return {id(parameter): name for name, parameter in self._model.named_parameters()}
