"""The page of a store: what it shows of a run, whom it lets in, and that text from elsewhere stays text."""

from __future__ import annotations

import asyncio
import hashlib
import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from prefect.utilities.callables import parameter_schema
from starlette.testclient import TestClient

from corpus.documents.parts import read_documents
from flows.config.forms import form_values, with_form
from flows.config.graph import graph
from flows.config.read import dump, load
from flows.dashboard.form import by_field, changed, fields_of
from flows.dashboard.run_view import RunView
from flows.dashboard.server import app
from flows.pipeline import pipeline
from flows.planning.picture import drawing_of
from flows.runs.journal import PICTURE, JournalRow, RunJournal
from infra.errors import ConfigError
from infra.servers.credentials import Credentials
from infra.servers.prefect.callers import OwnCallersOnly
from infra.servers.settings import Settings
from infra.store.manifest import File, Manifest, SourceRecord
from infra.store.promotions import Promotions
from infra.store.store import Store
from tests.support.pipelines import full_config
from tests.support.programs.command import write_config
from tests.support.programs.processes import wait_until

ADDRESS = {"fingerprint": "0" * 16, "digest": "0" * 64}

HOSTILE = "<img src=x onerror=alert(1)>\"'</script>"
PORT = 4100


@pytest.fixture
def store(built_data: Path, tmp_path: Path) -> Path:
    root = tmp_path / "store"
    shutil.copytree(built_data / "store", root, ignore=shutil.ignore_patterns("lineage", "mlflow", "servers"))
    return root


def client(root: Path, login: Credentials | None = None, *, is_read_only: bool = False) -> TestClient:
    guarded: Any = OwnCallersOnly(app(root, login, is_read_only=is_read_only), Settings().callers(PORT))
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


def write_times(artifact: Path, seconds: float, usd_per_hour: float) -> None:
    """Leave the record of a build that took so long on one device."""
    (artifact / "aux").mkdir(parents=True)
    attempt = {"id": "a", "run": "r", "stage": "pretrain", "devices": 1, "alive_s": "000000000.000"}
    lines = [
        {"kind": "attempt", "ticks": 0.0, "rates": {"usd_per_hour": usd_per_hour}, **attempt},
        {"kind": "work", "ticks": 1.0},
        {"kind": "end", "ticks": seconds, "cause": ""},
    ]
    text = "".join(json.dumps({"time": 1.0, "boot": "b", **line}) + "\n" for line in lines)
    (artifact / "aux" / "times.jsonl").write_text(text)


def test_the_form_of_a_changed_run_has_prefects_keys_and_types(tmp_path: Path) -> None:
    config = load(write_config(tmp_path / "config.yaml", full_config()))
    schema = parameter_schema(with_form(pipeline, config, config.name)).model_dump()
    fields = fields_of(schema, form_values(config), dump(config))
    by_key = {field.key: field for field in fields}
    assert by_key["tokenizer.vocab_size"].is_set and not by_key["tokenizer.kind"].is_set
    kinds = {key: by_key[key].kind for key in ("tokenizer.vocab_size", "ingest.read", "pretrain.duration")}
    assert kinds == {"tokenizer.vocab_size": "integer", "ingest.read": "yaml", "pretrain.duration": "text"}
    assert "rlhf.optimizer.muon.momentum" not in by_key, "the deployment leaves this group at its defaults"

    result = changed(fields, dump(config), {"tokenizer.vocab_size": "345"}, str(tmp_path / "config.yaml"))
    assert dump(result)["tokenizer"]["vocab_size"] == 345
    with pytest.raises(ConfigError) as refused:
        wrong = {"tokenizer.vocab_size": HOSTILE, "pretrain.duration": "some"}
        changed(fields, dump(config), wrong, str(tmp_path / "config.yaml"))
    messages, others = by_field(refused.value.problems, fields)
    assert messages.keys() == {"tokenizer.vocab_size", "pretrain.duration"} and not others
    with pytest.raises(ConfigError, match="no such key"):
        changed(fields, dump(config), {"launch.no_such_key": "1"}, "config.yaml")


