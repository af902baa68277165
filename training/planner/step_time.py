"""Time of one optimizer step under a layout: computation, exposed communication, the pipeline's bubble.

Letters: b sequences of a microbatch, T tokens of each, L layers, d width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from training.core.devices import Device
from training.planner.architecture import Architecture
from training.planner.hardware.kernels import Kernels, matmul_time
from training.planner.hardware.network import Network
from training.planner.pipeline_ranks import part_of, weights_outside

Recompute = Literal["none", "selective", "full"]
Sharding = Literal["ddp", "zero1", "zero2", "zero3", "hsdp"]
_MEMORY_SHARE = 0.8
"""Share of a device's memory bandwidth that long reads and writes reach."""
_ROUNDING_BYTES = 13
"""Bytes read and written per input element of a product in 8 bits: for the maximum, for rounding, and once more in the
transposed order. Fitted to a Llama of 1.1B on an H200 (benchmarks/RESULTS.md, "On a GPU")."""
_STREAM = 4
"""Bytes of a number of the residual stream, which is in fp32 where products are in half precision."""
_OPTIMIZER_BYTES = 32
"""AdamW in fp32 reads weight, gradient and two moments and writes three of them, and clears the gradient."""


@dataclass(frozen=True)
class RankLayout:
    """Distribution of a training over dp · tp · pp · cp devices.

    ep: number of devices, of the dp · cp · tp with the same layers, over which whole experts are distributed; with 1
    the tp devices that share a layer share each expert.
    microbatch: sequences at once. interleave: pieces of the model that each pipeline stage holds (virtual stages).
    sequence_parallel: True if tensors that tensor parallelism leaves whole are split along the sequence (Korthikanti et
    al. 2022).
    shard_ranks: devices of dp · cp that share one model with hsdp; by default those of a node.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    microbatch: int = 1
    recompute: Recompute = "none"
    sharding: Sharding = "ddp"
    sequence_parallel: bool = True
    interleave: int = 1
    shard_ranks: int | None = None

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def expert_parts(self) -> int:
        """Number of parts into which the experts of a layer are split."""
        return self.ep if self.ep > 1 else self.tp

    def expert_shards(self, node: int) -> float:
        """Number of devices that share the state of the same experts in a sharded training, on nodes of `node`."""
        shards = self.shards(node)
        if self.ep == 1 or shards == 1:
            return shards
        return max(1.0, shards * self.tp / self.ep)

    def shards(self, node: int) -> int:
        """Number of devices over which a model is sharded, on nodes of `node` devices."""
        ranks = self.dp * self.cp
        if self.sharding == "hsdp":
            return min(ranks, self.shard_ranks or max(1, node // self.tp))
        return 1 if self.sharding == "ddp" else ranks


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on every device, by part; they add up to `total`.

    compute: forward and backward. recompute: recomputation by activation checkpointing. tensor, pipeline, context,
    experts, data: exposed communication. bubble: waiting for other pipeline stages. optimizer: updating weights. lost:
    launches, data, the slowest of many.
    """

    compute: float
    recompute: float
    tensor: float
    context: float
    experts: float
    pipeline: float
    bubble: float
    data: float
    optimizer: float
    lost: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Training:
    """Model, device and kernels of a training: the arguments that are constant during the search for layouts.

    length: T. batch: sequences per optimizer step over all devices. precision: of matrix products. moments: bytes per
    parameter of the optimizer's state; AdamW's two. load: tokens of the busiest device's experts relative to an even
    share; it only affects expert parallelism, since otherwise each device computes its own tokens. learnt: share of the
    parameters that have gradients; for adapters, their number relative to that of the frozen weights. adapters: their
    rank, 0 if all weights learn. offload: True if sharded weights, gradients and the optimizer's state are in the
    host's memory instead of the device's. half_sent: True for other systems, whose devices send the residual stream in
    the precision of products, and a pipeline's hand-over in parts; here both are sent in fp32 and whole.
    """

    arch: Architecture
    device: Device
    kernels: Kernels
    network: Network
    length: int
    batch: int
    precision: str = "bf16"
    moments: float = 8.0
    load: float = 1.0
    learnt: float = 1.0
    adapters: int = 0
    offload: bool = False
    half_sent: bool = False

    @property
    def peak(self) -> float:
        return self.device.flops(self.precision)

    @property
    def outer_peak(self) -> float:
        """Peak FLOP/s of products outside of linear layers: those of attention, experts and the output layer, which run
        in bf16 if linear layers run in 8 bits (training/model/float8.py)."""
        return self.device.flops("bf16" if self.precision == "fp8" else self.precision)

    @property
    def element(self) -> int:
        """Bytes of a number in the precision of matrix products."""
        return 4 if self.precision in ("fp32", "tf32") else 2


