"""RLHF in an environment: figures, transcripts, dropped episodes, and a round that continues where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Cancelled, Run
from tests.support.stopped import StoppedAt
from training.config import RlhfConfig
from training.rlhf import rlhf
from training.sandbox.runner import find

LETTERS = f"{Path(__file__).with_name('unruly.py')}:Letters"
LEARNING: dict[str, Any] = {
    "environment": {"use": LETTERS, "tasks": 8, "max_turns": 3, "max_tokens": 48, "instances": 2},
    "algorithm": "grpo", "answers_per_prompt": 4, "rollouts": 4, "rollout_prompts": 16, "minibatch_answers": 8,
    "answer_max_tokens": 8, "max_prompt_tokens": 40, "kl_coef": 0.0, "unfinished_penalty": 0.0,
    "optimizer": {"learning_rate": 2.0e-3, "weight_decay": 0.0}, "heldout_prompts": 8, "refill_groups": 1,
    "checkpoint_every": "1 batches",
}  # fmt: skip


@pytest.fixture
def inputs(base_dir: Path, instructions_dir: Path) -> dict[str, Path]:
    try:
        find("auto")
    except StageError as error:
        pytest.skip(str(error))
    return {"model": base_dir, "prompts": instructions_dir}


def test_a_policy_learns_in_an_environment_and_continues_within_a_round_with_the_same_weights(
    inputs: dict[str, Path], tmp_path: Path, run: Run, journal: Any, weights: Any
) -> None:
    config = RlhfConfig.model_validate(LEARNING)
    unbroken = rlhf(config, inputs, tmp_path / "unbroken", Run(tmp_path / "other", run.launch, journal=journal))
    figures = unbroken.figures
    for name in ("environment_gain", "kl_to_sft"):
        assert figures[f"{name}_low"] <= figures[name] <= figures[f"{name}_high"]
    for side in ("sft", "rlhf"):
        assert 1 <= figures[f"turns_{side}"] <= 3 and 1 <= figures[f"answer_tokens_{side}"] <= 24
        assert 0 <= figures[f"heldout_environment_{side}"] <= 1 and figures[f"dropped_{side}"] == 0
    rewards, turns = (journal.metric(f"rlhf/{name}") for name in ("environment_reward", "turns"))
    assert len(rewards) == 4 and all(1 <= value <= 3 for value in turns)
    lines = [json.loads(line) for line in (tmp_path / "unbroken" / "aux" / "episodes.jsonl").open()]
    assert len(lines) == 8 and lines[0]["episodes"]["rlhf"]["messages"][0]["content"] == "Sort the list 0."
    page = (tmp_path / "unbroken" / "aux" / "episodes.html").read_text()
    assert page.count("<article") == 8 and "more reward after" in page
    with pytest.raises(Cancelled):
        rlhf(config, inputs, tmp_path / "stopped", StoppedAt(3, run))
    rlhf(config, inputs, tmp_path / "continued", run)
    assert any(message.startswith("continuing rlhf at batch 3 of") for message in journal.events())
    first, second = weights(tmp_path / "unbroken"), weights(tmp_path / "continued")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_samplers_that_play_without_staleness_end_with_the_bits_of_rounds_in_turns(
    inputs: dict[str, Path], tmp_path: Path, journal: Any, weights: Any
) -> None:
    launch = LaunchConfig.model_validate({"device": "cpu", "threads": 1, "samplers": {"count": 2}})
    rewards = {"tests.training.rl.test_async_rollouts:vowels": 1.0}
    settings = LEARNING | {"rollouts": 2, "refill_groups": 0, "reward_functions": rewards}
    for name, changed in {"in_turns": {}, "samplers": {"async": {"max_staleness": 0, "parts": 2}}}.items():
        config = RlhfConfig.model_validate(settings | changed)
        rlhf(config, inputs, tmp_path / name, Run(tmp_path / "work" / name, launch, journal=journal))
    before, first, second = map(weights, (inputs["model"], tmp_path / "in_turns", tmp_path / "samplers"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(before[name], first[name]) for name in first), "nothing was learnt"
    turns = journal.metric("rlhf/turns")
    assert len(turns) == 4 and turns[:2] == turns[2:]
    assert not list(tmp_path.glob("work/*/rollouts/sampler-[01]")), "temporary files are left behind"


def test_a_dead_process_costs_an_episode_that_is_played_again_and_too_many_stop_the_round_by_name(
    inputs: dict[str, Path], tmp_path: Path, run: Run, journal: Any, weights: Any
) -> None:
    """The process ends itself once; other episodes go on, and the one that it cost is played again."""
    marker = tmp_path / "marker"
    environment = {**LEARNING["environment"], "options": {"marker": str(marker)}, "instances": 1, "tasks": 2}
    short = {**LEARNING, "rollouts": 1, "refill_groups": 0, "answers_per_prompt": 8}
    launch = LaunchConfig(device="cpu", threads=1, sandbox="none")  # so that it can leave a marker
    config = RlhfConfig.model_validate({**short, "environment": environment})
    rlhf(config, inputs, tmp_path / "out", Run(tmp_path / "work", launch, journal=journal))
    assert marker.exists() and journal.metric("rlhf/episodes_dropped") == [1.0]
    assert journal.metric("rlhf/episodes_copied") == [0.0]
    marker.unlink()
    none = RlhfConfig.model_validate({**short, "environment": {**environment, "max_dropped": 0.0}})
    with pytest.raises(StageError, match=r"unruly\.py:Letters failed \(1 died\)") as raised:
        rlhf(none, inputs, tmp_path / "out", Run(tmp_path / "again", launch))
    assert raised.value.problems[0].code == "too_many_dropped"
