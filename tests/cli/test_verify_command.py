"""`stemma verify`: every byte, and every file by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.programs.command import Answer

Run = Callable[..., Answer]


def folder_of(store: Path, stage: str) -> Path:
    (folder,) = (store / stage).iterdir()
    return folder


def found(answer: Answer) -> list[tuple[str, str]]:
    return [
        (Path(item["path"]).name, item["what"]) for row in answer.document["artifacts"] for item in row["differences"]
    ]


def test_a_whole_ancestry_is_whole(run: Run, built_data: Path) -> None:
    answer = run("verify", "tokenizer", "--ancestry", "--root", built_data / "store")
    assert (answer.code, answer.document["status"], answer.document["errors"]) == (0, "done", [])
    checked = {row["artifact"].split("/")[0] for row in answer.document["artifacts"]}
    assert checked == {"tokenizer", "clean", "ingest", "validate"}


def test_a_flipped_byte_is_found_though_size_and_mtime_are_as_before(run: Run, data_pipeline: Path) -> None:
    store = data_pipeline / "store"
    path = folder_of(store, "tokenizer") / "tokenizer.json"
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    answer = run("verify", "tokenizer", "--root", store)
    assert (answer.code, answer.document["status"]) == (1, "failed")
    assert found(answer) == [("tokenizer.json", "changed")]
    assert answer.document["errors"][0]["path"] == str(path)


def test_every_difference_is_named(run: Run, data_pipeline: Path) -> None:
    store = data_pipeline / "store"
    folder = folder_of(store, "tokenizer")
    (folder / "special_tokens_map.json").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "aux" / "stage.log").write_text("another")
    (folder / "extra.json").write_text("{}")
    answer = run("verify", folder, "--root", store)
    assert answer.code == 1
    assert sorted(found(answer)) == [
        ("extra.json", "in no manifest"),
        ("special_tokens_map.json", "missing"),
        ("stage.log", "changed"),
        ("tokenizer_config.json", "changed"),
    ]


def test_damage_and_loss_further_up_are_found_by_ancestry_only(run: Run, data_pipeline: Path) -> None:
    store = data_pipeline / "store"
    next((folder_of(store, "ingest") / "documents").iterdir()).write_bytes(b"PAR1")
    shutil.rmtree(folder_of(store, "validate"))
    assert run("verify", "tokenizer", "--root", store).code == 0
    answer = run("verify", "tokenizer", "--ancestry", "--root", store)
    assert answer.code == 1
    assert [what.split(":")[0] for _, what in found(answer)] == ["changed", "missing"]


@pytest.mark.parametrize("key", ["digest", "identity", "version", "inputs"])
def test_a_manifest_that_was_edited_contradicts_itself(run: Run, data_pipeline: Path, key: str) -> None:
    store = data_pipeline / "store"
    path = folder_of(store, "tokenizer") / "manifest.json"
    manifest = json.loads(path.read_text())
    edited = {"digest": "0" * 64, "identity": {"vocab_size": 999}, "version": 7, "inputs": {}}
    path.write_text(json.dumps({**manifest, key: edited[key]}))
    answer = run("verify", "tokenizer", "--root", store)
    assert answer.code == 1
    assert [name for name, _ in found(answer)] == ["manifest.json"]
    told = run("check", data_pipeline / "config.yaml", "--root", store).rows()["tokenizer"]
    assert told["status"] == "build"
    assert "manifest.json is changed" in told["because"][0]
