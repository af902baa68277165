"""Calls to the Prefect server, made on the side: none ever blocks the work that it reports.

One thread makes them in order. While the server does not answer they wait. Any other failure of a call is reported
once, and the others go on.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass

import httpx
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

LIMIT = 1_000
"""Calls that wait at once. Beyond that the oldest is given up: the last ones are the most informative."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Between tries while the server does not answer: twice as long each time."""


@dataclass(frozen=True)
class _Call:
    context: Context
    make: Callable[[], object]


class PageQueue:
    """on_trouble: called, from the queue's own thread, once when the server is lost, once when it answers again, and
    once for each kind of call that it refuses."""

    def __init__(self, on_trouble: Callable[[str], None]) -> None:
        self._on_trouble = on_trouble
        self._waiting: OrderedDict[str, _Call] = OrderedDict()
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._flushing = 0
        self._refused: set[str] = set()
        self._given_up = 0
        self._thread = threading.Thread(target=self._work, name="page", daemon=True)
        self._thread.start()
        self.lost = threading.Event()
        """Set while the server does not answer."""
        self.was_lost = False

    def tell(self, make: Callable[[], object], key: str = "") -> None:
        """Make the call soon, in the caller's context. A waiting call under the same key gives way."""
        with self._changed:
            key = key or f"call {next(self._numbers)}"
            self._waiting[key] = _Call(copy_context(), make)
            if len(self._waiting) > LIMIT:
                self._waiting.popitem(last=False)
                self._given_up += 1
            self._changed.notify_all()

    def flush(self, patience_s: float) -> int:
        """Wait until all is sent, but once the server does not answer at most `patience_s` seconds.

        Returns how many calls the page misses by then.
        """
        deadline = time.monotonic() + patience_s
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
            while self._waiting and self._thread.is_alive():
                if not self.lost.is_set():
                    deadline = max(deadline, time.monotonic() + patience_s)
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, 0.2))
            self._flushing -= 1
            return len(self._waiting) + self._given_up

    def close(self) -> None:
        """Make no further call."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    return
                key, call = next(iter(self._waiting.items()))
            answered = self._make(key, call)
            with self._changed:
                if answered:
                    pause = FIRST_PAUSE_S
                    if self._waiting.get(key) is call:
                        del self._waiting[key]
                    self._changed.notify_all()
                else:
                    self._rest(pause)
                    pause = FIRST_PAUSE_S if self._flushing else min(2 * pause, LONGEST_PAUSE_S)

    def _rest(self, pause_s: float) -> None:
        """Wait before the next try; the wait is cut short once a caller waits for the end."""
        before = self._flushing
        self._changed.wait_for(lambda: self._closed or self._flushing > before, pause_s)

    def _make(self, key: str, call: _Call) -> bool:
        """Return True if the server answered, even with a refusal."""
        try:
            call.context.run(_without_retries, call.make)
        except Exception as error:
            if self._closed:
                return False  # no caller waits for it any more, and the client may be gone with the run
            if is_unreachable(error):
                if not self.lost.is_set():
                    self.lost.set()
                    self.was_lost = True
                    what = type(error).__name__
                    self._trouble(f"the Prefect server does not answer ({what}); the run continues without its page")
                return False
            kind = f"{type(error).__name__}: {error}".splitlines()[0]
            if kind not in self._refused:
                self._refused.add(kind)
                self._trouble(f"the page does not show {key}: {kind}")
        if self.lost.is_set():
            self.lost.clear()
            self._trouble("the Prefect server answers again and receives the calls that it missed")
        return True

    def _trouble(self, message: str) -> None:
        # If it cannot be written, there is no place left to report it.
        with suppress(OSError):
            self._on_trouble(message)


def _without_retries(make: Callable[[], object]) -> None:
    """The queue itself tries again, and must hear soon that it has to."""
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        make()


def is_unreachable(error: Exception) -> bool:
    """Return True if a call failed because the server did not work, and may succeed later."""
    if isinstance(error, PrefectHTTPStatusError):
        return error.response.status_code >= 500 or error.response.status_code in (408, 429)
    return isinstance(error, httpx.TransportError)
