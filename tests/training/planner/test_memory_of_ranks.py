"""The planned bytes of a rank against those that real ranks hold, for every way to spread a training."""

from __future__ import annotations

import os
import socket
import traceback
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.support.programs.peak import counted
from tests.support.programs.ranked import training_process
from training.config import ModelConfig, OptimizerConfig
from training.model.experts import expert_layers
from training.planner.hardware.kernels import KERNELS
from training.planner.hardware.network import network_of
from training.planner.memory import memory_of_rank
from training.planner.stages import of_model, this_machine
from training.planner.step_time import RankLayout, Training

MODEL = ModelConfig(family="llama", layers=6, width=192, heads=4, mlp_width=512, positions=128)
VOCABULARY, SEQUENCES, LENGTH = 2048, 8, 128
"""SEQUENCES of LENGTH tokens a microbatch and rank."""


class Case(NamedTuple):
    """A layout, its `launch` section, and how many microbatches each step has. load: of experts, see Training."""

    layout: RankLayout
    launch: dict[str, Any]
    microbatches: int = 1
    bf16: bool = False
    model: ModelConfig = MODEL
    load: float = 1.0


def _pipeline(layout: RankLayout, microbatches: int, bf16: bool = False, **launch: Any) -> Case:
    return Case(layout, {"trainer": "native", "pipeline_parallel": layout.pp, **launch}, microbatches, bf16)


CASES = {
    "ddp": Case(RankLayout(dp=2), {}),
    "ddp-2": Case(RankLayout(dp=2), {}, 2),
    "zero1": Case(RankLayout(dp=2, sharding="zero1"), {"sharding": "zero1"}),
    "zero2": Case(RankLayout(dp=2, sharding="zero2"), {"sharding": "zero2"}),
    "zero3": Case(RankLayout(dp=2, sharding="zero3"), {"sharding": "fsdp"}),
    "zero3-2": Case(RankLayout(dp=2, sharding="zero3"), {"sharding": "fsdp"}, 2),
    "zero3-full": Case(RankLayout(dp=2, sharding="zero3", recompute="full"), {"sharding": "fsdp", "recompute": "full"}),
    "ddp-bf16": Case(RankLayout(dp=2), {}, bf16=True),
    "zero3-bf16": Case(RankLayout(dp=2, sharding="zero3"), {"sharding": "fsdp"}, bf16=True),
    "zero3-of-4": Case(RankLayout(dp=4, sharding="zero3"), {"sharding": "fsdp"}),
    "hsdp": Case(RankLayout(dp=4, sharding="hsdp", shard_ranks=2), {"sharding": "hsdp", "shard_ranks": 2}),
    "tp": Case(RankLayout(tp=2), {"trainer": "native", "tensor_parallel": 2}),
    "tp-zero3": Case(
        RankLayout(dp=2, tp=2, sharding="zero3"), {"trainer": "native", "tensor_parallel": 2, "sharding": "fsdp"}
    ),
    "cp": Case(RankLayout(cp=2), {"trainer": "native", "context_parallel": 2}),
    "cp-zero3": Case(
        RankLayout(cp=2, sharding="zero3"), {"trainer": "native", "context_parallel": 2, "sharding": "fsdp"}
    ),
    "pp": _pipeline(RankLayout(pp=2), 4),
    "pp-as-few-as-ranks": _pipeline(RankLayout(pp=2), 2),
    "pp-8": _pipeline(RankLayout(pp=2), 8),
    "pp-bf16": _pipeline(RankLayout(pp=2), 4, bf16=True),
    "pp-of-3": _pipeline(RankLayout(pp=3), 4),
    "pp-pieces": _pipeline(RankLayout(pp=2, interleave=3), 4, pipeline_pieces=3),
    "pp-ddp": _pipeline(RankLayout(dp=2, pp=2), 4),
    "pp-ddp-full": _pipeline(RankLayout(dp=2, pp=2, recompute="full"), 4, recompute="full"),
    "pp-zero1": _pipeline(RankLayout(dp=2, pp=2, sharding="zero1"), 4, sharding="zero1"),
}


