"""Validation in a pipeline: what a failure leaves behind, and what is compared with the run before."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.prefect.execution import TOLD_AT_ONCE
from infra.run import read_journal
from tests.support.pipelines import data_config
from tests.support.programs.command import Answer, write_config

Run = Callable[..., Answer]


def drifts(store: Path, answer: Answer) -> list[dict[str, Any]]:
    """What a run's journal says of drift."""
    lines = read_journal(store / "runs" / answer.document["run_id"] / "journal.jsonl")
    return [line for line in lines if line.get("name") == "drift"]


def test_the_next_run_shows_its_drift_and_builds_the_same_payload(run: Run, data_pipeline: Path) -> None:
    store = data_pipeline / "store"
    config = write_config(
        data_pipeline / "config.yaml",
        {**data_config(data_pipeline), "validate": {"documents": {"min_language_like_share": 0.5}}},
    )
    first = run("run", config, "--root", store, "--until", "validate_clean")
    assert "validate_clean" in first.with_status("built")
    source = data_pipeline / "text.jsonl"
    lines = source.read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    longer = [json.dumps({"text": f"{text} {texts[-1 - number]} {text}"}) for number, text in enumerate(texts)]
    source.write_text("\n".join([*lines[:30], *longer]) + "\n")
    second = run("run", config, "--root", store, "--until", "validate_clean")
    assert second.code == 0 and {"validate", "validate_clean"} <= second.with_status("built")
    for stage in ("validate", "validate_clean"):
        before, now = (Path(answer.rows()[stage]["path"]) for answer in (first, second))
        assert before != now
        assert "Drift against the run before" in (now / "aux" / "validation.html").read_text()
        manifest = json.loads((now / "manifest.json").read_text())
        assert set(manifest["inputs"]) == {"data"}
        # Cleaning takes the repetitive texts away again.
        assert manifest["result"]["figures"]["largest_psi"] > (0.25 if stage == "validate" else -1)
    assert not drifts(store, first)
    [told] = [event for event in drifts(store, second) if event["stage"] == "validate"]
    assert told["name"] in TOLD_AT_ONCE and told["psi"] > 0.25
    assert re.search(r"by characters of text, the share of .* went from", told["message"])


def test_a_failure_stops_its_branch_and_says_where_its_page_and_rows_lie(run: Run, data_pipeline: Path) -> None:
    limit = "validate.documents.max_characters=200"
    answer = run("run", data_pipeline / "config.yaml", "--root", data_pipeline / "store", "--set", limit)
    [error] = answer.document["errors"]
    assert answer.code == 1
    assert answer.statuses() == {"ingest": "reused", "validate": "failed", "clean": "skipped", "tokenizer": "skipped"}
    assert error["code"] == "validation_failed" and "1 to 200 characters" in error["message"]
    page = Path(next(word for word in error["fix"].split() if word.endswith("validation.html")))
    rows = [json.loads(line) for line in (page.parent / "failing_rows.jsonl").open()]
    assert rows and all(len(row["text"]) > 200 for row in rows if not row["success"])
    assert rows[0]["text"][:60] in page.read_text()


def test_a_wrong_suite_is_said_before_anything_runs(run: Run, data_pipeline: Path) -> None:
    settings = ["--set", "validate.documents.min_rwos=3", "--set", "validate.shards.suite=nowhere.yaml"]
    answer = run("check", data_pipeline / "config.yaml", "--root", data_pipeline / "store", *settings)
    assert answer.code == 2
    assert {error["code"] for error in answer.document["errors"]} == {"unknown_limit", "missing_suite"}
