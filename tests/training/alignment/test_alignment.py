"""SFT, reward model and PPO on a model of two layers: each does what it is for, and says how well."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from infra.errors import Cancelled, StageError
from infra.launch.config import LaunchConfig
from infra.run import Run, open_journal
from tests.support.stopped import StoppedAt
from training.chat.base import Chat, pad
from training.config import PreferenceTuningConfig, RewardModelConfig, RlhfConfig, SftConfig
from training.core.hardware import prepare
from training.core.train_state import split_batch
from training.data.open_shards import OpenShards
from training.generation.completions import Completions, scores_of
from training.generation.session import answer
from training.guard.norms import GradientClip
from training.model.loss import IGNORE
from training.model.models import load
from training.objectives.causal import next_token_batch
from training.preference_tuning import preference_tuning
from training.reward_model import reward_model
from training.rl.algorithms import algorithm_of
from training.rl.ensemble import Ensemble
from training.rl.prompts import Prompt
from training.rl.rewards import Rewards, RewardScale
from training.rl.round import Rollouts
from training.rl.round_times import RoundTimes
from training.rl.verify import Rule
from training.rlhf import rlhf
from training.sft import sft
from training.train_modules.language_model import LanguageModel
from training.train_modules.mixed_text import TextBeside, TextExample, loss_of_text
from training.train_modules.scorer import load_scorer
from training.trainer.profiling import SUMMARY, TABLE, TRACE

FAST = {"learning_rate": 3.0e-3, "weight_decay": 0.0}
PROFILED = LaunchConfig(profile=2)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, base_dir: Path, instructions_dir: Path) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("sft")
    config = SftConfig.model_validate(
        {
            "duration": "80 epochs",
            "global_batch_examples": 8,
            "max_length": 64,
            "answer_max_tokens": 24,
            "optimizer": FAST,
        }
    )
    inputs = {"model": base_dir, "instructions": instructions_dir}
    return folder, sft(config, inputs, folder, Run(folder / "work", PROFILED))


def test_a_tuned_model_goes_part_of_the_way_back_to_its_start(
    base_dir: Path, instructions_dir: Path, tmp_path: Path
) -> None:
    inputs, found, losses = {"model": base_dir, "instructions": instructions_dir}, {}, {}
    for share in (0.0, 0.25):
        settings = {
            "duration": "6 batches", "global_batch_examples": 8, "max_length": 64, "answer_max_tokens": 4,
            "optimizer": FAST, "start_share": share, "watched_prompts": 0,
        }  # fmt: skip
        out = tmp_path / str(share)
        figures = sft(
            SftConfig.model_validate(settings), inputs, out, Run(tmp_path / f"{share}.work", LaunchConfig())
        ).figures
        found[share], losses[share] = load_file(out / "model.safetensors"), figures["heldout_loss_sft"]
    start, learnt = load_file(base_dir / "model.safetensors"), found[0.0]
    moved = [name for name in learnt if not torch.equal(learnt[name], start[name])]
    assert moved and found[0.25].keys() == learnt.keys()
    for name in moved:
        torch.testing.assert_close(found[0.25][name], 0.75 * learnt[name] + 0.25 * start[name], rtol=1e-5, atol=1e-6)
    assert losses[0.25] != losses[0.0], "what is measured is what is exported"


@pytest.fixture(scope="module")
def rewarding(
    tmp_path_factory: pytest.TempPathFactory, tuned: tuple[Path, Any], preferences_dir: Path
) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("reward")
    config = RewardModelConfig.model_validate(
        {"duration": "8 epochs", "global_batch_pairs": 8, "max_length": 64, "optimizer": FAST}
    )
    inputs = {"model": tuned[0], "preferences": preferences_dir}
    return folder, reward_model(config, inputs, folder, Run(folder / "work", PROFILED))


def test_sft_lowers_held_out_loss_and_ends_its_answers(tuned: tuple[Path, Any]) -> None:
    folder, result = tuned
    figures = result.figures
    assert 0 < figures["improvement_low"] < figures["improvement"] < figures["improvement_high"]
    assert figures["improvement"] == pytest.approx(figures["heldout_loss_base"] - figures["heldout_loss_sft"])
    assert figures["improvement_text_low"] > 0
    assert figures["ends_share_sft"] > 0.8 > 0.3 > figures["ends_share_base"]
    lines = _lines(folder / "aux" / "samples.jsonl")
    assert len(lines) == 8
    assert lines[0].keys() == {"prompt", "reference", "answers"}
    assert lines[0]["answers"].keys() == {"base", "sft"}
    watched = _lines(folder / "aux" / "training_samples.jsonl")
    last = result.figures["batches"]
    assert [line["batch"] for line in watched[::3]] == [0, round(0.1 * last), round(0.3 * last), last]
    assert [line["prompt"] for line in watched] == [line["prompt"] for line in lines[:3]] * 4
    for name, at in (("base", watched[:3]), ("sft", watched[-3:])):
        assert [line["text"] for line in at] == [line["answers"][name] for line in lines[:3]]
    assert watched[0]["loss"] > watched[3]["loss"] > watched[-3]["loss"]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 4]


def _loss_on_text(model_dir: Path, shards_dir: Path, work: Path) -> float:
    """Nats a token of the validation text."""
    with OpenShards(shards_dir, Run(work)) as shards:
        text = shards.read(shards.validation, range(shards.validation.sequences))
    model = LanguageModel(load(model_dir), prepare(LaunchConfig()))
    batch = next_token_batch(text.tokens, text.starts)
    return float(model.losses(batch).sum() / (batch["labels"] != IGNORE).sum())


def test_text_among_the_examples_is_learnt_beside_the_answers(
    base_dir: Path, instructions_dir: Path, shards_dir: Path, tmp_path: Path
) -> None:
    def loss_of_text(share: float) -> float:
        out = tmp_path / f"{share}"
        config = SftConfig.model_validate(
            {"duration": "30 batches", "global_batch_examples": 8, "max_length": 64, "optimizer": FAST}
            | {"answer_max_tokens": 8, "heldout_limit": 8, "answers_limit": 2, "text_share": share}
        )
        run = Run(tmp_path / f"work{share}")
        inputs = {"model": base_dir, "instructions": instructions_dir, **({"shards": shards_dir} if share else {})}
        result = sft(config, inputs, out, run)
        assert result.figures["heldout_loss_sft"] < 0.7 * result.figures["heldout_loss_base"]
        return _loss_on_text(out, shards_dir, tmp_path)

    assert loss_of_text(0.5) < loss_of_text(0.0) - 0.5


def test_the_reward_model_orders_held_out_pairs(rewarding: tuple[Path, Any], preferences_dir: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    folder, result = rewarding
    assert result.figures["heldout_accuracy"] == 1.0
    assert result.figures["heldout_accuracy_low"] > 0.5
    assert result.figures["p_value"] == pytest.approx(0.5**8)
    assert result.figures["margin_low"] > 0
    model = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
    assert model.config.num_labels == 1
    chat, row = Chat.load(folder), _lines(preferences_dir / "heldout.jsonl")[0]
    scores = []
    for key in ("chosen", "rejected"):
        (talk,) = chat.conversations([row["prompt"]], [row[key]])
        with torch.no_grad():
            scores.append(float(model(torch.tensor([talk.ids])).logits))
    assert scores[0] > scores[1]


RLHF = {
    "rollouts": 6,
    "rollout_prompts": 16,
    "minibatch_answers": 8,
    "epochs": 2,
    "answer_max_tokens": 16,
    "max_prompt_tokens": 40,
    "kl_coef": 0.02,
    "optimizer": {"learning_rate": 3.0e-4, "weight_decay": 0.0},
    "heldout_prompts": 8,
    "checkpoint_every": "8 batches",
}


@pytest.fixture
def prompts(tuned: tuple[Path, Any], rewarding: tuple[Path, Any], instructions_dir: Path) -> dict[str, Path]:
    return {"model": tuned[0], "reward_model": rewarding[0], "prompts": instructions_dir}


def test_every_tuning_leaves_the_profile_of_its_steps(
    tuned: tuple[Path, Any],
    rewarding: tuple[Path, Any],
    prompts: dict[str, Path],
    preferences_dir: Path,
    tmp_path: Path,
) -> None:
    rlhf(RlhfConfig.model_validate(RLHF | {"rollouts": 1}), prompts, tmp_path / "rlhf", Run(tmp_path / "r", PROFILED))
    settings = {"duration": "4 batches", "global_batch_pairs": 4, "max_length": 64, "answer_max_tokens": 4}
    settings |= {"heldout_prompts": 2, "evaluate_pairs": 2}
    pairs = {"model": tuned[0], "preferences": preferences_dir}
    config = PreferenceTuningConfig.model_validate(settings)
    preference_tuning(config, pairs, tmp_path / "dpo", Run(tmp_path / "d", PROFILED))
    for folder in (tuned[0], rewarding[0], tmp_path / "rlhf", tmp_path / "dpo"):
        events = json.loads(gzip.decompress((folder / "aux" / TRACE).read_bytes()))["traceEvents"]
        assert sum(event.get("name") == "Optimizer.step#AdamW.step" for event in events) == 2, folder.name
        found = json.loads((folder / "aux" / SUMMARY).read_text())
        names = [row["name"] for row in found["operators"]]
        assert found["steps"] == 2 and {"aten::mm", "aten::addmm"} & set(names) and found["memory"]
        assert names[0] in (folder / "aux" / TABLE).read_text()


@pytest.mark.parametrize("stage", ["sft", "reward_model"])
def test_looks_at_held_out_pairs_are_told_and_leave_the_weights_as_they_are(
    stage: str, base_dir: Path, instructions_dir: Path, preferences_dir: Path, tmp_path: Path, weights: Any
) -> None:
    inputs = {"model": base_dir, "instructions": instructions_dir, "preferences": preferences_dir}
    config = {"duration": "4 batches", "max_length": 64, "optimizer": FAST, "evaluate_pairs": 4}
    told, trained = [], []
    for every, watched in (("50 %", 2), ("4 batches", 0)):
        out = tmp_path / every.split()[0]
        out.mkdir()
        with open_journal(tmp_path / f"{out.name}.jsonl") as file:
            run = Run(out / "work", journal=file)
            if stage == "sft":
                sizes = {"global_batch_examples": 4, "answer_max_tokens": 4, "evaluate_every": every}
                sizes["watched_prompts"] = watched
                sft(SftConfig.model_validate(config | sizes), inputs, out, run)
            else:
                sizes = {"global_batch_pairs": 4, "evaluate_every": every}
                reward_model(RewardModelConfig.model_validate(config | sizes), inputs, out, run)
        lines = [line for line in _lines(tmp_path / f"{out.name}.jsonl") if line["kind"] == "metric"]
        told.append({line["step"]: line["values"] for line in lines if "validation/sample_loss" in line["values"]})
        trained.append(weights(out))
    assert list(told[0]) == [2, 4] and list(told[1]) == [4]
    assert told[0][4] == told[1][4] and told[0][2] != told[0][4]
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def test_ppo_moves_the_policy_towards_reward_and_says_how_far(
    prompts: dict[str, Path], tmp_path: Path, run: Run, journal: Any
) -> None:
    """The reward favours bananas here: the sign of the score layer is turned, so that there is something to gain."""
    turned = tmp_path / "turned"
    _turn(prompts["reward_model"], turned)
    config = RlhfConfig.model_validate(
        RLHF | {"rollouts": 20, "optimizer": {"learning_rate": 1.0e-3, "weight_decay": 0.0}}
    )
    result = rlhf(config, prompts | {"reward_model": turned}, tmp_path / "out", run)
    figures = result.figures
    rewards = journal.metric("rlhf/reward")
    assert sum(rewards[-5:]) > sum(rewards[:5])
    assert figures["reward_gain"] == pytest.approx(figures["heldout_reward_rlhf"] - figures["heldout_reward_sft"])
    assert figures["reward_gain"] > 0
    assert figures["reward_gain_equal_length_low"] <= figures["reward_gain_equal_length"]
    assert figures["reward_gain_equal_length"] == pytest.approx(
        figures["reward_gain"]
        - figures["reward_per_token"] * (figures["answer_tokens_rlhf"] - figures["answer_tokens_sft"])
    )
    assert figures["kl_to_sft"] > 0
    assert figures["kl_per_token"] == pytest.approx(figures["kl_to_sft"] / figures["answer_tokens_rlhf"], rel=1e-3)
    assert journal.metric("rlhf/kl")[0] == pytest.approx(0, abs=1e-3)
    assert len(journal.metric("rlhf/clip_share")) == 80
    for name in ("activation_norm", "grad_norm_policy", "grad_norm_value"):
        assert len(journal.metric(f"train/{name}")) == 80
    lines = _lines(tmp_path / "out" / "aux" / "samples.jsonl")
    assert lines[0]["answers"].keys() == lines[0]["rewards"].keys() == {"sft", "rlhf"}


def test_answers_to_one_prompt_are_held_against_each_other_without_a_value_function(
    prompts: dict[str, Path], tmp_path: Path, run: Run, journal: Any
) -> None:
    turned = tmp_path / "turned"
    _turn(prompts["reward_model"], turned)
    rate = {"learning_rate": 1.0e-3, "weight_decay": 0.0}
    settings = {"rollouts": 12, "answers_per_prompt": 4, "heldout_answers": 3, "optimizer": rate}
    config = RlhfConfig.model_validate(RLHF | settings)
    figures = rlhf(config, prompts | {"reward_model": turned}, tmp_path / "out", run).figures
    rewards = journal.metric("rlhf/reward")
    assert sum(rewards[-4:]) > sum(rewards[:4]) and figures["reward_gain"] > 0
    lines = _lines(tmp_path / "out" / "aux" / "samples.jsonl")
    shares = journal.metric("rlhf/generating_share")
    assert len(shares) == len(journal.metric("rlhf/generated_tokens_per_s")) == 12
    assert 0 < min(shares) <= figures["generating_share"] <= max(shares) < 1
    assert figures["heldout_prompts"] == len(lines) == 8 and len({line["prompt"] for line in lines}) == 8
    # Three answers to each prompt count, of which the file has the first.
    assert figures["heldout_reward_rlhf"] == pytest.approx(sum(line["rewards"]["rlhf"] for line in lines) / 8, abs=1.0)
    assert not journal.metric("rlhf/value_loss") and not journal.metric("train/grad_norm_value")
    with pytest.raises(ValueError, match="answers_per_prompt to divide rollout_prompts"):
        RlhfConfig.model_validate(RLHF | {"answers_per_prompt": 3})


def test_time_spent_generating_is_told_of_whole_rounds(run: Run, journal: Any) -> None:
    """Rounds of two batches; of the first this process saw the second batch alone."""
    now = iter([10.0, 10.5, 12.5, 15.0, 20.0, 21.0, 22.0, 23.0])
    times = RoundTimes(run, batches=2, clock=lambda: next(now))

    def batch_end(batch: int) -> None:
        times.batch_end(SimpleNamespace(clock=SimpleNamespace(batch=batch)))  # type: ignore[arg-type]

    batch_end(2)
    assert times.figures() == {}
    for step, tokens in ((2, 40), (4, 80)):
        times.begin()
        times.generate(lambda: Completions([[1]], [[7] * tokens], torch.ones(1)), step)  # noqa: B023
        batch_end(step + 1)
        batch_end(step + 2)
    assert journal.metric("rlhf/generated_tokens_per_s") == [20.0, 80.0]
    assert journal.metric("rlhf/generating_share") == [2 / 5, 1 / 3]
    assert times.figures() == {"generated_tokens_per_s": 40.0, "generating_share": 3 / 8}


def test_a_judge_scores_the_same_answers_and_leaves_the_training_as_it_is(
    prompts: dict[str, Path], tmp_path: Path, run: Run, journal: Any, weights: Any
) -> None:
    """The policy is trained against the turned score layer, whose every score the judge has with the other sign."""
    turned = tmp_path / "turned"
    _turn(prompts["reward_model"], turned)
    inputs = prompts | {"reward_model": turned}
    config = RlhfConfig.model_validate(RLHF | {"rollouts": 2})
    judged = rlhf(config, inputs | {"judge": prompts["reward_model"]}, tmp_path / "judged", run).figures
    alone = dict(rlhf(config, inputs, tmp_path / "alone", Run(tmp_path / "other", run.launch)).figures)
    ours, theirs = weights(tmp_path / "judged"), weights(tmp_path / "alone")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    judged_alone = {name: value for name, value in judged.items() if "judge" not in name}
    for clocked in ("generated_tokens_per_s", "generating_share"):
        assert judged_alone.pop(clocked) > 0 and alone.pop(clocked) > 0
    assert alone == judged_alone
    assert judged["judge_gain"] == pytest.approx(-judged["reward_gain"])
    assert judged["judge_gain_low"] <= judged["judge_gain"] <= judged["judge_gain_high"]
    assert judged["judge_gain_equal_length"] == pytest.approx(-judged["reward_gain_equal_length"])
    assert journal.metric("rlhf/judge") == pytest.approx([-value for value in journal.metric("rlhf/reward")])
    line, plain = (_lines(tmp_path / name / "aux" / "samples.jsonl")[0] for name in ("judged", "alone"))
    assert line.pop("judge") == {name: pytest.approx(-value) for name, value in line["rewards"].items()}
    assert line == plain
    with pytest.raises(StageError, match="expected another model than the reward model"):
        rlhf(config, prompts | {"judge": prompts["reward_model"]}, tmp_path / "same", Run(tmp_path / "w", run.launch))


def test_where_a_rule_can_check_answers_it_rewards_in_place_of_the_reward_model(
    prompts: dict[str, Path], tmp_path: Path, run: Run, journal: Any
) -> None:
    """The SFT model knows the right answer to every second prompt of these; the others' rule wants what nobody says."""
    rows = {side: _lines(prompts["prompts"] / f"{side}.jsonl") for side in ("train", "heldout")}
    for side, lines in rows.items():
        for number, line in enumerate(lines):
            line |= {"verify": "exact"} if number % 2 else {}
            line |= {"response": "Nobody says this."} if number % 4 == 3 else {}
        (tmp_path / f"{side}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = RlhfConfig.model_validate(RLHF | {"rollouts": 2, "epochs": 1, "temperature": 0.1})
    figures = rlhf(config, prompts | {"prompts": tmp_path}, tmp_path / "out", run).figures
    assert figures["verified_prompts"] == 4 and figures["verified_sft"] <= 0.5
    assert figures["verified_gain"] == pytest.approx(figures["verified_rlhf"] - figures["verified_sft"])
    assert figures["verified_gain_low"] <= figures["verified_gain"] <= figures["verified_gain_high"]
    lines = _lines(tmp_path / "out" / "aux" / "samples.jsonl")
    assert [("verified" in line, "rewards" in line) for line in lines] == [(False, True), (True, False)] * 4
    for line, row in zip(lines, rows["heldout"], strict=True):
        for model, is_right in line.get("verified", {}).items():
            assert is_right == (line["answers"][model] == row["response"])
    rewards = [line["rewards"]["rlhf"] - line["rewards"]["sft"] for line in lines[::2]]
    assert figures["reward_gain"] == pytest.approx(sum(rewards) / 4, abs=1e-3)
    assert len(journal.metric("rlhf/verified")) == 2


def test_a_rule_rewards_what_is_right_and_the_reward_model_s_scale_is_of_the_other_answers(
    prompts: dict[str, Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, hardware = Chat.load(prompts["model"]), prepare(run.launch)
    policy, reward = load(prompts["model"]), load_scorer(prompts["reward_model"], hardware).eval()
    rows = _lines(prompts["prompts"] / "heldout.jsonl")
    talks = chat.conversations([row["prompt"] for row in rows], [row["response"] for row in rows])
    answers = Completions([one.prompt for one in talks], [one.response for one in talks], torch.ones(8).bool())
    rules = [None, Rule("exact", rows[1]["response"]), Rule("exact", "Wrong."), *[None] * 5]
    scale = RewardScale(0.0)
    config = RlhfConfig.model_validate(RLHF | {"gamma": 1.0, "gae_lambda": 1.0, "kl_coef": 0.0, "verified_reward": 3})

    def no_values(ids: torch.Tensor, places: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.zeros(places.shape)

    asked = [Prompt("", one.prompt, "", rule) for one, rule in zip(talks, rules, strict=True)]
    ensemble = Ensemble({"reward_model": reward}, config)
    rewards, algorithm = Rewards(ensemble, scale, chat, config, hardware), algorithm_of(config)
    rollouts = Rollouts(policy, policy, no_values, rewards, algorithm, scale, asked, chat, config, hardware, run)
    monkeypatch.setattr(rollouts, "_sampled", lambda prompts, seed: answers)
    returns = rollouts._experience(asked, seed=0)["returns"][:, 0]
    raw = scores_of(reward, answers, chat, hardware)
    learnt = raw[[0, 3, 4, 5, 6, 7]]
    assert float(scale.mean) == pytest.approx(float(learnt.mean())) and float(scale.spread) == pytest.approx(
        float(learnt.std())
    )
    assert returns.tolist() == pytest.approx([*scale(raw[:1]).tolist(), 3.0, -3.0, *scale(raw[3:]).tolist()], abs=1e-4)


def test_grpo_learns_from_a_function_alone_and_is_held_against_the_best_of_n(
    prompts: dict[str, Path], tmp_path: Path, run: Run, journal: Any
) -> None:
    function = "tests.training.rl.test_grading:brevity"
    rate = {"learning_rate": 1.0e-3, "weight_decay": 0.0}
    settings = {"algorithm": "grpo", "answers_per_prompt": 4, "reward_functions": {function: 2.0}, "optimizer": rate}
    settings |= {"unfinished_penalty": 0.0, "rollouts": 8, "kl_coef": 0.0, "reward_processes": 2, "whole_groups": True}
    inputs = {name: prompts[name] for name in ("model", "prompts")}
    figures = rlhf(RlhfConfig.model_validate(RLHF | settings), inputs, tmp_path / "out", run).figures
    told = journal.metric(f"rlhf/function/{function}")
    assert sum(told[-3:]) > sum(told[:3]) and not journal.metric("rlhf/reward")
    gain = figures["heldout_functions_rlhf"] - figures["heldout_functions_sft"]
    assert figures["functions_gain"] == pytest.approx(gain) and gain > 0
    left = [one.info for one in psutil.process_iter(["ppid", "cmdline"]) if one.info["ppid"] == os.getpid()]
    graders = [one for one in left if "training.rl.grading" in (one["cmdline"] or [])]
    assert not graders
    with pytest.raises(StageError, match="expected the input reward_model for ppo"):
        rlhf(RlhfConfig.model_validate(RLHF), inputs, tmp_path / "ppo", Run(tmp_path / "w", run.launch))
    with pytest.raises(StageError, match=r"rlhf\.best_of.*to choose the best answer by"):
        unchosen = RlhfConfig.model_validate(RLHF | settings | {"best_of": 4})
        rlhf(unchosen, inputs, tmp_path / "unchosen", Run(tmp_path / "u", run.launch))
    config = RlhfConfig.model_validate(RLHF | {"rollouts": 1, "epochs": 1, "best_of": 4})
    best = rlhf(config, prompts, tmp_path / "best", Run(tmp_path / "v", run.launch)).figures
    rewards = [best[f"best_of_{n}_reward"] for n in (1, 2, 4)]
    assert rewards == sorted(rewards) and best["best_of_4_kl"] == pytest.approx(math.log(4) - 0.75)


def test_groups_of_equal_rewards_make_room_for_others_and_a_round_continues_with_the_same_weights(
    prompts: dict[str, Path], tmp_path: Path, run: Run, journal: Any, weights: Any
) -> None:
    """More groups differ with refilling than without, and a round that was stopped keeps what it was refilled with."""
    function = "tests.training.rl.test_grading:few_letters"
    settings = {"algorithm": "grpo", "answers_per_prompt": 2, "reward_functions": {function: 1.0}, "rollouts": 2}
    settings |= {"unfinished_penalty": 0.0, "overlong_tokens": 0, "epochs": 1, "refill_groups": 3}
    inputs = {name: prompts[name] for name in ("model", "prompts")}
    config = RlhfConfig.model_validate(RLHF | settings | {"checkpoint_every": "1 batches"})
    rlhf(config, inputs, tmp_path / "unbroken", Run(tmp_path / "other", run.launch, journal=journal))
    left_out, equal = (journal.metric(f"rlhf/groups_{name}") for name in ("left_out", "equal"))
    assert len(left_out) == len(equal) == 2 and left_out[0] > equal[0]
    with pytest.raises(Cancelled):
        rlhf(config, inputs, tmp_path / "stopped", StoppedAt(3, run))
    rlhf(config, inputs, tmp_path / "continued", run)
    first, second = weights(tmp_path / "unbroken"), weights(tmp_path / "continued")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_raft_learns_the_best_of_its_answers_and_continues_within_a_round_with_the_same_weights(
    prompts: dict[str, Path], tmp_path: Path, run: Run, journal: Any, weights: Any
) -> None:
    """From a function and no reward model; a round keeps 8 of 32 answers, which are four batches in two epochs. Stopped
    after one of the second round's, and after two more."""
    function = "tests.training.rl.test_grading:brevity"
    settings = {"algorithm": "raft", "answers_per_prompt": 4, "rollout_prompts": 32, "minibatch_answers": 4}
    settings |= {"reward_functions": {function: 1.0}, "unfinished_penalty": 0.0, "rollouts": 6}
    config = RlhfConfig.model_validate(RLHF | settings | {"optimizer": {"learning_rate": 1.0e-3, "weight_decay": 0.0}})
    inputs = {name: prompts[name] for name in ("model", "prompts")}
    unbroken = rlhf(config, inputs, tmp_path / "unbroken", Run(tmp_path / "other", run.launch, journal=journal))
    figures, told = unbroken.figures, journal.metric(f"rlhf/function/{function}")
    assert figures["batches"] == 24 and figures["functions_gain"] > 0 and sum(told[-3:]) > sum(told[:3])
    kept = journal.metric("rlhf/kept_reward")
    assert len(kept) == 6 and all(best > mean for best, mean in zip(kept, told, strict=True))
    assert len(journal.metric("rlhf/policy_loss")) == 24 and not journal.metric("rlhf/clip_share")
    for batch in (5, 7):
        with pytest.raises(Cancelled):
            rlhf(config, inputs, tmp_path / "stopped", StoppedAt(batch, run))
    rlhf(config, inputs, tmp_path / "continued", run)
    assert any(message.startswith("continuing rlhf at batch 7 of") for message in journal.events())
    first, second = weights(tmp_path / "unbroken"), weights(tmp_path / "continued")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_ppo_runs_in_fp16_and_logs_its_loss_scale(prompts: dict[str, Path], tmp_path: Path, journal: Any) -> None:
    launch = LaunchConfig(device="cpu", threads=1, precision="fp16")
    config = RlhfConfig.model_validate(RLHF | {"rollouts": 1, "epochs": 1, "heldout_prompts": 2})
    result = rlhf(config, prompts, tmp_path / "out", Run(tmp_path / "half", launch, journal=journal))
    assert result.figures["batches"] == 2
    assert math.isfinite(result.figures["kl_to_sft"])
    scales = journal.metric("train/loss_scale")
    assert len(scales) == 2 and all(scale > 0 for scale in scales)


def test_policy_and_value_are_clipped_by_their_own_norms() -> None:
    """By one norm of both, a value loss that is large early on takes the policy's update away."""
    networks = {name: torch.nn.Linear(3, 1, bias=False) for name in ("policy", "value")}
    gradients = {"policy": torch.tensor([[0.3, 0.0, 0.4]]), "value": torch.tensor([[300.0, 400.0, 0.0]])}
    for name, network in networks.items():
        network.weight.grad = gradients[name].clone()
    clip = GradientClip(1.0, networks)
    clip.after_train_batch(SimpleNamespace(model=torch.nn.ModuleDict(networks)))  # type: ignore[arg-type]
    assert clip.norms == pytest.approx({"policy": 0.5, "value": 500.0})
    assert networks["policy"].weight.grad is not None and networks["value"].weight.grad is not None
    assert torch.equal(networks["policy"].weight.grad, gradients["policy"])
    assert float(networks["value"].weight.grad.norm()) == pytest.approx(1.0, rel=1e-4)


def test_a_reward_model_s_activation_norm_is_that_of_its_last_hidden_state(
    base_dir: Path, preferences_dir: Path, tmp_path: Path, run: Run, journal: Any
) -> None:
    settings = {"duration": "1 batches", "global_batch_pairs": 32, "max_length": 64, "optimizer": FAST}
    inputs = {"model": base_dir, "preferences": preferences_dir}
    run.launch = run.launch.model_copy(update={"share_prompts": "off"})  # each token of both answers counts
    reward_model(RewardModelConfig.model_validate(settings), inputs, tmp_path / "out", run)
    chat, rows = Chat.load(base_dir), _lines(preferences_dir / "train.jsonl")
    prompts = [row["prompt"] for row in rows]
    sides = [chat.conversations(prompts, [row[key] for row in rows]) for key in ("chosen", "rejected")]
    with torch.no_grad():
        ids = pad([one.ids for side in sides for one in side], chat.pad)
        hidden = AutoModel.from_pretrained(base_dir, local_files_only=True)(input_ids=ids).last_hidden_state
    (found,) = journal.metric("train/activation_norm")
    assert found == pytest.approx(float(hidden.norm(dim=-1).mean()), rel=1e-2)


def test_a_stopped_ppo_run_continues_within_a_round_with_the_same_weights(
    prompts: dict[str, Path], shards_dir: Path, tmp_path: Path, run: Run, journal: Any, weights: Any
) -> None:
    """Stopped after one batch and then after two more of a round's four; with text beside the answers, which is learnt
    meanwhile."""
    config = RlhfConfig.model_validate(RLHF | {"text_coef": 2.0})
    prompts = prompts | {"shards": shards_dir}
    rlhf(config, prompts, tmp_path / "unbroken", Run(tmp_path / "other", run.launch))
    before, after = (_loss_on_text(one, shards_dir, tmp_path) for one in (prompts["model"], tmp_path / "unbroken"))
    assert after < before - 0.1
    for batch in (5, 7):
        with pytest.raises(Cancelled):
            rlhf(config, prompts, tmp_path / "stopped", StoppedAt(batch, run))
    rlhf(config, prompts, tmp_path / "continued", run)
    assert any(message.startswith("continuing rlhf at batch 7 of") for message in journal.events())
    ours, theirs = weights(tmp_path / "continued"), weights(tmp_path / "unbroken")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_that_is_told_to_stop_while_answers_are_written_keeps_them_in_a_checkpoint(
    prompts: dict[str, Path], tmp_path: Path, run: Run, journal: Any, weights: Any
) -> None:
    config = RlhfConfig.model_validate(RLHF | {"rollouts": 3, "checkpoint_every": "50 batches"})
    rlhf(config, prompts, tmp_path / "unbroken", Run(tmp_path / "other", run.launch))

    def is_cancelled() -> bool:
        return len(journal.metric("rlhf/generated_tokens_per_s")) == 2

    stopped = Run(run.work_dir, run.launch, is_cancelled=is_cancelled, journal=journal)
    with pytest.raises(Cancelled):
        rlhf(config, prompts, tmp_path / "stopped", stopped)
    rlhf(config, prompts, tmp_path / "continued", run)
    assert any(message.startswith("continuing rlhf at batch 5 of") for message in journal.events())
    assert len(journal.metric("rlhf/generated_tokens_per_s")) == 3, "no round was written twice"
    ours, theirs = weights(tmp_path / "continued"), weights(tmp_path / "unbroken")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_parts_of_a_minibatch_come_to_the_loss_of_all_its_text(base_dir: Path) -> None:
    model = LanguageModel(load(base_dir), prepare(LaunchConfig()))
    texts = [TextExample([5 + n], list(range(6, 9 + 3 * n))) for n in range(4)]
    answers = {"ids": torch.zeros(4, 12), "mask": (torch.arange(5) < torch.tensor([[1], [2], [3], [5]])).float()}
    chat = Chat.load(base_dir)

    def weight(batch: Any) -> int:
        return int(batch["mask"].sum())

    whole = answers | TextBeside(texts, chat.response_batch, weight, seed=1)(answers, 3, 0)
    text = {"input_ids": whole["text_ids"], "labels": whole["text_labels"]}
    assert text["input_ids"].shape[0] == 4 and text["input_ids"].shape[1] <= 12
    expected = model.loss(model(text), text)
    parts = [(part, weight(part)) for part in split_batch(whole, 3)]
    added = sum(loss_of_text(model, part, size) * size / weight(whole) for part, size in parts)
    torch.testing.assert_close(added, expected)


def _turn(folder: Path, out: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    from training.checkpoint.export import copy_beside

    model = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
    model.score.weight.data.neg_()
    model.save_pretrained(out)
    copy_beside(folder, out)


def test_a_tuned_model_answers_in_pieces_of_text(tuned: tuple[Path, Any]) -> None:
    messages = [{"role": "user", "content": "What does sum_array do?"}]
    pieces = list(answer(tuned[0], messages, max_new_tokens=24, temperature=0))
    assert len(pieces) > 1
    assert "<|" not in "".join(pieces)
    assert list(answer(tuned[0], messages, max_new_tokens=24, temperature=0)) == pieces
    with pytest.raises(StageError, match="roles user and assistant"):
        list(answer(tuned[0], [{"role": "narrator", "content": "x"}]))
    with pytest.raises(StageError, match="a conversation without tools"):
        list(answer(tuned[0], [{"role": "tool", "content": "x"}]))


@pytest.mark.parametrize(
    ("line", "said"), [('{"prompt": "a"}', "expected text under response"), ("", "the file is empty")]
)
def test_bad_pairs_are_named_by_file_and_line(base_dir: Path, tmp_path: Path, run: Run, line: str, said: str) -> None:
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text(line + "\n" if line else "")
    with pytest.raises(StageError, match=rf"train\.jsonl.*{said}"):
        sft(SftConfig(), {"model": base_dir, "instructions": tmp_path}, tmp_path / "out", run)
