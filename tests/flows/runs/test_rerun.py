"""What a change makes run again: the cases that users care about, through the real command."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from corpus.documents.parts import read_documents
from infra.leases.table import LEASE_S
from infra.store.manifest import Manifest
from tasks.stages import STAGES as DECLARED
from tests.support.pipelines import short_config
from tests.support.programs.command import Answer, start, stemma, write_config
from tests.support.programs.command import finish as finish_command

Run = Callable[..., Answer]
STAGES = {"ingest", "validate", "clean", "tokenizer"}


def edit(folder: Path, change: Callable[[dict], None]) -> Path:
    """The pipeline's config after a change."""
    path = folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    change(config)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def run_again(run: Run, folder: Path, *options: str) -> Answer:
    answer = run("run", folder / "config.yaml", "--root", folder / "store", *options)
    assert answer.code == 0, answer.document["errors"]
    return answer


def test_nothing_changed_builds_nothing(run: Run, data_pipeline: Path) -> None:
    """What a builder left that was killed between the artifact's rename and its clean-up goes."""
    (artifact,) = (path for path in (data_pipeline / "store" / "tokenizer").iterdir() if path.is_dir())
    left = data_pipeline / "store" / ".work" / "tokenizer" / artifact.name
    (left / "scratch" / "state").mkdir(parents=True)
    answer = run_again(run, data_pipeline)
    assert answer.with_status("reused") == STAGES
    assert not left.exists()


def test_a_changed_key_builds_its_stage_and_what_really_changes_below(run: Run, data_pipeline: Path) -> None:
    edit(data_pipeline, lambda config: config["tokenizer"].update(vocab_size=420))
    config, store = data_pipeline / "config.yaml", data_pipeline / "store"

    told = run("check", config, "--root", store).rows()
    assert {stage for stage, row in told.items() if row["status"] == "build"} == {"tokenizer"}
    assert told["tokenizer"]["because"] == ["tokenizer.vocab_size changed: 400 → 420"]

    answer = run_again(run, data_pipeline)
    assert answer.with_status("built") == {"tokenizer"}
    why = run("why", config, "tokenizer", "--root", store)
    assert (why.document["did"], why.document["why"]) == ("built", "tokenizer.vocab_size changed: 400 → 420")


def test_a_changed_source_that_cleans_to_the_same_text_stops_there(run: Run, data_pipeline: Path) -> None:
    source = data_pipeline / "text.jsonl"
    source.write_text(source.read_text().replace("Too short to keep.", "Too short to save."))

    answer = run_again(run, data_pipeline)

    assert answer.with_status("built") == {"ingest", "validate", "clean"}
    assert answer.with_status("reused") == {"tokenizer"}
    assert answer.rows()["ingest"]["because"] == ["the content of the source ingest.read.0 changed"]


def move_elsewhere(folder: Path) -> None:
    config = edit(folder, lambda config: config.update(launch={"processes": 2, "device": "cpu", "microbatch": 2}))
    data = yaml.safe_load(config.read_text())
    text = "# a comment\n" + yaml.safe_dump(dict(reversed(data.items())))
    config.write_text(text.replace("0.5", "5e-1"))


def move_root(folder: Path) -> None:
    shutil.move(folder / "store", folder / "elsewhere")
    (folder / "store").symlink_to(folder / "elsewhere")


def move_source(folder: Path) -> None:
    (folder / "moved").mkdir()
    shutil.move(folder / "text.jsonl", folder / "moved" / "text.jsonl")
    edit(folder, lambda config: config["ingest"]["read"][0].update(paths=["moved/text.jsonl"]))


def name_a_default(folder: Path) -> None:
    edit(folder, lambda config: config["tokenizer"].update(min_frequency=2))


@pytest.mark.parametrize("change", [move_elsewhere, move_root, move_source, name_a_default])
def test_where_and_how_it_runs_changes_nothing(run: Run, data_pipeline: Path, change: Callable[[Path], None]) -> None:
    change(data_pipeline)
    assert run_again(run, data_pipeline).with_status("reused") == STAGES


