"""Adapters in preference tuning and RLHF: losses and gradients of trl with peft, one memory for policy and reference, a
model like any other at the end, and the same bits after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from corpus.model_folders.adapters import FOLDER, WEIGHTS
from infra.launch.config import LaunchConfig
from infra.run import Run
from infra.store.measurements import TRAINED
from tests.training.alignment.test_trl import CHOSEN, CPU, PROMPTS, REJECTED, SILENT, _moved, _ours, _padded
from training.chat.base import Chat
from training.checkpoint.export import copy_beside
from training.config import LoraConfig, PreferenceTuningConfig, RlhfConfig
from training.data.preferences import Pair
from training.model.models import load
from training.model.new_tokens import forget_untrained
from training.preference_tuning import measure_trained, preference_tuning
from training.rlhf import rlhf
from training.train_modules.adapting import Adapting, sharing_frozen
from training.train_modules.preference_model import Example
from training.train_modules.scorer import load_scorer

LORA: dict[str, Any] = {"rank": 3, "alpha": 6.0, "targets": ["q_proj", "down_proj"]}
LAUNCH = LaunchConfig(device="cpu", threads=1, precision="fp32")
PREFERENCES: dict[str, Any] = {
    "duration": "5 batches", "global_batch_pairs": 8, "max_length": 64, "answer_max_tokens": 4, "heldout_prompts": 4,
    "evaluate_pairs": 4, "optimizer": {"learning_rate": 2.0e-2, "weight_decay": 0.0}, "lora": LORA,
    "checkpoint_every": "2 batches",
}  # fmt: skip
HERE = "tests.training.adapters.test_adapters"
RLHF: dict[str, Any] = {
    "rollouts": 3, "rollout_prompts": 8, "minibatch_answers": 4, "answers_per_prompt": 4, "algorithm": "grpo",
    "answer_max_tokens": 6, "max_prompt_tokens": 40, "heldout_prompts": 4, "kl_coef": 0.05,
    "optimizer": {"learning_rate": 2.0e-2, "weight_decay": 0.0}, "reward_functions": {f"{HERE}:vowels": 1.0},
    "unfinished_penalty": 0.0, "checkpoint_every": "1 batches", "lora": LORA,
}  # fmt: skip


def vowels(prompts: list[str], answers: list[str], responses: list[str]) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in answer)) for answer in answers]


def adapted(policy: PreTrainedModel, chat: Chat, run: Run) -> PreTrainedModel:
    """Adapters with weights that are not 0; the base is frozen."""
    adapting = Adapting("rlhf", LoraConfig.model_validate(LORA), 5, forget_untrained)
    adapting.adapt(policy, chat.tokenizer, run)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.normal_(0, 0.5, generator=generator)
    return policy


def test_dpo_beside_adapters_is_trl_s_with_peft(base_dir: Path, tmp_path: Path, run: Run) -> None:
    """trl's reference is the model with its adapters off, ours another network on the same memory."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    chat = Chat.load(base_dir)
    policy = _moved(load(base_dir).eval(), 5).requires_grad_(False)
    reference = sharing_frozen(policy)
    adapted(policy, chat, run)
    shared = {weight.data_ptr() for weight in policy.parameters() if not weight.requires_grad}
    assert {weight.data_ptr() for weight in reference.parameters()} == shared
    peft = PeftConfig(r=3, lora_alpha=6.0, target_modules=LORA["targets"], lora_dropout=0.0)
    peft_model = get_peft_model(_moved(load(base_dir).eval(), 5), peft)
    trainer = trl.DPOTrainer(
        model=peft_model, args=trl.DPOConfig(output_dir=str(tmp_path), **SILENT, beta=0.3),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4),
        processing_class=chat.tokenizer,
    )  # fmt: skip
    trainer.model.eval()
    # trl keeps the adapters that it was given as the reference: ours come in afterwards.
    learning = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    named = {name.replace(".default.weight", ""): weight for name, weight in peft_model.named_parameters()}
    pairs_of = {
        name: named[f"base_model.model.{name.replace('lora_a', 'lora_A').replace('lora_b', 'lora_B')}"]
        for name in learning
    }
    with torch.no_grad():
        for name, weight in learning.items():
            pairs_of[name].copy_(weight)
    sides = (chat.conversations(PROMPTS, answers) for answers in (CHOSEN, REJECTED))
    pairs = [Pair(*both) for both in zip(*sides, strict=True)]
    ids, attention, completion = _padded([*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)], chat)
    inputs = {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}
    expected = trainer._compute_loss(trainer.model, inputs, False)
    examples = [Example(number, pair) for number, pair in enumerate(pairs)]
    loss, _ = _ours(policy, reference, examples, chat, {"loss": "dpo", "beta": 0.3})
    assert (
        float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
        and abs(float(loss.detach()) - 0.6931) > 1e-3
    )
    expected.backward()
    loss.backward()
    assert not any(weight.grad is not None for weight in reference.parameters())
    for name, weight in learning.items():
        torch.testing.assert_close(weight.grad, pairs_of[name].grad, rtol=1e-4, atol=1e-6)


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}


