"""Rewards, advantages and losses of PPO, RLOO, GRPO's family, REINFORCE++ and RAFT by themselves; best of n; a bandit
that each solves."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from infra.errors import StageError
from infra.launch.config import LaunchConfig
from tasks.processes.environment import stage_environment
from training.chat.base import Chat
from training.config import RlhfConfig
from training.core.hardware import Hardware
from training.generation.completions import Completions
from training.rl.algorithms import CLIPPED, algorithm_of
from training.rl.algorithms.base import Sampled
from training.rl.algorithms.grpo import group_advantages
from training.rl.best_of import best_of, best_of_figures, counts, kl_of_best
from training.rl.ensemble import Ensemble
from training.rl.reward_functions import Answered, call, reward_function
from training.rl.rewards import Prompt, Rewards, RewardScale
from training.rl.round import equal_groups, minibatches
from training.train_modules.kl import kl_k3
from training.train_modules.preference_losses import dpo, ipo, kto, kto_kl, orpo

RANDOM = np.random.default_rng(11)


def lengths(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    """A reward function, which the tests name by its import path."""
    return [float(len(answer)) for answer in answers]


def broken(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    raise KeyError("no such unit test")


def unknown(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    return [math.nan for _ in answers]


def too_few(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    return [1.0]


def exits(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    sys.exit(0)


def nothing(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> None:
    return None


def one_for_all(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> Any:
    return torch.tensor(0.5)


async def coroutine(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    return [1.0 for _ in answers]


def by_answer(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> dict[str, float]:
    return dict.fromkeys(answers, 1.0)


def texts(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[str]:
    return ["1.0" for _ in answers]


def broken_later(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> Iterator[float]:
    yield 1.0
    raise TypeError("no such answer")


def abstains(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float | None]:
    """From answers to some prompts."""
    return [2.0 if prompt == "Why?" else None for prompt in prompts]


HERE = "tests.training.rl.test_algorithms"
ANSWERED = [Answered("Why?", "No.", "Yes."), Answered("How?", "Well.", "")]


def test_a_reward_function_is_called_by_its_import_path() -> None:
    path = f"{HERE}:lengths"
    assert call(path, reward_function(path), ANSWERED) == [3.0, 5.0]


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("broken", "reward_function_failed", "it raised KeyError: 'no such unit test'"),
        ("unknown", "reward_not_finite", "it gave nan for the answer 'No.'"),
        ("too_few", "reward_function_failed", "a reward for each of 2 answers, it gave 1"),
        ("exits", "reward_function_failed", "it raised SystemExit: 0"),
        ("broken_later", "reward_function_failed", "it raised TypeError: no such answer"),
        ("nothing", "reward_function_failed", "a list with a reward for each of 2 answers, it returned None"),
        ("one_for_all", "reward_function_failed", "it returned tensor(0.5000)"),
        ("coroutine", "reward_function_failed", "it returned <coroutine object coroutine at"),
        ("by_answer", "reward_function_failed", "it returned {'No.': 1.0, 'Well.': 1.0}"),
        ("texts", "reward_not_finite", "a finite number or None, it gave '1.0' for the answer 'No.'"),
    ],
)
@pytest.mark.filterwarnings("error")  # of a coroutine that was never awaited
def test_a_reward_function_that_fails_is_a_named_stop(name: str, code: str, said: str) -> None:
    path = f"{HERE}:{name}"
    with pytest.raises(StageError) as caught:
        call(path, reward_function(path), ANSWERED)
    (problem,) = caught.value.problems
    assert problem.code == code and problem.path == f"rlhf.reward_functions.{path}" and said in problem.message


def test_check_finds_functions_where_their_stage_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the working directory or on the path of this process alone; by a relative PYTHONPATH, which a stage reads
    from elsewhere."""
    (tmp_path / "rewards_here.py").write_text("def short(prompts, answers, references): return [1.0 for _ in answers]")
    monkeypatch.chdir(tmp_path)
    config = RlhfConfig(reward_functions={"rewards_here:short": 1.0})

    def is_found_in_its_stage() -> bool:
        program = [sys.executable, "-P", "-c", "import rewards_here"]
        environment = stage_environment(LaunchConfig(), keeps_memory=False)
        return subprocess.run(program, cwd="/", env=environment, capture_output=True).returncode == 0

    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "No module named 'rewards_here'" in next(config.missing_functions()).message
    assert not is_found_in_its_stage()
    monkeypatch.setenv("PYTHONPATH", ".")
    assert not list(config.missing_functions()) and is_found_in_its_stage()


