"""State of a store in another form than this program writes: each as small as the fuzzing found it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import xxhash

from corpus.documents.selection import read_batches
from corpus.generation.answers import AnswerStore, EndpointAnswer
from flows.runs.journal import RunJournal
from infra.errors import StageError
from infra.io.json import BadJson, parse_own_json
from infra.leases.lease import Leases
from infra.leases.place import table
from infra.lineage.ledger import Ledger, ledger_path
from infra.store.layout import Layout
from infra.store.states import KeptState
from training.checkpoint.snapshot import Snapshot
from training.checkpoint.states import place_in

LEASE = ("a/b", "t", "h b", 1, 2.0, 3, 4.0)
COLUMNS = "key TEXT PRIMARY KEY, token TEXT, host TEXT, pid INT, pid_started REAL, work_group INT, renewed REAL"


def execute(path: Path, *statements: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE leases SET pid = 'x'",
        "UPDATE leases SET renewed = NULL",
        "UPDATE leases SET host = x'fffe'",
        "ALTER TABLE leases DROP COLUMN host",
        "ALTER TABLE leases RENAME COLUMN renewed TO other",
    ],
)
def test_leases_of_another_form_are_damaged_state(statement: str, tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.create()
    lease = str(LEASE)
    execute(layout.state / "leases.sqlite", f"CREATE TABLE leases ({COLUMNS})", f"INSERT INTO leases VALUES {lease}")
    assert Leases(table(layout)).living() == []
    execute(layout.state / "leases.sqlite", statement)
    with pytest.raises(StageError, match=r"leases.sqlite: this file is damaged") as raised:
        Leases(table(layout)).living()
    assert "when nothing runs on this store, delete it" in str(raised.value)


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE failures RENAME COLUMN name TO other",
        "DROP TABLE rows",
        """UPDATE runs SET about = '3'""",
        "UPDATE runs SET sender = x'ff'",
        """UPDATE rows SET "row" = '[]'""",
        """UPDATE rows SET "row" = '{"time": "x"}'""",
        "UPDATE models SET model_id = x'ff'",
    ],
)
def test_a_ledger_of_delivered_messages_of_another_form_is_set_aside(statement: str, tmp_path: Path) -> None:
    with closing(Ledger(tmp_path)) as ledger:
        ledger.attempt("b", "p", {"stage": "sft"}, {"pid": 1})
        ledger.made("b", "r", "1", "u")
        ledger.set_row("p", "sft", time=1.0)
        ledger.model_made("d", "1", "m")
    with closing(Ledger(tmp_path)) as ledger:
        assert [run.run_id for run in ledger.open_runs()] == ["r"]
        assert list(ledger.rows("p")) == ["sft"]
    drops = statement.startswith("DROP")
    execute(ledger_path(tmp_path), statement, *(["CREATE TABLE rows (a)"] if drops else []))
    with closing(Ledger(tmp_path)) as ledger:
        assert ledger.open_runs() == [] and ledger.rows("p") == {} and ledger.failed("x") == 1
    assert list(ledger_path(tmp_path).parent.glob("*.damaged-*"))


@pytest.mark.parametrize("content", [3, "3", "[]", "{", '{"text": 3}', '{"other": "x"}', b"\xff"], ids=str)
def test_a_kept_answer_of_another_form_is_asked_for_again(content: Any, tmp_path: Path) -> None:
    with closing(AnswerStore(tmp_path)) as store:
        store.put([("k", EndpointAnswer("a"))])
        assert store.get("k") == EndpointAnswer("a")
        with store._file:
            store._file.execute("UPDATE answers SET answer = ?", (content,))
        assert store.get("k") is None
        store.put([("k", EndpointAnswer("b"))])
        assert store.get("k") == EndpointAnswer("b")


def test_a_cell_that_is_no_text_is_no_json() -> None:
    with pytest.raises(BadJson, match="int is not text"):
        parse_own_json(3)  # type: ignore[arg-type]


PIECES = {"pieces": {"weights/a": [0, 2, [2]]}}
STATE = {"data": "d", "dataset": {"epoch": 0, "sample_in_epoch": 4}}


def checkpoint(folder: Path, **files: Any) -> Path:
    """A folder of a checkpoint whose manifest agrees with its files."""
    contents = {"state.json": STATE, "rank0.json": PIECES, **{name.replace("_", "."): files[name] for name in files}}
    folder.mkdir()
    sums = {}
    for name, content in contents.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name).write_bytes(data)
        sums[name] = [len(data), xxhash.xxh3_128(data).hexdigest()]
    (folder / "manifest.json").write_text(json.dumps(sums))
    return folder


@pytest.mark.parametrize(
    "rank",
    [None, {"pieces": None}, {"pieces": {"a": []}}, {"pieces": {"a": [0, 10**12, [2]]}}, {"pieces": {"a": "x"}}],
    ids=str,
)
def test_a_checkpoint_of_another_form_is_named(rank: Any, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"rank0.json: its content has changed"):
        Snapshot.open(checkpoint(tmp_path / "ba000000001", rank0_json=rank))


@pytest.mark.parametrize("state", [None, {}, {"data": "d", "dataset": []}], ids=str)
def test_the_place_in_the_data_of_another_form_is_named(state: Any, tmp_path: Path) -> None:
    assert place_in(KeptState(1, "d", checkpoint(tmp_path / "whole")), "d") == (0, 4)
    kept = KeptState(1, "d", checkpoint(tmp_path / "ba000000001", state_json=state))
    with pytest.raises(StageError, match=r"state.json: its content has changed"):
        place_in(kept, "d")


@pytest.mark.parametrize(
    "rows",
    [
        3,
        [{"stage": "sft", "status": "built", "fingerprint": "f"}],
        [{"stage": ["sft"], "status": "failed"}],
        [{"stage": "sft", "status": "failed", "seconds": "1"}],
    ],
    ids=str,
)
def test_a_result_of_another_form_is_damaged_state(rows: Any, tmp_path: Path) -> None:
    journal = RunJournal(tmp_path, "r")
    journal.begin(pipeline="p")
    journal.end({"status": "done", "stages": rows})
    with pytest.raises(StageError, match=r"result.json: this file is damaged: not as expected: stages"):
        journal.result()


def test_lines_that_no_run_writes_are_passed_over(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path, "r")
    journal.begin(pipeline="p")
    before = journal.read()
    with journal.path.open("a") as file:
        for line in (
            {"kind": "stage", "stage": "sft", "status": "built"},
            {"kind": "stage", "stage": {}, "status": "failed"},
            {"kind": "reads", "artifacts": [3]},
            {"kind": "progress", "stage": "sft", "done": "x", "total": None},
            {"kind": ["begin"]},
        ):
            file.write(json.dumps({"time": 1.0, "ticks": 1.0, **line}) + "\n")
    assert journal.read() == before and journal.start_record()["pipeline"] == "p"


def test_a_part_of_documents_that_is_no_longer_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "part-00000.parquet").write_bytes(b"x")
    with pytest.raises(StageError, match=r"part-00000.parquet: this file is damaged"):
        list(read_batches(tmp_path / "part-00000.parquet", 10, ["id"]))
