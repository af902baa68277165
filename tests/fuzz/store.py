"""Targets: what a store has besides its artifacts. A disk, a kill or a person may have damaged any of it."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, composite

from corpus.documents.parts import DocumentWriter, make_document
from flows.runs.journal import JournalRow, RunJournal
from infra.store.store import Store
from tests.fuzz import damage
from tests.fuzz.command import call
from tests.fuzz.harness import Target
from tests.support.artifacts import make_artifact
from tests.support.pipelines import data_config

TIMES = [
    {"kind": "attempt", "id": "a1", "run": "RUN", "stage": "pretrain", "devices": 1, "rates": {"usd_per_hour": 1.0},
    "waited": {"lease": 0.5},
     "alive_s": "000000012.500", "build": "pretrain/FP", "time": 1e9, "ticks": 1.0, "boot": "b"},
    {"kind": "work", "time": 1e9, "ticks": 2.0, "boot": "b"},
    {"kind": "loop", "key": "scratch", "batch": 0, "time": 1e9, "ticks": 3.0, "boot": "b"},
    {"kind": "spent", "key": "scratch", "from": 0, "to": 12, "seconds": {"step": 1.9, "data": 0.1}, "tokens": 98304,
    "time": 1e9, "ticks": 4.0, "boot": "b"},
    {"kind": "kept", "time": 1e9, "ticks": 5.0, "boot": "b"},
    {"kind": "fault", "cause": "hang", "time": 1e9, "ticks": 6.0, "boot": "b"},
    {"kind": "done", "time": 1e9, "ticks": 6.5, "boot": "b"},
    {"kind": "end", "cause": "", "time": 1e9, "ticks": 7.0, "boot": "b"},
]  # fmt: skip
REGISTRATION = {
    "name": "demo", "stage": "pretrain", "fingerprint": "f", "digest": "d", "figures": {"a.b": 1.0}, "gates": [],
    "status": "registered", "reasons": [],
}  # fmt: skip
TRIAL = {
    "number": 1, "arm": 0, "seed": 1, "settings": {"sft.seed": 1}, "status": "done", "run_id": "r", "value": 1.0,
    "tried": ["r"],
}  # fmt: skip


@cache
def built(folder: Path) -> tuple[str, ...]:
    """Makes a store in a folder; returns the files of its state, relative to it, which inputs damage."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(data_config(folder), sort_keys=False))
    root = folder / "store"
    store = Store(root)
    with DocumentWriter(folder / "documents") as writer:
        writer.write(make_document("The mill stood by the river.", "files/a.jsonl"))
    parts = {f"documents/{part.name}": part.read_bytes() for part in (folder / "documents").iterdir()}
    sources = json.dumps({"files": {"documents": 1, "bytes": 28, "licence": "", "weight": 1.0, "language": ""}})
    source = make_artifact(store, "ingest", {**parts, "sources.json": sources}, step="ingest", pipeline="p")
    model = make_artifact(
        store, "pretrain",
        {
            "config.json": "{}", "model.safetensors": b"\x02\0\0\0\0\0\0\0{}", "aux/states.json": '{"8": "d"}',
            "aux/times.jsonl": "".join(json.dumps(line) + "\n" for line in TIMES), "aux/report.html": "<html></html>",
            "aux/planned.json": '{"planned": {"step_s_low": 1, "step_s": 1, "step_s_high": 2, "batches": 10}}',
        },
        inputs={"shards": source}, step="pretrain", pipeline="p", config={"seed": 1},
    )  # fmt: skip
    register = make_artifact(
        store,
        "register",
        {"MODEL_CARD.md": "# A", "registration.json": json.dumps(REGISTRATION)},
        inputs={"model": model},
        step="register",
    )
    shutil.copytree(root / "register" / register.fingerprint, root / "register" / f"{register.fingerprint}.abcdef12")
    journal = RunJournal(root / "runs", "20261121-071500-123456-1f2e3d")
    journal.begin(pipeline="p", config="config.yaml", root=str(root))
    journal.row(
        JournalRow(
            "pretrain",
            "built",
            fingerprint=model.fingerprint,
            digest=model.digest,
            path=str(store.path(model)),
            seconds=1.0,
        )
    )
    journal.message("pretrain", {"kind": "progress", "done": 1, "total": 2, "unit": "batches"})
    journal.end(
        {
            "status": "done",
            "errors": [],
            "seconds": 2.0,
            "stages": [
                {"stage": "pretrain", "status": "built", "fingerprint": model.fingerprint, "digest": model.digest}
            ],
        }
    )
    times = journal.folder / "times"
    times.mkdir(exist_ok=True)
    (times / "pretrain.jsonl").write_text(
        "".join(json.dumps({**line, **({"run": journal.run_id} if "run" in line else {})}) + "\n" for line in TIMES)
    )
    promoted = {
        "registration": f"register/{register.fingerprint}",
        "model": f"pretrain/{model.fingerprint}",
        "digest": model.digest,
        "time": 1.7e9,
    }
    (root / "promotions.json").write_text(json.dumps({"demo": [promoted, promoted]}))
    (root / "pins.json").write_text(json.dumps([f"ingest/{source.fingerprint}"]))
    trials = root / "sweeps" / "s" / "trials"
    trials.mkdir(parents=True)
    (trials / "0001.json").write_text(json.dumps(TRIAL))
    (root / "sweeps" / "s" / "sweep.json").write_text(json.dumps({"maximise": True, "measure": "sft.loss"}))
    (root / "servers").mkdir(exist_ok=True)
    (root / "servers" / "settings.json").write_text("{}")
    shutil.copytree(root, folder / "whole")
    return tuple(
        sorted(
            str(path.relative_to(root))
            for path in root.rglob("*")
            if path.is_file() and (path.suffix in (".json", ".jsonl", ".parquet") or path.name == "format")
        )
    )


