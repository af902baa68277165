"""SIGINT and SIGTERM from a command's first moment to its last: each ends it in an orderly way, once.

Until a run takes them over (`flows.stop`) they raise KeyboardInterrupt in the main thread.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM)

asked = threading.Event()
"""Set once one came: some libraries swallow the exception."""


def listen() -> None:
    """From now on an interrupt raises KeyboardInterrupt, SIGTERM too."""
    for number in NUMBERS:
        signal.signal(number, _raise)


def ignore() -> None:
    """From now on nothing comes between the command and its answer."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def _raise(*_: Any) -> None:
    asked.set()
    raise KeyboardInterrupt
