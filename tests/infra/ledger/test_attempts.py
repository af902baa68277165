"""Generated histories of faults: every second of every attempt is under one kind, and what counts is counted once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import infra.ledger.attempts
import infra.ledger.record
from infra.ledger.attempts import BuildTimes, read_times
from infra.ledger.record import ALIVE_EVERY_S, TimeRecord
from tests.infra.ledger.fake_time import FakeTime
from training.trainer.step_times import FLUSH_S, StepTimes

TOKENS = 512
LONGEST_STEP_S = 3.0
durations = st.floats(0.01, LONGEST_STEP_S)


@contextmanager
def fake_time() -> Iterator[FakeTime]:
    fake = FakeTime()
    with pytest.MonkeyPatch.context() as patch:
        for module in (infra.ledger.record, infra.ledger.attempts):
            patch.setattr(module, "time", fake)
        yield fake


@pytest.fixture
def clock() -> Iterator[FakeTime]:
    with fake_time() as fake:
        yield fake


@dataclass
class History:
    """One build, simulated from its first attempt to its artifact, with the truth about its time.

    stepped: seconds of steps that were done for the first time, and again. lives: seconds of each attempt. unseen: of
    the attempts, how often the record may lack the last moments.
    """

    draw: Callable[..., Any]
    clock: FakeTime
    path: Path
    devices: int = 1
    stepped: dict[str, float] = field(default_factory=lambda: {"useful": 0.0, "recomputed": 0.0})
    lives: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    deaths: int = 0
    reached: int = 0
    saved: int = 0

    def attempt(self, batches: int, dies: str) -> None:
        """Run one attempt, which ends built if `dies` is empty."""
        began, record = self.clock.now, TimeRecord(self.path)
        record.begin(run="run", stage="pretrain", build="pretrain/f", trains=True, devices=self.devices, rates={})
        self.clock.listeners = [record.alive]
        self.clock.pass_time(self.draw(durations))
        if dies and self.draw(st.booleans()):
            self._die(record, began, dies)  # as it started
            return
        record.write("work")
        self.clock.pass_time(self.draw(durations))
        times = StepTimes(
            record,
            "scratch",
            torch.device("cpu"),
            generates=False,
            saved=lambda: self.saved,
            clock=self.clock.monotonic,
        )
        lasts = self.draw(st.integers(0, batches)) if dies else 10_000
        batch = self.saved
        times.begin(batch, batch * TOKENS)
        while batch < batches:
            if lasts == 0:
                self._die(record, began, dies)
                return
            lasts -= 1
            batch = self._step(times, batch)
            if self.draw(st.integers(0, 12)) == 0 and batch < batches:
                fault = self.draw(st.sampled_from(["rollback", "hang"]))
                if fault == "rollback":
                    times.end()
                record.write("fault", cause=fault)
                self.faults.append(fault)
                self.deaths += 1
                self.clock.offset += self.draw(st.sampled_from([0.0, 5000.0, -5000.0]))
                self.clock.pass_time(self.draw(durations))
                batch = self.saved
                times.begin(batch, batch * TOKENS)
        times.end()
        record.write("done")
        self.clock.pass_time(self.draw(durations))
        if dies:
            self._die(record, began, dies)
            return
        record.end("")
        self.lives.append(self.clock.now - began)

    def _step(self, times: StepTimes, batch: int) -> int:
        state: Any = SimpleNamespace(clock=SimpleNamespace(batch=batch, token=batch * TOKENS))
        times.before_dataloader(state)
        self.clock.pass_time(self.draw(st.floats(0.0, 0.2)))
        times.after_dataloader(state)
        seconds = self.draw(durations)
        self.clock.pass_time(seconds)
        self.stepped["recomputed" if batch + 1 <= self.reached else "useful"] += seconds
        state.clock.batch, state.clock.token = batch + 1, (batch + 1) * TOKENS
        self.reached = max(self.reached, batch + 1)
        times.batch_checkpoint(state)
        if (batch + 1) % 4 == 0:
            self.clock.pass_time(self.draw(st.floats(0.0, 0.5)))
            self.saved = batch + 1
        return batch + 1

    def _die(self, record: TimeRecord, began: float, dies: str) -> None:
        """End by a fault: the builder sees it, or is killed too and leaves no end."""
        self.clock.pass_time(self.draw(durations))
        self.deaths += 1
        if dies != "killed":
            record.end(dies)
        if dies != "cancelled":
            self.faults.append(dies)
        self.lives.append(self.clock.now - began)
        self.clock.listeners = []
        self.clock.pass_time(infra.ledger.attempts.OPEN_S + self.draw(durations))


@given(data=st.data())
def test_parts_add_up_and_what_counts_is_counted_once(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder, fake_time() as clock:
        history = History(data.draw, clock, Path(folder) / "times.jsonl", devices=data.draw(st.integers(1, 16)))
        batches = data.draw(st.integers(1, 24))
        deaths = data.draw(st.lists(st.sampled_from(["killed", "out_of_memory", "cancelled"]), max_size=4))
        for dies in [*deaths, ""]:
            history.attempt(batches, dies)
            clock.listeners = []
        times = read_times(history.path)
    assert isinstance(times, BuildTimes)
    account = times.account()
    devices, unseen = history.devices, history.deaths
    # The parts are the whole, and the whole is what happened, but for the last half second before each kill.
    assert all(seconds >= -1e-6 for seconds in account.parts.values())
    assert sum(account.parts.values()) == pytest.approx(account.device_s, rel=1e-6)
    lived = sum(history.lives) * devices
    assert account.device_s <= lived + 0.1 * devices
    assert account.device_s >= lived - (unseen * (ALIVE_EVERY_S + 0.2) + 0.1) * devices
    # Each batch is trained on once, whatever came between; what is done again is not useful.
    assert account.tokens == pytest.approx(batches * TOKENS)
    # Steps that no line had when their process was killed are lost, and new when they are done again.
    slack = (unseen * (FLUSH_S + LONGEST_STEP_S + 1) + 0.02 * (batches + unseen) + LONGEST_STEP_S) * devices
    for kind in ("useful", "recomputed"):
        assert account.total(kind) == pytest.approx(history.stepped[kind] * devices, abs=slack)  # type: ignore[arg-type]
    causes = [recovery.cause for recovery in account.recoveries]
    assert causes == history.faults
    assert all(recovery.seconds is not None and recovery.seconds > 0 for recovery in account.recoveries)


def times_of_one(clock: FakeTime, folder: Path, saved: int) -> tuple[TimeRecord, Path]:
    """An attempt that trained 10 batches of a second each, with a checkpoint of batch `saved`, and still lives."""
    path = folder / "times.jsonl"
    record = TimeRecord(path)
    rates = {"watts": 100.0, "usd_per_hour": 3.6, "overhead": 1.5, "kg_per_kwh": 0.5}
    record.begin(run="run", stage="pretrain", build="pretrain/f", trains=True, devices=2, rates=rates)
    clock.listeners = [record.alive]
    record.write("work")
    record.write("loop", key="scratch", batch=0)
    clock.pass_time(10.0)
    seconds = {"step": 9.0, "data": 0.5, "compile": 0.5}
    record.write("spent", key="scratch", **{"from": 0, "to": 10}, saved=saved, tokens=5120, seconds=seconds)
    return record, path


def test_work_after_the_last_checkpoint_of_a_build_that_was_given_up_is_lost(clock: FakeTime, tmp_path: Path) -> None:
    record, path = times_of_one(clock, tmp_path, saved=4)
    record.end("out_of_memory")
    times = read_times(path)
    assert times is not None
    account = times.account()
    assert account.by_cause("lost") == {"out_of_memory": pytest.approx(2 * 9.0 * 0.6)}
    assert account.tokens == pytest.approx(0.4 * 5120)
    assert account.mttr_s is None
    assert account.restarts == 0
    # Without its work folder nothing of it can count any more.
    discarded = read_times(path, is_kept=False)
    assert discarded is not None
    assert discarded.account().total("useful") == 0
    assert discarded.account().by_cause("waiting") == account.by_cause("waiting")
    assert sum(discarded.account().parts.values()) == pytest.approx(discarded.account().device_s)


def test_an_attempt_that_still_works_has_lost_nothing(clock: FakeTime, tmp_path: Path) -> None:
    _, path = times_of_one(clock, tmp_path, saved=0)
    clock.pass_time(3.0)
    times = read_times(path)
    assert times is not None
    assert times.account().total("lost") == 0
    assert times.account().device_s == pytest.approx(2 * 13.0, abs=2 * ALIVE_EVERY_S + 0.3)


def test_money_energy_and_emissions_are_those_of_the_devices(clock: FakeTime, tmp_path: Path) -> None:
    record, path = times_of_one(clock, tmp_path, saved=10)
    record.write("done", joules=600.0, joules_s=10.0)
    record.end("")
    times = read_times(path)
    assert times is not None
    account = times.account()
    assert account.usd == pytest.approx(20 / 3600 * 3.6)
    # The driver counted 600 J of one device: two devices, with the share of host and data centre.
    assert account.energy_j == pytest.approx(2 * 600 * 1.5)
    assert not account.is_estimated
    assert account.carbon_kg == pytest.approx(2 * 600 * 1.5 / 3.6e6 * 0.5)


def test_a_record_without_an_attempt_is_unknown_and_lines_cut_short_are_passed_over(
    clock: FakeTime, tmp_path: Path
) -> None:
    assert read_times(tmp_path / "none.jsonl") is None
    record, path = times_of_one(clock, tmp_path, saved=10)
    with open(path, "ab") as file:
        file.write(b'{"kind": "spent", "ti')
    record.end("")
    times = read_times(path)
    assert times is not None
    assert times.account().total("useful") == pytest.approx(18.0)