COMMANDS: tuple[tuple[str, ...], ...] = (
    ("ls", "runs"), ("ls", "models"), ("ls", "artifacts", "--all"), ("lineage", "register"), ("lineage", "ingest",
    "--down"), ("lineage",),
    ("verify", "register", "--ancestry"), ("verify", "pretrain"), ("cost", "pretrain"), ("cost",), ("gc",), ("gc",
    "--states"), ("status",),
    ("status", "config.yaml"), ("why", "config.yaml", "ingest"), ("logs",), ("compare", "pretrain", "register"),
    ("rollback",), ("rollback", "demo"),
    ("open", "report", "--print"), ("open", "page", "--print"), ("check", "config.yaml"), ("promote",), ("gc",
    "--pin", "pretrain"),
)  # fmt: skip


class Damaged(NamedTuple):
    """A file of a store, its content, and the command that meets it. content: None removes it."""

    file: str
    content: bytes | None
    command: tuple[str, ...]


@cache
def _base_of(process: int) -> Path:
    folder = tempfile.mkdtemp(prefix="stemma-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder) / "base"


def _base() -> Path:
    """A folder of this process, which goes with it."""
    return _base_of(os.getpid())


@composite
def damaged_files(draw: DrawFn) -> Damaged:
    folder = _base()
    file = draw(st.sampled_from(built(folder)))
    content = (folder / "whole" / file).read_bytes()
    if not draw(st.integers(0, 20)):
        return Damaged(file, None, draw(st.sampled_from(COMMANDS)))
    try:
        if file.endswith(".jsonl"):
            rows = [json.loads(line) for line in content.splitlines()]
            edited = draw(damage.edited([rows], 2))
            lines = edited if isinstance(edited, list) else [edited]
            damaged = damage.encoded("".join(damage.as_json(line) + "\n" for line in lines))
        else:
            damaged = damage.encoded(damage.as_json(draw(damage.edited([json.loads(content)], 2))))
    except ValueError:
        damaged = content
    if not draw(st.integers(0, 3)):
        damaged = draw(damage.damaged(damaged, 2))
    return Damaged(file, damaged, draw(st.sampled_from(COMMANDS)))


@contextmanager
def with_damage(value: Damaged) -> Iterator[Path]:
    """The folder of the store, in which the file is damaged within the block."""
    folder = _base()
    built(folder)
    root, path = folder / "store", folder / "store" / value.file
    try:
        if value.content is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(value.content)
        yield folder
    finally:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(folder / "whole", root)


def check_files(value: Damaged, _: Path) -> None:
    with with_damage(value) as folder:
        call([*value.command, "--root", "store", "--json", "--debug"], folder)


def _hashes(path: Path) -> None:
    from infra.store.store import Store

    store = Store(path.parents[1])
    list(store.manifests())
    target = path.parents[1] / "a.txt"
    target.write_text("a")
    store.hashes.sha256([target])
    store.hashes.moved(path.parent / "x", path.parent / "y")
    Store(path.parents[1], reading=True).hashes.sha256([target])


def _leases(path: Path) -> None:
    from infra.leases.lease import Leases
    from infra.leases.sqlite import SqliteTable

    leases = Leases(SqliteTable(path))
    leases.living()
    leases.seem_dead(["a/b", "c/d"])
    leases.check()


def _delivered(path: Path) -> None:
    from infra.lineage.ledger import Ledger, ended_unheard, file_url, mlflow_run_id, run_url

    root = path.parents[1]
    mlflow_run_id(root, "b")
    ended_unheard(root, "b")
    run_url(root, "b")
    file_url(root, "p", "sft", "a")
    with closing(Ledger(root)) as ledger:
        ledger.run("b")
        ledger.open_runs()
        ledger.rows("p")
        ledger.set_row("p", "sft", time=1.0)
        ledger.model_id("d")
        ledger.failed("x")


def _answers(path: Path) -> None:
    from corpus.generation.answers import AnswerStore, EndpointAnswer

    with closing(AnswerStore(path.parent)) as store:
        store.get("k")
        store.put([("l", EndpointAnswer("a"))])
        store.get("l")


DATABASES: dict[str, tuple[str, Callable[[Path], None], tuple[str, ...]]] = {
    "hashes": (
        ".state/hashes.sqlite", _hashes,
        (
            "CREATE TABLE files (path TEXT PRIMARY KEY, size INT, mtime_ns INT, ctime_ns INT, sha256 TEXT)",
            "CREATE TABLE inodes (inode TEXT PRIMARY KEY, size INT, mtime_ns INT, ctime_ns INT, sha256 TEXT)",
            "CREATE TABLE derived (state TEXT PRIMARY KEY, digest TEXT)",
            "INSERT INTO files VALUES ('a', 1, 2, 3, 'x')",
            "INSERT INTO inodes VALUES ('a', 1, 2, 3, 'x')",
            "INSERT INTO derived VALUES ('a', 'b')",
        ),
    ),
    "leases": (
        ".state/leases.sqlite", _leases,
        (
            "CREATE TABLE leases (key TEXT PRIMARY KEY, token TEXT, host TEXT, pid INT, pid_started REAL, "
            "work_group INT, renewed REAL)",
            "INSERT INTO leases VALUES ('a/b', 't', 'h b', 1, 2.0, 3, 4.0)",
            "INSERT INTO leases VALUES ('c/d', 't', 'HERE', 99999999, 2.0, 3, 4.0)",
        ),
    ),
    "delivered": (
        "lineage/delivered.sqlite", _delivered,
        (
            "CREATE TABLE runs (build_id TEXT PRIMARY KEY, run_id TEXT, experiment_id TEXT, parent_id TEXT, about "
            "TEXT, sender TEXT,"
            " artifact_uri TEXT, attempts INT DEFAULT 0, open INT DEFAULT 1)",
            "CREATE TABLE tails (build_id TEXT PRIMARY KEY, path TEXT, offset INT DEFAULT 0)",
            "CREATE TABLE models (digest TEXT, experiment_id TEXT, model_id TEXT, PRIMARY KEY (digest, experiment_id))",
            "CREATE TABLE rows (parent_id TEXT, stage TEXT, row TEXT, PRIMARY KEY (parent_id, stage))",
            "CREATE TABLE failures (name TEXT PRIMARY KEY, attempts INT)",
            """INSERT INTO runs VALUES ('b', 'r', '1', 'p', '{"stage": "sft"}', '{"pid": 1}', 'u', 1, 1)""",
            """INSERT INTO rows VALUES ('p', 'sft', '{"outcome": "built", "time": 1.0, "build_id": "b"}')""",
            "INSERT INTO models VALUES ('d', '1', 'm')",
            "INSERT INTO failures VALUES ('x', 1)",
        ),
    ),
    "answers": (
        "answers/answers.sqlite", _answers,
        (
            "CREATE TABLE answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)",
            """INSERT INTO answers VALUES ('k', '{"text": "a", "finish": "stop", "model": "m", "prompt_tokens": 1, "
            ""completion_tokens": 2}')""",
        ),
    ),
}  # fmt: skip


@composite
def _cells(draw: DrawFn) -> Any:
    """A value of any type that a cell of SQLite may have, whatever its column declares."""
    return draw(
        st.sampled_from(
            (
                None,
                0,
                -1,
                2**63 - 1,
                1.5,
                "",
                "x",
                b"\xff\xfe",
                b"",
                "{",
                "[]",
                "null",
                '{"a": 1}',
                '{"text": 1}',
                "[" * 2_000,
                '"x"',
                "é\0",
            )
        )
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False)
        | st.binary(max_size=5)
    )


