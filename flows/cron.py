"""When a schedule fires, and why one never would."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Sequence
from datetime import datetime
from zoneinfo import available_timezones

from prefect._vendor.croniter import CroniterBadDateError, croniter
from pydantic import ValidationError

from infra.errors import ConfigError, Problem

LONGEST_MONTH = {month: 29 if month == 2 else 30 if month in (4, 6, 9, 11) else 31 for month in range(1, 13)}
EXPECTED = 'five fields were expected, minute hour day month weekday, e.g. "0 2 * * *" for 2:00 every day'


def next_dates(cron: str, timezone: str, count: int = 3) -> list[datetime]:
    """The next times of a cron expression, with their offset from UTC.

    Raises ConfigError for an unknown time zone, for what is no cron expression, and for one that never fires.
    """
    # Every run imports this file; importing Prefect's server takes two seconds and more.
    from prefect.server.schemas.schedules import CronSchedule

    if timezone not in available_timezones():
        near = difflib.get_close_matches(timezone, available_timezones(), n=1, cutoff=0.5)
        fix = f"did you mean {near[0]}?" if near else "an IANA name was expected, e.g. Europe/Berlin"
        raise ConfigError(Problem("bad_timezone", "--timezone", f"there is no time zone {timezone!r}", fix))
    if len(cron.split()) != 5:
        raise ConfigError(Problem("bad_cron", "--cron", f"{cron!r} has {len(cron.split())} fields", EXPECTED))
    try:
        schedule = CronSchedule(cron=cron, timezone=timezone)
        return list(asyncio.run(schedule.get_dates(count)))
    except CroniterBadDateError:
        raise ConfigError(Problem("never_fires", "--cron", _why_never(cron), "choose days that come")) from None
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
