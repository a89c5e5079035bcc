"""The processes that share one optimizer step, and communication between them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradstats.capture._selection import data_parallel_within, has_processes
from gradstats.errors import TrackingError


def group_of(model: nn.Module):
    """Return the process group whose processes share the model's optimizer step; None if alone."""
    if not has_processes():
        return None
    parallel = data_parallel_within(model)
    if any(each._join_config.enable for each in parallel):
        raise TrackingError(
            "gradstats.Monitor measures an optimizer step over all processes, but inside "
            "model.join() one of them may have run out of data. Give all processes the same number "
            "of batches, or measure each process alone, with gradstats.track."
        )
    if parallel:
        groups = [each.process_group for each in parallel]
        if any(group is not groups[0] for group in groups):
            raise TrackingError(
                "parts of the model are parallel over different process groups, so it is not known "
                "which processes share the optimizer step. Pass process_group=."
            )
        return groups[0]
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


def refuse_to_be_alone(*hooked) -> None:
    """Raise if a DistributedDataParallel that averages gradients runs around this forward.

    A forward pre-hook of a model that is measured as if there were one process. It is also called
    when a step opens, which may be inside the forward.
    """
    around = DistributedDataParallel._active_ddp_module
    if around is not None and dist.get_world_size(around.process_group) > 1:
        raise TrackingError(
            "the model runs inside a DistributedDataParallel, whose backward averages gradients "
            "over processes, but gradstats.Monitor was given the module in it and would compare "
            "the average with this process' examples only. Pass the wrapper, "
            "gs.Monitor(parallel_model), or process_group=."
        )


def gather(vector: Tensor, group) -> list[Tensor]:
    """Return every process' vector, in the order of their ranks; their sizes may differ."""
    size = torch.tensor([len(vector)], device=vector.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = torch.cat(sizes).tolist()
    padded = vector.new_zeros(max(lengths))
    padded[: len(vector)] = vector
    vectors = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(vectors, padded, group=group)
    return [received[:length] for received, length in zip(vectors, lengths, strict=True)]


def check_divisors(model: nn.Module, ranks: int) -> None:
    """Raise if ``fully_shard`` divides gradients by anything but the number of processes.

    Args:
        model: sharded or not.
        ranks: number of processes.
    """
    for path, module in model.named_modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        one = getattr(state, "_fsdp_param_group", None)
        for group in getattr(state, "_fsdp_param_groups", [one]):
            factor = getattr(group, "gradient_divide_factor", None)
            if factor not in (None, ranks):
                raise TrackingError(
                    f"the module {path!r} divides gradients by {factor:g}, set by "
                    "set_gradient_divide_factor, so the gradient is not the mean over the "
                    f"processes. Expected a division by {ranks}, the default of fully_shard: scale "
                    "the loss instead."
                )


def processes_with(parameter: nn.Parameter, ranks: int) -> float:
    """Return how many of the processes hold each element of a parameter's gradient.

    Args:
        parameter: sharded or not.
        ranks: number of processes.
    """
    placements = getattr(parameter, "placements", ())
    for dimension, placement in enumerate(placements):
        if placement.is_shard():
            ranks //= parameter.device_mesh.size(dimension)  # type: ignore[attr-defined]
    return float(ranks)
