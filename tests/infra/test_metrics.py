"""What Prometheus is told of a store."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from flows.runs.journal import RunJournal
from flows.runs.ledger import RunLedger
from infra.ledger.account import Account, Recovery
from infra.run import Run, open_journal
from infra.servers.http import answers
from infra.servers.metrics import StoreCollector
from infra.servers.ports import any_free_port
from infra.store.layout import Layout
from infra.store.store import Store
from tests.support.pipelines import data_config
from tests.support.programs.command import Answer, environment, write_config
from tests.support.programs.processes import wait_until

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


@pytest.mark.parametrize("damage", ["journal", "result", "rows", "gone"])
def test_a_run_that_nobody_can_read_keeps_prometheus_from_no_other(tmp_path: Path, damage: str) -> None:
    """As after a power cut: every scrape failed for good, so that no alarm went off."""
    for name in ("20261121-1", "20261121-2"):
        journal = RunJournal(tmp_path / "runs", name)
        journal.begin(pipeline="demo")
        journal.end({"status": "failed", "errors": [{"code": "killed"}], "stages": []})
    broken = tmp_path / "runs" / "20261121-1"
    match damage:
        case "journal":
            (broken / "journal.jsonl").write_bytes(b"\0" * 100)
        case "result":
            (broken / "result.json").write_bytes(b"")
        case "rows":
            (broken / "result.json").write_text("[7]")
        case "gone":
            (broken / "journal.jsonl").unlink()
    found = scraped(tmp_path)
    assert found["stemma_runs_total", ("demo", "failed")] == found["stemma_failures_total", ("killed", "demo")] == 1


def test_the_cost_of_runs_is_summed_and_the_newest_gives_the_effective_time(tmp_path: Path) -> None:
    for run_id, useful_s in (("20261121-1", 60.0), ("20261121-2", 90.0)):
        parts = {("useful", ""): useful_s, ("lost", "killed"): 100.0 - useful_s}
        recoveries = (Recovery("killed", 8.0), Recovery("killed", None))
        account = Account(parts, 100.0, usd=0.5, recoveries=recoveries)  # type: ignore[arg-type]
        folder = tmp_path / "runs" / run_id
        folder.mkdir(parents=True)
        document = RunLedger(run_id, "demo", 100.0, account, Account()).as_json()
        (folder / "ledger.json").write_text(json.dumps(document))
    samples = scraped(tmp_path)
    assert samples["stemma_device_seconds_total", ("", "useful", "demo")] == 150
    assert samples["stemma_device_seconds_total", ("killed", "lost", "demo")] == 50
    assert samples["stemma_cost_usd_total", ("demo",)] == 1
    assert samples["stemma_faults_total", ("killed", "demo")] == 4
    assert samples["stemma_ettr_ratio", ("demo",)] == 0.9
    assert samples["stemma_recovery_seconds", ("demo",)] == 8


def written(root: Path, fingerprint: str, step: str, tokens_per_s: float) -> Path:
    """What a build of pretraining says, as far as it is: 3 of 4 of it are done."""
    scratch = Layout(root).work("pretrain", fingerprint) / "scratch"
    scratch.mkdir(parents=True)
    (scratch / "job.json").write_text(json.dumps({"node": step}))
    with open_journal(scratch / "journal.jsonl") as journal:
        run = Run(scratch, journal=journal)
        for turn in range(3000):
            run.metrics({"train/tokens_per_s": tokens_per_s - 2999 + turn, "train/mfu": 0.4}, turn)
        run.progress(750, 1000, "batches")
    return scratch / "journal.jsonl"


def test_a_stage_that_is_being_built_shows_its_speed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    lease = store.leases.acquire(f"pretrain/{'0' * 16}")
    assert lease is not None
    assert ("stemma_tokens_per_second", ("pretrain",)) not in scraped(tmp_path)
    with open(written(tmp_path, "0" * 16, "pretrain", 3099), "a") as journal:
        journal.write('{"kind": "progress", "ti\n')  # cut short by a kill, and ended by who went on
    found = scraped(tmp_path)
    assert found["stemma_tokens_per_second", ("pretrain",)] == 3099
    assert found["stemma_mfu_ratio", ("pretrain",)] == 0.4
    assert found["stemma_progress_ratio", ("pretrain",)] == 0.75
    lease.release()
    assert ("stemma_tokens_per_second", ("pretrain",)) not in scraped(tmp_path), "nobody builds it any more"


def test_gpus_of_a_stage_are_told_apart(tmp_path: Path) -> None:
    lease = Store(tmp_path).leases.acquire(f"pretrain/{'0' * 16}")
    assert lease is not None
    with open(written(tmp_path, "0" * 16, "pretrain", 3099), "a") as journal:
        Run(tmp_path / "work", journal=journal).metrics(
            {"gpu/0/utilisation_percent": 93.0, "gpu/1/utilisation_percent": 5.0, "gpu/1/memory_gb": 61.5}, 7
        )
    samples = scraped(tmp_path)
    assert samples["stemma_gpu_utilisation_ratio", ("0", "pretrain")] == pytest.approx(0.93)
    assert samples["stemma_gpu_utilisation_ratio", ("1", "pretrain")] == pytest.approx(0.05)
    assert samples["stemma_gpu_memory_bytes", ("1", "pretrain")] == 61.5e9
    lease.release()


def test_what_a_failed_build_left_is_no_sign_of_life_and_steps_of_one_stage_are_told_apart(tmp_path: Path) -> None:
    """A training that had failed kept its speed, so that no alarm went off, and two samples had one name."""
    leases = Store(tmp_path).leases
    written(tmp_path, "f" * 16, "pretrain", 9000)
    held = [leases.acquire(f"pretrain/{number * 16}") for number in "12"]
    for number, step in (("1", "pretrain"), ("2", "longer")):
        written(tmp_path, number * 16, step, 4000 + int(number))
    found = scraped(tmp_path)
    speeds = {labels: value for (name, labels), value in found.items() if name == "stemma_tokens_per_second"}
    assert speeds == {("pretrain",): 4001, ("longer",): 4002}
    for lease in held:
        assert lease is not None
        lease.release()


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