def _tables(connection: sqlite3.Connection) -> list[str]:
    query = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
    return [name for (name,) in connection.execute(query)]


@composite
def databases(draw: DrawFn) -> tuple[str, bytes]:
    """A database of SQLite with cells of other types, another schema, or damaged bytes."""
    name = draw(st.sampled_from(sorted(DATABASES)))
    statements = DATABASES[name][2]
    with closing(sqlite3.connect(":memory:")) as connection:
        if draw(st.integers(0, 7)):
            for statement in statements:
                connection.execute(statement)
        for _ in range(draw(st.integers(0, 3))):
            tables = _tables(connection)
            if not tables:
                break
            table = draw(st.sampled_from(tables))
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            column = draw(st.sampled_from(columns))
            with suppress(sqlite3.Error):
                match draw(
                    st.sampled_from(("cell", "cell", "cell", "cell", "drop", "column", "rename", "add", "view"))
                ):
                    case "cell":
                        connection.execute(f"UPDATE {table} SET {column} = ?", (draw(_cells()),))
                    case "drop":
                        connection.execute(f"DROP TABLE {table}")
                    case "column":
                        connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
                    case "rename":
                        connection.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO other")
                    case "add":
                        connection.execute(f"ALTER TABLE {table} ADD COLUMN more TEXT")
                    case "view":
                        connection.execute(f"DROP TABLE {table}")
                        connection.execute(f"CREATE VIEW {table} AS SELECT 1 AS {column}")
        connection.commit()
        content = connection.serialize() if _tables(connection) else b""
    if not draw(st.integers(0, 2)):
        content = draw(damage.damaged(content, 3))
    return name, content


