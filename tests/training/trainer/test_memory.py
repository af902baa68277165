"""What saves memory leaves the losses as they are: microbatches, found or set, recomputed activations, offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.programs.ranked import pretrain_in_ranks
from training.config import PreferenceTuningConfig, PretrainConfig, RewardModelConfig, SftConfig
from training.preference_tuning import preference_tuning
from training.pretrain import pretrain
from training.reward_model import reward_model
from training.sft import sft
from training.trainer.microbatch import largest_that_fits

PRETRAIN: dict[str, Any] = {
    "model": {"family": "llama", "layers": 3, "width": 32, "heads": 2, "positions": 64, "dropout": 0.1},
    "duration": "5 batches",
    "global_batch_tokens": 256,
    "optimizer": {"learning_rate": 1.0e-2},
    "evaluate_every": "1000 batches",
}
SFT: dict[str, Any] = {
    "duration": "4 batches",
    "global_batch_examples": 8,
    "max_length": 64,
    "optimizer": {"learning_rate": 1.0e-3},
    "answer_max_tokens": 2,
    "answers_limit": 2,
    "heldout_limit": 2,
}


@pytest.fixture
def inputs(shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": shards_dir, "tokenizer": tokenizer_dir}


def _run(folder: Path, journal: Any, **launch: Any) -> Run:
    journal.lines.clear()
    config = LaunchConfig(**{"device": "cpu", "threads": 1, "precision": "fp32", **launch})
    return Run(folder, config, journal=journal)


def _losses(told: list[dict[str, Any]]) -> list[float]:
    return [line["values"]["train/loss"] for line in told if "train/loss" in line.get("values", {})]


def test_microbatches_leave_the_loss_with_padding_and_masks(
    base_dir: Path, instructions_dir: Path, tmp_path: Path, journal: Any
) -> None:
    """Prompts and padding bear no loss, so microbatches have different numbers of tokens that do."""
    found = {}
    for microbatch in (1, 2, 4, 8):
        run = _run(tmp_path / f"{microbatch}.work", journal, microbatch=microbatch)
        sft(
            SftConfig.model_validate(SFT),
            {"model": base_dir, "instructions": instructions_dir},
            tmp_path / str(microbatch),
            run,
        )
        found[microbatch] = journal.metric("train/loss")
        assert len(found[microbatch]) == 4
    for microbatch in (1, 2, 4):
        assert found[microbatch] == pytest.approx(found[8], rel=1e-5)


ACCUMULATED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sft": (sft, SftConfig, {**SFT, "packing": True, "global_batch_examples": 4, "watched_prompts": 0}),
    "preference_tuning": (
        preference_tuning, PreferenceTuningConfig,
        {"global_batch_pairs": 8, "max_length": 64, "answer_max_tokens": 2, "heldout_limit": 2, "heldout_prompts": 2},
    ),
    "reward_model": (reward_model, RewardModelConfig, {"global_batch_pairs": 8, "max_length": 64, "heldout_limit": 2}),
}  # fmt: skip


@pytest.mark.parametrize("stage", ACCUMULATED)
def test_accumulated_gradients_are_those_of_one_batch(
    stage: str, base_dir: Path, instructions_dir: Path, preferences_dir: Path, tmp_path: Path, journal: Any
) -> None:
    """To fp32's rounding: three examples at once, of ragged lengths, which leaves a part of another size at the end. An
    epsilon of 1 lets the weights move by what their gradients are."""
    train, config, settings = ACCUMULATED[stage]
    optimizer = {"learning_rate": 1.0, "weight_decay": 0.0, "eps": 1.0, "gradient_clip": 1e3}
    schedule = {"warmup": "0 batches", "final_share": 1.0}
    settings = {**settings, "duration": "1 batch", "optimizer": optimizer, "schedule": schedule}
    inputs = {"model": base_dir, "instructions": instructions_dir, "preferences": preferences_dir}
    for microbatch in (3, 8):
        run = _run(tmp_path / f"{microbatch}.work", journal, microbatch=microbatch)
        train(config.model_validate(settings), inputs, tmp_path / str(microbatch), run)
    parts, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("3", "8"))
    start = load_file(base_dir / "model.safetensors")
    assert max(float((whole[name] - start[name]).abs().max()) for name in start.keys() & whole.keys()) > 0.01
    for name, weight in whole.items():
        torch.testing.assert_close(parts[name], weight, rtol=0, atol=1e-6)


def test_checkpointed_activations_leave_the_loss(inputs: dict[str, Path], tmp_path: Path, journal: Any) -> None:
    """To the bit, dropout included: the backward pass draws again what the forward pass drew."""
    found = {}
    for how in ("none", "selective", "full"):
        run = _run(tmp_path / f"{how}.work", journal, recompute=how)
        pretrain(PretrainConfig.model_validate(PRETRAIN), inputs, tmp_path / how, run)
        found[how] = journal.metric("train/loss")
    assert found["selective"] == found["full"] == found["none"]


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputing_keeps_fewer_activations(how: str) -> None:
    from training.model.blocks import checkpoint_activations
    from training.model.models import build, hf_config

    config = hf_config(PretrainConfig.model_validate(PRETRAIN).model, 320, {})

    def kept_bytes(how: str) -> int:
        model = build(config, seed=1)
        checkpoint_activations(model, how)
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(input_ids=torch.zeros(8, 64, dtype=torch.long)).logits.sum()
        return sum(kept.values())

    assert kept_bytes(how) < 0.9 * kept_bytes("none")


@pytest.mark.parametrize("launch", [{"recompute": "full", "microbatch": 2}, {"offload": True, "microbatch": 2}])
def test_sharded_ranks_that_save_memory_leave_the_loss(
    inputs: dict[str, Path], tmp_path: Path, journal: Any, launch: dict[str, Any]
) -> None:
    settings = PRETRAIN | {"model": PRETRAIN["model"] | {"dropout": 0.0}}
    pretrain(PretrainConfig.model_validate(settings), inputs, tmp_path / "one", _run(tmp_path / "work", journal))
    told = pretrain_in_ranks(2, settings, inputs, tmp_path / "two", launch={"sharding": "fsdp", **launch})
    assert _losses(told) == pytest.approx(journal.metric("train/loss"), rel=1e-4)


def _out_of_memory(rank: int) -> None:
    """Rank 1 has memory for 2 sequences at once, rank 0 for all."""
    import training.trainer.microbatch
    from training.train_modules.language_model import LanguageModel

    training.trainer.microbatch.can_be_tried = lambda device: True
    forward = LanguageModel.forward

    def limited(self: LanguageModel, batch: dict[str, torch.Tensor]) -> Any:
        if rank == 1 and self.training and len(batch["input_ids"]) > 2:
            raise torch.OutOfMemoryError("out of memory, as a small device would say")
        return forward(self, batch)

    LanguageModel.forward = limited  # type: ignore[method-assign]


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_all_ranks_take_what_fits_the_smallest(
    inputs: dict[str, Path], tmp_path: Path, journal: Any, sharding: str
) -> None:
    settings = PRETRAIN | {"model": PRETRAIN["model"] | {"dropout": 0.0}}
    pretrain(PretrainConfig.model_validate(settings), inputs, tmp_path / "one", _run(tmp_path / "work", journal))
    told = pretrain_in_ranks(
        2, settings, inputs, tmp_path / "two", launch={"sharding": sharding}, prepare=_out_of_memory
    )
    messages = [line["message"] for line in told if line["kind"] == "event"]
    assert messages == ["2 of 4 examples at once fit the memory of each device"]
    assert _losses(told) == pytest.approx(journal.metric("train/loss"), rel=1e-4)


def test_a_device_without_room_for_one_example_is_told() -> None:
    tried = []

    def compute(count: int) -> None:
        tried.append(count)
        raise torch.OutOfMemoryError

    with pytest.raises(StageError, match="out of memory with 1 examples") as refused:
        largest_that_fits(6, compute, lambda: None)
    assert tried == [6, 3, 1]
    assert "recompute" in refused.value.problems[0].fix


@pytest.mark.parametrize("fails", [False, True], ids=["there is room", "there is none"])
def test_a_trial_takes_the_room_of_what_learns_alone(
    fails: bool, base_dir: Path, instructions_dir: Path, tmp_path: Path, journal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of frozen weights beside adapters a step has no moments; where even this room is not there, the stage says so."""
    taken, real = [0], torch.empty_like

    def empty_like(tensor: torch.Tensor, **given: Any) -> torch.Tensor:
        if isinstance(tensor, torch.nn.Parameter):
            if fails:
                raise torch.OutOfMemoryError("out of memory, as a small device would say")
            taken[0] += tensor.numel()
        return real(tensor, **given)

    def tune() -> None:
        config = SftConfig.model_validate(SFT | {"lora": {"rank": 1}, "duration": "1 batches"})
        sft(config, {"model": base_dir, "instructions": instructions_dir}, tmp_path / "out", _run(tmp_path, journal))

    monkeypatch.setattr("training.trainer.microbatch.can_be_tried", lambda device: True)
    monkeypatch.setattr(torch, "empty_like", empty_like)
    if fails:
        with pytest.raises(StageError, match="out of memory with 1 examples"):
            tune()
        return
    tune()
    (adapters,) = (text for text in journal.events() if text.startswith("sft learns"))
    assert taken[0] == 2 * int(adapters.split()[2].replace(",", ""))
