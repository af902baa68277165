"""The ledger of a pipeline run: each second of its devices under one kind and cause.

A run holds the devices of a stage while an attempt at it lasts. While no stage holds any, the devices that its stages
would use are idle: before the first stage, between attempts, while it waits for a lease or a turn.

    ledger = read_ledger(root, run_id)
    ledger.account.ettr, ledger.account.parts, ledger.account.recoveries
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from flows.runs.journal import RunJournal
from infra.ledger.account import Account, Part, add
from infra.ledger.attempts import Attempt, BuildTimes, times_of
from infra.ledger.record import read_lines
from infra.store.layout import LEDGER, RUN_TIMES

_OPEN = ("waiting", "running")


@dataclass(frozen=True)
class RunLedger:
    """Account of a run.

    wall_s: seconds from its beginning to its end, without those between its end and a retry. idle: the device-seconds
    in which no stage held a device, part of `account`. stages: the account of each stage that this run tried to build.
    """

    run_id: str
    pipeline: str
    wall_s: float
    account: Account
    idle: Account
    stages: Mapping[str, Account] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "pipeline": self.pipeline,
            "wall_s": round(self.wall_s, 3),
            **self.account.as_json(),
            "idle_s": round(self.idle.device_s, 3),
            "stages": {name: account.as_json() for name, account in self.stages.items()},
        }


def read_ledger(root: Path, run_id: str) -> RunLedger | None:
    """Return the ledger of a run; None for a run of a version that kept no record.

    A run that was killed ends with its last sign of life, and a run that still works with the current moment.

    Args:
        root: of the store; of a store on an object store its cache on this machine.
        run_id: the name of its folder below <root>/runs.
    """
    journal = RunJournal(root / "runs", run_id)
    lines = journal.read()
    if not lines or "ticks" not in lines[0]:
        return None
    builds = [times for path in _records(journal.folder) if (times := _times(root, path))]
    attempts = [attempt for times in builds for attempt in times.attempts if attempt.run == run_id]
    stages = dict.fromkeys(attempt.stage for attempt in attempts)
    accounts = {
        stage: add(times.account(run_id) for times in builds if times.attempts[-1].stage == stage) for stage in stages
    }
    now = time.monotonic() if journal.works() and journal.result() is None else None
    idle: list[Account] = []
    wall_s = 0.0
    segments = list(_segments(lines))
    for segment, following in zip(segments, [*segments[1:], None], strict=True):
        began = float(segment[0]["ticks"])
        machine = str(segment[0].get("machine", ""))
        until = float(following[0]["ticks"]) if following else math.inf
        here = [attempt for attempt in attempts if attempt.boot in machine and began <= attempt.began < until]
        ended = max(_last(segment, now), *(attempt.ended for attempt in here), began)
        idle.append(_idle(segment, here, began, ended))
        wall_s += ended - began
    total_idle = add(idle)
    return RunLedger(
        run_id, str(lines[0].get("pipeline", "")), wall_s, add([*accounts.values(), total_idle]), total_idle, accounts
    )


def write_ledger(root: Path, run_id: str) -> None:
    """Write the ledger of a run that ended into its folder, for readers that do not compute it, such as Prometheus."""
    ledger = read_ledger(root, run_id)
    if ledger is not None:
        path = root / "runs" / run_id / LEDGER
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(ledger.as_json(), indent=1), encoding="utf8")
        unfinished.replace(path)


def total(ledgers: Sequence[RunLedger]) -> Account:
    """Account of several runs, as of a campaign that started one after the other."""
    return add(ledger.account for ledger in ledgers)


def _records(folder: Path) -> list[Path]:
    return sorted((folder / RUN_TIMES).glob("*.jsonl"))


def _times(root: Path, path: Path) -> BuildTimes | None:
    lines = read_lines(path)
    build = next((str(line.get("build", "")) for line in reversed(lines) if line["kind"] == "attempt"), "")
    is_kept = bool(build) and ((root / ".work" / build).exists() or (root / build).exists())
    has_ended = bool(lines) and lines[-1]["kind"] == "end" and not lines[-1].get("cause")
    return times_of(lines, is_kept=is_kept or has_ended)


def _segments(lines: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the lines of each beginning of a run: a retry begins it again."""
    segment: list[Mapping[str, Any]] = []
    for line in lines:
        if "ticks" not in line:
            continue
        if line["kind"] == "begin" and segment:
            yield segment
            segment = []
        segment.append(line)
    if segment:
        yield segment


def _last(segment: Sequence[Mapping[str, Any]], now: float | None) -> float:
    ended = next((float(line["ticks"]) for line in segment if line["kind"] == "end"), None)
    if ended is not None:
        return ended
    return max([float(line["ticks"]) for line in segment] + ([now] if now is not None else []))


def _idle(segment: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt], began: float, ended: float) -> Account:
    """Account of the seconds in which no stage held a device."""
    labels = [*_spans(segment, ended), *_waits(attempts)]
    cuts = {began, ended}
    for start, stop, *_ in labels:
        cuts |= {min(max(start, began), ended), min(max(stop, began), ended)}
    for attempt in attempts:
        cuts |= {min(max(attempt.began, began), ended), min(max(attempt.ended, began), ended)}
    devices = {attempt.stage: attempt.devices for attempt in attempts}
    parts: dict[Part, float] = {}
    moments = sorted(cuts)
    for start, stop in pairwise(moments):
        middle = (start + stop) / 2
        if any(attempt.began <= middle < attempt.ended for attempt in attempts):
            continue
        # The last label is the most precise; the stage with most devices is the one that is missed.
        here = [label for label in labels if label[0] <= middle < label[1]]
        most = max((devices.get(stage, 1) for _, _, stage, _ in here), default=1)
        causes = [cause for _, _, stage, cause in here if devices.get(stage, 1) == most]
        part: Part = ("waiting", causes[-1] if causes else "start-up")
        parts[part] = parts.get(part, 0.0) + (stop - start) * most
    return replace(Account(), parts=parts, device_s=sum(parts.values()))


def _spans(segment: Sequence[Mapping[str, Any]], ended: float) -> Iterator[tuple[float, float, str, str]]:
    """Yield (from, to, stage, cause) for the time in which a stage was looked up, built or committed."""
    running: dict[str, tuple[float, str]] = {}
    for line in segment:
        stage, ticks = str(line.get("stage", "")), float(line["ticks"])
        if line["kind"] == "stage" and line["status"] == "running":
            running[stage] = (ticks, "store")
        elif line["kind"] == "event" and line.get("name") == "waiting" and stage in running:
            yield running[stage][0], ticks, stage, running[stage][1]
            running[stage] = (ticks, "lease")
        elif line["kind"] == "stage" and line["status"] not in _OPEN and stage in running:
            since, cause = running.pop(stage)
            yield since, ticks, stage, cause
    for stage, (since, cause) in running.items():
        yield since, ended, stage, cause


def _waits(attempts: Sequence[Attempt]) -> Iterator[tuple[float, float, str, str]]:
    """Yield the same for what came before each attempt: the pause after one that failed, and what it waited for."""
    before: dict[str, float] = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt.began):
        stage = attempt.stage
        if stage in before:
            yield before[stage], attempt.began, stage, "retry"
        before[stage] = attempt.ended
        until = attempt.began
        for cause, seconds in reversed(list(attempt.waited.items())):
            yield until - seconds, until, stage, cause
            until -= seconds
