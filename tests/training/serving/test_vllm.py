"""Answers by a real vLLM, which STEMMA_VLLM names (its program `vllm`, of an environment of its own): the policy that
learns is the one that answers, in every round."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from infra.servers.vllm import PROGRAM
from tests.support.programs.ranked import train_in_ranks
from tests.training.model.test_families import SPECIAL, values_of_family
from training.chat.base import Chat
from training.checkpoint.export import export
from training.config import ModelConfig, RlhfConfig, SftConfig
from training.config.families import FAMILIES
from training.core.hardware import Hardware
from training.generation.completions import AnswerBatch, Completions
from training.generation.sampling import sample
from training.generation.vllm_sampler import VllmSampler, differences
from training.model.models import build, hf_config
from training.rlhf import rlhf
from training.sft import sft
from training.train_modules.answer_logprobs import logprobs_and_entropies

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not os.environ.get(PROGRAM), reason="STEMMA_VLLM names no program of vLLM"),
]
VLLM = {"program": os.environ.get(PROGRAM), "arguments": ["--enforce-eager"]}  # compiling takes longer than these tests
CPU = Hardware(torch.device("cpu"), bf16=False)
FUNCTION = "tests.training.serving.test_vllm:shortness"
RLHF: dict[str, Any] = {
    "algorithm": "rloo", "answers_per_prompt": 4, "rollout_prompts": 32, "minibatch_answers": 8, "rollouts": 8,
    "answer_max_tokens": 16, "max_prompt_tokens": 40, "kl_coef": 0.0, "unfinished_penalty": 0.0,
    "reward_functions": {FUNCTION: 1.0}, "optimizer": {"learning_rate": 2.0e-3, "weight_decay": 0.0},
    "heldout_prompts": 8,
}  # fmt: skip


def shortness(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    return [-len(answer) / 10 for answer in answers]


@dataclass
class Answering:
    answer_max_tokens: int = 8
    temperature: float = 1.0


def _changed(policy: PreTrainedModel) -> None:
    """As if it had learnt much."""
    with torch.no_grad():
        for weight in policy.parameters():
            spread = weight.std() if weight.numel() > 1 else torch.zeros(())
            weight.add_(torch.randn_like(weight) * 0.3 * (spread if spread > 0 else 0.3))


@contextmanager
def _sampling(
    policy: PreTrainedModel,
    config: Answering,
    folder: Path,
    tokenizer: Path,
    hardware: Hardware = CPU,
    longest: int = 64,
) -> Iterator[VllmSampler]:
    run = Run(folder, LaunchConfig.model_validate({"vllm": VLLM}))
    sampler = VllmSampler(policy, tokenizer, Chat.load(tokenizer), config, longest, hardware, run)
    try:
        yield sampler
    finally:
        sampler.close()


def _apart(policy: PreTrainedModel, answers: Completions, temperature: float = 1.0) -> float:
    """The furthest that a log-probability of vLLM's is from ours."""
    batch = AnswerBatch.of(answers, 1)
    ours, _ = logprobs_and_entropies(policy, batch.ids, batch.places, batch.tokens, batch.mask, CPU, temperature)
    return float(differences(answers, ours, batch.mask).max())


def _policy(name: str, **changes: Any) -> PreTrainedModel:
    sizes = {"n_embd": 64} if name == "gpt2" else {
        "hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "ffn_dim": 96, "word_embed_proj_dim": 64,
    }  # fmt: skip
    values = values_of_family(name) | sizes | changes
    if name == "qwen3":  # of which vLLM takes windows in no or in all layers
        values |= {"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * 2}
    return build(hf_config(ModelConfig(transformers=values), 320, SPECIAL), 1, "plain", 0.2).eval()


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.vllm])
def test_vllm_computes_the_policy_before_and_after_its_weights_changed(
    name: str, tokenizer_dir: Path, tmp_path: Path
) -> None:
    """The risk: weights that do not arrive. vLLM 0.32 leaves a tied output layer as it was, and warns in its log
    alone."""
    policy, asked = _policy(name), [[5 + place, 20, 7 * place + 9, 80, 90, 30] for place in range(16)]
    with _sampling(policy, Answering(), tmp_path, tokenizer_dir) as sampler:
        for round_number in range(3):
            answers = sampler.sample(asked, round_number)
            assert _apart(policy, answers) < 1e-4
            _changed(policy)
            sampler.update(round_number)