@dataclass(frozen=True)
class _Passes:
    """Seconds of one layer for one microbatch: the whole forward and backward pass, and the part of the forward pass
    that selective checkpointing recomputes."""

    forward: float
    backward: float
    cheap: float


def _layer(job: Training, at: RankLayout) -> _Passes:
    arch, rows = job.arch, at.microbatch * job.length / at.cp
    best, width = job.device.matmul, arch.width
    queries, keys = arch.heads * arch.head_width / at.tp, arch.kv_heads * arch.head_width / at.tp
    inner, load = arch.mlp_width / at.tp, job.load if at.ep > 1 else 1.0

    mlp_peak = job.outer_peak if arch.experts > 1 else job.peak

    def product(inside: float, columns: float, share: float = 1.0, peak: float = job.peak) -> float:
        return matmul_time(rows * share, inside, columns, peak, best)

    products = product(width, queries + 2 * keys) + product(queries, width)
    # Each of the experts that a device holds multiplies its own tokens, of all devices that it holds them for.
    held = arch.experts / at.ep
    share = load * arch.active_experts / held
    # Whole experts take the tokens of this device, which has a part of those of the ones that share its layer.
    of_expert, share = (arch.mlp_width, share / at.tp) if at.ep > 1 else (inner, share)
    into = product(width, of_expert * (2 if arch.gated else 1), share, mlp_peak)
    products += held * (into + product(of_expert, width, share, mlp_peak))
    adapters = adapters_back = 0.0
    # PaLM counts all scores of a causal model; kernels that keep none leave the half away that nothing sees.
    seen = job.length * (0.5 if not job.kernels.scores and job.length > 256 else 1.0)
    best_attention = job.kernels.attention * best / 0.85 * arch.head_width / (arch.head_width + 32)
    attention = 4 * rows * seen * queries / (job.outer_peak * best_attention)
    bandwidth = job.device.bandwidth * _MEMORY_SHARE
    sequence_ranks = 1 if not at.sequence_parallel or at.tp == 1 else at.tp
    touched = rows * (
        job.kernels.touched * width / sequence_ranks + job.kernels.inner * inner * arch.active_experts * load
    )
    touched *= job.element / 2
    elementwise = touched / bandwidth
    scores = job.kernels.scores * job.element / 2 * rows * job.length * (arch.heads / at.tp) / bandwidth
    rounding = rounding_back = 0.0
    if job.precision == "fp8":
        given, gradients = width + queries, width + queries + 2 * keys
        if arch.experts == 1:
            given, gradients = given + width + inner, gradients + width + (2 if arch.gated else 1) * inner
        rounding = _ROUNDING_BYTES * rows * given / bandwidth
        rounding_back = _ROUNDING_BYTES * rows * gradients / bandwidth
    if rank := job.adapters:
        # (inputs, outputs, share of the rows) of each matrix that has an adapter.
        matrices = [(width, queries, 1.0), (width, keys, 1.0), (width, keys, 1.0), (queries, width, 1.0)]
        mlp = [(width, of_expert, share)] * (2 if arch.gated else 1) + [(of_expert, width, share)]
        for inside, columns, part in matrices + mlp * round(held):
            # Products so thin wait for memory: for input and result, which is also multiplied and added; on the way
            # back for the input again, its gradient, which is added, and that of the result.
            both, once = 2 * rank * (inside + columns) / (job.peak * best), job.element / bandwidth
            adapters += rows * part * (both + (inside + 6 * columns) * once)
            adapters_back += rows * part * (2 * both + (5 * inside + 4 * columns) * once)
    forward = products + attention + elementwise + scores + rounding + adapters
    # Frozen weights have no gradients.
    backward = (1 if job.adapters else 2) * products + adapters_back
    # A kernel that keeps no scores computes them again on its way back: 5 products for 2.
    backward += (2.0 if job.kernels.scores else 2.5) * attention + 2 * elementwise + 1.5 * scores
    backward += rounding_back
    # Kept scores are what selective checkpointing drops (Korthikanti et al. 2022, section 5).
    cheap = elementwise + scores + (attention if job.kernels.scores else 0.0)
    return _Passes(forward, backward, cheap)


