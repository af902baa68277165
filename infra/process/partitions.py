"""Work that is done partition by partition: on several processes, continued where it was interrupted.

A partition is one item of work, e.g. a Parquet part of 16 MB of text. Its results are in their own folder,
`work_dir/step/NNNNN`, which gets its name when they are complete, so a crash loses only the partitions in progress.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from infra.io.json import parse_own_json, read_own_json
from infra.process.pace import Pace, read_reports, report_file
from infra.process.workers import map_locally
from infra.run import Run

Item = TypeVar("Item")
Summary = Mapping[str, Any]
PartitionFunction = Callable[[Item, Path], Summary]

DONE = "done.json"


@dataclass(frozen=True)
class Partition:
    """One item with the folder for its results. `key` distinguishes it from other work that had the same folder."""

    item: Any
    folder: Path
    key: str


@dataclass(frozen=True)
class Work:
    """Function that processes one partition; picklable, so that it can be sent to another process or machine."""

    function: PartitionFunction

    def __call__(self, partition: Partition) -> Summary:
        unfinished = partition.folder.with_name(f"{partition.folder.name}.unfinished")
        for leftover in (unfinished, partition.folder):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished.mkdir(parents=True)
        summary = json.dumps(self.function(partition.item, unfinished), allow_nan=False)
        done = {"key": partition.key, "summary": parse_own_json(summary), "sizes": _sizes(unfinished)}
        (unfinished / DONE).write_text(json.dumps(done), encoding="utf8")
        unfinished.rename(partition.folder)
        report_file(unfinished).unlink(missing_ok=True)
        return done["summary"]


def map_partitions(
    run: Run,
    step: str,
    function: PartitionFunction,
    items: Sequence[Any],
    *,
    unit: str = "partitions",
    sizes: Sequence[float] | None = None,
) -> list[Summary]:
    """Return the results of `function(item, out)` for each item, in item order whatever the number of workers.

    function: writes its results into the empty folder `out`, `partition_folder(run, step, index)` afterwards, and
        returns a JSON-able mapping. It is picklable: a function of a module, or a `functools.partial` of one. It may
        call `infra.process.pace.report(out, …)` to say how far it is.
    items: picklable, without sets (an item is recognised after a crash by its pickle).
    unit, sizes: what progress counts, and how many of it each item holds, e.g. "documents"; without `sizes` progress
        counts partitions.

    Partitions that an earlier, interrupted build finished are not done again. The work runs on `run.launch.workers`
    processes, or wherever `run.mapper` brings it. The error of the first item that fails is raised unchanged, once
    the items in progress have ended. Raises StageError `killed` if a process died, Cancelled if the run was.
    """
    partitions = [
        Partition(item, partition_folder(run, step, index), key)
        for index, (item, key) in enumerate(zip(items, _keys(function, items), strict=True))
    ]
    summaries: dict[int, Summary] = {}
    for index, partition in enumerate(partitions):
        if (summary := _finished(partition)) is not None:
            summaries[index] = summary
    if summaries:
        message = f"continuing {step}: {len(summaries):,} of {len(partitions):,} partitions are done"
        run.event("continued", message, step=step, done=len(summaries), total=len(partitions))
    pending = [index for index in range(len(partitions)) if index not in summaries]
    sizes = sizes if sizes is not None else [1] * len(partitions)
    mapper = run.mapper or map_locally(run.launch.workers)
    with Pace(run, unit, sum(sizes), done=sum(sizes[index] for index in summaries)) as pace:
        watched = [report_file(partitions[index].folder.with_suffix(".unfinished")) for index in pending]
        pace.watch(lambda: read_reports(watched))

        def on_done(position: int, summary: Summary) -> None:
            summaries[pending[position]] = summary
            documents = 0 if unit == "documents" else summary.get("documents", 0)
            if run.times:
                run.times.keep()
            pace.add(sizes[pending[position]], summary.get("bytes", 0), documents)

        mapper(Work(function), [partitions[index] for index in pending], run.stop_if_cancelled, on_done)
    return [summaries[index] for index in range(len(partitions))]


def partition_folder(run: Run, step: str, index: int) -> Path:
    """Return the folder of an item's results once it is done."""
    return run.work_dir / step / f"{index:05}"


def _finished(partition: Partition) -> Summary | None:
    try:
        done = read_own_json(partition.folder / DONE)
    except (OSError, ValueError):
        return None
    # A power cut may have kept the names and this note, and not all that was written before it.
    is_whole = done.get("sizes") in (None, _sizes(partition.folder))
    return done["summary"] if done["key"] == partition.key and is_whole else None


def _sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file of a partition, except for the note that it is done."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / DONE)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _keys(function: PartitionFunction, items: Sequence[Any]) -> Iterator[str]:
    """Name each piece of work the same in every process."""
    # Once for all items: what a function carries may be large.
    shared = _stable(function)
    for item in items:
        yield hashlib.sha256(shared + _stable(item)).hexdigest()


def _stable(value: Any) -> bytes:
    """Return the digest of a value's pickle."""
    buffer = io.BytesIO()
    pickler = _StablePickler(buffer)
    # Without the memo, equal strings pickle alike whether or not they are one object.
    pickler.fast = True
    pickler.dump(value)
    return hashlib.sha256(buffer.getvalue()).digest()


class _StablePickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        # A config carries the set of the fields that were given, whose order differs from process to process.
        if isinstance(obj, BaseModel):
            return str, (f"{type(obj).__qualname__} {obj.model_dump_json()}",)
        return NotImplemented
