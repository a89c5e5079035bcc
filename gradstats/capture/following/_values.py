"""What a context notes about the values of data tensors; it holds until these change."""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor

# The attribute of tensors that holds the context's serial number, the tensor's version when the
# properties were noted, and the properties.
VALUES = "_gradstats_values"
NOTHING: dict[str, Any] = {}


def unmark(marked: list[ref[Tensor]], attribute: str, serial: int) -> None:
    """Remove a context's attribute from tensors, and empty the list of them."""
    for reference in marked:
        tensor = reference()
        if tensor is not None and getattr(tensor, attribute, (None,))[0] == serial:
            delattr(tensor, attribute)
    marked.clear()


class Values:
    """Properties of the values of data tensors, noted on the tensors.

        blank     the tensor has the shape of data, but holds no example's values yet
        sum       it is a sum of terms that depend on one example each
        given     it counts as data because of its size, but was made of given values alone
        drawn     the same, but of drawn values, or of drawn and given ones
        joint     it was computed from values of all examples, and has no axis of its own for them
        of_one    its layout was lost where values of a single example met others
        owner     the example of each element, if the examples lie along no axis;
                  `_numbered.NOBODY` for elements that hold no example's values

    Methods that take ``writes`` tell what held before a tensor's last ``writes`` changes.
    """

    def __init__(self, serial: int):
        self._serial = serial
        self._marked: list[ref[Tensor]] = []
        self.joins = False  # whether any tensor is joint
        self.slots = False  # whether an owner was noted because examples lie along no axis

    def was_blank(self, tensor: Tensor, writes: int = 0) -> bool:
        """Whether a tensor held no example's values."""
        return "blank" in self.held_by(tensor, writes)

    def is_sum(self, tensor: Tensor, writes: int = 0) -> bool:
        """Whether a tensor of several examples was a sum of terms of one example each."""
        return "sum" in self.held_by(tensor, writes)

    def is_of_one(self, tensor: Tensor) -> bool:
        """Whether a tensor's layout was lost where values of a single example met others."""
        return "of_one" in self.held_by(tensor)

    def is_joint(self, tensor: Tensor, writes: int = 0) -> bool:
        """Whether a tensor was computed from values of all examples, without an axis for them."""
        return self.joins and "joint" in self.held_by(tensor, writes)

    def owner_of(self, tensor: Tensor, writes: int = 0) -> Tensor | None:
        """Return the example of each element, if noted; axes of size 1 stand for whole axes."""
        return self.held_by(tensor, writes).get("owner")

    def note(self, tensor: Tensor, **found: Any) -> None:
        """Add properties to those that a tensor has."""
        if found and not tensor.is_inference():
            found = {**self.held_by(tensor), **found}
            setattr(tensor, VALUES, (self._serial, tensor._version, found))
            self._marked.append(ref(tensor))
            self.joins |= "joint" in found

    def held_by(self, tensor: Tensor, writes: int = 0) -> dict[str, Any]:
        """Return the properties that a tensor has, or had."""
        mark: Any = getattr(tensor, VALUES, None)
        # Check for marks first: inference tensors have no version.
        held = mark is not None and mark[:2] == (self._serial, tensor._version - writes)
        return mark[2] if held else NOTHING

    def forget(self) -> None:
        """Remove the marks from tensors."""
        unmark(self._marked, VALUES, self._serial)
