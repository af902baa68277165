"""Copies for other trackers of what the relay has delivered to MLflow.

Each tracker has a thread, so that one that hangs or fails holds up neither MLflow nor another. The first failure of a
tracker within a pipeline run is written down for users, and the tracker gets nothing more of that run. Copies that a
relay had not made when it was killed are lost: MLflow has them.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.errors import Problem
from infra.io.json import read_own_json
from infra.lineage.also.trackers import TRACKERS, End, TrackedBuild, Tracker, Value, flat_settings
from infra.lineage.ledger import DeliveredRun, Ledger
from infra.lineage.messages import Message, StageFinished, StageStarted
from infra.lineage.relay_lock import lineage_folder
from infra.servers.state import write_private

CLOSE_S = 60.0
"""Time that trackers have to send the rest when the relay ends."""
_PROBLEM = "also-{}.json"

log = logging.getLogger("stemma.relay")


def copy_problems(root: Path | str, run_id: str = "") -> list[dict[str, str]]:
    """Return for each tracker why the newest run has no copy there, as `infra.errors.Problem`; [] while all is well.

    Args:
        root: of the store.
        run_id: only problems of this pipeline run.
    """
    problems = []
    for name in TRACKERS:
        with suppress(FileNotFoundError, ValueError):
            failure = read_own_json(lineage_folder(root) / _PROBLEM.format(name))
            if run_id in ("", failure["run"]):
                problems.append(failure["problem"])
    return problems


class Copies:
    """The copies of one store. All methods return at once and raise nothing."""

    def __init__(self, root: Path, ledger: Ledger) -> None:
        self._root = root
        self._ledger = ledger
        self._workers: dict[str, _TrackerThread] = {}

    def delivered(self, message: Message) -> None:
        """Copy a message that MLflow has got."""
        if isinstance(message, StageStarted):
            self._put(message.build_id, lambda copier: None)
        elif isinstance(message, StageFinished):
            self._put(message.build_id, lambda copier: copier.finish(_end_of(message)), ends=True)

    def metrics(self, build_id: str, values: Iterable[tuple[str, int, float, float]]) -> None:
        """Copy points of metrics.

        Args:
            build_id: the build that recorded them.
            values: name, step, value, seconds since the epoch.
        """
        points = [Value(*value) for value in values]
        self._put(build_id, lambda copier: copier.log(points))

    def close(self) -> None:
        """Wait until all copies are made, for at most CLOSE_S."""
        for worker in self._workers.values():
            worker.close()

    def _put(self, build_id: str, action: Callable[[Tracker], None], *, ends: bool = False) -> None:
        try:
            run = self._ledger.run(build_id)
            pipeline = self._ledger.run(run.parent_id) if run else None
            lineage = pipeline.about.get("config", {}).get("lineage") if pipeline else None
            if run is None or not lineage:
                return
            for name in lineage["also"]:
                worker = self._workers.get(name) or self._workers.setdefault(name, _TrackerThread(name, self._root))
                worker.put(_build_of(run, lineage["offline"]), action, ends)
        except Exception as error:
            log.warning("no copy of build %s for other trackers: %s", build_id, error)


def _build_of(run: DeliveredRun, offline: bool) -> TrackedBuild:
    about = run.about
    tags = {key: str(about.get(key, "")) for key in ("fingerprint", "commit", "lock", "device", "host")}
    inputs = {f"input.{given['name']}": f"{given['stage']}/{given['fingerprint']}" for given in about.get("inputs", ())}
    settings: Mapping[str, Any] = about.get("config", {})
    return TrackedBuild(
        run.build_id,
        run.parent_id,
        str(about["pipeline"]),
        str(about["stage"]),
        {**flat_settings(settings), **tags, **inputs, "mlflow_run": run.run_id, "page": about.get("flow_run_url", "")},
        offline,
    )


def _end_of(message: StageFinished) -> End:
    links = {"artifact": message.output.path, "digest": message.output.digest} if message.output else {}
    links |= {Path(path).name: path for path in message.artifacts}
    return End(message.status, message.figures, message.headline or message.error, links, message.time)


class _TrackerThread:
    """The thread of one tracker."""

    def __init__(self, name: str, root: Path) -> None:
        self._name = name
        self._folder = lineage_folder(root)
        self._waiting: queue.SimpleQueue[tuple[TrackedBuild, Callable[[Tracker], None], bool] | None] = (
            queue.SimpleQueue()
        )
        self._open: dict[str, Tracker] = {}
        self._failed: set[str] = set()
        self._thread = threading.Thread(target=self._work, name=f"copies-{name}", daemon=True)
        self._thread.start()

    def put(self, build: TrackedBuild, action: Callable[[Tracker], None], ends: bool) -> None:
        self._waiting.put((build, action, ends))

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("%s did not take all copies within %.0f s; MLflow has them", self._name, CLOSE_S)

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            build, action, ends = item
            if build.run_id in self._failed:
                continue
            try:
                if build.id not in self._open:
                    self._open[build.id] = TRACKERS[self._name](build, self._folder / self._name)
                    self._fine(build)
                action(self._open[build.id])
                if ends:
                    del self._open[build.id]
            except BaseException as error:  # trackers raise SystemExit and worse
                self._fail(build, error)

    def _fine(self, build: TrackedBuild) -> None:
        path = self._folder / _PROBLEM.format(self._name)
        with suppress(FileNotFoundError, ValueError):
            if read_own_json(path)["run"] != build.run_id:
                path.unlink()

    def _fail(self, build: TrackedBuild, error: BaseException) -> None:
        self._failed.add(build.run_id)
        self._open = {id: tracker for id, tracker in self._open.items() if id != build.id}
        reason = " ".join(str(error).split()) or type(error).__name__
        problem = Problem(
            "not_copied",
            f"lineage.also: {self._name}",
            f"{self._name} receives no more data of run {build.run_id}: {reason}",
            "MLflow has all data; once the tracker is repaired, the next run is copied",
        )
        log.warning("%s", problem)
        with suppress(OSError):
            text = json.dumps({"run": build.run_id, "problem": problem.as_json()})
            write_private(self._folder / _PROBLEM.format(self._name), text)
