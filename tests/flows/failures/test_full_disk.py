"""A disk that fills up while a stage writes: said so, nothing half-written, and the next run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.config.graph import Selection
from flows.config.read import load
from flows.deployment.start import RunRequest, _lost
from infra.store.layout import MANIFEST
from tests.support.pipelines import SENTENCES, short_config
from tests.support.programs.command import Answer, environment, finish, start, write_config
from tests.support.programs.processes import running_stage, wait_until
from tests.support.services.small_disk import fill, small_disk

SIZE_MB = 256
"""More than a stage wants to see free before it starts."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", f"{SIZE_MB}m") as place:
        yield place


def half_written(store: Path) -> list[Path]:
    """Folders at the place of artifacts that are none."""
    stages = [path for path in store.iterdir() if path.is_dir() and path.name in ("ingest", "validate", "clean")]
    return [folder for stage in stages for folder in stage.iterdir() if not (folder / MANIFEST).is_file()]


def test_a_run_that_had_no_room_for_its_result_is_told_with_the_reason(tmp_path: Path) -> None:
    config = load(write_config(tmp_path / "config.yaml", short_config(tmp_path)))

    def told(root: Path) -> dict[str, Any]:
        (error,) = _lost(RunRequest(config, Selection(), root, False, "config.yaml"), "Crashed: no message")["errors"]
        return dict(error)

    with small_disk(tmp_path / "small", "64k") as place:
        fill(place)
        full = told(place)
    assert (full["code"], full["path"]) == ("disk_full", str(place)) and "Crashed" in full["message"]
    assert told(tmp_path)["code"] == "run_lost"


@pytest.mark.cluster
def test_a_full_disk_fails_cleanly_and_the_next_run_goes_on(
    disk: Path, tmp_path: Path, run: Callable[..., Answer], cold_env: dict[str, str]
) -> None:
    store = disk / "store"
    config = write_config(tmp_path / "config.yaml", short_config(tmp_path))
    process = start("run", config, "--root", store, "--set", "launch.retries=0", env=environment(**cold_env))
    wait_until(lambda: running_stage(store, "ingest"))
    filler = fill(disk)
    answer = finish(process)
    assert answer.code == 1, answer.document
    assert "disk_full" in {error["code"] for error in answer.document["errors"]}, answer.document["errors"]
    assert "free" in str(answer.document["errors"])
    assert not half_written(store)

    before = run("run", config, "--root", store)
    assert (before.code, before.document["errors"][0]["code"]) == (1, "disk_full")
    filler.unlink()
    again = run("run", config, "--root", store)
    assert again.code == 0, again.document["errors"]
    assert not half_written(store)
    assert run("verify", "tokenizer", "--ancestry", "--root", store).code == 0


def test_a_stage_that_needs_more_than_is_free_does_not_begin(
    disk: Path, tmp_path: Path, run: Callable[..., Answer]
) -> None:
    """Cutting repeated passages writes 4.8 bytes per byte of text: 96 MB besides the usual 200, of 268 MB."""
    line = json.dumps({"text": " ".join(SENTENCES) * 40}) + "\n"
    source = tmp_path / "texts.jsonl"
    source.write_text(line * (20_000_000 // len(line)), encoding="utf8")
    sections = {"ingest": {"read": [{"kind": "files", "paths": [str(source)]}]}, "dedupe": {"substrings": {}}}
    config = write_config(tmp_path / "config.yaml", {"name": "disk", **sections})
    answer = run("run", config, "--root", disk / "store")
    assert answer.code == 1 and answer.with_status("built") == {"ingest"}
    [error] = answer.document["errors"]
    assert error["code"] == "disk_full" and "dedupe needs at least 29" in error["message"], error
    assert not (disk / "store" / "dedupe").exists()
    without = run("run", config, "--root", disk / "store", "--set", "dedupe.substrings=null")
    assert without.code == 0, without.document["errors"]
