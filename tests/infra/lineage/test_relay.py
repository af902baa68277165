from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.lineage.ledger import file_url, mlflow_run_id, run_url
from infra.lineage.messages import PipelineFinished, PipelineStarted
from infra.lineage.outbox import Outbox
from infra.lineage.relay import ensure_relay
from infra.lineage.relay_lock import anyone_registered, lineage_problem, problem_path, register, relay_pid
from infra.servers.environment import server_environ

pytestmark = pytest.mark.cluster


def run_statuses(root: Path) -> dict[str, list[str]]:
    """The statuses of all living MLflow runs of each build."""
    query = """SELECT tags.value, runs.status FROM runs JOIN tags ON tags.run_uuid = runs.run_uuid
        WHERE tags.key = 'stemma.build_id' AND runs.lifecycle_stage = 'active'"""
    statuses: dict[str, list[str]] = {}
    with contextlib.closing(sqlite3.connect(root / "mlflow" / "mlflow.db", timeout=30)) as connection:
        for build_id, status in connection.execute(query):
            statuses.setdefault(build_id, []).append(status)
    return statuses


def metric_rows(root: Path) -> int:
    database = root / "mlflow" / "mlflow.db"
    if not database.exists():
        return 0
    with contextlib.closing(sqlite3.connect(database, timeout=30)) as connection:
        try:
            return int(connection.execute("SELECT count(*) FROM metrics").fetchone()[0])
        except sqlite3.OperationalError:
            return 0


WHOLE = {"p": ["FINISHED"], "s": ["FINISHED"], "t": ["FINISHED"], "e": ["FAILED"]}


@pytest.mark.long
def test_without_its_server_history_waits_or_goes_on_in_the_same_database(
    root, story, mlflow_server, start_relay, eventually
) -> None:
    """A server that does not answer is waited for, and nothing is lost or doubled; one that is gone is not needed."""
    outbox = Outbox(root)
    relay = start_relay()
    for message in story.beginning():
        outbox.send(message)
    eventually(lambda: len(story.loss_history()) == 30, "the first metrics arrive")

    mlflow_server.send(signal.SIGSTOP)
    story.write_metrics(20, first=30)
    trained, *rest = story.ending()
    outbox.send(trained)
    eventually(lambda: "does not answer" in relay.log.read_text(), "the relay notices the outage")
    assert outbox.pending() == 1
    mlflow_server.send(signal.SIGCONT)
    eventually(lambda: outbox.pending() == 0, "all is delivered")
    assert story.loss_history() == story.expected_history(50)

    mlflow_server.stop()
    for message in rest:
        outbox.send(message)
    eventually(lambda: outbox.pending() == 0, "the rest arrives without it")
    assert not (root / "lineage" / "failed").exists()

    mlflow_server.start()
    assert story.loss_history() == story.expected_history(50)
    assert run_statuses(root) == WHOLE
    url = run_url(root, "t")
    assert url is not None
    assert url.startswith(f"{mlflow_server.url}/#/experiments/1/runs/{mlflow_run_id(root, 't')}")
    query = f"{mlflow_server.url}/api/2.0/mlflow/runs/get?run_id={mlflow_run_id(root, 't')}"
    with urllib.request.urlopen(query) as answer:
        assert b"validation_loss" in answer.read()
    with urllib.request.urlopen(
        f"{mlflow_server.url}/get-artifact?path=report.html&run_uuid={mlflow_run_id(root, 't')}"
    ) as answer:
        assert answer.read() == b"<h1>report</h1>"
    assert file_url(root, "p", "pretrain", "report.html") == url.replace("?", "/artifacts/report.html?")
    assert file_url(root, "p", "ingest", "report.html") is None


def test_a_relay_killed_at_any_moment_is_continued_by_the_next(root, story, start_relay, eventually) -> None:
    steps = 3_000
    story.write_metrics(steps - 30, first=30)
    outbox = Outbox(root)
    for message in story.beginning() + story.ending():
        outbox.send(message)
    for minimum in (1, 1_500, 4_000):
        relay = start_relay()
        eventually(lambda minimum=minimum: metric_rows(root) >= minimum, f"{minimum} metrics are there")
        relay.kill()
    start_relay()
    eventually(lambda: outbox.pending() == 0, "all is delivered")
    assert story.loss_history() == story.expected_history(steps)
    assert run_statuses(root) == WHOLE