def test_a_name_that_no_file_can_have_is_unknown(tmp_path: Path) -> None:
    Store(tmp_path / "store")
    pages, name = client(tmp_path / "store"), "x" * 300
    for path in (f"run/{name}", f"run/{name}/events", f"artifact/sft/{name}/a", f"model/{name}", f"data/{name}"):
        assert pages.get(f"/{path}").status_code == 404, path


def test_a_run_is_shown_while_it_trains(tmp_path: Path) -> None:
    root = tmp_path / "store"
    journal = RunJournal(root / "runs", "20261128-000000-000000-aaaaaa")
    journal.begin(pipeline="tiny", config="tiny.yaml")
    nodes = graph(load(write_config(tmp_path / "config.yaml", full_config())))
    (journal.folder / PICTURE).write_text(json.dumps(drawing_of(nodes).as_json()))
    for name in ("ingest", "pretrain", "sft"):
        journal.row(JournalRow(name, "waiting"))
    journal.row(JournalRow("ingest", "built", **ADDRESS, seconds=61.0, headline="7 documents"))
    journal.row(JournalRow("pretrain", "running"))
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
    (_, zoomed), (_, drawn) = *view.charts((2, 3)), *view.charts()
    assert 'data-plot="52,628,2,3"' in zoomed and 'data-plot="52,628,1,3"' in drawn

    use = {"gpu/0/utilisation_percent": 93.0, "gpu/0/power_w": 540.0, "gpu/10/memory_gb": 61.25}
    with open(path, "a", encoding="utf8") as file:
        for step in (2, 3):
            file.write(json.dumps({"kind": "metric", "time": 2.0, "step": step, "values": use}) + "\n")
    view.follow()
    assert view.figures()[-2:] == [("pretrain: GPU 0", "93 % · 540 W"), ("pretrain: GPU 10", "61.2 GB")]
    title, _ = view.charts()[-1]
    assert title == "pretrain: GPU utilisation, %" and ("train", "GPU 0") in view.legend(title)

    # It goes back to its first batch after a divergence, and goes on.
    with open(path, "a", encoding="utf8") as file:
        file.write(json.dumps({"kind": "rewind", "time": 2.0, "place": 0, "step": 1}) + "\n")
        file.write(json.dumps({"kind": "metric", "time": 2.0, "step": 2, "values": {"train/loss": 1.5}}) + "\n")
    correction = {"kind": "event", "name": "correction", "message": HOSTILE, "back_to": 1}
    journal.message("pretrain", correction)
    journal.row(JournalRow("ingest", "failed", headline=HOSTILE))
    view.follow()
    loss = dict(view.charts())["pretrain: training loss, nats"]
    assert loss.count('class="happened"') == 1 and HOSTILE not in loss
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
    # What the page shows already is not sent again: it would be drawn again under the reader's pointer.
    [events] = re.findall(r'data-events="([^"]+)"', page.text)
    assert pages.get(html.unescape(events)).text.startswith(": nothing new\n\nevent: ended")

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
    journal.row(JournalRow("clean", "failed", headline=HOSTILE))
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
        answer.status_code == 409 and answer.json()["message"] == "no Prefect server is running; `stemma up` starts it"
    )
    change = f"/run/{run_id}/change"
    assert "no Prefect server is running" in pages.get(change).text
    assert pages.post(change, json={"settings": {}}, headers={"Origin": "http://evil.example"}).status_code == 403
    assert pages.post(change, json={"settings": {"seed": 1}}).status_code == 400

    promote = f"/model/sft/{'0' * 16}/promote"
    assert pages.post(promote, json={}, headers={"Origin": "http://evil.example"}).status_code == 403
    assert pages.post(promote, content="{}", headers={"Content-Type": "text/plain"}).status_code == 415

    login = Credentials("ada", "a long password")
    guarded = client(store, login)
    assert guarded.get("/health").status_code == 200
    for path in ("/", "/run/x", "/run/x/change", "/model/x", "/data/x", "/compare", "/artifact/a/b/c", "/dashboard.js"):
        assert guarded.get(path).status_code == 401
    assert guarded.post(promote, json={}).status_code == 401
    assert guarded.get("/", headers={"Authorization": login.header}).status_code == 200


