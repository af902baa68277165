"""A run is done only if every stage has its artifact; whatever else happened is a failure with a name."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.deployment.start import exit_code
from flows.runs.journal import JournalRow, Status
from flows.runs.journal_forms import HAS_ARTIFACT
from flows.runs.verdict import verdict
from infra.errors import Cancelled, ConfigError, GateRefused, Problem, StageError, StemmaError
from tasks.processes.failures import failure_of
from tests.flows.runs.test_rerun import STAGES
from tests.support.programs.command import Answer

Run = Callable[..., Answer]
NAMES = "abcdef"
ERRORS = st.sampled_from([StageError, ConfigError, GateRefused, Cancelled]).map(
    lambda kind: kind(Problem("code", "", "message"))
)
EXCEPTIONS = st.sampled_from(
    [
        StageError(),
        OSError(1, "no"),
        OSError(),
        AttributeError("x"),
        KeyError(),
        ZeroDivisionError("a\nb"),
        SystemExit(0),
    ]
)


@given(
    statuses=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(get_args(Status)), min_size=1),
    errors=st.dictionaries(st.sampled_from(NAMES), ERRORS),
    edges=st.dictionaries(st.sampled_from(NAMES), st.sets(st.sampled_from(NAMES))),
    stopped=st.booleans(),
)
def test_done_means_that_every_stage_has_its_artifact(
    statuses: dict[str, Status], errors: dict[str, StemmaError], edges: dict[str, set[str]], stopped: bool
) -> None:
    rows = {name: JournalRow(name, status) for name, status in statuses.items()}
    upstream = {name: sorted(up for up in ups if up < name) for name, ups in edges.items()}
    status, problems = verdict(rows, errors, upstream, stopped)
    document = {"status": status, "errors": [problem.as_json() for problem in problems]}
    whole = set(statuses.values()) <= HAS_ARTIFACT and not errors and not stopped
    assert (status == "done") == whole
    assert (exit_code(document) == 0) == whole
    assert bool(problems) == (not whole)
    if not stopped:
        named = {problem.path for problem in problems}
        unnamed = {name for name in rows if statuses[name] not in HAS_ARTIFACT and name not in named}
        assert all(statuses[name] == "skipped" for name in unnamed)
        assert set(errors) <= named


@given(EXCEPTIONS)
def test_any_exception_is_a_failure_with_a_code_and_a_place(error: BaseException) -> None:
    failure = failure_of(error, "clean", Path("/store"))
    assert failure.exit_code != 0
    for problem in failure.problems:
        assert problem.code and problem.path and problem.message and "\n" not in problem.message


def test_a_database_on_a_disk_that_became_read_only_is_named() -> None:
    database = sqlite3.OperationalError("attempt to write a readonly database")
    database.sqlite_errorcode = sqlite3.SQLITE_READONLY_DBMOVED
    (problem,) = failure_of(database, "clean", Path("/store")).problems
    assert (problem.code, problem.path) == ("not_permitted", "/store") and "readonly database" in problem.message


def test_a_disk_that_fails_is_named_by_files_and_by_databases() -> None:
    database = sqlite3.OperationalError("disk I/O error")
    database.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
    for error in (OSError(errno.EIO, "Input/output error", "/store/clean/part"), database):
        (problem,) = failure_of(error, "clean", Path("/store")).problems
        assert problem.code == "disk_failed" and problem.path.startswith("/store")


def assert_honest(answer: Answer) -> None:
    """Done, exit code 0 and an artifact of each stage come together or not at all."""
    whole = set(answer.statuses().values()) <= HAS_ARTIFACT
    assert (answer.code == 0) == whole == (answer.document["status"] == "done"), answer.document
    assert whole != bool(answer.document["errors"])
    assert not set(answer.statuses().values()) & {"waiting", "running"}


def test_a_manifest_that_nobody_foresaw_is_rebuilt_or_named(run: Run, data_pipeline: Path) -> None:
    store = data_pipeline / "store"
    (path,) = (store / "clean").glob("*/manifest.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"result": None}))
    assert_honest(run("run", data_pipeline / "config.yaml", "--root", store))


@contextmanager
def immutable(folder: Path) -> Iterator[None]:
    """A folder in which not even root can write."""
    command = ["chattr", "+i", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root can make a folder immutable, and not on every file system")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=True)


def test_a_folder_that_cannot_be_written_is_named(run: Run, data_pipeline: Path) -> None:
    store = data_pipeline / "store"
    work = store / ".work" / "clean"
    work.mkdir(parents=True, exist_ok=True)
    with immutable(work):
        answer = run("run", data_pipeline / "config.yaml", "--root", store, "--force", "clean", "--debug")
    assert_honest(answer)
    assert answer.statuses() == dict.fromkeys(sorted(STAGES), "reused") | {"clean": "failed", "tokenizer": "skipped"}
    (problem,) = answer.document["errors"]
    assert problem["code"] == "not_permitted"
    assert str(work) in problem["path"] and "clean" in problem["message"] and problem["fix"]
    assert "Traceback" in answer.stderr and "tasks/building/build.py" in answer.stderr
