"""Reads the record of a build's attempts: each second of each under one kind and cause."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infra.ledger.account import WAITS, Account, Kind, Part, Recovery, add
from infra.ledger.record import read_lines, this_clock

KILLED = "killed"
"""The cause of an attempt that left no end: it was killed with its builder, or its machine was lost."""
DISCARDED = "discarded"
"""The cause of work whose folder was removed before it ended in an artifact."""
OPEN_S = 5.0
"""Seconds without a sign of life after which an attempt without an end counts as killed."""
_NOT_HELD = ("queue",)
"""Waits within an attempt during which it holds no device that costs money or power."""


@dataclass
class _Piece:
    """Seconds of an attempt. first, last: the batches that they took, for steps; None for other work."""

    seconds: float
    kind: Kind
    cause: str = ""
    key: str = ""
    first: int | None = None
    last: int | None = None
    tokens: float = 0.0


@dataclass
class _AttemptFault:
    cause: str
    ticks: float
    time: float
    boot: str
    run: str
    stage: str
    reached: dict[str, int]
    seconds: float | None = None

    def since(self, moment: _Moment) -> float:
        """Seconds from the fault to a later moment; by wall clocks if the machine was another, or started again."""
        if moment.boot == self.boot:
            return max(0.0, moment.ticks - self.ticks)
        return max(0.0, moment.time - self.time)


@dataclass(frozen=True)
class _Moment:
    ticks: float
    time: float
    boot: str


@dataclass
class Attempt:
    """One attempt at a build.

    run: id of the pipeline run. began, ended: ticks of the builder's machine; `ended` of an attempt that still runs is
    that of its last sign of life. cause: "" if it built its artifact or still runs. waited: seconds before it began, by
    what it waited for.
    """

    run: str
    stage: str
    devices: int
    began: float
    ended: float
    boot: str
    cause: str
    is_open: bool
    waited: Mapping[str, float]
    rates: Mapping[str, Any]
    pieces: list[_Piece] = field(default_factory=list)
    measured_j: float = 0.0
    measured_s: float = 0.0
    restarts: int = 0

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def account(self, faults: Iterable[_AttemptFault]) -> Account:
        """Account of the attempt with its faults."""
        parts: dict[Part, float] = {}
        for piece in self.pieces:
            part = (piece.kind, piece.cause)
            parts[part] = parts.get(part, 0.0) + piece.seconds * self.devices
        held_s = self.seconds * self.devices - sum(parts.get(("waiting", cause), 0.0) for cause in _NOT_HELD)
        overhead = float(self.rates.get("overhead", 1.0))
        measured_j = self.measured_j * self.devices * overhead
        estimated_s = max(0.0, held_s - self.measured_s * self.devices)
        watts, usd_per_hour = self.rates.get("watts"), self.rates.get("usd_per_hour")
        energy_j = measured_j + estimated_s * float(watts or 0.0) * overhead
        return Account(
            parts,
            self.seconds * self.devices,
            energy_j,
            measured_j,
            energy_j / 3.6e6 * float(self.rates.get("kg_per_kwh", 0.0)),
            held_s / 3600 * float(usd_per_hour or 0.0),
            sum(piece.tokens for piece in self.pieces if piece.kind == "useful"),
            1,
            self.restarts,
            held_s if usd_per_hour is None else 0.0,
            estimated_s if watts is None else 0.0,
            tuple(Recovery(fault.cause, fault.seconds, fault.stage) for fault in faults),
        )


@dataclass(frozen=True)
class BuildTimes:
    """The attempts of one build, of which several runs may have made some each."""

    attempts: Sequence[Attempt]
    faults: Sequence[_AttemptFault]

    def account(self, run: str = "") -> Account:
        """Account of all attempts, or of those of one run."""
        of_run = [attempt for attempt in self.attempts if run in ("", attempt.run)]
        faults = [fault for fault in self.faults if run in ("", fault.run)]
        total = add(attempt.account(()) for attempt in of_run)
        recoveries = tuple(Recovery(fault.cause, fault.seconds, fault.stage) for fault in faults)
        retries = max(0, len(of_run) - 1)
        return replace(total, restarts=total.restarts + retries, recoveries=recoveries)


def read_times(path: Path, *, is_kept: bool = True) -> BuildTimes | None:
    """Read a record; None if there is none, as for artifacts of versions that kept no record.

    Args:
        is_kept: False if the build's work folder was removed and it has no artifact: none of its work counts.
    """
    return times_of(read_lines(path), is_kept=is_kept)


def times_of(lines: Sequence[Mapping[str, Any]], *, is_kept: bool = True) -> BuildTimes | None:
    """Do the same for the lines of a record."""
    grouped: list[list[Mapping[str, Any]]] = []
    for line in lines:
        if line["kind"] == "attempt":
            grouped.append([line])
        elif grouped:
            grouped[-1].append(line)
    if not grouped:
        return None
    reader = _Reader()
    attempts = [reader.read(group) for group in grouped]
    last = attempts[-1]
    if not is_kept:
        reader.lose(attempts, {}, DISCARDED)
    elif last.cause:
        reader.lose(attempts, reader.saved, last.cause)
    return BuildTimes(attempts, reader.faults)


class _Reader:
    """State of a build from one attempt to the next: the batches that were reached, and the faults so far."""

    def __init__(self) -> None:
        self.reached: dict[str, int] = {}
        self.tokens: dict[str, float] = {}
        self.saved: dict[str, int] = {}
        self.faults: list[_AttemptFault] = []

    def read(self, lines: Sequence[Mapping[str, Any]]) -> Attempt:
        first = lines[0]
        attempt = _attempt_of(first, lines)
        cursor, started = attempt.began, False
        kept = 0
        for line in lines[1:]:
            moment = _moment(line, first)
            now = min(max(cursor, moment.ticks), attempt.ended)
            span, cursor = now - cursor, now
            pieces = attempt.pieces
            match line["kind"]:
                case "work":
                    pieces.append(_Piece(span, "waiting", "start-up"))
                    started = not first.get("trains")
                    if started:
                        self._mend(moment)
                case "loop":
                    pieces.append(_Piece(span, "useful" if started else "waiting", "" if started else "start-up"))
                    started = True
                    self._continue(attempt, line)
                case "spent":
                    self._spend(attempt, line, span, started)
                    if line.get("to"):
                        self._mend(moment, str(line.get("key", "")), int(line["to"]))
                case "fault":
                    cause = str(line.get("cause") or KILLED)
                    pieces.append(_Piece(span, "lost", cause))
                    self._fault(attempt, cause, moment)
                    attempt.restarts += cause != "rollback"
                    started = False
                case "end":
                    if attempt.cause:
                        pieces.append(_Piece(span, "lost", attempt.cause))
                    else:
                        pieces.append(_Piece(span, "useful" if started else "waiting", "" if started else "start-up"))
                        self._mend(moment, built=True)
                case _:  # "kept", "done"
                    pieces.append(_Piece(span, "useful" if started else "waiting", "" if started else "start-up"))
            if line["kind"] == "kept":
                kept = len(pieces)
            attempt.measured_j += float(line.get("joules", 0.0))
            attempt.measured_s += float(line.get("joules_s", 0.0))
        if attempt.ended > cursor:  # no line of an end
            rest: tuple[Kind, str] = ("lost", attempt.cause) if attempt.cause else ("useful", "")
            if attempt.is_open and not started:
                rest = ("waiting", "start-up")
            attempt.pieces.append(_Piece(attempt.ended - cursor, *rest))
        if attempt.cause:
            # Work without steps that no file keeps is done again by the next attempt.
            for piece in attempt.pieces[kept:]:
                if piece.kind == "useful" and piece.last is None:
                    piece.kind, piece.cause = "lost", attempt.cause
            if attempt.cause != "cancelled":
                end = lines[-1] if lines[-1]["kind"] == "end" else first
                wall = float(first["time"]) + attempt.seconds if end is first else float(end["time"])
                self._fault(attempt, attempt.cause, _Moment(attempt.ended, wall, attempt.boot))
        return attempt

    def _continue(self, attempt: Attempt, line: Mapping[str, Any]) -> None:
        """Take over steps that a checkpoint has and no line: their process was killed before it wrote one. Their
        seconds are under that fault."""
        key, batch, token = str(line.get("key", "")), int(line.get("batch", 0)), float(line.get("token", 0.0))
        # The first loop of a training that continues another one begins with that one's batches.
        reached = self.reached.setdefault(key, batch)
        tokens = token - self.tokens.setdefault(key, token)
        if batch > reached:
            attempt.pieces.append(_Piece(0.0, "useful", "", key, reached, batch, tokens))
            self.reached[key], self.tokens[key] = batch, token

    def _spend(self, attempt: Attempt, line: Mapping[str, Any], span: float, started: bool) -> None:
        seconds = {str(name): max(0.0, float(value)) for name, value in line.get("seconds", {}).items()}
        given = sum(seconds.values())
        scale = min(1.0, span / given) if given else 0.0
        step_s = seconds.pop("step", 0.0) * scale
        for cause, value in seconds.items():
            attempt.pieces.append(_Piece(value * scale, "waiting", cause if cause in WAITS else "data"))
        rest = max(0.0, span - given * scale)
        if line.get("to") is None:
            attempt.pieces.append(_Piece(step_s, "useful"))
            kind: Kind = "useful" if started else "waiting"
            attempt.pieces.append(_Piece(rest, kind, "" if started else "start-up"))
            return
        # Evaluation between steps is part of them.
        key, first, last = str(line.get("key", "")), int(line["from"]), int(line["to"])
        self.saved[key] = int(line.get("saved", 0))
        reached = min(max(self.reached.get(key, 0), first), last)
        again = (reached - first) / (last - first) if last > first else 0.0
        total, tokens = step_s + rest, float(line.get("tokens", 0.0))
        for kind, share, begin, end in (("recomputed", again, first, reached), ("useful", 1 - again, reached, last)):
            if share:
                piece = _Piece(total * share, kind, "", key, begin, end, tokens * share)
                attempt.pieces.append(piece)
        if last >= self.reached.get(key, 0):
            self.reached[key], self.tokens[key] = last, float(line.get("token", 0.0))

    def _fault(self, attempt: Attempt, cause: str, moment: _Moment) -> None:
        fault = _AttemptFault(
            cause,
            moment.ticks,
            moment.time,
            moment.boot,
            attempt.run,
            attempt.stage,
            dict(self.reached),
        )
        self.faults.append(fault)

    def _mend(self, moment: _Moment, key: str = "", batch: int | None = None, *, built: bool = False) -> None:
        """Record the recovery from earlier faults, if this is new work."""
        for fault in self.faults:
            if fault.seconds is None and (built or batch is None or batch > fault.reached.get(key, 0)):
                fault.seconds = fault.since(moment)

    def lose(self, attempts: Sequence[Attempt], saved: Mapping[str, int], cause: str) -> None:
        """Count steps after the last checkpoints as lost: nothing went on from them.

        Args:
            saved: batch of the newest checkpoint of each training; empty if all work is gone.
        """
        for attempt in attempts:
            for piece in list(attempt.pieces):
                if piece.kind not in ("useful", "recomputed"):
                    continue
                if piece.first is None or piece.last is None:
                    if cause == DISCARDED:
                        piece.kind, piece.cause = "lost", cause
                    continue
                if piece.kind == "recomputed" and cause != DISCARDED:
                    continue
                limit = min(max(saved.get(piece.key, 0), piece.first), piece.last)
                share = (piece.last - limit) / (piece.last - piece.first) if piece.last > piece.first else 1.0
                if share:
                    lost = replace(piece, seconds=piece.seconds * share, kind="lost", cause=cause, first=limit)
                    attempt.pieces.append(lost)
                    piece.seconds, piece.tokens = piece.seconds * (1 - share), piece.tokens * (1 - share)
                    piece.last = limit


def _attempt_of(first: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Attempt:
    began, boot = float(first["ticks"]), str(first.get("boot", ""))
    end = next((line for line in reversed(lines) if line["kind"] == "end"), None)
    if end is not None:
        ended, cause, is_open = _moment(end, first).ticks, str(end.get("cause") or ""), False
    else:
        alive_s = float(first.get("alive_s") or 0.0)
        ended = began + max(alive_s, *(_moment(line, first).ticks - began for line in lines))
        now, here = this_clock()
        silent_s = now - ended if here == boot else time.time() - (float(first["time"]) + ended - began)
        is_open = silent_s < OPEN_S
        cause = "" if is_open else KILLED
    return Attempt(
        str(first.get("run", "")),
        str(first.get("stage", "")),
        int(first.get("devices", 1)),
        began,
        max(ended, began),
        boot,
        cause,
        is_open,
        {str(name): float(seconds) for name, seconds in first.get("waited", {}).items()},
        first.get("rates", {}),
    )


def _moment(line: Mapping[str, Any], first: Mapping[str, Any]) -> _Moment:
    """Return the moment of a line on the clock of its attempt, which may have begun on another machine."""
    wall, boot = float(line["time"]), str(first.get("boot", ""))
    if line.get("boot") == boot:
        return _Moment(float(line["ticks"]), wall, boot)
    return _Moment(float(first["ticks"]) + wall - float(first["time"]), wall, boot)
