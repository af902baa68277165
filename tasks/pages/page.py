"""The Prefect page of one stage: its progress, its events, its sheet, its links."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextvars import copy_context
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.states import Cancelled, Completed, Failed, State

from evaluation.pages.words import seconds
from infra.errors import StemmaError
from infra.lineage.ledger import file_url, run_url
from infra.process.interval import GrowingInterval
from tasks.building.build import Done
from tasks.building.context import BuildContext
from tasks.pages.sheet import built_sheet, failed_sheet
from tasks.processes.supervisor import LOG
from tasks.stage import Node

LINES = 40
WINDOW_S = 10.0


class Throttle:
    """Pass at most LINES lines per WINDOW_S; the next window reports how many were held back, and where they are.

    A progress bar rewrites its line after a carriage return; only its last state counts as a line.
    """

    def __init__(self, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._where = where
        self._clock = clock
        self._since = clock()
        self._let = 0
        self._held = 0

    def let_through(self, line: str) -> list[str]:
        """Lines to show after this one has arrived."""
        shown: list[str] = []
        now = self._clock()
        if now - self._since >= WINDOW_S:
            if self._held:
                shown.append(f"… {self._held:,} more lines: {self._where}")
            self._since, self._let, self._held = now, 0, 0
        text = line.rstrip("\r").rpartition("\r")[2].rstrip()
        if not text:
            return shown
        if self._let < LINES:
            self._let += 1
            shown.append(text)
        else:
            self._held += 1
        return shown


PROGRESS_EVERY_S, LONGEST_PROGRESS_S = 2.0, 15.0
"""Seconds between two updates of the progress bar in Prefect's page: more the longer a stage works."""
LINE_EVERY_S = 30.0
"""Seconds between two lines in the log of a stage that is working."""


class PageOwner(Protocol):
    """Interface of the pipeline run for the page of one of its stages."""

    context: BuildContext

    def message(self, name: str, message: Mapping[str, Any]) -> None: ...
    def later(self, call: Callable[[], object], key: str = "") -> None: ...
    def ended(self, name: str, state: State) -> None: ...


