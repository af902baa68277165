"""One run of a pipeline inside a Prefect flow: a task a stage, branches side by side, each failure contained."""

from __future__ import annotations

import concurrent.futures
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import allow_failure
from prefect.client.schemas.objects import StateType
from prefect.runtime import flow_run
from prefect.settings import PREFECT_UI_URL
from prefect.states import State
from prefect.task_runners import ThreadPoolTaskRunner

from flows.config.graph import Graph, Selection, descendants, graph
from flows.config.read import PipelineConfig, dump
from flows.planning.branches import refuse_removed_states
from flows.planning.picture import drawing_of
from flows.planning.plan import locate_upstream, plan
from flows.prefect.admission import keep_slots
from flows.prefect.notices import Kind
from flows.prefect.page import PATIENCE_S, WORKER_PATIENCE_S, RunPage
from flows.runs.journal import PICTURE, PRIVATE, JournalRow, RunJournal
from flows.runs.ledger import read_ledger, write_ledger
from flows.runs.retention import tidy
from flows.runs.stop import Stop
from flows.runs.verdict import verdict
from infra.errors import Cancelled, GateRefused, Problem, StageError, StemmaError
from infra.io.json import read_own_json
from infra.launch.devices.gpus import has_gpu
from infra.ledger.builds import tags as cost_tags
from infra.lineage import messages
from infra.lineage.also.copies import copy_problems
from infra.lineage.page import pipeline_figures
from infra.lineage.relay import ensure_relay
from infra.project import code_state, lock_hash
from infra.servers.prefect.run_ends import end_of
from infra.servers.settings import run_page
from infra.store.at_work import GoingRun
from infra.store.manifest import Manifest
from infra.store.store import Store
from tasks.building.build import Done
from tasks.building.context import BuildContext
from tasks.processes.failures import failure_of, traceback_of
from tasks.processes.warm_start import WarmStart, uses_gpu
from tasks.semaphore import PrioritySemaphore
from tasks.stage import STATE, Node
from tasks.task import stage_task

ON_WORKER = "PREFECT__FLOW_RUN_ID"
"""Set by Prefect's worker in the process of a flow run."""

RESULT_PATIENCE_S, RESULT_POLL_S = 20.0, 0.5
"""Seconds in which a run on a worker tries to write its end on a disk that refused it, and between two tries."""

keep_slots()

RUNNER: Any = ThreadPoolTaskRunner(max_workers=64)
"""Threads only wait: each stage works in its own process, and `PrioritySemaphore` limits how many run at once."""


TOLD_AT_ONCE: dict[str, Kind] = {
    "correction": "corrected",
    "rate_cut": "slowed",
    "stuck": "stuck",
    "drift": "drifted",
}
"""Events of stages that people want to hear of, whatever becomes of the run."""

REGISTRATION = "registration.json"

TOLD_AT_THE_END: dict[str, Kind] = {"failed": "failed", "refused": "refused"}


@dataclass(frozen=True)
class Shared:
    """State that a run in its own thread shares with the other runs of this process.

    is_cancelled: returns True if this run was asked to stop. warm_start: forks the processes of all their stages.
    """

    is_cancelled: Callable[[], bool]
    warm_start: WarmStart


SHARED: ContextVar[Shared | None] = ContextVar("shared", default=None)
"""Set in the thread of such a run."""


