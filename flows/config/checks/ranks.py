"""Checks of the work that several ranks share: batches, layers, sequences, experts, precisions and optimizers.

The rules are in `training.config.parallelism`. A config shows all that they need for a model that is trained from
scratch; a loaded model is checked by the same rules when its training begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from corpus.config import ShardConfig
from flows.config.pipeline_config import Graph
from infra.errors import Problem
from infra.launch.config import LaunchConfig
from tasks.stage import Node
from training.config import LoraConfig, PretrainConfig, TrainerConfig
from training.config.parallelism import LayerSizes, SharedTraining, layout_problems
from training.planner.stages import of_model


def rank_problems(launch: LaunchConfig, nodes: Graph, training: Sequence[str]) -> list[Problem]:
    """Return problems of batches that cannot be divided evenly among ranks, and of `tensor_parallel`,
    `context_parallel`, `pipeline_parallel`, `expert_parallel` and `precision: fp8`, each once.

    Args:
        training: the steps that train.
    """
    problems: list[Problem] = []
    if launch.ranks > 1:
        problems += _uneven_batches(launch, nodes, training)
    if max(launch.expert_parallel, *launch.shares_of_examples) > 1 or launch.precision == "fp8":
        for node in map(nodes.__getitem__, training):
            if isinstance(section := node.config, PretrainConfig):
                problems += layout_problems(launch, _shared(launch, nodes, node.inputs, section))
    return list(dict.fromkeys(problems))  # several pretrainings may have the same fault


def optimizer_problems(launch: LaunchConfig, node: Node) -> Iterator[Problem]:
    """Yield a problem for an optimizer that cannot update a part of a matrix."""
    if not isinstance(node.config, TrainerConfig):
        return
    cuts = f"sharding: {launch.sharding}" if launch.tensor_parallel == 1 else "tensor_parallel"
    if node.config.optimizer.kind == "adafactor" and launch.ranks > 1 and cuts != "sharding: ddp":
        message = f"adafactor keeps statistics of the rows and columns of whole matrices, which launch.{cuts} shards"
        yield Problem("contradiction", f"{node.key}.optimizer.kind", message, "set launch.sharding: ddp, or take adamw")


def quantized_problems(launch: LaunchConfig, node: Node) -> Iterator[Problem]:
    """Yield a problem for 4-bit frozen weights that ranks would shard."""
    lora = getattr(node.config, "lora", None)
    if not isinstance(lora, LoraConfig) or not lora.quantize:
        return
    cutting = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
    cuts = [key for key in cutting if getattr(launch, key) > 1]
    if launch.shards_weights and (launch.ranks > 1 or launch.offload):
        cuts.append(f"sharding: {launch.sharding}")
    if cuts:
        message = f"4-bit weights cannot be sharded, so they are not supported with launch.{cuts[0]}"
        fix = "set launch.sharding: ddp or zero1 and no other parallelism, or leave quantize out"
        yield Problem("contradiction", f"{node.key}.lora.quantize", message, fix)


_BATCHES = ("global_batch_examples", "global_batch_pairs", "minibatch_answers")


def _uneven_batches(launch: LaunchConfig, nodes: Graph, training: Sequence[str]) -> Iterator[Problem]:
    """Yield batches that cannot be divided equally among ranks."""
    for node in map(nodes.__getitem__, training):
        if node.adopted or not isinstance(section := node.config, TrainerConfig):
            continue
        count = launch.ranks
        if isinstance(section, PretrainConfig):
            shards = nodes.get(node.inputs.get("shards", ""))
            if shards is None or not isinstance(shards.config, ShardConfig):
                continue
            key, count = "global_batch_tokens", count // math.prod(launch.shares_of_examples)
            size = section.global_batch_tokens // shards.config.sequence_length
            if warmup := section.batch_warmup:
                key, size = "batch_warmup.first_tokens", warmup.first_tokens // shards.config.sequence_length
        else:
            key = next(candidate for candidate in _BATCHES if hasattr(section, candidate))
            size = getattr(section, key)
        if count > 1 and size % count:
            what = "sequences" if isinstance(section, PretrainConfig) else "examples"
            message = f"expected a batch divisible among {count} ranks, not {size:,} {what}"
            fix = f"make it a multiple of {count} {what}, or start fewer processes"
            yield Problem("not_divisible", f"{node.key}.{key}", message, fix)


def _shared(launch: LaunchConfig, nodes: Graph, inputs: Mapping[str, str], section: PretrainConfig) -> SharedTraining:
    """Facts that a config shows of a pretraining whose work ranks share."""
    # The batch, in sequences of the shards.
    shards = nodes.get(inputs.get("shards", ""))
    length = shards.config.sequence_length if shards and isinstance(shards.config, ShardConfig) else None
    smallest = section.batch_warmup.first_tokens if section.batch_warmup else section.global_batch_tokens
    pipelines = launch.ranks // math.prod(launch.shares_of_examples)
    shared = SharedTraining(
        section.objective, length=length, sequences=smallest // length // pipelines if length else None
    )

    # The model, unless another step makes it.
    if "model" in inputs:
        return shared
    shared = replace(shared, model_type=section.model.architecture(), values=section.model.transformers or {})
    if (arch := of_model(section.model, None)) is None:
        return shared
    sizes = LayerSizes(arch.heads, arch.kv_heads, arch.head_width, arch.mlp_width)
    return replace(shared, layers=arch.layers, sizes=sizes)
