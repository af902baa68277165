"""The native loop against Composer's: the same bits, figures, corrections and checkpoints."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.errors import Cancelled
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.points import points_of
from tests.support.programs.ranked import pretrain_in_ranks
from training import pretrain as pretrain_module
from training.config import PretrainConfig, RewardModelConfig, RlhfConfig
from training.core.callbacks import Callback
from training.core.train_state import TrainState
from training.pretrain import pretrain
from training.reward_model import reward_model
from training.rlhf import rlhf

Weights = Callable[[Path], dict[str, torch.Tensor]]
BATCHES = 40
LENGTH = 32
SETTINGS: dict[str, Any] = {
    "model": {"family": "llama", "layers": 2, "width": 32, "heads": 2, "positions": 64, "dropout": 0.1},
    "duration": f"{BATCHES} batches",
    "global_batch_tokens": 8 * LENGTH,
    "batch_warmup": {"first_tokens": 4 * LENGTH, "over_tokens": 10 * 8 * LENGTH},
    "optimizer": {"learning_rate": 1.0e-2},
    "schedule": {"warmup": "5 batches"},
    "evaluate_every": "15 batches",
    "checkpoint_every": "7 batches",
    "guard": {"rollback_every": 10, "healthy_after": 5, "window_least": 10},
}


class NotANumber(Callback):
    """Puts NaN into the loss of one batch."""

    def before_backward(self, state: TrainState) -> None:
        if state.clock.batch == 26:
            assert isinstance(state.loss, torch.Tensor)
            state.loss.mul_(math.nan)


@pytest.fixture
def train(
    shards_dir: Path, tokenizer_dir: Path, tmp_path: Path, journal: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[dict[str, Any]]]:
    """Pretrains by one of the loops, into `tmp_path`/name, with a fault built in; what was told. The same name
    continues what is there. until: it is told to stop after so many batches."""
    fit = pretrain_module.fit
    monkeypatch.setattr(
        pretrain_module, "fit", lambda *given, **named: fit(*given[:-1], [NotANumber(), *given[-1]], **named)
    )

    def train(name: str, trainer: Any, until: int | None = None, **launch: Any) -> list[dict[str, Any]]:
        journal.lines.clear()
        run = Run(
            tmp_path / f"{name}.work",
            LaunchConfig(**{"device": "cpu", "threads": 1, "microbatch": 3, "trainer": trainer, **launch}),
            journal=journal,
            is_cancelled=lambda: until is not None and len(journal.metric("train/loss")) >= until,
        )
        with monkeypatch.context() as patched:
            if trainer == "native":
                patched.setitem(sys.modules, "composer", None)  # whoever imports it fails
            inputs = {"shards": shards_dir, "tokenizer": tokenizer_dir}
            pretrain(PretrainConfig.model_validate(SETTINGS), inputs, tmp_path / name, run)
        return list(journal.lines)

    return train


def _told(lines: list[dict[str, Any]]) -> str:
    """Points and events as JSON, in which NaN equals itself."""
    return json.dumps([points_of(lines), [line["message"] for line in lines if line["kind"] == "event"]])


def _same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.long)])
def test_both_loops_end_with_the_same_bits(
    train: Callable[..., Any], tmp_path: Path, weights: Weights, precision: str
) -> None:
    """Dropout, batches that grow, microbatches of unequal size, and a correction of the guard."""
    told = {trainer: _told(train(trainer, trainer, precision=precision)) for trainer in ("composer", "native")}
    assert "loss nan at batch 26" in told["native"]
    assert told["native"] == told["composer"]
    assert _same(weights(tmp_path / "native"), weights(tmp_path / "composer"))


def test_a_checkpoint_of_one_is_continued_by_the_other(
    train: Callable[..., Any], tmp_path: Path, weights: Weights
) -> None:
    """From within the first epoch, from before the guard's correction, and from after it."""
    train("whole", "composer", precision="fp32")
    for number, trainer in enumerate(("native", "composer", "native")):
        with pytest.raises(Cancelled):
            train("moved", trainer, until=9, precision="fp32")
        saved = max((tmp_path / "moved.work" / "checkpoints").glob("ba*"))
        assert int(saved.name[2:]) >= 9 * number
    told = train("moved", "composer", precision="fp32")
    assert any("continuing pretrain" in line.get("message", "") for line in told)
    assert _same(weights(tmp_path / "moved"), weights(tmp_path / "whole"))


@pytest.mark.parametrize("sharding", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_ranks_of_both_loops_end_with_the_same_bits(
    shards_dir: Path, tokenizer_dir: Path, tmp_path: Path, weights: Weights, sharding: str
) -> None:
    inputs = {"shards": shards_dir, "tokenizer": tokenizer_dir}
    for trainer in ("composer", "native"):
        launch = {"trainer": trainer, "sharding": sharding, "microbatch": 3}
        pretrain_in_ranks(2, SETTINGS | {"duration": "8 batches"}, inputs, tmp_path / trainer, launch=launch)
    assert _same(weights(tmp_path / "native"), weights(tmp_path / "composer"))


def test_ppo_by_both_loops_ends_with_the_same_bits(
    base_dir: Path, preferences_dir: Path, tmp_path: Path, journal: Any, weights: Weights
) -> None:
    """Its data are made by the policy as it is at each epoch's start; a run that was stopped continues there."""
    launch: dict[str, Any] = {"device": "cpu", "threads": 1, "precision": "fp32", "microbatch": 3}
    scorer = RewardModelConfig.model_validate({"duration": "2 batches", "global_batch_pairs": 8, "max_length": 64})
    inputs = {"model": base_dir, "preferences": preferences_dir}
    reward_model(scorer, inputs, tmp_path / "reward", Run(tmp_path / "reward.work", LaunchConfig(**launch)))
    config = RlhfConfig.model_validate(
        {
            "rollouts": 3,
            "rollout_prompts": 8,
            "minibatch_answers": 4,
            "epochs": 2,
            "max_prompt_tokens": 40,
            "answer_max_tokens": 8,
            "checkpoint_every": "1 epochs",
        }
    )
    inputs = {"model": base_dir, "reward_model": tmp_path / "reward", "prompts": preferences_dir}
    told = {}
    for trainer, stops in (("composer", []), ("native", [6])):
        journal.lines.clear()

        def stop(stops: list[int] = stops) -> bool:
            return len(journal.metric("train/loss")) in stops

        work = tmp_path / f"{trainer}.work"
        run = Run(work, LaunchConfig(**launch, trainer=trainer), journal=journal, is_cancelled=stop)
        if stops:
            with pytest.raises(Cancelled):
                rlhf(config, inputs, tmp_path / trainer, run)
            # Of the round before, and where it was stopped within the second.
            kept = sorted(path.name for path in (work / "checkpoints").glob("ba*"))
            assert kept == ["ba000000004", "ba000000006"]
            stops.clear()
        rlhf(config, inputs, tmp_path / trainer, run)
        told[trainer] = journal.metric("rlhf/policy_loss")
    assert told["native"][-6:] == told["composer"][6:], "from where it was stopped on"
    assert _same(weights(tmp_path / "native"), weights(tmp_path / "composer"))
