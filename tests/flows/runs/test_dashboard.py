"""The page of a store: what it shows of a run, whom it lets in, and that text from elsewhere stays text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from flows.config.graph import graph
from flows.config.read import load
from flows.dashboard.run_view import RunView
from flows.dashboard.server import app
from flows.planning.picture import drawing_of
from flows.runs.journal import PICTURE, RunJournal, StageRow
from infra.servers.credentials import Credentials
from infra.servers.prefect.callers import OwnCallersOnly
from infra.servers.settings import Settings
from infra.store.store import Store
from tests.support.command import write_config
from tests.support.pipelines import full_config

HOSTILE = "<img src=x onerror=alert(1)>\"'</script>"
PORT = 4100


@pytest.fixture
def store(built_data: Path, tmp_path: Path) -> Path:
    root = tmp_path / "store"
    shutil.copytree(built_data / "store", root, ignore=shutil.ignore_patterns("lineage", "mlflow", "servers"))
    return root


def client(root: Path, login: Credentials | None = None) -> TestClient:
    guarded: Any = OwnCallersOnly(app(root, login), Settings().callers(PORT))
    return TestClient(guarded, base_url=f"http://127.0.0.1:{PORT}")


def write_metrics(path: Path, losses: list[float], **job: str) -> None:
    path.parent.mkdir(parents=True)
    lines = [
        {"kind": "metric", "time": 1.0, "step": step, "values": {"train/loss": loss, "train/tokens_per_s": 2048.0}}
        for step, loss in enumerate(losses, 1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if job:
        (path.parent / "job.json").write_text(json.dumps(job))


def test_a_run_is_shown_while_it_trains(tmp_path: Path) -> None:
    root = tmp_path / "store"
    journal = RunJournal(root / "runs", "20261128-000000-000000-aaaaaa")
    journal.begin(pipeline="tiny", config="tiny.yaml")
    nodes = graph(load(write_config(tmp_path / "config.yaml", full_config())))
    (journal.folder / PICTURE).write_text(json.dumps(drawing_of(nodes).as_json()))
    for name in ("ingest", "pretrain", "sft"):
        journal.row(StageRow(name, "waiting"))
    journal.row(StageRow("ingest", "built", seconds=61.0, headline="7 documents"))
    journal.row(StageRow("pretrain", "running"))
    journal.message("pretrain", {"kind": "progress", "done": 30, "total": 120, "unit": "batches", "note": ""})
    path = root / ".work" / "pretrain" / "abc" / "scratch" / "journal.jsonl"
    write_metrics(path, [3.0, 2.5, 2.25], node="pretrain")

    view = RunView(root, journal.run_id)
    view.follow()

    assert view.status == "running"
    picture = str(view.picture())
    assert 'class="step built" data-step="ingest"' in picture and "1 min 1 s" in picture
    assert 'class="step running" data-step="pretrain"' in picture and "25%" in picture
    assert "waits for pretrain" in picture
    assert dict(view.figures()) == {"pretrain: loss": "2.250", "pretrain: tokens/s": "2,048"}
    assert [title for title, _ in view.charts()] == ["pretrain: training loss, nats"]

    # It goes back to its first batch after a divergence, and goes on.
    with open(path, "a", encoding="utf8") as file:
        file.write(json.dumps({"kind": "rewind", "time": 2.0, "place": 0, "step": 1}) + "\n")
        file.write(json.dumps({"kind": "metric", "time": 2.0, "step": 2, "values": {"train/loss": 1.5}}) + "\n")
    journal.row(StageRow("ingest", "failed", headline=HOSTILE))
    view.follow()
    assert ("pretrain: loss", "1.500") in view.figures()
    assert HOSTILE not in str(view.picture()) and "failed: &lt;img" in str(view.picture())


def test_a_finished_run_and_its_files(store: Path) -> None:
    pages = client(store)
    assert "chronicle" in pages.get("/").text
    run_id = next(path.name for path in (store / "runs").iterdir())
    page = pages.get(f"/run/{run_id}")
    assert page.status_code == 200 and "script-src 'self'" in page.headers["content-security-policy"]
    assert 'data-step="tokenizer"' in page.text and '<span class="state done">done</span>' in page.text
    # The parts come once as events, and then the stream ends, since nothing more can change.
    data, ended = pages.get(f"/run/{run_id}/events").text.strip().split("\n\n")
    assert {"head", "picture", "results", "log"} <= json.loads(data.removeprefix("data: ")).keys()
    assert ended.startswith("event: ended")

    manifest = next(manifest for _, manifest in Store(store, reading=True).manifests("tokenizer"))
    file = next(file.path for file in manifest.files if file.path.endswith("tokenizer.json"))
    address = f"/artifact/tokenizer/{manifest.fingerprint}"
    answer = pages.get(f"{address}/{file}")
    assert answer.json()["model"] and answer.headers["content-security-policy"].startswith("sandbox")
    for path in ("manifest.json", "..%2f..%2fformat", "no-such-file"):
        assert pages.get(f"{address}/{path}").status_code == 404
    for path in ("/artifact/%2e%2e/format/x", "/artifact/.work/x/y", "/run/%2e%2e", "/run/none", "/none.css"):
        assert pages.get(path).status_code == 404


def test_text_of_a_run_stays_text(store: Path) -> None:
    journal = RunJournal(store / "runs", "20261128-000000-000000-bbbbbb")
    journal.begin(pipeline=HOSTILE, config=HOSTILE)
    journal.row(StageRow("clean", "failed", headline=HOSTILE))
    journal.message(HOSTILE, {"kind": "event", "message": HOSTILE, "name": HOSTILE})
    pages = client(store)
    for text in (pages.get("/").text, pages.get(f"/run/{journal.run_id}").text):
        assert "onerror" in text and "<img" not in text


def test_the_same_callers_as_prefects(store: Path) -> None:
    pages = client(store)
    assert pages.get("/", headers={"Host": "evil.example"}).status_code == 421
    run_id = next(path.name for path in (store / "runs").iterdir())
    cancel = f"/run/{run_id}/cancel"
    assert pages.post(cancel, json={}, headers={"Origin": "http://evil.example"}).status_code == 403
    assert pages.post(cancel, content="{}", headers={"Content-Type": "text/plain"}).status_code == 415
    answer = pages.post(cancel, json={})
    assert (
        answer.status_code == 409 and answer.json()["message"] == "no Prefect server runs here; `stemma up` starts it"
    )

    login = Credentials("ada", "a long password")
    guarded = client(store, login)
    assert guarded.get("/health").status_code == 200
    for path in ("/", "/run/x", "/artifact/a/b/c", "/dashboard.js"):
        assert guarded.get(path).status_code == 401
    assert guarded.get("/", headers={"Authorization": login.header}).status_code == 200