@pytest.fixture(scope="module")
def at_seven_tenths(
    tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PreTrainedModel, VllmSampler, Answering]]:
    """A policy, and one server for it at a temperature of 0.7; the number of tokens and the temperature can be set."""
    policy, config = _policy("llama", max_position_embeddings=512), Answering(24, temperature=0.7)
    with _sampling(policy, config, tmp_path_factory.mktemp("served"), tokenizer_dir, longest=400) as sampler:
        yield policy, sampler, config


def test_greedy_answers_are_ours_and_nothing_of_earlier_weights_is_left(
    at_seven_tenths: tuple[PreTrainedModel, VllmSampler, Answering],
    tokenizer_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of prompts so long that their keys and values are kept for those that begin alike. The risk: answers of a policy
    that went on from another one's keys and values."""
    policy, sampler, config = at_seven_tenths
    monkeypatch.setattr(config, "temperature", 0.0)
    start = [(7 * place) % 300 + 5 for place in range(300)]
    asked = [[*start, 9 + place] for place in range(8)] * 2
    given: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.0, "hardware": CPU}
    stops, before = Chat.load(tokenizer_dir).stops, None
    for round_number in range(2):
        answers = sampler.sample(asked, 0)
        assert answers.ids == sample(policy, asked, stops=stops, **given)
        assert answers.ids != before and answers.ids[:8] == answers.ids[8:]
        before = answers.ids
        _changed(policy)
        sampler.update(round_number)


