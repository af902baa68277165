"""The metrics of one store for Prometheus, beside Prefect's and MLflow's own.

Runs and failures, what is being built and how fast, what waits for MLflow, the disk, the queue; behind the same
credentials as the pages where STEMMA_AUTH is set.

python -m infra.servers.metrics ROOT --port 9464
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from infra.errors import StemmaError
from infra.io.json import parse_own_json, read_own_json
from infra.leases import place as lease_place
from infra.leases.lease import Leases
from infra.leases.table import TABLE_ERRORS
from infra.run import messages_in
from infra.servers.asgi_server import BoundedBody, Server
from infra.servers.credentials import Credentials, credentials
from infra.servers.http import post
from infra.servers.prefect.callers import App, OwnCallersOnly
from infra.servers.services import services
from infra.servers.settings import Settings
from infra.servers.state import prefect_api_url
from infra.store.layout import LEDGER, Layout

JOURNAL_END_BYTES = 256_000
LIVE = {
    "train/tokens_per_s": ("stemma_tokens_per_second", "Training throughput of a stage that is being built."),
    "train/mfu": ("stemma_mfu_ratio", "Model FLOPs utilisation, attention included (PaLM, appendix B)."),
    "train/loss": ("stemma_training_loss", "Newest training loss, in nats."),
    "train/memory_gb": ("stemma_memory_gigabytes", "Memory that a training stage holds."),
}
"""Metrics of stages on which an alarm may be useful, by the name that the stage gives them."""
LIVE_GPU = {
    "utilisation_percent": ("stemma_gpu_utilisation_ratio", "Share of time in which a GPU was busy.", 0.01),
    "memory_gb": ("stemma_gpu_memory_bytes", "Memory of a GPU in use, by any process.", 1e9),
    "power_w": ("stemma_gpu_power_watts", "Power that a GPU draws.", 1.0),
    "temperature_c": ("stemma_gpu_temperature_celsius", "Temperature of a GPU.", 1.0),
}
"""Samples of the GPUs that a stage uses, by their names in its journal: name, description, factor."""


def _ended(run: Path) -> dict[str, Any]:
    """Return the pipeline of a run, its status, and the codes of its errors."""
    with open(run / "journal.jsonl", encoding="utf8") as journal:
        header = parse_own_json(journal.readline())
    document = read_own_json(run / "result.json")
    codes = [error["code"] for error in document["errors"]]
    return {"pipeline": header.get("pipeline", ""), "status": document["status"], "codes": codes}


class StoreCollector(Collector):
    """Reads the store at each scrape; finished runs, which never change, are read once."""

    def __init__(self, root: Path) -> None:
        self._layout = Layout(root)
        self._ended: dict[str, dict[str, Any]] = {}
        self._ledgers: dict[str, dict[str, Any]] = {}

    def collect(self) -> Iterator[Metric]:
        yield from self._runs()
        yield from self._costs()
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
                # A run that can no longer be read must not hide all other runs from Prometheus.
                with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
                    self._ended[folder.name] = _ended(folder)
            if folder.name not in self._ledgers and (folder / LEDGER).exists():
                with suppress(OSError, ValueError):
                    ledger = read_own_json(folder / LEDGER)
                    if isinstance(ledger, dict) and {"parts", "faults", "usd", "ettr", "mttr_s"} <= ledger.keys():
                        self._ledgers[folder.name] = ledger
            if folder.name in self._ended:
                yield self._ended[folder.name]

    def _costs(self) -> Iterator[Metric]:
        """Yield the ledgers of runs that ended, see docs/cost.md; a run that was killed has none."""
        seconds = CounterMetricFamily(
            "stemma_device_seconds",
            "Device-seconds of runs that ended, by what they were spent on.",
            labels=["pipeline", "kind", "cause"],
        )
        money = CounterMetricFamily("stemma_cost_usd", "Price of these device-seconds.", labels=["pipeline"])
        energy = CounterMetricFamily("stemma_energy_kwh", "Energy of these devices.", labels=["pipeline"])
        carbon = CounterMetricFamily("stemma_co2e_kilograms", "Emissions of this energy.", labels=["pipeline"])
        faults = CounterMetricFamily("stemma_faults", "Faults of these runs.", labels=["pipeline", "cause"])
        ettr = GaugeMetricFamily(
            "stemma_ettr_ratio", "Useful share of the device-seconds of the newest run that ended.", labels=["pipeline"]
        )
        recovery = GaugeMetricFamily(
            "stemma_recovery_seconds", "Mean time from a fault to new work in the newest run.", labels=["pipeline"]
        )
        counters = (seconds, money, energy, carbon, faults)
        sums: Counter[tuple[int, tuple[str, ...]]] = Counter()
        newest: dict[str, dict[str, Any]] = {}
        for _, ledger in sorted(self._ledgers.items()):
            pipeline = str(ledger.get("pipeline", ""))
            newest[pipeline] = ledger
            for kind, causes in ledger["parts"].items():
                for cause, value in causes.items():
                    sums[0, (pipeline, kind, cause)] += value
            for position, key in enumerate(("usd", "kwh", "co2e_kg"), start=1):
                if ledger[key] is not None:
                    sums[position, (pipeline,)] += ledger[key]
            for cause, fault in ledger["faults"].items():
                sums[4, (pipeline, cause)] += fault["count"]
        for (position, labels), amount in sums.items():
            counters[position].add_metric(labels, amount)
        for pipeline, ledger in newest.items():
            for gauge, key in ((ettr, "ettr"), (recovery, "mttr_s")):
                if ledger[key] is not None:
                    gauge.add_metric([pipeline], ledger[key])
        yield from (*counters, ettr, recovery)

    def _live(self) -> Iterator[Metric]:
        done = GaugeMetricFamily(
            "stemma_progress_ratio", "How far a stage that is being built has come.", labels=["stage"]
        )
        families = {key: GaugeMetricFamily(name, message, labels=["stage"]) for key, (name, message) in LIVE.items()}
        gpus = {
            key: GaugeMetricFamily(name, message, labels=["stage", "gpu"])
            for key, (name, message, _) in LIVE_GPU.items()
        }
        for stage, journal in self._being_built().items():
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
            for name, value in values.items():
                match name.split("/"):
                    case ["gpu", number, key] if key in gpus:
                        gpus[key].add_metric([stage, number], value * LIVE_GPU[key][2])
        yield done
        yield from families.values()
        yield from gpus.values()

    def _being_built(self) -> dict[str, Path]:
        """Return the journals of current builds, by their steps.

        The journal that a failed build leaves for the next build is not a sign of life. If two pipelines build the same
        step, the journal that was written last counts.
        """
        journals = (self._layout.root / ".work").glob("*/*/scratch/journal.jsonl")
        written = sorted((changed, path) for path in journals if (changed := _changed(path)) is not None)
        try:
            table = lease_place.existing(self._layout)
            living = set(Leases(table).living() if table is not None else [])
        except (StemmaError, *TABLE_ERRORS):
            return {}  # the leases are out of reach, so current builds are unknown
        return {_step(path): path for _, path in written if "/".join(path.parts[-4:-2]) in living}

    def _outbox(self) -> Iterator[Metric]:
        waiting = sum(1 for _ in (self._layout.root / "lineage" / "outbox").glob("*"))
        yield GaugeMetricFamily("stemma_lineage_waiting", "Messages that MLflow has not got yet.", waiting)

    def _disk(self) -> Iterator[Metric]:
        usage = shutil.disk_usage(self._layout.root)
        yield GaugeMetricFamily("stemma_disk_free_bytes", "Free space on the disk of the store.", usage.free)
        yield GaugeMetricFamily("stemma_disk_size_bytes", "Size of the disk of the store.", usage.total)


def _changed(path: Path) -> float | None:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return None


def _step(journal: Path) -> str:
    """Return the step that is built; its name may differ from the folder, which is named after the stage."""
    with suppress(OSError, ValueError):
        return str(read_own_json(journal.parent / "job.json").get("node") or journal.parts[-4])
    return journal.parts[-4]


def _newest_lines(journal: Path) -> Iterator[dict[str, Any]]:
    """Yield the messages in the complete lines at a journal's end."""
    try:
        with open(journal, "rb") as file:
            file.seek(max(0, journal.stat().st_size - JOURNAL_END_BYTES))
            text = file.read()
    except FileNotFoundError:
        return  # it has just become an artifact
    cut = len(text) == JOURNAL_END_BYTES
    yield from messages_in(text.rpartition(b"\n")[0].split(b"\n")[int(cut) :])


