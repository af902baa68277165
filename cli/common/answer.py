"""The one JSON document that a command prints. Nothing heavy is imported: an interrupt is answered from the start."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from typing import Any

from infra.process import interrupts

CANCELLED = 130

_given = False


def begin() -> None:
    """Reset the state before a command: a program may call several commands in turn."""
    global _given
    _given = False


def answer(document: Mapping[str, Any]) -> None:
    """Print the document on stdout, unless this command has printed one. Interrupts are ignored from here on."""
    global _given
    if threading.current_thread() is threading.main_thread():
        interrupts.ignore()
    if not _given:
        _given = True
        print(json.dumps({"errors": [], **document}, indent=1))
        sys.stdout.flush()


def cancelled() -> dict[str, Any]:
    """The answer of a command that was interrupted before it had anything to report."""
    problem = {"code": "cancelled", "path": "", "message": "interrupted", "fix": ""}
    return {"status": "cancelled", "errors": [problem]}
