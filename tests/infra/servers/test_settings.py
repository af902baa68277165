"""What servers are opened with: refused without credentials, kept over a reboot, and no secret in any file."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from infra.errors import ConfigError, StageError
from infra.servers.databases.database import Postgres, requested_database
from infra.servers.ports import is_free
from infra.servers.services import of_older_code
from infra.servers.settings import Settings, chosen, settings_of
from infra.servers.state import Service, make_servers_folder
from tests.support.programs.command import Answer, environment, stemma
from tests.support.services.postgres import postgres

GOOD = "ada:correct-horse-battery"
URL = "postgresql://stemma:s%40fe-secret@db.example:5433/stemma"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STEMMA_AUTH", "STEMMA_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)


def refused(answer: Answer, code: str) -> str:
    assert (answer.code, answer.document["status"]) == (2, "invalid")
    [problem] = answer.document["errors"]
    assert problem["code"] == code
    return f"{problem['path']} {problem['message']} {problem['fix']}"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_an_address_that_others_reach_is_refused_without_credentials(tmp_path: Path, host: str) -> None:
    told = refused(stemma("up", "--root", tmp_path, "--host", host), "no_credentials")
    assert "export STEMMA_AUTH=" in told
    assert not (tmp_path / "servers" / "services.json").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.0.1"])
def test_loopback_needs_none(host: str) -> None:
    assert chosen(Settings(), host).host == host


@pytest.mark.parametrize("auth", ["secret-without-user", "ada:short", ":correct-horse-battery", "ada:"])
def test_credentials_that_are_none_are_refused_and_not_repeated(tmp_path: Path, auth: str) -> None:
    told = refused(stemma("up", "--root", tmp_path, env=environment(STEMMA_AUTH=auth)), "bad_credentials")
    assert auth not in told


def test_guarded_servers_do_not_start_open_after_a_reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Settings(host="0.0.0.0", guarded=True)
    with pytest.raises(ConfigError, match="reached from other machines"):
        chosen(before, None)
    with pytest.raises(ConfigError, match="were started with credentials"):
        chosen(before, "127.0.0.1")
    monkeypatch.setenv("STEMMA_AUTH", "off")
    assert chosen(before, "127.0.0.1") == Settings()
    with pytest.raises(ConfigError):
        chosen(before, None)
    monkeypatch.setenv("STEMMA_AUTH", GOOD)
    assert chosen(before, None) == before


def test_the_database_is_remembered_without_its_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STEMMA_DATABASE_URL", URL)
    settings = chosen(Settings(), None)
    make_servers_folder(tmp_path)
    settings.write(tmp_path)
    written = tmp_path / "servers" / "settings.json"
    assert "fe-secret" not in written.read_text()
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert stat.S_IMODE(written.parent.stat().st_mode) == 0o700
    assert settings.postgres == Postgres(URL)
    monkeypatch.delenv("STEMMA_DATABASE_URL")
    assert chosen(settings_of(tmp_path), None).database == "postgresql://stemma@db.example:5433/stemma"
    monkeypatch.setenv("STEMMA_DATABASE_URL", "sqlite")
    assert chosen(settings_of(tmp_path), None).postgres is None


def test_a_database_never_shows_its_password() -> None:
    assert "fe-secret" not in repr(Postgres(URL)) + Postgres(URL).public_url
    assert Postgres(URL).mlflow_uri.startswith("postgresql+psycopg2://stemma:s%40fe-secret@db.example:5433/stemma?")


@pytest.mark.parametrize(
    "url",
    ["mysql://a:hush-hush@h/db", "postgresql://a:hush-hush@h", "postgresql://a:hush-hush@h:port/db", "/a/hush-hush.db"],
)
def test_another_database_is_refused_without_repeating_it(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("STEMMA_DATABASE_URL", url)
    with pytest.raises(ConfigError) as caught:
        requested_database()
    assert "postgresql://USER:PASSWORD@HOST" in str(caught.value)
    assert "hush-hush" not in str(caught.value)


def test_a_database_that_does_not_answer_is_named_without_its_password(tmp_path: Path) -> None:
    url = "postgresql://ada:hush-hush@127.0.0.1:1/stemma"
    answer = stemma("up", "--root", tmp_path, env=environment(STEMMA_DATABASE_URL=url))
    [problem] = answer.document["errors"]
    assert (answer.code, problem["code"]) == (1, "database_unreachable")
    assert problem["path"] == "postgresql://ada@127.0.0.1:1/stemma"
    assert "hush-hush" not in str(answer)


def test_a_database_that_cannot_hold_every_character_is_refused(tmp_path: Path) -> None:
    with postgres(encoding="SQL_ASCII") as url:
        answer = stemma("up", "--root", tmp_path, env=environment(STEMMA_DATABASE_URL=url))
    told = refused(answer, "bad_database")
    assert "SQL_ASCII" in told
    assert "createdb --encoding UTF8" in told


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(StageError, match=r"192\.0\.2\.1 is not an address of this machine"):
        is_free(4200, "192.0.2.1")


def test_servers_that_are_older_than_the_code_are_named() -> None:
    """`up` keeps what runs, and says what a change of the code does not reach."""
    now = time.time()
    assert of_older_code([Service("mlflow", "", 1, now + 1), Service("worker", "", 1, now + 1)]) == ""
    assert of_older_code([Service("mlflow", "", 1, now + 1), Service("relay", "", 1, 0.0)]) == "the lineage relay"
