"""Ingest through the real command: killed and continued, and sources that change or vanish while they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.pipelines import SENTENCES
from tests.support.programs.command import finish, start, stemma, write_config
from tests.support.programs.processes import gone, running_stage, wait_until

pytestmark = pytest.mark.slow

PARTITIONS = 24


def pages(path: Path, count: int) -> str:
    """A file of HTML pages, which take a while to read."""
    rows = []
    for number in range(count):
        body = "".join(f"<p>{number}.{turn} {sentence}</p>" for turn, sentence in enumerate(SENTENCES * 8))
        rows.append(json.dumps({"text": f"<html><body><article>{body}</article></body></html>"}))
    path.write_text("\n".join(rows))
    return str(path)


def config(folder: Path, *sources: dict[str, Any]) -> Path:
    read = [{"kind": "files", "content": "html", **source} for source in sources]
    return write_config(
        folder / "config.yaml", {"name": "pages", "ingest": {"read": read}, "launch": {"workers": 1, "retries": 0}}
    )


def test_a_killed_ingest_continues_at_the_partition_and_gives_the_same_bytes(cold_env: dict[str, str], tmp_path: Path):
    sources = [{"paths": [pages(tmp_path / f"{number}.jsonl", 25)]} for number in range(PARTITIONS)]
    pipeline = config(tmp_path, *sources)
    whole = stemma("run", pipeline, "--root", tmp_path / "whole", env=cold_env)
    assert whole.code == 0, whole.document["errors"]
    store = tmp_path / "store"
    first = start("run", pipeline, "--root", store, env=cold_env)

    def done() -> int:
        return len(list((store / ".work" / "ingest").glob("*/scratch/read/*/done.json")))

    wait_until(lambda: done() >= 3)
    child = running_stage(store, "ingest")
    assert child is not None
    first.kill()
    first.communicate()
    wait_until(lambda: gone(child))
    already = done()
    assert 3 <= already < PARTITIONS

    second = stemma("run", pipeline, "--root", store, env=cold_env)

    assert second.with_status("built") == {"ingest"}, second.document["errors"]
    assert f"continuing read: {already} of {PARTITIONS} partitions are done" in second.stderr
    assert second.rows()["ingest"]["digest"] == whole.rows()["ingest"]["digest"]


def paused_ingest(cold_env: dict[str, str], pipeline: Path, store: Path) -> tuple[Any, psutil.Process]:
    """The command, and the process of its ingest, stopped before it reads anything."""
    command = start("run", pipeline, "--root", store, env=cold_env)
    child = wait_until(lambda: running_stage(store, "ingest"))
    assert isinstance(child, psutil.Process)
    child.suspend()
    return command, child


def test_a_source_that_vanishes_while_it_is_read_is_named(cold_env: dict[str, str], tmp_path: Path):
    path = pages(tmp_path / "a.jsonl", 5)
    command, child = paused_ingest(cold_env, config(tmp_path, {"paths": [path]}), tmp_path / "store")
    Path(path).unlink()
    child.resume()
    answer = finish(command)
    [problem] = answer.document["errors"]
    assert (problem["code"], problem["path"]) == ("missing_source", path)


def test_a_source_that_changes_while_it_is_read_gives_no_artifact(cold_env: dict[str, str], tmp_path: Path):
    path = pages(tmp_path / "a.jsonl", 5)
    command, child = paused_ingest(cold_env, config(tmp_path, {"paths": [path]}), tmp_path / "store")
    pages(Path(path), 6)
    child.resume()
    answer = finish(command)
    [problem] = answer.document["errors"]
    assert (problem["code"], problem["path"]) == ("source_changed", "ingest.read.0")
    assert not answer.with_status("built")
