"""The figures at the end: bounded, spread over the text, shared by ranks; and the model is safe before them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.programs.ranked import pretrain_in_ranks
from training.config import PretrainConfig, RewardModelConfig, RlhfConfig, SftConfig
from training.data.open_shards import spread
from training.data.packed_shards import PackedShards
from training.data.shard_index import Split
from training.pretrain import pretrain
from training.reward_model import reward_model

SETTINGS: dict[str, Any] = {
    "model": {"family": "llama", "layers": 1, "width": 32, "heads": 2, "positions": 64},
    "duration": "10 batches",
    "global_batch_tokens": 256,
    "evaluate_tokens": 64,
    "evaluate_every": "1000 batches",
    "checkpoint_every": "1000 batches",
    "sample_prompts": (),
    "guard": {"enabled": False},
}


@pytest.fixture
def inputs(mixed_shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": mixed_shards_dir, "tokenizer": tokenizer_dir}


def test_a_spread_reaches_both_ends_and_takes_no_sequence_twice() -> None:
    for count in range(1, 40):
        for limit in range(1, 45):
            numbers = spread(count, limit)
            assert len(set(numbers.tolist())) == len(numbers) == min(count, limit)
            gaps = np.diff([*numbers.tolist(), count])
            assert numbers[0] == 0 and gaps.max() - gaps.min() <= 1


@pytest.mark.long
def test_the_final_figures_read_no_more_than_their_bound(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[str, list[int]] = {"train": [], "validation": []}
    item = PackedShards.__getitem__

    def counted(self: PackedShards, at: Any) -> Any:
        if not self.shuffle:
            read[Path(self.streams[0].local).name].append(int(at))
        return item(self, at)

    monkeypatch.setattr(PackedShards, "__getitem__", counted)
    config = PretrainConfig.model_validate({**SETTINGS, "validation_tokens": 10 * 32})
    run = Run(tmp_path / "work", LaunchConfig(device="cpu", threads=1, precision="fp32"))
    figures = pretrain(config, inputs, tmp_path / "model", run).figures
    assert figures["validation_tokens"] == 10 * 32
    held = Split.read(inputs["shards"] / "validation").sequences
    assert held > 20, "more than is read"
    # Ten for the figures, two for the looks while training, and the first one's length.
    assert set(spread(held, 10).tolist()) <= set(read["validation"]) and len(read["validation"]) <= 10 + 2 + 2
    # Once for the unigrams, once for the bigrams.
    assert max(read["train"]) == 9 and len(read["train"]) <= 2 * 10 + 2


@dataclass(frozen=True)
class Keep:
    """Leaves what the measurement of a rank found in a file, with how many sequences it scored itself."""

    path: Path

    def __call__(self, rank: int) -> None:
        from training import pretrain as module

        measure = module.measure

        def kept(*given: Any) -> Any:
            baselines, scored = given[4], []
            losses = baselines.losses

            def counted(packed: Any, labels: Any) -> Any:
                scored.append(len(packed))
                return losses(packed, labels)

            baselines.losses = counted
            found = measure(*given)
            told = {"losses": found.losses.tolist(), "scored": sum(scored), "labels": found.labels.tolist()}
            figures = {"by_source": found.by_source, "baselines": found.baselines}
            Path(f"{self.path}.{rank}").write_text(json.dumps({**told, **figures}))
            return found

        module.measure = kept


def test_ranks_share_the_measurement_and_find_what_one_finds(inputs: dict[str, Path], tmp_path: Path) -> None:
    """17 sequences are no even share of two ranks; ranks with shards of the model compute in step."""
    settings = {**SETTINGS, "duration": "2 batches", "validation_tokens": 17 * 32}
    found: dict[str, list[Any]] = {}
    for name, count, launch in (("one", 1, {}), ("ddp", 2, {}), ("fsdp", 2, {"sharding": "fsdp"})):
        keep = Keep(tmp_path / f"{name}.found")
        pretrain_in_ranks(count, settings, inputs, tmp_path / name, launch=launch, prepare=keep)
        found[name] = [json.loads(Path(f"{keep.path}.{rank}").read_text()) for rank in range(count)]
    [one] = found["one"]
    assert one["scored"] == 17 and len(one["by_source"]) == 3 and set(one["baselines"]) == {"unigram", "bigram"}
    for name in ("ddp", "fsdp"):
        assert sorted(rank["scored"] for rank in found[name]) == [8, 9], "each its part"
        for rank in found[name]:
            assert rank["labels"] == one["labels"]
            assert rank["losses"] == pytest.approx(one["losses"], rel=1e-3)
            for key in ("by_source", "baselines"):
                assert rank[key] == pytest.approx(one[key], rel=1e-3)
    texts = {(tmp_path / name / "trained_sequences.json").read_text() for name in found}
    assert len(texts) == 1, "what was trained on does not hang on the ranks"


PAIRS: dict[str, Any] = {"max_length": 40, "duration": "2 batches", "schedule": {"warmup": "1 batches"}}
STAGES: dict[str, tuple[Any, str]] = {
    "pretrain": (PretrainConfig.model_validate(SETTINGS), "measure"),
    "sft": (SftConfig.model_validate({**PAIRS, "answer_max_tokens": 8, "global_batch_examples": 4}), "_compared"),
    "reward_model": (RewardModelConfig.model_validate({**PAIRS, "global_batch_pairs": 4}), "score_pairs"),
    "rlhf": (
        RlhfConfig.model_validate(
            {
                "rollouts": 1,
                "rollout_prompts": 4,
                "minibatch_answers": 4,
                "max_prompt_tokens": 60,
                "answer_max_tokens": 4,
            }
        ),
        "rl.heldout.kl_of",
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_measurement_that_fails_costs_no_training(
    stage: str,
    inputs: dict[str, Path],
    base_dir: Path,
    instructions_dir: Path,
    preferences_dir: Path,
    tmp_path: Path,
    journal: Any,
    weights: Callable[[Path], dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fails once, after the training; the model lies there by then, and the next run only measures."""
    config, measuring = STAGES[stage]
    module = importlib.import_module(f"training.{stage}")
    elsewhere, _, measuring = measuring.rpartition(".")
    patched_module = importlib.import_module(f"training.{elsewhere}") if elsewhere else module
    given = {
        **inputs,
        "model": base_dir,
        "reward_model": base_dir,
        "instructions": instructions_dir,
        "prompts": instructions_dir,
        "preferences": preferences_dir,
    }
    if stage == "rlhf":  # takes any other input for one more reward model
        given = {name: given[name] for name in ("model", "reward_model", "prompts")}
        given["reward_model"] = tmp_path / "reward_model"
        scorer = RewardModelConfig.model_validate({**PAIRS, "global_batch_pairs": 4})
        of_scorer = {"model": base_dir, "preferences": preferences_dir}
        reward_model(
            scorer, of_scorer, given["reward_model"], Run(tmp_path / "scorer.work", LaunchConfig(device="cpu"))
        )
    launch = LaunchConfig(device="cpu", threads=1, precision="fp32")
    measure = getattr(patched_module, measuring)

    def fails(*told: Any, **options: Any) -> Any:
        if not (tmp_path / "first" / "model.safetensors").exists():
            return measure(*told, **options)  # before the model is whole
        raise MemoryError("the measurement failed")

    with monkeypatch.context() as patched:
        patched.setattr(patched_module, measuring, fails)
        with pytest.raises(MemoryError):
            getattr(module, stage)(config, given, tmp_path / "first", Run(tmp_path / "work", launch))
    again = Run(tmp_path / "work", launch, journal=journal)
    result = getattr(module, stage)(config, given, tmp_path / "second", again)
    batches = int(result.figures["batches"])
    assert f"continuing {stage} at batch {batches} of {batches}" in journal.events()
    assert not [name for line in journal.lines for name in line.get("values", {}) if name.startswith("train/")]
    first, second = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