_MIXTURE = ModelConfig(
    transformers={
        "model_type": "mixtral", "num_hidden_layers": 6, "hidden_size": 192, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 256, "max_position_embeddings": 128, "tie_word_embeddings": True,
        "num_local_experts": 4, "num_experts_per_tok": 2,
    }
)  # fmt: skip
_EXPERTS: dict[str, Any] = {"trainer": "native", "expert_parallel": 2}
EXPERTS = {
    "one": Case(RankLayout(), {}, model=_MIXTURE),
    "dp": Case(RankLayout(dp=2), {}, model=_MIXTURE),
    "ep": Case(RankLayout(dp=2, ep=2), _EXPERTS, model=_MIXTURE),
    "ep-2": Case(RankLayout(dp=2, ep=2), _EXPERTS, 2, model=_MIXTURE),
    "ep-full": Case(RankLayout(dp=2, ep=2, recompute="full"), _EXPERTS | {"recompute": "full"}, model=_MIXTURE),
    "ep-bf16": Case(RankLayout(dp=2, ep=2), _EXPERTS, bf16=True, model=_MIXTURE),
    "ep-dp": Case(RankLayout(dp=4, ep=2), _EXPERTS, model=_MIXTURE),
    "ep-zero1": Case(RankLayout(dp=4, ep=2, sharding="zero1"), _EXPERTS | {"sharding": "zero1"}, model=_MIXTURE),
    "ep-uneven": Case(RankLayout(dp=2, ep=2), _EXPERTS, model=_MIXTURE, load=1.5),
    "ep-uneven-full": Case(
        RankLayout(dp=2, ep=2, recompute="full"), _EXPERTS | {"recompute": "full"}, model=_MIXTURE, load=1.5
    ),
    "ep-cp": Case(RankLayout(cp=2, ep=2), _EXPERTS | {"context_parallel": 2}, model=_MIXTURE),
    "ep-tp": Case(RankLayout(tp=2, ep=2), _EXPERTS | {"tensor_parallel": 2}, model=_MIXTURE),
    "ep-tp-ddp": Case(RankLayout(dp=2, tp=2, ep=2), _EXPERTS | {"tensor_parallel": 2}, model=_MIXTURE),
    "ep-tp-4": Case(
        RankLayout(dp=2, tp=2, ep=4), _EXPERTS | {"tensor_parallel": 2, "expert_parallel": 4}, model=_MIXTURE
    ),
    "ep-pp": Case(RankLayout(dp=2, pp=2, ep=2), _EXPERTS | {"pipeline_parallel": 2}, 4, model=_MIXTURE),
    "ep-uneven-bf16": Case(RankLayout(dp=2, ep=2), _EXPERTS, bf16=True, model=_MIXTURE, load=1.25),
}
"""Of four experts a layer, two of which see a token."""
CHEAP = {"zero1", "zero3"}


def rank_bytes(case: Case, rank: int, port: int) -> tuple[str, int]:
    """In a rank's process: its traceback, "" where it ended well, and bytes at the fullest moment of two steps."""
    devices = case.layout.devices
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(devices), "LOCAL_WORLD_SIZE": str(devices),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    try:
        return "", _bytes_of_two_steps(case)
    except BaseException:
        return traceback.format_exc(), 0


def _bytes_of_two_steps(case: Case) -> int:
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    from infra.launch.config import LaunchConfig
    from training.core import ranks
    from training.core.hardware import Hardware
    from training.distributed.parallel import parallelize, shard_optimizer
    from training.distributed.tensor_parallel import sum_gradients
    from training.model.blocks import checkpoint_activations
    from training.model.models import build, hf_config
    from training.train_modules.language_model import LanguageModel
    from training.trainer.optimizers import optimizer_of

    torch.set_num_threads(1)
    launch = LaunchConfig(device="cpu", processes=ranks.world_size(), **case.launch)
    ranks.share_examples(*launch.shares_of_examples)
    ranks.share_experts(launch.expert_parallel)
    hardware = Hardware(torch.device("cpu"), case.bf16, "sdpa")
    ranks.join(hardware.device)
    with counted() as peak:
        special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        network = build(hf_config(case.model, VOCABULARY, special), 0)
        network.set_attn_implementation("sdpa")
        model = LanguageModel(network, hardware)
        checkpoint_activations(network, launch.recompute)
        parallelize(model, launch, hardware)
        _route(network, case.load)
        adamw = optimizer_of(model, OptimizerConfig(), experts=model.experts)
        optimizer = shard_optimizer(adamw, launch, hardware, model.experts)
        pipeline = model.pipeline
        averaged = pipeline or isinstance(model, FSDPModule) or ranks.tensor_parallel() > 1
        spread = ranks.gradient_ranks() > 1 and not averaged
        if model.experts:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, model.experts.names(model))
        whole = DistributedDataParallel(model) if spread else model
        torch.manual_seed(ranks.rank())
        ids = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH))
        batch = {
            "input_ids": ids, "labels": ids, "documents": torch.zeros_like(ids, dtype=torch.int32),
            "position_ids": torch.arange(LENGTH).repeat(SEQUENCES, 1),
        }  # fmt: skip
        for step in range(5):
            if step > 0:  # the first has no optimizer state yet
                peak.begin()
            if pipeline:
                many = {name: value.repeat(case.microbatches, 1) for name, value in batch.items()}
                pipeline.train(
                    many, SEQUENCES, lambda hidden, labels: model.loss(hidden, {"labels": labels}), lambda: None
                )
            else:
                for _ in range(case.microbatches):
                    model.loss(whole(batch), batch).backward()
                if ranks.tensor_parallel() > 1:
                    sum_gradients(model.parameters())
                if model.experts:
                    model.experts.join_gradients()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return peak.most


