"""What a backward computes from the factors of each parameter besides norms.

    Keep           holds them for later backwards
    Against        inner products with the kept factors of other batches
    Along          inner products with a given direction
    WithinBatch    inner products with the sum over the batch, and of all pairs within it

A parameter's factors arrive when all of its uses have delivered: layer by layer, from the last to
the first. Those that a consumer does not hold are freed before the next layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gradstats._complex import as_real
from gradstats._factors import Factor, map_tensors, moved, tensors_of
from gradstats.capture.parameters._lineage import Pulled
from gradstats.contractions import (
    direction_inner,
    fold,
    inner_diagonal,
    inner_pairs,
    rows_squared_norms,
    total,
)


@dataclass(frozen=True)
class Arrival:
    """The factors of one parameter, with the examples in the order of the losses.

    Attributes:
        name: the parameter's name.
        factors: one for each use.
        sqnorm: (B,) float64 squared norms of their sum; zeros where the consumer needs none.
        total: their sum over the examples, if already known.
        workspace: bytes of scratch memory that may be allocated at once.
    """

    name: str
    factors: Sequence[Factor]
    sqnorm: Tensor
    total: Tensor | None
    workspace: int


class Consumer(Protocol):
    """Takes each parameter's factors.

    Attributes:
        needs_norms: whether squared norms have to be computed too.
    """

    needs_norms: bool

    def take(self, arrival: Arrival) -> None:
        """Use the factors of one parameter."""


@dataclass(frozen=True)
class KeptParameter:
    """The factors of one parameter for one batch, and the norms of their sum, (B,) float64."""

    factors: list[Factor]
    sizes: Tensor


class Keep:
    """Holds the factors of every parameter.

    Attributes:
        kept: name → factors and norms.
    """

    needs_norms = True

    def __init__(self) -> None:
        self.kept: dict[str, KeptParameter] = {}
        self._replays: dict = {}

    def take(self, arrival: Arrival) -> None:
        factors = [self._detached(factor) for factor in fold(arrival.factors)]
        self.kept[arrival.name] = KeptParameter(factors, arrival.sqnorm.sqrt())

    def _detached(self, factor: Factor) -> Factor:
        if isinstance(factor, Pulled):
            factor = factor.frozen(self._replays)
        return map_tensors(factor, _compact)

    def copy_shared(self) -> None:
        """Copy the tensors whose memory others may change. Called once the graph is gone."""
        factors = [factor for each in self.kept.values() for factor in each.factors]
        kept = {id(tensor): tensor for factor in factors for tensor in tensors_of(factor)}
        counts = Counter(map(_address, kept.values()))
        shared = {_address(tensor) for tensor in kept.values() if _is_shared(tensor, counts)}
        copies: dict[tuple[Any, ...], Tensor] = {}  # one for all tensors of the same elements

        def copy(tensor: Tensor) -> Tensor:
            if _address(tensor) not in shared:
                return tensor
            place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            if place not in copies:
                copies[place] = _copied(tensor)
            return copies[place]

        for each in self.kept.values():
            each.factors[:] = [map_tensors(factor, copy) for factor in each.factors]


def _compact(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, or a copy if it is a view that holds a larger one."""
    tensor = tensor.detach()
    size = max(1, tensor.numel()) * tensor.element_size()
    return _copied(tensor) if tensor.untyped_storage().nbytes() > 2 * size else tensor


def _address(tensor: Tensor) -> int:
    """Return what identifies a tensor's memory as long as that is held."""
    return tensor.untyped_storage()._cdata


def _is_shared(tensor: Tensor, counts: Mapping[int, int]) -> bool:
    """Whether anything else holds a tensor's memory: other tensors, or libraries such as NumPy.

    Args:
        counts: address → number of kept tensors that hold it.
    """
    storage = tensor.untyped_storage()  # one more holder
    holders = torch._C._storage_Use_Count(storage._cdata) - 1
    return holders > counts[storage._cdata] or not storage.resizable()


