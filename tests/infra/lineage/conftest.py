from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from infra.lineage.ledger import mlflow_run_id
from infra.lineage.messages import (
    Input,
    Message,
    MetricsFile,
    Output,
    PipelineFinished,
    PipelineStarted,
    RegisterModel,
    SourceFile,
    StageFinished,
    StageReused,
    StageStarted,
)
from infra.process.lifetime import started_at
from infra.servers import state
from infra.servers.environment import server_environ
from infra.servers.http import answers
from infra.servers.ports import HOST, any_free_port
from tests.conftest import built_once
from tests.infra.lineage.relay_process import RelayProcess, make_store
from tests.support.programs.processes import wait_until

BEGIN = 1_790_000_000.0
DEADLINE_S = 120.0


def eventually(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    try:
        wait_until(condition, deadline_s)
    except AssertionError:
        raise AssertionError(f"never: {what}") from None


def digest(envelope: str) -> str:
    return envelope * 64


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., None]:
    return eventually


class Story:
    """A pipeline run `p` told in messages: shard is built, pretrain makes a model, its metrics are in a file."""

    def __init__(self, root: Path, steps: int = 30) -> None:
        self.root = root
        self.steps = steps
        self.journal = root / "journal.jsonl"
        self.model = root / "pretrain" / "bbbb"
        self.report = root / "report.html"
        self.model.mkdir(parents=True)
        (self.model / "model.safetensors").write_bytes(b"weights")
        (self.model / "aux").mkdir()
        (self.model / "aux" / "log.txt").write_text("not payload")
        self.report.write_text("<h1>report</h1>")
        self.card = root / "MODEL_CARD.md"
        self.card.write_text("---\nlicense: mit\n---\n\n# A model\n\nIt writes.\n\n## Settings\n\n" + 6000 * "x")
        self.journal.write_text("")
        self.write_metrics(steps)

    def write_metrics(self, steps: int, first: int = 0) -> None:
        with open(self.journal, "a") as file:
            for step in range(first, first + steps):
                values = {"train/loss": 1.0 / (step + 1), "train/lr": 1e-3}
                line = {"kind": "metric", "time": BEGIN + step / 10, "step": step, "values": values}
                file.write(json.dumps(line) + "\n")
                file.write(json.dumps({"kind": "progress", "time": 0.0, "done": step}) + "\n")

    def beginning(self) -> list[Message]:
        return [
            PipelineStarted("p", "quickstart", BEGIN, {"seed": 17}, "flow", "http://127.0.0.1:4200/runs/flow-run/flow"),
            StageStarted("s", "p", "quickstart", "shard", "aaaa", BEGIN, 2, {"length": 256}, sources=(self.source(),)),
            StageFinished(
                "s",
                "FINISHED",
                BEGIN + 3,
                {"train_tokens": 1e6},
                "1.0M tokens",
                Output("shard", digest("a"), "aaaa", str(self.root / "shard" / "aaaa")),
            ),
            StageStarted(
                "t",
                "p",
                "quickstart",
                "pretrain",
                "bbbb",
                BEGIN + 3,
                config={"model": {"width": 256, "layers": None}, "notes": "x" * 7000},
                inputs=(Input("shards", "shard", digest("a"), "aaaa"),),
                commit="c0ffee",
                dirty=True,
                lock="10cc",
                host="box",
                device="cpu",
                flow_run_id="flow",
                flow_run_url="http://127.0.0.1:4200/runs/flow-run/flow",
            ),
            MetricsFile("t", str(self.journal)),
        ]

    def ending(self) -> list[Message]:
        return [
            StageFinished(
                "t",
                "FINISHED",
                BEGIN + 60,
                {"validation_loss": 3.2},
                "validation loss 3.20",
                Output("pretrain", digest("b"), "bbbb", str(self.model), "model"),
                artifacts=(str(self.report), str(self.root / "gone.html")),
            ),
            StageStarted(
                "e",
                "p",
                "quickstart",
                "safety",
                "cccc",
                BEGIN + 60,
                inputs=(Input("model", "pretrain", digest("b"), "bbbb"),),
            ),
            StageFinished("e", "FAILED", BEGIN + 61, error="the disk is full"),
            StageReused("p", "tokenizer", "dddd", digest("d"), "s", BEGIN + 1),
            RegisterModel(
                "t",
                "quickstart-base",
                str(self.model),
                digest("b"),
                BEGIN + 62,
                "the base",
                {"gate": "open"},
                str(self.card),
            ),
            PipelineFinished(
                "p",
                "FINISHED",
                BEGIN + 65,
                figures={"pretrain.validation_loss": 3.2},
                artifacts=(str(self.report), str(self.card)),
            ),
        ]

    def loss_history(self, build_id: str = "t") -> list[tuple[int, int, float]]:
        """(step, timestamp in ms, value) of train/loss, as MLflow's database has it."""
        run_id = mlflow_run_id(self.root, build_id)
        query = "SELECT step, timestamp, value FROM metrics WHERE run_uuid = ? AND key = 'train/loss' ORDER BY step"
        with closing(sqlite3.connect(self.root / "mlflow" / "mlflow.db")) as connection:
            return connection.execute(query, (run_id,)).fetchall()

    @staticmethod
    def expected_history(steps: int) -> list[tuple[int, int, float]]:
        return [(step, round((BEGIN + step / 10) * 1000), 1.0 / (step + 1)) for step in range(steps)]

    @staticmethod
    def source() -> SourceFile:
        return SourceFile("/data/book one.txt", digest("f"))


@pytest.fixture(scope="session")
def empty_store(session_folder: Path) -> Path:
    """A store whose MLflow database has tables and nothing in them; making those takes seconds, of one test worker."""
    root = session_folder / "lineage" / "empty store"
    with built_once(root) as is_builder:
        if is_builder:
            make_store(root)
    return root


@pytest.fixture
def root(tmp_path: Path, empty_store: Path) -> Path:
    folder = tmp_path / "a store"
    shutil.copytree(empty_store, folder)
    return folder


@pytest.fixture
def story(root: Path) -> Story:
    return Story(root)


class MlflowServer:
    """A real MLflow server on a port of its own, known to others as if `up` had started it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = any_free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        state.servers_folder(self.root).mkdir(exist_ok=True)
        with open(state.servers_folder(self.root) / "mlflow.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "infra.lineage.server", str(self.root), "--port", str(self.port)],
                env=server_environ({}),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started = started_at(self.process.pid)
        assert started is not None
        state.record(self.root, [state.Service("mlflow", self.url, self.process.pid, started)])
        eventually(lambda: answers(f"{self.url}/health"), "MLflow answers")

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        if self.process is not None:
            self.send(signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def mlflow_server(root: Path) -> Iterator[MlflowServer]:
    server = MlflowServer(root)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def start_relay(root: Path) -> Iterator[Callable[..., RelayProcess]]:
    started: list[RelayProcess] = []

    def start(mode: str = "--follow", **options: float) -> RelayProcess:
        started.append(RelayProcess(root, mode, **options))
        return started[-1]

    yield start
    for relay in started:
        relay.kill()
