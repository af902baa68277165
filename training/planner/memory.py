"""Bytes that one device needs, by part, for every way to spread a training.

Letters: n tokens of a microbatch on one device, T of a sequence, d width, f inner width of the MLP, V vocabulary; e
bytes of a number in the precision of matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from training.planner.architecture import Architecture
from training.planner.pipeline_ranks import Part, part_of, weights_outside
from training.planner.step_time import RankLayout, Training, microbatches

_WEIGHT, _GRADIENT = 4, 4
"""Bytes per parameter of fp32 weights and their gradients."""
_LEAST_CHUNK, _CHUNK_LOGITS, _CHUNK_LOGITS_OF_GPU = 1024, 2**23, 2**27
"""Sizes of the chunks of logits, as in training/model/loss.py."""
_SUMMED_AT_ONCE = 2**28
"""Bytes of gradients that are summed together, as training/distributed/gradients.py does."""
FRAGMENTED = 0.04
"""Memory overhead of torch's allocator, as a share of tensors: 2 to 6 % if sizes repeat from step to step."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one device at the fullest moment of a step, by part; they add up to `total`.

    weights: in fp32. gradients, optimizer. casts: copies of weights in the precision of products, and layers that fsdp
    has gathered. activations: what the backward pass needs. logits: the loss with its gradients. buffers: of what is
    sent and received. fragmentation: what the allocator cannot use.
    """

    weights: float
    gradients: float
    optimizer: float
    casts: float
    activations: float
    logits: float
    buffers: float
    fragmentation: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Kept:
    """Bytes that the backward pass needs: of one layer a token (`layer`), of its input (`checkpoint`), and outside of
    the layers (`outside`)."""

    layer: float
    checkpoint: float
    outside: float


def kept_by(
    arch: Architecture,
    length: int,
    element: int,
    *,
    scores: bool,
    tp: int = 1,
    sequence_ranks: int = 1,
    cuda: bool = True,
    compiled: bool = False,
    load: float = 1.0,
    sent: int = 1,
    fp8: bool = False,
) -> Kept:
    """Return the memory that transformers' models keep per token under autocast, in bytes.

    The residual stream is in fp32, the rest in `element`. Counted from the tensors that autograd saves, and verified
    with real steps in tests/training/planner/test_memory.py.

    Args:
        arch: the architecture.
        length: tokens per sequence.
        element: bytes per number of the precision of products.
        scores: True if attention keeps its scores.
        tp: devices that share a layer's heads and inner width.
        sequence_ranks: devices that share the rest of a layer (sequence parallelism); tensors that they gather for
            products are kept unsplit.
        cuda: True if autocast computes softmax in fp32, and no kernel needs document bounds as a numeric mask.
        compiled: True if layers are compiled: tensors between products, norms and attention are then recomputed when
            needed.
        load: tokens of the device's experts relative to an even share.
        sent: devices that share a layer and send experts a part of the tokens each.
        fp8: True if linear layers compute in 8 bits; if they are compiled, their inputs are scaled and rounded again
            from their sources, by a scale that is kept.
    """
    width, inner = arch.width / sequence_ranks, arch.mlp_width / tp * arch.active_experts * load
    queries, heads, half = arch.heads * arch.head_width / tp, arch.heads / tp, element < 4
    # Queries, keys and values, repeated for grouped queries; a fused kernel also keeps what it gives.
    attention = (3 if scores else 4) * element * queries
    if compiled and half and not scores:
        # The residual stream before attention and what attention adds to it, what norms and products gave. A GPU's
        # kernels need no keys and values that are repeated.
        attention = 2 * element * (queries + (arch.kv_heads * arch.head_width / tp if cuda else queries))
        layer = (4 + element + 2 * element) * arch.width + (3 if arch.gated else 2) * element * inner
        layer += 2 * element * queries if arch.query_norms else 0
        if fp8:  # what norms give to products, and the MLP's last; experts compute in `element`
            layer -= element * arch.width + (element * (arch.width + inner) if arch.experts == 1 else 0)
        outside = (2 if arch.gated else 1) * 4 * width + element * width
        softmax = 0
    elif arch.gated:
        # Norms keep their input and what they scaled in fp32, and each product its own cast of the input.
        casts = (5 if half else 2) + scores
        layer = 4 * 4 * width + casts * element * arch.width + 4 * element * inner + 2 * 4
        layer -= (2 if half else 1) * element * arch.width * (1 - 1 / sent)  # inputs of experts are not gathered
        layer += (2 * 4 + 2 * element) * queries if arch.query_norms else 0
        outside = 2 * 4 * width + element * width
        softmax = 4 + (element if half else 0)
    else:
        layer = 2 * 4 * width + (2 + scores) * element * arch.width + 5 * element * inner + 4 * 4
        outside = 4 * width + element * width
        softmax = 4 + (element if half else 0) if cuda else element
    layer += attention + heads * (length * softmax if scores else 4)
    if arch.experts > 1:
        # What each expert is given and gives, the router's softmax here and in the balancing loss, which of the experts
        # a token chose, and in which order they take tokens.
        each = arch.active_experts * ((1 + load) * element * arch.width + 2 * 8 + 2 * 4) + 2 * 4 * arch.experts
        layer += each / sent
    layer += 0 if cuda or scores else element * length
    return Kept(layer, 4 * width, outside)


def memory(job: Training, at: RankLayout) -> Memory:
    """Memory of the fullest device. In a pipeline this is the first or the last rank: ranks in between hold the same as
    the first one, without the embedding and for fewer microbatches."""
    return max((memory_of_rank(job, at, rank) for rank in {0, at.pp - 1}), key=lambda usage: usage.total)


def memory_of_rank(job: Training, at: RankLayout, rank: int) -> Memory:
    """Memory of the devices of one rank of a pipeline, 0 to at.pp - 1."""
    arch, element = job.arch, job.element
    ranks, count = at.dp * at.cp, microbatches(job, at)
    part = part_of(arch.layers, at.pp, at.interleave, rank, count)
    experts = arch.experts * arch.mlp_weights / at.expert_parts if arch.experts > 1 else 0.0  # of a layer
    layer = (arch.layer_weights - experts * at.expert_parts) / at.tp + experts
    outside = weights_outside(arch, part) / at.tp
    own_parameters = part.layers * layer + outside
    shards = at.shards(job.device.node)
    gathers = at.sharding in ("zero2", "zero3", "hsdp") and (ranks > 1 or job.offload)
    # Devices that hold other experts each share none of theirs.
    sharded = (own_parameters - part.layers * experts) / shards + part.layers * experts / at.expert_shards(
        job.device.node
    )
    weights = _WEIGHT * (sharded if gathers else own_parameters)
    gradient = _GRADIENT * job.learnt
    gradients = gradient * (sharded if gathers else own_parameters)
    optimizer = job.moments * sharded
    if job.offload:
        weights = gradients = optimizer = 0.0

    rows = at.microbatch * job.length / at.cp
    sequence_ranks = at.tp if at.sequence_parallel else 1
    cuda, load = job.device.name != "cpu", job.load if at.ep > 1 else 1.0
    scores = bool(job.kernels.scores)
    sent = at.tp if at.ep > 1 else 1
    compiled = job.kernels.name == "compiled"
    kept = kept_by(
        arch, job.length, element, scores=scores, tp=at.tp, sequence_ranks=sequence_ranks, cuda=cuda,
        compiled=compiled, load=load, sent=sent, fp8=job.precision == "fp8",
    )  # fmt: skip
    if at.cp > 1:
        # Keys and values of the whole sequence, repeated for grouped queries; one mask serves all layers.
        keys = (at.cp - 1) * 2 * element * arch.heads * arch.head_width / at.tp
        kept = Kept(kept.layer + keys, kept.checkpoint, kept.outside + element * job.length)
    # Of one layer, while its backward pass is under way, what checkpointing dropped is there again.
    once = 0.0
    if at.recompute == "full":
        saved, once = kept.checkpoint, kept.layer
    elif at.recompute == "selective":
        products = _products(arch, element, at.tp, sequence_ranks, load)
        saved, once = kept.checkpoint + products, kept.layer - products
    else:
        saved = kept.layer
    # The last rank holds what it gave for all microbatches, for the guard and the norms of activations.
    given = rows * arch.width * element if part.last and at.pp > 1 else 0.0

    rounded = 1 if job.precision == "fp8" else element  # bytes of a copied weight
    copies = rounded * arch.attention_weights / at.tp + (element * experts or rounded * arch.mlp_weights / at.tp)
    copied = copies if element < 4 and not gathers else 0.0
    # Autocast keeps its copies, of each microbatch its own, for as long as the backward pass needs them.
    copied_by_layer = copied if at.recompute == "none" else 0.0
    logits, d_output = _of_loss(arch, element, rows, at.tp, cuda=cuda, compiled=compiled) if part.last else (0.0, 0.0)
    alone = part.layers * experts if at.ep > 1 else 0.0  # what DDP knows nothing of
    there = _spread(job, at, part, own_parameters - alone, layer, outside, once > 0)
    summed_alone = min(gradient * alone, _SUMMED_AT_ONCE) if ranks * at.tp > at.ep else 0.0
    back = rows * (once + 2 * 4 * arch.width / sequence_ranks)
    # Gradients of what both of an MLP's products gave, while that of their product is there. What the layer began with
    # is kept once, where it is computed again.
    stream = 0.0 if once else 4 * arch.width / sequence_ranks
    in_mlp = rows * (stream + 2 * element * load * arch.active_experts * arch.mlp_width / at.tp)
    last = rows * (once or kept.layer) + count * given
    # In the first layer's MLP the gradients of all other layers are there: the most where activations are few.
    of_others = gradients - gradient * layer / (shards if gathers else 1)
    moments = [
        Moment(of_others + there.summed_last, copied + there.outside, last + in_mlp, 0.0, there.ended),
        Moment(gradients + there.summed_last, copied + there.outside, last, 0.0, there.ended),
        Moment(gradients, 0.0, 2 * count * given, 0.0, there.joined + summed_alone),
    ]
    for share, under_way in part.fullest:
        # Gradients of earlier microbatches are there from the first on; of a single one they grow as activations go.
        before = gradients * share
        at_start = max(before, d_output + gradient * layer)
        if gathers:
            at_start = before + gradient * layer / shards
        # What a piece hands on to another rank is held until its backward pass.
        handed_on = (under_way - part.last) * 4 * arch.width
        # So is what it received, of which ranks that share layers keep their part as the first layer's input too.
        handed_on += (under_way - part.first) * 4 * arch.width * (1 - 1 / sequence_ranks) if at.pp > 1 else 0.0
        activations = rows * (under_way * part.piece * saved + handed_on + part.last * kept.outside)
        activations += (count - 1) * given
        casts = under_way * part.piece * copied_by_layer
        casts_back = casts + copied * (once > 0) + there.gathered
        moments += [
            Moment(before, casts + there.gathered, activations, logits, there.throughout),
            Moment(at_start, casts_back, activations + back, d_output, there.at_start),
            Moment(
                at_start,
                casts_back,
                activations - part.last * rows * kept.outside + rows * once + in_mlp,
                d_output,
                there.at_start,
            ),
        ]
    full = max(moments, key=lambda moment: sum(moment))
    parts = [weights, full.gradients, optimizer, full.casts, full.activations, full.logits, full.buffers]
    return Memory(*parts, fragmentation=(FRAGMENTED if cuda else 0.0) * sum(parts))  # type: ignore[misc]


@dataclass(frozen=True)
class _Spread:
    """Bytes that a way to share weights and gradients adds to them.

    outside: weights outside of the layers. gathered: all weights that are gathered in the forward pass. summed_last:
    gradients that wait for the end of the backward pass. throughout: buffers that stay. at_start, ended: all buffers as
    the backward pass begins and ends. joined: all buffers once all gradients are complete.
    """

    outside: float
    gathered: float
    summed_last: float
    throughout: float
    at_start: float
    ended: float
    joined: float


def _spread(
    job: Training, at: RankLayout, part: Part, own_parameters: float, layer: float, outside: float, again: bool
) -> _Spread:
    """Return the bytes that sharing adds on one device.

    Args:
        job: the training.
        at: layout of its ranks.
        part: layers of the model that the device holds.
        own_parameters: number of parameters on the device.
        layer: number of parameters of one of its layers.
        outside: number of its parameters outside of the layers.
        again: True if activations are recomputed, so that consecutive layers need the same weights.
    """
    ranks, element, gradient = at.dp * at.cp, job.element, _GRADIENT * job.learnt
    # Ranks that share layers receive and send the residual stream.
    stream = 2 * at.microbatch * job.length / at.cp * job.arch.width * element if at.tp > 1 else 0.0
    if at.ep > 1:  # tokens sent to and received by experts, and the same for outputs; while no layer is gathered
        exchanged = 2 * (1 + job.load) * job.arch.active_experts * job.arch.width * element
        stream = max(stream, at.microbatch * job.length / (at.cp * at.tp) * exchanged)
    if (ranks == 1 and not job.offload) or at.sharding in ("ddp", "zero1"):
        # DDP reduces gradients in separate buffers; pipelines, and ranks that share layers and experts, use a buffer of
        # a part of them after the last microbatch.
        by_ddp = ranks > 1 and at.pp == 1 and (at.tp == 1 or at.ep == 1)
        buckets = gradient * own_parameters if by_ddp else 0.0
        summed = (
            min(gradient * own_parameters, max(_SUMMED_AT_ONCE, gradient * job.arch.embedding)) if ranks > 1 else 0.0
        )
        # A rank of a pipeline frees a sent gradient when it sends the next one.
        passed = 4 * at.microbatch * job.length / at.cp * job.arch.width if at.pp > 1 else 0.0
        stay = buckets + stream + (0.0 if part.first else passed)
        received = 0.0 if part.last else passed
        return _Spread(0.0, 0.0, 0.0, stay, stay + received, stay + received, stay or summed)
    # What is outside of the layers is gathered for the whole step. Of the layers one is in use and one on its way, of
    # which gloo makes a copy; the gradients of the one before are being summed.
    once = at.sharding == "zero2"
    gathered = _WEIGHT * outside + (element * (own_parameters - outside) if once else 0.0)
    received = 0.0 if once else 2 * element * layer
    copy = element * layer if job.device.name == "cpu" else 0.0
    sent = gradient * layer
    return _Spread(
        _WEIGHT * outside, gathered, gradient * outside, stream,
        received + copy + sent * again + stream, received + sent * (1 + again) + stream, stream,
    )  # fmt: skip


def _of_loss(
    arch: Architecture, element: int, rows: float, tp: int, *, cuda: bool, compiled: bool
) -> tuple[float, float]:
    """Bytes of the loss, and of the gradient of the output layer that it leaves for the backward pass.

    Logits are in the precision of products, and as their gradient; in half precision also in fp32, where no kernel is
    compiled. Their gradient is still held while its product with the hidden states is computed.
    """
    chunk = min(rows, max(_LEAST_CHUNK, (_CHUNK_LOGITS_OF_GPU if cuda else _CHUNK_LOGITS) / arch.vocabulary))
    half = element if element < 4 else 0
    copies = 2 * element if compiled else 4 + 2 * half
    output = arch.embedding / tp
    cast = half * output
    each = chunk * arch.vocabulary / tp
    logits = max(each * copies, each * element + (4 + half) * output)
    if cuda or rows > chunk or tp > 1:  # the gradient of earlier chunks, or one that all ranks of a group add to
        logits += 4 * output
    hidden = rows * arch.width * element * (2 if tp > 1 else 1)
    return logits + cast + hidden, 4 * output


class Moment(NamedTuple):
    """Bytes of temporary tensors: at the loss, in the backward pass of the last layer and of the first, at the
    optimizer."""

    gradients: float
    casts: float
    activations: float
    logits: float
    buffers: float


def _products(arch: Architecture, element: int, tp: int, sequence_ranks: int, load: float) -> float:
    """Bytes per token and layer of outputs of matrix products and attention, which selective checkpointing keeps."""
    queries, keys = arch.heads * arch.head_width / tp, arch.kv_heads * arch.head_width / tp
    inner, active = arch.mlp_width / tp * arch.active_experts * load, arch.active_experts * load
    return element * (
        2 * queries + 2 * keys + (2 if arch.gated else 1) * inner + (1 + active) * arch.width / sequence_ranks
    )
