"""Rollouts that do not wait: samplers beside the trainer, their schedule, and the bits that training ends with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.run import Run
from training.config import RlhfConfig
from training.rlhf import rlhf

FUNCTION = "tests.training.alignment.test_async_rollouts:vowels"
RLHF: dict[str, Any] = {
    "algorithm": "grpo", "answers_per_prompt": 4, "rollouts": 4, "rollout_prompts": 16, "minibatch_answers": 8,
    "answer_max_tokens": 8, "max_prompt_tokens": 40, "kl_coef": 0.02, "unfinished_penalty": 0.0,
    "reward_functions": {FUNCTION: 1.0}, "optimizer": {"learning_rate": 2.0e-3, "weight_decay": 0.0},
    "heldout_prompts": 4, "checkpoint_every": "3 batches",
}  # fmt: skip


def vowels(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    """A reward function, which the tests name by its import path."""
    return [sum(answer.count(letter) for letter in "aeiou") / 4 for answer in answers]


@pytest.fixture
def inputs(base_dir: Path, instructions_dir: Path) -> dict[str, Path]:
    return {"model": base_dir, "prompts": instructions_dir}


def _config(**settings: Any) -> RlhfConfig:
    return RlhfConfig.model_validate(RLHF | settings)


def test_without_staleness_training_ends_with_the_bits_of_rounds_in_turns(
    inputs: dict[str, Path], tmp_path: Path, run: Run, journal: Any, weights: Any
) -> None:
    rlhf(_config(), inputs, tmp_path / "in_turns", Run(tmp_path / "other", run.launch))
    figures = rlhf(_config(**{"async": {"max_staleness": 0}}), inputs, tmp_path / "beside", run).figures
    ours, theirs = weights(tmp_path / "beside"), weights(tmp_path / "in_turns")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    print(figures)
    for name in ("staleness","trainer_idle_share","sampler_idle_share","importance"): print(name, journal.metric("rlhf/"+name))
    f1= rlhf(_config(**{"async": {"max_staleness": 1}}), inputs, tmp_path / "one", Run(tmp_path / "w1", run.launch, journal=journal))
    print(f1.figures)
    for name in ("staleness","trainer_idle_share","sampler_idle_share","importance", "weights_handover_s"): print(name, journal.metric("rlhf/"+name))