@pytest.mark.parametrize(
    "rewards",
    [
        np.array([0.5, 1.0], np.float32),
        np.array([0.5, 1.0], np.float16)[:, None],
        torch.tensor([0.5, 1.0], dtype=torch.bfloat16),
        [torch.tensor(0.5), np.int64(1)],
        (value for value in (0.5, np.True_)),
        (0.5, True),
    ],
    ids=["float32", "a column", "bfloat16", "scalars", "generator", "tuple"],
)
def test_rewards_are_numbers_of_python_numpy_and_torch(rewards: Any) -> None:
    """Those of numpy's float32, int64 and bool and of torch were refused as no numbers."""
    assert call("rewards:f", lambda *_: rewards, ANSWERED) == [0.5, 1.0]


@pytest.mark.parametrize("value", [10**400, 1j, np.zeros(2), torch.tensor(math.inf), b"1"])
def test_other_values_are_no_rewards(value: Any) -> None:
    with pytest.raises(StageError, match="expected a finite number or None"):
        call("rewards:f", lambda *_: [1.0, value], ANSWERED)


def test_a_function_that_abstains_is_left_out_for_that_answer(tokenizer_dir: Path) -> None:
    """As in trl, which sums the rewards that are not None."""
    config = RlhfConfig(
        algorithm="rloo",
        answers_per_prompt=2,
        reward_functions={f"{HERE}:abstains": 1.0, f"{HERE}:lengths": 0.5},
        unfinished_penalty=0.0,
    )
    chat = Chat.load(tokenizer_dir)
    answers = Completions([[], []], chat.encode(["No.", "Well."]), torch.tensor([True, True]))
    rewards = Rewards(Ensemble({}, config), RewardScale(0.0), chat, config, Hardware(torch.device("cpu"), bf16=False))
    rewarded = rewards.of(answers, [Prompt(asked, [], "", None) for asked in ("Why?", "How?")])
    assert rewarded.scores.tolist() == [2.0 + 1.5, 2.5]
    assert rewarded.metrics[f"rlhf/function/{HERE}:abstains"] == 2.0
    assert rewarded.metrics[f"rlhf/abstained/{HERE}:abstains"] == 0.5
    assert f"rlhf/abstained/{HERE}:lengths" not in rewarded.metrics


@pytest.mark.parametrize("path", ["no_such_module:f", f"{HERE}:nobody", f"{HERE}:RANDOM"])
def test_a_reward_function_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(StageError, match=r"rlhf\.reward_functions\..*expected a function"):
        reward_function(path)


def test_the_file_of_a_reward_function_is_part_of_what_names_the_model() -> None:
    config = RlhfConfig(reward_functions={f"{HERE}:lengths": 1.0})
    (source,) = config.sources()
    assert source.paths == (Path(sys.modules[__name__].__file__ or ""),)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": "ppo", "answers_per_prompt": 2}, "answers_per_prompt: 1 for algorithm ppo"),
        ({"algorithm": "grpo"}, "answers_per_prompt: at least 2 for algorithm grpo"),
        ({"algorithm": "raft"}, "answers_per_prompt: at least 2 for algorithm raft"),
        ({"algorithm": "raft", "answers_per_prompt": 16}, "minibatch_answers to divide the 32 answers of a round"),
        ({"reward_functions": {"os.getcwd()": 1.0}}, "expected package.module:name"),
        ({"scale_rewards": "none"}, "scale_rewards: expected group for algorithm ppo"),
        ({"loss_mean": "token", "answers_per_prompt": 2}, "loss_mean: expected answer for algorithm rloo"),
        ({"ratio": "sequence", "answers_per_prompt": 2}, "ratio: expected token for algorithm rloo"),
        ({"loss_form": "cispo"}, "loss_form: expected clip for algorithm ppo"),
        ({"overlong_tokens": 64}, "overlong_tokens: expected fewer than the 64 of answer_max_tokens"),
        ({"overlong_penalty": 2.0}, "overlong_penalty: expected overlong_tokens together with it"),
        ({"refill_groups": 1}, "refill_groups: expected 0: ppo has no groups"),
        ({"refill_groups": 1, "algorithm": "reinforce++"}, "refill_groups: expected answers_per_prompt of at least 2"),
        ({"unfinished_reward": -1.0, "unfinished_penalty": 2.0}, "unfinished_penalty: expected none together with"),
        ({"whole_groups": True}, "whole_groups: expected false"),
        ({"whole_groups": True, "answers_per_prompt": 128}, "128 does not divide 64"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said.replace("(", r"\(")):
        RlhfConfig.model_validate(settings)


