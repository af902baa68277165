"""Batch-size warm-up: the sizes follow the formula, and a training that was stopped while batches grew goes on so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.errors import Cancelled, StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.programs.ranked import pretrain_in_ranks
from training.config import PretrainConfig, ScheduleConfig
from training.config.batch_size import BatchSizeRampup
from training.config.duration import parse_duration
from training.pretrain import pretrain
from training.trainer import fit
from training.trainer.schedules import LearningRateSchedule

Weights = Callable[[Path], dict[str, torch.Tensor]]
LENGTH = 32
SETTINGS: dict[str, Any] = {
    "model": {"family": "llama", "layers": 1, "width": 32, "heads": 2, "positions": 64, "dropout": 0.1},
    "duration": "20 batches",
    "global_batch_tokens": 8 * LENGTH,
    "batch_warmup": {"first_tokens": 2 * LENGTH, "over_tokens": 30 * LENGTH},
    "schedule": {"warmup": f"{20 * LENGTH} tokens"},
    "optimizer": {"learning_rate": 1.0e-2},
    "evaluate_every": "1000 batches",
    "checkpoint_every": "3 batches",
}
# Steps of 2 sequences, each over 10: 2 until 10 were seen, 4 until 20, 6 until 30.
SIZES = [2, 2, 2, 2, 2, 4, 4, 4, 6, 6, *[8] * 10]


def _megatron(first: int, step: int, over: int, full: int, batches: int) -> list[int]:
    """Megatron-LM's ramp-up: increments over equal shares of `over` samples."""
    share = over / ((full - first) / step)
    sizes: list[int] = []
    for _ in range(batches):
        seen = sum(sizes)
        sizes.append(full if seen > over else min(full, first + int(seen / share) * step))
    return sizes


@pytest.mark.parametrize(("first", "full", "over"), [(2, 8, 30), (16, 256, 100_000), (1, 64, 63), (4, 8, 1), (8, 8, 5)])
def test_the_sizes_are_those_of_megatron(first: int, full: int, over: int) -> None:
    rampup = BatchSizeRampup(first, full, over, epoch=full * 1000)
    sizes = [rampup.examples(number + 1) - rampup.examples(number) for number in range(900)]
    if first < full:
        assert sizes == _megatron(first, first, over, full, 900)
    else:
        assert set(sizes) == {full}


def test_lengths_count_the_tokens_of_the_batches_that_there_are() -> None:
    rampup = BatchSizeRampup(2, 8, 30, epoch=80)
    assert [rampup.examples(number) for number in range(21)] == [sum(SIZES[:number]) for number in range(21)]
    for tokens, batches in ((LENGTH, 1), (10 * LENGTH, 5), (10 * LENGTH + 1, 6), (34 * LENGTH, 10), (35 * LENGTH, 11)):
        assert rampup.length(parse_duration(f"{tokens} tokens"), 8 * LENGTH) == batches
    # 34 sequences while they grow, 5 batches of 8; 6 sequences are left out.
    for epochs, batches in ((0.1, 4), (0.5, 11), (1, 15), (1.5, 20), (2, 25)):
        assert rampup.length(parse_duration(f"{epochs} epochs"), 8 * LENGTH) == batches
    warmup = ScheduleConfig(warmup=f"{20 * LENGTH} tokens")
    assert LearningRateSchedule.of(warmup, 20, 8 * LENGTH, 10, rampup).warmup == 8
    assert LearningRateSchedule.of(warmup, 20, 8 * LENGTH, 10).warmup == 3


@pytest.fixture
def inputs(shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": shards_dir, "tokenizer": tokenizer_dir}


def test_a_training_stopped_while_batches_grow_ends_with_the_same_bits(
    inputs: dict[str, Path], tmp_path: Path, journal: Any, weights: Weights
) -> None:
    config = PretrainConfig.model_validate(SETTINGS)
    launch = LaunchConfig(device="cpu", threads=1, precision="fp32")
    figures = pretrain(
        config, inputs, tmp_path / "whole", Run(tmp_path / "whole.work", launch, journal=journal)
    ).figures
    assert journal.metric("train/batch_tokens") == [size * LENGTH for size in SIZES]
    assert figures["tokens"] == sum(SIZES) * LENGTH and figures["batches"] == 20
    assert journal.metric("train/lr")[6:8] == pytest.approx([1.0e-2 * 7 / 8, 1.0e-2])
    losses = journal.metric("train/loss")

    ahead = launch.model_copy(update={"loader_workers": 2})
    for stop_after in (4, 3, 4):  # of batches of 2, of 2 and 4, of 4 and 6 sequences
        journal.lines.clear()
        broken = Run(
            tmp_path / "broken.work",
            ahead,
            journal=journal,
            is_cancelled=lambda: len(journal.metric("train/loss")) >= stop_after,  # noqa: B023
        )
        with pytest.raises(Cancelled):
            pretrain(config, inputs, tmp_path / "broken", broken)
    journal.lines.clear()
    pretrain(config, inputs, tmp_path / "broken", Run(tmp_path / "broken.work", ahead, journal=journal))
    assert journal.metric("train/batch_tokens") == [size * LENGTH for size in SIZES[11:]]
    assert journal.metric("train/loss") == losses[11:]
    ours, theirs = weights(tmp_path / "broken"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_ranks_and_microbatches_leave_the_weights(
    inputs: dict[str, Path], tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 2 sequences, two ranks with parts of 1, and each batch computed as a whole."""
    settings = SETTINGS | {"model": SETTINGS["model"] | {"dropout": 0.0}}
    config = PretrainConfig.model_validate(settings)
    launch = LaunchConfig(device="cpu", threads=1, precision="fp32")
    pretrain(config, inputs, tmp_path / "parts", Run(tmp_path / "parts.work", launch))
    pretrain_in_ranks(2, settings, inputs, tmp_path / "ranks")
    monkeypatch.setattr(fit, "choose", lambda *_: 8)
    pretrain(config, inputs, tmp_path / "whole", Run(tmp_path / "whole.work", launch))
    expected = weights(tmp_path / "whole")
    for name in ("parts", "ranks"):
        for key, tensor in weights(tmp_path / name).items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("warmup", "code"),
    [
        ({"first_tokens": 3 * LENGTH, "over_tokens": 640}, "not_divisible"),
        ({"first_tokens": 16, "over_tokens": 640}, "not_divisible"),
        ({"first_tokens": 2 * LENGTH, "over_tokens": 10_000_000}, "not_within_an_epoch"),
    ],
)
def test_what_cannot_grow_is_said_before_the_first_step(
    warmup: dict[str, int], code: str, inputs: dict[str, Path], tmp_path: Path, run: Run
) -> None:
    _refused(warmup, code, inputs, tmp_path, run)


def test_a_first_batch_that_ranks_cannot_share_is_refused(
    inputs: dict[str, Path], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    _refused({"first_tokens": 2 * LENGTH, "over_tokens": 640}, "not_divisible", inputs, tmp_path, run)


def _refused(warmup: dict[str, int], code: str, inputs: dict[str, Path], tmp_path: Path, run: Run) -> None:
    with pytest.raises(StageError) as error:
        pretrain(PretrainConfig.model_validate(SETTINGS | {"batch_warmup": warmup}), inputs, tmp_path / "out", run)
    (problem,) = error.value.problems
    assert problem.code == code and problem.path.startswith("pretrain.batch_warmup.") and problem.fix
