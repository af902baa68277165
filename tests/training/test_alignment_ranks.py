"""Fine-tuning and the reward model in several ranks: the same figures as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ranked import train_in_ranks

SFT: dict[str, Any] = {
    "duration": "4 batches",
    "global_batch_examples": 8,
    "max_length": 64,
    "optimizer": {"learning_rate": 1.0e-3},
    "answer_max_tokens": 4,
    "answers_limit": 4,
    "heldout_limit": 4,
}
REWARD: dict[str, Any] = {"duration": "3 batches", "global_batch_pairs": 8, "max_length": 64, "heldout_limit": 4}


@pytest.mark.parametrize(("stage", "sharding"), [("sft", "fsdp"), ("reward_model", "ddp")])
def test_alignment_in_ranks_ends_with_the_weights_of_one_process(
    stage: str, sharding: str, base_dir: Path, instructions_dir: Path, preferences_dir: Path, tmp_path: Path
) -> None:
    inputs = {"model": base_dir, "instructions": instructions_dir, "preferences": preferences_dir}
    settings = {"sft": SFT, "reward_model": REWARD}[stage]
    train_in_ranks(stage, 1, settings, inputs, tmp_path / "one")
    train_in_ranks(stage, 2, settings, inputs, tmp_path / "two", launch={"sharding": sharding})
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4)
