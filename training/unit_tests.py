"""Answers that are Python code, held against assertions: each is run in a process of its own (`unit_tests_process`).

That process has a time limit, a memory limit, an empty folder and no environment, and where the system lets everybody
make namespaces, no network and no sight of other processes. This keeps mistakes of a policy from doing harm. It is no
sandbox against malice: the code reads and writes what you may read and write, and it can find ways to look right.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

TIMEOUT_S = 10.0
MEMORY_BYTES = 2**30
"""Address space of the process: enough for numpy."""
_PROGRAM = Path(__file__).with_name("unit_tests_process.py")
_FENCED = re.compile(r"^```([^\n`]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "py", "python3")
"""What may stand behind the backticks that open a block."""


def code_in(answer: str) -> str:
    """The first block of Python between lines of three backticks, else the first block, or all where there is none."""
    blocks = list(_FENCED.finditer(answer))
    python = [one for one in blocks if one[1].strip().lower() in _PYTHON]
    return next((one[2] for one in [*python, *blocks]), answer)


def passes(answer: str, assertions: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether the answer's code and then the assertions run to their end. What takes longer than `timeout_s` seconds,
    wants more memory, raises, or ends the process by itself does not.

    Only who gets to the end can send back the word that the process was given, so an exit code tells nothing.
    """
    word = secrets.token_hex()
    question = {"code": code_in(answer), "tests": assertions, "word": word, "memory": MEMORY_BYTES}
    with (
        tempfile.TemporaryDirectory(prefix="stemma-tests-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as asked,
        tempfile.TemporaryFile() as said,
    ):
        asked.write(json.dumps({**question, "parent": os.getpid()}).encode())
        asked.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_PROGRAM), *_packages()],
            stdin=asked,
            stdout=said,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            # What it started too, and before its folder is removed.
            _kill_group(process.pid)
            process.wait()
        said.seek(0)
        return said.read(2 * len(word)).decode(errors="replace") == word


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _packages() -> list[str]:
    """Folders of installed packages, which the code may import from."""
    return [path for path in sys.path if path.endswith("-packages")]
