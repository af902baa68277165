"""Ranks that hold a part of a mixture's experts each: the loss and gradients of one process for each family, and a
training of one process, which goes on in any other layout."""

from __future__ import annotations

import json
import math
import os
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from infra.launch.config import LaunchConfig
from tests.support.programs.ranked import called_in_ranks, pretrain_in_ranks
from tests.training.distributed.layouts import Weights, assert_close, assert_goes_on, values_of
from tests.training.distributed.test_groups_of_ranks import SETTINGS as DENSE
from tests.training.distributed.test_ranks import GUARDED
from tests.training.distributed.test_ranks import _NotANumber as NotANumber
from tests.training.model.test_balancing import EXPERTS
from training.config.parallelism import expert_ranks_problem

LENGTH = 13
FAMILIES = ("mixtral", "olmoe", "qwen3_moe")


def _compare(rank: int, count: int, port: int, experts: int) -> str:
    """In each rank: a model, and the same one with its experts in `experts` ranks; the traceback of what differs."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    try:
        for family in FAMILIES:
            _compare_one(rank, count, experts, family)
    except BaseException:
        return traceback.format_exc()
    return ""


def _compare_one(rank: int, count: int, experts: int, family: str) -> None:
    from training.config import ModelConfig
    from training.core.hardware import prepare
    from training.distributed.parallel import parallelize, whole_weights
    from training.model.blocks import checkpoint_activations
    from training.model.loss import IGNORE
    from training.model.models import build, hf_config
    from training.train_modules.language_model import LanguageModel

    launch = LaunchConfig(
        device="cpu", threads=1, precision="fp32", processes=count, expert_parallel=experts, trainer="native"
    )
    hardware = prepare(launch, shares_examples=True)
    sizes = {"num_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.5}
    config = ModelConfig(transformers=EXPERTS | sizes | {"model_type": family, "norm_topk_prob": family != "olmoe"})
    one, shared = (LanguageModel(build(hf_config(config, 64, {}), 1, "plain", 0.2), hardware) for _ in range(2))
    if family == "qwen3_moe":
        checkpoint_activations(shared, "full")
    parallelize(shared, launch, hardware)
    held = {name for name, _ in shared.named_parameters() if ".experts." in name}
    assert len(held) == 8 // experts * 3 * 2
    if shared.experts:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(shared, shared.experts.names(shared))
    spread = DistributedDataParallel(shared)
    torch.manual_seed(3)
    for rows, length in ((3, LENGTH), (1, 2)):  # of so few tokens most experts see none, and some ranks neither
        ids = torch.randint(0, 64, (count, rows, length))
        ids[:, 0] = 5
        labels = ids.roll(-1, 2)
        labels[..., -1] = IGNORE
        batches = [{"input_ids": ids[number], "labels": labels[number]} for number in range(count)]
        for model in (one, shared):
            model.zero_grad()
        losses = [one.loss(one(batch), batch) for batch in batches]
        torch.stack(losses).mean().backward()
        found = shared.loss(spread(batches[rank]), batches[rank])
        found.backward()
        torch.testing.assert_close(found, losses[rank], rtol=1e-5, atol=1e-6)
        if shared.experts:
            shared.experts.join_gradients()
        gradients = {name: weight.grad for name, weight in one.named_parameters()}
        for name, weight in shared.named_parameters():
            expected = torch.zeros_like(weight) if gradients[name] is None else gradients[name]
            torch.testing.assert_close(weight.grad, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(shared.losses(batches[rank]), one.losses(batches[rank]), rtol=1e-4, atol=1e-5)
        if shared.experts:
            norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            assert shared.experts.clip(shared, 0.1) == pytest.approx(float(norm), rel=1e-4)
            for name, weight in shared.named_parameters():
                if gradients[name] is not None:
                    torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-4, atol=1e-6)
    joined = whole_weights(shared)
    for name, weight in whole_weights(one).items():
        assert torch.equal(joined.pop(name), weight)
    assert not joined


@pytest.mark.parametrize(
    ("count", "experts"),
    [(2, 2), *(pytest.param(*some, marks=pytest.mark.long) for some in ((2, 1), (4, 2), (4, 4)))],
)
def test_experts_of_several_ranks_have_loss_and_gradients_of_the_whole_model(count: int, experts: int) -> None:
    """The risk of more ranks: tokens come back to others than they came from, or copies of experts are summed twice; of
    one rank's experts: those that no token of a rank chose."""
    found = called_in_ranks(_compare, count, experts)
    assert not any(found), "\n".join(found)


