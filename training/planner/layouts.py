"""Search for the fastest distribution of a training over devices that fits their memory, and explain the choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import get_args

from training.config.families import FAMILIES, Family
from training.config.parallelism import expert_ranks_problem, passes, sequences_problem, split_problem
from training.core.devices import DEVICES
from training.planner.architecture import of_parameters
from training.planner.hardware.network import network_of
from training.planner.memory import Memory, memory
from training.planner.step_time import RankLayout, Recompute, Sharding, StepTime, Training, step_time

_MOST_DEVICES = 65_536
_SHARDINGS: tuple[Sharding, ...] = ("ddp", "zero1", "zero2", "zero3", "hsdp")
_SHARDING_WEIGHTS = ("zero2", "zero3", "hsdp")
UNEVEN = 1.25
"""Tokens of the busiest device's experts, over an even share, that a layout must hold. With a balancing loss fewer than
1 % of the tokens are beyond it, at an expert and not even a device (Fedus et al. 2021, section 2.2)."""


@dataclass(frozen=True)
class Choice:
    """A layout with what it needs; memory: with tokens spread evenly over experts."""

    layout: RankLayout
    time: StepTime
    memory: Memory
    fits: bool


def divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def candidates(job: Training, devices: int, shardings: tuple[Sharding, ...] = _SHARDINGS) -> Iterator[RankLayout]:
    """Yield possible layouts: tp divides the heads and stays within a node, pp divides the layers, cp the sequence."""
    arch, alone = job.arch, job.kernels.data_parallel_alone
    for tp in [1] if alone else divisors(min(devices, job.device.node)):
        if devices % tp or arch.heads % tp or (arch.kv_heads % tp and tp % arch.kv_heads) or arch.mlp_width % tp:
            continue
        for pp in [1] if alone else divisors(devices // tp):
            if arch.layers % pp or pp > 64:
                continue
            for cp in [1] if alone else divisors(devices // (tp * pp)):
                # Below some 4,096 tokens a device sending keys takes longer than computing with them (Liu et al. 2023).
                if cp > 1 and (job.length % (2 * cp) or job.length // cp < 4096 or cp > 16):
                    continue
                dp = devices // (tp * pp * cp)
                if dp > job.batch or job.batch % dp:
                    continue
                yield from _of_degrees(job, dp, tp, pp, cp, shardings)


def _of_degrees(
    job: Training, dp: int, tp: int, pp: int, cp: int, shardings: tuple[Sharding, ...]
) -> Iterator[RankLayout]:
    arch = job.arch
    alike = dp * cp * tp
    widest = [ep for ep in divisors(min(alike, arch.experts)) if arch.experts % ep == 0 and alike % ep == 0]
    alone = job.kernels.data_parallel_alone
    kinds: tuple[Sharding, ...] = shardings if dp * cp > 1 and not alone else ("ddp",)
    recomputes: tuple[Recompute, ...] = ("none", "full") if alone else get_args(Recompute)
    for sharding in kinds:
        # Gathering weights for each microbatch of a pipeline costs more than it saves; the two are not combined.
        if pp > 1 and sharding not in ("ddp", "zero1"):
            continue
        groups = max(1, job.device.node // tp)  # of a node's devices, of which there must be a whole number
        if sharding == "hsdp" and (dp * cp * tp <= job.device.node or dp * cp % groups):
            continue
        for ep in widest if arch.experts > 1 else [1]:
            for microbatch in (size for size in (1, 2, 4, 8, 16, 32, 64) if dp * size <= job.batch):
                for recompute in recomputes:
                    for interleave in {1, 2} if pp > 1 and (arch.layers // pp) % 2 == 0 else {1}:
                        yield RankLayout(
                            dp, tp, pp, cp, ep, microbatch, recompute, sharding, True, interleave,
                        )  # fmt: skip


def search(job: Training, devices: int, shardings: tuple[Sharding, ...] = _SHARDINGS) -> list[Choice]:
    """Return all layouts: first those that fit, the fastest first, then those that do not fit, by their memory.

    Microbatches larger than the first one that exceeds memory are skipped.
    """
    choices: list[Choice] = []
    full: set[tuple] = set()
    for layout in candidates(job, devices, shardings):
        key = (*vars(replace(layout, microbatch=0)).values(),)
        if key in full:
            continue
        needs = memory(job, layout)
        fits = uneven(job, layout, needs).total <= job.device.memory
        if not fits:
            full.add(key)
        choices.append(Choice(layout, step_time(job, layout), needs, fits))
    return sorted(
        choices, key=lambda choice: (not choice.fits, _cost(choice, job) if choice.fits else choice.memory.total)
    )


def uneven(job: Training, layout: RankLayout, even: Memory) -> Memory:
    """Memory of the busiest device where tokens are spread UNEVENly over experts; `even`, where none are sent."""
    return memory(replace(job, load=UNEVEN), layout) if layout.ep > 1 else even


def batch_that_fits(job: Training, devices: int) -> int | None:
    """Return the number of sequences per batch, at most a twentieth more or fewer, with which such a training fits
    `devices` devices and is fastest; None if the batch is not the obstacle."""
    rounded = {max(1, round(job.batch / copies)) * copies for copies in divisors(devices)} - {job.batch}
    fitting = []
    for batch in rounded:
        if abs(batch - job.batch) <= 0.05 * job.batch:
            other = replace(job, batch=batch)
            choices = search(other, devices)
            if choices and choices[0].fits:
                fitting.append((choices[0].time.total / batch, batch))
    return min(fitting)[1] if fitting else None


def what_would_fit(job: Training, devices: int) -> list[str]:
    """Suggestions for a model that does not fit `devices` devices in any layout: how many of them it needs, other
    devices of which the same number suffices, and the largest model that fits these devices."""
    ways = []
    more = devices
    while more < _MOST_DEVICES:
        more *= 2
        if _fits(replace(job, batch=max(job.batch, more)), more):
            ways.append(f"{more} of them")
            break
    for other in sorted(DEVICES.values(), key=lambda device: device.memory):
        if other.memory > job.device.memory and _fits(replace(job, device=other, network=network_of(other)), devices):
            ways.append(f"{devices} {other.name}")
            break
    held, too_large = 1e5, float(job.arch.parameters)
    while too_large / held > 1.1:
        size = (held * too_large) ** 0.5
        if _fits(replace(job, arch=of_parameters(size, job.arch.vocabulary)), devices):
            held = size
        else:
            too_large = size
    smaller = "a smaller model" if job.arch.experts == 1 else "a smaller model, without experts"
    return [*ways, f"{smaller}: --parameters {held:.1e} at most".replace("e+0", "e").replace("e+", "e")]


def _fits(job: Training, devices: int) -> bool:
    choices = search(job, devices)
    return bool(choices) and choices[0].fits


def runs_here(layout: RankLayout, job: Training) -> bool:
    """Return True if a plan's config can set `launch:` to this layout: `stemma check` must accept it, with a vocabulary
    padded by `padded_vocabulary`."""
    arch, grouped = job.arch, layout.tp * layout.cp > 1
    family = FAMILIES.get(arch.family, Family(context_parallel=False))
    degrees = layout.tp, layout.cp, layout.pp
    if (arch.experts > 1 or layout.ep > 1) and not _can_share_experts(layout.ep, arch.family, arch.experts, degrees):
        return False
    if layout.ep > 1 and layout.sharding not in (("ddp",) if layout.tp > 1 else ("ddp", "zero1")):
        return False
    if sequences_problem(layout.cp, arch.family, "causal", job.length, {}, layout.tp):
        return False
    sizes = {name: getattr(arch, name) for name in ("heads", "kv_heads", "head_width", "mlp_width")}
    shards = _weight_shards(layout, job.device.node)
    if layout.tp > 1 and split_problem(arch.family, layout.tp, shards, **sizes, vocabulary=None):
        return False
    if layout.pp > 1:
        goes = passes(job.batch // layout.dp, layout.microbatch, layout.pp, layout.interleave)
        return family.pipeline_parallel and goes and layout.sharding in (("ddp",) if grouped else ("ddp", "zero1"))
    averaged = layout.sharding in _SHARDING_WEIGHTS or layout.ep > 1
    return layout.tp == 1 or layout.dp * layout.cp == 1 or averaged


@cache
def _can_share_experts(ep: int, family: str, experts: int, degrees: tuple[int, int, int]) -> bool:
    """Return True if ranks can share the experts. Cached, since thousands of layouts call it a few times each."""
    return expert_ranks_problem(ep, family, {"num_experts": experts}, degrees) is None


def padded_vocabulary(layout: RankLayout, node: int) -> int:
    """Number of which a vocabulary must be a multiple, so that ranks share it evenly; 1 if they do not share it."""
    return layout.tp * _weight_shards(layout, node) if layout.tp > 1 else 1


def _weight_shards(layout: RankLayout, node: int) -> int:
    return layout.shards(node) if layout.sharding in _SHARDING_WEIGHTS else 1


def _cost(choice: Choice, job: Training) -> float:
    """Seconds per step; a layout that this system does not support must be 2 % faster to justify another system."""
    return choice.time.total * (1.0 if runs_here(choice.layout, job) else 1.02)


def describe(layout: RankLayout) -> str:
    """Return a layout in words: `dp 8 × tp 2, zero1, 4 sequences at once, full recompute`."""
    degrees = [
        f"{name} {getattr(layout, name)}" for name in ("dp", "tp", "pp", "cp", "ep") if getattr(layout, name) > 1
    ]
    words = [" × ".join(degrees) or "one device"]
    if layout.dp * layout.cp > 1:
        words.append(layout.sharding)
    words.append(f"{layout.microbatch} sequence{'s' * (layout.microbatch > 1)} at once")
    if layout.interleave > 1:
        words.append(f"{layout.interleave} pieces a stage")
    if layout.recompute != "none":
        words.append(f"{layout.recompute} recompute")
    return ", ".join(words)


def why_lost(best: Choice, other: Choice, job: Training) -> str:
    """Return a sentence on where the other layout spends more time, or that it does not fit."""
    if not other.fits:
        return f"needs {other.memory.total / 1e9:.1f} GB, has {job.device.memory / 1e9:.1f} GB"
    slower = other.time.total / best.time.total - 1
    more = {name: value - getattr(best.time, name) for name, value in vars(other.time).items()}
    part, seconds = max(more.items(), key=lambda pair: pair[1])
    if slower < 0.02 and runs_here(best.layout, job) and not runs_here(other.layout, job):
        than = f"{-slower:.1%} faster" if slower < -0.0005 else "as fast" if slower < 0.0005 else f"{slower:.1%} slower"
        return f"{than}, and launch: cannot be set to it"
    if seconds <= 0 or slower < 1e-6:
        return "it is as fast"
    words = {
        "compute": "its products are smaller, and slower",
        "recompute": "it computes activations again",
        "tensor": "tensor parallelism sums activations in every layer",
        "context": "keys and values are gathered",
        "experts": "tokens are sent to experts",
        "pipeline": "activations are handed from stage to stage",
        "bubble": "stages of the pipeline wait for each other",
        "data": "gradients or weights are sent longer than computing takes",
        "optimizer": "each device updates more weights",
        "lost": "more is lost to launches and waiting",
    }
    return f"{slower:.1%} slower: {words[part]} ({seconds / best.time.total:+.1%} of the step)"
