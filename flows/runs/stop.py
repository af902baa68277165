"""Sources of a stop request, and the time that stages then have to save: a person waits less long than a scheduler,
unless the person asked to keep what the stages have."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prefect.settings import PREFECT_API_URL

from infra.process.interrupts import NUMBERS, interrupt_received
from infra.process.lifetime import GRACE_S
from infra.servers.http import post


class Stop:
    """A request by SIGINT or SIGTERM for an orderly end: stages are stopped, then the flow returns Cancelled.

    grace_s: seconds that stages have to save and end when SIGTERM comes from a scheduler that takes the machine back,
        or when what they have is to be kept.
    elsewhere: returns True if a stop was requested elsewhere; a run in a thread receives no signals.
    is_to_keep: returns True if a person asked for an end that keeps what the stages have.
    """

    def __init__(
        self,
        flow_run_id: str,
        grace_s: float,
        elsewhere: Callable[[], bool] = lambda: False,
        is_to_keep: Callable[[], bool] = lambda: False,
    ) -> None:
        self._flow_run_id = flow_run_id
        self._grace_s = grace_s
        self._elsewhere = elsewhere
        self._is_to_keep = is_to_keep
        self._requested = threading.Event()
        self._by: signal.Signals | None = None

    def is_set(self) -> bool:
        return self._requested.is_set() or self._elsewhere() or self._is_to_keep()

    def patience_s(self) -> float:
        """Seconds that a stage has to save and end."""
        is_kept = self._is_to_keep() or (self._by == signal.SIGTERM and not self._cancelled_in_page())
        return self._grace_s if is_kept else GRACE_S

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Listen while the body runs; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: Mapping[signal.Signals, Any] = {number: signal.signal(number, self._ask) for number in NUMBERS}
        if interrupt_received.is_set():
            self._requested.set()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, _: Any) -> None:
        self._by = signal.Signals(number)
        self._requested.set()

    def _cancelled_in_page(self) -> bool:
        """Prefect's worker sends SIGTERM as well; False where no server answers."""
        url = PREFECT_API_URL.value()
        if not url or not self._flow_run_id:
            return False
        try:
            (run,) = post(f"{url}/flow_runs/filter", {"flow_runs": {"id": {"any_": [self._flow_run_id]}}})
        except (OSError, ValueError):
            return False
        return run["state_type"] in ("CANCELLING", "CANCELLED")
