"""Compiled training: the same result to rounding, and bit-identical after it was interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from infra.errors import Cancelled
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.ranked import pretrain_in_ranks
from training.compiling import wants_compile
from training.config import PretrainConfig
from training.hardware import Hardware
from training.pretrain import pretrain

CONFIG = PretrainConfig.model_validate(
    {
        "model": {"family": "llama", "layers": 1, "width": 32, "heads": 2, "positions": 64},
        "duration": "8 batches",
        "global_batch_tokens": 256,
        "checkpoint_every": "3 batches",
    }
)


def test_compiling_moves_weights_by_rounding_and_resumes_to_the_bit(
    shards_dir: Path, tokenizer_dir: Path, tmp_path: Path, journal: Any, weights: Callable[[Path], dict[str, Any]]
) -> None:
    inputs = {"shards": shards_dir, "tokenizer": tokenizer_dir}

    def train(name: str, work: str, choice: str, **surroundings: Any) -> dict[str, torch.Tensor]:
        launch = LaunchConfig(device="cpu", threads=1, precision="fp32", compile=choice)  # type: ignore[arg-type]
        pretrain(CONFIG, inputs, tmp_path / name, Run(tmp_path / work, launch, **surroundings))
        return weights(tmp_path / name)

    plain, compiled = train("plain", "plain.work", "off"), train("compiled", "compiled.work", "on")
    for name, tensor in plain.items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-3, atol=1e-4)

    def stopped() -> bool:
        return len(journal.metric("train/loss")) >= 5

    with pytest.raises(Cancelled):
        train("again", "again.work", "on", journal=journal, is_cancelled=stopped)
    again = train("again", "again.work", "on")
    assert all(torch.equal(again[name], tensor) for name, tensor in compiled.items())


@pytest.mark.long
def test_compiled_ranks_end_with_the_weights_of_one_process(
    shards_dir: Path, tokenizer_dir: Path, tmp_path: Path, weights: Callable[[Path], dict[str, Any]]
) -> None:
    inputs = {"shards": shards_dir, "tokenizer": tokenizer_dir}
    settings = {"duration": "6 batches", "global_batch_tokens": 256, "model": CONFIG.model.model_dump()}
    for name, count, launch in (("one", 1, {"compile": "off"}), ("two", 2, {"compile": "on"})):
        pretrain_in_ranks(count, settings, inputs, tmp_path / name, launch=launch)
    expected = weights(tmp_path / "one")
    for name, tensor in weights(tmp_path / "two").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)


def test_sharded_models_are_not_compiled() -> None:
    with pytest.raises(ValidationError, match="compile: auto or off"):
        LaunchConfig(compile="on", sharding="fsdp")
    hardware = Hardware(torch.device("cpu"), bf16=True)
    assert not wants_compile(LaunchConfig(sharding="fsdp", processes=2), hardware, layers=4, flops=1e18)