class PipelineRun:
    """One run: the result of each stage, reported to the journal, to Prefect and to lineage."""

    def __init__(
        self, config: PipelineConfig, selection: Selection, store: Store, run_id: str, verify: bool, config_path: str
    ) -> None:
        self.config = config
        self.selection = selection
        self.store = store
        self.config_path = config_path or "CONFIG"
        self.shared = SHARED.get()
        is_cancelled = self.shared.is_cancelled if self.shared else lambda: False
        self.journal = RunJournal(store.layout.runs, run_id)
        self.stop = Stop(flow_run.get_id() or "", config.launch.grace_s, is_cancelled, self.journal.is_to_keep)
        self.nodes: Graph = graph(config, f"stemma run {self.config_path}")
        self.manifests: dict[str, Manifest] = {}
        self.errors: dict[str, StemmaError] = {}
        self.refused: dict[str, GateRefused] = {}
        self.unreached: set[str] = set()
        self.going: GoingRun | None = None
        self.page = RunPage(config.name, flow_run.get_id() or "", flow_run_url(), self.journal, self._trouble)
        weights = {name: len(descendants(self.nodes, [name])) for name in self.nodes}
        self.warm_start = self.shared.warm_start if self.shared else WarmStart(self._upcoming)
        self.context = BuildContext(
            store=store,
            pipeline=config.name,
            run_id=run_id,
            flow_run_id=flow_run.get_id() or "",
            flow_run_url=flow_run_url(),
            launch=config.launch,
            read_all=verify,
            strict_versions=selection.strict_versions,
            is_cancelled=self.stop.is_set,
            patience_s=self.stop.patience_s,
            turn=self._turns(weights),
            warm_start=self.warm_start,
            before_commit=lambda: self.going.before_commit() if self.going else None,
        )

    def run(self) -> State:
        """Run what is selected, to its end or until SIGINT or SIGTERM ask for an orderly one."""
        with self.stop.on_signals(), nullcontext() if self.shared else closing(self.warm_start):
            return self._run()

    def _run(self) -> State:
        started_at, ticks = time.time(), time.monotonic()  # a clock may be set while it runs
        problems: tuple[Problem, ...] = ()
        status = "failed"
        try:
            self._begin(started_at)
            self.store.leases.check()
            chosen = self.selection.choose(self.nodes)
            launch = self.config.launch
            is_looked_at = launch.ranks > 1 or launch.device == "gpu" or launch.hardware or launch.checkpoint_remote
            if is_looked_at or has_gpu() or any(node.stage.name == "base_model" for node in self.nodes.values()):
                from flows.planning.needs import refuse_run

                refuse_run(self.config, self.nodes, chosen, self.store, self.selection.force)
            if any(STATE in self.nodes[name].inputs for name in chosen):
                refuse_removed_states(
                    self.nodes, plan(self.nodes, self.store, self.selection.force), chosen, self.store
                )
            self.manifests.update(locate_upstream(self.nodes, chosen, self.store, self.config_path))
            self.journal.reads(self.manifests.values())
            self._look_for_refused()
            self._run_stages(chosen)
            upstream = {name: node.upstream for name, node in self.nodes.items()}
            status, problems = verdict(self.journal.rows, self.errors, upstream, self.stop.is_set())
        except Exception as error:
            failure = self.crashed(self.config.name, error)
            status, problems = failure.status, failure.problems
        return self._end(status, problems, time.monotonic() - ticks)

    def _look_for_refused(self) -> None:
        """Collect refusals that earlier runs left: they are no error of this run, unless one of its stages waits for
        them."""
        for name, manifest in self.manifests.items():
            if self.nodes[name].stage.registers and (reasons := refused_by(self.store.peek(manifest, REGISTRATION))):
                self.refused[name] = GateRefused(*reasons)

    def _run_stages(self, chosen: list[str]) -> None:
        futures: dict[str, Any] = {}
        for name in chosen:
            self.journal.row(JournalRow(name, "waiting"))
        for name in chosen:
            # A stage whose upstream failed still gets its turn, to report that it is skipped.
            waits: list[Any] = [allow_failure(futures[up]) for up in self.nodes[name].upstream if up in futures]
            try:
                futures[name] = stage_task(self.nodes[name], self).submit(return_state=False, wait_for=waits)
            except Exception as error:
                self.failed(name, self.crashed(name, error))
        # Not PrefectFuture.wait: the main thread must stay free to hear signals.
        concurrent.futures.wait([future.wrapped_future for future in futures.values()])
        for name, future in futures.items():
            # What a task does not catch itself ends here, and nowhere else.
            unread = future.wrapped_future.exception()
            if unread is not None and self.journal.rows[name].status in ("waiting", "running"):
                self.failed(name, self.crashed(name, unread))
        for row in list(self.journal.rows.values()):
            if row.status == "waiting":
                self.skipped(row.stage, self.blockers_of(row.stage))

    def _upcoming(self, name: str) -> list[Node]:
        """Return this node and those below it that this run has still to process."""
        below = descendants(self.nodes, [name])
        return [
            self.nodes[other]
            for other, row in list(self.journal.rows.items())
            if other in below and row.status == "waiting"
        ]

    def _turns(self, weights: Mapping[str, int]) -> PrioritySemaphore:
        launch = self.config.launch
        # Those of a cluster's machines are the scheduler's to give.
        here = launch.device != "cpu" and launch.cluster == "local"
        scarce = {name for name, node in self.nodes.items() if here and uses_gpu(node.stage.name)}
        return PrioritySemaphore(
            launch.stages_at_once, weights, self.stop.is_set, self._coming, scarce, launch.gpu_stages_at_once
        )

    def _coming(self) -> list[str]:
        """The stages that may ask for their turn at any moment: everything they need exists."""
        return [
            name
            for name, row in list(self.journal.rows.items())
            if row.status in ("waiting", "running") and all(up in self.manifests for up in self.nodes[name].upstream)
        ]

    # Called by a stage's task from its own thread: see tasks.task.TaskOwner.

    def inputs_of(self, name: str) -> dict[str, Manifest]:
        return {key: self.manifests[up] for key, up in self.nodes[name].inputs.items() if not self._passed_over(up)}

    def required_by(self, name: str) -> dict[str, Manifest]:
        return {up: self.manifests[up] for up in self.nodes[name].requires if not self._passed_over(up)}

    def blockers_of(self, name: str) -> list[str]:
        """Steps that keep a stage from its turn: those without an artifact, or with a model that its gates refused. A
        page reports such a model all the same, without the steps that were passed over for it."""
        upstream = self.nodes[name].upstream
        if self.nodes[name].stage.makes == "page":
            return [up for up in upstream if up not in self.manifests and not self._passed_over(up)]
        return [up for up in upstream if up not in self.manifests or up in self.refused]

    def _passed_over(self, name: str) -> bool:
        """Return True if a step has no artifact only because gates refused a model."""
        if name in self.manifests or name not in self.unreached:
            return False
        return all(up in self.refused or self._passed_over(up) for up in self.blockers_of(name))

    def forced(self, name: str) -> bool:
        return name in self.selection.force

    def running(self, name: str) -> None:
        self.journal.row(JournalRow(name, "running"))
        self._keep_relay()

    def message(self, name: str, message: Mapping[str, Any]) -> None:
        self.journal.message(name, message)
        if kind := TOLD_AT_ONCE.get(message.get("name", "")):
            self.page.notify(kind, f"{self.config.name}: {name} {kind}", message["message"])

    def done(self, name: str, done: Done) -> None:
        self.manifests[name] = done.manifest
        if self.going is not None:
            try:
                self.going.came_to(done.manifest)
            except StageError as error:
                self._trouble(f"other machines cannot see that {name} is needed: {error}")
        if self.nodes[name].stage.registers and (reasons := refused_by(self.store.peek(done.manifest, REGISTRATION))):
            self.errors[name] = self.refused[name] = GateRefused(*reasons)
        self.journal.row(
            JournalRow(
                name,
                done.status,
                done.manifest.fingerprint,
                done.manifest.digest,
                str(done.path),
                round(done.seconds, 3),
                str(done.manifest.result.get("headline", "")),
                tuple(map(str, done.because)),
                done.manifest.build_id,
                bookkeeping_s=done.manifest.bookkeeping_s if done.status == "built" else {},
            )
        )

    def failed(self, name: str, error: StemmaError) -> None:
        self.errors[name] = error
        self.journal.row(
            JournalRow(name, "cancelled" if isinstance(error, Cancelled) else "failed", headline=str(error))
        )

    def later(self, call: Callable[[], object], key: str = "") -> None:
        """Make a call to the Prefect server on the side, in the context of the task that asks for it. One that still
        waits under the same key gives way."""
        self.page.queue.tell(call, key)

    def ended(self, name: str, state: State) -> None:
        self.page.ended(name, state)

    def skipped(self, name: str, blockers: list[str]) -> None:
        self.unreached.add(name)
        self.errors.update({up: self.refused[up] for up in blockers if up in self.refused})
        self.journal.row(JournalRow(name, "skipped", headline=f"waits for {', '.join(blockers)}"))

    def crashed(self, name: str, error: BaseException) -> StemmaError:
        """The failure to report. The traceback is kept too if no message was written for the exception."""
        if not isinstance(error, StemmaError):
            self.journal.traceback(name, traceback_of(error))
        return failure_of(error, name, self.store.root)

    def _begin(self, started_at: float) -> None:
        trial = self.journal.trial()
        if trial is None and self.store.remote is not None:
            trial = self.store.remote.runs.trial(self.journal.run_id)
        self.journal.begin(
            pipeline=trial["pipeline"] if trial else self.config.name,
            config=self.config_path,
            selection=self.selection.model_dump(mode="json"),
            flow_run_id=self.context.flow_run_id,
            flow_run_url=self.context.flow_run_url,
            page_url=run_page(self.store.root, self.journal.run_id),
        )
        with suppress(OSError):  # a run without room for its picture goes on without
            picture = json.dumps(drawing_of(self.nodes).as_json())
            (self.journal.folder / PICTURE).write_text(picture, encoding="utf8")
        if self.store.remote is not None:
            since = datetime.fromtimestamp(started_at, UTC).isoformat(timespec="seconds")
            about = {"pipeline": self.config.name, "host": socket.gethostname(), "since": since}
            runs, run_id = self.store.remote.runs, self.journal.run_id
            self.going = GoingRun(self.store, runs, run_id, about, self._say_waiting, self.stop.is_set)
            self.going.begin()
        code = code_state()
        self.context.outbox.send(
            messages.PipelineStarted(
                self.journal.run_id,
                self.config.name,
                started_at,
                dump(self.config),
                self.context.flow_run_id,
                self.context.flow_run_url,
                {"commit": str(code["commit"]), "dirty": str(code["dirty"]), "lock": lock_hash()},
                name=trial["name"] if trial else "",
                parent_id=trial["sweep_build_id"] if trial else "",
            )
        )
        ensure_relay(self.store.root)

    def _end(self, status: str, problems: tuple[Problem, ...], seconds: float) -> State:
        outcome: messages.Status = {"done": "FINISHED", "cancelled": "KILLED"}.get(status, "FAILED")  # type: ignore[assignment]
        error = "; ".join(map(str, problems))
        self.context.tell(self._finished(outcome, error))
        self._keep_relay()
        document = {
            "status": status,
            "errors": [problem.as_json() for problem in problems],
            "config": self.config_path,
            "root": self.store.place,
            "run_id": self.journal.run_id,
            "flow_run_id": self.context.flow_run_id,
            "flow_run_url": self.context.flow_run_url,
            "mlflow_run_id": None,
            "seconds": round(seconds, 3),
            "stages": [asdict(row) for row in self.journal.rows.values()],
        }
        for problem in copy_problems(self.store.root, self.journal.run_id):
            self._say("not copied", str(Problem(**problem)))
        chosen = {name: manifest for name, manifest in self.manifests.items() if name in self.journal.rows}
        self.page.show(self.store, chosen)
        if kind := TOLD_AT_THE_END.get(status):
            self.page.notify(kind, f"{self.config.name} {status}", error)
        # A private server goes with the run, and its page with it: do not wait for what it still misses.
        is_private = PRIVATE in os.environ
        if self.page.close(0 if is_private else PATIENCE_S) and not is_private:
            document["warnings"] = [page_lost().as_json()]
        is_written = self.journal.end(document)
        if not is_written and ON_WORKER in os.environ:
            self._end_later(document)
        with suppress(OSError, ValueError, LookupError, TypeError):  # the run has ended all the same
            write_ledger(self.store.root, self.journal.run_id)
        self._share_journal()
        tidy(self.store)
        if ON_WORKER in os.environ and not self.stop.is_set():
            self.page.close(WORKER_PATIENCE_S)
        self.page.queue.close()
        end = end_of(document)
        return State(type=StateType[end.type], message=end.message)

    def _keep_relay(self) -> None:
        """Start another relay if it was killed; a disk that is full for that ends no run."""
        with suppress(OSError):
            ensure_relay(self.store.root)

    def _end_later(self, document: Mapping[str, Any]) -> None:
        """Try to write the run's end again: the command that follows it runs in another process, and reads it there."""
        deadline = time.monotonic() + RESULT_PATIENCE_S
        while time.monotonic() < deadline and not self.journal.end(document):
            time.sleep(RESULT_POLL_S)

    def _share_journal(self) -> None:
        if self.store.remote is None:
            return
        try:
            self.store.remote.runs.put(self.journal.folder)
            if self.going is not None:
                self.going.end()
        except (StemmaError, OSError) as error:
            self._trouble(f"other machines cannot see that this run ended: {error}")

    def _finished(self, outcome: messages.Status, error: str) -> messages.PipelineFinished:
        """The run's end, with what runs are compared by and the pages about all of it, reused or built."""
        folders = [self.store.peek(manifest, *messages.WHOLE_RUN) for manifest in self.manifests.values()]
        files = (folder / name for folder in folders for name in messages.WHOLE_RUN)
        figures = pipeline_figures(
            {name: manifest.result.get("figures", {}) for name, manifest in self.manifests.items()}
        )
        shown = tuple(str(file) for file in files if file.exists())
        tags: dict[str, str] = {}
        with suppress(OSError, ValueError, LookupError, TypeError):  # a damaged record must not fail a run
            ledger = read_ledger(self.store.root, self.journal.run_id)
            tags = cost_tags(ledger.account) if ledger else {}
        return messages.PipelineFinished(self.journal.run_id, outcome, time.time(), error, figures, shown, tags)

    def _trouble(self, message: str) -> None:
        self._say("page", message)

    def _say_waiting(self, message: str) -> None:
        self._say("waiting", message)

    def _say(self, name: str, message: str) -> None:
        record = {"kind": "event", "time": time.time(), "name": name, "message": message}
        self.journal.message(self.config.name, record)


