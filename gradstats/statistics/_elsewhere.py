"""Whether an example has the same loss and gradient alone, in other batches, and unpadded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradstats._comparison import same_bits
from gradstats.statistics._batches import map_tensors
from gradstats.statistics._division import Division
from gradstats.statistics._loss import check_losses
from gradstats.statistics._reference import TOLERANCE, Example, Subject
from gradstats.statistics._verify_report import Check, summary


class Elsewhere:
    """Compares examples in their batch with the same examples in other batches.

    Args:
        subject: model, batch and loss.
        division: how the batch divides into examples.
        names: of the parameters whose gradients are compared.

    Attributes:
        random: whether the forward is random; known once examples were compared.
        repeats: whether the same random numbers give the same losses and gradients again.
    """

    def __init__(self, subject: Subject, division: Division, names: list[str]):
        self._subject, self._division = subject, division
        self._parameters = subject.parameters(names)
        # The relative difference up to which two losses or gradients count as the same.
        self._tolerance = TOLERANCE[subject.dtype]
        self.random, self.repeats = False, True

    def compare(self, numbers: Sequence[int]) -> tuple[list[Example], Check]:
        """Return some examples in their batch, and a check that they do not depend on it."""
        self._look_for_randomness()
        if not self.repeats:
            detail = "not compared: the same random numbers do not give the same losses again"
            return [], Check("coupling", None, f"{detail} (see determinism)")
        examples, check = self._compare(numbers)
        if check.ok is False:
            check = self._as_given(numbers) or check
        return examples, check

    def _look_for_randomness(self) -> None:
        """Find out whether other, and the same, random numbers give other losses or gradients.

        Both are compared: dropout before an adapter that is still zero changes gradients only.
        """
        subject, found = self._subject, []
        for same in (True, True, False):
            losses = subject.losses(subject.batch, same_numbers=same)
            found.append((losses.detach(), Example(0, losses.sum(), self._parameters)))
        (losses, example), (_, again), (others, other) = found
        self.repeats = example.difference(again, self._tolerance, "again") is None
        changed = example.difference(other, self._tolerance, "with other random numbers")
        self.random = changed is not None or not same_bits(losses, others)

    def _as_given(self, numbers: Sequence[int]) -> Check | None:
        """Return what is found with other modules in eval mode; None if that changes nothing.

        A generator in training mode, for example, may normalise a discriminator's input by the
        batch.
        """
        beside = self._subject.beside
        training = [inner for each in beside for inner in each.modules() if inner.training]
        if not training:
            return None
        try:
            for module in training:
                module.training = False
            found = self._compare(numbers)[1]
        finally:
            for module in training:
                module.training = True
        names = ", ".join(dict.fromkeys(type(module).__name__ for module in beside))
        detail = (
            f"{found.detail}, with the modules beside the model ({names}) in eval mode: their "
            "output in training mode, which depends on the whole batch, is taken as given"
        )
        return None if found.ok is False else Check("coupling", found.ok, detail)

    def _compare(self, numbers: Sequence[int]) -> tuple[list[Example], Check]:
        examples: list[Example] = []
        checks: list[Check] = []
        for number in numbers:
            # One forward for each example: restoring buffers spoils the graph of an earlier one.
            losses = self._subject.losses(self._subject.batch)
            example = Example(number, losses[number], self._parameters)
            examples.append(example)
            if self._division.batch_size > 1:
                checks.append(self._coupling(example))
            # At most one example's whole gradient is kept; the padding check forms its own.
            example.release()
        if not checks:
            return examples, Check(
                "coupling", None, "a batch of one example: nothing to couple with"
            )
        # Report a failure if there is one, else a check that could not be made.
        return examples, min(checks, key=lambda each: (each.ok is not False, each.ok is not None))

    def padding(self) -> list[Check]:
        """Compare an example with itself without its trailing padding, if there is a mask."""
        if self.random:  # a shorter example would draw other random numbers
            return []
        self._subject.state.restore()
        mask = _attention_mask(self._subject.batch)
        size = self._division.batch_size
        if mask is None or mask.dim() != 2 or len(mask) != size or self._division.batch_dim:
            return []
        lengths = (mask != 0).long().cumsum(1).argmax(1) + 1
        number = int(lengths.argmin())
        length, positions = int(lengths[number]), mask.shape[1]
        if length == positions:
            return [Check("padding", None, "no example has trailing padding")]

        def trim(tensor: Tensor) -> Tensor:
            padded = tuple(tensor.shape[:2]) == (1, positions)
            return tensor[:, :length] if padded else tensor

        try:
            padded, trimmed = (
                self._in_batch(map_tensors(self._take([number]), change), 1, 0, number)
                for change in (lambda tensor: tensor, trim)
            )
        except Exception as error:
            detail = f"example {number} without its padding failed with {summary(error)}"
            return [Check("padding", None, detail)]
        problem = padded.difference(
            trimmed, self._tolerance, "without its padding",
            "it depends on how long the other examples are: is the mask used?",
        )  # fmt: skip
        detail = problem or f"example {number} without its padding is the same"
        return [Check("padding", not problem, detail)]

    def _coupling(self, example: Example) -> Check:
        """Check that an example is the same without its batch."""
        number, reason = example.number, "the forward is random"
        if not self.random:
            try:
                alone = self._taken([number], 0, number)
            except Exception as error:
                reason = f"a batch of one failed with {summary(error)}"
            else:
                problem = example.difference(alone, self._tolerance, "alone")
                if problem and (doubt := self._division.doubt(self._subject.batch)):
                    problem += f". Or the batch was not divided into its examples: {doubt}"
                how = "each checked example has the same loss and gradient alone as in the batch"
                return Check("coupling", problem is None, problem or how)
        obstacle = self._division.obstacle(self._subject.batch)
        if self.random and self._division.has_sizes(self._subject.batch):
            obstacle = (
                "the examples have different sizes, so each would draw other random numbers in "
                "another batch; call model.eval()"
            )
        if obstacle is not None:
            return Check("coupling", None, f"not checked: {obstacle} ({reason})")
        # Replace the example's neighbours by copies of itself: in its own place in the batch it
        # draws the same random numbers.
        try:
            among = self._taken([number] * self._division.batch_size, number, number)
        except Exception as error:
            detail = f"example {number} among copies of itself failed with {summary(error)}"
            return Check("coupling", False, detail)
        problem = example.difference(among, self._tolerance, "among copies of itself")
        how = (
            f"each checked example is the same among copies of itself as in the batch ({reason}, "
            "so a factor that depends on the size of the batch alone would not be seen; call "
            "model.eval() to check that too)"
        )
        return Check("coupling", problem is None, problem or how)

    def _taken(self, rows: list[int], place: int, number: int) -> Example:
        """Return the example at a place of the batch that consists of some of the examples."""
        return self._in_batch(self._take(rows), len(rows), place, number)

    def _take(self, rows: list[int]) -> Any:
        """Return the batch of some of the examples, as it was before a loss wrote into it."""
        self._subject.state.restore()
        return self._division.take(self._subject.batch, rows)

    def _in_batch(self, batch: Any, size: int, place: int, number: int) -> Example:
        """Return the example at a place of another batch, of ``size`` examples."""
        losses = check_losses(self._subject.losses(batch), size)
        return Example(number, losses[place], self._parameters)


def _attention_mask(batch: Any) -> Tensor | None:
    """Return the attention mask in a batch that is a mapping, or holds one; else None."""
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    for part in parts:
        if isinstance(part, Mapping) and isinstance(part.get("attention_mask"), Tensor):
            return part["attention_mask"]
    return None
