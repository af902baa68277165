"""Starts a pipeline and waits for it: on the worker when there is one, else in this process."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.config.graph import Selection
from flows.config.read import PipelineConfig, dump
from flows.runs.journal import PIPELINE, PRIVATE, RESERVED_BYTES, RunJournal
from infra.errors import Problem, StemmaError, stage_error
from infra.process.interrupts import NUMBERS, interrupt_received
from infra.process.interval import GrowingInterval
from infra.process.lifetime import start_ticks
from infra.project import code_state
from infra.servers.credentials import client_variables
from infra.servers.environment import HEARTBEAT, OFFLINE, QUIET
from infra.servers.http import check_credentials
from infra.servers.state import prefect_api_url, recorded, works_elsewhere
from infra.store.roots import shown_root, url_of
from infra.store.store import is_of_the_disk

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.orchestration import SyncPrefectClient

SHORTEST_POLL_S, LONGEST_POLL_S = 0.05, 0.25
"""Seconds between two looks at the run's journal: a read of one file that does not exist yet."""
SHORTEST_ASK_S, LONGEST_ASK_S = 1.0, 15.0
"""Seconds between two requests to the server for the run's state: tens of milliseconds of work for both sides."""
CONSOLE_LEVEL = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"


@dataclass(frozen=True)
class RunRequest:
    """A user's request for a run. `config_path` is the file that the config came from."""

    pipeline: PipelineConfig
    selection: Selection
    root: Path
    verify: bool
    config_path: str

    def parameters(self, run_id: str) -> dict[str, Any]:
        """The flow's parameters, as plain data."""
        return {
            "config": dump(self.pipeline),
            "selection": self.selection.model_dump(mode="json"),
            "root": shown_root(self.root),
            "run_id": run_id,
            "verify": self.verify,
            "config_path": self.config_path,
        }


WAITS = {
    "AwaitingConcurrencySlot": "another run of this pipeline is active, and its schedule allows one run at a time",
    "Late": "the worker has not picked up the run yet: it is busy or down (`stemma status`)",
}
"""Why a run that was handed to the worker has not begun, by the name of its state."""