def test_a_long_answer_loses_what_dapo_s_and_trl_s_equation_says(tokenizer_dir: Path) -> None:
    from trl.rewards import get_soft_overlong_punishment

    chat = Chat.load(tokenizer_dir)
    settings: dict[str, Any] = {"answer_max_tokens": 12, "overlong_tokens": 5, "overlong_penalty": 0.5}
    config = RlhfConfig(**settings, reward_functions={f"{HERE}:abstains": 1.0}, unfinished_penalty=0.0)
    answers = Completions([[1]] * 12, [[7] * length for length in range(1, 13)], torch.ones(12).bool())
    rewards = Rewards(Ensemble({}, config), RewardScale(0.0), chat, config, Hardware(torch.device("cpu"), bf16=False))
    scores = rewards.of(answers, [Prompt("", [1], "", None)] * 12).scores
    expected = get_soft_overlong_punishment(12, 5)(answers.ids)
    assert scores.tolist() == pytest.approx([0.5 * value for value in expected]) and min(expected) == -1


def test_groups_of_equal_rewards_are_found_and_their_answers_replaced() -> None:
    scores = torch.tensor([1.0, 1.0, 0.5, 1.0, -1.0, -1.0])
    assert equal_groups(scores, 2).tolist() == [0, 2] and equal_groups(scores, 3).tolist() == []
    answers = Completions([[number] for number in range(4)], [[0], [1], [2], [3]], torch.ones(4).bool())
    others = Completions([[8], [9]], [[18], [19]], torch.tensor([True, False]))
    replaced = answers.replaced([2, 3], others)
    assert replaced.prompts == [[0], [1], [8], [9]] and replaced.ids == [[0], [1], [18], [19]]
    assert replaced.finished.tolist() == [True, True, True, False] and answers.finished.all()


def test_without_a_name_the_algorithm_follows_from_the_answers_to_a_prompt() -> None:
    assert [RlhfConfig(answers_per_prompt=n).chosen_algorithm for n in (1, 2)] == ["ppo", "rloo"]


