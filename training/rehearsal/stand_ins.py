"""Stand-ins for the devices and the other ranks of a layout: tensors without memory and collectives without peers."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.nn.parallel import distributed as ddp
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.model import loss

_SMALL = 1 << 20
"""Maximum number of integers of a tensor that is computed for real: meshes of ranks and positions need their values."""
_SCALAR = torch.ops.aten._local_scalar_dense.default
_COUNTING = {torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step}
_FILLED = {torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default, torch.ops.aten.ones.default}


@contextmanager
def without_devices(rank: int, world: int, node: int, *, choices: int, gpu: bool) -> Iterator[None]:
    """Be one rank of `world` within this context, on tensors that have shapes and no memory.

    Only one context at a time is possible in a process, since the environment and torch's default process group are
    the rank's.

    Args:
        rank: the rank that this process stands for.
        world: number of ranks.
        node: ranks of a node.
        choices: tokens of a microbatch times experts that each of them chooses; experts get equal parts of these. 0
            for a dense model.
        gpu: True if chunks of logits have the size of those of a GPU.
    """
    names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % node, "LOCAL_WORLD_SIZE": node}
    chunk = loss._CHUNK_LOGITS_OF_GPU if gpu else loss._CHUNK_LOGITS
    with (
        patch.dict(os.environ, {name: str(value) for name, value in names.items()}),
        patch.object(loss, "_CHUNK_LOGITS", chunk),
        # DDP compares and broadcasts the ranks' weights by reading their memory.
        patch.object(ddp, "_verify_param_shape_across_processes", _nothing),
        patch.object(ddp, "_sync_module_states", _nothing),
        patch.object(ddp.DistributedDataParallel, "__init__", _ddp_init),
        # A router's counts are read: each expert, and each rank that holds some, gets as many tokens as any other.
        patch.object(FakeTensor, "tolist", lambda counts: [choices // len(counts)] * len(counts)),
        # Module.to replaces weights without memory even if they are on the device already, and unties them.
        patch.object(nn.Module, "to", _to),
    ):
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), _Values(choices):
                yield
        finally:
            distributed.destroy_process_group()


def _nothing(*_: Any, **__: Any) -> None:
    pass


_module_to, _ddp_original = nn.Module.to, ddp.DistributedDataParallel.__init__


def _ddp_init(wrapper: ddp.DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    """Have DDP sum its buckets by a hook: the result of its own request is read from memory."""
    _ddp_original(wrapper, *args, **kwargs)
    wrapper.register_comm_hook(None, _summed)


def _summed(_: Any, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    distributed.all_reduce(bucket.buffer())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


_summed.__annotations__.clear()  # DDP accepts the classes alone, and not their names


def _to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    tensors = [*module.parameters(), *module.buffers()]
    if dtype is None and all(tensor.device.type == device.type for tensor in tensors):
        return module
    return _module_to(module, *args, **kwargs)


class _Values(TorchDispatchMode):
    """Computes small tensors of integers for real, since meshes and positions need their values, and answers a read of
    a single value of a tensor without memory by 1."""

    def __init__(self, choices: int) -> None:
        super().__init__()
        self._choices = choices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if FakeTensor in types:
            if func is _SCALAR:
                return True if args[0].dtype == torch.bool else 1
            # Lengths that depend on values: of a mixture's counts, and of the tokens that reach its experts.
            if func is torch.ops.aten.bincount.default:
                return args[0].new_empty(kwargs.get("minlength") or args[2])
            if func is torch.ops.aten.repeat_interleave.Tensor:
                return args[0].new_empty(self._choices)
        elif _is_real(func, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _is_real(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True if an operator, none of whose inputs is without memory, gives a small tensor of integers."""
    if func.namespace == "c10d":
        return False
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if tensors:
        return all(not tensor.is_floating_point() and tensor.numel() <= _SMALL for tensor in tensors)
    dtype = kwargs.get("dtype")
    if func in _COUNTING:
        return dtype is None or not dtype.is_floating_point
    return func in _FILLED and dtype is not None and not dtype.is_floating_point and math.prod(args[0]) <= _SMALL
