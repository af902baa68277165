"""Ledger of delivered messages: <root>/lineage/delivered.sqlite. Losing it costs look-ups in MLflow, nothing else."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import StageError
from infra.io.json import parse_own_json
from infra.io.tables import check, damaged, in_words, set_aside
from infra.lineage.page import run_path
from infra.lineage.relay_lock import lineage_folder
from infra.servers.settings import mlflow_page

_TABLES = """
CREATE TABLE IF NOT EXISTS runs (
    build_id TEXT PRIMARY KEY, run_id TEXT, experiment_id TEXT, parent_id TEXT, about TEXT, sender TEXT,
    artifact_uri TEXT, attempts INT DEFAULT 0, open INT DEFAULT 1);
CREATE TABLE IF NOT EXISTS tails (build_id TEXT PRIMARY KEY, path TEXT, offset INT DEFAULT 0);
CREATE TABLE IF NOT EXISTS models (digest TEXT, experiment_id TEXT, model_id TEXT, PRIMARY KEY (digest, experiment_id));
CREATE TABLE IF NOT EXISTS rows (parent_id TEXT, stage TEXT, row TEXT, PRIMARY KEY (parent_id, stage));
CREATE TABLE IF NOT EXISTS failures (name TEXT PRIMARY KEY, attempts INT);
"""


@dataclass(frozen=True)
class DeliveredRun:
    """An MLflow run and the build it stands for. about: the JSON of the message that started it."""

    build_id: str
    run_id: str
    experiment_id: str
    parent_id: str
    about: dict[str, Any]
    sender: dict[str, Any]
    artifact_uri: str
    attempts: int
    open: bool


def ledger_path(root: Path | str) -> Path:
    return lineage_folder(root) / "delivered.sqlite"


def mlflow_run_id(root: Path | str, build_id: str) -> str | None:
    """The MLflow run of a build, once the relay has delivered its start; reads one row, imports no MLflow."""
    run = _row(root, "SELECT run_id FROM runs WHERE build_id = ?", build_id)
    return run[0] if run else None


def ended_unheard(root: Path | str, build_id: str) -> bool:
    """True for a build of which MLflow knows the start, and no more but that its process went without a word."""
    query = """
        SELECT json_extract(rows.row, '$.outcome') FROM runs
        JOIN rows ON rows.parent_id = runs.parent_id AND rows.stage = json_extract(runs.about, '$.stage')
        WHERE runs.build_id = ? AND json_extract(rows.row, '$.build_id') = runs.build_id
        """
    outcome = _row(root, query, build_id)
    return outcome is not None and outcome[0] != "built"


def run_url(root: Path | str, build_id: str, file: str = "") -> str | None:
    """The page of a build's run, or of a file among its artifacts, in the MLflow server of `up`; None while it does not
    run or knows no such run yet."""
    server = mlflow_page(root)
    run = _row(root, "SELECT experiment_id, run_id FROM runs WHERE build_id = ?", build_id) if server else None
    return f"{server}/{run_path(run[0], run[1], file)}" if run and run[1] else None


def file_url(root: Path | str, pipeline_build_id: str, stage: str, name: str) -> str | None:
    """The page of a file in the artifacts of a stage's newest run within a pipeline's; None as for `run_url`."""
    server = mlflow_page(root)
    query = """
        SELECT experiment_id, run_id FROM runs WHERE parent_id = ? AND json_extract(about, '$.stage') = ?
        ORDER BY rowid DESC
        """
    run = _row(root, query, pipeline_build_id, stage) if server else None
    return f"{server}/{run_path(run[0], run[1], name)}" if run and run[1] else None


def _row(root: Path | str, query: str, *values: str) -> tuple | None:
    path = ledger_path(root)
    if not path.exists():
        return None
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=10)) as connection:
        try:
            return connection.execute(query, values).fetchone()
        except sqlite3.DatabaseError:
            # The relay has just made the file and no tables yet, or will set a damaged one aside.
            return None


class Ledger:
    """The relay's side; only one process at a time writes."""

    def __init__(self, root: Path | str) -> None:
        path = ledger_path(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            check(path, "")
            self._connection = _opened(path)
        except StageError:
            set_aside(path)
            self._connection = _opened(path)

    def close(self) -> None:
        self._connection.close()

    def run(self, build_id: str) -> DeliveredRun | None:
        row = self._fetch_one("SELECT * FROM runs WHERE build_id = ? AND run_id IS NOT NULL", build_id)
        return _delivered(row) if row else None

    def attempt(self, build_id: str, parent_id: str, about: dict[str, Any], sender: dict[str, Any]) -> None:
        """Record that a run is about to be made: a second attempt may find that the first one got through."""
        self._execute(
            "INSERT INTO runs (build_id, parent_id, about, sender) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
            build_id,
            parent_id,
            json.dumps(about),
            json.dumps(sender),
        )
        self._execute("UPDATE runs SET attempts = attempts + 1 WHERE build_id = ?", build_id)

    def made(self, build_id: str, run_id: str, experiment_id: str, artifact_uri: str) -> None:
        self._execute(
            "UPDATE runs SET run_id = ?, experiment_id = ?, artifact_uri = ? WHERE build_id = ?",
            run_id,
            experiment_id,
            artifact_uri,
            build_id,
        )

    def goes_on(self, build_id: str, sender: dict[str, Any]) -> None:
        """A build that had ended works again, in another process."""
        self._execute("UPDATE runs SET open = 1, sender = ? WHERE build_id = ?", json.dumps(sender), build_id)

    def ended(self, build_id: str) -> None:
        self._execute("UPDATE runs SET open = 0 WHERE build_id = ?", build_id)
        self._execute("DELETE FROM tails WHERE build_id = ?", build_id)

    def family(self, build_id: str) -> list[DeliveredRun]:
        """Return the runs of a pipeline run's stages, and then its own."""
        query = (
            "SELECT * FROM runs WHERE (build_id = ?1 OR parent_id = ?1) AND run_id IS NOT NULL ORDER BY build_id = ?1"
        )
        return [_delivered(row) for row in self._fetch_all(query, build_id)]

    def forget(self, build_id: str) -> None:
        """Remove all that is known of a pipeline run and its stages."""
        self._execute("DELETE FROM tails WHERE build_id IN (SELECT build_id FROM runs WHERE parent_id = ?)", build_id)
        self._execute("DELETE FROM rows WHERE parent_id = ?", build_id)
        self._execute("DELETE FROM runs WHERE build_id = ?1 OR parent_id = ?1", build_id)

    def open_runs(self) -> list[DeliveredRun]:
        return [_delivered(row) for row in self._fetch_all("SELECT * FROM runs WHERE open AND run_id IS NOT NULL")]

    def follow(self, build_id: str, path: str) -> None:
        self._execute("INSERT INTO tails (build_id, path) VALUES (?, ?) ON CONFLICT DO NOTHING", build_id, path)

    def tails(self) -> list[tuple[str, str, int]]:
        """Return (build_id, path, offset in bytes) of the metric files that are being followed."""
        return [tuple(row) for row in self._fetch_all("SELECT build_id, path, offset FROM tails")]

    def advance(self, build_id: str, offset: int) -> None:
        self._execute("UPDATE tails SET offset = ? WHERE build_id = ?", offset, build_id)

    def model_id(self, digest: str, experiment_id: str | None = None) -> str | None:
        """The logged model with a payload digest, preferably of the given experiment."""
        row = self._fetch_one(
            "SELECT model_id FROM models WHERE digest = ? ORDER BY experiment_id = ? DESC", digest, experiment_id or ""
        )
        return row[0] if row else None

    def model_made(self, digest: str, experiment_id: str, model_id: str) -> None:
        self._execute("INSERT OR REPLACE INTO models VALUES (?, ?, ?)", digest, experiment_id, model_id)

    def set_row(self, parent_id: str, stage: str, **values: Any) -> None:
        """Add to the pipeline page's row of a stage."""
        row = self._fetch_one("SELECT row FROM rows WHERE parent_id = ? AND stage = ?", parent_id, stage)
        merged = (parse_own_json(row[0]) if row else {}) | values
        self._execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?)", parent_id, stage, json.dumps(merged))

    def rows(self, parent_id: str) -> dict[str, dict[str, Any]]:
        records = self._fetch_all("SELECT stage, row FROM rows WHERE parent_id = ?", parent_id)
        rows = {row["stage"]: parse_own_json(row["row"]) for row in records}
        return dict(sorted(rows.items(), key=lambda item: item[1].get("time", 0.0)))

    def failed(self, name: str) -> int:
        """Count one more failure of a message; return how many there were."""
        self._execute(
            "INSERT INTO failures VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET attempts = attempts + 1",
            name,
        )
        row = self._fetch_one("SELECT attempts FROM failures WHERE name = ?", name)
        return int(row[0]) if row else 0

    def _execute(self, query: str, *values: Any) -> None:
        self._connection.execute(query, values)

    def _fetch_one(self, query: str, *values: Any) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self._connection.execute(query, values).fetchone()
        return row

    def _fetch_all(self, query: str, *values: Any) -> list[sqlite3.Row]:
        return self._connection.execute(query, values).fetchall()


