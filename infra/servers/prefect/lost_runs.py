"""Lost flow runs: a service of our Prefect server that ends those whose process is gone.

A flow run that is Pending, Running or Cancelling keeps the slot of its schedule until it ends. If its process died with
its worker, its machine or its pod, nothing ends it: Prefect's worker knows only its own processes, and an automation
starts counting at an event that a young run never sent, or that was lost with the server. Here the state in the
database counts: if a working server receives neither a heartbeat nor a change of state of a run for `LOST_AFTER_S`, the
run has lost its process. It gets the end that its journal has, else Crashed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from docket import Depends, Perpetual
from prefect.logging import get_logger
from prefect.server import models
from prefect.server.database import PrefectDBInterface, provide_database_interface
from prefect.server.schemas.states import State, StateType
from prefect.server.services.perpetual_services import perpetual_service

from infra.servers.prefect.run_ends import recorded_end

LOST_AFTER_S = float(os.environ.get("STEMMA_LOST_AFTER_S", "120"))
"""Seconds of four heartbeats (`infra.servers.environment.HEARTBEAT`), since some are late on a busy machine. Tests use
less."""
ROUNDS = 8
"""Looks without a sign of life after which a run is lost. Counting looks, not seconds, spares the runs of a machine
that was suspended, and those of a server that has just started to listen."""
LOOK_EVERY_S = LOST_AFTER_S / ROUNDS

_BEAT = "prefect.flow-run.heartbeat"
_UNENDED = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)


@dataclass(frozen=True)
class _Sign:
    """The newest sign of life of a flow run: its state, and the time of its last heartbeat."""

    state_id: UUID | None
    beat: datetime | None


class LostRuns:
    """One server's view of the flow runs that have not ended. `runs` is the folder of the store's journals."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._silent: dict[UUID, tuple[_Sign, int]] = {}

    async def look(self, db: PrefectDBInterface) -> None:
        """Count another look for each run without a new sign of life, and end those that are lost by now."""
        signs = await _signs(db)
        before = self._silent
        self._silent = {
            run: (sign, before[run][1] + 1 if run in before and before[run][0] == sign else 0)
            for run, sign in signs.items()
        }
        for run, (sign, rounds) in self._silent.items():
            if rounds >= ROUNDS:
                await self._end(db, run, sign)

    async def _end(self, db: PrefectDBInterface, run_id: UUID, sign: _Sign) -> None:
        async with db.session_context(begin_transaction=True) as session:
            flow_runs: Any = models.flow_runs  # its decorators hide that these are coroutines
            run = await flow_runs.read_flow_run(session, run_id, for_update=True)
            if run is None or run.state is None or run.state_id != sign.state_id:
                return  # it has given one since
            state = self._final_state(str(run_id), run.state.type, run.state.timestamp)
            await flow_runs.set_flow_run_state(session, run_id, state, force=True)
        get_logger("stemma.server").warning("flow run %s is lost: %s", run_id, state.message)

    def _final_state(self, run_id: str, state: StateType, since: datetime) -> State:
        if end := recorded_end(self._runs, run_id, since):
            return State(type=StateType[end.type], message=end.message)
        silence = f"no sign of life from its process for {LOST_AFTER_S:g} s"
        if state == StateType.CANCELLING:
            return State(type=StateType.CANCELLED, message=f"{silence}, and its cancellation was requested")
        return State(type=StateType.CRASHED, message=f"{silence}; run it again")


async def _signs(db: PrefectDBInterface) -> Mapping[UUID, _Sign]:
    """Return the newest sign of each run that has not ended.

    A Pending run in a pool of another type than our workers' is left out: a pod may wait for its node for days, and
    Prefect's worker there watches it.
    """
    run, queue, pool = db.FlowRun, db.WorkQueue, db.WorkPool
    unended = (
        sa.select(run.id, run.state_id)
        .outerjoin(queue, run.work_queue_id == queue.id)
        .outerjoin(pool, queue.work_pool_id == pool.id)
        .where(run.state_type.in_(_UNENDED))
        .where(sa.or_(run.state_type != StateType.PENDING, pool.type.is_(None), pool.type == "process"))
    )
    async with db.session_context() as session:
        states = {row.id: row.state_id for row in (await session.execute(unended)).all()}
        names = [f"prefect.flow-run.{run_id}" for run_id in states]
        beats = (
            sa.select(db.Event.resource_id, sa.func.max(db.Event.occurred).label("beat"))
            .where(db.Event.event == _BEAT, db.Event.resource_id.in_(names))
            .group_by(db.Event.resource_id)
        )
        latest = {row.resource_id: row.beat for row in (await session.execute(beats)).all()} if names else {}
    return {run_id: _Sign(state_id, latest.get(f"prefect.flow-run.{run_id}")) for run_id, state_id in states.items()}


def end_lost_runs(runs: Path) -> None:
    """Register the service; to be called before the server starts.

    Args:
        runs: see `LostRuns`.
    """
    lost, interval = LostRuns(runs), timedelta(seconds=LOOK_EVERY_S)

    @perpetual_service(enabled_getter=lambda: True)
    async def lost_runs(
        db: PrefectDBInterface = Depends(provide_database_interface),  # noqa: B008 - how Prefect hands these in
        perpetual: Perpetual = Perpetual(automatic=False, every=interval),  # noqa: B008
    ) -> None:
        await lost.look(db)
