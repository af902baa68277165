"""The ledger of runs whose stages are killed: every second is accounted for, and what was lost is named."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flows.runs.journal
import infra.ledger.attempts
import infra.ledger.record
from flows.runs.journal import JournalRow, RunJournal
from flows.runs.ledger import read_ledger, total, write_ledger
from infra.ledger.record import TIMES, TimeRecord
from tests.infra.ledger.fake_time import FakeTime
from tests.support.pipelines import data_config, trained_config
from tests.support.programs.command import Command, finish, start, stemma, write_config
from tests.support.programs.processes import progress_of, running_stage, wait_until

BATCHES = 800


def adds_up(account: dict[str, Any]) -> None:
    parts = sum(seconds for causes in account["parts"].values() for seconds in causes.values())
    assert parts == pytest.approx(account["device_s"], rel=0.01)


def test_a_killed_training_costs_what_it_lost(env: dict[str, str], data_pipeline: Path) -> None:
    settings = {**trained_config(data_pipeline, BATCHES), **data_config(data_pipeline)}
    config, store = write_config(data_pipeline / "trained.yaml", settings), data_pipeline / "store"
    process = start("run", config, "--root", store, env=env)
    wait_until(lambda: progress_of(store, "pretrain") > 50, command=process)
    child = running_stage(store, "pretrain")
    assert isinstance(child, psutil.Process)
    child.kill()
    answer = finish(process)
    assert answer.code == 0, answer.document["errors"]

    cost = stemma("cost", answer.document["run_id"], "--root", store, env=env).document
    account = cost["account"]
    adds_up(account)
    # One device, and no two stages of this chain at once: the device's time is the run's.
    assert account["device_s"] == pytest.approx(cost["wall_s"], rel=0.01)
    assert cost["wall_s"] >= answer.document["seconds"] - 1.0
    trained = cost["stages"]["pretrain"]
    assert trained["restarts"] == 1
    assert trained["faults"]["killed"]["count"] == 1
    assert trained["faults"]["killed"]["mttr_s"] > 0
    assert trained["parts"]["lost"]["killed"] > 0
    assert trained["tokens"] == BATCHES * 512
    assert 0 < account["ettr"] < 1
    assert account["is_estimated"]

    model = stemma("cost", "pretrain", "--root", store, env=env).document
    assert model["unknown"] == []
    adds_up(model["account"])
    assert {"ingest", "clean", "tokenizer", "shard", "pretrain"} <= {row["step"] for row in model["artifacts"]}
    # The record is no part of the artifact: without it the cost is unknown, and not zero.
    (folder,) = (store / "pretrain").iterdir()
    (folder / "aux" / "times.jsonl").unlink()
    forgotten = stemma("cost", "pretrain", "--root", store, env=env).document
    (unknown,) = forgotten["unknown"]
    assert unknown.startswith("pretrain/")
    row = next(row for row in forgotten["artifacts"] if row["artifact"] == unknown)
    assert (row["known"], row["account"]) == (False, None)


@pytest.mark.long
def test_every_second_of_runs_under_several_faults_is_accounted_for(env: dict[str, str], data_pipeline: Path) -> None:
    """A training is killed and ended, its run is cancelled, the next one is killed while its stage is stopped, and
    a third ends.

    The risk: an end of a process that leaves seconds under no kind, or under two.
    """
    settings = {**trained_config(data_pipeline, BATCHES), **data_config(data_pipeline)}
    config, store = write_config(data_pipeline / "trained.yaml", settings), data_pipeline / "store"

    def stage_beyond(batches: int, command: Command) -> psutil.Process:
        wait_until(lambda: progress_of(store, "pretrain") > batches and running_stage(store, "pretrain"), None, command)
        stage = running_stage(store, "pretrain")
        assert isinstance(stage, psutil.Process)
        return stage

    run = start("run", config, "--root", store, env=env)
    stage_beyond(50, run).kill()
    stage_beyond(150, run).terminate()
    stage_beyond(250, run)
    run.send_signal(signal.SIGTERM)
    cancelled = finish(run)
    assert (cancelled.code, cancelled.document["status"]) == (130, "cancelled"), cancelled.document["errors"]

    killed = start("run", config, "--root", store, env=env)
    stage = stage_beyond(350, killed)
    stage.suspend()
    killed.kill()
    killed.communicate()
    stage.kill()

    last = stemma("run", config, "--root", store, env=env)
    assert last.code == 0, last.document["errors"]

    runs = sorted(path.name for path in (store / "runs").iterdir())[-3:]
    costs = [stemma("cost", run_id, "--root", store, env=env).document for run_id in runs]
    for cost in costs:
        adds_up(cost["account"])
        assert cost["account"]["device_s"] == pytest.approx(cost["wall_s"], rel=0.01)
    first, _, third = (cost["account"] for cost in costs)
    assert first["faults"]["killed"]["count"] == 2
    assert first["restarts"] == 2 and third["ettr"] > 0


@contextmanager
def fake_time() -> Iterator[FakeTime]:
    fake = FakeTime()
    with pytest.MonkeyPatch.context() as patch:
        for module in (flows.runs.journal, infra.ledger.record, infra.ledger.attempts):
            patch.setattr(module, "time", fake)
        patch.setattr(RunJournal, "works", lambda _: False)
        yield fake


def simulate_run(clock: FakeTime, root: Path, run_id: str, draw: Any, killed_in: str) -> None:
    """One run of two stages with one device, one after the other, whose attempts fail as drawn; it is killed with its
    stage of this name."""
    waits = st.floats(0.0, 3.0)
    journal = RunJournal(root / "runs", run_id)
    journal.begin(pipeline="demo")
    clock.pass_time(draw(waits))
    for stage in ("clean", "shard"):
        journal.row(JournalRow(stage, "waiting"))
    for stage in ("clean", "shard"):
        work = root / ".work" / stage / "f"
        if (root / stage / "f").exists():
            continue
        clock.pass_time(draw(waits))
        journal.row(JournalRow(stage, "running"))
        lease_s, queue_s = draw(waits), draw(waits)
        clock.pass_time(lease_s + queue_s)
        work.mkdir(parents=True, exist_ok=True)
        record = TimeRecord(work / TIMES)
        for attempt in range(failures := draw(st.integers(0, 2)), -1, -1):
            waited = {"lease": lease_s, "queue": queue_s} if attempt == failures else {"lease": 0.0}
            record.begin(run=run_id, stage=stage, build=f"{stage}/f", devices=1, waited=waited, rates={})
            link = journal.folder / "times" / f"{stage}.jsonl"
            link.parent.mkdir(exist_ok=True)
            if not link.exists():
                link.hardlink_to(record.path)
            clock.listeners = [record.alive]
            clock.pass_time(draw(waits))
            record.write("work")
            for _ in range(draw(st.integers(0, 2))):
                clock.pass_time(draw(waits))
                record.write("kept")
            clock.pass_time(draw(waits))
            clock.listeners = []
            if killed_in == stage:
                clock.pass_time(infra.ledger.attempts.OPEN_S + 1)
                return
            record.end("out_of_memory" if attempt else "")
            if attempt:
                clock.pass_time(draw(waits))
        (root / stage / "f").mkdir(parents=True)
        shutil.rmtree(work)
        journal.row(JournalRow(stage, "built"))
    clock.pass_time(draw(waits))
    journal.end({"status": "done", "stages": []})


@given(data=st.data(), killed_in=st.sampled_from(["", "clean", "shard"]))
def test_the_parts_of_a_run_are_its_wall_time(data: st.DataObject, killed_in: str) -> None:
    """With one device and one stage at a time, the account is the run's time, whatever happened and was killed."""
    with tempfile.TemporaryDirectory() as folder, fake_time() as clock:
        root = Path(folder)
        ledgers = []
        for run_id, dies in (("1", killed_in), ("2", "")):
            began = clock.now
            simulate_run(clock, root, run_id, data.draw, dies)
            ledger = read_ledger(root, run_id)
            assert ledger is not None
            ended = clock.now - (infra.ledger.attempts.OPEN_S + 1 if dies else 0)
            assert ledger.wall_s == pytest.approx(ended - began, abs=0.7 if dies else 0.01)
            account = ledger.account
            assert account.device_s == pytest.approx(ledger.wall_s, abs=0.02)
            assert sum(account.parts.values()) == pytest.approx(account.device_s, abs=0.02)
            assert all(seconds >= 0 for seconds in account.parts.values())
            ledgers.append(ledger)
        both = total(ledgers)
        assert both.device_s == pytest.approx(sum(ledger.wall_s for ledger in ledgers), abs=0.04)
        if killed_in:
            causes = [recovery.cause for recovery in ledgers[0].account.recoveries]
            assert "killed" in causes
            assert both.by_cause("lost").get("killed", 0.0) <= both.device_s


def test_a_run_without_a_record_is_unknown(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "1"
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_text('{"time": 1.0, "kind": "begin", "pipeline": "demo"}\n')
    assert read_ledger(tmp_path, "1") is None
    write_ledger(tmp_path, "1")
    assert not (folder / "ledger.json").exists()