def test_answers_are_dealt_to_minibatches_once_each_and_where_it_is_asked_for_with_their_whole_group() -> None:
    settings: dict[str, Any] = {"answers_per_prompt": 4, "rollout_prompts": 32, "minibatch_answers": 8}
    dealt, together = (
        minibatches(RlhfConfig(**settings, whole_groups=whole), np.random.default_rng(1)) for whole in (False, True)
    )
    for parts in (dealt, together):
        assert [len(part) for part in parts] == [8] * 4 and sorted(np.concatenate(parts)) == list(range(32))
    assert dealt[0].tolist() == np.random.default_rng(1).permutation(32)[:8].tolist()
    assert all(len(set(part // 4)) == 2 for part in together)
    assert together[0].tolist() != list(range(8)) and any(len(set(part // 4)) > 2 for part in dealt)


def _sampled(**changes: Any) -> tuple[Sampled, dict[str, np.ndarray]]:
    mask = (np.arange(4) < np.array([4, 2, 1, 3, 4, 2])[:, None]).astype(float)
    numbers = {"scores": RANDOM.normal(size=6), "mask": mask}
    numbers |= {name: RANDOM.normal(size=(6, 4)) for name in ("logprobs", "reference", "now")}
    tensors = {name: torch.from_numpy(numbers[name]) for name in ("scores", "logprobs", "reference", "mask")}
    return Sampled(**{**tensors, "values": None, "kl_coef": 0.3, **changes}), numbers


def test_grpo_is_deepseekmath_s_equations_in_numpy() -> None:
    sampled, numbers = _sampled()
    algorithm = algorithm_of(RlhfConfig(algorithm="grpo", answers_per_prompt=3, rollout_prompts=6, minibatch_answers=6))
    learnt = algorithm.learn(sampled)
    groups = numbers["scores"].reshape(2, 3)
    expected = ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-4)).ravel()
    np.testing.assert_allclose(group_advantages(sampled.scores, 3), expected)
    batch = {**learnt, "mask": sampled.mask, "logprobs": sampled.logprobs}
    losses = algorithm.loss(torch.from_numpy(numbers["now"]), None, batch)
    ratio = np.exp(numbers["now"] - numbers["logprobs"])
    surrogate = np.minimum(ratio * expected[:, None], np.clip(ratio, 0.8, 1.2) * expected[:, None])
    difference = numbers["reference"] - numbers["now"]
    penalty = np.exp(difference) - difference - 1
    each = ((-surrogate + 0.3 * penalty) * numbers["mask"]).sum(1) / numbers["mask"].sum(1)
    assert float(losses["total"]) == pytest.approx(each.mean())
    assert algorithm.weight(batch) == 6
    assert float(group_advantages(torch.ones(4), 4).abs().max()) == 0, "answers of one reward teach nothing"
    assert float(kl_k3(torch.zeros(1), torch.zeros(1))) == 0


@pytest.mark.parametrize("mean", ["answer", "token"])
def test_grpo_s_loss_is_that_of_its_parts_by_their_weight(mean: str) -> None:
    """Parts of other sizes and lengths, as microbatches and ranks have them, against the mean in numpy."""
    settings = {"algorithm": "grpo", "answers_per_prompt": 3, "rollout_prompts": 6, "minibatch_answers": 6}
    algorithm = algorithm_of(RlhfConfig.model_validate(settings | {"loss_mean": mean}))
    sampled, numbers = _sampled()
    learnt = algorithm.learn(sampled)
    batch = {**learnt, "mask": sampled.mask, "logprobs": sampled.logprobs}

    def gradient(pieces: list[slice]) -> tuple[float, np.ndarray]:
        now = torch.from_numpy(numbers["now"]).requires_grad_()
        parts = [{name: value[piece] for name, value in batch.items()} for piece in pieces]
        weights = [algorithm.weight(part) for part in parts]
        each = [algorithm.loss(now[piece], None, part)["total"] for piece, part in zip(pieces, parts, strict=True)]
        total = sum(weight * loss for weight, loss in zip(weights, each, strict=True)) / sum(weights)
        assert isinstance(total, torch.Tensor)
        total.backward()
        assert now.grad is not None
        return float(total), now.grad.numpy()

    loss, whole = gradient([slice(0, 6)])
    parted_loss, parted = gradient([slice(0, 1), slice(1, 4), slice(4, 6)])
    np.testing.assert_allclose(parted, whole)
    mask, advantages = numbers["mask"], learnt["advantages"].numpy()
    ratio = np.exp(numbers["now"] - numbers["logprobs"])
    difference = numbers["reference"] - numbers["now"]
    each = 0.3 * (np.exp(difference) - difference - 1)
    each = (each - np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)) * mask
    expected = each.sum() / mask.sum() if mean == "token" else (each.sum(1) / mask.sum(1)).mean()
    assert loss == pytest.approx(expected) and parted_loss == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "paper"),
    [
        ({"scale_rewards": "none", "loss_mean": "constant"}, "Dr. GRPO"),
        ({"clip_ratio_high": 0.28, "loss_mean": "token"}, "DAPO"),
        ({"ratio": "sequence", "clip_ratio": 0.03, "clip_ratio_high": 0.04}, "GSPO"),
        ({"loss_form": "cispo", "clip_ratio_high": 0.3, "loss_mean": "token"}, "CISPO"),
    ],
)
def test_grpo_s_family_is_that_of_its_papers_in_numpy(settings: dict[str, Any], paper: str) -> None:
    """Losses and gradients; gradients by the derivative of each paper's loss, written out."""
    common = {"algorithm": "grpo", "answers_per_prompt": 3, "rollout_prompts": 6, "minibatch_answers": 6}
    algorithm = algorithm_of(RlhfConfig.model_validate({**common, **settings, "answer_max_tokens": 9}))
    sampled, numbers = _sampled()
    batch = {**algorithm.learn(sampled), "mask": sampled.mask, "logprobs": sampled.logprobs}
    now = torch.from_numpy(numbers["now"]).requires_grad_()
    losses = algorithm.loss(now, None, batch)
    losses["policy"].backward()
    groups, mask = numbers["scores"].reshape(2, 3), numbers["mask"]
    above = groups - groups.mean(1, keepdims=True)
    spread = 1.0 if paper == "Dr. GRPO" else groups.std(1, ddof=1, keepdims=True) + 1e-4
    advantages = (above / spread).reshape(6, 1) * mask
    log_ratio, lengths = numbers["now"] - numbers["logprobs"], mask.sum(1, keepdims=True)
    ratio = np.exp((log_ratio * mask).sum(1, keepdims=True) / lengths) if paper == "GSPO" else np.exp(log_ratio)
    ratio = ratio * np.ones_like(mask)
    low, high = {"Dr. GRPO": (0.8, 1.2), "DAPO": (0.8, 1.28), "GSPO": (0.97, 1.04), "CISPO": (0.0, 1.3)}[paper]
    if paper == "CISPO":
        weight = np.minimum(ratio, high) * advantages
        each, slope = -weight * numbers["now"], -weight
    else:
        each = -np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages)
        slope = -ratio * advantages * (ratio * advantages <= np.clip(ratio, low, high) * advantages)
    each, slope = each * mask, slope * mask
    match paper:
        case "Dr. GRPO":
            expected, gradient = each.sum() / (6 * 9), slope / (6 * 9)
        case "GSPO":  # the same at each token of an answer: its mean by answer, and its slope at each of them
            expected, gradient = each.sum(1).dot(1 / lengths[:, 0]) / 6, slope / lengths / 6
        case _:
            expected, gradient = each.sum() / mask.sum(), slope / mask.sum()
    assert float(losses["policy"].detach()) == pytest.approx(expected)
    assert now.grad is not None and np.abs(gradient).max() > 1e-3
    np.testing.assert_allclose(now.grad.numpy(), gradient, atol=1e-12)
    clipped = ((ratio < low) | (ratio > high)) * mask
    assert float(losses[CLIPPED]) == pytest.approx(clipped.sum() / mask.sum())