def write_artifact(
    root: Path, stage: str, number: int, inputs: dict[str, Manifest] | None = None, **facts: Any
) -> Manifest:
    fingerprint = f"{number:016x}"
    folder = root / stage / fingerprint
    files = {"model.safetensors": b"", **facts.pop("files", {})}
    listed = []
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        listed.append(File(name, len(content), hashlib.sha256(content).hexdigest()))
    manifest = Manifest(
        stage=stage,
        version=1,
        fingerprint=fingerprint,
        digest=f"{number:x}".rjust(8, "d") * 8,
        build_id=fingerprint,
        config={},
        identity={},
        inputs={name: artifact.as_input() for name, artifact in (inputs or {}).items()},
        requires={},
        sources=(SourceRecord(HOSTILE, "0" * 64, {HOSTILE: "0" * 64}),),
        files=tuple(listed),
        **{
            "result": {"headline": HOSTILE, "figures": {"loss": 2.5}},
            "step": HOSTILE,
            "finished": "2026-11-28T00:00:00",
            "host": HOSTILE,
            **facts,
        },
    )
    manifest.write(folder)
    return manifest


def test_a_model_shows_its_family_card_and_commands_and_text_stays_text(tmp_path: Path) -> None:
    root = tmp_path / "store"
    (root / "runs").mkdir(parents=True)
    (root / "format").write_text("1\n")
    base = write_artifact(root, "pretrain", 1)
    model = write_artifact(root, "sft", 2, {"model": base})
    write_artifact(root, "sft", 3, {"model": base})
    card = f"# {HOSTILE}\n\n[link](javascript:alert(1)) ![image](http://evil.example/x.png) [fine](https://example.org)"
    record = {"status": "rejected", "reasons": [{"message": HOSTILE}]}
    files = {"MODEL_CARD.md": card.encode(), "registration.json": json.dumps(record).encode()}
    write_artifact(root, "register", 4, {"model": model}, files=files)
    pages = client(root)

    page = pages.get("/model/sft/0000000000000002")
    assert page.status_code == 200
    assert 'href="/model/pretrain/0000000000000001"' in page.text
    assert "/compare?a=sft/0000000000000003&amp;b=sft/0000000000000002" in page.text
    assert f"stemma promote register/0000000000000004 --root {root}" in page.text
    assert 'href="https://example.org"' in page.text and 'href="javascript' not in page.text
    assert "A gate rejected it" in page.text
    compared = pages.get("/compare?a=pretrain&b=sft").text
    assert "nothing was measured over the same items" in compared
    assert "<h2>Machines</h2>" in pages.get("/").text
    for text in (page.text, compared, pages.get("/").text, pages.get("/models").text):
        assert "onerror" in text and "<img" not in text
    assert pages.get(f"/model/{model.digest[:12]}").text == pages.get("/model/sft/0000000000000002").text
    assert pages.get("/model/register").status_code == 404
    for path in ("..%2f..%2fetc", "%2Fetc", "sft/..", "none"):
        assert pages.get(f"/model/{path}").status_code == 404
        assert pages.get(f"/compare?a={path}&b=sft").status_code == 404
    assert pages.get(f"/compare?a={root}/x.yaml&b=sft").status_code == 404, "no files are read by name"


