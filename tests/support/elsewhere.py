"""An exported model that is loaded elsewhere, by a process that is forked with transformers imported."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.command import stage_server
from tests.support.forked_call import ForkedCall

_IMPORTS = [
    "torch",
    "transformers.pipelines",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
]


def run(command: Sequence[str], cwd: str, env: Mapping[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
    """In place of `subprocess.run` where an export starts `python -I PROGRAM ARGUMENT…`."""
    python, isolated, program, *arguments = command
    assert (python, isolated) == (sys.executable, "-I")
    call = ForkedCall(stage_server(), _IMPORTS, _become, program, arguments, cwd, dict(env))
    try:
        code = call.wait()
        assert code is not None, f"not done: {command}"
        return subprocess.CompletedProcess(command, code, "", "")
    finally:
        call.kill()


def _become(program: str, arguments: Sequence[str], cwd: str, env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
