"""The plan of a pretraining: layout, time, cost, energy and carbon, with ranges and their sources."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from infra.errors import ConfigError, Problem
from infra.launch.devices.gpus import compiles_for, installed_cuda, needed_cuda
from training.config.recipes import RECIPES
from training.core.devices import Device, find_device
from training.planner.architecture import Architecture, of_parameters, of_preset
from training.planner.failures import failures
from training.planner.hardware.kernels import KERNELS, Kernels, default_kernels, find_kernels
from training.planner.hardware.network import Network, network_of
from training.planner.laws.scaling_laws import DEFAULT_LAW, LAWS, Law, find_law
from training.planner.layouts import (
    UNEVEN,
    Choice,
    batch_that_fits,
    describe,
    padded_vocabulary,
    runs_here,
    search,
    uneven,
    what_would_fit,
    why_lost,
)
from training.planner.step_time import Training, step_time
from training.planner.verdict import expected_loss, verdict
from training.planner.wish import Budget, Size, check, resolve

MISS = 0.15
"""Relative error of the time: the tolerance of the table of published figures in docs/planning/accuracy.md."""
HOST = (0.9, 1.1, 1.3)
"""Power of a device with its share of the host, over its own limit: Patterson et al. 2021, table 4, has 330 W for each
V100 of 300 W."""
PUE = (1.08, 1.1, 1.56)
"""Power of a data centre per watt of its computers: Google, Patterson et al. 2021, Uptime Institute 2022."""
CARBON = (0.03, 0.48, 0.75)
"""kg CO2 per kWh: hydro and nuclear grids, the world's mean of 2023 (Ember), coal."""


@dataclass(frozen=True)
class PlanRequest:
    """Request for a plan; see `stemma plan --help`.

    price: USD per device and hour, None for the device's price range. batch_tokens: None for GPT-3's at that size.
    capital: USD to buy one device, None for the device's price. gbit: Gbit/s from a node to others. pod: devices that
    this network connects, and pod_gbit: Gbit/s from a node to other pods. own_tokens, used_tokens: see
    training/planner/verdict.py. arch: the model of a config, instead of preset and parameters, and model: the section
    pretrain.model of that config.
    """

    device: Device
    law: Law
    gpus: int = 8
    preset: str | None = None
    parameters: float | None = None
    tokens: float | None = None
    budget: Budget = field(default_factory=Budget)
    kernels: Kernels | None = None
    price: float | None = None
    batch_tokens: int | None = None
    length: int = 2048
    vocabulary: int | None = None
    precision: str = "bf16"
    capital: float | None = None
    gbit: float | None = None
    pod: int | None = None
    pod_gbit: float | None = None
    own_tokens: float | None = None
    used_tokens: float | None = None
    arch: Architecture | None = None
    model: Mapping[str, Any] | None = None

    @property
    def named(self) -> Architecture | None:
        """The requested model, None if the request names none."""
        if self.preset:
            return of_preset(self.preset, self.vocabulary)
        return of_parameters(self.parameters, self.vocabulary) if self.parameters else self.arch

    @property
    def prices(self) -> tuple[float, float, float]:
        """USD for one device and hour: low, middle, high."""
        if self.price is not None:
            return self.price, self.price, self.price
        return self.device.price[0], self.device.hourly, self.device.price[1]

    @property
    def to_buy(self) -> float:
        """USD for one device."""
        return self.device.bought if self.capital is None else self.capital

    @property
    def network(self) -> Network:
        return network_of(self.device, self.gbit, self.pod, self.pod_gbit)


def request(
    *,
    gpu: str = "a100-80",
    law: str = DEFAULT_LAW,
    kernels: str | None = None,
    compute: float | None = None,
    money: float | None = None,
    days: float | None = None,
    **others: Any,
) -> PlanRequest:
    """Create a request from names. Raises ConfigError with all unknown names."""
    problems: list[Problem] = []

    def known(find: Callable[[str], Any], name: str) -> Any:
        try:
            return find(name)
        except ConfigError as error:
            problems.extend(error.problems)
            return None

    device, fit = known(find_device, gpu), known(find_law, law)
    chosen = known(find_kernels, kernels) if kernels else None
    if others.get("preset"):
        known(of_preset, others["preset"])
    if problems:
        raise ConfigError(*problems)
    return PlanRequest(device=device, law=fit, kernels=chosen, budget=Budget(compute, money, days), **others)