STATES = ("SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING")


class QueueCollector(Collector):
    """Queries the servers of a store at each scrape: services that answer, and numbers of runs by state, and late."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("stemma_service_up", "1 for each service that runs and answers.", labels=["service"])
        for service in services(self._root):
            up.add_metric([service.name], 1)
        yield up
        queue = GaugeMetricFamily("stemma_flow_runs", "Flow runs that are due, by state.", labels=["state"])
        late = 0
        if url := prefect_api_url(self._root):
            due = {"expected_start_time": {"before_": datetime.now(UTC).isoformat()}}
            for state in STATES:
                queue.add_metric([state.lower()], _count(url, due | {"state": {"type": {"any_": [state]}}}))
            late = _count(url, {"state": {"name": {"any_": ["Late"]}}})
        yield queue
        yield GaugeMetricFamily("stemma_flow_runs_late", "Flow runs past their time that no worker has taken.", late)


def _count(url: str, filters: dict[str, object]) -> int:
    try:
        return int(post(f"{url}/flow_runs/count", {"flow_runs": filters}, timeout_s=5))
    except OSError:
        return 0


def serve(root: Path, host: str, port: int) -> None:
    registry = CollectorRegistry()
    registry.register(StoreCollector(root))
    registry.register(QueueCollector(root))
    Server(OwnCallersOnly(app(registry, credentials()), Settings(host).callers(port)), host, port).run()


def app(registry: CollectorRegistry, known: Credentials | None) -> App:
    """Return the app. /health answers all of our callers, any other path only those with the credentials."""
    scrapes = asyncio.Semaphore(1)

    async def health(_: Request) -> Response:
        return PlainTextResponse("OK")

    async def metrics(request: Request) -> Response:
        authorization = request.headers.get("authorization", "")
        if known and not hmac.compare_digest(authorization.encode(), known.header.encode()):
            asking = {"WWW-Authenticate": 'Basic realm="stemma"'}
            return PlainTextResponse("credentials required", 401, asking)
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        async with scrapes:  # each reads the whole store, so callers wait for each other, without occupying threads
            return Response(await asyncio.to_thread(encode, registry), headers={"Content-Type": content_type})

    return BoundedBody(Starlette(routes=[Route("/health", health), Route("/{path:path}", metrics)]), 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9464)
    options = parser.parse_args()
    serve(options.root.absolute(), options.host, options.port)