@pytest.mark.parametrize("group", [1, 3])
def test_reinforce_is_hu_s_equations_in_numpy(group: int) -> None:
    """Of each token the rewards from it on, less the mean reward of the prompt's answers where there are several."""
    settings = {"algorithm": "reinforce++", "answers_per_prompt": group, "rollout_prompts": 6, "minibatch_answers": 6}
    algorithm = algorithm_of(RlhfConfig.model_validate(settings))
    sampled, numbers = _sampled()
    mask = numbers["mask"].astype(bool)
    returns = np.zeros((6, 4))
    for row, length in enumerate(mask.sum(1)):
        for token in range(length):
            later = slice(token, length)
            penalty = (numbers["logprobs"][row, later] - numbers["reference"][row, later]).sum()
            returns[row, token] = numbers["scores"][row] - 0.3 * penalty
    if group > 1:
        returns -= np.repeat(returns[:, 0].reshape(-1, group).mean(1), group)[:, None]
    expected = (returns - returns[mask].mean()) / np.sqrt(returns[mask].var() + 1e-8) * mask
    np.testing.assert_allclose(algorithm.learn(sampled)["advantages"].numpy(), expected)


def test_an_answer_without_an_end_loses_the_penalty_or_has_a_reward_of_its_config(tokenizer_dir: Path) -> None:
    chat, function = Chat.load(tokenizer_dir), f"{HERE}:lengths"
    ends = [[7, 8, chat.end], [7, 8, 9], [7, *chat.stops - {chat.end}]]
    answers = Completions([[1]] * 3, ends, torch.tensor([ids[-1] == chat.end for ids in ends]))
    prompts = [Prompt("", [1], "", None)] * 3

    def scores(**settings: Any) -> list[float]:
        config = RlhfConfig(reward_functions={function: 1.0}, **settings)
        ensemble = Ensemble({}, config)
        rewards = Rewards(ensemble, RewardScale(0.0), chat, config, Hardware(torch.device("cpu"), bf16=False))
        return rewards.of(answers, prompts).scores.tolist()

    plain = scores(unfinished_penalty=0.0)
    assert scores() == [plain[0], plain[1] - 1, plain[2] - 1]
    assert scores(unfinished_reward=-0.5) == [plain[0], -0.5, -0.5]
    assert scores(unfinished_reward=0.0) == [plain[0], 0.0, 0.0]


