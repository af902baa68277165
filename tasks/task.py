"""The Prefect task around one stage: its name, its state in the page, its logs, its progress, its links."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from uuid import UUID

from prefect import Task, get_run_logger, task
from prefect.artifacts import create_link_artifact, create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import Cancelled as CancelledState
from prefect.states import Completed, Failed, State

from infra.errors import Cancelled, StemmaError
from infra.store.manifest import Manifest
from tasks.build import Done, Surroundings, ensure
from tasks.stage import Node

PROGRESS_EVERY_S = 2.0


class PipelineRun(Protocol):
    """What a stage's task asks of, and tells, the pipeline run that it belongs to."""

    around: Surroundings

    def inputs_of(self, name: str) -> dict[str, Manifest]: ...
    def gates_of(self, name: str) -> dict[str, Manifest]: ...
    def blockers_of(self, name: str) -> list[str]: ...
    def forced(self, name: str) -> bool: ...
    def running(self, name: str) -> None: ...
    def message(self, name: str, message: Mapping[str, Any]) -> None: ...
    def done(self, name: str, done: Done) -> None: ...
    def failed(self, name: str, error: StemmaError) -> None: ...
    def skipped(self, name: str, blockers: list[str]) -> None: ...
    def later(self, call: Callable[[], object]) -> None: ...


def stage_task(node: Node, run: PipelineRun) -> Task[[], State]:
    """A Prefect task that makes sure of one node's artifact. Prefect's own cache is off: a hit there would skip our
    verification."""

    @task(name=node.id, task_run_name=node.id, cache_policy=NO_CACHE, persist_result=False)
    def stage() -> State:
        if blockers := run.blockers_of(node.id):
            run.skipped(node.id, blockers)
            return Failed(name="Skipped", message=f"waits for {', '.join(blockers)}, which has no artifact")
        run.running(node.id)
        page = _Page(node, run)
        try:
            around = replace(run.around, say=page.say)
            inputs, gates = run.inputs_of(node.id), run.gates_of(node.id)
            done = ensure(node, inputs, gates, around, force=run.forced(node.id))
        except Cancelled as error:
            run.failed(node.id, error)
            return CancelledState(message="cancelled")
        except StemmaError as error:
            run.failed(node.id, error)
            return Failed(message=str(error))
        run.done(node.id, done)
        return page.done(done)

    return stage


class _Page:
    """What the Prefect page shows of one stage."""

    def __init__(self, node: Node, run: PipelineRun) -> None:
        self._node = node
        self._run = run
        self._log = get_run_logger()
        self._progress: UUID | None = None
        self._shown_at = time.monotonic()

    def say(self, name: str, message: Mapping[str, Any]) -> None:
        """Events become log lines; progress becomes a progress artifact, at most every PROGRESS_EVERY_S."""
        self._run.message(name, message)
        if message["kind"] == "event":
            self._log.info("%s", message["message"])
        elif message.get("total"):
            self._show_progress(message)

    def _show_progress(self, message: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self._shown_at < PROGRESS_EVERY_S:
            return
        self._shown_at = now
        percent = min(100.0, 100.0 * message["done"] / message["total"])
        if self._progress is None:
            told = f"{self._node.id}, in {message['unit']}"
            key = f"progress-{self._node.id.replace('_', '-')}"
            self._progress = create_progress_artifact(percent, key=key, description=told)  # type: ignore[assignment]
        else:
            update_progress_artifact(self._progress, percent)

    def done(self, done: Done) -> State:
        headline = str(done.manifest.result.get("headline", ""))
        if self._progress is not None:
            update_progress_artifact(self._progress, 100.0)
        if done.status == "built":
            self._log.info("built in %.1f s: %s", done.seconds, headline or done.path)
            return Completed(message=headline or f"built in {done.seconds:.1f} s")
        builder = done.manifest.flow_run_id
        if builder and self._run.around.flow_run_url:
            link = f"{self._run.around.flow_run_url.rsplit('/', 1)[0]}/{builder}"
            key = f"built-by-{self._node.id.replace('_', '-')}"
            show = partial(create_link_artifact, link, link_text="the run that built it", key=key, description=headline)
            self._run.later(show)
        return Completed(name="Cached", message=f"reused {done.manifest.fingerprint}: {headline}")
