"""`stemma lineage`: up to the source files, down to everything made of them, from manifests alone."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.store.manifest import SourceRecord
from infra.store.store import Store
from tests.support.artifacts import make_artifact
from tests.support.programs.command import Answer, environment

Run = Callable[..., Answer]


def lineage(run: Run, folder: Path, artifact: str | Path, *options: str) -> dict[str, Any]:
    answer = run("lineage", artifact, *options, "--root", folder / "store")
    assert answer.code == 0, answer.document["errors"]
    return answer.document


def stages(document: dict[str, Any]) -> set[str]:
    return {node["stage"] for node in document["nodes"] if node["kind"] == "artifact"}


def text(*arguments: str | Path) -> str:
    """What a person sees."""
    command = [sys.executable, "-m", "cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment()).stdout


def test_up_leads_to_the_source_files_with_what_it_requires_and_losses(run: Run, built_data: Path) -> None:
    document = lineage(run, built_data, "tokenizer")
    nodes = {node.get("stage", node["kind"]): node for node in document["nodes"]}
    assert set(nodes) == {"tokenizer", "clean", "ingest", "validate", "source"}
    source = built_data / "text.jsonl"
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
    # The other one is the suite that the text was validated by.
    files = [node["files"] for node in document["nodes"] if node["kind"] == "source"]
    assert [{"path": str(source), "sha256": sha256}] in files
    assert nodes["clean"]["read"] == 61
    assert {rule: count for rule, count in nodes["clean"]["dropped"].items() if count} == {"min_characters": 1}
    assert nodes["ingest"]["quarantined"] == 0
    by_id = {node["id"]: node.get("stage", node["kind"]) for node in document["nodes"]}
    edges = {(by_id[edge["from"]], by_id[edge["to"]], edge["requires"]) for edge in document["edges"]}
    assert edges == {
        ("source", "ingest", False),
        ("source", "validate", False),
        ("ingest", "validate", False),
        ("ingest", "clean", False),
        ("validate", "clean", True),
        ("clean", "tokenizer", False),
        ("validate", "tokenizer", True),
    }


def test_down_from_a_source_file_by_path_and_by_hash(run: Run, built_data: Path) -> None:
    source = built_data / "text.jsonl"
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
    for name in (source, sha256):
        assert stages(lineage(run, built_data, name, "--down")) == {"ingest", "validate", "clean", "tokenizer"}


def test_down_from_a_copy_or_a_deleted_file(run: Run, data_pipeline: Path, tmp_path: Path, built_data: Path) -> None:
    copy = tmp_path / "elsewhere.txt"
    shutil.copyfile(data_pipeline / "text.jsonl", copy)
    assert "tokenizer" in stages(lineage(run, data_pipeline, copy, "--down"))
    other = tmp_path / "other.txt"
    other.write_text("other bytes")
    assert stages(lineage(run, data_pipeline, other, "--down")) == set()

    store = Store(tmp_path / "deleted" / "store")
    record = SourceRecord("ingest.read.0", "d" * 64, {"/data/gone.txt": "a" * 64})
    make_artifact(store, "ingest", {"a": "text"}, sources=(record,))
    assert stages(lineage(run, tmp_path / "deleted", "/data/gone.txt", "--down")) == {"ingest"}


def test_manifests_are_enough(run: Run, data_pipeline: Path) -> None:
    before = lineage(run, data_pipeline, "tokenizer")
    for name in (".state", "runs", "lineage", "mlflow", ".work"):
        shutil.rmtree(data_pipeline / "store" / name, ignore_errors=True)
    assert lineage(run, data_pipeline, "tokenizer") == before


def test_an_ancestor_that_was_built_anew_is_found_where_it_was_moved(run: Run, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    old = make_artifact(store, "clean", {"a": "old"})
    model = make_artifact(store, "pretrain", {"w": "1"}, inputs={"data": old})
    new = make_artifact(store, "clean", {"a": "new"})
    assert new.fingerprint == old.fingerprint
    (_, parent) = lineage(run, tmp_path, f"pretrain/{model.fingerprint}")["nodes"]
    assert (parent["kind"], parent["digest"]) == ("artifact", old.digest)
    assert parent["path"].endswith(f"{old.fingerprint}.{old.digest[:8]}")
    below = lineage(run, tmp_path, f"clean/{new.fingerprint}", "--down")
    assert stages(below) == {"clean"}, "the model descends from the old bytes, not from the new"


def test_an_ancestor_that_is_gone_is_said_to_be(run: Run, data_pipeline: Path) -> None:
    shutil.rmtree(data_pipeline / "store" / "clean")
    document = lineage(run, data_pipeline, "tokenizer")
    assert [node["stage"] for node in document["nodes"] if node["kind"] == "gone"] == ["clean"]
    assert "is no longer in the store" in text("lineage", "tokenizer", "--root", data_pipeline / "store")


def test_equal_bytes_at_another_address_are_followed_and_marked(run: Run, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    one = make_artifact(store, "clean", {"a": "text"}, config={"x": 1})
    make_artifact(store, "pretrain", {"w": "1"}, inputs={"data": one})
    twin = make_artifact(store, "clean", {"a": "text"}, config={"x": 2})
    document = lineage(run, tmp_path, f"clean/{twin.fingerprint}", "--down")
    assert stages(document) == {"clean", "pretrain"}
    assert [edge["same_bytes"] for edge in document["edges"]] == [True]


def test_the_tree_says_what_a_person_asks(built_data: Path) -> None:
    shown = text("lineage", "tokenizer", "--root", built_data / "store")
    assert "dropped 1 of 61 documents: min_characters 1" in shown
    assert str(built_data / "text.jsonl") in shown.replace("\n", "")
    assert "requires validate:" in shown


def test_format_json_is_the_same_document(run: Run, built_data: Path) -> None:
    shown = json.loads(text("lineage", "clean", "--format", "json", "--root", built_data / "store"))
    assert shown == lineage(run, built_data, "clean")


def test_html_is_one_page_that_needs_nothing_else(built_data: Path) -> None:
    page = text("lineage", "tokenizer", "--format", "html", "--root", built_data / "store")
    assert page.startswith("<!doctype html>")
    assert "<svg" in page
    assert not re.search(r"""(src|href)=["']?(?!#)|@import|url\(""", page)
    for stage in ("ingest", "validate", "clean", "tokenizer"):
        assert stage in page


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("tokeniser", "tokenizer"),
        ("clean/zz", "clean/"),
        ("/nowhere/at/all", "there are clean, ingest"),
    ],
)
def test_what_is_not_there_is_named_with_what_is_near(run: Run, built_data: Path, asked: str, told: str) -> None:
    answer = run("lineage", asked, "--root", built_data / "store")
    assert (answer.code, answer.document["status"]) == (2, "invalid")
    (error,) = answer.document["errors"]
    assert error["code"] == "unknown_artifact"
    assert told in error["fix"]