def test_actions_on_a_model_are_commands_or_give_the_reason_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEMMA_RELAY", "off")
    root = tmp_path / "store"
    (root / "runs").mkdir(parents=True)
    (root / "format").write_text("1\n")
    writes = json.dumps({"architectures": ["LlamaForCausalLM"]}).encode()
    scores = json.dumps({"architectures": ["LlamaForSequenceClassification"]}).encode()
    base = write_artifact(root, "pretrain", 1, files={"config.json": writes})
    model = write_artifact(root, "sft", 2, {"model": base}, files={"config.json": writes})
    write_artifact(root, "reward_model", 3, {"model": model}, files={"config.json": scores})
    record = {"status": "rejected", "reasons": [{"message": HOSTILE}]}
    files = {"MODEL_CARD.md": b"", "registration.json": json.dumps(record).encode()}
    write_artifact(root, "register", 4, {"model": base}, files=files)
    pages = client(root)

    def reasons(address: str) -> list[str]:
        page = pages.get(f"/model/{address}").text
        shown = re.findall(r'<b class="reason">(.*?)\.</b>', page)
        assert page.count(" disabled") == len(shown)
        return [html.unescape(reason) for reason in shown]

    assert reasons("sft/0000000000000002") == ["It is not registered: run a pipeline with the section register"]
    assert "next to pretrain/0000000000000001" in pages.get("/model/sft/0000000000000002").text
    assert reasons("reward_model/0000000000000003")[0] == "It scores text and does not generate any"
    assert reasons("pretrain/0000000000000001") == ["A gate rejected it"] * 2

    address = "/model/sft/0000000000000002"
    assert pages.post(f"{address}/promote", json={}).status_code == 409
    assert pages.post(f"{address}/chat/v1/chat/completions", json={}).status_code == 409, "it is not tried"
    assert pages.post(f"{address}/chat/v1/models", json={}).status_code == 404
    assert pages.get(f"{address}/chat/").url.path == address

    def outcome(action: str) -> dict[str, str] | None:
        job: dict[str, str] = pages.get(f"{address}/actions").json()[action]
        return job if job["state"] != "running" else None

    (root / "exports").write_text("in the way")
    assert pages.post(f"{address}/export", json={}).json()["state"] in ("running", "failed")
    failed = wait_until(lambda: outcome("export"), timeout_s=30)
    assert isinstance(failed, dict) and failed["state"] == "failed"
    assert failed["message"] in html.unescape(pages.get(address).text)
    record = {"name": "tiny", "status": "registered", "reasons": []}
    files = {"MODEL_CARD.md": b"", "registration.json": json.dumps(record).encode()}
    write_artifact(root, "register", 5, {"model": model}, files=files)
    assert pages.post(f"{address}/promote", json={}).status_code == 200
    assert wait_until(lambda: outcome("promote"), timeout_s=120) == {
        **{"state": "done", "page": ""},
        "message": "promoted as tiny",
    }
    assert Promotions(root).all()["tiny"].digest == model.digest
    assert reasons("sft/0000000000000002") == ["It is already promoted as tiny"]

    pages = client(root, is_read_only=True)
    assert set(reasons("sft/0000000000000002")) == {"This page only reads the store; run stemma up, and use its page"}
    for action in ("try", "export", "promote"):
        assert pages.post(f"{address}/{action}", json={}).status_code == 403
    journal = RunJournal(root / "runs", "20261128-000000-000000-aaaaaa")
    journal.begin(pipeline="tiny", config="tiny.yaml")
    for action in ("keep", "cancel", "retry"):
        assert pages.post(f"/run/{journal.run_id}/{action}", json={}).status_code == 403
    assert not journal.is_to_keep()
    assert client(root).post(f"/run/{journal.run_id}/keep", json={}).status_code == 200 and journal.is_to_keep()