def test_a_raised_version_builds_that_stage_and_what_really_changes_below(
    env: dict[str, str], data_pipeline: Path
) -> None:
    raised = (
        "import dataclasses\nfrom tasks.stages import STAGES\n"
        "STAGES['clean'] = dataclasses.replace(STAGES['clean'], version=STAGES['clean'].version + 1)\n"
        "from cli.main import main; main()"
    )
    config, store = str(data_pipeline / "config.yaml"), str(data_pipeline / "store")
    process = subprocess.Popen(
        [sys.executable, "-c", raised, "run", config, "--root", store, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    answer = finish_command(process)
    assert answer.with_status("built") == {"clean"}
    version = DECLARED["clean"].version
    assert answer.rows()["clean"]["because"] == [f"the stage's version changed from {version} to {version + 1}"]


def test_force_builds_again_and_only_below_if_bytes_changed(run: Run, data_pipeline: Path) -> None:
    answer = run_again(run, data_pipeline, "--force", "clean")
    assert answer.with_status("built") == {"clean"}
    assert answer.rows()["clean"]["because"] == ["forced"]


def test_a_stage_that_waits_for_its_turn_is_not_said_to_have_worked(run: Run, data_pipeline: Path) -> None:
    tokenizer = {"uses": "tokenizer", "inputs": {"documents": "clean"}}
    steps = {f"of_{size}": {**tokenizer, "vocab_size": size} for size in (310, 320, 330)}
    edit(data_pipeline, lambda config: config.update(steps=steps, launch={"stages_at_once": 1}))
    answer = run_again(run, data_pipeline)
    assert answer.with_status("built") == set(steps)
    manifests = [
        Manifest.read(path.parent)
        for path in (data_pipeline / "store" / "tokenizer").glob("*/manifest.json")
        if json.loads(path.read_text())["step"] in steps
    ]
    begun, ended = (
        [datetime.fromisoformat(getattr(one, name)).timestamp() for one in manifests]
        for name in ("started", "finished")
    )
    worked = sum(one.seconds for one in manifests)
    assert worked < 1.3 * (max(ended) - min(begun)), "one after the other: the last would have waited for two"
    assert sum(answer.rows()[name]["seconds"] for name in steps) == pytest.approx(worked)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("tokenizer.json", flip_a_byte),
        pytest.param("tokenizer.json", Path.unlink, marks=pytest.mark.long),
        ("manifest.json", empty),
    ],
)
def test_a_damaged_artifact_is_found_said_and_built_again(
    run: Run, data_pipeline: Path, name: str, damage: Callable[[Path], None]
) -> None:
    config, store = data_pipeline / "config.yaml", data_pipeline / "store"
    file = next((store / "tokenizer").glob(f"*/{name}"))
    damage(file)

    planned = run("check", config, "--root", store).rows()["tokenizer"]
    assert planned["status"] == "build" and str(file) in planned["because"][0]
    answer = run_again(run, data_pipeline)

    assert answer.with_status("built") == {"tokenizer"}
    assert str(file) in answer.rows()["tokenizer"]["because"][0]
    assert run_again(run, data_pipeline).with_status("reused") == STAGES


