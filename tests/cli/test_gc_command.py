"""`stemma gc`: shows before it removes, and never takes an ancestor of what is needed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.runs.garbage import Pins, refuse_if_unsure, remove, survey
from flows.runs.journal import RunJournal, new_run_id
from flows.runs.retention import forget, forgettable
from flows.runs.trials import Trial, Trials
from infra.errors import StageError
from infra.lineage.outbox import Outbox
from infra.servers.settings import Settings
from infra.servers.state import make_servers_folder
from infra.store.ancestry import ancestry
from infra.store.manifest import Manifest
from infra.store.store import Store
from tests.support.artifacts import make_artifact
from tests.support.programs.command import Answer
from tests.support.services.small_disk import fill, small_disk

Run = Callable[..., Answer]


def collect(store: Store) -> set[str]:
    found = survey(store)
    refuse_if_unsure(found)
    return {item.id for item in remove(store, found.artifacts)}


def place(manifest: Manifest) -> str:
    return f"{manifest.stage}/{manifest.fingerprint}"


def record_run(
    store: Store, pipeline: str, made: list[Manifest], status: str | None = "done", **selection: Any
) -> None:
    """A finished run of a pipeline, or one in progress for a status of None."""
    journal = RunJournal(store.layout.runs, new_run_id())
    empty: dict[str, Any] = {"only": [], "from_": [], "until": [], "force": []}
    journal.begin(pipeline=pipeline, selection={**empty, **selection})
    rows = []
    for one in made:
        row = {"stage": one.stage, "status": "built", "fingerprint": one.fingerprint, "digest": one.digest}
        journal._write({"kind": "stage", **row})
        rows.append(row)
    if status:
        journal.end({"status": status, "stages": rows})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_what_the_newest_run_does_not_need_goes_after_it_was_shown(run: Run, data_pipeline: Path) -> None:
    root, config = data_pipeline / "store", data_pipeline / "config.yaml"
    (old,) = (folder.name for folder in (root / "tokenizer").iterdir())
    assert run("run", config, "--set", "tokenizer.vocab_size=420", "--root", root).code == 0

    exported = root / "exports" / f"tokenizer-{old}"
    exported.mkdir(parents=True)
    (exported / "model.safetensors").write_bytes(b"x" * 100)
    shown = run("gc", "--root", root)
    assert [(row["artifact"], row["removed"]) for row in shown.document["garbage"]] == [(f"tokenizer/{old}", False)]
    assert shown.document["bytes"] > 0
    assert (root / "tokenizer" / old).exists()

    removed = run("gc", "--yes", "--root", root)
    assert [(row["artifact"], row["removed"]) for row in removed.document["garbage"]] == [(f"tokenizer/{old}", True)]
    assert not (root / "tokenizer" / old).exists()
    assert removed.document["exports"] == [{"path": str(exported), "bytes": 100}] and exported.is_dir()
    assert run("verify", "tokenizer", "--ancestry", "--root", root).code == 0
    assert run("gc", "--yes", "--root", root).document["garbage"] == []


def _days_ago(journal: RunJournal, days: float) -> None:
    """Set the beginning of a run back."""
    first, *others = journal.path.read_text().splitlines(keepends=True)
    start = json.loads(first)
    journal.path.write_text(json.dumps({**start, "time": start["time"] - days * 86400}) + "\n" + "".join(others))


def test_a_run_is_forgotten_once_nothing_is_left_of_what_it_built(run: Run, data_pipeline: Path) -> None:
    root, config = data_pipeline / "store", data_pipeline / "config.yaml"
    runs = Store(root).layout.runs
    (first,) = (path.name for path in runs.iterdir())
    for size in ("420", "430"):
        assert run("run", config, "--set", f"tokenizer.vocab_size={size}", "--root", root).code == 0
    second, third = sorted(path.name for path in runs.iterdir())[1:]
    assert run("gc", "--yes", "--root", root).code == 0
    for name in (first, second, third):
        _days_ago(RunJournal(runs, name), 31)

    shown = run("gc", "--root", root).document["garbage"]
    assert [(row["artifact"], row["removed"]) for row in shown] == [(f"runs/{second}", False)]
    assert (runs / second).exists()

    (root / ".state" / "tidied").unlink()
    again = run("run", config, "--set", "tokenizer.vocab_size=430", "--root", root)
    assert set(again.statuses().values()) == {"reused"}
    assert sorted(path.name for path in runs.iterdir()) == [first, third, again.document["run_id"]]
    outbox = Outbox(root)
    messages = [outbox.read(path).content for path in outbox.paths()]
    assert [message["build_id"] for message in messages if message["kind"] == "run_forgotten"] == [second]


def test_many_runs_of_nothing_new_leave_the_newest(store: Store) -> None:
    make_servers_folder(store.root)
    Settings(keep_runs=3).write(store.root)
    made = make_artifact(store, "clean", {"a": "1"}, run_id="of a manifest")
    for _ in range(6):
        record_run(store, "p", [made])
    record_run(store, "p", [made], status=None)
    RunJournal(store.layout.runs, trial := new_run_id()).make_trial(pipeline="p")
    record_run(store, "p", [made])
    record_run(store, "p", [made], until=["clean"])
    names = sorted(path.name for path in store.layout.runs.iterdir())
    assert sorted(journal.run_id for journal in forgettable(store)) == names[:3]
    assert trial in names[3:]
    Settings(keep_days=0).write(store.root)
    assert forgettable(store) == []


def test_prefects_server_forgets_a_run_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it Prefect's database grows by each run. A server that lacks the run, or fails, is no obstacle."""
    deleted: list[str] = []

    class Prefect(BaseHTTPRequestHandler):
        def do_DELETE(self) -> None:
            deleted.append(self.path)
            self.send_response({1: 204, 2: 404}.get(len(deleted), 500))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Not into the log of the tests."""

    journals = []
    for number in range(4):
        journals.append(RunJournal(store.layout.runs, new_run_id()))
        journals[-1].begin(pipeline="p", flow_run_id=f"00000000-{number}")
    with HTTPServer(("127.0.0.1", 0), Prefect) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("STEMMA_PREFECT_URL", f"http://127.0.0.1:{server.server_port}")
        assert forget(store, journals) == [journal.run_id for journal in journals]
        server.shutdown()
    assert deleted == [f"/api/flow_runs/00000000-{number}" for number in range(3)]
    assert list(store.layout.runs.iterdir()) == []


def test_a_pin_keeps_an_artifact_and_its_ancestors_until_it_is_taken_away(run: Run, store: Store) -> None:
    data = make_artifact(store, "clean", {"a": "1"})
    model = make_artifact(store, "sft", {"w": "1"}, inputs={"data": data})
    pinned = run("gc", "--yes", "--pin", "sft", "--root", store.root)
    assert pinned.document["pins"] == [place(model)]
    assert pinned.document["garbage"] == []
    unpinned = run("gc", "--yes", "--unpin", place(model), "--root", store.root)
    assert {row["artifact"] for row in unpinned.document["garbage"]} == {place(model), place(data)}
    assert run("gc", "--unpin", "clean", "--root", store.root).code == 2


def test_pins_that_are_set_at_once_are_all_kept(store: Store) -> None:
    names = [f"clean/{number:016x}" for number in range(60)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(Pins(store.root).add, names))
    assert Pins(store.root).read() == names


def test_what_is_said_to_be_freed_leaves_out_files_that_have_a_name_elsewhere(store: Store) -> None:
    """The text parts of dedupe are hard links to those of clean: they go with the last of their names."""
    text = "x" * 1000
    clean = make_artifact(store, "clean", {"documents/part-00000.parquet": text})
    files = {"documents/part-00000.parquet": "rows", "text/part-00000.parquet": text}
    dedupe = make_artifact(store, "dedupe", files, inputs={"documents": clean})
    linked = store.path(dedupe) / "text" / "part-00000.parquet"
    linked.unlink()
    os.link(store.path(clean) / "documents" / "part-00000.parquet", linked)
    assert sum(item.bytes for item in survey(store).artifacts) == len("rows") + len(text)
    Pins(store.root).add(place(clean))
    assert [(item.id, item.bytes) for item in survey(store).artifacts] == [(place(dedupe), len("rows"))]
    assert collect(store) == {place(dedupe)}
    assert store.verify(store.path(clean), clean) == []


def test_the_newest_whole_run_of_each_pipeline_counts(store: Store) -> None:
    versions = [make_artifact(store, "clean", {"a": str(number)}, config={"x": number}) for number in range(4)]
    record_run(store, "one", [versions[0]])
    record_run(store, "one", [versions[1]])
    record_run(store, "two", [versions[2]])
    assert collect(store) == {place(versions[0]), place(versions[3])}


def test_a_run_of_a_part_and_a_failed_run_leave_the_rest_alone(store: Store) -> None:
    clean = make_artifact(store, "clean", {"a": "1"})
    tokenizer, other = (
        make_artifact(store, "tokenizer", {"t": str(number)}, config={"x": number}) for number in (1, 2)
    )
    record_run(store, "one", [clean, tokenizer])
    record_run(store, "one", [other], only=["tokenizer"])
    assert collect(store) == {place(tokenizer)}
    record_run(store, "one", [], "failed")
    assert collect(store) == set()


def test_a_run_while_the_clock_was_ahead_is_not_the_newest_for_ever(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays until its time has come, and what ran after the clock was set stays too."""
    old, ahead, new = (make_artifact(store, "sft", {"w": text}, config={"x": text}) for text in "123")
    record_run(store, "demo", [old])
    with monkeypatch.context() as clock:
        now = time.time()
        clock.setattr(time, "time", lambda: now + 400 * 86400)
        record_run(store, "demo", [ahead])
    journals = [RunJournal(folder.parent, folder.name) for folder in store.layout.runs.iterdir()]
    (later,) = (one.folder for one in journals if one.start_record()["time"] > now + 86400)
    later.rename(later.with_name(f"9{later.name[1:]}"))  # as new_run_id calls it by such a clock
    record_run(store, "demo", [new])
    assert collect(store) == {place(old)}


