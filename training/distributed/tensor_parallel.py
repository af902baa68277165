"""Tensor parallelism with sequence parallelism: ranks that share every layer (Shoeybi et al. 2019; Korthikanti et al.
2022, section 4.2.2), for decoders whose parts have Llama's names.

Heads and the MLP's inner width are split over the ranks of a group, and so is the vocabulary of embedding and output
layer (training/distributed/split_loss.py). Between them, norms and the residual stream are split along the sequence:
every rank has its own T / ranks tokens. All ranks of a group get the same examples.

Shapes: B sequences, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from infra.errors import Problem, StageError
from training.config.parallelism import split_problem
from training.core import ranks
from training.distributed.gradients import clip_by

_SEQUENCE = 1
_HEADS = 2
"""The dimension of heads where a norm of queries and keys works on (B, T, H, head width)."""


def problems(config: Any, count: int, shard_ranks: int = 1) -> list[Problem]:
    """Return the reasons why a model cannot be split over `count` ranks, each part sharded over `shard_ranks`.

    Args:
        config: of transformers.
    """
    wrong = split_problem(
        config.model_type,
        count,
        shard_ranks,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        mlp_width=getattr(config, "intermediate_size", 0),
        vocabulary=config.vocab_size,
    )
    return [wrong] if wrong else []


def split(
    network: PreTrainedModel, mesh: DeviceMesh, shard_ranks: int = 1, runs: Sequence[range] | None = None
) -> None:
    """Split a model in place over the ranks of `mesh`, in one dimension; each has loaded all of it, on its device.

    The model's outputs do not change: hidden states (B, T, D), the same on every rank of the group; so are the inputs
    and outputs of each run of layers. T must be a multiple of the ranks (see `padded`). Raises StageError for a model
    that cannot be split this way.

    Args:
        runs: runs of layers on these ranks, for a model that is divided into pieces; by default one run of all
            layers.
    """
    if problem := problems(network.config, mesh.size(), shard_ranks):
        raise StageError(*problem)
    stack, head = network.base_model, network.get_output_embeddings()
    last = len(stack.layers) - 1
    tied = head is not None and stack.embed_tokens is not None and head.weight is stack.embed_tokens.weight
    plan: dict[str, Any] = {}
    if stack.embed_tokens is not None:
        plan["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    for run in [range(last + 1)] if runs is None else runs:
        # Positions and masks are made of whole sequences; the residual stream is split where the first layer begins.
        plan[f"layers.{run[0]}"] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(_SEQUENCE),), use_local_output=True
        )
        if run[-1] == last:
            plan["norm"] = SequenceParallel()
    parallelize_module(stack, mesh, plan)
    for layer in stack.layers:
        parallelize_module(layer, mesh, _layer_plan(layer))
    for run in [range(last + 1)] if runs is None else runs:
        joined = PrepareModuleOutput(output_layouts=Shard(_SEQUENCE), desired_output_layouts=Replicate())
        parallelize_module(stack.norm if run[-1] == last else stack.layers[run[-1]], mesh, joined)
    if tied:
        head.weight = stack.embed_tokens.weight
    elif head is not None:
        head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)], src_data_rank=None))


def _layer_plan(layer: nn.Module) -> dict[str, Any]:
    parts = dict(layer.named_modules())
    plan: dict[str, Any] = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(_SEQUENCE)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.q_norm": SequenceParallel(sequence_dim=_HEADS, use_local_output=True),
        "self_attn.k_norm": SequenceParallel(sequence_dim=_HEADS, use_local_output=True),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(_SEQUENCE)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(_SEQUENCE),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(_SEQUENCE)),
    }
    for mixture in [name for name in ("mlp", "block_sparse_moe") if f"{name}.experts" in parts]:
        # Each rank's own tokens go to the experts (training/distributed/expert_parallel.py).
        here = (Shard(_SEQUENCE),)
        plan[mixture] = PrepareModuleInput(input_layouts=here, desired_input_layouts=here, use_local_output=True)
        plan[f"{mixture}.gate"] = _RouterOfOwnTokens()
    return {name: how for name, how in plan.items() if name in parts}


class _RouterOfOwnTokens(ParallelStyle):
    """A router that gets different tokens on each rank; its weight is whole on every rank, and each has a part of its
    gradient. It computes on plain tensors, since it returns three, one of which is of integers."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        local_weight = module.get_parameter("weight").detach()
        replicated = distribute_tensor(local_weight, device_mesh, [Replicate()], src_data_rank=None)
        module.weight = nn.Parameter(replicated)

        def take_plain(router: nn.Module, _: Any) -> None:
            router._parameters["weight"] = weight.to_local(grad_placements=[Partial()])

        def give_back(router: nn.Module, *_: Any) -> None:
            router._parameters["weight"] = weight

        weight: Any = module.weight
        module.register_forward_pre_hook(take_plain)
        module.register_forward_hook(give_back, always_call=True)
        return module


def padded(batch: Mapping[str, Tensor], count: int) -> tuple[dict[str, Tensor], int]:
    """Pad the tokens of a batch on the right to a multiple of `count`; return the batch and the original T.

    Padding comes after all tokens, where a causal model does not see it.

    Args:
        batch: tensors (B, T) by name.
        count: the divisor of the padded length.
    """
    length = batch["input_ids"].shape[1]
    more = -length % count
    if not more:
        return dict(batch), length
    return {
        name: nn.functional.pad(value, (0, more), value=-100 if name == "labels" else 0)
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.shape[1:2] == (length,)
    }, length


def sum_gradients(weights: Iterable[nn.Parameter]) -> None:
    """Sum partial gradients over the ranks of a group: those of weights that all ranks hold whole, such as a norm's.
    Every rank must call."""
    for weight in weights:
        gradient: Any = weight.grad
        if isinstance(weight, DTensor) and gradient is not None and gradient.placements != weight.placements:
            weight.grad = gradient.redistribute(placements=weight.placements)


def clip(model: nn.Module, limit: float) -> float:
    """Scale all gradients so that their norm over all ranks is at most `limit`; return the norm before. All must call.

    torch's own adds up no norms of tensors that are spread over different groups of ranks.
    """
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    if not gradients:
        return 0.0
    total = torch.stack([squares(gradient) for gradient in gradients]).sum()
    return clip_by(total, gradients, limit)


def squares(gradient: Tensor) -> Tensor:
    """Return this rank's part of a gradient's sum of squares: each rank counts its share of replicated values."""
    if not isinstance(gradient, DTensor):
        return gradient.float().square().sum() / ranks.world_size()
    mesh = gradient.device_mesh
    copies = ranks.world_size() // mesh.size()
    for size, placement in zip(mesh.shape, gradient.placements, strict=True):
        copies *= size if placement.is_replicate() else 1
    return gradient.to_local().float().square().sum() / copies