def _output(job: Training, at: RankLayout) -> float:
    """Seconds of output layer and loss for one microbatch, forward and backward."""
    rows, columns = at.microbatch * job.length / at.cp, job.arch.vocabulary / at.tp
    products = 3 * matmul_time(rows, job.arch.width, columns, job.outer_peak, job.device.matmul)
    return products + job.kernels.logits * rows * columns / (job.device.bandwidth * _MEMORY_SHARE)


def microbatches(job: Training, at: RankLayout) -> float:
    """Microbatches that each device computes in a step, the last of which may be a part."""
    return max(1.0, job.batch / (at.dp * at.microbatch))


def step_time(job: Training, at: RankLayout) -> StepTime:
    """Estimate the time of one optimizer step of `job.batch` sequences."""
    arch, net = job.arch, job.network
    layer, count = _layer(job, at), microbatches(job, at)
    layers = arch.layers / at.pp
    again = {"none": 0.0, "selective": layer.cheap, "full": layer.forward}[at.recompute]
    # Only the last stage has the output layer, and the others wait for it; its share is all that one stage adds.
    compute = layers * (layer.forward + layer.backward) + _output(job, at)
    rows = at.microbatch * job.length / at.cp
    tensor = context = experts = pipeline = 0.0
    if at.tp > 1:
        # Two sums of (rows, d) in a layer's forward pass and two backward (Shoeybi et al. 2019, section 3).
        # Full checkpointing computes the former again; here also selective checkpointing, which keeps products alone.
        repeats = at.recompute == "full" or (at.recompute == "selective" and not job.half_sent)
        sums = 4 + (2 if repeats else 0)
        if at.ep > 1:  # each sends its own tokens to experts
            sums //= 2
        stream, states = _STREAM * rows * arch.width, job.element * rows * arch.width
        if job.half_sent:
            tensor = layers * sums * net.all_reduce(states, at.tp, 1)
        else:
            # A sum is scattered and gathered, one of them in the residual stream's precision. Outside of the layers it
            # is split, and joined, and summed where embeddings and output layer are split.
            tensor = layers * sums * net.all_reduce((stream + states) / 2, at.tp, 1)
            tensor += 2 * net.all_gather(stream, at.tp, 1) + net.all_reduce(stream, at.tp, 1)
            tensor += net.all_reduce(states, at.tp, 1) if at.pp == 1 else 0.0
            if repeats and at.ep == 1:  # a layer's last sum is not computed again, since nothing needs it
                tensor -= layers * net.all_gather(states, at.tp, 1)
    if at.cp > 1:
        # Keys and values are gathered in a layer's forward pass, their gradients summed and scattered in the backward
        # pass; nothing of it hides (training/distributed/context_parallel.py).
        keys = 2 * rows * at.cp * arch.kv_heads * arch.head_width / at.tp * job.element
        times = 2 + (at.recompute != "none")
        context = layers * times * net.all_gather(keys, at.cp, at.tp)
    if at.ep > 1:
        # To the experts and back, and the same of gradients (Fedus et al. 2021, section 3.1).
        sent = job.load * rows * arch.active_experts * arch.width * job.element / at.tp
        times = 4 + (2 if at.recompute != "none" else 0)
        experts = layers * times * net.all_to_all(sent, at.ep, 1)
    if at.pp > 1:
        crossing = rows * arch.width * _STREAM
        if job.half_sent:
            crossing = rows * arch.width * job.element / at.tp
        pipeline = 2 * at.interleave * net.send(crossing, at.devices // at.pp, at.devices)
    microbatch_time = compute + layers * again + tensor + context + experts + pipeline
    bubble = microbatch_time * (at.pp - 1) / at.interleave
    data, optimizer = _data_parallel(job, at, count, count * compute)
    busy = count * microbatch_time + bubble + data + optimizer
    return StepTime(
        count * compute,
        count * layers * again,
        count * tensor,
        count * context,
        count * experts,
        count * pipeline,
        bubble,
        data,
        optimizer,
        busy * (job.kernels.lost / (1 - job.kernels.lost)) + busy * net.straggling(at.devices),
    )


def _data_parallel(job: Training, at: RankLayout, count: float, computing: float) -> tuple[float, float]:
    """Seconds of exposed data parallel communication, and of the optimizer."""
    arch, net = job.arch, job.network
    dense = arch.parameters - arch.layers * arch.experts * arch.mlp_weights * (arch.experts > 1)
    apart = (arch.parameters - dense) / (at.pp * at.ep) if at.ep > 1 else 0.0
    own_parameters = (dense if at.ep > 1 else arch.parameters) / (at.tp * at.pp)
    if at.pp > 1:  # the fullest rank's, which has the embedding or the output layer too
        parts = [part_of(arch.layers, at.pp, at.interleave, rank, count) for rank in (0, at.pp - 1)]
        outside = arch.parameters - arch.layers * arch.layer_weights
        layer = (dense - outside if at.ep > 1 else arch.layers * arch.layer_weights) / arch.layers
        own_parameters = max(part.layers * layer + weights_outside(arch, part) for part in parts) / at.tp
    ranks, inner = at.dp * at.cp, at.tp
    shards = at.shards(job.device.node)
    traffic, gradient = 0.0, 4 * job.learnt
    if ranks > 1:
        if at.sharding in ("zero2", "zero3", "hsdp"):
            # Weights are gathered forward and, but for zero2, backward, gradients scattered, for each microbatch; hsdp
            # then sums the gradients between its groups.
            times = 1 if at.sharding == "zero2" else 2
            traffic = count * (
                times * net.all_gather(own_parameters * job.element, shards, inner)
                + net.all_gather(gradient * own_parameters, shards, inner)
            )
            if shards < ranks:
                traffic += count * net.all_reduce(gradient * own_parameters / shards, ranks // shards, inner * shards)
        else:
            traffic = net.all_reduce(gradient * own_parameters, ranks, inner)
    hidden = min(job.kernels.overlap * traffic, (2 / 3) * computing)
    # Gradients of experts that only some devices hold are summed after the last backward pass.
    copies = ranks * at.tp // at.ep
    joined = net.all_reduce(apart * 4, copies, at.ep) if at.ep > 1 and copies > 1 else 0.0
    if at.pp > 1 and arch.tied:  # an embedding that is also the output layer has gradients on both ends
        joined += net.all_reduce(gradient * arch.embedding / at.tp, 2, at.devices // 2)
    if at.sharding == "zero1":
        # Each device updates its rows of the weights that learn, and gathers those of the others in fp32 (as
        # training/distributed/zero.py): after the update, where there is nothing to hide behind.
        joined += net.all_gather(gradient * own_parameters, ranks, inner)
        joined += net.all_gather(apart * 4, copies, at.ep) if at.ep > 1 else 0.0
    weights = own_parameters / shards + apart / at.expert_shards(job.device.node)
    optimizer = job.learnt * weights * _OPTIMIZER_BYTES / (job.device.bandwidth * _MEMORY_SHARE)
    return traffic - hidden + joined, optimizer