def test_a_finished_run_begins_with_verdict_numbers_and_samples_of_its_report(tmp_path: Path) -> None:
    root = tmp_path / "store"
    plain = {"score": "", "mark": ""}
    answers = [{"model": name, "label": name, "text": f"{name} {HOSTILE}", **plain} for name in ("base", "sft", "rlhf")]
    first = {
        "key_figures": [{"value": "38 → 55 %", "label": "answers verified right", "note": HOSTILE}],
        "samples": [{"prompt": "Why?", "reference": "", "answers": answers}],
    }
    claims = [{"state": "holds", "sign": "✓", "title": "Alignment cost no accuracy", "text": ""}]
    aux = root / "report" / ("c" * 16) / "aux"
    aux.mkdir(parents=True)
    (root / "format").write_text("1\n")
    (aux / "claims.json").write_text(json.dumps(claims))
    (aux / "first_screen.json").write_text(json.dumps(first))
    journal = RunJournal(root / "runs", "20261128-000000-000000-aaaaaa")
    journal.begin(pipeline="tiny", config="tiny.yaml")
    journal.row(JournalRow("report", "built", **ADDRESS, seconds=1.0, path=str(aux.parent)))
    journal.end({"status": "done", "errors": [], "stages": []})

    page = client(root).get(f"/run/{journal.run_id}").text

    parts = ["1 of 1 claims hold", "38 → 55 %", "Why?", "base &lt;img", "sft &lt;img", "rlhf &lt;img", "Alignment cost"]
    offsets = [page.index(part) for part in parts]
    assert offsets == sorted(offsets) and page.count("<img") == 0


def test_answers_of_all_models_to_one_prompt_stand_side_by_side_before_there_is_a_report(tmp_path: Path) -> None:
    root = tmp_path / "store"
    (root / "runs").mkdir(parents=True)
    (root / "format").write_text("1\n")
    journal = RunJournal(root / "runs", "20261128-000000-000000-aaaaaa")
    journal.begin(pipeline="tiny", config="tiny.yaml")
    for stage, models in (("measure_sft", ("base", "sft")), ("measure_rlhf", ("sft", "rlhf"))):
        aux = root / stage / ("c" * 16) / "aux"
        aux.mkdir(parents=True)
        line = {"prompt": "Why?", "answers": {model: f"{model} of {stage} {HOSTILE}" for model in models}}
        (aux / "samples.jsonl").write_text(json.dumps(line) + "\n")
        journal.row(JournalRow(stage, "built", **ADDRESS, seconds=1.0, path=str(aux.parent)))

    page = client(root).get(f"/run/{journal.run_id}").text

    shown = re.findall(r"<pre>(\w+) of (\w+) &lt;img", page)
    assert shown == [("base", "measure_sft"), ("sft", "measure_rlhf"), ("rlhf", "measure_rlhf")]


def test_a_family_is_drawn_in_layers_with_evaluations_in_the_box_of_their_model(tmp_path: Path) -> None:
    root = tmp_path / "store"
    (root / "runs").mkdir(parents=True)
    (root / "format").write_text("1\n")
    data = write_artifact(root, "clean", 1, step="clean")
    verdict = write_artifact(root, "validate_clean", 2, {"data": data}, step="validate_clean")
    base = write_artifact(root, "pretrain", 3, {"shards": data, "validated": verdict}, step="pretrain")
    model = write_artifact(root, "sft", 4, {"model": base, "documents": data}, step="sft")
    scores = write_artifact(root, "benchmarks_sft", 5, {"model": model, "test_items": data}, step="benchmarks_sft")
    write_artifact(root, "rlhf", 6, {"model": model}, step="rlhf")
    write_artifact(root, "register", 7, {"model": model, "benchmarks_sft": scores}, step="register")

    page = client(root).get("/model/sft").text

    drawn = page[page.index('aria-label="the family of the model"') : page.index("</svg>")]
    boxes = {name: float(x) for x, name in re.findall(r'<text x="(\d+)" y="\d+">(\w+)</text>', drawn)}
    assert sorted(boxes, key=lambda name: boxes[name])[:3] == ["clean", "pretrain", "sft"]
    assert boxes.keys() == {"clean", "pretrain", "sft", "rlhf", "register"}
    assert boxes["rlhf"] == boxes["register"] > boxes["sft"]
    assert drawn.count("marker-end") == 4, "an arrow that follows from others is left out"
    for text in (">1 source</text>", ">validated</text>", ">this model</text>", "benchmarks_sft/0000000000000005: "):
        assert text in drawn
    assert '<a href="/model/rlhf/0000000000000006">' in drawn


