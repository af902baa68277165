"""Background services of Prefect's server: the purpose of each, its interval here, and why that is long enough.

Each look costs some milliseconds of processor time, whether or not there is anything to do. Prefect's intervals suit a
server of its own machine; ours shares the machine with trainings.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServiceInterval:
    """Seconds between two looks of a service.

    variable: of the setting, after PREFECT_SERVER_.
    prefect: Prefect's default.
    purpose, because: one sentence each.
    """

    variable: str
    prefect: float
    seconds: float
    purpose: str
    because: str


INTERVALS = (
    ServiceInterval(
        "SERVICES_SCHEDULER_RECENT_DEPLOYMENTS_LOOP_SECONDS",
        5,
        15,
        "Creates the next runs of a schedule that is new or was changed.",
        "No schedule of a pipeline fires within 15 seconds of its creation; runs started by hand do not need it.",
    ),
    ServiceInterval(
        "SERVICES_LATE_RUNS_LOOP_SECONDS",
        5,
        10,
        "Marks runs as Late that no worker has taken 15 seconds after their time.",
        "The mark is for people and notices. It comes up to 25 seconds after the run's time instead of 20.",
    ),
    ServiceInterval(
        "SERVICES_PAUSE_EXPIRATIONS_LOOP_SECONDS",
        5,
        60,
        "Fails runs whose pause has timed out.",
        "Flows of this project do not pause; pauses of other flows last for minutes or hours.",
    ),
    ServiceInterval(
        "SERVICES_CANCELLATION_CLEANUP_LOOP_SECONDS",
        20,
        60,
        "Cancels tasks and subflows that a cancelled run left behind, in two services.",
        "Runs of this project end their own tasks first, and have no subflows.",
    ),
    ServiceInterval(
        "SERVICES_FOREMAN_LOOP_SECONDS",
        15,
        30,
        "Shows workers and queues as offline in the page once they are silent.",
        "A worker counts as silent after 90 seconds. Lost runs are found by `lost_runs`, which does not depend on it.",
    ),
    ServiceInterval(
        "SERVICES_REPOSSESSOR_LOOP_SECONDS",
        15,
        30,
        "Frees concurrency slots whose holder has not renewed them.",
        "A slot is freed when its run ends; this is for runs that could not, after their lease of minutes.",
    ),
)
"""Services that look less often. Unchanged: the scheduler (every 60 s), the removal of old events (every hour), and
those that wait for events: task runs, events, logs, triggers and actions of automations. Telemetry is off."""

PROACTIVE_S = 20
"""Seconds between two evaluations of automations that wait for something *not* to happen; 5 by default. Those of this
project react to events, which arrive at once; a person's may come up to 20 seconds late."""


DAY_S = 86400
EVENT_DAYS = 2
"""7 by default. Events start automations, at once, and draw the timeline of a run; they take 0.1 MB a run."""


def retention(keep_days: int) -> dict[str, str]:
    """Return the variables of a server that removes flow runs that ended so long ago, with their tasks and logs.

    Args:
        keep_days: 0 keeps all runs, as Prefect does by default.
    """
    if not keep_days:
        return {}
    return {
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(keep_days * DAY_S),
        "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": f"P{min(keep_days, EVENT_DAYS)}D",
    }


def intervals() -> dict[str, str]:
    """Return the variables of a server with these intervals."""
    variables = {f"PREFECT_SERVER_{row.variable}": f"{row.seconds:g}" for row in INTERVALS}
    return variables | {"PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": f"PT{PROACTIVE_S}S"}
