"""What a store's folders say: runs and failures, what is being built and how fast, what waits for MLflow, the disk."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from infra.store.layout import Layout

TAIL_BYTES = 64_000
LIVE = {
    "train/tokens_per_s": ("stemma_tokens_per_second", "Training throughput of a stage that is being built."),
    "train/mfu": ("stemma_mfu_ratio", "Model FLOPs utilisation, attention included (PaLM, appendix B)."),
    "train/loss": ("stemma_training_loss", "Newest training loss, in nats."),
    "train/memory_gb": ("stemma_memory_gigabytes", "Memory that a training stage holds."),
}
"""Metrics of stages that are worth an alarm, by the name that the stage gives them."""


class StoreCollector(Collector):
    """Reads the store anew at each scrape; finished runs, which never change, are read once."""

    def __init__(self, root: Path) -> None:
        self._layout = Layout(root)
        self._ended: dict[str, dict[str, Any]] = {}

    def collect(self) -> Iterator[Metric]:
        yield from self._runs()
        yield from self._live()
        yield from self._outbox()
        yield from self._disk()

    def _runs(self) -> Iterator[Metric]:
        runs = CounterMetricFamily("stemma_runs", "Pipeline runs that ended.", labels=["pipeline", "status"])
        failures = CounterMetricFamily(
            "stemma_failures", "What went wrong, by error code.", labels=["pipeline", "code"]
        )
        ended: Counter[tuple[str, str]] = Counter()
        codes: Counter[tuple[str, str]] = Counter()
        for result in self._results():
            pipeline = result["pipeline"]
            ended[pipeline, result["status"]] += 1
            codes.update((pipeline, code) for code in result["codes"])
        for labels, count in sorted(ended.items()):
            runs.add_metric(labels, count)
        for labels, count in sorted(codes.items()):
            failures.add_metric(labels, count)
        yield runs
        yield failures

    def _results(self) -> Iterator[dict[str, Any]]:
        folders = self._layout.runs.iterdir() if self._layout.runs.is_dir() else ()
        for folder in folders:
            path = folder / "result.json"
            if folder.name not in self._ended and path.exists():
                with open(folder / "journal.jsonl", encoding="utf8") as journal:
                    begun = json.loads(journal.readline())
                document = json.loads(path.read_text(encoding="utf8"))
                self._ended[folder.name] = {
                    "pipeline": begun.get("pipeline", ""),
                    "status": document["status"],
                    "codes": [error["code"] for error in document["errors"]],
                }
            if folder.name in self._ended:
                yield self._ended[folder.name]

    def _live(self) -> Iterator[Metric]:
        done = GaugeMetricFamily(
            "stemma_progress_ratio", "How far a stage that is being built has come.", labels=["stage"]
        )
        families = {key: GaugeMetricFamily(name, message, labels=["stage"]) for key, (name, message) in LIVE.items()}
        for journal in sorted((self._layout.root / ".work").glob("*/*/scratch/journal.jsonl")):
            stage = journal.parts[-4]
            values: dict[str, float] = {}
            progress = None
            for line in _newest_lines(journal):
                if line["kind"] == "metric":
                    values |= line["values"]
                elif line["kind"] == "progress" and line.get("total"):
                    progress = line["done"] / line["total"]
            if progress is not None:
                done.add_metric([stage], progress)
            for key, family in families.items():
                if key in values:
                    family.add_metric([stage], values[key])
        yield done
        yield from families.values()

    def _outbox(self) -> Iterator[Metric]:
        waiting = sum(1 for _ in (self._layout.root / "lineage" / "outbox").glob("*"))
        yield GaugeMetricFamily("stemma_lineage_waiting", "Messages that MLflow has not got yet.", waiting)

    def _disk(self) -> Iterator[Metric]:
        usage = shutil.disk_usage(self._layout.root)
        yield GaugeMetricFamily("stemma_disk_free_bytes", "Free space where the store lies.", usage.free)
        yield GaugeMetricFamily("stemma_disk_size_bytes", "Size of the disk where the store lies.", usage.total)


def _newest_lines(journal: Path) -> Iterator[dict[str, Any]]:
    """The whole lines at a journal's end."""
    try:
        with open(journal, "rb") as file:
            file.seek(max(0, journal.stat().st_size - TAIL_BYTES))
            text = file.read()
    except FileNotFoundError:
        return  # it became an artifact just now
    cut = len(text) == TAIL_BYTES
    for line in text.rpartition(b"\n")[0].split(b"\n")[int(cut) :]:
        if line:
            yield json.loads(line)
