"""The guard: what it calls a spike, how it answers, and that trainings which would be lost end well."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from scipy.stats import median_abs_deviation

from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Result, Run, open_journal, read_journal
from tests.points import points_of
from training import pretrain as pretrain_module
from training.batch_size import Growth
from training.config import PretrainConfig
from training.guard.config import GuardConfig
from training.guard.corrections import Alarm, Corrections
from training.guard.loss_scale import LossScale
from training.guard.watch import Watch, robust_z
from training.pretrain import pretrain

Weights = Callable[[Path], dict[str, torch.Tensor]]
GUARD: dict[str, Any] = {"rollback_every": 10, "healthy_after": 5, "window_least": 10}
SETTINGS: dict[str, Any] = {
    "model": {"family": "llama", "layers": 2, "width": 32, "heads": 2, "positions": 64},
    "duration": "100 batches",
    "global_batch_tokens": 256,
    "optimizer": {"learning_rate": 1.0e-2},
    "schedule": {"warmup": "5 batches"},
    "evaluate_every": "1000 batches",
    "checkpoint_every": "1000 batches",
    "guard": GUARD,
}


class Poison(Callback):
    """Gives the batches from `first` to `end` tokens without sense, as a broken file would."""

    def __init__(self, first: int, end: int) -> None:
        self._batches = range(first, end)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if (batch := state.timestamp.batch.value) in self._batches:
            ids = state.batch["input_ids"]
            draw = torch.Generator().manual_seed(batch)
            ids = torch.randint(0, int(ids.max()) + 1, ids.shape, generator=draw)
            labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
            state.batch = {**state.batch, "input_ids": ids, "labels": labels}


class NotANumber(Callback):
    """Puts NaN into the gradient of batch `first` and every one after it up to `end`."""

    def __init__(self, first: int, end: int) -> None:
        self._batches = range(first, end)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value in self._batches:
            for weight in state.model.parameters():
                if weight.grad is not None:
                    weight.grad.fill_(math.nan)


class ScaleDriven(Callback):
    """Drives fp16's loss scale towards 0 at one batch, as a long row of overflows does."""

    def __init__(self, batch: int) -> None:
        self._batch = batch

    def after_train_batch(self, state: State, logger: Logger) -> None:
        passed_over = len(state.batch["input_ids"]) == 1
        if state.timestamp.batch.value == self._batch and not passed_over:
            (scale,) = [one for all_ in state.callbacks for one in all_ if isinstance(one, LossScale)]
            scale.scale = 1.0e-6


class Killed(Exception):
    """Stands for the end of the process."""


class KilledAt(Callback):
    """Ends the training at the `nth` time that `batch` ends."""

    def __init__(self, batch: int, nth: int) -> None:
        self._batch, self._left = batch, nth

    def batch_end(self, state: State, logger: Logger) -> None:
        self._left -= state.timestamp.batch.value == self._batch
        if not self._left:
            raise Killed


