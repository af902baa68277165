"""Progress output on stderr for commands that take more than a few seconds."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from infra.io.json import parse_own_json

PLAIN_EVERY_S = 10.0


@contextmanager
def working(text: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show progress on stderr: one line with elapsed seconds in a terminal, plain lines elsewhere.

    Yields a function that updates the progress text. quiet: show nothing.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        with _counting(console, text) as show:
            yield show
    else:
        click.echo(text, err=True)
        yield _PlainLines(text).show


@contextmanager
def _counting(console: object, text: str) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.markup import escape

    assert isinstance(console, Console)
    started, latest, ended = time.monotonic(), [""], threading.Event()
    with console.status(escape(text)) as status:

        def count() -> None:
            while not ended.wait(1.0):
                status.update(escape(f"{text}{latest[0]}, {time.monotonic() - started:.0f} s"))

        thread = threading.Thread(target=count, name="counting", daemon=True)
        thread.start()
        try:
            yield lambda progress: latest.__setitem__(0, f": {progress}")
        finally:
            ended.set()
            thread.join()


class _PlainLines:
    """A line of progress every few seconds."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._shown = time.monotonic()

    def show(self, progress: str) -> None:
        if time.monotonic() - self._shown >= PLAIN_EVERY_S:
            self._shown = time.monotonic()
            click.echo(f"{self._text}: {progress}", err=True)


class ProgressJournal(io.StringIO):
    """A journal (`infra.run.Run`) that shows progress lines and stores nothing."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show

    def write(self, text: str) -> int:
        line = parse_own_json(text)
        if line["kind"] == "progress":
            total = f" of {line['total']:,.0f}" if line["total"] else ""
            self._show(f"{line['done']:,.0f}{total} {line['unit']} {line['note']}".rstrip())
        return len(text)
