"""Fine-tuning, the reward model and reinforcement learning in several ranks: the same figures as in one process."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.programs.ranked import RankFailed, train_in_ranks
from tests.training.conftest import write_rows
from training.checkpoint.export import export
from training.core.hardware import prepare
from training.train_modules.scorer import load_scorer

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
    _same(tmp_path / "one", tmp_path / "two", atol=1e-4)


@pytest.mark.long
def test_a_reward_model_learns_in_ranks_from_rankings_what_it_learns_in_one_process(
    base_dir: Path, tmp_path: Path
) -> None:
    """Prompts with two, three and four answers, votes and ties. The risk: a rank whose prompts have more answers weighs
    more."""
    (tmp_path / "preferences").mkdir()
    rows: list[dict[str, Any]] = []
    for number in range(24):
        answers = [f"{word} the list {number}." for word in ("Sort", "Copy", "Load", "No")][: 2 + number % 3]
        for better, worse in itertools.combinations(answers, 2):
            votes = [1.0, 1.0] if number % 5 == 0 else [3.0, 1.0]
            rows.append({
                "id": f"{number}{better}{worse}", "prompt": f"What is {number}?", "chosen": better, "rejected": worse,
                "ranking": str(number), "votes": votes, "source": "test",
            })  # fmt: skip
    write_rows(tmp_path / "preferences" / "train.jsonl", rows)
    write_rows(tmp_path / "preferences" / "heldout.jsonl", rows)
    inputs = {"model": base_dir, "preferences": tmp_path / "preferences"}
    settings = REWARD | {"heldout_limit": 24, "optimizer": {"learning_rate": 1.0e-3}}
    told = {count: train_in_ranks("reward_model", count, settings, inputs, tmp_path / str(count)) for count in (1, 2)}
    losses = [
        [line["values"]["train/loss"] for line in told[count] if "train/loss" in line.get("values", {})]
        for count in (1, 2)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and len(losses[0]) == 3
    _same(tmp_path / "1", tmp_path / "2", atol=1e-4)


def _same(one: Path, two: Path, atol: float) -> None:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, two))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-3, atol=atol)


def words(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    """A reward function: how many letters there are."""
    return [float(sum(one.isalpha() for one in answer)) for answer in answers]


RLHF: dict[str, Any] = {
    "rollouts": 3,
    "rollout_prompts": 16,
    "minibatch_answers": 8,
    "epochs": 2,
    "answer_max_tokens": 12,
    "max_prompt_tokens": 40,
    "kl_coef": 0.1,
    "kl_target": 0.01,
    "optimizer": {"learning_rate": 1.0e-3, "weight_decay": 0.0},
    "schedule": {"decay": "constant", "warmup": "1 batches"},
    "heldout_prompts": 5,
}
PPO = RLHF | {"text_coef": 1.0}
SHARDINGS = ("zero1", "zero2", "fsdp", "hsdp")
ENSEMBLE = RLHF | {"ensemble": "lower_bound", "stop_on_divergence": 9, "answers_per_prompt": 4}
"""Two reward models and a judge."""
GRPO = RLHF | {"answers_per_prompt": 4, "algorithm": "grpo", "reward_functions": {f"{__name__}:words": 0.5}}
RAFT = RLHF | {"answers_per_prompt": 2, "algorithm": "raft", "minibatch_answers": 4}


@pytest.fixture(scope="module")
def rl_inputs(
    base_dir: Path, instructions_dir: Path, shards_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """With reward models of random weights, which are as good as any to be followed."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("reward_model", "second", "judge")}
    for seed, folder in enumerate(folders.values(), 5):
        export(load_scorer(base_dir, prepare(LaunchConfig(device="cpu")), seed=seed).model, base_dir, folder)
    return {"model": base_dir, "prompts": instructions_dir, "shards": shards_dir, **folders}


