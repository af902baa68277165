"""MLflow's database is there whole or not at all, whenever its maker is killed; a broken one is told, not waited for.

Everything runs in one process that has imported MLflow, and in forks of it that are really killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from infra.lineage.messages import PipelineStarted
from infra.lineage.migrations import passes
from infra.lineage.outbox import Outbox
from infra.lineage.relay_lock import lineage_problem
from infra.servers.environment import server_environ
from tests.infra.lineage.relay_process import RelayProcess
from tests.support.programs.command import environment, typed

pytestmark = pytest.mark.cluster

WORKER = """
import json, logging, os, signal, sys, traceback
from pathlib import Path
import sqlalchemy
from alembic import command
from mlflow.store.db import utils
from infra.errors import StemmaError
from infra.lineage import migrations
from infra.lineage.tracking import database_path

logging.disable(logging.WARNING)

def engine(path):
    return sqlalchemy.create_engine(f"sqlite:///{path}", poolclass=sqlalchemy.pool.NullPool)

def make_in_place(root):
    '''As MLflow does it, and we once did.'''
    database_path(root).parent.mkdir(parents=True, exist_ok=True)
    utils._initialize_tables(engine(database_path(root)))

def make_old(root, revision):
    path = database_path(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    utils.InitialBase.metadata.create_all(engine(path))
    config = utils._get_alembic_config(f"sqlite:///{path}")
    with engine(path).begin() as config.attributes["connection"]:
        command.upgrade(config, revision)

def forked(do, *arguments):
    child = os.fork()
    if not child:
        try:
            do(*arguments)
            os._exit(0)
        except StemmaError as error:
            os.write(1, json.dumps(error.problems[0].as_json()).encode())
            os._exit(3)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}".encode())
            os._exit(4)
    return child

def code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def killed(do, root, size):
    '''Kills the maker once what it writes has `size` bytes; whether it was killed at all.'''
    child = forked(do, root)
    folder = database_path(root).parent
    while True:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        written = [path for path in folder.glob("mlflow.db*") if path.name in ("mlflow.db", "mlflow.db.unfinished")]
        if any(path.exists() and path.stat().st_size >= size for path in written):
            os.kill(child, signal.SIGKILL)
            return code(child) == -signal.SIGKILL

for line in sys.stdin:
    source, sys.argv, output = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), 1)
        os.dup2(1, 2)
        try:
            exec(source)
            status = 0
        except SystemExit as error:
            status = error.code
        except BaseException:
            traceback.print_exc()
            status = 4
        sys.stdout.flush()
        os._exit(status)
    print(code(child), flush=True)
"""
KILLED_AT = """
root, how, sizes = Path(sys.argv[0]), sys.argv[1], [int(size) for size in sys.argv[2:]]
do = {"aside": migrations.prepare, "in_place": make_in_place}[how]
for size in sizes:
    there = root / str(size)
    print(json.dumps([size, killed(do, there, size), code(forked(migrations.prepare, there))]), flush=True)
"""
PREPARE = "sys.exit(code(forked(migrations.prepare, sys.argv[0])))"
OLD = "c48cb773bb87"

Work = Callable[..., str]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Work]:
    """Runs code in a fork of one process that has imported MLflow; what it prints."""
    output = tmp_path_factory.mktemp("work") / "output"
    with subprocess.Popen(
        [sys.executable, "-c", WORKER],
        # No database is kept in such a home: all migrate.
        env=server_environ({"HOME": "/dev/null"}),
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def work(code: str, *arguments: object, expected: int = 0) -> str:
            output.write_text("")
            assert process.stdin is not None and process.stdout is not None
            print(json.dumps([code, [str(one) for one in arguments], str(output)]), file=process.stdin, flush=True)
            assert process.stdout.readline().strip() == str(expected), output.read_text()[-3000:]
            return output.read_text()

        yield work


def revision(database: Path) -> str:
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def database_of(root: Path) -> Path:
    return root / "mlflow" / "mlflow.db"


def add_run(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("INSERT INTO experiments (experiment_id, name) VALUES (7, 'ours')")
        connection.execute("INSERT INTO runs (run_uuid, name, experiment_id) VALUES ('r', 'r', 7)")


def runs(database: Path) -> list[tuple[str]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute("SELECT run_uuid FROM runs").fetchall()


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


SIZES = [1, 300_000, 500_000]


@pytest.mark.parametrize(
    ("how", "sizes"),
    [
        pytest.param("aside", SIZES, marks=pytest.mark.long),
        ("in_place", [300_000]),
        pytest.param("aside", range(1, 760_000, 8192), marks=pytest.mark.long),
        pytest.param("in_place", range(1, 760_000, 8192), marks=pytest.mark.long),
    ],
)
def test_a_kill_while_it_is_made_breaks_nothing(
    work: Work, tmp_path: Path, empty_store: Path, how: str, sizes: list[int]
) -> None:
    """in_place: what earlier versions left behind. Also the risk that the long one looks for: a moment in between."""
    told = [json.loads(line) for line in work(KILLED_AT, tmp_path, how, *sizes).splitlines()]
    assert sum(was_killed for _, was_killed, _ in told) >= len(sizes) * 0.9
    assert [size for size, _, code in told if code] == []
    newest = revision(database_of(empty_store))
    for size in sizes:
        database = database_of(tmp_path / str(size))
        assert revision(database) == newest
        # Set aside; or kept from before an upgrade, where what an earlier version left could go on.
        copies = (".broken-", ".revision-") if how == "in_place" else (".broken-",)
        left = {path.name for path in database.parent.iterdir() if not any(copy in path.name for copy in copies)}
        assert left == {"mlflow.db", "artifacts", "setup.lock"}


def test_several_makers_at_once_make_one(work: Work, tmp_path: Path, empty_store: Path) -> None:
    code = """
