from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
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


FOLDER = """
import sys
from infra.process.held_folder import held_folder
with held_folder("stemma-prefect") as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""
"""The folder of a server that lives, without the server."""


def start_holder(folder: Path, code: str = HOLD) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=server_environ({"TMPDIR": str(folder)}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Starts a holder, and returns it with the line that it prints once it holds."""
    holders: list[subprocess.Popen[str]] = []

    def call(code: str = HOLD) -> tuple[subprocess.Popen[str], str]:
        holders.append(start_holder(tmp_path, code))
        assert holders[-1].stdout
        return holders[-1], holders[-1].stdout.readline().strip()

    yield call
    for holder in holders:
        holder.kill()
        holder.communicate()


def write_at_once(url: str) -> set[int]:
    """The status codes of 64 runs and automations that are created by 16 clients at a time."""
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
            return set().union(*pool.map(start, range(64)))


@pytest.mark.long
def test_a_server_ends_with_its_parent_and_its_folder_goes_with_the_next(
    start: Callable[..., tuple[subprocess.Popen[str], str]], tmp_path: Path
) -> None:
    """Each run that was killed left its database behind. The next server is asked by many that write at once: SQLite
    refuses a transaction that read before another wrote, and the server would answer 503 to its page. Where an
    automation is stored beside others that write, Prefect's own server stands still for a minute or for good."""
    _, folder = start(FOLDER)
    living = Path(folder)
    killed, url = start()
    servers = psutil.Process(killed.pid).children(recursive=True)
    assert servers
    killed.kill()
    _, alive = psutil.wait_procs(servers, timeout=60)
    assert alive == []
    assert not answers(f"{url}/health")
    (left,) = set(tmp_path.iterdir()) - {living}
    assert (left / "prefect.db").exists()
    without_lock = tmp_path / f"{left.name}x"
    without_lock.mkdir()

    next_one, url = start()
    servers = psutil.Process(next_one.pid).children(recursive=True)
    assert not left.exists() and without_lock.exists() and living.exists()
    assert write_at_once(url) <= {200, 201}
    _, stderr = next_one.communicate("")
    assert (next_one.returncode, stderr) == (0, "")
    assert servers and not any(server.is_running() for server in servers)
    assert set(tmp_path.iterdir()) == {living, without_lock}


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
