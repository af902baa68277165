"""A GPU learns what a CPU does: the same losses, batch by batch, and the same bits when a training goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.launch.config import LaunchConfig
from infra.run import Run
from training.config import PretrainConfig, SftConfig
from training.pretrain import pretrain
from training.sft import sft

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

Weights = Callable[[Path], dict[str, torch.Tensor]]
LENGTH = 32
SETTINGS: dict[str, Any] = {
    "model": {"family": "llama", "layers": 2, "width": 64, "heads": 2, "positions": 64},
    "duration": "30 batches",
    "global_batch_tokens": 8 * LENGTH,
    "optimizer": {"learning_rate": 3.0e-3, "muon": {}},
    "schedule": {"warmup": "5 batches"},
    "evaluate_every": "15 batches",
    "checkpoint_every": "20 batches",
}


@pytest.fixture
def train(shards_dir: Path, tokenizer_dir: Path, tmp_path: Path, journal: Any) -> Callable[..., list[float]]:
    """Pretrains into `tmp_path`/name, and goes on with what is there; the training losses."""

    def train(name: str, **launch: Any) -> list[float]:
        journal.lines.clear()
        run = Run(tmp_path / f"{name}.work", LaunchConfig(threads=1, trainer="native", **launch), journal=journal)
        inputs = {"shards": shards_dir, "tokenizer": tokenizer_dir}
        pretrain(PretrainConfig.model_validate(SETTINGS), inputs, tmp_path / name, run)
        found: list[float] = journal.metric("train/loss")
        return found

    return train


@pytest.mark.parametrize(
    ("launch", "close"),
    [
        ({"precision": "fp32"}, 1e-3),
        ({"precision": "bf16"}, 2e-2),
        ({"precision": "bf16", "compile": "on"}, 2e-2),
        ({"precision": "bf16", "attention": "flex_attention"}, 2e-2),
        ({"precision": "fp16"}, 2e-2),
        ({"precision": "bf16", "recompute": "full"}, 2e-2),
    ],
    ids=lambda given: " ".join(given.values()) if isinstance(given, dict) else str(given),
)
def test_pretraining_has_the_losses_of_a_cpu(
    train: Callable[..., list[float]], launch: dict[str, str], close: float
) -> None:
    there = train("gpu", device="gpu", **launch)
    here = train("cpu", device="cpu", precision="fp32")
    assert there == pytest.approx(here, rel=close) and there[-1] < 0.9 * there[0]


def test_pretraining_that_goes_on_ends_with_the_same_bits(
    train: Callable[..., list[float]], tmp_path: Path, weights: Weights
) -> None:
    whole = train("gpu", device="gpu")
    ended = weights(tmp_path / "gpu")
    *_, newest = sorted((tmp_path / "gpu.work" / "checkpoints").glob("ba*"))
    shutil.rmtree(newest)
    assert train("gpu", device="gpu") == whole[20:]
    again = weights(tmp_path / "gpu")
    assert all(torch.equal(again[name], weight) for name, weight in ended.items())


def test_instruction_tuning_has_the_losses_of_a_cpu(
    base_dir: Path, instructions_dir: Path, tmp_path: Path, journal: Any
) -> None:
    found = []
    for device in ("gpu", "cpu"):
        journal.lines.clear()
        launch = LaunchConfig(device=device, threads=1, trainer="native", precision="fp32")
        config = SftConfig.model_validate({"duration": "10 batches", "global_batch_examples": 8})
        inputs = {"model": base_dir, "instructions": instructions_dir}
        sft(config, inputs, tmp_path / device, Run(tmp_path / f"{device}.work", launch, journal=journal))
        found.append(journal.metric("train/loss"))
    assert found[0] and found[0] == pytest.approx(found[1], rel=1e-3)
