"""This process among the ranks that train together: its rank, and communication with the others.

Ranks are defined by the environment (RANK, WORLD_SIZE, …), so torchrun or srun may start them as well as our launcher.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Literal, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from infra.errors import stage_error
from infra.launch.heartbeat import MEETING, Heartbeat

T = TypeVar("T")
_TIMEOUT = timedelta(hours=1)  # a hang is found by the launcher's watchdog, not by this


def rank() -> int:
    """Rank of this process among all ranks, from 0; 0 also if it is alone."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Rank of this process within its node, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def first_of_node() -> int:
    """Global rank of the process with local rank 0 on this node."""
    return rank() - local_rank()


def world_size() -> int:
    """Total number of ranks."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Number of ranks of this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


_tensor_parallel = _context_parallel = _pipeline_parallel = 1


def share_examples(tensor_parallel: int, context_parallel: int, pipeline_parallel: int) -> None:
    """Form groups of ranks that get the same examples. `tensor_parallel` adjacent ranks share every layer of a model,
    `context_parallel` adjacent groups of these share every sequence, and `pipeline_parallel` of those groups hold some
    of the layers each. Raises StageError if the group sizes do not divide the ranks."""
    global _tensor_parallel, _context_parallel, _pipeline_parallel
    for key, count in (
        ("tensor_parallel", tensor_parallel),
        ("context_parallel", context_parallel * tensor_parallel),
        ("pipeline_parallel", pipeline_parallel * context_parallel * tensor_parallel),
    ):
        if world_size() % count:
            raise stage_error(
                "not_divisible",
                f"launch.{key}",
                f"expected a divisor of the {world_size()} ranks, not {count}",
                "set it to one, such as the devices of a node",
            )
    _tensor_parallel, _context_parallel, _pipeline_parallel = tensor_parallel, context_parallel, pipeline_parallel


def tensor_parallel() -> int:
    """Ranks that share every layer of a model."""
    return _tensor_parallel


def context_parallel() -> int:
    """Ranks that share every sequence."""
    return _context_parallel


def pipeline_parallel() -> int:
    """Ranks that each hold some of a model's layers."""
    return _pipeline_parallel


_expert_parallel = 1


def share_experts(count: int) -> None:
    """Distribute a mixture's experts over groups of `count` adjacent ranks with the same layers, so that each rank of a
    group holds a part. Raises StageError if `count` does not divide the number of these ranks."""
    global _expert_parallel
    alike = world_size() // _pipeline_parallel
    if alike % count:
        raise stage_error(
            "not_divisible",
            "launch.expert_parallel",
            f"expected a divisor of the {alike} ranks that have the same layers, not {count}",
            "set it to one, such as the devices of a node",
        )
    _expert_parallel = count


def expert_parallel() -> int:
    """Ranks that hold a part of a mixture's experts each; each of them has different tokens."""
    return _expert_parallel


def hold_parts() -> bool:
    """Return True if ranks hold tensors that others do not have: some of the layers, or of the experts."""
    return _pipeline_parallel * _expert_parallel > 1


def group_size() -> int:
    """Ranks, next to each other, that get the same examples."""
    return _tensor_parallel * _context_parallel * _pipeline_parallel


def mesh(device_type: str) -> DeviceMesh:
    """Create the mesh of all ranks with dimensions, outermost first: `data` (parts of a batch), `pipe` (parts of the
    stack of layers), `context` (parts of sequences), `tensor` (parts of each layer). Every rank must call."""
    sizes = {"data": data_ranks(), "pipe": _pipeline_parallel, "context": _context_parallel, "tensor": _tensor_parallel}
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def data_rank() -> int:
    """Index of this rank's part of a batch, among `data_ranks` parts."""
    return rank() // group_size()


def data_ranks() -> int:
    """Number of parts of a batch: ranks that get the same examples count as one."""
    return world_size() // group_size()


def gradient_ranks() -> int:
    """Number of ranks over which gradients are averaged and weights sharded: ranks that share layers, or hold some
    layers each, count as one."""
    return world_size() // (_tensor_parallel * _pipeline_parallel)


def is_first() -> bool:
    """Return True on the rank that writes the common results."""
    return rank() == 0


def join(device: torch.device) -> None:
    """Join the process group, once per process; a single rank creates a group of one."""
    if distributed.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if world_size() > 1:
        heart = Heartbeat(rank())
        heart.beat(0, MEETING)  # a missing rank would block the others for the timeout of a collective
        distributed.init_process_group(backend, timeout=_TIMEOUT)
        heart.beat(0, "not watched")
    else:
        distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)


def per_rank_batch(batch_size: int) -> int:
    """Number of this rank's examples in a global batch. Raises StageError if it cannot be divided evenly."""
    if batch_size % data_ranks():
        raise stage_error(
            "not_divisible",
            "launch.processes",
            f"expected a global batch divisible among {data_ranks()} ranks, not {batch_size} examples",
            f"make the global batch a multiple of {data_ranks()} examples, or start fewer processes",
        )
    return batch_size // data_ranks()


def own_part(count: int) -> slice:
    """Return this rank's contiguous part of `count` rows; parts differ by at most one row, and may be empty."""
    first, last = (index * count // world_size() for index in (rank(), rank() + 1))
    return slice(first, last)


def join_parts(rows: Tensor) -> Tensor:
    """Return the rows of every rank's `own_part`, in order; every rank must call.

    Args:
        rows: this rank's part (n, …), where n may differ between ranks.
    """
    return rows if world_size() == 1 else torch.cat(gather(rows))


def gather(value: T) -> list[T]:
    """Return `value` of every rank, in order of ranks; every rank must call."""
    if world_size() == 1:
        return [value]
    values: list[T | None] = [None] * world_size()
    distributed.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def from_first(value: T) -> T:
    """Rank 0's `value`; every rank must call."""
    if world_size() == 1:
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


def any_rank(value: bool) -> bool:
    """Return True if `value` is true on at least one rank; every rank must call."""
    if world_size() == 1:
        return value
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    flag = torch.tensor([value], dtype=torch.uint8, device=device)
    distributed.all_reduce(flag, distributed.ReduceOp.MAX)
    return bool(flag.item())


def all_reduce(tensor: Tensor, by: Literal["sum", "min", "max"] = "sum") -> Tensor:
    """Reduce a tensor over all ranks, in place, to the same bits on each; every rank must call.

    Args:
        tensor: of the same shape and dtype on every rank.
        by: the reduction.
    """
    if world_size() > 1:
        distributed.all_reduce(tensor, getattr(distributed.ReduceOp, by.upper()))
    return tensor


def wait_for_all() -> None:
    """Wait until every rank has called this function."""
    gather(None)
