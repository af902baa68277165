"""Checks of the work that several ranks share: batches, layers, sequences, experts, precisions and optimizers.

The config shows all of these for models that are trained from scratch. A loaded model is checked by the same rules
(`training.config.families`, `training.distributed.pipeline_cut`) when its training begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from corpus.config import ShardConfig
from flows.config.pipeline_config import Graph
from infra.errors import Problem
from infra.launch.config import LaunchConfig
from tasks.stage import Node
from training.config import LoraConfig, PretrainConfig, TrainerConfig
from training.config.families import expert_ranks_problem, float8_problem, sequences_problem, split_problem
from training.distributed.pipeline_cut import pipeline_problem
from training.planner.stages import of_model


def rank_problems(launch: LaunchConfig, nodes: Graph, training: Sequence[str]) -> list[Problem]:
    """Problems of batches that the ranks cannot share evenly, and of `tensor_parallel`, `context_parallel`,
    `pipeline_parallel`, `expert_parallel` and `precision: fp8`, each once.

    Args:
        training: the steps that train.
    """
    problems: list[Problem] = []
    if launch.ranks > 1:
        problems += _uneven_batches(launch, nodes, training)
    if launch.tensor_parallel > 1:
        problems += _unsplittable(launch, nodes, training)
    problems += _unshareable(launch, nodes, training)
    if launch.pipeline_parallel > 1:
        problems += _no_pipelines(launch, nodes, training)
    problems += _no_experts(launch, nodes, training)
    if launch.precision == "fp8":
        problems += _no_float8(nodes, training)
    return list(dict.fromkeys(problems))  # several pretrainings may have the same fault


def optimizer_problems(launch: LaunchConfig, node: Node) -> Iterator[Problem]:
    """An optimizer that cannot step a part of a matrix."""
    if not isinstance(node.config, TrainerConfig):
        return
    cuts = f"sharding: {launch.sharding}" if launch.tensor_parallel == 1 else "tensor_parallel"
    if node.config.optimizer.kind == "adafactor" and launch.ranks > 1 and cuts != "sharding: ddp":
        message = f"adafactor keeps rows and columns of whole matrices, which launch.{cuts} cuts"
        yield Problem("contradiction", f"{node.key}.optimizer.kind", message, "set launch.sharding: ddp, or take adamw")


def quantized_problems(launch: LaunchConfig, node: Node) -> Iterator[Problem]:
    """Frozen weights in 4 bits that ranks would share or cut."""
    lora = getattr(node.config, "lora", None)
    if not isinstance(lora, LoraConfig) or not lora.quantize:
        return
    cutting = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
    cuts = [key for key in cutting if getattr(launch, key) > 1]
    if launch.shards_weights and (launch.ranks > 1 or launch.offload):
        cuts.append(f"sharding: {launch.sharding}")
    if cuts:
        message = f"weights in 4 bits are held by each rank as a whole, beside launch.{cuts[0]} they are not supported"
        fix = "set launch.sharding: ddp or zero1 and no other parallelism, or leave quantize out"
        yield Problem("contradiction", f"{node.key}.lora.quantize", message, fix)


_BATCHES = ("global_batch_examples", "global_batch_pairs", "minibatch_answers")


def _uneven_batches(launch: LaunchConfig, nodes: Graph, training: Sequence[str]) -> Iterator[Problem]:
    """Batches of which ranks would not have equal parts."""
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
            message = f"expected a batch that {count} ranks can share, not {size:,} {what}"
            fix = f"make it a multiple of {count} {what}, or start fewer processes"
            yield Problem("not_divisible", f"{node.key}.{key}", message, fix)


def _pretrainings(
    nodes: Graph, training: Sequence[str], *, fresh_alone: bool = True
) -> Iterator[tuple[Mapping[str, str], PretrainConfig]]:
    """Inputs and section of each pretraining.

    Args:
        fresh_alone: only those whose model the config gives; a loaded model is checked when the training begins.
    """
    for node in map(nodes.__getitem__, training):
        if isinstance(section := node.config, PretrainConfig) and not (fresh_alone and "model" in node.inputs):
            yield node.inputs, section


def _unsplittable(launch: LaunchConfig, nodes: Graph, training: Sequence[str]) -> Iterator[Problem]:
    """Reasons why ranks cannot share the layers of models that are pretrained. A vocabulary that is not known yet is
    checked when the training begins."""
    count = launch.tensor_parallel
    shards = launch.ranks // count if launch.shards_weights else 1
    if launch.sharding == "hsdp":
        shards = launch.shard_ranks or max(1, launch.processes // count)
    for _, section in _pretrainings(nodes, training):
        if (sizes := of_model(section.model, None)) is None:
            continue
        wrong = split_problem(
            section.model.architecture(),
            count,
            shards,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_width=sizes.head_width,
            mlp_width=sizes.mlp_width,
            vocabulary=None,
        )
        if wrong:
            yield wrong


def _unshareable(launch: LaunchConfig, nodes: Graph, training: Sequence[str]) -> Iterator[Problem]:
    """Reasons why ranks cannot share the sequences of pretrainings. The family of a loaded model is checked when the
    training begins."""
    for inputs, section in _pretrainings(nodes, training, fresh_alone=False):
        shards = nodes.get(inputs.get("shards", ""))
        length = shards.config.sequence_length if shards and isinstance(shards.config, ShardConfig) else None
        fresh = "model" not in inputs
        wrong = sequences_problem(
            launch.context_parallel,
            section.model.architecture() if fresh else None,
            section.objective,
            length,
            section.model.transformers or {} if fresh else {},
            launch.tensor_parallel,
        )
        if wrong:
            yield wrong


def _no_pipelines(launch: LaunchConfig, nodes: Graph, training: Sequence[str]) -> Iterator[Problem]:
    """Reasons why ranks cannot be pipelines in pretrainings; a loaded model is checked when the training begins."""
    for inputs, section in _pretrainings(nodes, training, fresh_alone=False):
        fresh = "model" not in inputs
        sizes = of_model(section.model, None) if fresh else None
        shards = nodes.get(inputs.get("shards", ""))
        sequences = None
        if shards and isinstance(shards.config, ShardConfig):
            smallest = section.batch_warmup.first_tokens if section.batch_warmup else section.global_batch_tokens
            pipelines = launch.ranks // math.prod(launch.shares_of_examples)
            sequences = smallest // shards.config.sequence_length // pipelines
        wrong = pipeline_problem(
            launch.pipeline_parallel,
            launch.pipeline_pieces,
            model_type=section.model.architecture() if fresh else None,
            layers=sizes.layers if sizes else None,
            sequences=sequences,
            microbatch=None if launch.microbatch == "auto" else launch.microbatch,
        )
        if wrong:
            yield wrong


def _no_experts(launch: LaunchConfig, nodes: Graph, training: Sequence[str]) -> Iterator[Problem]:
    """Why ranks cannot share the experts of pretrainings."""
    for _, section in _pretrainings(nodes, training):
        wrong = expert_ranks_problem(
            launch.expert_parallel,
            section.model.architecture(),
            section.model.transformers or {},
            launch.shares_of_examples,
        )
        if wrong:
            yield wrong


def _no_float8(nodes: Graph, training: Sequence[str]) -> Iterator[Problem]:
    """Why models cannot be pretrained in 8 bits."""
    for _, section in _pretrainings(nodes, training):
        if wrong := float8_problem(section.model.architecture()):
            yield wrong
