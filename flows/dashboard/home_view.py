"""The home page: runs with claims, work and cost, what is scheduled, what needs a person, models, machines, servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from flows.dashboard.reading import ReadingStore
from flows.runs.journal import RunJournal
from flows.runs.listing import journals, run_row
from infra.errors import StemmaError
from infra.io.json import read_own_json
from infra.ledger.builds import cost_of
from infra.servers.http import get, post
from infra.servers.services import states
from infra.servers.settings import settings_of
from infra.servers.state import prefect_api_url
from infra.store.layout import AUX

RUNS_SHOWN, MODELS_SHOWN, SCHEDULED_SHOWN = 40, 20, 5
ALARMS = {
    "correction": "corrected its training",
    "rate_cut": "slowed its training",
    "stuck": "is stuck",
    "drift": "drifted",
}
"""Events of stages that people want to hear of."""
MACHINES_SHOWN = 20
SERVERS_EVERY_S = 5.0
"""The servers are asked at most this often, however many people look."""


class HomeView:
    """The home page of a store. root: its folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._ended: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}
        self._asked_at = -SERVERS_EVERY_S
        self._servers: dict[str, Any] = {"services": [], "scheduled": []}

    def values(self, store: ReadingStore) -> dict[str, Any]:
        rows = list(islice(filter(None, map(self._row, journals(store))), RUNS_SHOWN))
        models = store.models()
        if time.monotonic() - self._asked_at >= SERVERS_EVERY_S:
            self._asked_at = time.monotonic()
            self._servers = {"services": self._services(), "scheduled": self._scheduled()}
        return {
            "runs": rows,
            "needs": [*self._needs(rows), *self._labels()],
            "models": models[:MODELS_SHOWN],
            "model_count": len(models),
            "machines": store.of_all("machines", lambda: _machines(store)),
            **self._servers,
        }

    def _row(self, journal: RunJournal) -> dict[str, Any] | None:
        """Return the row of a run with its claims, work, cost and alarms. That of an ended run is kept until its files
        change."""
        run_id, written = journal.run_id, _written(journal.folder)
        if written and run_id in self._ended and self._ended[run_id][0] == written:
            return self._ended[run_id][1]
        if (row := run_row(journal)) is None:
            return None
        row |= self._read_outcome(run_id)
        if written and row["status"] not in ("running", "lost"):
            self._ended[run_id] = written, row
        return row

    def _read_outcome(self, run_id: str) -> dict[str, Any]:
        lines = RunJournal(self._root / "runs", run_id).read()
        stages = {line["stage"]: line for line in lines if line["kind"] == "stage"}
        claims, work_s, cost_usd = "", 0.0, None
        for line in stages.values():
            if line["status"] == "built":
                work_s += float(line.get("seconds") or 0.0)
            if line.get("path"):
                stage, fingerprint = Path(line["path"]).parts[-2:]
                folder = self._root / stage / fingerprint
                with suppress(OSError, ValueError, LookupError, TypeError):
                    account = cost_of(folder, f"{stage}/{fingerprint}", line["stage"]).account
                    if account is not None and line["status"] == "built":
                        cost_usd = (cost_usd or 0.0) + account.usd
                with suppress(OSError, ValueError, TypeError, AttributeError):
                    states_of_claims = [claim.get("state") for claim in read_own_json(folder / AUX / "claims.json")]
                    claims = f"{states_of_claims.count('holds')} of {len(states_of_claims)}"
        alarms = {
            (str(line["stage"]), str(line["name"])): str(line.get("message", ""))
            for line in lines
            if line["kind"] == "event" and line.get("name") in ALARMS
        }
        return {"claims": claims, "work_s": work_s, "cost_usd": cost_usd, "alarms": alarms}

    def _needs(self, rows: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
        """Yield what the newest run of each pipeline left for a person."""
        newest: dict[str, dict[str, Any]] = {}
        for row in rows:
            newest.setdefault(row["pipeline"], row)
        for pipeline, row in newest.items():
            address = f"/run/{row['run_id']}"
            if row["status"] == "refused":
                yield {"what": f"A gate refused the model of {pipeline}", "why": "see the verdict", "address": address}
            elif row["status"] in ("failed", "lost"):
                yield {"what": f"The run of {pipeline} {row['status']}", "why": "see its log", "address": address}
            for (stage, name), message in row["alarms"].items():
                yield {"what": f"{stage} of {pipeline} {ALARMS[name]}", "why": message, "address": address}

    def _labels(self) -> Iterator[dict[str, str]]:
        """Yield the rounds of feedback whose answers wait for judgements."""
        for folder in sorted((self._root / "feedback").glob("*/"), reverse=True)[:RUNS_SHOWN]:
            if not any((folder / "judged").glob("*")):
                yield {"what": f"Answers of round {folder.name} wait for labels", "why": str(folder), "address": ""}

    def _services(self) -> list[dict[str, str]]:
        settings = settings_of(self._root)
        return [
            {"name": service.name, "page": settings.page_of(service.url) or "", "state": str(state)}
            for service, state in states(self._root)
            if service.name != "page"
        ]

    def _scheduled(self) -> list[dict[str, str]]:
        """Return the next scheduled runs, by Prefect; none without a server."""
        url = prefect_api_url(self._root)
        if not url:
            return []
        scheduled = []
        with suppress(OSError, StemmaError, ValueError, LookupError, TypeError):
            is_scheduled = {"state": {"type": {"any_": ["SCHEDULED"]}}}
            body = {"flow_runs": is_scheduled, "sort": "EXPECTED_START_TIME_ASC", "limit": SCHEDULED_SHOWN}
            names: dict[str, str] = {}
            for run in post(f"{url}/flow_runs/filter", body):
                id = run.get("deployment_id")
                if id and id not in names:
                    names[id] = str(get(f"{url}/deployments/{id}")["name"])
                scheduled.append(
                    {"name": str(run["name"]), "deployment": names.get(id, ""), "at": str(run["expected_start_time"])}
                )
        return scheduled


def _written(folder: Path) -> tuple[int, ...]:
    """Return when journal and result of a run were written; empty for a run without a result."""
    try:
        return tuple((folder / name).stat().st_mtime_ns for name in ("result.json", "journal.jsonl"))
    except OSError:
        return ()


def _machines(store: ReadingStore) -> list[dict[str, Any]]:
    """Return the machines that built this store's artifacts, the one that built last first."""
    machines: dict[tuple[str, str], dict[str, Any]] = {}
    for _, manifest in store.manifests():
        if manifest.host and manifest.adopted is None:
            device = manifest.device.partition(",")[0]  # without the precision
            row = machines.setdefault(
                (manifest.host, device),
                {"host": manifest.host, "device": device, "built": 0, "seconds": 0.0, "last": ""},
            )
            row["built"] += 1
            row["seconds"] += manifest.seconds
            row["last"] = max(row["last"], manifest.finished)
    return sorted(machines.values(), key=lambda row: row["last"], reverse=True)[:MACHINES_SHOWN]
