"""The files of a store beside its artifacts: damaged, they are named, or set aside where nothing is lost by it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.runs.garbage import Pins
from flows.runs.journal import RunJournal
from infra.errors import StageError
from infra.lineage.ledger import Ledger, ledger_path, mlflow_run_id
from infra.servers.settings import settings_of
from infra.servers.state import recorded
from infra.store.promotions import Promotions
from infra.store.store import Store
from tests.support.artifacts import Make
from tests.support.programs.command import REPOSITORY


def garbage(path: Path) -> None:
    path.write_bytes(b"no database, whatever its name says" * 100)


def broken_pages(path: Path) -> None:
    """A header as it should be, and nonsense behind it."""
    data = bytearray(path.read_bytes())
    data[100:] = b"\xa5" * (len(data) - 100)
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 7)


DAMAGE = [garbage, broken_pages, cut]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_hash_book_is_set_aside_and_nothing_is_lost(
    store: Store, make: Make, damage: Callable[[Path], None]
) -> None:
    made = make("clean", {str(number): f"text {number}" for number in range(300)})
    book = store.root / ".state" / "hashes.sqlite"
    damage(book)
    for opened in (store, Store(store.root)):
        assert opened.differences(opened.path(made), made) == []
    assert list(book.parent.glob("hashes.sqlite.damaged-*"))
    (opened.path(made) / "7").write_text("flip")
    assert [item.what for item in opened.differences(opened.path(made), made)] == ["changed"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_lease_table_is_named_with_what_is_lost_by_deleting_it(
    store: Store, make: Make, damage: Callable[[Path], None]
) -> None:
    make("clean", {"a": "text"})
    lease = store.leases.acquire("sft/1")
    assert lease is not None
    lease.release()
    table = store.root / ".state" / "leases.sqlite"
    damage(table)
    with pytest.raises(StageError) as caught:
        Store(store.root)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("damaged_state", str(table))
    assert "when nothing runs on this store, delete it" in problem.fix
    table.unlink()
    assert Store(store.root).being_built() == []


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_ledger_hides_links_until_the_relay_sets_it_aside(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    Ledger(tmp_path).close()
    damage(ledger_path(tmp_path))
    assert mlflow_run_id(tmp_path, "a build") is None
    ledger = Ledger(tmp_path)
    assert ledger.run("a build") is None
    ledger.close()


@pytest.mark.parametrize(
    "text", ["{", "7", '"text"', '[{"name": 1}]', "[" * 100_000, '{"no_such": 1, "stages": [5], "status": "done"}']
)
def test_a_damaged_small_file_is_named(tmp_path: Path, text: str) -> None:
    journal = RunJournal(tmp_path / "runs", "a run")
    readers: dict[Path, Callable[[], object]] = {
        tmp_path / "pins.json": Pins(tmp_path).read,
        tmp_path / "servers" / "services.json": lambda: recorded(tmp_path),
        tmp_path / "servers" / "settings.json": lambda: settings_of(tmp_path),
        journal.folder / "result.json": journal.result,
        tmp_path / "promotions.json": Promotions(tmp_path).all,
    }
    for path, read in readers.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        with pytest.raises(StageError, match="delete") as caught:
            read()
        (problem,) = caught.value.problems
        assert (problem.code, problem.path) == ("damaged_state", str(path))


def test_a_locked_table_is_no_damage(store: Store) -> None:
    with sqlite3.connect(store.root / ".state" / "hashes.sqlite") as book:
        book.execute("BEGIN IMMEDIATE")
        assert Store(store.root, reading=True).layout.stages() == []
    assert not list((store.root / ".state").glob("*.damaged-*"))


def test_a_user_without_a_name_has_one_everywhere() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can be somebody else")
    program = (
        "import getpass, os; from infra.project import name_user, user_name; from infra.lineage.page import _flow\n"
        "from infra.lineage.messages import PipelineStarted\n"
        "os.setuid(54321)\n"
        "print(user_name(), _flow(PipelineStarted('a', 'b', 0.0, {}, '', '', {}))['mlflow.user'])\n"
        "name_user()\n"
        "print(getpass.getuser())\n"
    )
    kept = {key: value for key, value in os.environ.items() if key not in ("USER", "LOGNAME", "LNAME", "USERNAME")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**kept, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["uid 54321 uid 54321", "uid-54321"], done.stderr
