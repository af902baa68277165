"""The command line within this process, for targets: its real entry, with what it printed, and nothing started."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from infra.errors import Problem, StageError
from infra.process import interrupts
from tests.fuzz.harness import Violation

_ALLOWED = {"git", "file", "nvidia-smi", "ldconfig", "gcc", "cc", "lscpu", "uname"}


class Started(StageError):
    """A command was about to start a process, which no target waits for."""


class _Popen(subprocess.Popen[Any]):
    def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
        words = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
        first = os.path.basename(os.fsdecode(words[0])).split()[0]
        if first not in _ALLOWED and "corpus.readers.formats.table_process" not in words:
            raise Started(Problem("started", "", f"{first} was about to be started"))
        super().__init__(args, *rest, **options)


@contextlib.contextmanager
def starting_nothing() -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise Started(Problem("started", "", "a process was about to be started"))

    with (
        mock.patch.object(subprocess, "Popen", _Popen),
        mock.patch.object(os, "fork", refuse),
        mock.patch.object(os, "posix_spawn", refuse),
        mock.patch.object(os, "execv", refuse),
        mock.patch.object(os, "execve", refuse),
        mock.patch.object(webbrowser, "open", lambda *_, **__: True),
    ):
        yield


def call(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run `stemma WORDS` in a folder, as a person or a program does. Returns its document, empty without --json.

    Raises Violation where it reports that it crashed, prints a traceback, or with --json anything but one document.
    """
    import cli.commands

    out, err = io.StringIO(), io.StringIO()
    code: Any = None
    before, arguments = os.getcwd(), sys.argv
    os.chdir(folder)
    sys.argv = ["stemma", *words]
    interrupts.interrupt_received.clear()
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.dict(os.environ),
            starting_nothing(),
        ):
            try:
                code = cli.commands.run()
            except SystemExit as end:
                code = end.code
    finally:
        os.chdir(before)
        sys.argv = arguments
    stdout, stderr = out.getvalue(), err.getvalue()
    # With --debug each refusal has a traceback.
    if "(--debug prints the traceback)" in stderr or ("Traceback (most recent" in stderr and "--debug" not in words):
        raise Violation(f"{_end_of(stderr)}: {stderr[-3_000:]}")
    if code not in (0, 1, 2, 3, 130):
        raise Violation(f"exit code {code!r}")
    if "--json" not in words or not stdout.strip().startswith("{"):
        return {}
    try:
        document = json.loads(stdout)
    except ValueError as error:
        raise Violation(f"not one document of JSON: {error}: {stdout[:500]}") from None
    for problem in document.get("errors", ()):
        if problem["code"] == "crashed":
            raise Violation(f"{_end_of(stderr)}: {problem['message'][:200]}\n{stderr[-3_000:]}")
    return document  # type: ignore[no-any-return]


def _end_of(stderr: str) -> str:
    """The last line in our code and the type of the error, of a traceback."""
    lines = [line.strip() for line in stderr.splitlines()]
    locations = [
        line for line in lines if line.startswith('File "') and "/tests/" not in line and "/.venv/" not in line
    ]
    local_frames = [line for line in locations if "/lib/python" not in line]
    last = local_frames[-1].rpartition("/")[2].replace('", line ', " ") if local_frames else ""
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "Interrupt", "Iteration"))]
    return f"{last} {errors[-1].split(':')[0] if errors else lines[-1][:60] if lines else ''}"