SETTINGS: dict[str, Any] = DENSE | {
    "model": {"transformers": EXPERTS | {"router_aux_loss_coef": 0.5}},
    "optimizer": {"learning_rate": 3.0e-3, "muon": {}},
}
SHARED: dict[str, Any] = {"trainer": "native", "microbatch": 1, "expert_parallel": 2}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"trainer": "native", "microbatch": 1}),
    "ddp": (2, {"trainer": "native", "microbatch": 1}),
    "composer": (2, {"trainer": "composer", "microbatch": 1}),
    "fsdp": (2, {"trainer": "native", "microbatch": 1, "sharding": "fsdp"}),
    "experts": (2, SHARED),
    "experts-full": (2, SHARED | {"recompute": "full"}),
    "experts-selective": (2, SHARED | {"recompute": "selective"}),
    "experts-ddp": (4, SHARED),
    "experts-zero1": (4, SHARED | {"sharding": "zero1"}),
    "experts-2-zero1": (2, SHARED | {"sharding": "zero1"}),
    "experts-4": (4, SHARED | {"expert_parallel": 4}),
}
"""Ranks, and their launch section. The balancing loss is of a microbatch: it is a sequence in all of them."""


@pytest.fixture(scope="module")
def inputs(shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": shards_dir, "tokenizer": tokenizer_dir}


def _train(inputs: dict[str, Path], way: str, out: Path) -> list[dict[str, Any]]:
    count, launch = WAYS[way]
    return pretrain_in_ranks(count, SETTINGS, inputs, out, launch=launch)


@pytest.fixture(scope="module")
def one(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The model of one process, and what it told."""
    folder = tmp_path_factory.mktemp("one") / "model"
    return folder, _train(inputs, "one", folder)


def test_a_training_learns_by_the_balancing_loss_and_tells_how_tokens_are_spread(
    one: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, told = one
    shares = np.array([values_of(told, f"train/expert_share/{number}") for number in range(4)])
    assert shares.shape == (4, 12) and shares.sum(0) == pytest.approx(np.ones(12))
    assert (np.array(values_of(told, "train/expert_most")) >= 4 * shares.max(0) - 1e-9).all()
    assert (np.array(values_of(told, "train/expert_least")) <= 4 * shares.min(0) + 1e-9).all()
    balancing = values_of(told, "train/balancing_loss")
    assert len(balancing) == 12 and min(balancing) > 1.9
    config = json.loads((folder / "config.json").read_text())
    assert config["router_aux_loss_coef"] == 0.5
    assert values_of(told, "train/loss")[0] == pytest.approx(
        math.log(config["vocab_size"]) + 0.5 * balancing[0], abs=0.1
    )
    ids = torch.arange(4, 20)[None]
    found = AutoModelForCausalLM.from_pretrained(folder)(ids, labels=ids, output_router_logits=True)
    assert torch.isfinite(found.loss) and 1.9 < float(found.aux_loss.detach()) < 4


def test_two_ranks_train_as_one_process_and_transformers_takes_their_model(
    one: tuple[Path, list[dict[str, Any]]], inputs: dict[str, Path], tmp_path: Path, weights: Weights
) -> None:
    whole, expected = one
    told = _train(inputs, "experts", tmp_path / "model")
    names = ("train/loss", "train/grad_norm", "train/activation_norm", "validation/sample_loss")
    for name in (*names, "train/balancing_loss", "train/expert_most", "train/expert_share/3"):
        assert values_of(told, name) == pytest.approx(values_of(expected, name), rel=1e-3), name
        assert values_of(told, name)
    assert_close(weights(tmp_path / "model"), weights(whole))
    ids = torch.arange(4, 20)[None]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(place)(ids).logits for place in (tmp_path / "model", whole))
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "other"),
    [
        ("experts", "one"),
        ("experts", "experts-ddp"),
        ("experts-full", "experts-4"),
        ("experts-selective", "experts-full"),
        ("experts-ddp", "experts-zero1"),
        ("experts-zero1", "experts-2-zero1"),
        ("experts-2-zero1", "experts"),
        ("experts-4", "experts-zero1"),
        ("experts-4", "fsdp"),
        ("one", "experts-ddp"),
        ("fsdp", "experts"),
        ("ddp", "experts-4"),
        ("composer", "experts"),
    ],
)
def test_each_way_goes_on_to_the_bit_and_into_any_other(
    way: str,
    other: str,
    one: tuple[Path, list[dict[str, Any]]],
    inputs: dict[str, Path],
    tmp_path: Path,
    weights: Weights,
) -> None:
    """The risk: an expert's weights or moments come back to another expert, or stay away where copies of it share out
    what they write."""
    assert_goes_on(partial(_train, inputs), way, other, one, tmp_path / "model", weights)


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_adamw_whose_state_is_spread_ends_with_the_same_bits(
    count: int, inputs: dict[str, Path], tmp_path: Path, weights: Weights
) -> None:
    """The risk: an optimizer that steps many weights at once takes none whose state is spread over different ranks."""
    settings = SETTINGS | {"optimizer": {"learning_rate": 3.0e-3}, "duration": "4 batches"}
    found = []
    for sharding in ("ddp", "zero1"):
        out = tmp_path / sharding
        pretrain_in_ranks(count, settings, inputs, out, launch=SHARED | {"sharding": sharding})
        found.append(weights(out))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.long
def test_a_fault_is_corrected_and_texts_and_benchmarks_are_as_in_one_process(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    """NaN on one rank, which all have to go back for, and batches that are passed over. The risk: a rank goes on alone,
    and the others wait for its tokens for ever."""
    asked = {"evaluate_tasks": ["minimal_pairs"], "evaluate_limit": 8, "sample_prompts": ["Sort "]}
    settings = GUARDED | asked | {"model": SETTINGS["model"]}
    told, made = {}, {}
    for way in ("one", "experts"):
        count, launch = WAYS[way]
        told[way] = pretrain_in_ranks(count, settings, inputs, tmp_path / way, launch=launch, prepare=NotANumber(count))
        (made[way],) = json.loads((tmp_path / way / "aux" / "corrections.json").read_text())
    assert made["one"]["alarm"]["batch"] == 25
    assert {**made["one"], "alarm": None} == {**made["experts"], "alarm": None}
    metrics = (("train/loss", 1e-3), ("train/activation_norm", 1e-3), ("benchmarks/minimal_pairs/acc", 0.13))
    for metric, close in metrics:
        ours, theirs = (values_of(told[way], metric) for way in ("experts", "one"))
        assert ours == pytest.approx(theirs, rel=close, abs=close, nan_ok=True) and ours, metric
    samples = [(tmp_path / way / "aux" / "training_samples.jsonl").read_text() for way in ("one", "experts")]
    assert samples[0].count("\n") == samples[1].count("\n") > 0


def test_what_does_not_go_with_it_is_refused() -> None:
    with pytest.raises(ValidationError, match="expected with expert_parallel trainer: native"):
        LaunchConfig(processes=2, expert_parallel=2, trainer="composer")
    native: dict[str, Any] = {"processes": 4, "trainer": "native", "expert_parallel": 2}
    with pytest.raises(ValidationError, match="sharding: ddp or zero1, not fsdp"):
        LaunchConfig(**native, sharding="fsdp")
    with pytest.raises(ValidationError, match="a divisor of the 4 ranks, not 3"):
        LaunchConfig(**native | {"expert_parallel": 3})
    with pytest.raises(ValidationError, match="sharding: ddp together with tensor_parallel, not zero1"):
        LaunchConfig(**native, tensor_parallel=2, sharding="zero1")
    with pytest.raises(ValidationError, match="a divisor of the 2 ranks that have the same layers, not 4"):
        LaunchConfig(**native | {"expert_parallel": 4}, pipeline_parallel=2)
    with pytest.raises(ValidationError, match="compile: auto or off"):
        LaunchConfig(**native, compile="on")
    dense = expert_ranks_problem(2, "llama", {})
    assert dense and dense.code == "no_expert_parallel" and "mixtral, olmoe, qwen3_moe" in dense.message
    odd = expert_ranks_problem(3, "mixtral", {"num_local_experts": 8})
    assert odd and odd.code == "not_divisible" and "a multiple of 3, not 8" in odd.message
    assert expert_ranks_problem(4, "qwen3_moe", {"num_experts": 8}) is None
    whole = expert_ranks_problem(1, "mixtral", {}, (2, 1, 1))
    assert whole and "share the experts of mixtral beside tensor_parallel" in whole.message
    assert expert_ranks_problem(1, "mixtral", {}, (1, 2, 2)) is None and expert_ranks_problem(1, "llama", {}) is None
