"""Several reward models train one policy, and a training ends where a judge sees the reward being gamed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from scipy.signal import lfilter

from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from training.config import RlhfConfig
from training.core.hardware import Hardware
from training.core.train_state import EndOfTraining
from training.rl.ensemble import Ensemble
from training.rl.overoptimisation import DivergenceWatch, Round
from training.rlhf import rlhf
from training.train_modules.scorer import load_scorer

CPU = Hardware(torch.device("cpu"), bf16=False)
RLHF: dict[str, Any] = {
    "rollouts": 4,
    "rollout_prompts": 8,
    "minibatch_answers": 8,
    "answer_max_tokens": 6,
    "max_prompt_tokens": 40,
    "heldout_prompts": 8,
    "optimizer": {"learning_rate": 1.0e-3, "weight_decay": 0.0},
}


@pytest.fixture(scope="module")
def scorers(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three reward models of other seeds' score layers."""
    found = []
    for seed in (1, 2, 3):
        folder = tmp_path_factory.mktemp(f"scorer{seed}")
        load_scorer(base_dir, CPU, seed).model.save_pretrained(folder)
        found.append(folder)
    return found


@pytest.fixture
def inputs(base_dir: Path, instructions_dir: Path, scorers: list[Path]) -> dict[str, Path]:
    names = ("reward_model", "second", "third")
    return {"model": base_dir, "prompts": instructions_dir, **dict(zip(names, scorers, strict=True))}


@pytest.mark.parametrize("rule", ["mean", "worst", "variance", "lower_bound"])
def test_scores_are_combined_as_coste_et_al_say(rule: str, scorers: list[Path]) -> None:
    members = {str(number): load_scorer(folder, CPU) for number, folder in enumerate(scorers)}
    weights = {} if rule == "worst" else {"0": 2.0}
    config = RlhfConfig.model_validate({"ensemble": rule, "ensemble_coef": 0.5, "reward_weights": weights})
    scores = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    found = Ensemble(members, config).combined(scores)
    for row, value in zip(scores.double().tolist(), found.tolist(), strict=True):
        mean = (2 * row[0] + row[1] + row[2]) / 4
        variance = (2 * (row[0] - mean) ** 2 + (row[1] - mean) ** 2 + (row[2] - mean) ** 2) / 4
        expected = {
            "mean": mean,
            "worst": min(row),
            "variance": mean - 0.5 * variance,
            "lower_bound": mean - 0.5 * math.sqrt(variance),
        }
        assert value == pytest.approx(expected[rule], abs=1e-5)
    with pytest.raises(StageError, match=r"rlhf\.reward_weights\.nobody.*expected one of the inputs 0, 1, 2"):
        Ensemble(members, RlhfConfig.model_validate({"reward_weights": {"nobody": 1.0}}))


@pytest.mark.parametrize("settings", [{"ensemble": "worst"}, {"ensemble": "variance", "answers_per_prompt": 4}])
def test_a_policy_is_rewarded_by_what_all_models_say(
    settings: dict[str, Any], inputs: dict[str, Path], tmp_path: Path, run: Run, journal: Any
) -> None:
    """PPO, whose value function begins from the first, and RLOO: each model is brought to its own scale."""
    figures = rlhf(RlhfConfig.model_validate(RLHF | settings | {"best_of": 2}), inputs, tmp_path / "out", run).figures
    lines = [json.loads(line) for line in (tmp_path / "out" / "aux" / "samples.jsonl").read_text().splitlines()]
    mean = sum(line["rewards"]["rlhf"] for line in lines) / len(lines)
    assert figures["heldout_reward_rlhf"] == pytest.approx(mean, abs=1e-3)
    assert figures["reward_models_apart_sft"] > 0 and figures["best_of_2_reward"] > figures["best_of_1_reward"]
    told = journal.metric("rlhf/reward_models_apart")
    assert len(told) == 4 and min(told) > 0
    # By the worst of three models of mean 0 the first round lies below 0; the mean less a little variance as well.
    assert journal.metric("rlhf/reward")[0] < 0


def test_models_that_are_the_same_or_have_no_first_are_named(inputs: dict[str, Path], tmp_path: Path, run: Run) -> None:
    config = RlhfConfig.model_validate(RLHF)
    with pytest.raises(StageError, match=r"rlhf\.inputs\.third.*expected another model than reward_model"):
        rlhf(config, inputs | {"third": inputs["reward_model"]}, tmp_path / "out", run)
    with pytest.raises(StageError, match=r"rlhf\.inputs\.second.*call second reward_model"):
        rlhf(config, {name: inputs[name] for name in ("model", "prompts", "second")}, tmp_path / "out", run)


