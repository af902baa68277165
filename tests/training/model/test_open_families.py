"""Open models from a downloaded folder to an exported one: each family in its real form, with small random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from evaluation.release.export import card_of, export
from evaluation.results.artifacts import Artifact
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.chat_templates import FAMILIES as TEMPLATES
from tests.support.chat_templates import tokenizer_in
from tests.support.open_models import SHAPES
from training.adopt import import_model
from training.chat.base import Chat
from training.chat.model_template import TemplateChat
from training.config import BaseModelConfig, PreferenceTuningConfig, RewardModelConfig, RlhfConfig, SftConfig
from training.generation.session import answer
from training.preference_tuning import preference_tuning
from training.reward_model import reward_model
from training.rlhf import rlhf
from training.sft import sft

FAST = ("gpt-oss",)
ASKED = [{"role": "user", "content": "What does sum_list do?"}]
CPU = LaunchConfig(device="cpu", threads=1, trainer="native")
TRAINING: dict[str, Any] = {"duration": "2 batches", "max_length": 128, "optimizer": {"learning_rate": 1.0e-3}}
ANSWERS = {"answer_max_tokens": 4, "heldout_limit": 4}


def length(prompts: Sequence[str], answers: Sequence[str], references: Sequence[str]) -> list[float]:
    return [float(len(one)) for one in answers]


def download(family: str, folder: Path) -> None:
    """A folder as the hub has it: bf16, rows that belong to no token, and a generation config."""
    template, padding, model_type, values = SHAPES[family]
    tokenizer = tokenizer_in(template)
    tokenizer.pad_token = padding
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 256, "vocab_size": len(tokenizer) + 9 * bool(padding),
    }  # fmt: skip
    special = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    torch.manual_seed(5)
    config = AutoConfig.for_model(model_type, **sizes, **special, **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=[tokenizer.eos_token_id], do_sample=True, top_p=0.9)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "LICENSE").write_text("Use it well.\n")
    (folder / "README.md").write_text("---\nlicense: other\nlicense_name: tiny-community\n---\n# A model\n")


def logits_of(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([list(ids)])).logits
    return found


@pytest.mark.usefixtures("loaded_by_a_fork")
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow if name in FAST else pytest.mark.long) for name in SHAPES]
)
def test_an_open_model_is_adopted_tuned_aligned_and_exported(
    family: str, tmp_path: Path, instructions_dir: Path, preferences_dir: Path
) -> None:
    """Risk: a family whose config, template or weights one of the stages reads otherwise than transformers does."""

    def made(name: str, stage: Any, config: Any, inputs: Mapping[str, Path]) -> Path:
        (tmp_path / name).mkdir()
        figures = stage(config, inputs, tmp_path / name, Run(tmp_path / f"{name}.work", CPU)).figures
        assert all(value == value for value in figures.values())
        assert AutoTokenizer.from_pretrained(tmp_path / name).chat_template == template
        return tmp_path / name

    template = TEMPLATES[SHAPES[family][0]][0]
    download(family, tmp_path / "downloaded")
    base = made("base_model", import_model, BaseModelConfig(path=str(tmp_path / "downloaded")), {})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "downloaded")
    ids = tokenizer("The cat saw the house in the city; why?").input_ids
    adopted = logits_of(base, ids)
    assert torch.equal(adopted[..., : len(tokenizer)], logits_of(tmp_path / "downloaded", ids)[..., : len(tokenizer)])

    tuning = TRAINING | ANSWERS | {"global_batch_examples": 4, "answers_limit": 2, "watched_prompts": 0}
    learning = {"model": base, "instructions": instructions_dir}
    tuned = made("sft", sft, SftConfig.model_validate(tuning), learning)
    adapted = made("lora", sft, SftConfig.model_validate(tuning | {"lora": {"rank": 2, "alpha": 4}}), learning)
    pairs = TRAINING | {"global_batch_pairs": 4, "heldout_limit": 4}
    comparing = {"model": tuned, "preferences": preferences_dir}
    aligned = made(
        "dpo", preference_tuning,
        PreferenceTuningConfig.model_validate(pairs | {"answer_max_tokens": 4, "heldout_prompts": 2}), comparing,
    )  # fmt: skip
    judge = made("reward_model", reward_model, RewardModelConfig.model_validate(pairs), comparing)
    rounds = {
        "rollouts": 1, "rollout_prompts": 4, "answers_per_prompt": 2, "minibatch_answers": 4, "answer_max_tokens": 4,
        "max_prompt_tokens": 120, "heldout_prompts": 2, "reward_functions": {f"{__name__}:length": 1.0},
        "optimizer": {"learning_rate": 1.0e-3},
    }  # fmt: skip
    rewarded = made(
        "rlhf", rlhf, RlhfConfig.model_validate(rounds),
        {"model": adapted, "prompts": instructions_dir, "reward_model": judge},
    )  # fmt: skip
    for folder in (tuned, adapted, aligned, rewarded):
        assert not torch.equal(logits_of(folder, ids), adopted)

    # The snippets of elsewhere.py run in a new process, and logits are equal.
    model = Artifact("rlhf", rewarded, None)
    loaded = export(model, card_of(model, None)[0], tmp_path / "exported")
    assert loaded.chat_template and loaded.checks[-1] == 'pipeline("text-generation", model=folder)'
    assert (tmp_path / "exported" / "LICENSE").read_text() == "Use it well.\n"
    assert "license: other\nlicense_name: tiny-community\n" in (tmp_path / "exported" / "README.md").read_text()
    there = AutoTokenizer.from_pretrained(tmp_path / "exported")
    chat = Chat.load(tmp_path / "exported")
    assert isinstance(chat, TemplateChat)
    [prompt] = chat.ask([ASKED])
    told = there.apply_chat_template(ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert told["input_ids"][0].tolist() == prompt
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").generate(
        **told, max_new_tokens=6, do_sample=False
    )
    pieces = list(answer(tmp_path / "exported", ASKED, 6, 0.0))
    assert "".join(pieces).strip() == chat.decode(written[0, len(prompt) :].tolist()).strip()
    ends = json.loads((tmp_path / "exported" / "generation_config.json").read_text())["eos_token_id"]
    assert {chat.end, tokenizer.eos_token_id} <= set(ends)
