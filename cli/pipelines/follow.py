"""Shows a run while it goes: a live table of bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flows.runs.journal import RunJournal
from infra.process.interval import GrowingInterval
from infra.process.tail import Tail
from infra.run import messages_in

SHORTEST_POLL_S, LONGEST_POLL_S = 0.05, 0.5
REFRESH_HZ = 1
"""Redraws of the bars per second without a new line: their clock shows seconds."""
PLAIN_PROGRESS_EVERY_S = 10.0


@contextmanager
def following(journal: RunJournal, quiet: bool, debug: bool = False) -> Iterator[None]:
    """Reports the journal on stderr until the block ends. debug: tracebacks too."""
    from rich.console import Console

    console = Console(stderr=True)
    show: Any = _Bars(console, debug) if console.is_terminal and not quiet else _Lines(console, debug)
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


class _Lines:
    """One line a change of status, one an event, and progress every few seconds."""

    def __init__(self, console: Any, debug: bool) -> None:
        self._console = console
        self._debug = debug
        self._shown: dict[str, float] = {}

    def __enter__(self) -> _Lines:
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


class _Bars:
    """A bar for each stage that runs; finished stages scroll up as lines."""

    def __init__(self, console: Any, debug: bool) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._bars = Progress(
            TextColumn("[bold]{task.description:<22}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            refresh_per_second=REFRESH_HZ,
        )
        self._lines = _Lines(self._bars.console, debug)
        self._ids: dict[str, Any] = {}

    def __enter__(self) -> _Bars:
        self._bars.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for bar in self._ids.values():
            self._bars.remove_task(bar)
        self._bars.__exit__(None, None, None)

    def line(self, line: dict[str, Any]) -> None:
        stage = line.get("stage", "")
        if line["kind"] == "progress" and stage in self._ids:
            note = f"{line['done']:,.0f} {line['unit']}  {line['note']}"
            self._bars.update(self._ids[stage], completed=line["done"], total=line["total"], note=note)
            return
        if line["kind"] == "stage" and line["status"] == "running":
            self._ids[stage] = self._bars.add_task(stage, total=None, note="")
        elif line["kind"] == "stage" and stage in self._ids:
            self._bars.remove_task(self._ids.pop(stage))
        self._lines.line(line)