class StagePage:
    """The page's side of one stage of one run. Without a page to link to, it reports only logs and progress."""

    def __init__(self, node: Node, run: PageOwner) -> None:
        self._node, self._folder = node.id, node.folder
        self._shows = node.stage.shows
        self._key = node.id.replace("_", "-")
        self._run = run
        self._log = get_run_logger()
        self._progress: UUID | None = None
        self._progress_key = f"progress-{self._key}"
        self._shows_progress = False
        self._shown_at = time.monotonic()
        self._interval = GrowingInterval(PROGRESS_EVERY_S, LONGEST_PROGRESS_S)
        self._corrections: list[dict[str, Any]] = []
        self._begun = time.time()
        self._at = ""
        self._over = threading.Event()
        self._throttle = Throttle(f"stemma logs {node.id}")

    def say(self, name: str, message: Mapping[str, Any]) -> None:
        """Events and what is printed become log lines; progress becomes a progress artifact, at most every
        PROGRESS_EVERY_S to LONGEST_PROGRESS_S, and a line every LINE_EVERY_S."""
        if message["kind"] == "building":
            self._log.info("%s", f"builds: {message['message']}" if message["message"] else "builds")
            threading.Thread(target=copy_context().run, args=(self._say_where,), daemon=True).start()
            return
        if message["kind"] == "log":
            for line in self._throttle.let_through(message["message"]):
                self._log.info("%s", line)
            return
        self._run.message(name, message)
        if message["kind"] == "event":
            self._log.info("%s", message["message"])
            if message["name"] == "correction":
                self._show_correction(message)
        elif message.get("total"):
            self._at = f"{message['done']:,.0f} of {message['total']:,.0f} {message['unit']}"
            self._show_progress(message)

    def _say_where(self) -> None:
        """A line every LINE_EVERY_S for as long as the stage works."""
        started = time.monotonic()
        while not self._over.wait(LINE_EVERY_S):
            self._log.info("%s", f"{seconds(time.monotonic() - started)}: {self._at or 'at work'}")

    def done(self, done: Done) -> State:
        """The state of a stage whose artifact exists; a stage that was built leaves its sheet."""
        headline = str(done.manifest.result.get("headline", ""))
        if self._shows_progress:
            self._run.later(self._remove_progress, self._progress_key)
        if done.status == "built":
            self._leave(headline, lambda: self._built(done))
            # Prefect logs the state with its message: none of our lines repeats it.
            return self._ended(Completed(message=f"{headline}, built in {seconds(done.seconds)}".removeprefix(", ")))
        return self._ended(Completed(name="Cached", message=f"reused {done.manifest.fingerprint}: {headline}"))

    def failed(self, error: StemmaError) -> State:
        """The state of a stage that failed, with a sheet that shows what failed, where, and what to do."""
        self._leave(str(error), lambda: self._failed(error))
        return self._ended(Failed(message=str(error)))

    def cancelled(self) -> State:
        """The state of a stage that was cancelled."""
        return self._ended(Cancelled(message="cancelled"))

    def _ended(self, state: State) -> State:
        self._over.set()
        self._run.ended(self._node, state)
        return state

    def retrying(self, error: StemmaError, attempt: int, retries: int, pause_s: float) -> None:
        """Report a machine fault and that the stage will be tried again."""
        self._over.set()
        message = f"{error}; trying again in {pause_s:.0f} s (retry {attempt} of {retries})"
        self.say(self._node, {"kind": "event", "time": time.time(), "name": "retrying", "message": message})

    def _failed(self, error: StemmaError) -> str:
        """The sheet of a failed stage. It shows nothing of the files that an earlier attempt left."""
        works = self._run.context.store.layout.unfinished(self._folder)
        # Each attempt creates a new folder for the artifact.
        work = next((work for work in works if self._is_new(work / "artifact")), None)
        log = work / "scratch" / LOG if work else None
        links = self._links(work / "artifact") if work else {}
        return failed_sheet(self._node, error, log if log and self._is_new(log) else None, links)

    def _is_new(self, path: Path) -> bool:
        return path.exists() and path.stat().st_mtime >= self._begun

    def _built(self, done: Done) -> str:
        url = run_url(self._run.context.store.root, done.manifest.build_id)
        return built_sheet(done.manifest, done.path, url, self._links(done.path))

    def _links(self, folder: Path) -> dict[str, str]:
        """The files that a person wants to open, and where MLflow's page shows them."""
        context = self._run.context
        names = [Path(name).name for name in self._shows if (folder / name).exists()]
        urls = {name: file_url(context.store.root, context.run_id, self._node, name) for name in names}
        return {name: url for name, url in urls.items() if url}

    def _leave(self, description: str, text: Callable[[], str]) -> None:
        if self._run.context.flow_run_url:
            self._run.later(lambda: create_markdown_artifact(text(), key=f"stage-{self._key}", description=description))

    def _show_correction(self, message: Mapping[str, Any]) -> None:
        """A table of what the guard of a training did, a row more with each correction."""
        alarm = message["alarm"]
        self._corrections.append(
            {
                "batch": alarm["batch"],
                "alarm by": alarm["cause"],
                "value": alarm["value"],
                "usual": alarm["usual"],
                "back to batch": message["back_to"],
                "learning rate ×": message["factor"],
                "left out": f"{message['skip_first']} to {message['skip_end'] - 1}",
            }
        )
        rows = list(self._corrections)
        key, description = f"corrections-{self._key}", f"Corrections of {self._node} in flight"
        if self._run.context.flow_run_url:
            self._run.later(lambda: create_table_artifact(table=rows, key=key, description=description), key)

    def _show_progress(self, message: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self._shown_at < self._interval.seconds:
            return
        self._shown_at = now
        percent = min(100.0, 100.0 * message["done"] / message["total"])
        description = f"{self._node}, in {message['unit']}"
        self._shows_progress = True
        self._run.later(lambda: self._put_progress(percent, description), self._progress_key)

    def _put_progress(self, percent: float, description: str) -> None:
        """Make the bar if there is none yet, else moves it. Called by the queue's thread alone.

        A full bar is removed: the result is more informative.
        """
        if self._progress is None:
            self._progress = create_progress_artifact(percent, key=self._progress_key, description=description)  # type: ignore[assignment]
        else:
            update_progress_artifact(self._progress, percent)

    def _remove_progress(self) -> None:
        if self._progress is not None:
            get_client(sync_client=True).delete_artifact(self._progress)
            self._progress = None
