"""Distribute a model over ranks, by `parallelize`; no kind of parallelism changes the losses.

FSDP2 is applied here and not by
Composer's `parallelism_config`: that shards the children of a model one by one, while ours compute the loss from a
child's weights, and it does not support offloading weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from infra.errors import stage_error
from infra.launch.config import LaunchConfig
from training.core import ranks
from training.core.hardware import Hardware
from training.core.parallel_parts import ExpertParts
from training.core.train_state import Trainable
from training.distributed import context_parallel
from training.distributed.expert_parallel import SharedExperts, reach_every_expert
from training.distributed.other_ranks import is_cut, join_stages
from training.distributed.pipeline_parallel import Pipeline
from training.distributed.tensor_parallel import split
from training.distributed.zero import ShardedOptimizer
from training.model.balancing import TokenRanks
from training.model.blocks import blocks, compile_blocks

# Methods besides `forward` in which a model computes with its weights.
_COMPUTING = ("losses",)


def parallelize(model: nn.Module, launch: LaunchConfig, hardware: Hardware) -> None:
    """Put a model on its device and distribute it in place as `launch` specifies: all kinds of parallelism, in order.

    Every rank must call, with the whole model. Linear layers in FP8 and activation checkpointing precede this function
    (training/pretrain.py, training/trainer/fit.py), since the microbatch is tried with them on the whole model. The
    optimizer follows, since it needs the final weights; with `zero1` it is sharded by `shard_optimizer`. Last of all
    the loop adds DDP, which reduces what nothing here does.

    Raises StageError for a model or a number of ranks that does not fit.
    """
    language: Any = model  # a LanguageModel wherever ranks share more than data; its module imports this one

    # Compile each block: inside all hooks that follow, such as FSDP2's, so that compiled code contains no collectives.
    if isinstance(model, Trainable) and model.compiles_blocks:
        compile_blocks(model)

    # Experts: other ranks' are dropped while names and layers are those of the whole model, before any layer is moved,
    # split or sharded. Without expert parallelism each expert needs a gradient on every rank.
    experts = None
    if ranks.expert_parallel() > 1:
        language.experts = experts = SharedExperts(model, hardware.device)
    elif ranks.world_size() > 1:
        reach_every_expert(model)
    if ranks.context_parallel() * ranks.tensor_parallel() > 1 and language.router:
        language.token_ranks = TokenRanks(ranks.mesh(hardware.device.type)["context", "tensor"])

    # Context: replaces the function of attention alone, so it goes with any distribution of the weights.
    if ranks.context_parallel() > 1:
        language.sequences = context_parallel.share(language.model, hardware.device)

    # Pipeline: takes the model apart. It splits its own stages over tensor ranks and averages its own gradients, so
    # nothing that follows applies.
    if ranks.pipeline_parallel() > 1:
        language.pipeline = Pipeline(
            language.model,
            launch.pipeline_pieces,
            hardware.device,
            hardware.compute,
            language.through,
            language.beside_states(),
            experts,
        )
        return

    sharded = launch.shards_weights and (ranks.gradient_ranks() > 1 or launch.offload)
    mesh = mesh_of(launch, hardware) if sharded or ranks.tensor_parallel() > 1 else None

    # Tensor: splits weights within layers, before FSDP2 shards what each rank has left.
    if mesh is not None and ranks.tensor_parallel() > 1:
        if not sharded and not experts and ranks.gradient_ranks() > 1:
            raise stage_error(
                "not_sharded",
                "launch.sharding",
                f"expected weights that are sharded over the {ranks.gradient_ranks()} groups of tensor_parallel ranks, "
                f"not {launch.sharding}",
                "set launch.sharding: fsdp, or launch.tensor_parallel to all ranks",
            )
        split(language.model.to(hardware.device), mesh["tensor"], mesh["shard"].size())
        language.tensor_ranks = ranks.tensor_parallel()

    # FSDP2 (also ZeRO stage 2, HSDP, offloading): shards what is left, layer by layer; else the device has it whole.
    if mesh is not None and sharded:
        shard(model, hardware, mesh, offload=launch.offload, once=launch.sharding == "zero2")
    elif mesh is None:
        model.to(hardware.device)

    # Experts again: their weights are in their final state now, and the same on all ranks that hold them.
    if experts:
        experts.hold(model)


def mesh_of(launch: LaunchConfig, hardware: Hardware) -> DeviceMesh:
    """The ranks by what they share: `replicate` groups that hold the same (hsdp), `shard` ranks over which weights are
    spread, `tensor` ranks that share a layer, or `pipe` ranks that hold other layers each, which are next to each
    other. Dimensions of one rank are left out, but for `shard`.

    Raises StageError for groups that do not divide the ranks.
    """
    total, tensor = ranks.gradient_ranks(), ranks.tensor_parallel()
    each = total
    if launch.sharding == "hsdp":
        each = launch.shard_ranks or max(1, ranks.local_world_size() // tensor)
    if total % each:
        raise stage_error(
            "not_divisible",
            "launch.shard_ranks",
            f"expected a divisor of the {total} ranks that weights are sharded over, not {each}",
            "set launch.shard_ranks to one, such as the ranks of a node",
        )
    sizes = {"replicate": total // each, "shard": each, "tensor": tensor, "pipe": ranks.pipeline_parallel()}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(hardware.device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def shard(model: nn.Module, hardware: Hardware, mesh: DeviceMesh, *, offload: bool, once: bool) -> None:
    """Apply FSDP2: every layer is gathered only for its own computation, the rest of the model for the whole step.

    Layers are gathered in the dtype of their computation, at half of fp32's traffic and memory; gradients are summed
    and weights updated in fp32. The rest (embeddings, the last norm, the output layer) is gathered in fp32: under
    autocast the residual stream has the embeddings' dtype, and stays fp32 as in one process.

    Args:
        once: layers stay whole from their forward to the end of their backward pass (ZeRO stage 2): weights are
            gathered once a microbatch instead of twice.
    """
    groups = mesh["replicate"] if "replicate" in (mesh.mesh_dim_names or ()) else None
    mesh = mesh["shard"]
    policy = CPUOffloadPolicy(pin_memory=hardware.device.type == "cuda") if offload else OffloadPolicy()
    model.to("cpu" if offload else hardware.device)
    precision = MixedPrecisionPolicy(hardware.compute, torch.float32, cast_forward_inputs=False)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=not once, offload_policy=policy, mp_policy=precision)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    _average(model, mesh, groups, hardware)
    for name in _COMPUTING:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)


def _average(model: nn.Module, mesh: DeviceMesh, groups: DeviceMesh | None, hardware: Hardware) -> None:
    """Average each layer's gradients over all ranks once they are ready.

    Args:
        mesh: ranks over which a model is sharded, and over which FSDP2 averages.
        groups: groups of hsdp, which hold the same part of the model; torch's own HSDP fails on gloo.
    """
    summed = _sums_for_mean(hardware.device)
    if groups is None and not summed:
        return

    def average(gradients: Tensor) -> None:
        if groups is not None:
            distributed.all_reduce(gradients, group=groups.get_group())
        gradients.div_((mesh.size() if summed else 1) * (groups.size() if groups is not None else 1))

    for layer in model.modules():
        if isinstance(layer, FSDPModule):
            layer.set_all_reduce_hook(average)


def _sums_for_mean(device: torch.device) -> bool:
    """Return True if this backend returns a sum when FSDP2 requests the ranks' mean gradient, as gloo does silently
    (pytorch issue 162338); every rank must call."""
    mean = torch.zeros(1, device=device)
    values = torch.ones(ranks.world_size(), device=device)
    distributed.reduce_scatter_tensor(mean, values, op=distributed.ReduceOp.AVG)
    return bool(mean.item() != 1)


def shard_optimizer(
    optimizer: torch.optim.Optimizer, launch: LaunchConfig, hardware: Hardware, experts: ExpertParts | None = None
) -> torch.optim.Optimizer:
    """Wrap an optimizer so that it keeps only this rank's part of the state, with `launch.sharding: zero1`; else return
    the given one.

    Args:
        experts: experts that ranks share; ranks with the same ones share their state.
    """
    if launch.sharding != "zero1" or ranks.gradient_ranks() == 1:
        return optimizer
    apart = dict.fromkeys(experts.weights, experts.copies) if experts else {}
    return ShardedOptimizer(optimizer, mesh_of(launch, hardware)["shard"], apart)


def unshard_root(model: nn.Module) -> None:
    """Gather the weights of a sharded model outside of its blocks permanently, so that parts of it can run alone, for
    example to generate answers. Every rank must call."""
    if isinstance(model, FSDPModule):
        model.unshard()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights of a model in fp32 on the CPU, sharded or not; every rank must call. Tied ones share their memory."""
    gathered: dict[int, Tensor] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights = {}
    for name, value in model.state_dict().items():
        key = id(parameters.get(name, value))
        if key not in gathered:
            gathered[key] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().float()
        weights[name] = gathered[key]
    return join_stages(weights) if is_cut(model) else weights


def settle_buckets(model: nn.Module) -> None:
    """Make DDP rebuild its buckets now, with gradients of zero; every rank must call. Other models are not affected.

    DDP rebuilds them after the first backward pass, in the order in which gradients arrived, and more than two ranks
    sum a different layout in a different order: a continued training would differ in the last bits of its first batch.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    weights = [weight for weight in model.module.parameters() if weight.requires_grad]
    # The weights that the model uses last come first, as in a real pass: autograd starts with the last addend.
    nothing = sum((weight.flatten()[:1] * 0).sum() for weight in weights)
    model.reducer.prepare_for_backward([])
    nothing.backward()
    for weight in weights:
        weight.grad = None