def test_a_message_that_cannot_be_delivered_is_set_aside_with_its_reason(root, start_relay, eventually) -> None:
    outbox = Outbox(root)
    outbox.send(PipelineFinished("ghost", "FINISHED", 1.0))
    (outbox.folder / "00000000000000000001-1-0.json").write_text("not json")
    outbox.send(PipelineStarted("p", "quickstart", 1.0))
    relay = start_relay()
    eventually(lambda: outbox.pending() == 0, "nothing stands in the way")
    assert mlflow_run_id(root, "p"), "the good message behind them is delivered"
    reasons = sorted((root / "lineage" / "failed").glob("*.error"))
    assert len(reasons) == 2
    assert "ghost" in reasons[1].read_text()
    assert "aside" in relay.log.read_text()


def test_a_second_relay_gives_way(root, start_relay, eventually) -> None:
    first = start_relay()
    eventually(lambda: relay_pid(root) == first.process.pid, "the first works")
    second = start_relay("--until-empty")
    assert second.process.wait() == 0
    assert relay_pid(root) == first.process.pid


def test_a_relay_of_its_own_comes_and_goes_with_those_who_need_it(root, eventually) -> None:
    """One who needs it is killed: its runs do not run for ever."""
    code = (
        "import os, sys, signal\n"
        "from infra.lineage.relay import ensure_relay\n"
        "from infra.lineage.messages import PipelineStarted, StageStarted\n"
        "from infra.lineage.outbox import Outbox\n"
        "ensure_relay(sys.argv[1])\n"
        "Outbox(sys.argv[1]).send(PipelineStarted('k', 'quickstart', 1.0))\n"
        "Outbox(sys.argv[1]).send(StageStarted('t', 'k', 'quickstart', 'sft', 'ffff', 1.0))\n"
        "sys.stdin.read()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    sender = subprocess.Popen([sys.executable, "-c", code, str(root)], env=server_environ({}), stdin=subprocess.PIPE)
    eventually(lambda: relay_pid(root), "a relay starts")
    pid = relay_pid(root)
    ensure_relay(root)
    (root / "lineage" / "senders" / str(os.getpid())).unlink()
    outbox = Outbox(root)
    outbox.send(PipelineStarted("p", "quickstart", 1.0))
    outbox.send(PipelineFinished("p", "FINISHED", 2.0))
    eventually(lambda: mlflow_run_id(root, "t") and outbox.pending() == 0, "all is delivered")
    assert relay_pid(root) == pid, "it stays while somebody may send more"
    sender.communicate(b"", timeout=60)
    assert sender.returncode == -signal.SIGKILL
    eventually(lambda: relay_pid(root) is None, "it goes")
    assert run_statuses(root) == {"p": ["FINISHED"], "k": ["KILLED"], "t": ["KILLED"]}


def test_threads_that_need_a_relay_at_once_share_one(root: Path, eventually, monkeypatch: pytest.MonkeyPatch) -> None:
    """They took each other's file while it had no name yet, which ended a stage."""
    starts: list[subprocess.Popen[bytes]] = []

    class Counted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            starts.append(self)

    monkeypatch.setattr(subprocess, "Popen", Counted)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ensure_relay, [root] * 200))
    [started] = starts
    eventually(lambda: relay_pid(root), "a relay starts")
    assert relay_pid(root) == started.pid and anyone_registered(root)


@pytest.fixture(autouse=True)
def _no_relay_left(root):
    yield
    pid = relay_pid(root)
    if pid is not None:
        os.killpg(pid, signal.SIGKILL)


def test_what_a_power_cut_left_of_a_sender_or_a_problem_is_in_nobodys_way(root: Path) -> None:
    """The relay ended at it every time, and MLflow heard nothing more."""
    senders = root / "lineage" / "senders"
    senders.mkdir(parents=True)
    for name, content in (("1", b""), ("2", b"\0\0"), ("3", b"{}"), ("4", b"[]")):
        (senders / name).write_bytes(content)
    problem_path(root).write_bytes(b"")
    assert not anyone_registered(root) and not list(senders.iterdir())
    register(root)
    assert anyone_registered(root) and lineage_problem(root) is None
