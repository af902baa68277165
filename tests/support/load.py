"""Many scheduled runs of tiny pipelines through one worker, some due in the same second.

    python -m tests.support.load --root STORE --batches 10 --at-once 20

Needs `stemma up` for that store; prints one JSON document: what became of the runs, how late they started, and how long
the page took to answer meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from infra.servers.credentials import credentials
from infra.servers.environment import environment
from infra.servers.state import prefect_api_url
from tests.support.pipelines import data_config
from tests.support.programs.command import write_config

LEAD_S = 8.0
"""Between the making of a batch and its due time: a worker looks for what is due a few seconds ahead."""


def load(root: Path, batches: int, at_once: int, folder: Path) -> dict[str, Any]:
    """Runs them batch after batch. All pipelines want the same artifact, which is built once."""
    from prefect.client.orchestration import get_client
    from prefect.states import Scheduled

    from flows.config.read import load as load_config
    from flows.deployment.deploy import deploy_pipeline

    deployments = []
    for number in range(at_once):
        settings = data_config(folder)
        tiny = {"name": f"load-{number:02d}", "ingest": settings["ingest"]}
        path = write_config(folder / f"load-{number:02d}.yaml", tiny)
        deployments.append(deploy_pipeline(load_config(path), root, str(path)))
    made: list[UUID] = []
    with get_client(sync_client=True) as client, _Page(root) as page:
        for _ in range(batches):
            due = datetime.now(UTC) + timedelta(seconds=LEAD_S)
            batch = [
                client.create_flow_run_from_deployment(deployment, state=Scheduled(scheduled_time=due)).id
                for deployment in deployments
            ]
            made += batch
            while any(not run.state.is_final() for run in _runs(client, batch)):
                time.sleep(0.5)
        runs = [run for start in range(0, len(made), 100) for run in _runs(client, made[start : start + 100])]
    late = sorted((run.start_time - run.expected_start_time).total_seconds() for run in runs if run.start_time)
    return {
        "scheduled": len(made),
        "states": dict(Counter(run.state_name for run in runs)),
        "run_counts": dict(Counter(run.run_count for run in runs)),
        "journals": _journals(root, set(map(str, made))),
        "late_s": _spread(late),
        "page_s": _spread(page.seconds),
        "page_failures": page.failures,
    }


def _runs(client: Any, ids: Sequence[UUID]) -> list[Any]:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    found: list[Any] = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=list(ids))))
    return found


def _journals(root: Path, flow_runs: set[str]) -> int:
    """How many runs the store knows of these: as many as were scheduled, unless one was lost or ran twice."""
    begun = [json.loads(path.read_text().splitlines()[0]) for path in (root / "runs").glob("*/journal.jsonl")]
    return sum(line.get("flow_run_id") in flow_runs for line in begun)


def _spread(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=20)
    return {"median": round(statistics.median(values), 3), "p95": round(cuts[-1], 3), "max": round(max(values), 3)}


class _Page:
    """Opens the page's list of runs and its dashboard, again and again, and notes how long each took."""

    def __init__(self, root: Path) -> None:
        api = str(prefect_api_url(root))
        self._asked = [(f"{api}/flow_runs/filter", b'{"limit": 50}'), (f"{api.removesuffix('/api')}/dashboard", None)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self.seconds: list[float] = []
        self.failures = 0

    def __enter__(self) -> _Page:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        known = credentials()
        headers = {"Content-Type": "application/json"} | ({"Authorization": known.header} if known else {})
        while not self._stop.wait(0.5):
            for url, body in self._asked:
                begun = time.monotonic()
                try:
                    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as answer:
                        answer.read()
                except OSError:
                    self.failures += 1
                self.seconds.append(time.monotonic() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=20)
    options = parser.parse_args()
    root = options.root.absolute()
    os.environ.update(environment(root))
    with tempfile.TemporaryDirectory() as folder:
        json.dump(load(root, options.batches, options.at_once, Path(folder)), sys.stdout)


if __name__ == "__main__":
    main()