@pytest.fixture
def train(
    shards_dir: Path, tokenizer_dir: Path, tmp_path: Path, journal: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Pretrains with faults built in, into `tmp_path`/name; the same name continues what is there."""
    fit = pretrain_module.fit

    def train(
        name: str, faults: Sequence[Callback] = (), precision: Any = "fp32", to: Any = journal, **changes: Any
    ) -> Result:
        def faulty(*given: Any) -> Any:
            *others, callbacks = given
            return fit(*others, [*faults, *callbacks])

        monkeypatch.setattr(pretrain_module, "fit", faulty)
        launch = LaunchConfig(device="cpu", threads=1, precision=precision)
        return pretrain(
            PretrainConfig.model_validate(SETTINGS | changes),
            {"shards": shards_dir, "tokenizer": tokenizer_dir},
            tmp_path / name,
            Run(tmp_path / f"{name}.work", launch, journal=to),
        )

    return train


def test_the_robust_z_score_is_the_one_of_scipy_s_mad() -> None:
    values = np.random.default_rng(3).standard_t(2, 101).tolist()
    expected = (9.0 - np.median(values)) / median_abs_deviation(values, scale="normal")
    assert robust_z(9.0, values) == pytest.approx(expected, rel=1e-4)


def test_noise_is_usual_and_a_spike_is_not() -> None:
    random = np.random.default_rng(4)
    watch = Watch("loss", window=100, least=20, limit=6.0, least_deviation=0.01)
    falls = [3 + 2 * math.exp(-step / 50) + random.normal(0, 0.05) for step in range(400)]
    for value in falls:
        assert not watch.suspicious(value)
        watch.accept(value)
    assert watch.suspicious(4.0)


def test_corrections_lower_the_rate_from_where_they_go_back_to_and_cut_ever_deeper(tmp_path: Path) -> None:
    config = GuardConfig(rollback_every=10, healthy_after=5, cut=0.5, skip_before=1, skip_after=2, tries=4)
    log = Corrections(tmp_path, config)
    for batch in (52, 53, 53, 53):
        log.answer(Alarm(batch, batch, "loss", 9.0, 3.0))
    first, second, *_ = log.made
    assert (first.back_to, first.skip_first, first.skip_end) == (40, 51, 54)
    assert (second.back_to, second.skip_first, second.skip_end) == (40, 52, 57)
    assert [log.share(batch) for batch in (39, 40, 99)] == [1.0, 0.5**8, 0.5**8]
    assert [log.skips(batch) for batch in (50, 51, 56, 68, 69)] == [False, True, True, True, False]
    with pytest.raises(StageError, match="after 4 corrections") as told:
        log.answer(Alarm(55, 55, "loss", 9.0, 3.0))
    assert told.value.problems[0].code == "diverged"
    assert Corrections(tmp_path, config).made == log.made


def test_the_learning_rate_may_recover(tmp_path: Path) -> None:
    log = Corrections(tmp_path, GuardConfig(rollback_every=10, healthy_after=0, recover=10, skip_after=5))
    one = log.answer(Alarm(100, 100, "loss", 9.0, 3.0))
    assert log.share(99) == 1.0
    assert log.share(one.skip_end - 1) == pytest.approx(0.5)
    assert log.share(one.skip_end + 4) == pytest.approx(0.75)
    assert log.share(one.skip_end + 9) == log.share(one.skip_end + 500) == pytest.approx(1.0)


def test_a_quiet_training_is_the_same_with_and_without_a_guard(
    train: Callable[..., Result], tmp_path: Path, weights: Weights
) -> None:
    figures = train("guarded").figures
    train("alone", guard={"enabled": False})
    assert figures["corrections"] == figures["skipped_batches"] == 0
    ours, theirs = weights(tmp_path / "guarded"), weights(tmp_path / "alone")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("fault", "changes", "lost", "within"),
    [
        pytest.param(lambda: [ScaleDriven(20)], {"precision": "fp16"}, 1.2, 0.05, id="loss scale driven to 0"),
        pytest.param(lambda: [Poison(80, 99)], {}, 2.0, 0.05, id="poisoned batches"),
        pytest.param(lambda: [NotANumber(80, 81)], {}, math.inf, 0.05, id="nan"),
        pytest.param(
            list,
            {"optimizer": {"learning_rate": 0.6}, "duration": "160 batches"},
            1.3,
            0.05,
            id="learning rate 100 times too high",
        ),
    ],
)
def test_a_training_that_would_be_lost_ends_near_the_clean_one(
    train: Callable[..., Result],
    tmp_path: Path,
    journal: Any,
    fault: Callable[[], list[Callback]],
    changes: dict[str, Any],
    lost: float,
    within: float,
) -> None:
    good = {"optimizer": {"learning_rate": 6.0e-3}} if "optimizer" in changes else {}
    clean = train("clean", **changes | good).figures["validation_loss"]
    alone = train("alone", fault(), **changes | {"guard": {"enabled": False}}).figures["validation_loss"]
    guarded = train("guarded", fault(), **changes)
    assert not alone < clean * lost
    assert guarded.figures["validation_loss"] < clean * (1 + within)
    corrections = [line for line in journal.lines if line.get("name") == "correction"]
    assert len(corrections) == guarded.figures["corrections"] >= 1
    assert "learning rate ×" in corrections[0]["message"]
    assert (tmp_path / "guarded" / "aux" / "corrections.json").exists()


@pytest.mark.parametrize(("rate", "stuck"), [(1.0e-2, 0), (1.0e-5, 1)], ids=["learns", "too low a rate"])
def test_a_training_that_does_not_get_going_is_said_once(
    train: Callable[..., Result], journal: Any, rate: float, stuck: int
) -> None:
    train("slow", duration="260 batches", optimizer={"learning_rate": rate})
    told = [line["message"] for line in journal.lines if line.get("name") == "stuck"]
    assert len(told) == stuck
    assert all("the frequencies of tokens alone give" in message for message in told)


def test_a_correction_is_part_of_a_history_that_kills_do_not_change(
    train: Callable[..., Result], tmp_path: Path, weights: Weights
) -> None:
    """Killed before the spike, within it, after the first correction, and continued with other checkpoints. Each step
    has one point of each metric: the one of the batch that counts."""
    poison, dropout = Poison(60, 72), {"model": SETTINGS["model"] | {"dropout": 0.1}}
    journals = {name: tmp_path / f"{name}.jsonl" for name in ("unbroken", "broken")}
    with open_journal(journals["unbroken"]) as journal:
        expected = train("unbroken", [poison], to=journal, **dropout)
    assert expected.figures["corrections"] >= 2
    for batch, nth, every in ((58, 1, "7 batches"), (61, 1, "13 batches"), (61, 2, "3 batches"), (90, 1, "5 batches")):
        with pytest.raises(Killed), open_journal(journals["broken"]) as journal:
            train("broken", [poison, KilledAt(batch, nth)], to=journal, checkpoint_every=every, **dropout)
    with open_journal(journals["broken"]) as journal:
        found = train("broken", [poison], to=journal, **dropout)
    points, wanted = (points_of(read_journal(journals[name])) for name in ("broken", "unbroken"))
    assert points == wanted
    assert [step for step, _ in points["guard/corrections"]] == list(range(min(points["guard/corrections"])[0], 101))
    told = sorted(step for name in ("train/loss", "guard/skipped") for step, _ in points[name])
    assert told == list(range(1, 101))
    corrections = [line for line in read_journal(journals["broken"]) if line.get("name") == "correction"]
    assert len(corrections) == found.figures["corrections"], "what happened stays told"
    for name in ("validation_loss", "corrections", "skipped_batches"):
        assert found.figures[name] == expected.figures[name]
    ours, theirs = weights(tmp_path / "broken"), weights(tmp_path / "unbroken")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    logs = [(tmp_path / name / "aux" / "corrections.json").read_text() for name in ("broken", "unbroken")]
    assert logs[0] == logs[1]


def test_batches_that_grow_have_the_size_of_their_place_after_a_correction_too(
    train: Callable[..., Result], journal: Any
) -> None:
    figures = train(
        "grown",
        [NotANumber(6, 7)],
        duration="20 batches",
        batch_warmup={"first_tokens": 64, "over_tokens": 960},
        guard={"rollback_every": 3, "healthy_after": 3, "window_least": 3},
    ).figures
    assert figures["corrections"] == 1
    told = [line for line in journal.lines if "train/batch_tokens" in line.get("values", {})]
    steps = [line["step"] for line in told]
    assert sorted(steps) != steps, "some batches were done again"
    growth = Growth(2, 8, 30, epoch=8_000)
    for step, line in zip(steps, told, strict=True):
        assert line["values"]["train/batch_tokens"] == 32 * (growth.examples(step) - growth.examples(step - 1))
    assert figures["tokens"] == 32 * growth.examples(20)


def test_what_corrections_cannot_mend_stops_with_a_clear_error(train: Callable[..., Result]) -> None:
    with pytest.raises(StageError, match=r"loss nan at batch \d+.*after 4 corrections") as told:
        train("lost", [NotANumber(40, 1000)], guard=GUARD | {"skip_after": 1})
    assert "learning_rate" in told.value.problems[0].fix


def test_infinite_gradients_halve_the_loss_scale_and_leave_the_update_out() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    model = torch.nn.ParameterList([weight])
    state: Any = SimpleNamespace(model=model, timestamp=SimpleNamespace(batch=SimpleNamespace(value=0)))
    scale = LossScale(lambda batch: False, scale=8.0, grow_after=2)
    found = []
    for factor in (1.0, math.inf, 1.0, 1.0):
        weight.grad = None
        state.loss = (weight * torch.tensor([2.0, 3.0])).sum() * factor
        scale.before_backward(state, None)  # type: ignore[arg-type]
        state.loss.backward()
        scale.after_train_batch(state, None)  # type: ignore[arg-type]
        found.append((None if weight.grad is None else weight.grad.tolist(), scale.scale))
    assert found == [([2.0, 3.0], 8.0), (None, 4.0), ([2.0, 3.0], 4.0), ([2.0, 3.0], 8.0)]
