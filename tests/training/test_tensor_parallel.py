"""Ranks that share every layer: the same loss and gradients as one process for each family, and the same training."""

from __future__ import annotations

import os
import shutil
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from infra.launch.config import LaunchConfig
from tests.ranked import PATIENCE_S, pretrain_in_ranks, training_process

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LENGTH = 13
"""No multiple of the ranks: sequences are filled up."""
Weights = Callable[[Path], dict[str, torch.Tensor]]


def _compare(rank: int, port: int, family: str, tied: bool) -> str:
    """In each of two ranks: a model, and the same one split; the traceback of what differs."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    try:
        from training.config import ModelConfig
        from training.hardware import prepare
        from training.models import LanguageModel, build, hf_config
        from training.parallel import parallelize, whole_weights
        from training.tensor_parallel import clip, sum_gradients

        launch = LaunchConfig(
            device="cpu", threads=1, precision="fp32", processes=2, tensor_parallel=2, trainer="native"
        )
        hardware = prepare(launch, shares_examples=True)
        sizes: dict[str, Any] = {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "tie_word_embeddings": tied,
        }
        config = ModelConfig(transformers={"model_type": family, **sizes})
        one, two = (LanguageModel(build(hf_config(config, 64, {}), seed=1), hardware) for _ in range(2))
        parallelize(two, launch, hardware)
        torch.manual_seed(3)
        ids = torch.randint(0, 64, (3, LENGTH))
        documents = (torch.arange(LENGTH) >= 5).int().repeat(3, 1)
        positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).repeat(3, 1)
        batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "documents": documents, "position_ids": positions}
        batch["labels"][:, [4, -1]] = -100
        for some in (batch, {name: batch[name] for name in ("input_ids", "labels")}):
            for model in (one, two):
                model.zero_grad()
            whole, split = (model.loss(model(some), some) for model in (one, two))
            torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(two.losses(some), one.losses(some), rtol=1e-4, atol=1e-5)
            whole.backward()
            split.backward()
            sum_gradients(two)
            theirs = {name: weight.grad for name, weight in one.named_parameters()}
            for name, weight in two.named_parameters():
                torch.testing.assert_close(weight.grad.full_tensor(), theirs[name], rtol=1e-4, atol=1e-6)
            norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            assert clip(two, 0.1) == pytest.approx(float(norm), rel=1e-4)
            for name, weight in two.named_parameters():
                torch.testing.assert_close(weight.grad.full_tensor(), theirs[name], rtol=1e-4, atol=1e-6)
        held = sum(weight.to_local().numel() for weight in two.parameters())
        assert held < 0.52 * sum(weight.numel() for weight in one.parameters())
        for name, weight in whole_weights(one).items():
            assert torch.equal(whole_weights(two)[name], weight)
    except BaseException:
        return traceback.format_exc()
    return ""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_split_model_has_loss_and_gradients_of_the_whole(family: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = [training_process(_compare, rank, port, family, family == "qwen3") for rank in range(2)]
    try:
        found = {
            rank: one.returned() if one.wait(PATIENCE_S) is not None else "no answer" for rank, one in enumerate(both)
        }
    finally:
        for one in both:
            one.kill()
    assert found == {0: "", 1: ""}, "\n".join(found.values())


SETTINGS: dict[str, Any] = {
    "model": {"family": "llama", "layers": 2, "width": 32, "heads": 2, "positions": 64, "vocab_multiple": 64},
    "duration": "12 batches",
    "global_batch_tokens": 256,
    "optimizer": {"learning_rate": 1.0e-2, "muon": {}},
    "schedule": {"warmup": "5 batches"},
    "evaluate_every": "6 batches",
    "checkpoint_every": "4 batches",
}
SPLIT: dict[str, Any] = {"trainer": "native", "tensor_parallel": 2}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"trainer": "native"}),
    "tensor": (2, SPLIT),
    "fsdp": (4, SPLIT | {"sharding": "fsdp", "microbatch": 2}),
    "zero2": (4, SPLIT | {"sharding": "zero2"}),
    "hsdp": (4, SPLIT | {"sharding": "hsdp", "shard_ranks": 1}),
}


@pytest.fixture
def inputs(shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": shards_dir, "tokenizer": tokenizer_dir}


def _values(told: list[dict[str, Any]], name: str) -> list[float]:
    return [float(line["values"][name]) for line in told if name in line.get("values", {})]


def _train(way: str, inputs: dict[str, Path], out: Path) -> list[dict[str, Any]]:
    count, launch = WAYS[way]
    return pretrain_in_ranks(count, SETTINGS, inputs, out, launch=launch)


def test_ranks_that_share_layers_train_as_one_process(
    inputs: dict[str, Path], tmp_path: Path, weights: Weights
) -> None:
    """They then go on as one process. Groups of ranks over which each part is sharded, too (2-D), are below."""
    told = {way: _train(way, inputs, tmp_path / way) for way in ("one", "tensor")}
    whole = weights(tmp_path / "one")
    for name in ("train/loss", "train/grad_norm", "train/activation_norm", "validation/sample_loss"):
        assert _values(told["tensor"], name) == pytest.approx(_values(told["one"], name), rel=1e-3), name
    for name, tensor in weights(tmp_path / "tensor").items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-3, atol=1e-4)
    shutil.rmtree(tmp_path / "tensor.work" / "checkpoints" / "ba000000012")
    again = _train("one", inputs, tmp_path / "tensor")
    assert _values(again, "train/loss") == pytest.approx(_values(told["one"], "train/loss")[8:], rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "other"), [("tensor", "fsdp"), ("fsdp", "hsdp"), ("zero2", "tensor"), ("hsdp", "zero2"), ("one", "fsdp")]
)
def test_each_way_goes_on_to_the_bit_and_into_any_other(
    inputs: dict[str, Path], tmp_path: Path, weights: Weights, way: str, other: str
) -> None:
    """The risk: parts of a matrix that is cut in both dimensions come back to other places than their own."""
    told = _values(_train("one", inputs, tmp_path / "one"), "train/loss")
    expected = weights(tmp_path / "one")
    for turn in ("begun", "again", "moved"):
        if turn != "begun":
            shutil.rmtree(tmp_path / "model.work" / "checkpoints" / "ba000000012")
        losses = _values(_train(other if turn == "moved" else way, inputs, tmp_path / "model"), "train/loss")
        assert losses == pytest.approx(told[12 - len(losses) :], rel=1e-4)
        assert len(losses) == (12 if turn == "begun" else 4)
        found = weights(tmp_path / "model")
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)
        if turn == "begun":
            whole = found
        if turn == "again":
            assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_what_does_not_go_with_it_is_refused(inputs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="expected with tensor_parallel trainer: native"):
        LaunchConfig(processes=2, tensor_parallel=2)
    with pytest.raises(ValidationError, match="sharding: zero2, fsdp or hsdp for more than 2 ranks, not zero1"):
        LaunchConfig(processes=4, tensor_parallel=2, trainer="native", sharding="zero1")