def _watched(rounds: list[Round], run: Any, window: int = 3) -> int | None:
    """Number of rounds after which the watch stops."""
    watch = DivergenceWatch(window, run)
    for number, one in enumerate(rounds):
        try:
            watch.look(number, *one)
        except EndOfTraining:
            return number + 1
    return None


def _gamed(rounds: int) -> NDArray[np.float64]:
    """A judge's true score as Gao et al. 2022 fit it: d (1 - log d / 2) with d = sqrt(KL) growing up to 15."""
    distance = 15 * np.sqrt(np.arange(1, rounds + 1) / rounds)
    return distance * (1 - np.log(distance) / 2)


def test_a_training_ends_where_the_judge_falls_beyond_chance_while_the_reward_rises() -> None:
    told: list[Any] = []
    run: Any = SimpleNamespace(event=lambda *words, **keys: told.append(keys))
    scores = (_gamed(90) + np.random.default_rng(8).normal(0, 0.2, 90)).tolist()
    reward = [0.1 * number for number in range(90)]
    stopped = _watched([Round(*one, 0.2) for one in zip(reward, scores, strict=True)], run)
    assert stopped is not None and stopped % 3 == 0 and stopped <= 45
    assert told == [{"round": stopped, "best_round": told[0]["best_round"]}] and told[0]["best_round"] <= 12
    noisy = [Round(*one, 5.0) for one in zip(reward, scores, strict=True)]
    assert _watched(noisy, run) is None, "by chance"
    lost = [Round(-one, judge, 0.2) for one, judge in zip(reward, scores, strict=True)]
    assert _watched(lost, run) is None, "the reward fell too: nothing is gamed"
    rising = [Round(one, one, 0.05) for one in reward]
    assert _watched(rising, run) is None


@pytest.mark.parametrize("window", [5, 20])
@pytest.mark.parametrize(("scale", "correlation"), [(1.0, 0.3), (2.0, 0.6)])
def test_trainings_whose_true_score_never_falls_are_not_stopped(window: int, scale: float, correlation: float) -> None:
    """At most 5 % of trainings of 500 rounds: of 40, six and more are stopped with a probability of at most 1.4 %."""
    run: Any = SimpleNamespace(event=lambda *words, **keys: None)
    random = np.random.default_rng([20261127, window])
    noise = lfilter([1.0], [1.0, -correlation], random.normal(0, math.sqrt(1 - correlation**2), (40, 550)))[:, 50:]
    for true_score in (np.zeros(500), -np.expm1(-np.arange(500) / 50)):
        stopped = 0
        for scores in true_score + 0.2 * scale * noise:
            rounds = [Round(float(number), score, 0.2) for number, score in enumerate(scores.tolist())]
            stopped += _watched(rounds, run, window) is not None
        assert stopped <= 5


def test_a_policy_that_games_its_reward_model_is_stopped(inputs: dict[str, Path], tmp_path: Path, journal: Any) -> None:
    """The judge is the reward model with the other sign: what one gains the other loses."""
    # In bf16, which only some processors have, the same settings are not stopped within these rounds.
    run = Run(tmp_path / "work", LaunchConfig(device="cpu", threads=1, precision="fp32"), journal=journal)
    judge = tmp_path / "judge"
    judge.mkdir()
    for path in inputs["reward_model"].iterdir():
        (judge / path.name).write_bytes(path.read_bytes())
    tensors = load_file(judge / "model.safetensors")
    save_file(tensors | {"score.weight": -tensors["score.weight"]}, judge / "model.safetensors", {"format": "pt"})
    mine = {name: inputs[name] for name in ("model", "prompts", "reward_model")}
    settings = {**RLHF, "rollouts": 40, "rollout_prompts": 32, "answers_per_prompt": 4, "kl_coef": 0.0}
    settings |= {"optimizer": {"learning_rate": 3.0e-3, "weight_decay": 0.0}, "stop_on_divergence": 2}
    config = RlhfConfig.model_validate(settings)
    with pytest.raises(StageError, match=r"rlhf\.stop_on_divergence.*expected the inputs reward_model and judge"):
        rlhf(config, mine, tmp_path / "none", run)
    result = rlhf(config, mine | {"judge": judge}, tmp_path / "out", run)
    assert result.figures["stopped_early"] == 1 and result.figures["batches"] < 160
    assert "STOPPED after" in result.headline and any("the judge's score is" in said for said in journal.events())
