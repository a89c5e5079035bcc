"""The processes that one optimizer step is spread over, and what they tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradstats.errors import TrackingError


def group_of(model: nn.Module):
    """Return the process group whose processes share the model's optimizer step; None if alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.process_group
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        if mesh.ndim == 1:
            return mesh.get_group()
        if mesh.size() == dist.get_world_size():
            return dist.group.WORLD
        raise TrackingError(
            f"the parameters are sharded over a mesh of {mesh.size()} of {dist.get_world_size()} "
            "processes in several dimensions, so it is not known which processes share the "
            "optimizer step. Pass process_group=."
        )
    return None


def gather(vector: Tensor, group) -> list[Tensor]:
    """Return every process's vector, in the order of their ranks; sizes may differ."""
    size = torch.tensor([len(vector)], device=vector.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = torch.cat(sizes).tolist()
    padded = vector.new_zeros(max(lengths))
    padded[: len(vector)] = vector
    vectors = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(vectors, padded, group=group)
    return [received[:length] for received, length in zip(vectors, lengths, strict=True)]


def gradient_sqnorms(
    parameters: Sequence[nn.Parameter], layer_of: Sequence[int | None], layers: int, ranks: int
) -> Tensor:
    """Return this process's share of ‖G‖² over all parameters and over each layer.

    Summed over the processes the shares give the squared norms: a process holds its shard of a
    sharded gradient, and a copy of any other.

    Args:
        parameters: whose ``grad`` is read.
        layer_of: the layer of each, or None.
        layers: number of layers.
        ranks: number of processes.

    Returns:
        (1 + layers,) float64.
    """
    device = next(iter(parameters)).device
    if all(parameter.grad is None for parameter in parameters):
        return torch.zeros(1 + layers, dtype=torch.float64, device=device)
    norms: list[Tensor] = []
    shares = torch.zeros(1 + layers, len(parameters), dtype=torch.float64)
    for column, (parameter, layer) in enumerate(zip(parameters, layer_of, strict=True)):
        gradient: Any = parameter.grad
        if gradient is None:
            norms.append(torch.zeros((), dtype=torch.float64, device=device))
            continue
        copies = ranks
        if hasattr(gradient, "to_local"):
            for dimension, placement in enumerate(gradient.placements):
                if placement.is_shard():
                    copies //= gradient.device_mesh.size(dimension)
            gradient = gradient.to_local()
        gradient = gradient.detach()
        if gradient.dim() > 1:
            # Row by row: one float32 sum over all elements would lose digits.
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            gradient = torch.linalg.vector_norm(gradient.flatten(0, -2), dim=1, dtype=dtype)
        norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float64).to(device))
        shares[0, column] = 1 / copies
        if layer is not None:
            shares[1 + layer, column] = 1 / copies
    return shares.to(device) @ torch.stack(norms).square_()
