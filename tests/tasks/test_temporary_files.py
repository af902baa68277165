"""What libraries write among the temporary files stays there for nobody to remove where a stage is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs.command import REPOSITORY, environment

KILLED = """
import os, pathlib, signal, sys
from tasks.processes.child import import_torch
import_torch(pathlib.Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_torch_writes_as_it_is_imported_is_part_of_the_stages_work(tmp_path: Path) -> None:
    temporary, scratch = tmp_path / "temporary", tmp_path / "scratch"
    temporary.mkdir()
    scratch.mkdir()
    variables = environment(TMPDIR=str(temporary), PYTHONPATH=str(REPOSITORY))
    subprocess.run([sys.executable, "-c", KILLED, str(scratch)], env=variables, check=False)
    assert not list(temporary.iterdir())
    if not list(scratch.rglob("_remote_module_non_scriptable.py")):
        pytest.skip("this torch writes no file as it is imported")