def test_raft_keeps_the_answer_of_the_highest_reward_less_its_kl_penalty_of_each_prompt() -> None:
    """By numpy; equal ones: the first."""
    for kl_coef in (0.0, 5.0):
        sampled, numbers = _sampled(kl_coef=kl_coef)
        settings = {"algorithm": "raft", "answers_per_prompt": 3, "rollout_prompts": 6, "minibatch_answers": 2}
        algorithm = algorithm_of(RlhfConfig.model_validate(settings))
        penalty = ((numbers["logprobs"] - numbers["reference"]) * numbers["mask"]).sum(1)
        best = (numbers["scores"] - kl_coef * penalty).reshape(2, 3).argmax(1)
        assert algorithm.kept(sampled).tolist() == [best[0], 3 + best[1]]
        even, _ = _sampled(scores=torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 2.0]).double(), kl_coef=0.0)
        assert algorithm.kept(even).tolist() == [1, 3]


def test_the_best_of_n_is_the_mean_over_all_draws_of_n() -> None:
    scores, by = RANDOM.normal(size=(3, 5)), RANDOM.normal(size=(3, 5))
    for n in (1, 2, 5):
        draws = list(itertools.combinations(range(5), n))
        wanted = [np.mean([row[max(draw, key=judged.__getitem__)] for draw in draws])
                  for row, judged in zip(scores, by, strict=True)]  # fmt: skip
        np.testing.assert_allclose(best_of(scores, by, n), wanted)
    right = np.array([[1.0, 0.0, 0.0, 1.0]])
    assert best_of(right, right, 2)[0] == pytest.approx(1 - 1 / 6), "all but the draw of the two wrong ones"
    assert best_of(np.array([[1.0, 5.0]]), np.zeros((1, 2)), 2)[0] == 3.0, "equally good: neither is the best"


def test_the_best_of_n_is_told_over_its_kl_divergence() -> None:
    assert counts(1) == [1] and counts(6) == [1, 2, 4, 6] and counts(16) == [1, 2, 4, 8, 16]
    assert kl_of_best(1) == 0 and kl_of_best(16) == pytest.approx(math.log(16) - 15 / 16)
    scores = RANDOM.normal(size=(400, 16))
    figures = best_of_figures(scores, {"reward": scores}, 16, np.arange(400))
    # The expected largest of 2, 4, 8 and 16 normal numbers (Harter 1961, table 1).
    for n, expected in ((2, 0.5642), (4, 1.0294), (8, 1.4236), (16, 1.7660)):
        assert figures[f"best_of_{n}_reward_low"] < expected < figures[f"best_of_{n}_reward_high"]
    # By the definition of KL: of the best of n of many answers that are equally likely, from one of them.
    place = (np.arange(20_000) + 0.5) / 20_000
    density = 4 * place**3
    assert kl_of_best(4) == pytest.approx(float((density * np.log(density)).mean()), abs=1e-3)


ARMS, BEST, STEPS = 5, 3, 150
PAYS = torch.tensor([0.1, 0.4, 0.2, 0.9, 0.3])


