"""Handling of SIGINT and SIGTERM during a whole command: each ends it in an orderly way, once.

Until a run takes them over (`flows.runs.stop`) they raise a KeyboardInterrupt in the main thread.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM)

interrupt_received = threading.Event()
"""Set once one came: some libraries swallow the exception."""
_listening = False


class Interrupted(KeyboardInterrupt):
    """Python itself dies of a plain KeyboardInterrupt that came while it compiled something, even if it was caught."""


def listen() -> None:
    """Make interrupts, including SIGTERM, raise Interrupted from now on."""
    global _listening
    _listening = True
    for number in NUMBERS:
        signal.signal(number, _raise)
    sys.unraisablehook = _report_unraisable


def ignore() -> None:
    """Ignore interrupts from now on, so that the command's answer is complete, if the process is the command's own."""
    for number in NUMBERS if _listening else ():
        signal.signal(number, signal.SIG_IGN)


def _raise(*_: Any) -> None:
    interrupt_received.set()
    raise Interrupted


def _report_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Hook for exceptions that cannot be raised, as in a weak reference's callback: Python prints them and continues.
    An interrupt is not printed: it is not an error, and `interrupt_received` reports it."""
    if not issubclass(unraisable.exc_type, Interrupted):
        sys.__unraisablehook__(unraisable)