_MISFITS = """
SELECT (SELECT count(*) FROM runs WHERE coalesce(json_type(iif(json_valid(about), about, '0')), '') != 'object'
           OR coalesce(json_type(iif(json_valid(sender), sender, '0')), '') != 'object'
           OR typeof(attempts) != 'integer' OR typeof(open) != 'integer'
           OR typeof(run_id) NOT IN ('text', 'null') OR typeof(experiment_id) NOT IN ('text', 'null')
           OR typeof(parent_id) NOT IN ('text', 'null') OR typeof(artifact_uri) NOT IN ('text', 'null'))
     + (SELECT count(*) FROM tails WHERE typeof(path) != 'text' OR typeof(offset) != 'integer')
     + (SELECT count(*) FROM models WHERE typeof(digest) || typeof(experiment_id) || typeof(model_id) != 'texttexttext')
     + (SELECT count(*) FROM rows WHERE typeof(stage) != 'text'
           OR coalesce(json_type(iif(json_valid("row"), "row", '0')), '') != 'object'
           OR coalesce(json_type(iif(json_valid("row"), "row", '{}'), '$.time'), 'real') NOT IN ('real', 'integer'))
     + (SELECT count(*) FROM failures WHERE typeof(name) != 'text' OR typeof(attempts) != 'integer')
"""
"""Count rows with cells of another form than this program writes: a cell of SQLite may have any type."""


def _opened(path: Path) -> sqlite3.Connection:
    """Connection with all tables. Raises StageError `damaged_state` for tables or rows of another form."""
    connection = sqlite3.connect(path, timeout=60, isolation_level=None)
    connection.row_factory = sqlite3.Row
    try:
        with in_words(path, ""):
            connection.executescript(_TABLES)
            [misfits] = connection.execute(_MISFITS).fetchone()
        if misfits:
            raise damaged(path, f"{misfits} rows are not as expected", "")
    except BaseException:
        connection.close()
        raise
    return connection


def _delivered(row: sqlite3.Row) -> DeliveredRun:
    values = dict(row)
    return DeliveredRun(
        **values
        | {
            "about": parse_own_json(values["about"]),
            "sender": parse_own_json(values["sender"]),
            "open": bool(values["open"]),
        }
    )
