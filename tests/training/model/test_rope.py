"""Longer rotary positions: YaRN's and another base's frequencies by the papers' formulas, transformers' logits, and an
exported config that gives them again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from training.config import PretrainConfig
from training.config.rope import RopeConfig
from training.model.models import load
from training.model.rope import extend_positions
from training.pretrain import train


def yarn(width: int, base: float, factor: float, original: int, fast: float, slow: float) -> tuple[np.ndarray, float]:
    """Frequencies and the scale of rotations by Peng et al. 2024, equations 17 to 23."""
    theta = base ** (-np.arange(0, width, 2) / width)
    rotations = original * theta / (2 * math.pi)

    def dimension(count: float) -> float:
        return width * math.log(original / (count * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
    assert rotations[0] > rotations[-1]
    return theta * (1 - ramp) + theta / factor * ramp, 0.1 * math.log(factor) + 1


@pytest.mark.parametrize("rope", [{"positions": 512}, {"positions": 512, "beta_fast": 6.0, "beta_slow": 0.5}])
def test_yarn_is_the_paper_s_and_logits_are_those_of_transformers(base_dir: Path, rope: dict[str, Any]) -> None:
    network = load(base_dir).eval()
    assert extend_positions(network, RopeConfig(**rope)) == 4
    layer = network.model.rotary_emb
    keys = {"fast": rope.get("beta_fast", 32.0), "slow": rope.get("beta_slow", 1.0)}
    expected, scale = yarn(16, network.config.rope_parameters["rope_theta"], 4, 128, **keys)
    np.testing.assert_allclose(layer.inv_freq.numpy(), expected, rtol=1e-5)
    assert layer.attention_scaling == pytest.approx(scale)
    settings = AutoConfig.from_pretrained(base_dir)
    settings.rope_parameters = {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128,
        **({"beta_fast": 6.0, "beta_slow": 0.5} if "beta_fast" in rope else {}),
    }  # fmt: skip
    settings.max_position_embeddings = 512
    reference = AutoModelForCausalLM.from_pretrained(base_dir, config=settings).eval()
    ids = torch.arange(400)[None] % 300
    with torch.no_grad():
        torch.testing.assert_close(network(ids).logits, reference(ids).logits, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(network(ids).logits, load(base_dir).eval()(ids).logits, atol=1e-4)


def test_another_base_stretches_the_slowest_rotation_by_the_factor(base_dir: Path) -> None:
    network, before = load(base_dir), load(base_dir).model.rotary_emb.inv_freq
    extend_positions(network, RopeConfig(kind="base", positions=512))
    after = network.model.rotary_emb.inv_freq
    assert float(before[-1] / after[-1]) == pytest.approx(4) and float(after[0]) == 1
    network = load(base_dir)
    extend_positions(network, RopeConfig(kind="base", positions=512, base=500_000.0))
    expected = 500_000.0 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(network.model.rotary_emb.inv_freq.numpy(), expected, rtol=1e-5)


def test_a_training_goes_on_with_longer_positions_and_exports_them(
    base_dir: Path, shards_dir: Path, tmp_path: Path
) -> None:
    settings = {"duration": "2 batches", "global_batch_tokens": 256, "rope": {"positions": 256}, "keep_state": "none"}
    inputs = {"model": base_dir, "shards": shards_dir, "tokenizer": base_dir}
    run = Run(tmp_path / "work", LaunchConfig(device="cpu", threads=1, precision="fp32"))
    train(PretrainConfig.model_validate(settings), inputs, tmp_path / "out", run)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 256
    assert config["rope_parameters"]["rope_type"] == "yarn" and config["rope_parameters"]["factor"] == 2
    again = load(tmp_path / "out")
    assert extend_positions(again, RopeConfig(positions=512)) == 4, "counted from the first length"
    assert again.config.rope_parameters["original_max_position_embeddings"] == 128


def test_what_cannot_be_extended_is_refused(base_dir: Path) -> None:
    with pytest.raises(StageError, match=r"pretrain\.rope\.positions.*more than the model's 128"):
        extend_positions(load(base_dir), RopeConfig(positions=128))
    problems = PretrainConfig.model_validate({"rope": {"positions": 4096}}).problems(1024)
    assert [problem.path for problem in problems] == ["pretrain.rope"]