def test_of_a_sweep_the_best_trial_stays(store: Store) -> None:
    models = [make_artifact(store, "pretrain", {"w": str(number)}, config={"x": number}) for number in range(4)]
    record_run(store, "one", [models[0]])
    trials = Trials(store.root, "a1b2")
    trials.create()
    for number, loss in enumerate((2.0, 1.0, 3.0)):
        record_run(store, "one sweep a1b2", [models[number + 1]], until=["pretrain"])
        run_id = max(folder.name for folder in store.layout.runs.iterdir())
        trials.save(Trial(number, number, {}, 17, status="done", run_id=run_id, value=loss))
    # The last trial is also the newest run of its name.
    assert collect(store) == {place(models[1])}


def test_adopted_artifacts_stay_unless_asked_for(run: Run, store: Store) -> None:
    adopted = make_artifact(store, "clean", {"a": "1"}, adopted={"from": "/data", "note": ""})
    assert run("gc", "--yes", "--root", store.root).document["garbage"] == []
    found = run("gc", "--adopted", "--root", store.root).document["garbage"]
    assert [row["artifact"] for row in found] == [place(adopted)]


def test_what_is_in_use_stays(store: Store) -> None:
    read, running, building = (make_artifact(store, "clean", {"a": str(n)}, config={"x": n}) for n in range(3))
    record_run(store, "one", [running], None)
    lease = store.leases.acquire("sft/0123456789abcdef")
    assert lease is not None
    scratch = store.layout.work("sft", "0123456789abcdef") / "scratch"
    scratch.mkdir(parents=True)
    (scratch / "job.json").write_text(json.dumps({"inputs": {"data": str(store.path(read))}}))
    rebuilt = store.leases.acquire(place(building))
    assert rebuilt is not None
    assert collect(store) == set()
    rebuilt.release()
    lease.release()
    assert collect(store) == {place(read), place(building)}


