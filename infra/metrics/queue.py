"""What Prefect's server says: how many runs wait, are late, and run; and whether the servers answer at all."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from infra.servers.http import post
from infra.servers.services import services
from infra.servers.state import prefect_api_url

STATES = ("SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING")


class QueueCollector(Collector):
    """Asks the servers of a store at each scrape."""

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


def _count(url: str, which: dict[str, object]) -> int:
    try:
        return int(post(f"{url}/flow_runs/count", {"flow_runs": which}, timeout_s=5))
    except OSError:
        return 0