@dataclass(frozen=True)
class Estimate:
    """A model on some devices: its best layout and speed. tokens_per_s: over all devices."""

    job: Training
    choices: tuple[Choice, ...]
    tokens_per_s: float

    @property
    def best(self) -> Choice:
        return self.choices[0]


def batch_tokens(arch: Architecture, tokens: float, length: int, gpus: int) -> int:
    """Tokens of an optimizer step: GPT-3's of that size (Brown et al. 2020, table 2.1), at least a sequence for each
    device, and no more than leaves a short training a thousand steps."""
    recipe = RECIPES.get(arch.name.replace("gpt-", "gpt3-"))
    size = arch.of_a_token
    of_size = 1 << 19 if size < 1e9 else 1 << 20 if size < 4e9 else 1 << 21 if size < 2e10 else 3 << 20
    target = int(recipe["global_batch_tokens"]) if recipe and "gpt3" in arch.name.replace("gpt-", "gpt3-") else of_size
    if size < 1e8:
        target = min(target, 1 << max(0, int(math.log2(max(1.0, tokens / 1000)))))
    sequences = max(4, target // length)
    if sequences % gpus:
        sequences = max(1, round(sequences / gpus)) * gpus
    return sequences * length


@lru_cache(maxsize=512)
def estimate(
    arch: Architecture, device: Device, gpus: int, kernels: Kernels, length: int, batch: int, precision: str,
    network: Network,
) -> Estimate:  # fmt: skip
    """Return the layouts of a training, the best first, and its speed with the best.

    Args:
        arch: the architecture.
        device: the kind of GPU.
        gpus: number of GPUs.
        kernels: the kernels that train.
        length: tokens per sequence.
        batch: sequences per batch.
        precision: of matrix products.
        network: links between the GPUs.

    Raises ConfigError `does_not_fit` with what would have to change.
    """
    job = Training(arch, device, kernels, network, length, batch, precision)
    choices = search(job, gpus)
    if not choices or not choices[0].fits:
        if kernels.data_parallel_alone:
            # A model of this size is trained with sharding and similar methods: only the speed of the kernels differs.
            job = replace(job, kernels=replace(kernels, data_parallel_alone=False))
            choices = search(job, gpus)
        if not choices or not choices[0].fits:
            raise ConfigError(_does_not_fit(job, gpus, choices))
    return Estimate(job, tuple(choices), batch * length / choices[0].time.total)


def _does_not_fit(job: Training, gpus: int, choices: list[Choice]) -> Problem:
    arch = job.arch
    if batch := batch_that_fits(job, gpus):
        return Problem(
            "does_not_fit",
            "--batch-tokens",
            f"expected a batch that {gpus} {job.device.title} can share: of {job.batch:,} sequences, copies of "
            f"{arch.name} that fit their memory get unequal parts",
            f"use --batch-tokens {batch * job.length} ({batch:,} sequences), or other --gpus",
        )
    least = (
        f"at least {choices[0].memory.total / 1e9:,.0f} GB per device" if choices else "a layout that divides its sizes"
    )
    message = (
        f"{arch.name}, {arch.parameters / 1e9:,.1f}B parameters, fits no layout on {gpus} {job.device.title}: it needs "
        f"{least}, which has {job.device.memory / 1e9:,.0f} GB"
    )
    return Problem("does_not_fit", "--gpus", message, f"use {', or '.join(what_would_fit(job, gpus))}")


def _check_machines(request: PlanRequest) -> None:
    """Raise ConfigError for impossible numbers of machines, network speeds and sizes."""
    given = {
        "--gpus": request.gpus, "--price": request.price, "--capital": request.capital, "--gbit": request.gbit,
        "--pod": request.pod, "--pod-gbit": request.pod_gbit, "--sequence-length": request.length,
        "--vocabulary": request.vocabulary, "--batch-tokens": request.batch_tokens,
    }  # fmt: skip
    problems = [
        Problem("not_positive", option, f"expected more than 0, not {value}")
        for option, value in given.items()
        if value is not None and not 0 < value < math.inf
    ]
    for option, value in (("--own-tokens", request.own_tokens), ("--used-tokens", request.used_tokens)):
        if value is not None and not 0 <= value < math.inf:
            problems.append(Problem("not_positive", option, f"expected 0 or more, not {value:g}"))
    if (request.pod is None) != (request.pod_gbit is None):
        there, missing = ("--pod", "--pod-gbit") if request.pod_gbit is None else ("--pod-gbit", "--pod")
        problems.append(
            Problem("half_a_network", missing, f"expected it together with {there}", "give both, or neither")
        )
    if problems:
        raise ConfigError(*problems)


def _estimate(request: PlanRequest, arch: Architecture, tokens: float, kernels: Kernels | None = None) -> Estimate:
    batch = request.batch_tokens or batch_tokens(arch, tokens, request.length, request.gpus)
    chosen = kernels or request.kernels or default_kernels(request.device, arch)
    return estimate(
        arch, request.device, request.gpus, chosen, request.length, max(1, batch // request.length), request.precision,
        request.network,
    )  # fmt: skip


def plan(request: PlanRequest) -> dict[str, Any]:
    """Return the document of `stemma plan --json`. Raises ConfigError for an impossible request."""
    check(request.preset, request.parameters, request.arch is not None, request.tokens, request.budget)
    _check_machines(request)
    low, middle, high = request.prices

    def share_of(arch: Architecture, tokens: float) -> float:
        flops = arch.flops_per_token(request.length) * tokens
        if request.budget.flops is not None:
            return flops / request.budget.flops
        try:
            hours = tokens / _estimate(request, arch, tokens).tokens_per_s / 3600
        except ConfigError:
            return math.inf  # what fits nowhere, no budget pays for
        return request.budget.spent(flops, hours, request.gpus * middle)

    size = resolve(request.named, request.tokens, request.budget, request.law, request.vocabulary, share_of)
    arch, tokens = size.arch, size.tokens
    batch = request.batch_tokens or batch_tokens(arch, tokens, request.length, request.gpus)
    estimated = _estimate(request, arch, tokens)
    if tokens < batch:
        message = f"expected at least one batch of {batch:,} tokens, not {tokens:,.0f}"
        least = request.gpus * request.length
        fix = f"train for more tokens, or lower --batch-tokens (one sequence per device is {least:,})"
        raise ConfigError(Problem("too_few_tokens", "--tokens", message, fix))
    document = _document(request, size, estimated, low, middle, high)
    return {**document, "verdict": verdict(document, request.law, request.own_tokens, request.used_tokens)}


def _document(
    request: PlanRequest, size: Size, estimated: Estimate, low: float, middle: float, high: float
) -> dict[str, Any]:
    arch, tokens, best, gpus = size.arch, size.tokens, estimated.best, request.gpus
    flops_per_token = arch.flops_per_token(request.length)
    hours = tokens / estimated.tokens_per_s / 3600
    faster = _faster(request, estimated, tokens)
    hours_low = min(hours, faster) * (1 - MISS)
    halts = failures(arch.parameters, gpus, request.device.node, hours)
    busiest = replace(estimated.job, load=UNEVEN)
    hours_high = hours * (1 + MISS) / (1 - halts.lost) * step_time(busiest, best.layout).total / best.time.total
    watts = gpus * request.device.power_w
    kwh = [
        watts * time * host * pue / 1000
        for time, host, pue in zip((hours_low, hours, hours_high), HOST, PUE, strict=True)
    ]
    layout = best.layout
    to_buy = gpus * request.to_buy
    return {
        "status": "done",
        "model": arch.name,
        "parameters": arch.parameters,
        "parameters_of_a_token": arch.of_a_token,
        "tokens": round(tokens),
        "because": size.because,
        "flops": flops_per_token * tokens,
        "gpu": request.device.name,
        "gpus": gpus,
        "hours": hours,
        "hours_low": hours_low,
        "hours_high": hours_high,
        "tokens_per_s": estimated.tokens_per_s,
        "mfu": flops_per_token * estimated.tokens_per_s / (gpus * estimated.job.peak),
        "cost_usd": hours * gpus * middle,
        "cost_usd_low": hours_low * gpus * low,
        "cost_usd_high": hours_high * gpus * high,
        "cost_to_buy_usd": to_buy,
        "rent_as_dear_as_buying_hours": to_buy / (gpus * middle),
        "energy_kwh": kwh[1],
        "energy_kwh_low": kwh[0],
        "energy_kwh_high": kwh[2],
        "carbon_kg": kwh[1] * CARBON[1],
        "carbon_kg_low": kwh[0] * CARBON[0],
        "carbon_kg_high": kwh[2] * CARBON[2],
        "memory_gb_per_gpu": best.memory.total / 1e9,
        "memory_gb_per_gpu_high": uneven(estimated.job, layout, best.memory).total / 1e9,
        "memory_gb_of_device": estimated.job.device.memory / 1e9,
        "memory_parts_gb": {name: value / 1e9 for name, value in vars(best.memory).items()},
        "layout": {
            **{name: getattr(layout, name) for name in ("dp", "tp", "pp", "cp", "ep", "microbatch", "recompute")},
            "sharding": layout.sharding,
            "interleave": layout.interleave,
        },
        "batch_tokens": estimated.job.batch * request.length,
        "sequence_length": request.length,
        "kernels": estimated.job.kernels.name,
        "precision": request.precision,
        "step_s": best.time.total,
        "step_parts": {name: value / best.time.total for name, value in vars(best.time).items()},
        "failures": {
            "hours_between": halts.between_h,
            "expected": halts.expected,
            "checkpoint_every_s": halts.every_s,
            "checkpoint_write_s": halts.write_s,
            "checkpoint_every_batches": max(1, round(halts.every_s / best.time.total)),
            "time_lost": halts.lost,
        },
        "runs_here": runs_here(layout, estimated.job),
        "runnable": _runnable(estimated),
        "batches": max(1, round(tokens / (estimated.job.batch * request.length))),
        "devices_of_node": request.device.node,
        "vocabulary": arch.vocabulary,
        "positions": arch.positions,
        "model_config": None if request.model is None else dict(request.model),
        "sizes": {name: getattr(arch, name) for name in ("layers", "width", "heads", "kv_heads", "mlp_width", "tied")},
        "others": [
            {
                "layout": describe(choice.layout),
                "step_s": choice.time.total,
                "why": why_lost(best, choice, estimated.job),
            }
            for choice in _runners_up(estimated)
        ],
        "optimal": _optimal(flops_per_token * tokens, request.law),
        "loss": expected_loss(request.law, arch.of_a_token, tokens, arch.vocabulary),
        "assumptions": _assumptions(request, estimated, hours, faster),
    }


def _faster(request: PlanRequest, estimated: Estimate, tokens: float) -> float:
    """Hours with the fastest kernels published for this device."""
    other = KERNELS["compiled"] if estimated.job.kernels.name != "megatron" else estimated.job.kernels
    return tokens / _estimate(request, estimated.job.arch, tokens, other).tokens_per_s / 3600


def _runners_up(estimated: Estimate) -> list[Choice]:
    """The next best of other degrees or sharding, three of them; of a mixture the best that sends tokens to experts, or
    sends none, unlike the chosen; and the fastest that does not fit."""
    seen = {_kind(estimated.best)}
    others: list[Choice] = []
    for choice in estimated.choices[1:]:
        if choice.fits and _kind(choice) not in seen and len(others) < 3:
            seen.add(_kind(choice))
            others.append(choice)
    sends = estimated.best.layout.ep > 1
    if estimated.job.arch.experts > 1 and not any((choice.layout.ep > 1) != sends for choice in others):
        others += [choice for choice in estimated.choices if choice.fits and (choice.layout.ep > 1) != sends][:1]
    unfit = [
        choice for choice in estimated.choices if not choice.fits and choice.time.total < estimated.best.time.total
    ]
    return [*others, *sorted(unfit, key=lambda choice: choice.time.total)[:1]]


def _runnable(estimated: Estimate) -> dict[str, Any] | None:
    """Return the fastest layout that `launch:` can express; None if none fits."""
    for choice in estimated.choices:
        if choice.fits and runs_here(choice.layout, estimated.job):
            keys = ("dp", "tp", "pp", "cp", "ep", "microbatch", "recompute", "sharding", "interleave")
            multiple = padded_vocabulary(choice.layout, estimated.job.device.node)
            layout = {key: getattr(choice.layout, key) for key in keys}
            return {**layout, "vocabulary_multiple": multiple, "step_s": choice.time.total}
    return None


def _kind(choice: Choice) -> tuple:
    at = choice.layout
    return at.dp, at.tp, at.pp, at.cp, at.ep, at.sharding, at.recompute


def _optimal(flops: float, chosen: Law) -> dict[str, dict[str, float]]:
    """Optimum of the chosen law, followed by those of all others."""
    optima = {}
    for law in {chosen.name: chosen, **LAWS}.values():
        parameters, tokens = law.optimum(flops)
        optima[law.name] = {"parameters": parameters, "tokens": tokens, "tokens_per_parameter": tokens / parameters}
    return optima


def _torch_for(device: Device) -> Iterator[str]:
    """Yield a sentence on the build of torch that a device needs and on the installed build."""
    if device.capability is None:
        return
    version, cuda = installed_cuda()
    requirement = f"torch: built for {needed_cuda(device.capability)} (sm_{device.capability[0]}{device.capability[1]})"
    if cuda is None:
        yield f"{requirement}; none for CUDA is installed here"
    else:
        fits = "; installed" if compiles_for(cuda, device.capability) else "; NOT installed"
        yield f"{requirement}{fits}: torch {version} for CUDA {cuda}"


def _assumptions(request: PlanRequest, estimated: Estimate, hours: float, faster: float) -> list[str]:
    kernels, device = estimated.job.kernels, request.device
    assumptions = [
        f"speed: {kernels.name} kernels: {kernels.description}; other kernels: --kernels",
        f"time: within {MISS:.0%} of all but a few published trainings (docs/planning/accuracy.md), hence the range",
    ]
    if faster < 0.95 * hours:
        assumptions.append(f"lower end of the time: with compiled kernels and FlashAttention about {faster:.3g} h")
    low, middle, high = request.prices
    assumptions += [
        f"price: {low:.2f} to {high:.2f} USD per device-hour, {middle:.2f} in the middle"
        if request.price is None
        else f"price: {middle:.2f} USD per device-hour, as given",
        f"to buy: {request.to_buy:,.0f} USD per device, {'a list price' if request.capital is None else 'as given'}, "
        "without its host, power and people",
        f"device: {device.sources}",
        *_torch_for(device),
        f"energy: {device.power_w:.0f} W per device × {HOST[1]} for its host × PUE {PUE[1]} "
        f"({HOST[0]} × {PUE[0]} to {HOST[2]} × {PUE[2]})",
        f"carbon: {CARBON[1]} kg per kWh, the world's mean ({CARBON[0]} to {CARBON[2]})",
        f"batch: {estimated.job.batch * request.length:,} tokens, sequences of {request.length:,}",
        "FLOPs: 6 N + 12 L d T per token (PaLM, appendix B); evaluation is not counted",
        "failures: one in 45,000 h of a device (OPT, Llama 3); what they cost is in the upper end of the range",
    ]
    if estimated.job.arch.experts > 1:
        assumptions.append("laws are of dense models: of a mixture they are given the parameters that a token passes")
    if estimated.best.layout.ep > 1:
        assumptions.append(
            f"experts: tokens spread evenly; the upper ends of time and memory have {UNEVEN:g} times as many at the "
            "busiest device, and the first some hundred steps can have more"
        )
    return assumptions
