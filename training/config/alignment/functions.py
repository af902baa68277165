"""Functions that a config names by their import path, looked for before anything runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator

from infra.errors import Problem
from infra.io.json import parse_own_json
from infra.project import python_path

FIX = "name a function of a module that is installed or on PYTHONPATH"
_PATIENCE_S = 120
# In a separate process: a module may be large, print, or change what its importer relies on.
_LOOK = """
import importlib, json, os, sys
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for path in sys.argv[1:]:
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
        said = "" if callable(found) else f"not {type(found).__name__}"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps(said), file=answer, flush=True)
os._exit(0)
"""


def file_of(module: str) -> str | None:
    """The file of a module that can be imported, without importing it but for its packages."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec and spec.has_location else None


def missing_functions(paths: Iterable[str], key: str) -> Iterator[Problem]:
    """A problem for each `package.module:name` that cannot be imported or is no function.

    Their modules are imported, in another process.

    Args:
        key: that names them.
    """
    listed = list(paths)
    if not listed:
        return
    # The path of a stage's process, which has neither the working directory nor what this process has put on its own.
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-P", "-c", _LOOK, *listed]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S)
        answers = [parse_own_json(line) for line in ended.stdout.splitlines()]
        after = f"importing it ended the process with code {ended.returncode}"
    except subprocess.TimeoutExpired as error:
        lines = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        answers = [parse_own_json(line) for line in lines.splitlines()]
        after = f"importing it took longer than {_PATIENCE_S} s"
    for number, path in enumerate(listed):
        message = answers[number] if number < len(answers) else after
        if message:
            yield Problem("no_such_function", f"{key}.{path}", f"expected a function: {message}", FIX)
