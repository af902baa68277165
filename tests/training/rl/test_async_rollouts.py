"""Rollouts that do not wait, with a model and real sampler processes: the bits that training ends with, after kills of
the trainer and of samplers too, and what a kill leaves behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch
from safetensors.torch import load_file

import infra.run
from infra.errors import StageError, stage_error
from infra.launch.config import LaunchConfig
from infra.launch.launchers import VllmConfig
from infra.run import Run, read_journal
from tests.support.points import points_of
from tests.support.programs.processes import gone, wait_until
from tests.support.programs.ranked import training_process
from training.config import LoraConfig, ModelConfig, RlhfConfig
from training.distributed.parallel import whole_weights
from training.generation import vllm_sampler
from training.model.lora import add_adapters, merged
from training.model.models import build, hf_config, load
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
LETTERS: dict[str, Any] = {
    "use": f"{Path(__file__).parents[1] / 'environments' / 'unruly.py'}:Letters",
    "tasks": 8, "max_turns": 3, "max_tokens": 48, "instances": 1,
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


class StandIn:
    """A server of vLLM in this process, for the interface of `infra.servers.vllm.Vllm`: it computes the model that is
    in the folder when it has to load it."""

    servers: ClassVar[list[StandIn]] = []
    broken: ClassVar[str] = ""

    def __init__(self, config: VllmConfig, folder: Path, log: Path, *_: Any) -> None:
        if config.gpus == self.broken:
            raise stage_error("vllm_failed", "launch.vllm", "vLLM ended", "look at its log")
        self.gpus, self.log, self._folder = config.gpus, log, folder
        self.asked = self.loaded = 0
        self.is_closed = False
        self.reload_weights()
        self.servers.append(self)

    def reload_weights(self) -> None:
        self._model = load(self._folder).eval()
        self.loaded += 1

    def complete(self, questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        self.asked += 1
        return [self._answer(question) for question in questions]

    @torch.no_grad()
    def _answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(question["seed"])
        ids, logprobs = list(question["prompt"]), []
        for _ in range(question["max_tokens"]):
            scores = self._model(torch.tensor([ids])).logits[0, -1].float()
            for token, bias in (question["logit_bias"] or {}).items():
                scores[int(token)] += bias
            logarithms = scores.log_softmax(0)
            token = int(torch.multinomial(logarithms.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(logarithms[token]))
            if token in question["stop_token_ids"]:
                break
        return {"token_ids": ids[len(question["prompt"]) :], "logprobs": {"token_logprobs": logprobs}}

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("playing", [{}, {"environment": LETTERS}], ids=["answers", "episodes"])
def test_vllm_servers_share_rounds_and_gpus_and_none_is_left_where_one_fails(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journal: Any, playing: dict[str, Any]
) -> None:
    monkeypatch.setattr(vllm_sampler, "Vllm", StandIn)
    monkeypatch.setattr(StandIn, "servers", [])
    machine = LAUNCH | {"precision": "fp32", "vllm": {"gpus": "4,5,6,7"}}
    settings = RLHF | {"sampler": "vllm", "rollouts": 3, "async": {"max_staleness": 1, "parts": 2}} | playing
    config = RlhfConfig.model_validate(settings)
    run = Run(tmp_path / "work", LaunchConfig.model_validate(machine), journal=journal)
    figures = rlhf(config, inputs, tmp_path / "out", run).figures
    assert {server.gpus for server in StandIn.servers} == {"4,5", "6,7"}
    assert len({server.log for server in StandIn.servers}) == 2
    assert all(server.asked and server.loaded > 1 and server.is_closed for server in StandIn.servers)
    # Answers of both are those of the policy: the first round is compared with it.
    assert journal.metric("rlhf/vllm_logprobs_apart")[0] < 1e-4 and figures["staleness"] > 0
    # A server that writes the answers of rounds in turns.
    in_turns = RlhfConfig.model_validate(settings | {"async": None})
    rlhf(in_turns, inputs, tmp_path / "in_turns", Run(tmp_path / "third", run.launch, journal=journal))
    assert len(apart := journal.metric("rlhf/vllm_logprobs_apart")) >= 4 and max(apart) < 1e-4
    monkeypatch.setattr(StandIn, "servers", [])
    monkeypatch.setattr(StandIn, "broken", "6,7")
    with pytest.raises(StageError, match="vLLM ended"):
        rlhf(config, inputs, tmp_path / "none", Run(tmp_path / "other", run.launch))
    assert [server.is_closed for server in StandIn.servers] == [True]


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
@pytest.mark.parametrize("playing", [{}, {"environment": LETTERS}], ids=["answers", "episodes"])
def test_a_killed_training_and_killed_samplers_end_with_the_bits_of_an_undisturbed_one(
    inputs: dict[str, Path], tmp_path: Path, weights: Any, playing: dict[str, Any]
) -> None:
    """The risk: answers of other weights, or other answers, after a kill at a moment when samplers are ahead. Two
    samplers share each round; killed within a round and at its end."""
    settings = RLHF | {"async": {"max_staleness": 2, "parts": 2}} | playing
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
