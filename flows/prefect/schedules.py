"""A pipeline's schedule: what is asked for, what the server has, and switching it off and on."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from zoneinfo import available_timezones

from prefect._vendor.croniter import croniter
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.schedules import Cron
from pydantic import ValidationError

from flows.runs.journal import PIPELINE
from infra.errors import ConfigError, Problem

LONGEST_MONTH = {month: 29 if month == 2 else 30 if month in (4, 6, 9, 11) else 31 for month in range(1, 13)}
EXPECTED = 'expected five fields, minute hour day month weekday, e.g. "0 2 * * *" for 2:00 every day'


def next_dates(cron: str, timezone: str, count: int = 3, start: datetime | None = None) -> list[datetime]:
    """The next times of a cron expression, with their offset from UTC, as the server computes them.

    Raises ConfigError for an unknown time zone, for what is no cron expression, and for one that never fires.

    Args:
        start: the earliest; now by default.
    """
    # Every run imports this file; importing Prefect's server takes two seconds and more.
    from prefect.server.schemas.schedules import CronSchedule

    from infra.servers.prefect.cron import cron_dates

    if timezone not in available_timezones():
        near = difflib.get_close_matches(timezone, available_timezones(), n=1, cutoff=0.5)
        fix = f"did you mean {near[0]}?" if near else "expected an IANA name, e.g. Europe/Berlin"
        raise ConfigError(Problem("bad_timezone", "--timezone", f"there is no time zone {timezone!r}", fix))
    if len(cron.split()) != 5:
        raise ConfigError(Problem("bad_cron", "--cron", f"{cron!r} has {len(cron.split())} fields", EXPECTED))
    try:
        if dates := list(cron_dates(CronSchedule(cron=cron, timezone=timezone), count, start)):
            return list(dates)
        raise ConfigError(Problem("never_fires", "--cron", _why_never(cron), "choose dates that exist"))
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(Problem("bad_cron", "--cron", f"{cron!r}: {reason}", EXPECTED)) from None


def _why_never(cron: str) -> str:
    fields, _ = croniter.expand(cron)
    days, months = _numbers(fields[2]), _numbers(fields[3]) or list(LONGEST_MONTH)
    longest = max(LONGEST_MONTH[month] for month in months)
    if days and min(days) > longest:
        message = ", ".join(datetime(2000, month, 1).strftime("%B") for month in months)
        return f"{cron!r} never fires: it asks for day {min(days)}, and {message} has at most {longest} days"
    return f"{cron!r} never fires: no date within 50 years fits all of its fields"


def _numbers(field: Sequence[object]) -> list[int]:
    """A field's values, empty where it is `*`."""
    return [value for value in field if isinstance(value, int)]


Overlap = Literal["queue", "skip"]
CatchUp = Literal["latest", "all", "none"]
CATCH_UP_TAG = "catch-up:"
_STRATEGIES = {"queue": ConcurrencyLimitStrategy.ENQUEUE, "skip": ConcurrencyLimitStrategy.CANCEL_NEW}


@dataclass(frozen=True)
class Schedule:
    """Schedule on which a pipeline runs by itself.

    timezone: an IANA name. overlap: what a run does that is due while another of the pipeline runs: wait for it, or
    not run. catch_up: which of the dates that were missed, because nothing ran, are made up for: the latest one, all,
    or none.
    """

    cron: str
    timezone: str = "UTC"
    overlap: Overlap = "queue"
    catch_up: CatchUp = "latest"


@dataclass(frozen=True)
class Timing:
    """The parts of a deployment that belong to its schedule, in Prefect's terms."""

    schedules: Sequence[Any] = ()
    limit: ConcurrencyLimitConfig | None = None
    tags: Sequence[str] = ()


def timing_of(schedule: Schedule) -> Timing:
    """Raise ConfigError for a schedule that never fires or is none."""
    next_dates(schedule.cron, schedule.timezone)
    return Timing(
        [Cron(schedule.cron, timezone=schedule.timezone)],
        ConcurrencyLimitConfig(limit=1, collision_strategy=_STRATEGIES[schedule.overlap]),
        [f"{CATCH_UP_TAG}{schedule.catch_up}"],
    )


def timing_by_now(deployment: str) -> Timing:
    """The current timing of a deployment; Prefect would drop it if the deployment were made again without it."""
    with get_client(sync_client=True) as client:
        try:
            deployed = client.read_deployment_by_name(deployment)
        except ObjectNotFound:
            return Timing()
    kept = ("schedule", "active", "parameters", "slug", "max_scheduled_runs")
    schedules = [
        DeploymentScheduleCreate(**{key: getattr(item, key) for key in kept if hasattr(item, key)})
        for item in deployed.schedules
    ]
    options, limit = deployed.concurrency_options, deployed.global_concurrency_limit
    strategy = options.collision_strategy if options else ConcurrencyLimitStrategy.ENQUEUE
    return Timing(
        schedules,
        ConcurrencyLimitConfig(limit=limit.limit, collision_strategy=strategy) if limit else None,
        [tag for tag in deployed.tags if tag.startswith(CATCH_UP_TAG)],
    )


def schedule_rows(pipeline: str) -> list[dict[str, Any]]:
    """The schedules of a pipeline, each with its next dates; empty if it has none.

    Raises ConfigError if the pipeline is not deployed.
    """
    with get_client(sync_client=True) as client:
        return _rows(_deployment(client, pipeline))


def switch(pipeline: str, *, active: bool) -> list[dict[str, Any]]:
    """Pause or resume a pipeline's schedules; runs that have begun go on. Returns its schedules after the change.

    Raises ConfigError if the pipeline is not deployed or has no schedule.
    """
    with get_client(sync_client=True) as client:
        deployment = _deployment(client, pipeline)
        if not deployment.schedules:
            fix = f'stemma deploy CONFIG --cron "0 2 * * *" gives {pipeline} one'
            raise ConfigError(Problem("no_schedule", pipeline, "this pipeline has no schedule", fix))
        for item in deployment.schedules:
            client.update_deployment_schedule(deployment.id, item.id, active)
        return _rows(_deployment(client, pipeline))


def _deployment(client: SyncPrefectClient, pipeline: str) -> DeploymentResponse:
    try:
        return client.read_deployment_by_name(f"{pipeline}/{PIPELINE}")
    except ObjectNotFound:
        message = "this pipeline is not deployed"
        raise ConfigError(Problem("not_deployed", pipeline, message, "stemma deploy CONFIG")) from None


def _rows(deployment: DeploymentResponse) -> list[dict[str, Any]]:
    strategy = deployment.concurrency_options.collision_strategy if deployment.concurrency_options else None
    tags = [tag.removeprefix(CATCH_UP_TAG) for tag in deployment.tags if tag.startswith(CATCH_UP_TAG)]
    rows = []
    for item in deployment.schedules:
        cron, timezone = getattr(item.schedule, "cron", ""), getattr(item.schedule, "timezone", None) or "UTC"
        dates = next_dates(cron, timezone) if cron and item.active else []
        rows.append(
            {
                "cron": cron or str(item.schedule),
                "timezone": timezone,
                "active": item.active,
                "overlap": "skip" if strategy == ConcurrencyLimitStrategy.CANCEL_NEW else "queue",
                "catch_up": tags[0] if tags else "all",
                "next": [date.isoformat(timespec="minutes") for date in dates],
            }
        )
    return rows