def _inputs(rl_inputs: dict[str, Path], settings: dict[str, Any]) -> dict[str, Path]:
    """What these settings read."""
    unread = set() if "text_coef" in settings else {"shards"}
    unread |= set() if "ensemble" in settings else {"second", "judge"}
    return {name: path for name, path in rl_inputs.items() if name not in unread}


@pytest.mark.parametrize(
    ("settings", "sharding"),
    [
        pytest.param(PPO, "ddp", id="ppo-ddp"),
        pytest.param(GRPO, "fsdp", id="grpo-fsdp"),
        pytest.param(RAFT, "fsdp", id="raft-fsdp", marks=pytest.mark.long),
        pytest.param(ENSEMBLE, "ddp", id="ensemble-ddp", marks=pytest.mark.long),
        pytest.param(ENSEMBLE, "fsdp", id="ensemble-fsdp", marks=pytest.mark.long),
        *(
            pytest.param(PPO, one, id=f"ppo-{one}", marks=pytest.mark.long)
            for one in ("zero1", "zero2", "fsdp", "hsdp")
        ),
    ],
)
def test_a_policy_learns_in_ranks_what_it_learns_in_one_process(
    settings: dict[str, Any], sharding: str, rl_inputs: dict[str, Path], tmp_path: Path
) -> None:
    """The same answers, whoever samples them; advantages and the KL coefficient of all answers together. The risk of
    the long ones: ranks that gather layers while others sample, or sample with weights from before a round."""
    inputs = _inputs(rl_inputs, settings)
    one = train_in_ranks("rlhf", 1, settings, inputs, tmp_path / "one")
    two = train_in_ranks("rlhf", 2, settings, inputs, tmp_path / "two", launch={"sharding": sharding})
    own = "rlhf/kept_reward" if settings.get("algorithm") == "raft" else "rlhf/clip_share"
    for name in ("rlhf/kl_coef", "rlhf/kl", "rlhf/reward", "rlhf/answer_tokens", "train/loss", own):
        points = [[line["values"][name] for line in lines if name in line.get("values", {})] for lines in (one, two)]
        assert points[0] and points[1] == pytest.approx(points[0], rel=1e-3, abs=1e-4), name
    assert (tmp_path / "one" / "aux" / "samples.jsonl").read_bytes() == (
        tmp_path / "two" / "aux" / "samples.jsonl"
    ).read_bytes()
    _same(tmp_path / "one", tmp_path / "two", atol=1e-5)


def _dies_at(batch: int, rank: int) -> None:
    """Rank 0 is killed once the batch is told."""
    told = Run.metrics

    def metrics(self: Run, values: Any, step: int | None = None) -> None:
        told(self, values, step)
        if rank == 0 and step == batch and "train/loss" in values:
            os.kill(os.getpid(), signal.SIGKILL)

    Run.metrics = metrics  # type: ignore[method-assign]


@pytest.mark.long
@pytest.mark.parametrize("settings", [PPO, GRPO, RAFT], ids=["ppo", "grpo", "raft"])
def test_ranks_killed_three_times_within_rounds_end_with_the_same_bits(
    settings: dict[str, Any], rl_inputs: dict[str, Path], tmp_path: Path
) -> None:
    """Rounds are of four batches, checkpoints at 3, 6, 9 and so on. The risk: a round that is sampled again by a policy
    that has learnt from it meanwhile."""
    inputs = _inputs(rl_inputs, settings)
    settings = settings | {"rollouts": 5, "checkpoint_every": "3 batches"}
    train_in_ranks("rlhf", 2, settings, inputs, tmp_path / "unbroken")
    for batch in (5, 11, 17):
        with pytest.raises(RankFailed):
            train_in_ranks("rlhf", 2, settings, inputs, tmp_path / "broken", prepare=partial(_dies_at, batch))
    told = train_in_ranks("rlhf", 2, settings, inputs, tmp_path / "broken")
    assert any(line.get("message") == "continuing rlhf at batch 15 of 20" for line in told)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("broken", "unbroken"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
