"""Rollouts that do not wait, with a model and real sampler processes: the bits that training ends with, after kills of
the trainer and of samplers too, and what a kill leaves behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

import infra.run
from infra.launch.config import LaunchConfig
from infra.run import Run, read_journal
from tests.support.points import points_of
from tests.support.programs.processes import gone, wait_until
from tests.support.programs.ranked import training_process
from training.config import LoraConfig, ModelConfig, RlhfConfig
from training.distributed.parallel import whole_weights
from training.model.lora import add_adapters, merged
from training.model.models import build, hf_config
from training.rl.rollouts.pool import write_weights
from training.rl.rollouts.sampler import load_weights
from training.rlhf import rlhf

FUNCTION = "tests.training.rl.test_async_rollouts:vowels"
RLHF: dict[str, Any] = {
    "algorithm": "grpo", "answers_per_prompt": 4, "rollouts": 5, "rollout_prompts": 16, "minibatch_answers": 8,
    "answer_max_tokens": 8, "max_prompt_tokens": 40, "kl_coef": 0.02, "unfinished_penalty": 0.0,
    "reward_functions": {FUNCTION: 1.0}, "optimizer": {"learning_rate": 2.0e-3, "weight_decay": 0.0},
    "heldout_prompts": 4, "checkpoint_every": "3 batches",
}  # fmt: skip
LAUNCH: dict[str, Any] = {"device": "cpu", "threads": 1, "trainer": "native", "samplers": {"count": 2}}


def vowels(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    """A reward function, which the tests name by its import path."""
    return [sum(answer.count(letter) for letter in "aeiou") / 4 for answer in answers]


@pytest.fixture
def inputs(base_dir: Path, instructions_dir: Path) -> dict[str, Path]:
    return {"model": base_dir, "prompts": instructions_dir}


def test_without_staleness_training_ends_with_the_bits_of_rounds_in_turns(
    inputs: dict[str, Path], tmp_path: Path, run: Run, journal: Any, weights: Any
) -> None:
    settings = RLHF | {"rollouts": 2}
    rlhf(RlhfConfig.model_validate(settings), inputs, tmp_path / "in_turns", Run(tmp_path / "other", run.launch))
    config = RlhfConfig.model_validate(settings | {"async": {"max_staleness": 0}})
    figures = rlhf(config, inputs, tmp_path / "samplers", run).figures
    weights_of_samplers, expected = weights(tmp_path / "samplers"), weights(tmp_path / "in_turns")
    assert all(torch.equal(weights_of_samplers[name], expected[name]) for name in expected)
    assert figures["staleness"] == figures["answers_dropped"] == 0
    assert 0 < figures["trainer_idle_share"] < 1 and 0 < figures["sampler_idle_share"] < 1
    assert not [path for path in run.work_dir.glob("rollouts/*") if path.suffix == ".safetensors"]


def test_weights_arrive_with_adapters_merged_and_tied_ones_once(tmp_path: Path, tokenizer_dir: Path) -> None:
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    sizes = {"family": "llama", "layers": 2, "width": 32, "heads": 2, "positions": 64, "tie_embeddings": True}
    policy, plain = (build(hf_config(ModelConfig.model_validate(sizes), 320, special), seed).eval() for seed in (1, 2))
    lora = LoraConfig(rank=2)
    add_adapters(policy, lora, 3, "rlhf")
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
        policy.tie_weights()
        write_weights(merged(whole_weights(policy), lora), tmp_path / "policy.safetensors")
        assert "lm_head.weight" not in load_file(tmp_path / "policy.safetensors")
        load_weights(plain, tmp_path / "policy.safetensors")
        ids = torch.arange(5, 45)[None]
        expected, logits = policy(input_ids=ids).logits, plain(input_ids=ids).logits
    assert torch.allclose(logits, expected, atol=1e-5) and float(logits.std()) > 0.01


class Kills(Run):
    """Kills a sampler, or the process itself, when the batch `at` is recorded; before, it leaves the samplers' ids."""

    def __init__(self, work: Path, launch: LaunchConfig, *, journal: Any, at: int, whom: str) -> None:
        super().__init__(work, launch, journal=journal)
        self._at, self._whom = at, whom

    def metrics(self, values: Any, step: int | None = None) -> None:
        super().metrics(values, step)
        if step != self._at or "train/loss" not in values or not self._whom:
            return
        samplers = psutil.Process().children()
        if self._whom == "sampler":
            samplers[0].kill()
        else:
            maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in (psutil.Process(), *samplers)]
            state = {"pids": [process.pid for process in samplers], "shared": any("/dev/shm" in text for text in maps)}
            (self.work_dir / "killed.json").write_text(json.dumps(state))
            os.kill(os.getpid(), signal.SIGKILL)


