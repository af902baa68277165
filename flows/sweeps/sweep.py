"""Runs a sweep: trials as concurrent pipeline runs in this process, until all have ended or a stop is requested."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.config.graph import Graph, Selection, graph
from flows.deployment.start import RunRequest, interrupts, name_server, runs_on_worker, start
from flows.planning.plan import plan
from flows.runs.journal import PRIVATE, RunJournal, new_run_id
from flows.runs.journal_forms import HAS_ARTIFACT
from flows.runs.trials import Trial, Trials, keep_best
from flows.sweeps.definition import Sweep
from flows.sweeps.sampling import Chooser, chooser
from flows.sweeps.space import described
from infra.errors import ConfigError, Problem
from infra.lineage import messages
from infra.lineage.outbox import Outbox
from infra.lineage.relay import ensure_relay
from infra.project import code_state, lock_hash
from infra.run import read_journal
from infra.store.measurements import TRAINED
from infra.store.store import Store
from tasks.processes.child import JOURNAL
from tasks.processes.warm_start import WarmStart

LOOK_S = 0.3
WATCHED = "validation/sample_loss"
"""Metric for pruning: the in-training validation, of which less is better."""


def run_sweep(sweep: Sweep, store: Store, at_once: int, tell: Callable[[str], None]) -> tuple[list[Trial], bool]:
    """(the trials, whether it was cancelled). Trials that an earlier call ended are kept; one that it left in the
    middle goes on from its artifacts and checkpoints.

    at_once: trials at a time. tell: one line for a person. Raises ConfigError where no run has the measured figure, or
    another command runs the same sweep.
    """
    trials = Trials(store.root, sweep.id)
    trials.create()
    with trials.alone():
        about = {**_described(sweep), **trials.about()}
        trials.describe(about)
        choose = chooser(sweep, trials)
        first = choose.next()
        if first is None:
            return trials.all(), False
        with interrupts() as stopped, _server(store.root), closing(WarmStart()) as warm:
            return _Running(sweep, store, trials, choose, about["build_id"], warm, stopped, tell).run(first, at_once)


def _described(sweep: Sweep) -> dict[str, Any]:
    """Content of sweep.json; `build_id` identifies the sweep in lineage."""
    return {
        "pipeline": sweep.base.name,
        "config": str(sweep.config.absolute()),
        "keys": list(sweep.space),
        "measure": sweep.measure,
        "maximise": sweep.maximise,
        "begun": time.time(),
        "build_id": messages.new_build_id(),
    }


class _Running:
    """The trials of one call, each in a thread: a thread waits for its run, whose stages are processes."""

    def __init__(
        self,
        sweep: Sweep,
        store: Store,
        trials: Trials,
        choose: Chooser,
        build_id: str,
        warm: WarmStart,
        stopped: Callable[[], bool],
        tell: Callable[[str], None],
    ) -> None:
        self.sweep, self.store, self.trials, self.choose = sweep, store, trials, choose
        self.build_id, self.warm, self.stopped, self.tell = build_id, warm, stopped, tell
        self.pruned: set[int] = set()
        self.broken = threading.Event()
        self.graphs: dict[int, Graph] = {}

    def run(self, first: Trial, at_once: int) -> tuple[list[Trial], bool]:
        outbox = Outbox(self.store.root)
        code = code_state()
        outbox.send(
            messages.PipelineStarted(
                self.build_id,
                self.sweep.base.name,
                time.time(),
                {"sweep": {key: str(one) for key, one in self.sweep.space.items()}, "measure": self.sweep.measure},
                tags={"stemma.sweep": self.sweep.id, "commit": str(code["commit"]), "lock": lock_hash()},
                name=f"sweep {self.sweep.id[:6]} of {self.sweep.measure}",
            )
        )
        ensure_relay(self.store.root)
        outcome: messages.Status = "FAILED"
        try:
            self._all(first, at_once)
            outcome = "KILLED" if self.stopped() else "FINISHED"
        finally:
            done = [trial for trial in self.trials.all() if trial.status == "done" and trial.value is not None]
            values = [trial.value for trial in done if trial.value is not None]
            best = {f"best.{self.sweep.measure}": (max if self.sweep.maximise else min)(values)} if values else {}
            figures = {"trials_done": float(len(done)), **best}
            outbox.send(messages.PipelineFinished(self.build_id, outcome, time.time(), "", figures))
        return self.trials.all(), self.stopped()

    def _all(self, first: Trial, at_once: int) -> None:
        going: dict[Future[Trial], Trial] = {}
        upcoming: Trial | None = first
        with ThreadPoolExecutor(at_once, thread_name_prefix="trial") as pool:
            while going or upcoming is not None:
                while upcoming is not None and len(going) < at_once and not self._stops():
                    going[pool.submit(self._one, upcoming)] = upcoming
                    upcoming = self.choose.next() if len(going) < at_once else None
                if not going:
                    break
                ended, _ = wait(going, timeout=LOOK_S, return_when=FIRST_COMPLETED)
                for future in ended:
                    del going[future]
                    self._ended(future.result())
                for trial in going.values():
                    if trial.number not in self.pruned and self.choose.prunes(trial, self._curve(trial)):
                        self.pruned.add(trial.number)
                if upcoming is None and len(going) < at_once and not self._stops():
                    upcoming = self.choose.next()

    def _stops(self) -> bool:
        return self.stopped() or self.broken.is_set()

    def _ended(self, trial: Trial) -> None:
        if trial.status == "running":  # cancelled: it goes on with the next call
            return
        self.trials.save(trial)
        keep_best(self.store, self.trials)
        self.choose.ended(trial)
        said = f"{self.sweep.measure} {trial.value:.4f}" if trial.value is not None else trial.error
        self.tell(f"trial {trial.number} ({self._called(trial)}): {trial.status} {said}".rstrip())
        if trial.status == "done" and trial.value is None:
            self.broken.set()
            raise ConfigError(_no_figure(self.sweep, trial))

    def _called(self, trial: Trial) -> str:
        settings = trial.name or described(trial.settings)
        return f"{settings}, seed {trial.seed}" if len(self.sweep.seeds) > 1 else settings

    def _one(self, trial: Trial) -> Trial:
        """Runs one trial to its end, or takes the outcome of its run from an earlier call. An error that breaks a trial
        fails only that trial: the others go on."""
        try:
            return self._run(trial)
        except Exception as error:
            return replace(trial, status="failed", error=f"{type(error).__name__}: {error}".splitlines()[0])

    def _run(self, trial: Trial) -> Trial:
        runs = self.store.layout.runs
        pipeline = self.sweep.pipeline(trial.settings, trial.seed)
        self.graphs[trial.number] = graph(pipeline)
        earlier = RunJournal(runs, trial.run_id) if trial.run_id else None
        if earlier and (found := self._of_earlier(earlier)) is not None:
            return self._result(trial, found)
        # One that was killed goes on as the same run, which MLflow may know to be finished already.
        was_killed = earlier is not None and earlier.result() is None and not earlier.works()
        trial = trial.begun(trial.run_id if was_killed else new_run_id())
        journal = RunJournal(runs, trial.run_id)
        self.trials.save(trial)
        facts = {
            "pipeline": f"{self.sweep.base.name} sweep {self.sweep.id[:6]}",
            "name": f"trial {trial.number}: {self._called(trial)}",
            "sweep_build_id": self.build_id,
        }
        journal.make_trial(**facts)
        if self.store.remote is not None:
            self.store.remote.runs.put_trial(trial.run_id, facts)
        request = RunRequest(
            pipeline, Selection(until=(self.sweep.step,)), self.store.root, False, str(self.sweep.config)
        )
        return self._result(trial, self._start(trial, request, journal))

    def _start(self, trial: Trial, request: RunRequest, journal: RunJournal) -> dict[str, Any]:
        from flows.prefect.execution import SHARED, Shared

        def is_cancelled() -> bool:
            return self._stops() or trial.number in self.pruned

        before = SHARED.set(Shared(is_cancelled, self.warm))
        try:
            return start(request, journal, lambda text: self.tell(f"trial {trial.number}: {text}"), is_cancelled)
        finally:
            SHARED.reset(before)

    def _of_earlier(self, journal: RunJournal) -> dict[str, Any] | None:
        """Outcome of an earlier call's run, which may still be going on if a worker has it. None if it should be run
        again."""
        while journal.result() is None and journal.works() and not self._stops():
            time.sleep(LOOK_S)
        found = journal.result()
        return found if found and found["status"] == "done" else None

    def _result(self, trial: Trial, document: dict[str, Any]) -> Trial:
        seconds = float(document.get("seconds", 0.0))
        if document["status"] == "cancelled":
            return replace(trial, status="pruned", seconds=seconds) if trial.number in self.pruned else trial
        if document["status"] != "done":
            error = "; ".join(str(Problem(**problem)) for problem in document["errors"][:2])
            return replace(trial, status="failed", seconds=seconds, error=error)
        figures = dict(self._figures(trial, document))
        return replace(
            trial, status="done", seconds=seconds, figures=figures, value=figures.get(self.sweep.measure), error=""
        )

    def _figures(self, trial: Trial, document: dict[str, Any]) -> Iterator[tuple[str, float]]:
        """`step.figure` of all steps that train or measure, and of the measured one."""
        nodes = self.graphs[trial.number]
        for row in document["stages"]:
            node = nodes[row["stage"]]
            of_a_model = node.stage.makes_weights or node.measures
            if row["status"] in HAS_ARTIFACT and (of_a_model or node.id == self.sweep.step):
                # A worker elsewhere may have another cache: of a path only its last two parts are the store's.
                manifest = self.store.find(Path(row["path"]).parent.name, row["fingerprint"])
                assert manifest is not None
                for name, value in manifest.result["figures"].items():
                    yield f"{node.inputs[TRAINED] if node.measures else node.id}.{name}", value

    def _curve(self, trial: Trial) -> list[tuple[int, float]]:
        """The in-training validation of the measured step so far, while it is built."""
        nodes = self.graphs.get(trial.number)
        if self.sweep.pruner == "none" or nodes is None:
            return []
        row = plan(nodes, self.store)[self.sweep.step]
        if row.fingerprint is None:
            return []
        path = self.store.layout.work(row.node.folder, row.fingerprint) / "scratch" / JOURNAL
        try:
            lines = read_journal(path)
        except FileNotFoundError:
            return []
        measured = [line for line in lines if line["kind"] == "metric" and WATCHED in line["values"]]
        sign = -1.0 if self.sweep.maximise else 1.0
        return [(int(line["step"]), sign * float(line["values"][WATCHED])) for line in measured]


def _no_figure(sweep: Sweep, trial: Trial) -> Problem:
    from flows.config.problems import nearest

    own = [name.removeprefix(f"{sweep.step}.") for name in trial.figures if name.startswith(f"{sweep.step}.")]
    message = f"{sweep.step} has no figure {sweep.figure}; artifacts built so far are kept"
    return Problem("no_such_figure", f"--measure {sweep.measure}", message, nearest(sweep.figure, own, "there are"))


@contextmanager
def _server(root: Path) -> Iterator[None]:
    """One private Prefect server for all trials, where neither `up` runs nor the environment names one."""
    if name_server(root) or os.environ.get("PREFECT_API_URL") or runs_on_worker(root):
        yield
        return
    from infra.servers.private import private_prefect_server

    with private_prefect_server() as url:
        os.environ.update({"PREFECT_API_URL": url, PRIVATE: "1"})
        try:
            yield
        finally:
            del os.environ["PREFECT_API_URL"], os.environ[PRIVATE]