def test_a_beginning_must_be_unique(run: Run, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    made = [make_artifact(store, "clean", {"a": "text"}, config={"x": number}) for number in range(20)]
    letters = [one.fingerprint[0] for one in made]
    twice = next(letter for letter in letters if letters.count(letter) > 1)
    answer = run("lineage", f"clean/{twice}", "--root", store.root)
    assert answer.code == 2
    assert f"{letters.count(twice)} artifacts have this prefix" in answer.document["errors"][0]["message"]
    whole = run("lineage", f"clean/{made[0].fingerprint[:12]}", "--root", store.root)
    assert whole.document["nodes"][0]["fingerprint"] == made[0].fingerprint


def test_the_newest_is_what_came_last_whatever_the_clocks_said(run: Run, tmp_path: Path) -> None:
    """What a machine wrote whose clock was ahead stayed the newest of its stage."""
    store = Store(tmp_path)
    for value, finished in (("before", ""), ("ahead", "2099-01-01T00:00:00+00:00"), ("last", "2026-01-01")):
        last = make_artifact(store, "clean", {"a": value}, config={"v": value}, finished=finished)
    (node,) = run("lineage", "clean", "--root", tmp_path).document["nodes"]
    assert node["fingerprint"] == last.fingerprint
    # Built again to other bytes it is newer than all; what is there from before `order` was kept goes by the clock.
    again = make_artifact(store, "clean", {"a": "other bytes"}, config={"v": "before"}, finished="2025-01-01")
    (node,) = run("lineage", "clean", "--root", tmp_path).document["nodes"]
    assert (node["fingerprint"], node["digest"]) == (again.fingerprint, again.digest)
    for _, made in list(store.manifests("clean")):
        replace(made, order=0).write(store.path(made))
    (node,) = run("lineage", "clean", "--root", tmp_path).document["nodes"]
    assert node["finished"].startswith("2099")


def test_a_lost_mlflow_store_is_written_anew(run: Run, data_pipeline: Path) -> None:
    answer = run("lineage", "--rebuild", "--root", data_pipeline / "store")
    assert (answer.code, answer.document["builds"]) == (0, 4)
    assert (data_pipeline / "store" / "mlflow" / "mlflow.db").exists()
    assert run("lineage", "clean", "--rebuild", "--root", data_pipeline / "store").code == 2