def _route(network: nn.Module, load: float) -> None:
    """Has the router of each layer send tokens evenly to its experts, or `load` times an even share to each of the
    first half, which the first rank of a group holds: so what a rank holds hangs on no chance."""
    for layer in expert_layers(network):
        layer.gate.register_forward_hook(partial(_routed, load))


def _routed(load: float, gate: Any, _: Any, routed: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """In place of what a router gives: logits (N, E), and weights and numbers of its choices (N, k) by these."""
    logits = routed[0] + _preference(routed[0], load)
    weights, chosen = logits.softmax(-1, dtype=torch.float).topk(gate.top_k)
    return logits, (weights / weights.sum(-1, keepdim=True)).to(routed[1].dtype), chosen


def _preference(logits: Tensor, load: float) -> Tensor:
    """Added to logits (N, E) of a router, makes two experts of each token the likeliest by far: one of each half, but
    of `load` - 1 of the tokens both of the first half."""
    tokens, half = len(logits), logits.shape[1] // 2
    token = torch.arange(tokens)
    in_first_half = token < round((load - 1) * tokens)
    other = torch.where(in_first_half, (token + 1) % half, half + token % half)
    return torch.zeros_like(logits).scatter_(1, torch.stack([token % half, other], 1), 20.0)


def measured(case: Case) -> list[int]:
    """Bytes of a rank, of a pipeline one of each that holds other layers, of ranks whose experts get more tokens than
    others' the fullest. All that hold the same have the same; where two were told apart, one had the noise that
    `tests.support.programs.peak` speaks of."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [training_process(rank_bytes, case, rank, port) for rank in range(case.layout.devices)]
    try:
        for one in started:
            assert one.wait() is not None, "a rank gave no answer"
        told = [one.returned() for one in started]
    finally:
        for one in started:
            one.kill()
    assert not any(error for error, _ in told), told
    apart = case.layout.ep if case.load > 1 else case.layout.pp
    return [min(size for _, size in told[place::apart]) for place in range(case.layout.pp)]


def planned(case: Case) -> list[float]:
    device = this_machine(1e12, 1e11)
    at = replace(case.layout, microbatch=SEQUENCES)
    batch = SEQUENCES * case.microbatches * at.dp
    arch = of_model(case.model, VOCABULARY)
    assert arch is not None
    precision = "bf16" if case.bf16 else "fp32"
    job = Training(arch, device, KERNELS["flash"], network_of(device), LENGTH, batch, precision, load=case.load)
    return [memory_of_rank(job, at, place).total for place in range(at.pp)]


def _hold_within_five_percent(case: Case) -> None:
    """Measured once more where the first count is too high: gloo's threads free memory late
    (`tests.support.programs.peak`)."""
    expected = [pytest.approx(size, rel=0.05) for size in planned(case)]
    counts = measured(case)
    if counts != expected:
        counts = [min(pair) for pair in zip(counts, measured(case), strict=True)]
    assert counts == expected


@pytest.mark.parametrize("name", sorted(CHEAP))
def test_bytes_of_a_rank_are_within_five_percent(name: str) -> None:
    _hold_within_five_percent(CASES[name])


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(CASES.keys() - CHEAP))
def test_bytes_of_a_rank_in_any_layout_are_within_five_percent(name: str) -> None:
    """The risk: a newer torch holds gathered layers, buffers, or what a pipeline has received for longer, and a layout
    that was planned to fit does not."""
    _hold_within_five_percent(CASES[name])


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_bytes_of_a_rank_with_experts_are_within_five_percent(name: str) -> None:
    """Tokens go to experts as the plan has it, evenly or a quarter and a half more of them to a rank's own. The risk:
    what is sent to experts and comes back stays for longer than the plan has it."""
    _hold_within_five_percent(EXPERTS[name])
