"""Spreads a model over ranks and trades memory for time; each of these leaves the losses as they are.

DDP is the backend's. FSDP2 is applied here and not by Composer's `parallelism_config`: that shards the children of a
model one by one, while ours compute the loss from a child's weights, and it knows no offload of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from infra.launch.config import LaunchConfig
from training import ranks
from training.hardware import Hardware

# Methods besides `forward` in which a model computes with its weights.
_COMPUTING = ("losses",)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers that a model is stacked of: the members of its outermost lists of modules."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else blocks(child)
    return found


def parallelize(model: nn.Module, launch: LaunchConfig, hardware: Hardware) -> None:
    """Puts a model on its device, and applies `launch.sharding` and `launch.offload` in place, before the optimizer is
    made."""
    if launch.sharding == "fsdp" and (ranks.world_size() > 1 or launch.offload):
        shard(model, hardware, offload=launch.offload)
    else:
        model.to(hardware.device)


def shard(model: nn.Module, hardware: Hardware, *, offload: bool) -> None:
    """FSDP2: every layer is gathered for its own computation only, what is left over for the whole step.

    Layers are gathered in the type that they compute in, at half of fp32's traffic and memory; gradients are summed and
    weights updated in fp32. What is left over (embeddings, the last norm, the output layer) is gathered in fp32: under
    autocast the residual stream has the embeddings' type, and stays fp32 as in one process.
    """
    mesh = init_device_mesh(hardware.device.type, (ranks.world_size(),))
    policy = CPUOffloadPolicy(pin_memory=hardware.device.type == "cuda") if offload else OffloadPolicy()
    model.to("cpu" if offload else hardware.device)
    precision = MixedPrecisionPolicy(hardware.compute, torch.float32, cast_forward_inputs=False)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, offload_policy=policy, mp_policy=precision)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    if _sums_for_mean(hardware.device):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(_take_mean)
    for name in _COMPUTING:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)


def _sums_for_mean(device: torch.device) -> bool:
    """Whether this backend gives a sum where FSDP2 asks for the ranks' mean gradient, as gloo does without a word
    (pytorch issue 162338); every rank must call."""
    mean = torch.zeros(1, device=device)
    ones = torch.ones(ranks.world_size(), device=device)
    distributed.reduce_scatter_tensor(mean, ones, op=distributed.ReduceOp.AVG)
    return bool(mean.item() != 1)


def _take_mean(summed: Tensor) -> None:
    summed.div_(ranks.world_size())


def unshard_root(model: nn.Module) -> None:
    """Gathers what a sharded model has outside of its blocks, for good: then parts of it compute on their own, as when
    it writes answers. Every rank must call."""
    if isinstance(model, FSDPModule):
        model.unshard()


def checkpoint_activations(model: nn.Module, how: str) -> None:
    """Activation checkpointing of every block, in place (`launch.recompute`).

    full: only a block's input is kept (Chen et al. 2016). selective: results of matrix products and of attention are
    kept too, and only what is cheap is computed again (Korthikanti et al. 2022, section 5).
    """
    if how == "none":
        return
    contexts = partial(create_selective_checkpoint_contexts, _keep_products)
    extra = {"context_fn": contexts} if how == "selective" else {}
    for block in blocks(model):
        block.forward = _checkpointed(block.forward, extra)


def _checkpointed(forward: Callable[..., Any], extra: dict[str, Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **extra, **kwargs)

    return run


def _keep_products(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(operator)
    products = (
        "aten.mm",
        "aten.bmm",
        "aten.addmm",
        "aten.baddbmm",
        "aten._scaled_dot_product",
        "aten._flash_attention",
    )
    return CheckpointPolicy.MUST_SAVE if name.startswith(products) else CheckpointPolicy.PREFER_RECOMPUTE


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights of a model in fp32 on the CPU, sharded or not; every rank must call. Tied ones share their memory."""
    gathered: dict[int, Tensor] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    whole = {}
    for name, value in model.state_dict().items():
        key = id(parameters.get(name, value))
        if key not in gathered:
            gathered[key] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().float()
        whole[name] = gathered[key]
    return whole
