"""Estimate the needs of each training stage of a config on its machine: time, money, memory and disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infra.errors import Problem
from infra.launch.config import LaunchConfig
from training.config import (
    DistillConfig,
    ModelConfig,
    PreferenceTuningConfig,
    PretrainConfig,
    RewardModelConfig,
    RlhfConfig,
    SftConfig,
    TrainerConfig,
)
from training.config.duration import parse_duration
from training.config.parallelism import microbatch_of
from training.config.trainer import KeepEvery
from training.core.devices import DEVICES, GIB, Device
from training.planner.architecture import VOCABULARY, Architecture, of_shape, of_transformers
from training.planner.hardware.kernels import KERNELS, fused_kernels
from training.planner.hardware.network import network_of
from training.planner.memory import memory
from training.planner.plan import MISS
from training.planner.step_time import RankLayout, Sharding, Training, step_time

_CPU_SPREAD = 2.5
"""Uncertainty factor of a CPU's speed: it is measured by a single matrix product."""
_WEIGHT_BYTES, _MOMENT_BYTES = 4, 8
_NF4_BYTES = 4.127 / 8  # training/model/nf4.py
"""Bytes of a parameter in a checkpoint and in the exported model, and of its two moments in a checkpoint."""


_PROCESS = 0.9e9
"""Bytes of a process on a CPU before it trains: the interpreter, torch, transformers and the loop."""
_KEPT, _KEPT_OF_VARYING = 1.3, 2.6
"""Memory that a process on a CPU holds for temporary tensors, relative to those that exist at once. The allocator keeps
what is freed; where the shapes of batches vary, as everywhere but in pretraining, less of it fits the next batch
(benchmarks/log/planner.md, "Memory of processes on a CPU")."""


@dataclass(frozen=True)
class StageNeeds:
    """hours, hours_low, hours_high, cost_usd: None where the length of the training is not known before its data are.

    builds_here: number of builds on this machine that the hours are from; 0 for an estimate by sizes.
    memory_gb: of the fullest device, of memory_limit_gb; on a CPU of a process, with its libraries. tensors_gb: of the
    tensors in it. microbatch: sequences at once.
    """

    device: str
    devices: int
    hours: float | None
    hours_low: float | None
    hours_high: float | None
    cost_usd: float | None
    memory_gb: float
    memory_limit_gb: float
    disk_gb: float
    microbatch: int
    fits: bool
    tensors_gb: float
    builds_here: int = 0

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


def of_model(config: ModelConfig, vocabulary: int | None) -> Architecture | None:
    """The architecture of a config; None for a free one whose sizes have other names."""
    entries = math.ceil((vocabulary or VOCABULARY) / config.vocab_multiple) * config.vocab_multiple
    if config.transformers is not None:
        given = config.transformers.get("vocab_size")  # used without padding
        return of_transformers(config.transformers, given if isinstance(given, int) else entries)
    return of_shape(config.shape(), entries, config.preset or config.shape().family)


def device_of(launch: LaunchConfig) -> Device | None:
    """The device that `launch.hardware` names; None for the current machine."""
    return DEVICES.get(launch.hardware) if launch.hardware else None


