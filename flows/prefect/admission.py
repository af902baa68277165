"""Admission of a flow run, and the renewal of its place among the runs of its deployment.

A run may start by the code that it was deployed with, if its config still exists, and if it does not make up for a run
that was made up for already.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.concurrency import _leases
from prefect.runtime import flow_run
from prefect.states import AwaitingConcurrencySlot, Cancelled, Failed, State

from flows.prefect.schedules import CATCH_UP_TAG
from infra.errors import Problem
from infra.project import code_state

GRACE = timedelta(minutes=10)
"""A run that starts later than this after its date counts as missed."""
_WAITING = [StateType.SCHEDULED, StateType.PENDING]
# A later date may have started first, and even have ended while this run waited for it. But a retry is wanted.
_MADE_UP_FOR = [*_WAITING, StateType.RUNNING, StateType.COMPLETED, StateType.FAILED, StateType.CRASHED]


def turned_away(config_path: str, *, any_code: bool = False) -> State | None:
    """The state that a run of a deployment is to end with at once; None if it may start.

    Args:
        any_code: for deployments that `stemma deploy` did not make, and that run whatever code there is.
    """
    name = flow_run.get_id()
    if not name:
        return None
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(name)  # type: ignore[arg-type]
        if run.deployment_id is None:
            return None
        problem = None if any_code else _other_code(run, config_path)
        if problem := problem or _vanished(config_path):
            return Failed(message=str(problem))
        if reason := _missed(client, run):
            return Cancelled(message=reason)
    return None


def _other_code(run: FlowRun, config_path: str) -> Problem | None:
    local_commit = str(code_state()["commit"])
    deployed_commit = run.deployment_version or ""
    if not local_commit or not deployed_commit or local_commit == deployed_commit:
        return None
    return Problem(
        "other_code",
        "",
        f"this was deployed by code {deployed_commit[:12]}, and the worker has code {local_commit[:12]}",
        f"stemma deploy {config_path or 'CONFIG'} with the code that is to run it",
    )


def _vanished(config_path: str) -> Problem | None:
    path = Path(config_path)
    if not path.is_absolute() or path.is_file():
        return None
    return Problem(
        "config_vanished",
        config_path,
        "the config file that this was deployed from is gone",
        "put it back, or `stemma deploy` its replacement",
    )


def _missed(client: SyncPrefectClient, run: FlowRun) -> str:
    """Why a scheduled run that comes late is not to run; empty if it is."""
    policy = next((tag.removeprefix(CATCH_UP_TAG) for tag in run.tags if tag.startswith(CATCH_UP_TAG)), "all")
    due, now = run.expected_start_time, datetime.now(UTC)
    if not run.auto_scheduled or policy == "all" or due is None:
        return ""
    if policy == "none":
        # Who retries a run wants it, however long ago it was due.
        is_late = now - due > GRACE and run.run_count <= 1 and not _queued_in_time(client, run, due)
        return f"skipped: due at {due:%Y-%m-%d %H:%M} UTC and missed" if is_late else ""
    later = client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[run.deployment_id])),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_WAITING if run.run_count > 1 else _MADE_UP_FOR)),
            expected_start_time=FlowRunFilterExpectedStartTime(after_=due + timedelta(seconds=1), before_=now),
        ),
    )
    later = [other for other in later if other.auto_scheduled]
    return f"skipped: due at {due:%Y-%m-%d %H:%M} UTC, and a later date is due too, or was run" if later else ""


def _queued_in_time(client: SyncPrefectClient, run: FlowRun, due: datetime) -> bool:
    """Return True if a worker took the run up when it was due, and it has waited for another run to end since."""
    states, name = client.read_flow_run_states(run.id), AwaitingConcurrencySlot().name
    return any(state.name == name and state.timestamp - due <= GRACE for state in states)


RETRY_S = 15.0
LOST = "the slot of this run was not renewed; it continues, and another run of its deployment may begin"

_renew_until_it_fails = _leases._lease_renewal_loop
_log = logging.getLogger(__name__)


async def _renew_for_ever(lease_id: UUID, lease_duration: float) -> None:
    while True:
        try:
            await _renew_until_it_fails(lease_id, lease_duration)
        except Exception as error:
            _log.warning("%s (%s)", LOST, type(error).__name__)
            await asyncio.sleep(RETRY_S)


def keep_slots() -> None:
    """Make Prefect's engine in this process go on when a slot cannot be renewed."""
    _leases._lease_renewal_loop = _renew_for_ever
