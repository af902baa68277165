"""Ranks that each hold some of a model's layers: the same loss and gradients as one process for each family, and a
training that a guard corrects as one of one process."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.tensor import DTensor

from infra.launch.config import LaunchConfig
from tests.support.programs.ranked import called_in_ranks, pretrain_in_ranks
from tests.training.distributed.layouts import values_of
from tests.training.distributed.test_groups_of_ranks import SETTINGS
from tests.training.distributed.test_ranks import GUARDED, _NotANumber

LENGTH = 13
CASES: dict[str, list[tuple[str, int, int, bool]]] = {
    "two": [("llama", 1, 3, True), ("mistral", 2, 4, False), ("qwen2", 1, 2, False), ("qwen3", 2, 5, True)],
    "four": [("llama", 1, 4, True), ("qwen3", 2, 9, False)],
}
CASES["pairs"] = CASES["two"]
"""Family, pieces of the model on each rank, layers, and whether the embedding is the output layer too."""
RANKS = {"two": (2, 1), "four": (4, 1), "pairs": (2, 2)}
"""Of a pipeline, and that share its layers."""


def _compare(rank: int, count: int, port: int, tensor: int, cases: list[tuple[str, int, int, bool]]) -> str:
    """In each rank: a model, and the same one as a pipeline; the traceback of what differs."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    try:
        for family, pieces, layers, tied in cases:
            _compare_one(count // tensor, tensor, family, pieces, layers, tied)
    except BaseException:
        return traceback.format_exc()
    return ""


def _compare_one(count: int, tensor: int, family: str, pieces: int, layers: int, tied: bool) -> None:
    from training.config import ModelConfig
    from training.core.hardware import prepare
    from training.distributed.parallel import parallelize, whole_weights
    from training.model.loss import IGNORE
    from training.model.models import build, hf_config
    from training.train_modules.language_model import LanguageModel

    launch = LaunchConfig(
        device="cpu",
        threads=1,
        precision="fp32",
        processes=count * tensor,
        pipeline_parallel=count,
        tensor_parallel=tensor,
        pipeline_pieces=pieces,
        trainer="native",
    )
    hardware = prepare(launch, shares_examples=True)
    sizes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": tied,
    }
    if family == "qwen2":
        sizes |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    config = ModelConfig(transformers={"model_type": family, **sizes})
    one, two = (LanguageModel(build(hf_config(config, 64, {}), seed=1), hardware) for _ in range(2))
    parallelize(two, launch, hardware)
    torch.manual_seed(3)
    ids = torch.randint(0, 64, (8, LENGTH))
    documents = (torch.arange(LENGTH) >= 5).int().repeat(8, 1)
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).repeat(8, 1)
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "documents": documents, "position_ids": positions}
    batch["labels"][:, [4, -1]] = IGNORE
    batch["labels"][1:3, 2:9] = IGNORE  # microbatches differ in the tokens that bear loss
    plain = {name: batch[name] for name in ("input_ids", "labels")}
    # The last ones have too few sequences, as a batch that a guard passes over.
    for some in (batch, plain, {name: value[:5] for name, value in batch.items()}, batch_of_one(batch)):
        for model in (one, two):
            model.zero_grad()
        whole = one.loss(one(some), some)
        whole.backward()
        labelled, found = int((some["labels"] != IGNORE).sum()), []

        def loss_of(hidden: Tensor, labels: Tensor, labelled: int = labelled, found: list[Tensor] = found) -> Tensor:
            found.append(two.loss(hidden, {"labels": labels}) * (labels != IGNORE).sum() / labelled)
            return found[-1]

        assert two.pipeline is not None
        last, filled = two.pipeline.train(some, 2, loss_of, lambda: None)
        if last is not None:
            torch.testing.assert_close(torch.stack(found).sum(), whole, rtol=1e-5, atol=1e-6)
        rows = len(some["labels"])
        for ours, theirs in zip(two.example_losses(last, filled), one.example_losses(one(some), some), strict=True):
            torch.testing.assert_close(ours[:rows], theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(two.losses(some), one.losses(some), rtol=1e-4, atol=1e-5)
        gradients = {name: weight.grad for name, weight in one.named_parameters()}
        for name, weight in two.named_parameters():
            torch.testing.assert_close(_whole(weight.grad), gradients[name], rtol=1e-4, atol=1e-6)
        norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        assert two.pipeline.clip(0.1) == pytest.approx(float(norm), rel=1e-4)
        for name, weight in two.named_parameters():
            torch.testing.assert_close(_whole(weight.grad), gradients[name], rtol=1e-4, atol=1e-6)
    held = {name.split(".")[3] for name, _ in two.named_parameters() if ".layers." in name}
    assert len(held) <= -(-layers // (count * pieces)) * pieces < layers
    joined = whole_weights(two)
    for name, weight in whole_weights(one).items():
        assert torch.equal(joined.pop(name), weight)
    assert not joined


def _whole(gradient: Any) -> Any:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def batch_of_one(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[:1] for name, value in batch.items()}


@pytest.mark.parametrize(
    "name", ["two", pytest.param("four", marks=pytest.mark.long), pytest.param("pairs", marks=pytest.mark.long)]
)
def test_a_pipeline_has_loss_and_gradients_of_the_whole_model(name: str) -> None:
    """The risk of four: ranks in the middle, which have neither end, and what they hand on. Of pairs: what each of a
    group has a part of is summed once, an embedding on both ends among it, and sequences are filled up for them."""
    pipeline, tensor = RANKS[name]
    found = called_in_ranks(_compare, pipeline * tensor, tensor, CASES[name])
    assert not any(found), "\n".join(found)


@pytest.mark.long
def test_a_fault_is_corrected_and_texts_and_benchmarks_are_as_in_one_process(
    shards_dir: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    """NaN in the last stage, which all have to go back for, and batches that are passed over. The risk: ranks that do
    not know the loss decide otherwise, or wait for each other for ever."""
    inputs = {"shards": shards_dir, "tokenizer": tokenizer_dir}
    asked = {"evaluate_tasks": ["minimal_pairs"], "evaluate_limit": 8, "sample_prompts": ["Sort "]}
    told, made = {}, {}
    for name, count, launch in (("one", 1, {}), ("stages", 2, {"pipeline_parallel": 2})):
        told[name] = pretrain_in_ranks(
            count,
            GUARDED | asked,
            inputs,
            tmp_path / name,
            launch={"trainer": "native", **launch},
            prepare=_NotANumber(count),
        )
        (made[name],) = json.loads((tmp_path / name / "aux" / "corrections.json").read_text())
    assert made["one"]["alarm"]["batch"] == 25
    assert {**made["one"], "alarm": None} == {**made["stages"], "alarm": None}
    for metric, close in (
        ("train/loss", 1e-3),
        ("train/activation_norm", 1e-3),
        ("benchmarks/minimal_pairs/acc", 0.13),
    ):
        ours, theirs = (values_of(told[name], metric) for name in ("stages", "one"))
        assert ours == pytest.approx(theirs, rel=close, abs=close, nan_ok=True) and ours, metric
    samples = [(tmp_path / name / "aux" / "training_samples.jsonl").read_text() for name in ("one", "stages")]
    assert samples[0].count("\n") == samples[1].count("\n") > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("launch", "settings", "close"),
    [
        ({"precision": "bf16", "pipeline_pieces": 2}, {}, 2e-3),
        ({"precision": "fp16"}, {}, 2e-3),
        ({}, {"objective": "prefix", "batch_warmup": {"first_tokens": 128, "over_tokens": 512}}, 1e-4),
    ],
    ids=["bf16", "fp16", "prefix and growing batches"],
)
def test_what_goes_with_it_trains_as_in_one_process(
    launch: dict[str, Any],
    settings: dict[str, Any],
    close: float,
    shards_dir: Path,
    tokenizer_dir: Path,
    tmp_path: Path,
) -> None:
    """The risk: the stream between stages in another type than in one process, a loss scale that only the last stage
    knows, or a schedule of the first batch's shape."""
    inputs = {"shards": shards_dir, "tokenizer": tokenizer_dir}
    told = {}
    for name, count, where in (("one", 1, {"precision": launch.get("precision", "fp32")}), ("stages", 2, launch)):
        where = {"trainer": "native", "pipeline_parallel": count, **where}
        told[name] = pretrain_in_ranks(count, SETTINGS | settings, inputs, tmp_path / name, launch=where)
    for metric, within in (("train/loss", close), ("validation/sample_loss", close), ("train/grad_norm", 20 * close)):
        ours, theirs = (values_of(told[name], metric) for name in ("stages", "one"))
        assert ours == pytest.approx(theirs, rel=within) and ours, metric


def test_what_does_not_go_with_it_is_refused() -> None:
    with pytest.raises(ValidationError, match="expected with pipeline_parallel trainer: native"):
        LaunchConfig(processes=2, pipeline_parallel=2, trainer="composer")
    native: dict[str, Any] = {"processes": 4, "trainer": "native", "pipeline_parallel": 2}
    with pytest.raises(ValidationError, match="sharding: ddp or zero1, not fsdp"):
        LaunchConfig(**native, sharding="fsdp")
    with pytest.raises(ValidationError, match="a divisor of the 4 ranks, not 3"):
        LaunchConfig(**native | {"pipeline_parallel": 3})
    both = {"context_parallel": 2, "tensor_parallel": 2}
    with pytest.raises(ValidationError, match="4 ranks, not 2 times context_parallel: 2 times tensor_parallel: 2"):
        LaunchConfig(**native, **both)
    with pytest.raises(ValidationError, match="sharding: ddp together with context_parallel, not zero1"):
        LaunchConfig(**native, context_parallel=2, sharding="zero1")
    with pytest.raises(ValidationError, match="pipeline_parallel: 2 or more with pipeline_pieces"):
        LaunchConfig(pipeline_pieces=2)