class Against:
    """Inner products with the kept factors of other batches, one matrix or vector for each.

    Attributes:
        values: for each kept batch (B_kept, B), or (B,) on the diagonal, float64; None until a
            parameter arrives that the batch's losses depend on.
        by_parameter: for each kept batch, name → the parameter's part; empty unless wanted.
    """

    needs_norms = True

    def __init__(
        self,
        kept: Sequence[dict[str, KeptParameter]],
        *,
        diagonal: bool,
        per_parameter: bool,
        consume: bool,
    ):
        """Prepare the products.

        Args:
            kept: what ``Keep`` holds of each batch.
            diagonal: pair the i-th example of one batch with the i-th of the other only.
            per_parameter: hold each parameter's part too.
            consume: free each parameter's kept factors as soon as they have been used.
        """
        self.values: list[Tensor | None] = [None for _ in kept]
        self.by_parameter: list[dict[str, Tensor]] = [{} for _ in kept]
        self._per_parameter = per_parameter
        self._kept = kept
        self._contract = inner_diagonal if diagonal else inner_pairs
        self._consume = consume

    def take(self, arrival: Arrival) -> None:
        sizes = arrival.sqnorm.sqrt()

        def to_device(tensor: Tensor) -> Tensor:
            return moved(tensor, sizes.device)

        for index, kept in enumerate(self._kept):
            found = kept.pop(arrival.name, None) if self._consume else kept.get(arrival.name)
            if found is None:
                continue  # the losses of the kept batch do not depend on this parameter
            factors = [map_tensors(factor, to_device) for factor in found.factors]
            both = found.sizes.to(sizes.device), sizes
            part = self._contract(factors, arrival.factors, arrival.workspace, both)
            if self._per_parameter:
                self.by_parameter[index][arrival.name] = part
            so_far = self.values[index]
            self.values[index] = part if so_far is None else so_far + part.to(so_far.device)


class Along:
    """Inner products with one direction.

    Attributes:
        values: name → (B,) float64, of the parameters that the direction names.
    """

    needs_norms = False

    def __init__(self, direction: Mapping[str, Tensor]):
        self.values: dict[str, Tensor] = {}
        self._direction = direction

    def take(self, arrival: Arrival) -> None:
        direction = self._direction.get(arrival.name)
        if direction is not None:
            direction = as_real(direction.detach()).to(arrival.sqnorm.device)
            products = direction_inner(arrival.factors, direction, arrival.workspace)
            self.values[arrival.name] = products


class WithinBatch:
    """Inner products with the sum over the batch, and of all pairs within it.

    Attributes:
        with_sum: name → (B,) float64, ⟨F[i], Σ_j F[j]⟩.
        sum_sqnorm: name → () float64, ‖Σ_j F[j]‖².
        pairs: (B, B) float64, ⟨F[i], F[j]⟩ over all parameters; None unless wanted.
        pairs_by_parameter: name → the parameter's part; empty unless wanted.
    """

    needs_norms = True

    def __init__(self, *, alignment: bool, gram: bool, per_parameter: bool = False):
        self.with_sum: dict[str, Tensor] = {}
        self.sum_sqnorm: dict[str, Tensor] = {}
        self.pairs: Tensor | None = None
        self.pairs_by_parameter: dict[str, Tensor] = {}
        self._alignment = alignment
        self._per_parameter = per_parameter
        self._gram = gram

    def take(self, arrival: Arrival) -> None:
        factors, name = arrival.factors, arrival.name
        if self._gram:
            sizes = arrival.sqnorm.sqrt()
            part = inner_pairs(factors, factors, arrival.workspace, (sizes, sizes))
            if self._per_parameter:
                self.pairs_by_parameter[name] = part
            self.pairs = part if self.pairs is None else self.pairs + part.to(self.pairs.device)
        if self._alignment:
            whole = arrival.total
            # A sum in half precision has lost digits that the factors still have.
            if whole is None or whole.dtype not in (torch.float32, torch.float64):
                whole = total(factors)
            self.with_sum[name] = direction_inner(factors, whole, arrival.workspace)
            self.sum_sqnorm[name] = rows_squared_norms(whole.unsqueeze(0))[0]


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy in which expanded axes stay expanded."""
    unexpanded = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    return tensor[unexpanded].clone().expand(tensor.shape)