def test_what_a_run_came_to_since_the_survey_stays_with_its_ancestors(store: Store) -> None:
    data = make_artifact(store, "clean", {"a": "1"})
    reused = make_artifact(store, "sft", {"w": "1"}, inputs={"documents": data})
    other = make_artifact(store, "clean", {"a": "2"}, config={"x": 2})
    found = survey(store)
    record_run(store, "one", [reused], None)
    assert [item.id for item in remove(store, found.artifacts)] == [place(other)]


def test_what_a_run_of_a_part_reads_of_earlier_runs_stays_while_it_goes_on(run: Run, data_pipeline: Path) -> None:
    root, config = data_pipeline / "store", data_pipeline / "config.yaml"
    (clean,) = (root / "clean").iterdir()
    assert run("run", config, "--root", root, "--set", "clean.max_characters=441").code == 0
    answer = run("run", config, "--root", root, "--only", "tokenizer")
    assert answer.with_status("reused") == {"tokenizer"}

    # As it stood before the first of its stages was there.
    folder = root / "runs" / answer.document["run_id"]
    (folder / "result.json").unlink()
    lines = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
    (folder / "journal.jsonl").write_text("".join(line for line in lines if json.loads(line)["kind"] != "stage"))
    garbage = {item.folder for item in survey(Store(root)).artifacts}
    assert garbage and clean not in garbage


