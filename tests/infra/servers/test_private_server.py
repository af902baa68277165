from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from infra.servers.environment import server_environ
from infra.servers.http import answers

pytestmark = pytest.mark.cluster

HOLD = """
import sys
from infra.servers.private import private_prefect_server
with private_prefect_server() as url:
    print(url, flush=True)
    sys.stdin.read()
"""


def start_holder(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env=server_environ({"TMPDIR": str(folder)}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def holder(tmp_path: Path):
    process = start_holder(tmp_path)
    yield process
    process.kill()
    process.communicate()


def test_it_dies_with_its_parent_even_when_that_is_killed(holder) -> None:
    url = holder.stdout.readline().strip()
    servers = psutil.Process(holder.pid).children(recursive=True)
    os.kill(holder.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(servers, timeout=60)
    assert alive == []
    assert not answers(f"{url}/health")


def test_the_folder_of_one_that_was_killed_goes_with_the_next_and_that_of_a_living_one_stays(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    """Each run that was killed left its database behind."""
    assert holder.stdout and holder.stdout.readline()
    (living,) = tmp_path.iterdir()
    killed = start_holder(tmp_path)
    assert killed.stdout and killed.stdout.readline()
    (left,) = set(tmp_path.iterdir()) - {living}
    killed.kill()
    killed.communicate()
    assert (left / "prefect.db").exists()
    without_lock = tmp_path / f"{left.name}x"
    without_lock.mkdir()
    next_one = start_holder(tmp_path)
    try:
        assert next_one.stdout and next_one.stdout.readline()
        assert not left.exists() and without_lock.exists() and (living / "prefect.db").exists()
        _, stderr = next_one.communicate("")
        assert (next_one.returncode, stderr) == (0, "")
        assert set(tmp_path.iterdir()) == {living, without_lock}
    finally:
        next_one.kill()


def test_many_that_write_at_once_are_all_served_and_it_goes_quietly(holder, tmp_path: Path) -> None:
    """SQLite refuses a transaction that read before another wrote, and the server would answer 503 to its page. Where
    an automation is stored beside others that write, Prefect's own server stands still for a minute or for good."""
    url = holder.stdout.readline().strip()
    servers = psutil.Process(holder.pid).children(recursive=True)
    assert servers
    # A connection that is used again may be one that the server is just closing.
    anew = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=url, timeout=60, trust_env=False, limits=anew) as client:
        flow = client.post("/flows/", json={"name": "busy"}).json()["id"]
        made = client.post("/deployments/", json={"name": "busy", "flow_id": flow, "concurrency_limit": 1})
        address = f"/deployments/{made.json()['id']}/create_flow_run"

        event = {"type": "event", "posture": "Reactive", "expect": ["busy"], "threshold": 1, "within": 0}
        automation = {"trigger": event, "actions": [{"type": "do-nothing"}]}

        def start(number: int) -> set[int]:
            created = client.post(address, json={"state": {"type": "SCHEDULED"}})
            state = {"state": {"type": "PENDING"}}
            moved = client.post(f"/flow_runs/{created.json().get('id')}/set_state", json=state)
            kept = client.post("/automations/", json={"name": f"busy {number}", **automation})
            return {created.status_code, moved.status_code, kept.status_code}

        with ThreadPoolExecutor(16) as pool:
            answers = set().union(*pool.map(start, range(64)))
    assert answers <= {200, 201}

    _, stderr = holder.communicate("")
    assert holder.returncode == 0
    assert stderr == ""
    assert not any(server.is_running() for server in servers)
    assert list(tmp_path.iterdir()) == []


def test_a_server_begins_with_a_copy_of_a_migrated_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of one that knows the kinds of blocks. A damaged copy is as good as none, and nothing of it is left."""
    import asyncio
    from types import SimpleNamespace

    from infra.servers.prefect import server as prefect_server

    async def migrate(server: Any) -> None:
        with closing(sqlite3.connect(server.path)) as database:
            database.execute("CREATE TABLE IF NOT EXISTS runs (name)")

    registered: list[str] = []

    async def register_blocks(session: str) -> None:
        registered.append(session)

    async def started(path: Path) -> None:
        new = prefect_server._NewDatabase()
        config = SimpleNamespace(connection_url=f"sqlite+aiosqlite:///{path}")
        await new.create(SimpleNamespace(database_config=config, path=path))  # type: ignore[arg-type]
        await new.register_blocks(path.name)

    def start(name: str) -> Path:
        asyncio.run(started(tmp_path / name))
        return tmp_path / name

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(prefect_server, "_create_db", migrate)
    monkeypatch.setattr(prefect_server, "_register_blocks", register_blocks)
    start("first.db")
    (kept,) = (tmp_path / ".cache" / "stemma").glob("prefect-with-blocks-*")
    with closing(sqlite3.connect(kept)) as database:
        database.execute("INSERT INTO runs VALUES ('of the copy')")
        database.commit()
    with closing(sqlite3.connect(start("second.db"))) as database:
        assert database.execute("SELECT name FROM runs").fetchall() == [("of the copy",)]
    kept.write_bytes(b"no database" * 100)
    with closing(sqlite3.connect(start("third.db"))) as database:
        assert database.execute("SELECT name FROM runs").fetchall() == []
    with closing(sqlite3.connect(kept)) as database:
        assert database.execute("SELECT name FROM runs").fetchall() == [], "and a damaged copy is replaced"
    assert not list(tmp_path.glob(".copy-*"))
    assert registered == ["first.db", "third.db"]
