"""Programs that tests would start as new Python processes, forked from a server of the session with imports done."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.programs.command import REPOSITORY, environment, stage_server
from tests.support.programs.forked_call import ForkedCall

_TRANSFORMERS = [
    "torch",
    "transformers.pipelines",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
]


def run_module(
    words: Sequence[str | Path], imports: Sequence[str] = (), cwd: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    """`python -m WORDS`, run to its end.

    Args:
        imports: modules of the program to import before the fork; they stay for other programs.
    """
    arguments = list(map(str, words))
    return _run(["-m", *arguments], ["infra.config", *imports], str(cwd), environment())


def load_exported(
    command: Sequence[str], cwd: str, env: Mapping[str, str], **_: Any
) -> subprocess.CompletedProcess[str]:
    """In place of `subprocess.run` where an export starts `python -I PROGRAM ARGUMENT…`."""
    python, isolated, *arguments = command
    assert (python, isolated) == (sys.executable, "-I")
    return _run(arguments, _TRANSFORMERS, cwd, env)


def _run(
    arguments: Sequence[str], imports: Sequence[str], cwd: str, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory(prefix="stemma-program-") as folder:
        call = ForkedCall(stage_server(), imports, _become, arguments, cwd, dict(env), folder)
        try:
            ended = call.wait()
            assert ended is not None, f"not done: {arguments}"
            code = ended or call.returned()
        finally:
            call.kill()
        output = [Path(folder, name).read_text(encoding="utf8") for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess([sys.executable, *arguments], code, *output)


def _become(arguments: Sequence[str], cwd: str, env: Mapping[str, str], output: str) -> int:
    """Runs the program in this process, and returns its exit code."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        with open(Path(output, name), "wb") as file:
            os.dup2(file.fileno(), descriptor)
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
            return 1
        return int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