def check_database(value: tuple[str, bytes], folder: Path) -> None:
    name, content = value
    file, read, _ = DATABASES[name]
    shutil.rmtree(folder, ignore_errors=True)
    path = folder / "store" / file
    path.parent.mkdir(parents=True)
    (folder / "store" / "format").write_text("1\n")
    path.write_bytes(content)
    read(path)


CHECKPOINT_STATE = {
    "format": 1, "batch": 8, "samples": 64, "tokens": 512, "data": "d", "ranks": 1, "dataset": {"epoch": 0,
    "sample_in_epoch": 64},
    "callbacks": {}, "versions": {"torch": "2"}, "scheduler": {}, "clock": {"batch": 8, "tokens": 512},
}  # fmt: skip
PIECES = {
    "pieces": {"weights/a": [0, 2, [2]], "optimizer/a/exp_avg": [0, 2, [2]]},
    "python": [3, [1, 2], None],
    "numpy": ["MT19937", [1, 2], 1, 0, 0.0],
}
TENSORS = {
    "weights/a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "optimizer/a/exp_avg": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
    "random/torch": {"dtype": "U8", "shape": [4], "data_offsets": [16, 20]},
}


def _safetensors(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + b"\0" * 20


@composite
def checkpoints(draw: DrawFn) -> dict[str, bytes]:
    """The files of a kept checkpoint, of which one or more are damaged. Its manifest has the sums of the others."""
    intact = {
        "state.json": json.dumps(CHECKPOINT_STATE).encode(),
        "rank0.json": json.dumps(PIECES).encode(),
        "rank0.safetensors": _safetensors(json.dumps(TENSORS).encode()),
    }
    values = {"state.json": CHECKPOINT_STATE, "rank0.json": PIECES, "rank0.safetensors": TENSORS}
    files = dict(intact)
    for name in draw(st.lists(st.sampled_from(sorted(intact)), max_size=2)):
        text = damage.encoded(damage.as_json(draw(damage.edited([values[name]], 2))))
        files[name] = draw(damage.damaged(_safetensors(text) if name.endswith("s") else text, 1))
    summed = files if draw(st.booleans()) else intact
    import xxhash

    sums = {name: [len(content), xxhash.xxh3_128(content).hexdigest()] for name, content in summed.items()}
    manifest = damage.encoded(damage.as_json(draw(damage.edited([sums], 1))))
    return {**files, "manifest.json": manifest}


def check_checkpoint(files: dict[str, bytes], folder: Path) -> None:
    """The states of an artifact, as a training that continues from one reads them; and a folder of checkpoints."""
    from infra.store.states import state_at
    from training.checkpoint.folder import whole_checkpoints
    from training.checkpoint.snapshot import Snapshot, TensorPart
    from training.checkpoint.states import place_in

    shutil.rmtree(folder, ignore_errors=True)
    state = folder / "aux" / "state" / "ba000000008"
    state.mkdir(parents=True)
    (folder / "aux" / "states.json").write_text('{"8": "d"}')
    for name, content in files.items():
        (state / name).write_bytes(content)
    for path in whole_checkpoints([state.parent]):
        snapshot = Snapshot.open(path)
        for name, shape in snapshot.shapes.items():
            snapshot.read(name, TensorPart.of_shape(shape))
    kept = state_at(folder, "sft", "sft", None)
    place_in(kept, "d")


TARGETS = (
    Target("store-files", damaged_files, check_files),
    Target("store-databases", databases, check_database),
    Target("store-checkpoints", checkpoints, check_checkpoint),
)