def start(
    request: RunRequest,
    journal: RunJournal,
    tell: Callable[[str], None],
    is_cancelled: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Run the pipeline to its end and return the document of the command contract. SIGINT cancels it.

    tell: called once with what a run waits for before it begins. is_cancelled: called instead of listening for signals,
        in a thread; then `flows.prefect.execution.SHARED` is set there too.
    """
    url = name_server(request.root)
    with _lost_server_named():
        if url and runs_on_worker(request.root):
            return _on_worker(request, journal, tell, is_cancelled)
        return _here(request, journal, url)


@contextmanager
def _lost_server_named() -> Iterator[None]:
    """Raise StageError `service_failed` if a run cannot start because the Prefect server does not answer."""
    try:
        yield
    except StemmaError:
        raise
    except Exception as error:
        from flows.prefect.page_queue import is_unreachable

        # Prefect's client wraps the error of its first request.
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        if not (is_unreachable(error) or is_unreachable(cause)):
            raise
        message = f"the Prefect server does not answer: {str(error) or type(error).__name__}"
        fix = "run again; `stemma status` shows whether the services of `stemma up` are running"
        raise stage_error("service_failed", os.environ.get("PREFECT_API_URL", "prefect"), message, fix) from error


def name_server(root: Path) -> str | None:
    """The URL of the Prefect server that `up` runs, also set in the environment; None if there is none.

    Call this before importing Prefect, which reads the environment at import.
    """
    os.environ.update(QUIET | OFFLINE | HEARTBEAT)
    # The journal's follower reports to a person what happens; Prefect's own lines go to its page.
    os.environ.setdefault(CONSOLE_LEVEL, "CRITICAL")
    url = prefect_api_url(root)
    if url:
        check_credentials(root)
        os.environ.update({"PREFECT_API_URL": url, **client_variables()})
    return url


def runs_on_worker(root: Path) -> bool:
    """True if `up` is running or the environment names remote servers: pipelines are then run by a worker."""
    worker = recorded(root).get("worker")
    return works_elsewhere() or bool(prefect_api_url(root) and worker and worker.alive)


def _here(request: RunRequest, journal: RunJournal, url: str | None) -> dict[str, Any]:
    from infra.servers.private import starting_prefect_server

    with ExitStack() as stack:
        url, wait = url or os.environ.get("PREFECT_API_URL"), None
        if not url:
            url, wait = stack.enter_context(starting_prefect_server())
            os.environ[PRIVATE] = "1"
        os.environ["PREFECT_API_URL"] = url
        from flows.config.forms import renamed
        from flows.pipeline import pipeline

        if wait is not None:
            wait()

        flow = renamed(pipeline, request.pipeline.name)
        # In this process the config object is passed, whose graph is already built; a worker gets plain data.
        parameters = {**request.parameters(journal.run_id), "config": request.pipeline, "selection": request.selection}
        try:
            with _impatient():
                state = flow(**parameters, return_state=True)
        except (Exception, KeyboardInterrupt):
            # The run's outcome is recorded by then: Prefect's engine cannot reach a server that is gone.
            result = journal.result()
            if result is None:
                raise
            return _with_page_lost(result)
        return journal.result() or _lost(request, state.message or str(state))


def _impatient() -> AbstractContextManager[object]:
    """Limit the retries of Prefect's client, which tries again for a minute, five times in a row. Calls made on the
    side wait by themselves (see `flows.prefect.page_queue`), and nothing has to wait for the rest."""
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    return temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1})


def _with_page_lost(result: dict[str, Any]) -> dict[str, Any]:
    from flows.prefect.execution import page_lost

    return {**result, "warnings": [page_lost().as_json()]}


def _on_worker(
    request: RunRequest, journal: RunJournal, tell: Callable[[str], None], is_cancelled: Callable[[], bool] | None
) -> dict[str, Any]:
    from prefect.client.orchestration import get_client

    from flows.deployment.pools import job_variables

    interruption = nullcontext(is_cancelled) if is_cancelled else interrupts()
    with get_client(sync_client=True) as client, interruption as interrupted:
        deployment = _deployment(request, client)
        run = client.create_flow_run_from_deployment(
            deployment,
            parameters=request.parameters(journal.run_id),
            job_variables=job_variables(request.pipeline, request.root),
        )
        with _impatient():
            return _follow(request, journal, client, run.id, interrupted, tell)


def _deployment(request: RunRequest, client: SyncPrefectClient) -> UUID:
    """The pipeline's deployment. It is created again only if it is missing, was made by other code, or sends runs
    elsewhere."""
    from prefect.exceptions import ObjectNotFound

    from flows.deployment.pools import pool_of

    code = code_state()
    with suppress(ObjectNotFound):
        deployment = client.read_deployment_by_name(f"{request.pipeline.name}/{PIPELINE}")
        same_code = code["commit"] and not code["dirty"] and deployment.version == code["commit"]
        if same_code and deployment.work_pool_name == pool_of(request.pipeline):
            return deployment.id
    from flows.deployment.deploy import deploy_pipeline

    return deploy_pipeline(request.pipeline, request.root, request.config_path)


def _follow(
    request: RunRequest,
    journal: RunJournal,
    client: SyncPrefectClient,
    run_id: UUID,
    interrupted: Callable[[], bool],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Wait for the flow run's end; an interrupt cancels it, as the page's Cancel would.

    If the server that passes the interrupt on does not answer, the run's own process is signalled. If that process is
    gone too, the wait ends.
    """
    from prefect.states import Cancelling

    from flows.prefect.page_queue import is_unreachable

    cancelling, signalled, message, away, taken_for_dead = False, False, "", False, False
    asked_at, state_id = time.monotonic(), None
    look, ask = GrowingInterval(SHORTEST_POLL_S, LONGEST_POLL_S), GrowingInterval(SHORTEST_ASK_S, LONGEST_ASK_S)
    process: tuple[int, int] | None = None
    while (result := _result_now(journal)) is None:
        # Ask the server from time to time; the journal alone decides once the server is unreachable.
        if process is not None and start_ticks(process[0]) != process[1]:
            process = None
            ask.changed()
        if time.monotonic() - asked_at > (SHORTEST_ASK_S if away or interrupted() else ask.seconds):
            try:
                if interrupted() and not cancelling:
                    client.set_flow_run_state(run_id, Cancelling(), force=True)
                    cancelling = True
                state = client.read_flow_run(run_id).state
            except Exception as error:
                if not is_unreachable(error):
                    raise
                if not away:
                    tell(f"the Prefect server does not answer ({type(error).__name__}); the run continues without it")
                away, state = True, None
                if journal.has_died():
                    reason = "its process is gone, and the Prefect server does not answer"
                    return journal.result() or _lost(request, reason)
                if interrupted() and not signalled:
                    if not _end_process(journal):
                        return _left_alone(request)
                    signalled = True
            else:
                away = False
            asked_at = time.monotonic()
            process = process or journal.living_process()
            if state is not None and state.id != state_id:
                state_id = state.id
                ask.changed()
            if state is not None and state.is_crashed() and journal.works():
                # Its signs of life come late where the machine is busy, and the server gave up waiting for them.
                if not taken_for_dead:
                    tell(
                        f"the Prefect page shows the run as crashed ({state.message}), but its process is still working"
                    )
                taken_for_dead = True
            elif state is not None and state.is_final():
                outcome = journal.result() or _result_elsewhere(request, journal)
                return outcome or _lost(request, f"{state.name}: {state.message or 'no message'}")
            if state is not None and state.name != message and state.name in WAITS:
                message = state.name
                tell(f"waiting: {WAITS[message]}")
        time.sleep(look.seconds)
    return result


def _result_now(journal: RunJournal) -> dict[str, Any] | None:
    """The run's result; None while it goes on, and while the disk cannot be read."""
    try:
        return journal.result()
    except OSError as error:
        if not is_of_the_disk(error):
            raise
        return None


def _end_process(journal: RunJournal) -> bool:
    """Ask the process of a run to stop in order; False if it is not a process of this machine."""
    process = journal.process()
    if process is None:
        return False
    try:
        os.kill(process, signal.SIGTERM)
    except OSError:
        return False
    return True


def _result_elsewhere(request: RunRequest, journal: RunJournal) -> dict[str, Any] | None:
    """The result of a run on an object store whose worker is on another machine with its own cache."""
    if not url_of(request.root):
        return None
    from infra.store.store import Store

    Store(request.root, reading=True).runs()
    return journal.result()


def _lost(request: RunRequest, message: str) -> dict[str, Any]:
    """A run that ended without a result: its process died, never started, or had no room to record more."""
    status = "cancelled" if message.startswith("Cancel") else "failed"
    description = f"the flow run ended without a result: {message}"
    problem = Problem("run_lost", request.config_path, description, "run again")
    if status == "failed" and request.root.exists() and shutil.disk_usage(request.root).free < RESERVED_BYTES:
        problem = Problem(
            "disk_full", str(request.root), f"the disk is full, and {description}", "free some space and run again"
        )
    return _without_result(request, status, problem)


def _left_alone(request: RunRequest) -> dict[str, Any]:
    """A run that its command no longer follows, and could not end."""
    message = "the Prefect server does not answer, so the run could not be cancelled: it may still start or continue"
    fix = "`stemma up` starts the server again; its page can cancel the run"
    return _without_result(request, "cancelled", Problem("not_cancelled", request.config_path, message, fix))


def _without_result(request: RunRequest, status: str, problem: Problem) -> dict[str, Any]:
    return {
        "status": status,
        "errors": [problem.as_json()],
        "config": request.config_path,
        "root": shown_root(request.root),
        "flow_run_id": None,
        "mlflow_run_id": None,
        "seconds": 0.0,
        "stages": [],
    }


def exit_code(document: dict[str, Any]) -> int:
    """The exit code for the document's status."""
    codes = {kind.status: kind.exit_code for kind in _error_kinds(StemmaError)}
    if any(error["code"] == "missing_upstream" for error in document["errors"]):
        return codes["invalid"]
    return 0 if document["status"] == "done" else codes.get(document["status"], 1)


def _error_kinds(kind: type[StemmaError]) -> Iterator[type[StemmaError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _error_kinds(narrower)


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once Ctrl-C or SIGTERM came, in place of an exception in the middle of the
    work."""
    heard = threading.Event()
    before = {number: signal.signal(number, lambda *_: heard.set()) for number in NUMBERS}
    if interrupt_received.is_set():
        heard.set()
    try:
        yield heard.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
