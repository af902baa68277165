"""Answers that are Python code, checked with assertions: each runs in a sandbox (`training.sandbox.runner`).

The sandbox keeps the code from reaching anything but itself. Code can still pass by deception: it runs in the
interpreter that runs the assertions, so that an object that equals everything passes them.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from training.sandbox import runner as sandbox

TIMEOUT_S = 10.0
_PROGRAM = Path(__file__).with_name("unit_tests_process.py")
_FENCED = re.compile(r"^```([^\n`]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "py", "python3")
"""Language names allowed after the backticks that open a block."""


def code_in(answer: str) -> str:
    """Return the first block of Python between lines of three backticks, else the first block, or all where there is
    none."""
    blocks = list(_FENCED.finditer(answer))
    python = [block for block in blocks if block[1].strip().lower() in _PYTHON]
    return next((block[2] for block in [*python, *blocks]), answer)


def passes(answer: str, assertions: str, kind: sandbox.Kind, timeout_s: float = TIMEOUT_S) -> bool:
    """Return True if the answer's code and then the assertions run to their end. Code that takes longer than
    `timeout_s` seconds, exceeds a limit of the sandbox, raises, or ends its process by itself fails.

    Only a process that gets to the end sends back the random word that it was given: an exit code, or printed text,
    proves nothing.

    Args:
        kind: The sandbox, as `sandbox.find` returns it.
    """
    word = secrets.token_hex().encode()
    question = {"code": code_in(answer), "tests": assertions, "word": word}
    outcome = sandbox.run(kind, _PROGRAM, question, timeout_s)
    return outcome.ended and outcome.written == word