def test_preferences_teach_adapters_alone_and_a_stop_changes_no_bit(
    base_dir: Path, preferences_dir: Path, tmp_path: Path, journal: Any, weights: Any
) -> None:
    config = PreferenceTuningConfig.model_validate(PREFERENCES)
    inputs = {"model": base_dir, "preferences": preferences_dir}
    unbroken = preference_tuning(config, inputs, tmp_path / "unbroken", Run(tmp_path / "unbroken.work", LAUNCH))
    assert unbroken.figures["margin_low"] > 0
    assert changed(weights(base_dir), weights(tmp_path / "unbroken")) == set(LORA["targets"])
    stopped = Run(
        tmp_path / "work", LAUNCH, is_cancelled=lambda: len(journal.metric("train/loss")) >= 3, journal=journal
    )
    with pytest.raises(Exception, match="cancelled"):
        preference_tuning(config, inputs, tmp_path / "out", stopped)
    preference_tuning(config, inputs, tmp_path / "out", Run(tmp_path / "work", LAUNCH))
    for name in ("model.safetensors", f"{FOLDER}/{WEIGHTS}"):
        continued, expected = load_file(tmp_path / "out" / name), load_file(tmp_path / "unbroken" / name)
        assert all(torch.equal(continued[key], expected[key]) for key in expected)
    again = measure_trained(
        config, inputs | {TRAINED: tmp_path / "unbroken"}, tmp_path / "again", Run(tmp_path, LAUNCH)
    )
    assert again.figures["margin"] == pytest.approx(unbroken.figures["margin"], rel=1e-4)


def test_preferences_beside_weights_in_4_bits(
    base_dir: Path, preferences_dir: Path, tmp_path: Path, weights: Any
) -> None:
    config = PreferenceTuningConfig.model_validate(PREFERENCES | {"lora": LORA | {"quantize": "nf4"}})
    inputs = {"model": base_dir, "preferences": preferences_dir}
    result = preference_tuning(config, inputs, tmp_path / "out", Run(tmp_path / "work", LAUNCH))
    assert changed(weights(base_dir), weights(tmp_path / "out")) == set(LORA["targets"])
    again = measure_trained(config, inputs | {TRAINED: tmp_path / "out"}, tmp_path / "again", Run(tmp_path, LAUNCH))
    assert again.figures["margin"] == pytest.approx(result.figures["margin"], rel=1e-4)
    assert result.figures["margin"] > 0


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_rlhf_teaches_adapters_alone_and_a_stop_changes_no_bit(
    quantize: str | None, base_dir: Path, instructions_dir: Path, tmp_path: Path, journal: Any, weights: Any
) -> None:
    config = RlhfConfig.model_validate(RLHF | {"lora": LORA | {"quantize": quantize}})
    inputs = {"model": base_dir, "prompts": instructions_dir}
    unbroken_run = Run(tmp_path / "unbroken.work", LAUNCH, journal=journal)
    unbroken = rlhf(config, inputs, tmp_path / "unbroken", unbroken_run)
    kl = journal.metric("rlhf/kl")
    assert kl[0] == pytest.approx(0, abs=1e-4) and abs(kl[-1]) > 1e-3, "the reference stays as it was"
    assert changed(weights(base_dir), weights(tmp_path / "unbroken")) == set(LORA["targets"])
    assert unbroken.figures["kl_to_sft"] > 0
    if quantize:
        return
    done = len(journal.metric("train/loss"))
    stopped = Run(
        tmp_path / "work", LAUNCH, is_cancelled=lambda: len(journal.metric("train/loss")) >= done + 3, journal=journal
    )
    with pytest.raises(Exception, match="cancelled"):
        rlhf(config, inputs, tmp_path / "out", stopped)
    rlhf(config, inputs, tmp_path / "out", Run(tmp_path / "work", LAUNCH))
    continued, expected = weights(tmp_path / "out"), weights(tmp_path / "unbroken")
    assert all(torch.equal(continued[name], expected[name]) for name in expected)


def test_ppo_s_value_function_learns_adapters_on_the_reward_model(
    base_dir: Path, instructions_dir: Path, tmp_path: Path, weights: Any, journal: Any
) -> None:
    reward = tmp_path / "reward"
    load_scorer(base_dir, CPU, seed=1).model.save_pretrained(reward)
    copy_beside(base_dir, reward)
    settings = {**RLHF, "algorithm": "ppo", "answers_per_prompt": 1, "reward_functions": {}, "rollouts": 2}
    inputs = {"model": base_dir, "prompts": instructions_dir, "reward_model": reward}
    run = Run(tmp_path / "work", LAUNCH, journal=journal)
    rlhf(RlhfConfig.model_validate(settings), inputs, tmp_path / "out", run)
    assert changed(weights(base_dir), weights(tmp_path / "out")) == set(LORA["targets"])
    losses = journal.metric("rlhf/value_loss")
    assert len(losses) == 4 and losses[0] > 0