def layout_of(
    launch: LaunchConfig,
    microbatch: int,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
) -> RankLayout:
    """Convert `launch:` to the planner's terms: fsdp is ZeRO's stage 3."""
    sharding: Sharding = "ddp"
    if launch.ranks > tensor_parallel or launch.offload:
        sharding = "zero3" if launch.sharding == "fsdp" else launch.sharding
    return RankLayout(
        launch.ranks // (tensor_parallel * context_parallel * pipeline_parallel),
        tensor_parallel,
        pipeline_parallel,
        context_parallel,
        expert_parallel,
        microbatch=microbatch,
        recompute=launch.recompute,
        sharding=sharding,
        interleave=launch.pipeline_pieces if pipeline_parallel > 1 else 1,
        shard_ranks=launch.shard_ranks or max(1, launch.processes // tensor_parallel),
    )


def needs(
    config: TrainerConfig,
    arch: Architecture,
    length: int,
    launch: LaunchConfig,
    device: Device,
    epoch_tokens: float | None,
    scorers: Sequence[int] | None = None,
) -> StageNeeds:
    """Estimate the needs of a stage on `launch.ranks` devices.

    Args:
        length: tokens of a sequence.
        epoch_tokens: of one reading of its data, where that is known.
        scorers: parameters of each reward model and judge of an `rlhf` step; by default of one reward model of the
            policy's size.
    """
    ranks, tensor, context, pipeline, experts = launch.ranks, 1, 1, 1, 1
    if isinstance(config, PretrainConfig):  # in other stages every rank has a part of a batch
        tensor, context, pipeline = launch.shares_of_examples
        experts = launch.expert_parallel
    parts = ranks // (tensor * context * pipeline)
    scorers = [arch.parameters] if scorers is None else scorers
    sequences, passes = _batch(config, length, len(scorers))
    copies = 0.0  # whole models in fp32 beside what learns
    if isinstance(config, RlhfConfig):  # the reference, and what scores
        copies = (0 if config.lora else 1) + sum(scorers) / arch.parameters
    if isinstance(config, DistillConfig):  # the teacher, whose size is not known here
        copies = 1
    values = isinstance(config, RlhfConfig) and config.chosen_algorithm == "ppo"
    if isinstance(config, RlhfConfig) and launch.shards_weights and (ranks > 1 or launch.offload):
        copies += 2 if values else 1  # where weights are sharded, whole ones write and value answers
    precision = "fp32" if launch.precision == "fp32" else "bf16"
    if launch.precision == "fp8" and isinstance(config, PretrainConfig):
        precision = "fp8"
    kernels = fused_kernels(device)
    if launch.attention == "eager" or (launch.compile == "on" and isinstance(config, PretrainConfig)):
        kernels = KERNELS["plain" if launch.attention == "eager" else "compiled"]
    # Adapters learn alone; they are planned beside all linear layers, also where `lora` names some of them.
    lora = config.lora if isinstance(config, SftConfig | PreferenceTuningConfig | RlhfConfig) else None
    rank = lora.rank if lora else 0
    adapters = adapter_weights(arch, rank) / arch.parameters
    learnt = adapters or 1.0
    moments = moments_of(config, arch) * learnt
    batch = max(sequences, parts)
    host = launch.offload and device.name != "cpu"  # a CPU's memory is the host's
    job = Training(
        arch, device, kernels, network_of(device), length, batch, precision, moments, learnt=learnt, adapters=rank,
        offload=host,
    )  # fmt: skip
    share = max(1, -(-sequences // parts))
    # What launch.microbatch counts: a pair has two sequences, which are computed together.
    each = 2 if isinstance(config, RewardModelConfig | PreferenceTuningConfig) else 1
    examples = max(1, share // each)
    tried = [1 << power for power in range(examples.bit_length() - 1, -1, -1)]
    if isinstance(launch.microbatch, int):
        tried = [min(examples, launch.microbatch)]
    elif pipeline > 1:
        tried = [microbatch_of(share, pipeline, launch.pipeline_pieces) or 1]
    for at_once in (each * count for count in tried):
        at = layout_of(launch, at_once, tensor, context, pipeline, experts)
        other_copies = (copies + adapters) * _WEIGHT_BYTES * arch.parameters
        used = memory(job, at)
        # PPO's value function learns in the policy's steps, and has no logits.
        total = used.total + (used.total - used.logits if values else 0.0) + other_copies
        temporary = (used.casts + used.activations + used.buffers) * (1 + values) + used.logits
        if lora and lora.quantize:
            total -= (_WEIGHT_BYTES - _NF4_BYTES) * arch.layers * arch.layer_weights
        if isinstance(config, RlhfConfig) and config.text_coef:
            total += used.activations  # of the text, which the policy reads in the same step
            temporary += used.activations
        needed = total
        if device.name == "cpu":
            kept = _KEPT if isinstance(config, PretrainConfig) else _KEPT_OF_VARYING
            needed += _PROCESS + (kept - 1) * temporary
        if needed <= device.memory:
            break
    shares = launch.share_prompts == "on" or (launch.share_prompts == "auto" and device.name not in DEVICES)
    hours = _hours(config, job, at, length, passes * (_own_share(config, length) if shares else 1), epoch_tokens)
    spread = (1 - MISS, 1 + MISS) if device.name in DEVICES else (1 / _CPU_SPREAD, _CPU_SPREAD)
    states = config.keep_checkpoints + (0 if config.keep_state == "none" else 1)
    if isinstance(config.keep_state, KeepEvery):
        states += 9  # about: how many there will be depends on the length
    return StageNeeds(
        device.name,
        ranks,
        hours,
        hours and hours * spread[0],
        hours and hours * spread[1],
        hours and (hours * ranks * device.hourly if device.hourly else 0.0),
        needed / 1e9,
        device.memory / 1e9,
        (states * (1 + values) * (_WEIGHT_BYTES + _MOMENT_BYTES * learnt) + _WEIGHT_BYTES) * arch.parameters / 1e9,
        at_once,
        needed <= device.memory,
        total / 1e9,
    )


def moments_of(config: TrainerConfig, arch: Architecture) -> float:
    """Bytes of optimizer state per parameter: AdamW has two moments, Lion one, Muon one for matrices of the blocks,
    Adafactor one number per row and column."""
    if config.optimizer.kind == "lion":
        return 4.0
    if config.optimizer.kind == "adafactor":
        return 4.0 * 2 / arch.width
    blocks = arch.layers * arch.layer_weights / arch.parameters
    return 8.0 - (4.0 * blocks if config.optimizer.muon else 0.0)


def adapter_weights(arch: Architecture, rank: int) -> int:
    """Weights of adapters on all linear layers of a model's blocks (training/model/lora.py)."""
    queries, keys = arch.heads * arch.head_width, arch.kv_heads * arch.head_width
    sides = 2 * (arch.width + queries) + 2 * (arch.width + keys)
    sides += arch.experts * (3 if arch.gated else 2) * (arch.width + arch.mlp_width)
    sides += arch.width + arch.experts if arch.experts > 1 else 0
    return arch.layers * rank * sides


def _batch(config: TrainerConfig, length: int, scorers: int) -> tuple[int, float]:
    """Return (sequences per step, cost per sequence in forward-and-backward passes)."""
    match config:
        case PretrainConfig():
            return max(1, config.global_batch_tokens // length), 1
        case SftConfig():
            return config.global_batch_examples, 1
        case RewardModelConfig():
            return 2 * config.global_batch_pairs, 1
        case DistillConfig():
            # The teacher's forward pass is a third of a step if it is as large as the student, and each of the
            # student's answers is sampled, about a third too.
            return config.global_batch_examples, (4 + config.on_policy_share) / 3
        case PreferenceTuningConfig():
            # The reference model's forward pass is a third of a step, and its figures are kept instead of its weights.
            return 2 * config.global_batch_pairs, 4 / 3
        case RlhfConfig():
            values = config.chosen_algorithm == "ppo"
            # An answer is sampled, and read by policy, reference, value function and all that score: a third each.
            read = (3 + values + scorers) / 3
            # What learns reads it in each epoch, and with text_coef the policy as much text.
            learning = 1 + values + (config.text_coef > 0)
            learnt = config.epochs * config.learnt_answers / config.rollout_prompts
            return config.minibatch_answers, learnt * learning + read
        case _:
            raise TypeError(type(config))


def _own_share(config: TrainerConfig, length: int) -> float:
    """Share of a minibatch's tokens that are computed if all answers to a prompt share its computation."""
    if not isinstance(config, RlhfConfig):
        return 1.0
    return (config.answer_max_tokens + config.max_prompt_tokens / config.answers_per_prompt) / length


def _hours(
    config: TrainerConfig, job: Training, at: RankLayout, length: int, passes: float, epoch_tokens: float | None
) -> float | None:
    seconds = passes * step_time(job, at).total
    if isinstance(config, RlhfConfig):
        return config.rollouts * config.rollout_prompts / config.minibatch_answers * seconds / 3600
    duration = parse_duration(config.duration)  # type: ignore[attr-defined]
    if duration.unit == "batches":
        return duration.value * seconds / 3600
    if duration.unit == "tokens":
        return duration.value / (job.batch * length) * seconds / 3600
    return None if epoch_tokens is None else duration.value * epoch_tokens / (job.batch * length) * seconds / 3600


def problem(key: str, needed: StageNeeds, ways: Sequence[str]) -> Problem:
    """Problem of a stage that does not fit.

    Args:
        ways: changes that would fit, from training/planner/ways_out.py.
    """
    message = (
        f"{needed.devices} × {needed.device} do not have enough memory: {needed.memory_gb:,.1f} GB per device with "
        f"{needed.microbatch} sequence{'s' * (needed.microbatch > 1)} at once, of {needed.memory_limit_gb:,.1f}"
    )
    fix = f"it would fit with {', or with '.join(ways)}" if ways else "use a smaller model or shorter sequences"
    return Problem("does_not_fit", key, message, f"{fix}; stemma plan finds the fastest that fits")


def this_machine(memory_bytes: float, flops: float) -> Device:
    """A CPU as a device.

    Args:
        flops: FLOP/s of its matrix products in fp32.
    """
    return Device(
        "cpu", "this machine's CPU", {"fp32": flops, "bf16": flops}, memory_bytes / GIB + 1.5, 1e12, 5e9, 1e9, 1, 100,
        (0.0, 0.0), 0, 1.0, "one product of matrices in fp32",
    )  # fmt: skip
