"""What Prometheus is told of a store."""

from __future__ import annotations

import base64
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from infra.run import Run, open_journal
from infra.servers.http import answers
from infra.servers.metrics import StoreCollector
from infra.servers.ports import any_free_port
from infra.store.layout import Layout
from tests.command import Answer, environment, write_config
from tests.pipelines import data_config
from tests.processes import wait_until

Samples = dict[tuple[str, tuple[str, ...]], float]


def scraped(root: Path) -> Samples:
    """(name, label values) → value, as Prometheus would read them."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(root))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, tuple(sample.labels.values())): sample.value for family in families for sample in family.samples
    }


def test_runs_and_failures_are_counted_by_pipeline(data_pipeline: Path, run: Callable[..., Answer]) -> None:
    settings = data_config(data_pipeline)
    settings["validate"] = {"documents": {"min_rows": 1_000_000}}
    failing = write_config(data_pipeline / "failing.yaml", settings)
    answer = run("run", failing, "--root", data_pipeline / "store")
    (error,) = answer.document["errors"]
    found = scraped(data_pipeline / "store")
    assert found["stemma_runs_total", ("chronicle", "done")] == 1
    assert found["stemma_runs_total", ("chronicle", "failed")] == 1
    assert found["stemma_failures_total", (error["code"], "chronicle")] == 1
    assert 0 < found["stemma_disk_free_bytes", ()] < found["stemma_disk_size_bytes", ()]


def test_a_stage_that_is_being_built_shows_its_speed(tmp_path: Path) -> None:
    scratch = Layout(tmp_path).work("pretrain", "0" * 16) / "scratch"
    scratch.mkdir(parents=True)
    assert ("stemma_tokens_per_second", ("pretrain",)) not in scraped(tmp_path)
    with open_journal(scratch / "journal.jsonl") as journal:
        run = Run(scratch, journal=journal)
        for step in range(3000):
            run.metrics({"train/tokens_per_s": 100.0 + step, "train/mfu": 0.4}, step)
        run.progress(750, 1000, "batches")
    with open(scratch / "journal.jsonl", "a") as journal:
        journal.write('{"kind": "progress", "ti\n')  # cut short by a kill, and ended by who went on
    found = scraped(tmp_path)
    assert found["stemma_tokens_per_second", ("pretrain",)] == 3099
    assert found["stemma_mfu_ratio", ("pretrain",)] == 0.4
    assert found["stemma_progress_ratio", ("pretrain",)] == 0.75


@pytest.mark.parametrize(
    ("given", "status"), [(None, 401), ("ops:wrong-password-here", 401), ("ops:correct-horse-battery", 200)]
)
def test_behind_credentials_the_figures_are_for_those_who_know_them(
    tmp_path: Path, given: str | None, status: int
) -> None:
    port = any_free_port()
    command = [sys.executable, "-m", "infra.servers.metrics", str(tmp_path), "--port", str(port)]
    server = subprocess.Popen(command, env=environment(STEMMA_AUTH="ops:correct-horse-battery"))
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), timeout_s=60)
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics")
        if given:
            asked.add_header("Authorization", f"Basic {base64.b64encode(given.encode()).decode()}")
        try:
            with urllib.request.urlopen(asked) as answer:
                assert answer.status == status
        except urllib.error.HTTPError as error:
            assert error.code == status
    finally:
        server.terminate()
        server.wait()