def test_unfinished_work_goes_when_nobody_touched_it_for_a_day(store: Store) -> None:
    for name, age_h, held in (("old", 25, False), ("held", 25, True), ("young", 1, False)):
        folder = store.layout.work("sft", name)
        folder.mkdir(parents=True)
        (folder / "checkpoint").write_text("weights")
        then = time.time() - age_h * 3600
        for path in (folder / "checkpoint", folder):
            os.utime(path, (then, then))
        if held:
            assert store.leases.acquire(f"sft/{name}") is not None
    assert [item.id for item in survey(store).work] == [".work/sft/old"]


def test_files_that_a_build_removes_meanwhile_are_in_nobodys_way(store: Store) -> None:
    scratch = store.layout.work("clean", "0" * 16) / "scratch"
    scratch.mkdir(parents=True)
    ended = threading.Event()

    def build() -> None:
        while not ended.is_set():
            for number in range(50):
                (scratch / str(number)).write_text("part")
            for number in range(50):
                (scratch / str(number)).unlink()

    builder = threading.Thread(target=build)
    builder.start()
    try:
        assert [survey(store).work for _ in range(200)] == [[]] * 200
    finally:
        ended.set()
        builder.join()


class TestAncestorsOfARegisteredModel:
    """Whatever happens to the store, they stay."""

    @pytest.fixture
    def family(self, store: Store) -> dict[str, Manifest]:
        ingest = make_artifact(store, "ingest", {"a": "text"})
        verdict = make_artifact(store, "validate", {"verdict": "yes"}, inputs={"data": ingest})
        clean = make_artifact(
            store, "clean", {"a": "clean"}, inputs={"documents": ingest}, requires={"validate": verdict}
        )
        model = make_artifact(store, "pretrain", {"w": "1"}, inputs={"documents": clean})
        register = make_artifact(store, "register", {"card": "1"}, inputs={"model": model})
        return {one.stage: one for one in (ingest, verdict, clean, model, register)}

    def left(self, store: Store) -> set[str]:
        return {f"{folder.parent.name}/{folder.name}" for folder, _ in store.manifests()}

    def test_with_no_run_and_no_state_left(self, run: Run, store: Store, family: dict[str, Manifest]) -> None:
        orphan = make_artifact(store, "sft", {"w": "2"}, inputs={"model": family["pretrain"]})
        shutil.rmtree(store.layout.state)
        answer = run("gc", "--yes", "--adopted", "--root", store.root)
        assert [row["artifact"] for row in answer.document["garbage"]] == [place(orphan)]
        assert self.left(store) == {place(one) for one in family.values()}

    def test_after_every_stage_was_built_anew_with_other_bytes(self, store: Store, family: dict[str, Manifest]) -> None:
        before = {(one.stage, one.digest) for one in family.values()}
        ingest = make_artifact(store, "ingest", {"a": "another text"})
        clean = make_artifact(store, "clean", {"a": "clean 2"}, inputs={"documents": ingest})
        model = make_artifact(store, "pretrain", {"w": "3"}, inputs={"documents": family["clean"]})
        assert model.fingerprint == family["pretrain"].fingerprint
        record_run(store, "one", [ingest, clean])
        assert collect(store) == {place(model)}
        assert before <= {(manifest.stage, manifest.digest) for _, manifest in store.manifests()}

    def test_when_a_link_was_lost_and_its_address_has_other_bytes(
        self, store: Store, family: dict[str, Manifest]
    ) -> None:
        """A damaged artifact whose rebuild came out different: its bytes are gone, what it was made of is not."""
        shutil.rmtree(store.path(family["clean"]))
        make_artifact(store, "clean", {"a": "not the same"}, inputs={"documents": family["ingest"]})
        collect(store)
        assert {"ingest", "pretrain", "register"} <= {manifest.stage for _, manifest in store.manifests()}

    @pytest.mark.parametrize("lost", ["folder", "manifest", "unreadable"])
    def test_when_nobody_can_tell_what_they_are_nothing_is_removed(
        self, run: Run, store: Store, family: dict[str, Manifest], lost: str
    ) -> None:
        folder = store.path(family["clean"])
        if lost == "folder":
            shutil.rmtree(folder)
        elif lost == "manifest":
            (folder / "manifest.json").unlink()
        else:
            (folder / "manifest.json").write_text("{")
        make_artifact(store, "sft", {"w": "2"})
        before = self.left(store)
        for options in ((), ("--yes",)):
            answer = run("gc", *options, "--root", store.root)
            assert (answer.code, answer.document["status"]) == (1, "failed")
            assert answer.document["errors"][0]["code"] in {"broken_lineage", "unreadable_manifest"}
        assert self.left(store) == before

    @settings(max_examples=15, deadline=None)
    @given(st.data())
    def test_in_any_store(self, data: st.DataObject) -> None:
        """Random families with rebuilds to other bytes, requires, pins and runs: just what is needed is left, whole."""
        with tempfile.TemporaryDirectory() as folder:
            store = Store(Path(folder))
            made: list[Manifest] = []
            for number in range(data.draw(st.integers(1, 14), "artifacts")):
                parents = data.draw(st.lists(st.sampled_from(made), max_size=3, unique_by=id) if made else st.just([]))
                required = data.draw(st.lists(st.sampled_from(made), max_size=1) if made else st.just([]))
                stage = data.draw(st.sampled_from(["clean", "pretrain", "sft", "register"]))
                made.append(
                    make_artifact(
                        store,
                        stage,
                        # Few different bytes and settings, so that addresses and contents meet again.
                        {"a": str(data.draw(st.integers(0, 3)))},
                        config={"x": data.draw(st.integers(0, 1))},
                        inputs={str(at): one for at, one in enumerate(parents)},
                        requires={str(at): one for at, one in enumerate(required)},
                    )
                )
                if data.draw(st.booleans()) and number % 4 == 0:
                    record_run(store, "one", [made[-1]])
                if data.draw(st.booleans()) and number % 5 == 0:
                    Pins(store.root).add(place(made[-1]))
            wanted = [(path, one) for path, one in store.manifests() if one.stage == "register"]
            ancestors = {member.id for member in ancestry(store, wanted).artifacts}
            needed = set(survey(store).needed)
            collect(store)
            left = {folder.relative_to(store.root).as_posix(): (folder, one) for folder, one in store.manifests()}
            assert ancestors <= set(left)
            assert set(left) == needed
            for path, one in left.values():
                assert store.verify(path, one) == []
            for member in ancestry(store, list(left.values())).members.values():
                assert member.kind != "gone", f"{member.id} was taken from its descendants"


