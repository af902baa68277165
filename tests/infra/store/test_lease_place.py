"""All who use a store see the same leases: in PostgreSQL where one is configured, else in SQLite; never in both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infra.errors import ConfigError, StageError
from infra.leases.postgres import PostgresTable
from infra.servers.settings import Settings
from infra.servers.state import make_servers_folder
from infra.store.store import Store
from tests.support.programs.command import environment
from tests.support.services.postgres import PASSWORD

URL = "STEMMA_DATABASE_URL"
PLACE = """
import sys
from pathlib import Path
from infra.store.store import Store
store = Store(Path(sys.argv[1]))
lease = store.leases.acquire("sft/1")
number = Path(sys.argv[2])
number.write_text(str(int(number.read_text()) + 1))
lease.release()
"""


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (URL, "PGPASSWORD", "PGPASSFILE"):
        monkeypatch.delenv(name, raising=False)


def state(store: Store) -> dict[str, str]:
    found: dict[str, str] = json.loads((store.layout.state / "leases.json").read_text())
    return found


def refusal(store: Store) -> tuple[str, str, str]:
    """How a store refuses to hand out a lease: code, place and what to do."""
    with pytest.raises(StageError) as caught:
        store.leases.acquire("sft/1", stop_if=lambda: True)
    (problem,) = caught.value.problems
    return problem.code, problem.path, problem.fix


def test_without_a_postgresql_leases_stay_in_sqlite(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    assert state(store)["database"] == "sqlite"
    assert (store.layout.state / "leases.sqlite").exists()


def test_stores_share_a_database_and_no_lease(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL, database)
    one, other = Store(tmp_path / "one"), Store(tmp_path / "other")
    lease, beside = one.leases.acquire("sft/1"), other.leases.acquire("sft/1", stop_if=lambda: True)
    assert lease is not None and beside is not None
    lease.release()
    assert (one.being_built(), other.being_built()) == ([], ["sft/1"])
    assert Store(other.root, reading=True).being_built() == ["sft/1"]
    beside.release()
    assert not (one.layout.state / "leases.sqlite").exists()


def test_the_store_remembers_its_database_without_the_password(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL, database)
    lease = Store(tmp_path).leases.acquire("sft/1")
    assert lease is not None
    told = json.dumps(dict(lease.claim.table)) + (tmp_path / ".state" / "leases.json").read_text()
    assert PASSWORD not in told and database.replace(f":{PASSWORD}", "") in told

    monkeypatch.delenv(URL)
    code, place, fix = refusal_of_check(tmp_path)
    assert (code, place) == ("database_unreachable", database.replace(f":{PASSWORD}", "")) and URL in fix
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    assert Store(tmp_path).being_built() == ["sft/1"], "libpq has the password from elsewhere"
    lease.release()


def refusal_of_check(root: Path) -> tuple[str, str, str]:
    with pytest.raises(StageError) as caught:
        Store(root, reading=True).check_leases()
    (problem,) = caught.value.problems
    return problem.code, problem.path, problem.fix


def test_another_database_is_refused_and_another_name_of_the_same_is_not(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL, database)
    assert Store(tmp_path).leases.table.rows() == []
    monkeypatch.setenv(URL, database.replace("127.0.0.1", "localhost"))
    lease = Store(tmp_path).leases.acquire("sft/1", stop_if=lambda: True)
    assert lease is not None
    lease.release()

    other = database.rpartition("/")[0] + "/postgres"
    monkeypatch.setenv(URL, other)
    for has_schema in (False, True):
        code, place, fix = refusal(Store(tmp_path))
        assert (code, place) == ("leases_elsewhere", other.replace(f":{PASSWORD}", "")) and ".state/leases.json" in fix
        assert refusal_of_check(tmp_path)[0] == "leases_elsewhere"
        with pytest.raises(StageError, match="expected the leases of this store in this database"):
            Store(tmp_path, reading=True).being_built()
        if not has_schema:
            assert Store(tmp_path / "another").leases.table.rows() == []

    monkeypatch.setenv(URL, "sqlite")
    assert refusal(Store(tmp_path))[:2] == ("leases_elsewhere", URL)


def test_the_database_of_the_servers_is_that_of_the_leases(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `up` left it: the URL stands in its settings, without the password."""
    make_servers_folder(tmp_path)
    Settings(database=database.replace(f":{PASSWORD}", "")).write(tmp_path)
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    assert isinstance(Store(tmp_path).leases.table, PostgresTable)


def test_a_new_store_gets_no_second_place_while_its_database_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL, "postgresql://stemma:pass-3571@127.0.0.1:1/stemma")
    store = Store(tmp_path)
    code, place, _ = refusal(store)
    assert (code, place) == ("database_unreachable", "postgresql://stemma@127.0.0.1:1/stemma")
    assert list(store.layout.state.glob("leases.*")) == []
    monkeypatch.setenv(URL, "postgres:///")
    with pytest.raises(ConfigError, match="was expected"):
        Store(tmp_path)


def test_leases_in_sqlite_are_moved_by_a_person_who_knows_that_nothing_runs(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Store(tmp_path)
    lease = before.leases.acquire("sft/1")
    assert lease is not None

    monkeypatch.setenv(URL, database)
    with pytest.raises(StageError) as caught:
        Store(tmp_path).leases.acquire("sft/1", stop_if=lambda: True)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("leases_elsewhere", URL) and ".state/leases.*" in problem.fix
    assert PASSWORD not in str(problem)
    assert refusal_of_check(tmp_path) == (problem.code, problem.path, problem.fix)
    assert Store(tmp_path, reading=True).being_built() == ["sft/1"] and state(before)["database"] == "sqlite"
    lease.release()

    for path in before.layout.state.glob("leases.*"):
        path.unlink()
    assert isinstance(Store(tmp_path).leases.table, PostgresTable)
    assert state(before)["database"] == database.replace(f":{PASSWORD}", "")


def test_of_those_who_open_a_new_store_at_once_one_at_a_time_holds_a_lease(database: str, tmp_path: Path) -> None:
    """Two have the URL and two find the password elsewhere. If one of the latter is first, those with the URL are
    refused."""
    number = tmp_path / "number"
    number.write_text("0")
    environments = [environment(**{URL: database}), environment(PGPASSWORD=PASSWORD)] * 2
    command = [sys.executable, "-c", PLACE, str(tmp_path / "store"), str(number)]
    processes = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for env in environments]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    succeeded = [process.returncode == 0 for process in processes]
    assert number.read_text() == str(sum(succeeded))
    assert succeeded[1::2] == [True] * 2 and succeeded[0] == succeeded[2], errors
    assert all(
        done or "leases of this store are in SQLite" in error for done, error in zip(succeeded, errors, strict=True)
    )