def test_what_is_drawn_follows_from_the_seed_and_the_temperature_and_no_unused_token_is(
    at_seven_tenths: tuple[PreTrainedModel, VllmSampler, Answering], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The risk: answers of one prompt that are all the same, or of another distribution."""
    policy, sampler, _ = at_seven_tenths
    asked = [[5, 6, 7]] * 24
    first, again, other = (sampler.sample(asked, seed) for seed in (1, 1, 2))
    assert first.ids == again.ids != other.ids and len(set(map(tuple, first.ids))) > 12
    assert _apart(policy, first, 0.7) < 1e-4 < _apart(policy, first, 1.0)
    written = {token for answer in first.ids for token in answer}
    monkeypatch.setattr(policy.generation_config, "suppress_tokens", [*written], raising=False)
    assert not written & {token for answer in sampler.sample(asked, 1).ids for token in answer}


def test_a_server_that_was_not_told_of_the_newest_policy_is_found_out(
    at_seven_tenths: tuple[PreTrainedModel, VllmSampler, Answering],
) -> None:
    """The risk: a round that is learnt from as if it were another policy's."""
    policy, sampler, _ = at_seven_tenths
    answers = sampler.sample([[5, 6, 7 + place] for place in range(24)], 1)
    batch = AnswerBatch.of(answers, 1)

    def check() -> None:
        ours, _ = logprobs_and_entropies(policy, batch.ids, batch.places, batch.tokens, batch.mask, CPU, 0.7)
        sampler.check(answers, ours, batch.mask, 0)

    check()
    _changed(policy)
    with pytest.raises(StageError, match="it computes another model"):
        check()
    sampler.update(0)


def test_under_bf16_it_computes_the_policy_but_for_rounding(tokenizer_dir: Path, tmp_path: Path) -> None:
    """The risk: rounding that passes for another model, or the other way round. It is of the size that ours is of."""
    rounded, policy = Hardware(torch.device("cpu"), bf16=True), _policy("llama")
    asked = [[5 + place, 20, 7 * place + 9, 80] for place in range(16)]
    with _sampling(policy, Answering(), tmp_path, tokenizer_dir, rounded) as sampler:
        answers = sampler.sample(asked, 0)
    batch = AnswerBatch.of(answers, 1)
    ours, exact = (
        logprobs_and_entropies(policy, batch.ids, batch.places, batch.tokens, batch.mask, hardware, 1.0)[0]
        for hardware in (rounded, CPU)
    )
    own = float((ours - exact)[batch.mask.bool()].abs().mean())
    assert 1e-3 < float(differences(answers, ours, batch.mask).mean()) < 2 * own


def test_a_head_size_that_its_kernels_do_not_know_is_told_before_anything_is_learnt(
    tokenizer_dir: Path, tmp_path: Path
) -> None:
    """The risk: a stage that fails in its first round, or waits for ever."""
    with (
        pytest.raises(StageError) as raised,
        _sampling(_policy("llama", hidden_size=40, head_dim=20), Answering(), tmp_path, tokenizer_dir),
    ):
        pass
    (problem,) = raised.value.problems
    assert problem.code == "vllm_failed" and "head" in problem.message.lower()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path, instructions_dir: Path) -> Path:
    """A model with heads as wide as vLLM's kernels for CPUs want them, that answers."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = ModelConfig(family="qwen3", layers=2, width=64, heads=2, positions=128)
    export(build(hf_config(sizes, 320, SPECIAL), seed=3), tokenizer_dir, folder / "base")
    config = SftConfig.model_validate(
        {"duration": "40 epochs", "global_batch_examples": 8, "max_length": 64, "answer_max_tokens": 24}
        | {"optimizer": {"learning_rate": 3.0e-3, "weight_decay": 0.0}}
    )
    inputs = {"model": folder / "base", "instructions": instructions_dir}
    sft(config, inputs, folder / "sft", Run(folder / "work", LaunchConfig(device="cpu", precision="fp32")))
    return folder / "sft"


def test_a_policy_learns_from_its_answers_as_from_those_of_our_own_sampler(
    tuned: Path, instructions_dir: Path, tmp_path: Path, journal: Any
) -> None:
    """The risk: rewards that rise by our own sampler alone."""
    gains: dict[str, float] = {}
    inputs = {"model": tuned, "prompts": instructions_dir}
    for sampler in ("own", "vllm"):
        launch = LaunchConfig.model_validate({"device": "cpu", "precision": "fp32", "vllm": VLLM})
        run = Run(tmp_path / f"{sampler}.work", launch, journal=journal)
        config = RlhfConfig.model_validate(RLHF | {"sampler": sampler})
        figures = rlhf(config, inputs, tmp_path / sampler, run).figures
        gains[sampler] = figures["functions_gain"]
        assert figures["generated_tokens_per_s"] > 0
    assert min(gains.values()) > 0.3
    apart = journal.metric("rlhf/vllm_logprobs_apart")
    assert len(apart) == RLHF["rollouts"] and max(apart) < 1e-4
    assert len(journal.metric("rlhf/weights_to_vllm_s")) == RLHF["rollouts"]
    assert "vLLM answers after" in " ".join(journal.events())


def test_ranks_ask_one_server_and_learn_what_one_process_learns(
    tuned: Path, instructions_dir: Path, tmp_path: Path
) -> None:
    """The risk: ranks that wait for each other for ever, or a server each."""
    inputs = {"model": tuned, "prompts": instructions_dir}
    settings = RLHF | {"sampler": "vllm", "rollouts": 2, "optimizer": {"learning_rate": 1.0e-4, "weight_decay": 0.0}}
    told: dict[int, list[Mapping[str, Any]]] = {}
    for count in (1, 2):
        launch = {"vllm": VLLM, "precision": "fp32"}
        told[count] = [*train_in_ranks("rlhf", count, settings, inputs, tmp_path / str(count), launch=launch)]
    rewards = [
        [
            line["values"][f"rlhf/function/{FUNCTION}"]
            for line in lines
            if f"rlhf/function/{FUNCTION}" in line.get("values", {})
        ]
        for lines in told.values()
    ]
    assert len(rewards[0]) == 2 and rewards[0] == pytest.approx(rewards[1], rel=1e-5)
    with pytest.raises(Exception, match="an existing program"):
        train_in_ranks(
            "rlhf", 2, settings, inputs, tmp_path / "none", launch={"vllm": {"program": str(tmp_path / "no")}}
        )
