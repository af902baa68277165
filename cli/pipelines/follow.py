"""Live display of a run: one table of its stages in a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from evaluation.pages.words import seconds as words
from flows.runs.journal import RunJournal
from infra.process.interval import GrowingInterval
from infra.process.pace import STEADY_S, STEADY_SHARE, duration
from infra.process.tail import Tail
from infra.run import messages_in

SHORTEST_POLL_S, LONGEST_POLL_S = 0.05, 0.5
REFRESH_HZ = 1
"""Redraws of the table per second without a new line: their clock shows seconds."""
PLAIN_PROGRESS_EVERY_S = 10.0


@contextmanager
def following(journal: RunJournal, quiet: bool, debug: bool = False) -> Iterator[None]:
    """Report the journal on stderr until the block ends. debug: tracebacks too."""
    from rich.console import Console

    console = Console(stderr=True)
    show: Any = _Table(console, debug) if console.is_terminal and not quiet else _StatusLines(console, debug)
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(journal, show, ended), name="follower", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(journal: RunJournal, show: Any, ended: threading.Event) -> None:
    added, interval = Tail(journal.path), GrowingInterval(SHORTEST_POLL_S, LONGEST_POLL_S)
    with show:
        is_last_look = False
        while True:
            lines = added.lines()
            for line in messages_in(lines):
                show.line(line)
            if is_last_look:
                break
            if any('"stage"' in line for line in lines):
                interval.changed()
            is_last_look = ended.wait(interval.seconds)


class _StatusLines:
    """One line per change of status and per event, and progress every few seconds."""

    def __init__(self, console: Any, debug: bool) -> None:
        self._console = console
        self._debug = debug
        self._shown: dict[str, float] = {}

    def __enter__(self) -> _StatusLines:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def line(self, line: dict[str, Any]) -> None:
        stage = line.get("stage", "")
        match line["kind"]:
            case "begin" if address := line.get("page_url") or line.get("flow_run_url"):
                self._say(f"watch it at {address}")
            case "stage" if line["status"] == "running":
                self._shown[stage] = line["time"]
            case "stage" if line["status"] != "waiting":
                seconds = f" in {line['seconds']:.1f} s" if line["status"] == "built" else ""
                message = f": {line['headline']}" if line["headline"] else ""
                self._say(f"{stage}: {line['status']}{seconds}{message}")
            case "event":
                self._say(f"{stage}: {line['message']}")
            case "traceback" if self._debug:
                self._say(f"{stage}: {line['text']}")
            case "progress" if line["time"] - self._shown.get(stage, 0.0) > PLAIN_PROGRESS_EVERY_S:
                self._shown[stage] = line["time"]
                total = f" of {line['total']:,.0f}" if line["total"] else ""
                self._say(f"{stage}: {line['done']:,.0f}{total} {line['unit']} {line['note']}".rstrip())

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class _StagePace:
    """Pace of a running stage, from its progress lines."""

    def __init__(self, line: dict[str, Any]) -> None:
        self.began = float(line["time"])
        self.unit = ""
        self.note = ""
        self._first: tuple[float, float] | None = None
        self._last = (self.began, 0.0)
        self._total: float | None = None

    def take(self, line: dict[str, Any]) -> None:
        if line["unit"] != self.unit or line["done"] < self._last[1]:
            self._first = None  # the stage began another part of its work
        self.unit, self.note, self._total = line["unit"], line["note"], line["total"]
        self._last = float(line["time"]), float(line["done"])
        if self._first is None and line["done"] > 0:
            self._first = self._last

    @property
    def share(self) -> float | None:
        return min(1.0, self._last[1] / self._total) if self._total else None

    @property
    def rate(self) -> float | None:
        """Units per second since the first progress; None before a rate means something."""
        if self._first is None or self._last[0] - self._first[0] < STEADY_S:
            return None
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])

    @property
    def left_s(self) -> float | None:
        """Time left at the mean pace; None before a hundredth is done."""
        if not self.rate or not self._total or self._last[1] < STEADY_SHARE * self._total:
            return None
        return max(0.0, self._total - self._last[1]) / self.rate

    def rate_in_words(self) -> str:
        rate = self.rate
        if not rate:
            return ""
        return f"{rate:,.0f} {self.unit}/s" if rate >= 10 else f"{rate:.2g} {self.unit}/s"


class _Table:
    """One live table of all stages: state, bar, rate, time left. Finished stages scroll up as lines too."""

    def __init__(self, console: Any, debug: bool) -> None:
        from rich.live import Live

        self._console = console
        self._lines = _StatusLines(console, debug)
        self._status: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        self._running: dict[str, _StagePace] = {}
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=REFRESH_HZ, transient=True)

    def __enter__(self) -> _Table:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def line(self, line: dict[str, Any]) -> None:
        stage = line.get("stage", "")
        if line["kind"] == "progress":
            if stage in self._running:
                self._running[stage].take(line)
            return
        if line["kind"] == "begin":
            self._status, self._running = {}, {}
        elif line["kind"] == "stage":
            self._status[stage] = line["status"]
            self._running.pop(stage, None)
            if line["status"] == "running":
                self._running[stage] = _StagePace(line)
            elif line["seconds"]:
                self._seconds[stage] = line["seconds"]
        self._lines.line(line)

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
        for column in ("stage", "state", "", "", "rate", "left"):
            table.add_column(column, no_wrap=True)
        table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
        for stage in self._shown():
            status, work = self._status[stage], self._running.get(stage)
            if work is None:
                took = words(self._seconds[stage]) if status == "built" and stage in self._seconds else ""
                table.add_row(Text(stage), Text(status, _STYLES.get(status, "dim")), "", "", "", Text(took), "")
                continue
            bar = ProgressBar(total=1.0, completed=work.share or 0.0, width=20, pulse=work.share is None)
            percent = f"{work.share:.0%}" if work.share is not None else words(time.time() - work.began)
            left = duration(work.left_s) if work.left_s is not None else ""
            table.add_row(
                Text(stage, "bold"),
                Text(status, "cyan"),
                bar,
                percent,
                Text(work.rate_in_words()),
                Text(left),
                Text(work.note, "dim"),
            )
        return Group(table, Text(self._counts(), "dim"))

    def _shown(self) -> list[str]:
        """All stages in pipeline order; in a short terminal, the running stages and those that come next."""
        stages, room = list(self._status), max(4, self._console.height - 4)
        if len(stages) <= room:
            return stages
        running = [stage for stage in stages if stage in self._running]
        waiting = [stage for stage in stages if self._status[stage] == "waiting"]
        return [*running, *waiting[: max(0, room - len(running))]][:room]

    def _counts(self) -> str:
        counts = Counter(self._status.values())
        return " · ".join(f"{counts[status]} {status}" for status in _STYLES if counts[status])


_STYLES = {
    "running": "cyan",
    "waiting": "dim",
    "built": "green",
    "reused": "green",
    "failed": "red",
    "skipped": "yellow",
    "cancelled": "yellow",
}
