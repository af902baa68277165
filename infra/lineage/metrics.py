"""Metric lines that a stage writes (the format of infra/run.py), and the points that such lines take back.

Points are deleted in MLflow's tables: its API has no way to, and shows both points of one step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]")


@dataclass(frozen=True)
class Line:
    """The figures of one line. time: seconds since the epoch; end: the offset in bytes behind the line.

    rewound_to: for a line that takes back, where what is undone begins (see infra/run.py).
    """

    time: float
    step: int
    values: dict[str, float]
    end: int
    rewound_to: int | None = None


def read_lines(path: Path, offset: int = 0) -> Iterator[Line]:
    """The whole lines behind `offset`; a line that is still being written waits for the next call.

    Lines that are no metrics (progress, events) come as a Line without values, so that they count as read. Raises
    FileNotFoundError.
    """
    return _read(path, offset, "metric")


def undone_lines(path: Path, rewind: Line) -> Iterator[Line]:
    """The lines that `rewind`, a line of the same file, took back; others come without values."""
    assert rewind.rewound_to is not None
    for line in _read(path, rewind.rewound_to, "undone"):
        if line.end >= rewind.end:
            return
        yield line


def _read(path: Path, offset: int, kind: str) -> Iterator[Line]:
    with open(path, "rb") as file:
        file.seek(offset)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            offset += len(raw)
            yield _parse(raw, offset, kind)


def _parse(raw: bytes, end: int, kind: str) -> Line:
    try:
        line = json.loads(raw)
        if line.get("kind") == "rewind":
            return Line(0.0, 0, {}, end, int(line["place"]))
        if line.get("kind", "metric") != kind:
            return Line(0.0, 0, {}, end)
        figures = "values" if kind == "metric" else kind
        values = {NOT_IN_A_NAME.sub("_", name)[:250]: float(value) for name, value in line[figures].items()}
        return Line(float(line["time"]), int(line["step"] or 0), values, end)
    except (ValueError, KeyError, TypeError, AttributeError):
        # Torn by a crash of its writer, which went on with a new line.
        return Line(0.0, 0, {}, end)


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