def _train(folder: Path, settings: dict[str, Any], inputs: dict[str, Path], at: int, whom: str) -> None:
    """The forked process."""
    infra.run.FLUSH_EVERY_S = 0
    folder.mkdir(exist_ok=True)
    with infra.run.open_journal(folder / "journal.jsonl") as journal:
        run = Kills(folder / "work", LaunchConfig.model_validate(LAUNCH), journal=journal, at=at, whom=whom)
        rlhf(RlhfConfig.model_validate(settings), inputs, folder / "model", run)


def _trained(folder: Path, settings: dict[str, Any], inputs: dict[str, Path], *kills: tuple[int, str]) -> None:
    for at, whom in (*kills, (0, "")):
        child = training_process(_train, folder, settings, inputs, at, whom)
        try:
            assert child.wait() == (-signal.SIGKILL if whom == "trainer" else 0)
        finally:
            child.kill()
        if whom == "trainer":
            killed = json.loads((folder / "work" / "killed.json").read_text())
            assert len(killed["pids"]) == 2 and not killed["shared"]
            for pid in killed["pids"]:
                wait_until(lambda pid=pid: not psutil.pid_exists(pid) or gone(psutil.Process(pid)))
        elif whom:
            break


@pytest.mark.long
def test_a_killed_training_and_killed_samplers_end_with_the_bits_of_an_undisturbed_one(
    inputs: dict[str, Path], tmp_path: Path, weights: Any
) -> None:
    """The risk: answers of other weights, or other answers, after a kill at a moment when samplers are ahead. Two
    samplers share each round; killed within a round and at its end."""
    settings = RLHF | {"async": {"max_staleness": 2, "parts": 2}}
    _trained(tmp_path / "unbroken", settings, inputs)
    _trained(tmp_path / "trainer", settings, inputs, (5, "trainer"), (8, "trainer"))
    _trained(tmp_path / "sampler", settings, inputs, (3, "sampler"))
    lines = {path.name: read_journal(path / "journal.jsonl") for path in tmp_path.iterdir()}
    expected, points = weights(tmp_path / "unbroken" / "model"), points_of(lines["unbroken"])
    assert [age for _, age in points["rlhf/staleness"]] == [0, 1, 2, 2, 2]
    assert len({importance for _, importance in points["rlhf/importance"]}) > 2
    for name in ("trainer", "sampler"):
        trained = weights(tmp_path / name / "model")
        assert all(torch.equal(trained[key], expected[key]) for key in expected), name
        assert points_of(lines[name]) == points, name
    replaced = [line for line in lines["sampler"] if line.get("name") == "sampler_replaced"]
    assert len(replaced) == 1 and not [line for line in lines["trainer"] if line.get("name") == "approximate"]


@pytest.mark.long
def test_in_free_order_a_killed_training_repeats_what_it_had_learnt_and_goes_on(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    """The risk: rounds after the checkpoint that are learnt from other answers than before the kill."""
    settings = RLHF | {"async": {"max_staleness": 1, "order": "free"}}
    _trained(tmp_path / "killed", settings, inputs, (8, "trainer"))
    lines = read_journal(tmp_path / "killed" / "journal.jsonl")
    assert any(line.get("name") == "approximate" and "repeated" in line["message"] for line in lines)
    losses: dict[int, list[float]] = {}
    for line in lines:
        for values in (line.get("values", {}), line.get("undone", {})):
            if "train/loss" in values:
                losses.setdefault(line["step"], []).append(values["train/loss"])
    again = {step: each for step, each in losses.items() if len(each) == 2}
    assert sorted(losses) == list(range(1, 11)) and {7, 8} <= again.keys()
    assert all(first == second for first, second in again.values())
