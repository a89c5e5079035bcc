"""Gradients of points whose distances from data were taken."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from gradstats._factors._factor import cast, compute_dtype


@dataclass(eq=False)
class Distances:
    """G_i[k] = Σ_t grad_itk (points_k - rows_it) / distances_itk, for Euclidean distances.

    Attributes:
        grad: (B, T, K) gradients of the distances.
        distances: (B, T, K); a distance of zero has no gradient.
        rows: (B, T, width) data.
        points: (K, width), the parameter.
    """

    grad: Tensor
    distances: Tensor
    rows: Tensor
    points: Tensor

    granule = 1

    @property
    def batch(self) -> int:
        return len(self.grad)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.points.shape)

    def select(self, rows) -> Distances:
        grad, distances = self.grad[rows], self.distances[rows]
        return replace(self, grad=grad, distances=distances, rows=self.rows[rows])

    def narrow(self, start: int, stop: int) -> Distances:
        grad, distances = (each[..., start:stop] for each in (self.grad, self.distances))
        return replace(self, grad=grad, distances=distances, points=self.points[start:stop])

    def apart(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return grad / distances (B, T, K), points and rows, in the accumulation dtype."""
        dtype = compute_dtype(self.grad, self.rows, self.points)
        zero = self.distances == 0
        distances = cast(self.distances, dtype).masked_fill(zero, 1)
        weights = cast(self.grad, dtype).masked_fill(zero, 0) / distances
        return weights, cast(self.points, dtype), cast(self.rows, dtype)

    def centred(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same, points and rows relative to the mean point: products round less."""
        weights, points, rows = self.apart()
        middle = points.mean(0)
        return weights, points - middle, rows - middle

    def together(self) -> Distances:
        """Return the sum over the examples, as the factor of a single example."""
        sides = self.grad, self.distances, self.rows
        grad, distances, rows = (side.flatten(0, 1).unsqueeze(0) for side in sides)
        return Distances(grad, distances, rows, self.points)

    def dense(self) -> Tensor:
        weights, points, rows = self.centred()
        return weights.sum(1).unsqueeze(2) * points - weights.mT @ rows
