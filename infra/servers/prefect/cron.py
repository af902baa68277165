"""Dates of a cron schedule, also on the days when clocks change.

Prefect 3.6 adds hours to the current time. A time that the clock skips in spring therefore comes an hour early, and a
skipped midnight comes on the day before (PrefectHQ/prefect#10678). Here cronsim computes the dates, as Debian's cron:

- A schedule that names its hours (`0 2 * * *`, `*/30 0-6 * * *`, `0 */6 * * *`) runs at the first moment after a gap,
  once for all dates in the gap, and in the first of two hours of the same name.
- One that runs in every hour (`*/15 * * * *`) follows elapsed time.

Days of the month and of the week are combined by Prefect's rule (`day_or`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from prefect._vendor.croniter import croniter
from prefect.server.schemas.schedules import MAX_ITERATIONS, CronSchedule, _prepare_scheduling_start_and_end
from prefect.types._datetime import create_datetime_instance, now

_prefect_dates = CronSchedule._get_dates_generator


def cron_dates(
    schedule: CronSchedule, n: int | None = None, start: datetime | None = None, end: datetime | None = None
) -> Iterator[datetime]:
    """Yield the dates of a schedule in ascending order, none for one that never fires.

    It takes the place of `CronSchedule._get_dates_generator`.

    Args:
        schedule: Schedule of Prefect's server.
        n: Maximum number of dates; by default 1, or `MAX_ITERATIONS` where there is an end.
        start: Earliest date, by default now.
        end: Latest date.
    """
    fields, nth_weekdays = croniter.expand(schedule.cron)
    if len(fields) != 5:  # with seconds or years, which cron does not support
        yield from _prefect_dates(schedule, n, start, end)
        return
    timezone = schedule.timezone or "UTC"
    first, last = _prepare_scheduling_start_and_end(start or now("UTC"), end, timezone)
    zone = ZoneInfo(timezone)
    begin = datetime.fromtimestamp(math.ceil(first.timestamp()) - 1, zone)
    day_before = datetime.fromtimestamp(begin.timestamp() - timedelta(days=1).total_seconds(), zone)
    # A date that a gap moved to `start` is earlier than `start` in local time.
    changed = begin.utcoffset() != day_before.utcoffset()
    try:
        dates = CronSim(_spelled_out(fields, nth_weekdays), day_before if changed else begin)
    except CronSimError:  # a day that occurs in none of the months
        return
    dates.day_and = not schedule.day_or or "*" in (fields[2][0], fields[4][0])
    moments: list[datetime] = []
    for date in dates:
        moment = date.astimezone(UTC)  # dates of one zone compare by local time
        if moment < first or moment in moments[-1:]:
            continue
        if last and moment > last:
            return
        moments.append(moment)
        yield create_datetime_instance(moment).astimezone(zone)
        if len(moments) == (n or (MAX_ITERATIONS if end else 1)):
            return


def _spelled_out(fields: Sequence[Sequence[int | str]], nth_weekdays: dict[int, set[int | str]]) -> str:
    """Return a cron expression whose fields are `*` or lists: cronsim treats a field that begins with a star, such as
    `*/6`, as every hour."""
    *other_fields, weekdays = [[str(value).upper() for value in field] for field in fields]
    if nth_weekdays:
        weekdays = [
            f"{day}L" if ordinal == "l" else f"{day}#{ordinal}"
            for day, whiches in nth_weekdays.items()
            for ordinal in whiches
        ]
    return " ".join(",".join(field) for field in (*other_fields, weekdays))