class Bandit(nn.Module):
    """One prompt, answers of one token: a row of logits, and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.logits, self.value = nn.Parameter(torch.zeros(ARMS)), nn.Parameter(torch.zeros(()))

    def logprobs(self, arms: torch.Tensor) -> torch.Tensor:
        return self.logits.log_softmax(-1)[arms]


def optimum(kl_coef: float) -> torch.Tensor:
    """The policy of the greatest reward less its KL penalty from a uniform one (Rafailov et al. 2023, equation 4)."""
    return (PAYS / kl_coef).softmax(-1)


DR_GRPO: dict[str, Any] = {"scale_rewards": "none", "loss_mean": "constant", "answer_max_tokens": 2}
DAPO: dict[str, Any] = {"clip_ratio_high": 0.28, "loss_mean": "token"}
GSPO: dict[str, Any] = {"ratio": "sequence", "clip_ratio": 3e-4, "clip_ratio_high": 4e-4}
CISPO: dict[str, Any] = {"loss_form": "cispo", "clip_ratio_high": 0.3, "loss_mean": "token"}


@pytest.mark.parametrize(
    ("name", "group", "keys"),
    [
        ("ppo", 1, {}),
        ("rloo", 8, {}),
        ("grpo", 8, {}),
        ("raft", 8, {}),
        pytest.param("grpo", 8, DR_GRPO, id="Dr. GRPO"),
        pytest.param("grpo", 8, DAPO, id="DAPO"),
        pytest.param("grpo", 8, GSPO, id="GSPO"),
        pytest.param("grpo", 8, CISPO, id="CISPO"),
        ("reinforce++", 1, {}),
        ("reinforce++", 8, {}),
    ],
)
def test_a_bandit_s_best_arm_is_found_by_sampling(name: str, group: int, keys: dict[str, Any]) -> None:
    """With a KL penalty all end at the known optimum but GRPO, which scales rewards, so that its own lies elsewhere.
    Dr. GRPO does not scale them."""
    generator, kl_coef = torch.Generator().manual_seed(3), 0.3
    settings = {"algorithm": name, "answers_per_prompt": group, "rollout_prompts": 64, "minibatch_answers": 8, **keys}
    algorithm = algorithm_of(RlhfConfig.model_validate(settings | {"value_coef": 1.0, "clip_value": 10.0}))
    bandit = Bandit()
    optimizer, mask = torch.optim.Adam(bandit.parameters(), lr=0.05), torch.ones(64, 1)
    reference = torch.full((64, 1), -math.log(ARMS))
    for _ in range(STEPS):
        with torch.no_grad():
            arms = torch.multinomial(bandit.logits.softmax(-1), 64, replacement=True, generator=generator)
            old, values = bandit.logprobs(arms)[:, None], bandit.value.expand(64, 1)
        sampled = Sampled(PAYS[arms], old, reference, mask, values if algorithm.has_values else None, kl_coef)
        kept = algorithm.kept(sampled)
        batch = {name: column[kept] for name, column in algorithm.learn(sampled).items()}
        batch |= {"mask": mask[kept], "logprobs": old[kept]}
        optimizer.zero_grad()
        now = bandit.logprobs(arms[kept])[:, None], bandit.value.expand(len(kept), 1)
        algorithm.loss(*now, batch)["total"].backward()
        optimizer.step()
    found = bandit.logits.detach().softmax(-1)
    assert int(found.argmax()) == BEST
    if name != "grpo" or keys.get("scale_rewards") == "none":
        torch.testing.assert_close(found, optimum(kl_coef), atol=0.12, rtol=0)


@pytest.mark.parametrize("name", ["dpo", "ipo", "kto", "orpo"])
def test_a_bandit_s_best_arm_is_found_from_pairs(name: str) -> None:
    """Pairs whose labels follow Bradley and Terry by the arms' pay: DPO ends at the known optimum (Rafailov et al.
    2023, theorem 1), the others at its best arm."""
    generator, beta = torch.Generator().manual_seed(4), 0.3
    first, second = torch.randint(ARMS, (2, 4000), generator=generator)
    wins = torch.rand(4000, generator=generator) < torch.sigmoid(PAYS[first] - PAYS[second])
    kept = first != second
    chosen, rejected = (torch.where(wins, *pair)[kept] for pair in ((first, second), (second, first)))
    bandit = Bandit()
    optimizer, reference = torch.optim.Adam(bandit.parameters(), lr=0.05), -math.log(ARMS)
    for _ in range(STEPS):
        good, bad = (bandit.logprobs(arms) for arms in (chosen, rejected))
        rise = good - reference, bad - reference
        match name:
            case "dpo":
                loss = dpo(*rise, beta)
            case "ipo":
                loss = ipo(*rise, beta)
            case "kto":
                loss = kto(*rise, kto_kl((rise[0].roll(1) + rise[1].roll(1)).detach() / 2), beta, 1.0, 1.0)
            case _:
                loss = orpo(good, bad, beta)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    found = bandit.logits.detach().softmax(-1)
    assert int(found.argmax()) == BEST
    if name == "dpo":
        torch.testing.assert_close(found, optimum(beta), atol=0.05, rtol=0)
