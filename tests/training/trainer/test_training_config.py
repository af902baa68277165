"""Training configs: durations, sizes, and mistakes that are told before anything runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from training.config import ModelConfig, PretrainConfig, RlhfConfig, SftConfig
from training.config.batch_size import BatchSizeRampup
from training.config.duration import parse_duration
from training.config.presets import MIXTURES, PRESETS
from training.config.recipes import RECIPES


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("300 batches", "300 batches"),
        ("300ba", "300 batches"),
        ("2_000_000 tokens", "2000000 tokens"),
        ("2000000tok", "2000000 tokens"),
        ("2,000,000 tokens", "2000000 tokens"),
        ("1 epoch", "1 epochs"),
        ("1.5ep", "1.5 epochs"),
        ("3 %", "3 %"),
    ],
)
def test_durations_say_their_unit(text: str, canonical: str) -> None:
    assert str(parse_duration(text)) == canonical


@pytest.mark.parametrize(
    "text",
    ["300", "batches", "3 hours", "-1 batches", "1.5 batches", "0 batches", "1 %", "1,5 epochs", "1,5000 tokens"],
)
def test_a_length_without_a_unit_or_size_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="expected"):
        PretrainConfig(duration=text)


def test_two_spellings_of_a_duration_are_one_config() -> None:
    assert PretrainConfig(duration="300ba") == PretrainConfig(duration="300 batches")


def test_a_duration_in_batches() -> None:
    assert parse_duration("2_000_000 tokens").batches(batch_tokens=16_384, epoch_batches=50) == 123
    assert parse_duration("3 epochs").batches(batch_tokens=16_384, epoch_batches=50) == 150
    assert parse_duration("2 %").batches(batch_tokens=1, epoch_batches=1, whole=120) == 3
    # As written, where floats have a little more: 0.07 × 100, 1.1 × 110.
    assert parse_duration("7 %").batches(batch_tokens=1, epoch_batches=1, whole=100) == 7
    assert parse_duration("1.1 epochs").batches(batch_tokens=1, epoch_batches=110) == 121
    assert BatchSizeRampup(2, 4, 8, 400).length(parse_duration("1.1 epochs"), 4) == 102 + 10


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_their_published_sizes(name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    from training.model.models import hf_config

    published = PRESETS[name]
    kinds = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}
    special = {"eos_token_id": 1, "pad_token_id": 0} if published.family in kinds else {}
    with torch.device("meta"):
        config = hf_config(ModelConfig(preset=name), published.vocabulary, special)
        model = kinds.get(published.family, AutoModelForCausalLM).from_config(config)
    parameters = sum(weight.numel() for weight in model.parameters())
    # GPT-3's table is rounded, and counts no positions; of the others the weights were released.
    rounded = published.parameters % 10_000 == 0
    assert parameters == pytest.approx(published.parameters, rel=0.02 if rounded else 0)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_have_their_published_sizes_and_may_be_changed(name: str) -> None:
    from transformers import AutoModelForCausalLM

    from training.model.models import hf_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(ModelConfig(preset=name), MIXTURES[name].vocabulary, {}))
    assert sum(weight.numel() for weight in model.parameters()) == MIXTURES[name].parameters
    smaller = ModelConfig.model_validate({"preset": name, "transformers": {"num_hidden_layers": 2}})
    assert smaller.transformers == {**MIXTURES[name].config, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"preset": "mixtral-8x7b", "layers": 2}, "`transformers` alone"),
        ({"family": "llama", "layers": 2, "width": 100, "heads": 3}, "heads to divide width"),
        ({"preset": "gpt-125m", "kv_heads": 4}, "kv_heads only with the families llama and qwen3"),
        ({"family": "llama", "layers": 2, "width": 64, "heads": 4, "kv_heads": 3}, "kv_heads to divide heads"),
        ({"preset": "gpt-2t"}, "expected one of gpt-125m"),
        ({"family": "llama"}, "layers, width, heads missing"),
        ({"transformers": {"hidden_size": 64}}, "model_type"),
        ({"transformers": {"model_type": "llama"}, "preset": "gpt-125m"}, "not both"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(config: dict[str, object], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        ModelConfig.model_validate(config)


def test_batch_positions_and_vocabulary_are_held_against_the_shards() -> None:
    model = ModelConfig(transformers={"model_type": "llama", "max_position_embeddings": 128, "vocab_size": 100})
    problems = PretrainConfig(model=model, global_batch_tokens=1000).problems(sequence_length=256, vocab_size=4096)
    assert [problem.code for problem in problems] == ["not_divisible", "too_few_positions", "vocabulary_too_small"]


def test_minibatches_divide_a_rollout() -> None:
    with pytest.raises(ValidationError, match="minibatch_answers to divide rollout_prompts"):
        RlhfConfig(rollout_prompts=100, minibatch_answers=64)


def test_what_a_group_leaves_out_is_as_its_stage_has_it() -> None:
    sft = SftConfig.model_validate({"optimizer": {"gradient_clip": 0.5}, "schedule": {"decay": "wsd"}})
    assert (sft.optimizer.learning_rate, sft.optimizer.weight_decay) == (1.0e-5, 0.0)
    assert (sft.schedule.warmup, sft.schedule.final_share) == ("3 %", 0.0)
    ppo = RlhfConfig.model_validate({"schedule": {"warmup": "5 %"}, "guard": {"window": 50}})
    assert ppo.schedule.decay == "constant" and not ppo.guard.enabled


def test_configs_import_nothing_heavy() -> None:
    program = "import sys, training.config; print({'torch', 'composer', 'transformers', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "set()"


def test_a_model_may_be_described_by_a_folder_with_its_config(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=99).save_pretrained(
        tmp_path / "elsewhere"
    )
    (tmp_path / "here").mkdir()
    found = [
        ModelConfig.model_validate({"transformers": given}, context={"folder": tmp_path / "here"}).transformers
        for given in ("../elsewhere", str(tmp_path / "elsewhere" / "config.json"))
    ]
    assert found[0] == found[1]
    assert found[0] is not None and found[0]["hidden_size"] == 64 and "vocab_size" not in found[0]
    with pytest.raises(ValidationError, match=r"folder with config\.json"):
        ModelConfig.model_validate({"transformers": str(tmp_path / "nowhere")})


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_whole_pretraining(name: str) -> None:
    config = PretrainConfig.model_validate({"recipe": name})
    assert not config.problems(2048, 50_257)
    written = PretrainConfig.model_validate(RECIPES[name])
    assert written.model_dump(exclude={"recipe"}) == config.model_dump(exclude={"recipe"})


@pytest.mark.parametrize(
    ("name", "vocabulary", "published"), [("gpt-neox-20b", 50_432, 20_554_568_208), ("opt-175b", 50_272, 175e9)]
)
def test_recipes_of_other_architectures_have_their_published_sizes(
    name: str, vocabulary: int, published: float
) -> None:
    from transformers import AutoModelForCausalLM

    from training.model.models import hf_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(PretrainConfig(recipe=name).model, vocabulary, {}))
    parameters = sum(weight.numel() for weight in model.parameters())
    assert parameters == pytest.approx(published, rel=0.01 if published == 175e9 else 1e-6)


def test_what_is_written_replaces_the_recipe_s_key_by_key() -> None:
    config = PretrainConfig.model_validate(
        {"recipe": "gpt3-1.3b", "optimizer": {"weight_decay": 0.05}, "batch_warmup": None, "model": {"positions": 1024}}
    )
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (2.0e-4, 0.05)
    assert config.batch_warmup is None and config.schedule.final_share == 0.1
    assert config.model.shape().positions == 1024 and config.model.preset == "gpt-1.3b"
    other = PretrainConfig.model_validate({"recipe": "opt-175b", "model": {"preset": "llama-nano"}})
    assert other.model == ModelConfig(preset="llama-nano") and other.optimizer.learning_rate == 1.2e-4
    with pytest.raises(ValidationError, match="gpt3-175b"):
        PretrainConfig.model_validate({"recipe": "gpt4"})