def test_documents_are_found_and_followed_through_the_rules(store: Path) -> None:
    pages = client(store)
    address = next(f"tokenizer/{path.name}" for path in (store / "tokenizer").iterdir() if path.is_dir())
    page = pages.get(f"/data/{address}")
    assert page.status_code == 200 and "Funnel" in page.text and "chronicle" in page.text
    folder = next(path.parent for path in (store / "clean").glob("*/manifest.json"))
    dropped = pq.read_table(folder / "aux" / "dropped.parquet").to_pylist()
    kept = next(iter(read_documents(folder)))

    hits = pages.get(f"/data/{address}", params={"q": kept.text[20:50].upper()}).text
    assert f"document={kept.id}" in hits and "<mark>" in hits
    followed = pages.get(f"/data/{address}?document={kept.id}").text
    assert followed.count(">kept<") == 2
    followed = pages.get(f"/data/{address}?document={dropped[0]['id']}").text
    assert ">dropped<" in followed and dropped[0]["rule"].replace("_", " ") in followed
    for query in (HOSTILE, "no such text"):
        nothing = pages.get(f"/data/{address}", params={"q": query, "document": query})
        assert nothing.status_code == 200 and "<img" not in nothing.text and "No stage of this corpus" in nothing.text


def test_home_names_what_needs_a_person(tmp_path: Path) -> None:
    root = tmp_path / "store"
    (root / "runs").mkdir(parents=True)
    (root / "format").write_text("1\n")
    (root / "feedback" / "round-1").mkdir(parents=True)
    for number, status in enumerate(("refused", "done")):
        journal = RunJournal(root / "runs", f"20261128-00000{number}-000000-aaaaaa")
        journal.begin(pipeline=f"pipeline-{status}", config="c.yaml")
        folder = root / "pretrain" / (f"{number}" * 16)
        journal.row(JournalRow("pretrain", "built", **ADDRESS, seconds=61.0, path=str(folder)))
        if status == "done":
            write_times(folder, 100.0, usd_per_hour=36.0)
        message = {"kind": "event", "time": 1.0, "name": "correction", "message": f"{HOSTILE} went back"}
        journal.message("pretrain", message)
        journal.end(
            {
                "status": status,
                "errors": [],
                "stages": [{"stage": "pretrain", "status": "built", **ADDRESS}],
            }
        )
    text = client(root).get("/").text
    for needed in ("A gate refused the model of pipeline-refused", "corrected its training", "round-1 wait for labels"):
        assert needed in text
    assert "1 min 1 s" in text and "onerror" in text and "<img" not in text
    assert re.findall(r'data-label="cost">([^<]*)<', text) == ["1.00 USD", ""], "by the ledger, or unknown"


def test_a_query_that_is_no_text_is_answered(tmp_path: Path) -> None:
    """No client library sends such bytes, but anybody can."""
    sent: list[Any] = []
    path = {"path": "/style.css", "raw_path": b"/style.css", "root_path": "", "query_string": b"\xb5/\xfd"}
    host = {
        "headers": [(b"host", f"127.0.0.1:{PORT}".encode())],
        "server": ("127.0.0.1", PORT),
        "client": ("127.0.0.1", 1),
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "scheme": "http", "http_version": "1.1", **path, **host}
    asyncio.run(client(tmp_path).app(scope, receive, send))
    assert sent[0]["status"] == 200