def refused_by(registration: Path) -> list[Problem]:
    """Reasons in a registration why gates refused its model; none for one that was accepted."""
    path = registration / REGISTRATION
    if not path.is_file():
        return []
    content = read_own_json(path)
    return [Problem(**reason) for reason in content.get("reasons", [])] if content.get("status") == "rejected" else []


def page_lost() -> Problem:
    """The warning of a run whose server was away when it ended."""
    return Problem(
        "page_lost",
        "",
        "the Prefect server did not answer when the run ended: its page does not say how it ended",
        "finished artifacts are in the store; stemma up starts the server again",
    )


def flow_run_url() -> str:
    """The page of the flow run that this code belongs to, empty where there is none."""
    if PRIVATE in os.environ:
        return ""
    name, base = flow_run.get_id(), PREFECT_UI_URL.value()
    return f"{base.rstrip('/')}/runs/flow-run/{name}" if name and base else ""


def flow_run_name() -> str:
    """Name of a flow run in the page: what it does, not two random words."""
    given = flow_run.get_parameters()
    config = given.get("config")
    if stage := given.get("stage"):
        return f"{stage} and below" if given.get("and_below") else str(stage)
    from_file = Path(given.get("config_path") or "pipeline").stem
    name = config.get("name") if isinstance(config, dict) else getattr(config, "name", from_file)
    selection = given.get("selection") or {}
    chosen = selection if isinstance(selection, dict) else selection.model_dump()
    listed = {key: names for key, names in chosen.items() if names and isinstance(names, list | tuple)}
    chosen_names = [f"{key.rstrip('_')} {', '.join(names)}" for key, names in listed.items()]
    return " ".join([str(name), *chosen_names])
