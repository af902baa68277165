"""The Prefect task around one stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run
from prefect.states import Failed, State

from infra.errors import Cancelled, StemmaError
from infra.store.manifest import Manifest
from tasks.building.build import Done, ensure
from tasks.pages.page import PageOwner, StagePage
from tasks.retries import back_off_s, wait, worth_another_try
from tasks.stage import Node


class TaskOwner(PageOwner, Protocol):
    """Interface of the pipeline run for the task of one of its stages."""

    def inputs_of(self, name: str) -> dict[str, Manifest]: ...
    def required_by(self, name: str) -> dict[str, Manifest]: ...
    def blockers_of(self, name: str) -> list[str]: ...
    def forced(self, name: str) -> bool: ...
    def running(self, name: str) -> None: ...
    def done(self, name: str, done: Done) -> None: ...
    def failed(self, name: str, error: StemmaError) -> None: ...
    def crashed(self, name: str, error: BaseException) -> StemmaError: ...
    def skipped(self, name: str, blockers: list[str]) -> None: ...


def stage_task(node: Node, run: TaskOwner) -> Task[[], State]:
    """A Prefect task that makes sure of one node's artifact. Prefect's own cache is off: a hit there would skip our
    verification."""

    launch = run.context.launch
    again = False

    @task(
        name=node.id,
        task_run_name=node.id,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=launch.retries,
        retry_condition_fn=lambda *_: again,
    )
    def stage() -> State:
        nonlocal again
        again = False
        if blockers := run.blockers_of(node.id):
            run.skipped(node.id, blockers)
            state: State = Failed(name="Skipped", message=f"waits for {', '.join(blockers)}, which has no artifact")
            run.ended(node.id, state)
            return state
        run.running(node.id)
        page = StagePage(node, run)
        try:
            context = replace(run.context, say=page.say)
            inputs, requires = run.inputs_of(node.id), run.required_by(node.id)
            done = ensure(node, inputs, requires, context, force=run.forced(node.id))
            run.done(node.id, done)
        except Cancelled as error:
            run.failed(node.id, error)
            return page.cancelled()
        except Exception as error:
            failure = run.crashed(node.id, error)
            failure = type(failure)(*map(node.relocated, failure.problems))
            if worth_another_try(failure) and (attempt := task_run.get_run_count()) <= launch.retries:
                pause_s = back_off_s(attempt, launch.retry_wait_s)
                page.retrying(failure, attempt, launch.retries, pause_s)
                # Waited for here: no cancellation would end Prefect's own wait.
                again = wait(pause_s, run.context.is_cancelled)
                if again:
                    return Failed(message=str(failure))
                run.failed(node.id, Cancelled())
                return page.cancelled()
            run.failed(node.id, failure)
            return page.failed(failure)
        return page.done(done)

    return stage
