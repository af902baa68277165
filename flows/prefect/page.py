"""The Prefect page of a whole run: its stages, its report, notices; and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import TaskRun
from prefect.context import TaskRunContext
from prefect.states import Running, State
from prefect.tasks import Task

from evaluation.config import CLAIMS
from flows.prefect.notices import Kind, notify
from flows.prefect.page_queue import PageQueue
from flows.runs.journal import RunJournal
from infra.io.json import read_own_json
from infra.lineage.ledger import run_url
from infra.lineage.messages import WHOLE_RUN
from infra.store.manifest import Manifest
from infra.store.store import Store

PATIENCE_S = 5.0
"""Seconds that the end of a run waits for a server that does not answer, before it reports how it ended."""

WORKER_PATIENCE_S = 300.0
"""Seconds that a worker's flow run then waits for the server: the process ends only once it can report its end, or
Prefect takes it for crashed."""


class RunPage:
    """The page's side of one run. `url` is the flow run's page, empty if there is none; in that case only problems are
    reported, and to the run's journal."""

    def __init__(self, pipeline: str, flow_run: str, url: str, journal: RunJournal, say: Callable[[str], None]) -> None:
        self._pipeline = pipeline
        self._flow_run = flow_run
        self._url = url
        self._journal = journal
        self._ended: dict[str, tuple[Task[..., Any], TaskRun, State]] = {}
        self.queue = PageQueue(say)

    def notify(self, kind: Kind, title: str, text: str) -> None:
        if self._url:
            self.queue.tell(lambda: notify(kind, title, text, run=self._journal.run_id, url=self._url))

    def ended(self, stage: str, state: State) -> None:
        """Record how a stage ended; its task calls this. Prefect's own record of it is lost if the server is away for
        long."""
        if here := TaskRunContext.get():
            self._ended[stage] = here.task, here.task_run, state

    def show(self, store: Store, manifests: Mapping[str, Manifest]) -> None:
        """The table that a person sees first when opening the flow run, and the report's claims with what to open.

        Args:
            manifests: of the artifacts that this run built or reused, by step.
        """
        url = run_url(store.root, self._journal.run_id)
        if url:
            self.queue.tell(lambda: _link(url))
        if not self._url:
            return
        if self._journal.rows:
            stages, message = self._stages(manifests), f"Stages of {self._pipeline}"
            self.queue.tell(lambda: create_markdown_artifact(stages, key="stages", description=message))
        if report := manifests.get("report"):
            folders = [store.peek(manifest, *WHOLE_RUN) for manifest in manifests.values()]
            text = self._report(store, store.peek(report, CLAIMS, *WHOLE_RUN), folders)
            self.queue.tell(lambda: create_markdown_artifact(text, key="report", description="Report"))

    def _stages(self, manifests: Mapping[str, Manifest]) -> str:
        """A row a stage; a reused one links the flow run that built it."""
        lines = ["| stage | | seconds | key figure | because |", "| --- | --- | ---: | --- | --- |"]
        for row in self._journal.rows.values():
            builder = manifests[row.stage].flow_run_id if row.stage in manifests else None
            is_reused = row.status == "reused" and builder
            status = f"[reused]({self._url.rsplit('/', 1)[0]}/{builder})" if is_reused else row.status
            cells = [row.stage, status, f"{row.seconds or 0:.1f}", row.headline, "; ".join(row.because)]
            lines.append(f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |")
        return "\n".join(lines)

    def _report(self, store: Store, report: Path, folders: Sequence[Path]) -> str:
        """The report's claims, and where to open it. MLflow has the pages of a run once that has ended."""
        lines = []
        claims = report / CLAIMS
        if claims.is_file():
            rows = read_own_json(claims)
            lines += [f"- {row['sign']} **{row['title']}** {row['text']}" for row in rows]
        links = []
        for name in WHOLE_RUN:
            there = any((folder / name).is_file() for folder in folders)
            url = run_url(store.root, self._journal.run_id, Path(name).name) if there else None
            links += [f"[{Path(name).name}]({url})"] if url else []
        lines += ["", f"To open: {', '.join(links)}"] if links else []
        return "\n".join([*lines, "", f"The report's file: `{report / 'report.html'}`"]).strip()

    def close(self, patience_s: float) -> int:
        """Send the remaining calls, as `PageQueue.flush` does, and return how much the page misses.

        Prefect reports the flow run itself next, so this first checks that the server answers.
        """
        self.queue.tell(_knock, "whether it answers")
        if self.queue.was_lost:
            for stage, (task, task_run, state) in self._ended.items():
                self._set(stage, task, task_run, state)
            self._ended.clear()
            if self._flow_run:
                self.queue.tell(self._revive, "that it still ran")
        return self.queue.flush(patience_s)

    def _revive(self) -> None:
        """Set a run back to Running that a returning server, which had heard nothing of it, took for dead."""
        client = get_client(sync_client=True)
        state = client.read_flow_run(UUID(self._flow_run)).state
        if state is not None and state.is_crashed():
            client.set_flow_run_state(UUID(self._flow_run), Running(), force=True)

    def _set(self, stage: str, task: Task[..., Any], run: TaskRun, state: State) -> None:
        def call() -> object:
            client = get_client(sync_client=True)
            # The server does not know a task whose events were all lost; one that it knows stays unchanged.
            client.create_task_run(
                task, run.flow_run_id, run.dynamic_key, run.id, run.name, run.tags, task_inputs=run.task_inputs
            )
            return client.set_task_run_state(run.id, state, force=True)

        self.queue.tell(call, f"the end of {stage}")


def _knock() -> None:
    if error := get_client(sync_client=True).api_healthcheck():
        raise error


def _link(url: str) -> None:
    create_link_artifact(url, link_text="this run in MLflow", key="mlflow", description="Metrics and lineage")