def test_nothing_is_removed_when_unsure(store: Store) -> None:
    make_artifact(store, "sft", {"w": "1"})
    broken = store.layout.artifact("clean", "0" * 16)
    broken.mkdir(parents=True)
    (broken / "manifest.json").write_text('{"schema": 2}')
    with pytest.raises(StageError, match="nothing was removed"):
        collect(store)


@pytest.mark.parametrize("content", [b"", b"\0" * 300, b'{"kind": "begin", "pipe\0\0\n{"kind": "stage"}\n'])
def test_nothing_is_removed_when_a_run_lost_its_beginning(store: Store, content: bytes) -> None:
    """As a power cut leaves it: what the run came to stands in its result alone."""
    made = make_artifact(store, "sft", {"w": "1"})
    record_run(store, "demo", [made])
    (journal,) = store.layout.runs.glob("*/journal.jsonl")
    journal.write_bytes(content)
    with pytest.raises(StageError, match=r"nothing was removed.*first line cannot be read") as caught:
        collect(store)
    assert caught.value.problems[0].path == str(journal)
    assert store.find(made.stage, made.fingerprint)


def test_a_run_that_was_killed_at_its_first_line_and_a_strange_file_are_in_nobodys_way(store: Store) -> None:
    made, old = (make_artifact(store, "sft", {"w": text}, config={"x": text}) for text in "12")
    record_run(store, "demo", [made])
    for name, content in (("20261121-1", b""), ("20261121-2", b'{"kind": "beg')):
        (store.layout.runs / name).mkdir()
        (store.layout.runs / name / "journal.jsonl").write_bytes(content)
    (store.layout.runs / ".DS_Store").write_bytes(b"\0\0")
    assert collect(store) == {place(old)}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "3m") as place:
        yield place


def test_a_full_disk_is_where_gc_is_needed_most(run: Run, disk: Path) -> None:
    """It had no room to take a lease, and removed nothing."""
    store = Store(disk / "store")
    old, building, new = (make_artifact(store, "sft", {"w": text * 5000}, config={"x": text}) for text in "123")
    record_run(store, "demo", [new])
    lease = store.leases.acquire(place(building))
    fill(disk)
    answer = run("gc", "--yes", "--root", store.root)
    assert answer.code == 0, answer.document["errors"]
    assert [row["artifact"] for row in answer.document["garbage"] if row["removed"]] == [place(old)]
    assert store.find(new.stage, new.fingerprint) and store.find(building.stage, building.fingerprint)
    assert lease is not None
    lease.release()
