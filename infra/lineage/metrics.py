"""Metric lines that a stage writes (the format of infra/run.py), and the points that such lines take back.

Points are deleted in MLflow's tables: its API has no way to, and shows both points of one step.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from infra.io.json import parse_own_json
from infra.lineage.also.copies import Copies
from infra.lineage.ledger import DeliveredRun, Ledger
from infra.lineage.tracking import database_uri

METRICS_A_BATCH = 1000
log = logging.getLogger("stemma.relay")

NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]")


@dataclass(frozen=True)
class MetricLine:
    """The figures of one line. time: seconds since the epoch; end: the offset in bytes behind the line.

    rewound_to: for a line that takes back, where what is undone begins (see infra/run.py).
    """

    time: float
    step: int
    values: dict[str, float]
    end: int
    rewound_to: int | None = None


def read_lines(path: Path, offset: int = 0) -> Iterator[MetricLine]:
    """Yield the complete lines after `offset`; a line that is still being written is left to the next call.

    Lines without metrics (progress, events) come as a Line without values, so that they count as read. Raises
    FileNotFoundError.
    """
    return _read(path, offset, "metric")


def undone_lines(path: Path, rewind: MetricLine) -> Iterator[MetricLine]:
    """The lines that `rewind`, a line of the same file, took back; others come without values."""
    assert rewind.rewound_to is not None
    for line in _read(path, rewind.rewound_to, "undone"):
        if line.end >= rewind.end:
            return
        yield line


def _read(path: Path, offset: int, kind: str) -> Iterator[MetricLine]:
    with open(path, "rb") as file:
        file.seek(offset)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            offset += len(raw)
            yield _parse(raw, offset, kind)


def _parse(raw: bytes, end: int, kind: str) -> MetricLine:
    try:
        line = parse_own_json(raw)
        if line.get("kind") == "rewind":
            return MetricLine(0.0, 0, {}, end, int(line["place"]))
        if line.get("kind", "metric") != kind:
            return MetricLine(0.0, 0, {}, end)
        figures = "values" if kind == "metric" else kind
        values = {NOT_IN_A_NAME.sub("_", name)[:250]: float(value) for name, value in line[figures].items()}
        return MetricLine(float(line["time"]), int(line["step"] or 0), values, end)
    except (ValueError, KeyError, TypeError, AttributeError):
        # Torn by a crash of its writer, which went on with a new line.
        return MetricLine(0.0, 0, {}, end)


LOCK_TIMEOUT_S = 60


class Point(NamedTuple):
    """A point of a metric. timestamp: milliseconds since the epoch."""

    name: str
    step: int
    timestamp: int


def delete_points(uri: str, run_id: str, points: Sequence[Point]) -> bool:
    """Delete those points of a run that exist, and update the latest value of each metric; all of it or nothing.

    Raises sqlalchemy.exc.OperationalError for a database that is locked or away.

    Returns False if the database does not contain the run.

    Args:
        uri: the database, whether or not a server works on it.
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


def remove_run(uri: str, run_id: str) -> None:
    """Remove a run for good; does nothing if there is none. MLflow's API only hides it, and `mlflow gc` needs seconds.

    Args:
        uri: the database, whether or not a server works on it.
    """
    with suppress(MlflowException):
        _database(uri)._hard_delete_run(run_id)


@cache
def _database(uri: str) -> Any:
    """MLflow's store on its database. Another one in each call would keep its memory."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    return SqlAlchemyStore(uri, "mlflow-artifacts:/")


class MetricsDelivery:
    """Send the metric lines of builds to a tracking store, from the position that the ledger recorded last."""

    def __init__(self, root: Path, client: MlflowClient, ledger: Ledger, copies: Copies | None = None) -> None:
        self._root = root
        self._client = client
        self._ledger = ledger
        self._copies = copies

    def follow(self) -> None:
        """Send the lines that were written to the followed files since the last call."""
        for build_id, path, offset in self._ledger.tails():
            run = self._ledger.run(build_id)
            if run and Path(path).exists():
                self._send_lines(run, Path(path), offset, follow=True)

    def send_last(self, run: DeliveredRun, metrics: str) -> None:
        """The rest of the followed file; if that is gone, of its copy in the artifact, or all of another file.

        Args:
            metrics: the file of the artifact; "" for none.
        """
        moved = Path(metrics) if metrics else None
        offset = 0
        for build_id, path, read in self._ledger.tails():
            if build_id == run.build_id:
                if Path(path).exists():
                    self._send_lines(run, Path(path), read, follow=True)
                    return
                offset = read if moved and moved.name == Path(path).name else 0
        if moved and moved.exists():
            self._send_lines(run, moved, offset, follow=False)

    def _send_lines(self, run: DeliveredRun, path: Path, offset: int, *, follow: bool) -> None:
        batch: list[Metric] = []
        end = 0

        def send() -> None:
            self.log(run.run_id, batch)
            if self._copies and batch:
                self._copies.metrics(run.build_id, [(m.key, m.step, m.value, m.timestamp / 1000) for m in batch])
            batch.clear()
            if follow and end:
                self._ledger.advance(run.build_id, end)

        for line in read_lines(path, offset):
            if batch and len(batch) + len(line.values) > METRICS_A_BATCH:
                send()
            if line.rewound_to is not None:
                send()
                self._undo_points(run, path, line)
            at_ms = milliseconds(line.time)
            batch += [Metric(name, value, at_ms, line.step) for name, value in line.values.items()]
            end = line.end
        send()

    def _undo_points(self, run: DeliveredRun, path: Path, rewind: MetricLine) -> None:
        """Delete the points that a training took back when it continued from an earlier step."""
        points = [
            Point(name, line.step, milliseconds(line.time))
            for line in undone_lines(path, rewind)
            for name in line.values
        ]
        if points and not delete_points(database_uri(self._root), run.run_id, points):
            # The server of another machine, with a database that we do not reach: at least say so.
            first, moment = min(point.step for point in points), max(point.timestamp for point in points)
            message = f"steps from {first} on were taken again; their points up to {moment} ms do not count"
            self._client.set_tag(run.run_id, f"stemma.taken_back.{rewind.end}", message)

    def log(self, run_id: str, metrics: list[Metric]) -> None:
        items = iter(metrics)
        while batch := list(islice(items, METRICS_A_BATCH)):
            try:
                self._client.log_batch(run_id, metrics=batch)
            except MlflowException as error:
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise
                self._log_one_by_one(run_id, batch)

    def _log_one_by_one(self, run_id: str, metrics: list[Metric]) -> None:
        """Log points one by one, except for those that MLflow never accepts, e.g. one whose name looks like a path."""
        for metric in metrics:
            try:
                self._client.log_batch(run_id, metrics=[metric])
            except MlflowException as error:
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise
                log.warning("left out metric %r of run %s: %s", metric.key, run_id, error)


def milliseconds(seconds: float) -> int:
    """Return a time in milliseconds, as MLflow counts it."""
    return round(seconds * 1000)
