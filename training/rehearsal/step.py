"""One step of one rank, by the set-up and the loop of a training, on tensors that have shapes and no memory."""

from __future__ import annotations

import gc
import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from infra.launch.config import LaunchConfig
from training.backends.native import Native
from training.core import ranks
from training.core.callbacks import Callbacks
from training.core.hardware import Hardware
from training.core.train_state import Loader, TokenCount, TrainState
from training.distributed.parallel import parallelize, shard_optimizer
from training.model.blocks import checkpoint_activations
from training.model.models import build, hf_config
from training.rehearsal.job import Collective, RankRecord, Rehearsal
from training.rehearsal.records import Records, Sent, of_tensors
from training.rehearsal.stand_ins import without_devices
from training.train_modules.language_model import LanguageModel
from training.trainer.optimizers import optimizer_of


def rehearse_rank(job: Rehearsal, position: int) -> RankRecord:
    """Set up a rank of the first pipeline and record a step of it. Raises the errors that such a training raises."""
    launch = job.launch
    rank = job.rank_at(position)
    tokens = job.microbatch * job.length // launch.context_parallel
    if launch.expert_parallel > 1:
        tokens //= launch.tensor_parallel
    choices = tokens * (job.model.transformers or {}).get("num_experts_per_tok", 0)
    with without_devices(rank, launch.ranks, launch.processes, choices=choices, gpu=job.gpu):
        ranks.share_examples(*launch.shares_of_examples)
        ranks.share_experts(launch.expert_parallel)
        with Records().watching() as records:
            return _step(job, position, records)


def _step(job: Rehearsal, position: int, records: Records) -> RankRecord:
    hardware = Hardware(torch.device("cpu"), job.bf16, "sdpa")
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    network = build(hf_config(job.model, job.vocabulary, special), 0)
    network.set_attn_implementation("sdpa")
    model = LanguageModel(network, hardware)

    # As in training/trainer/fit.py.
    launch = job.launch
    checkpoint_activations(model, launch.recompute)
    parallelize(model, launch, hardware)
    optimizer = optimizer_of(model, job.optimizer, hardware.compute, model.experts)
    optimizer = shard_optimizer(optimizer, launch, hardware, model.experts)
    loader = Loader(None, _count_tokens)  # type: ignore[arg-type]
    state = TrainState(model, optimizer, loader, Callbacks([]), hardware.device, 0)
    trainer = Native(state, batches=1, microbatch=job.microbatch)

    gradients = 0

    def measure_gradients(*_: Any) -> None:
        nonlocal gradients
        gradients = of_tensors([weight.grad for weight in model.parameters() if weight.grad is not None])

    optimizer.register_step_pre_hook(measure_gradients)
    # A step without a forward pass, after which the optimizer has its state.
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    gc.collect()  # layers that other ranks hold
    records.begin()
    trainer._step(_batch(job))
    states = [value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, Tensor)]
    weights = of_tensors(list(model.parameters()))
    optimizer.zero_grad(set_to_none=True)
    sizes: Counter[tuple[str, str, str]] = Counter()
    calls: Counter[tuple[str, str, str]] = Counter()
    for key, size in records.sent.items():
        group = (key.kind, *_dimension_and_link(key, launch))
        sizes[group] += size
        calls[group] += records.calls[key]
    return RankRecord(
        rank=ranks.rank(),
        position=position,
        weights=weights,
        gradients=gradients,
        optimizer=of_tensors(states),
        most=records.most,
        collectives=tuple(
            Collective(kind=kind, dimension=dimension, link=link, sent_bytes=size, calls=calls[kind, dimension, link])
            for (kind, dimension, link), size in sorted(sizes.items())
        ),
    )


def _batch(job: Rehearsal) -> dict[str, Tensor]:
    """A batch of this rank in which a sequence is a document, so that attention needs no mask: as kernels of a GPU,
    which take the bounds of documents."""
    shape = job.microbatch * job.microbatches, job.length
    ids = torch.empty(shape, dtype=torch.float32).long()
    positions = torch.arange(job.length).repeat(shape[0], 1)  # with values, by which transformers sees one document
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def _count_tokens(batch: Any) -> TokenCount:
    return TokenCount(batch["labels"].numel(), batch["labels"].numel())


def _dimension_and_link(sent: Sent, launch: LaunchConfig) -> tuple[str, str]:
    """Dimension of the mesh along which a group's ranks differ, and the link between them."""
    sizes = {
        "tensor": launch.tensor_parallel, "context": launch.context_parallel, "pipeline": launch.pipeline_parallel,
        "data": launch.ranks // math.prod(launch.shares_of_examples),
    }  # fmt: skip
    numbers, varying = list(sent.members), []
    for name, size in sizes.items():
        if len({number % size for number in numbers}) > 1:
            varying.append(name)
        numbers = [number // size for number in numbers]
    nodes = {number // launch.processes for number in sent.members}
    dimension = "experts" if sent.kind == "all_to_all" else "+".join(varying) or "alone"
    return dimension, "node" if len(nodes) == 1 else "network"
