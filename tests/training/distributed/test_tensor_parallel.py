"""Ranks that share every layer: the same loss and gradients as one process for each family, and the same training."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from infra.launch.config import LaunchConfig
from tests.support.programs.ranked import called_in_ranks

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LENGTH = 13
"""No multiple of the ranks: sequences are filled up."""
Weights = Callable[[Path], dict[str, torch.Tensor]]


def _compare(rank: int, count: int, port: int, family: str, tied: bool) -> str:
    """In each of two ranks: a model, and the same one split; the traceback of what differs."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    try:
        from training.config import ModelConfig
        from training.core.hardware import prepare
        from training.distributed.parallel import parallelize, whole_weights
        from training.distributed.tensor_parallel import clip, sum_gradients
        from training.model.models import build, hf_config
        from training.train_modules.language_model import LanguageModel

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
            sum_gradients(two.parameters())
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


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.long] * (name == "mistral")) for name in FAMILIES]
)
def test_a_split_model_has_loss_and_gradients_of_the_whole(family: str) -> None:
    found = called_in_ranks(_compare, 2, family, family == "qwen3")
    assert found == ["", ""], "\n".join(found)


def test_what_does_not_go_with_it_is_refused() -> None:
    with pytest.raises(ValidationError, match="expected with tensor_parallel trainer: native"):
        LaunchConfig(processes=2, tensor_parallel=2, trainer="composer")
    with pytest.raises(ValidationError, match="sharding: zero2, fsdp or hsdp for more than 2 ranks, not zero1"):
        LaunchConfig(processes=4, tensor_parallel=2, trainer="native", sharding="zero1")