children = [forked(migrations.prepare, sys.argv[0]) for _ in range(4)]
sys.exit(sum(code(child) for child in children))
"""
    work(code, tmp_path)
    assert revision(database_of(tmp_path)) == revision(database_of(empty_store))
    assert not list((tmp_path / "mlflow").glob("mlflow.db.*"))


def test_a_new_one_begins_as_a_copy_of_the_last_that_was_made(work: Work, tmp_path: Path, empty_store: Path) -> None:
    from mlflow import __version__

    kept = tmp_path / ".cache" / "stemma" / f"mlflow-{__version__}.db"
    kept.parent.mkdir(parents=True)
    shutil.copyfile(database_of(empty_store), kept)
    with closing(sqlite3.connect(kept)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (OLD,))
    with_home = "os.environ['HOME'] = str(Path(sys.argv[0]).parent)\n" + PREPARE
    work(with_home, tmp_path / "first")
    newest = revision(database_of(empty_store))
    assert [revision(path) for path in (database_of(tmp_path / "first"), kept)] == [newest] * 2, "made, and kept"
    add_run(kept)
    work(with_home, tmp_path / "second")
    assert runs(database_of(tmp_path / "second")) == [("r",)]


def test_an_upgrade_keeps_a_copy_and_a_killed_one_leaves_the_old(work: Work, tmp_path: Path, empty_store: Path) -> None:
    database = database_of(tmp_path)
    work(f"make_old(sys.argv[0], '{OLD}')", tmp_path)
    add_run(database)
    before = checksum(database)
    code = """
def before_last_moment():
    migrations._replace_database = lambda temporary, path: os.kill(os.getpid(), signal.SIGKILL)
    migrations.prepare(sys.argv[0])
assert killed(migrations.prepare, Path(sys.argv[0]), 500_000)
assert code(forked(before_last_moment)) == -signal.SIGKILL
"""
    work(code, tmp_path)
    assert checksum(database) == before

    journal = database.with_name(f"{database.name}-journal")
    journal.write_bytes(bytes(4616))  # as a kill leaves it before it was synced
    work(PREPARE, tmp_path)
    assert not journal.exists(), "it is not of the new database"
    assert revision(database) == revision(database_of(empty_store))
    assert runs(database) == [("r",)]
    copy = max(database.parent.glob(f"mlflow.db.revision-{OLD}.*"))
    assert (revision(copy), runs(copy)) == (OLD, [("r",)])


@pytest.fixture
def broken(tmp_path: Path, empty_store: Path) -> Path:
    """A root whose database has a run, and an older revision than its tables: an upgrade was cut."""
    root = tmp_path / "broken"
    shutil.copytree(empty_store, root)
    add_run(database_of(root))
    with closing(sqlite3.connect(database_of(root))) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (OLD,))
    return root


def test_a_broken_one_with_runs_is_told_and_not_touched(work: Work, broken: Path) -> None:
    before = checksum(database_of(broken))
    problem = json.loads(work(PREPARE, broken, expected=3))
    assert (problem["code"], problem["path"]) == ("broken_database", str(database_of(broken)))
    assert OLD in problem["message"]
    assert "--rebuild" in problem["fix"]

    Outbox(broken).send(PipelineStarted("p", "quickstart", 1.0))
    assert RelayProcess(broken, "--until-empty").process.wait() == 1, "it does not wait for ever"
    assert lineage_problem(broken) == problem
    assert Outbox(broken).counts() == {"waiting": 1, "failed": 0}, "the message is not at fault"
    assert checksum(database_of(broken)) == before
    status = typed("status", "--root", str(broken), env=environment(STEMMA_RELAY="on"), cwd=broken)
    assert (
        f"1 messages are waiting for it: {database_of(broken)}: an upgrade of its tables was interrupted"
        in status.stdout
    )


def test_a_file_that_is_no_database_and_one_of_a_newer_mlflow_are_told(
    work: Work, tmp_path: Path, empty_store: Path
) -> None:
    garbage, newer = tmp_path / "garbage", tmp_path / "newer"
    database_of(garbage).parent.mkdir(parents=True)
    database_of(garbage).write_bytes(os.urandom(5000))
    assert json.loads(work(PREPARE, garbage, expected=3))["code"] == "broken_database"
    shutil.copytree(empty_store, newer)
    with closing(sqlite3.connect(database_of(newer))) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    problem = json.loads(work(PREPARE, newer, expected=3))
    assert (problem["code"], problem["path"]) == ("newer_database", str(database_of(newer)))


def test_a_locked_database_is_waited_for(root: Path, start_relay: Any, eventually: Any) -> None:
    with closing(sqlite3.connect(database_of(root), isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        Outbox(root).send(PipelineStarted("p", "quickstart", 1.0))
        relay = start_relay(lock_timeout_s=1.0)
        eventually(lambda: "cannot be written now" in relay.log.read_text(), "the relay notices")
        assert relay.process.poll() is None
        other.execute("ROLLBACK")
    eventually(lambda: not Outbox(root).pending(), "it goes on")


def test_a_server_that_is_too_slow_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection, and says nothing."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(MlflowException) as raised:
            MlflowClient(address).get_run("0" * 32)
    assert passes(raised.value)
    assert not passes(MlflowException("a metric that is none", error_code=1000))