def test_verify_reads_bytes_that_the_times_hide(run: Run, data_pipeline: Path) -> None:
    """A flipped byte behind the same size and times is trusted by a plain run, and found by --verify."""
    store = data_pipeline / "store"
    run_again(run, data_pipeline)
    file = next((store / "tokenizer").glob("*/tokenizer.json"))
    before = file.stat()
    flip_a_byte(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    # Only the kernel sets ctime, so the book is made to remember the new one: as if the disk had lied silently.
    with sqlite3.connect(store / ".state" / "hashes.sqlite") as book:
        book.execute("UPDATE files SET ctime_ns = ? WHERE path = ?", (file.stat().st_ctime_ns, str(file)))

    assert run_again(run, data_pipeline).with_status("reused") == STAGES
    assert run_again(run, data_pipeline, "--verify").with_status("built") == {"tokenizer"}


def test_documents_that_are_some_of_others_outlive_those(run: Run, data_pipeline: Path, tmp_path: Path) -> None:
    """dedupe writes which documents stay, and links their text; without the artifact that it read it is whole."""
    store = data_pipeline / "store"
    edit(data_pipeline, lambda config: config.update(dedupe={"near": None}))
    assert run_again(run, data_pipeline).with_status("built") == {"dedupe", "tokenizer"}
    assert run_again(run, data_pipeline).with_status("built") == set()
    names = ("clean/*/documents", "dedupe/*/text")
    written, linked = ({part.stat().st_ino for part in store.glob(f"{name}/*.parquet")} for name in names)
    assert written == linked
    for upstream in ("ingest", "clean"):
        shutil.rmtree(store / upstream)
    assert run("verify", "dedupe", "--root", store).code == 0
    (dedupe,) = (store / "dedupe").iterdir()
    adopted = run("adopt", "dedupe", dedupe, "--root", tmp_path / "elsewhere")
    assert adopted.code == 0, adopted.document["errors"]
    copied, kept = (list(read_documents(Path(folder))) for folder in (adopted.document["path"], dedupe))
    assert copied == kept != []


def test_selections_compose_and_a_missing_upstream_names_its_command(
    run: Run, data_pipeline: Path, tmp_path: Path
) -> None:
    store = data_pipeline / "store"
    config = (data_pipeline / "config.yaml").rename(data_pipeline / "a config.yaml")

    refused = run("run", config, "--root", tmp_path / "empty", "--only", "tokenizer")
    assert refused.code == 2
    assert refused.document["errors"][0]["code"] == "missing_upstream"
    # As a shell takes it, and on the same store: it built in the default one, and not at all where a space was.
    named = f"stemma run '{config}' --until clean --root {tmp_path / 'empty'}"
    assert refused.document["errors"][0]["fix"] == named
    never = run("why", config, "clean", "--root", tmp_path / "empty")
    assert (never.document["errors"][0]["code"], never.document["errors"][0]["fix"]) == ("never_run", named)

    second = run("run", config, "--root", store, "--only", "tokenizer", "--set", "tokenizer.vocab_size=410")
    assert second.statuses() == {"tokenizer": "built"}
    third = run("run", config, "--root", store, "--from", "clean", "--until", "clean", "--force", "clean")
    assert third.statuses() == {"clean": "built"}
    first = run("run", config, "--root", store, "--until", "clean")
    assert first.statuses() == dict.fromkeys(("ingest", "validate", "clean"), "reused")


def test_four_at_once_build_each_artifact_once(env: dict[str, str], tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.yaml", short_config(tmp_path))
    started = [start("run", config, "--root", tmp_path / "store", env=env) for _ in range(4)]
    answers = [finish_command(process) for process in started]

    assert [answer.code for answer in answers] == [0, 0, 0, 0]
    for stage in ("ingest", "clean", "tokenizer"):
        built = [answer.statuses()[stage] for answer in answers].count("built")
        assert built == 1, f"{stage} was built {built} times"
        assert len({answer.rows()[stage]["digest"] for answer in answers}) == 1


def test_a_dead_builders_lease_is_taken_over_and_said(env: dict[str, str], data_pipeline: Path) -> None:
    store = data_pipeline / "store"
    artifact = next((store / "tokenizer").iterdir())
    shutil.rmtree(artifact)
    row = (f"tokenizer/{artifact.name}", "0" * 32, "another-host", 4242, 1.0, 0, time.time() - LEASE_S - 1)
    with sqlite3.connect(store / ".state" / "leases.sqlite") as table:
        table.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    answer = stemma("run", data_pipeline / "config.yaml", "--root", store, env=env)

    assert answer.with_status("built") == {"tokenizer"}
    assert "taking over from process 4242 on another-host" in answer.stderr
