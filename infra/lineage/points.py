"""Deletes single points of metrics in MLflow's tables: its API has no way to, and shows both points of one step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

LOCK_TIMEOUT_S = 60


class Point(NamedTuple):
    """A point of a metric. timestamp: milliseconds since the epoch."""

    name: str
    step: int
    timestamp: int


def delete_points(uri: str, run_id: str, points: Sequence[Point]) -> bool:
    """Deletes the points of a run that are there, and sets the newest value of each metric anew; all of it or nothing.

    uri: the database, whether or not a server works on it. False where that does not know the run.

    Raises sqlalchemy.exc.OperationalError for a database that is locked or away.
    """
    import sqlalchemy
    from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric, SqlRun
    from sqlalchemy import bindparam, delete, select

    sqlite = uri.startswith("sqlite:///")
    if sqlite and not Path(uri.removeprefix("sqlite:///")).exists():
        return False
    patience = {"timeout": LOCK_TIMEOUT_S} if sqlite else {}
    engine = sqlalchemy.create_engine(uri, poolclass=sqlalchemy.pool.NullPool, connect_args=patience)
    metrics, latest, runs = SqlMetric.__table__, SqlLatestMetric.__table__, SqlRun.__table__
    with engine.begin() as connection:
        if connection.execute(select(runs.c.run_uuid).where(runs.c.run_uuid == run_id)).first() is None:
            return False
        connection.execute(
            delete(metrics).where(
                metrics.c.run_uuid == run_id,
                metrics.c.key == bindparam("name"),
                metrics.c.timestamp == bindparam("at"),
                metrics.c.step == bindparam("taken_at"),
            ),
            [{"name": point.name, "at": point.timestamp, "taken_at": point.step} for point in points],
        )
        for name in {point.name for point in points}:
            connection.execute(delete(latest).where(latest.c.run_uuid == run_id, latest.c.key == name))
            columns = [metrics.c[column.name] for column in latest.c]
            newest = (
                select(*columns)
                .where(metrics.c.run_uuid == run_id, metrics.c.key == name)
                .order_by(metrics.c.step.desc(), metrics.c.timestamp.desc(), metrics.c.value.desc())
                .limit(1)
            )
            connection.execute(latest.insert().from_select([column.name for column in latest.c], newest))
    return True
