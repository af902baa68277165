"""Folders for temporary files that go with their process, also if it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs.command import REPOSITORY

PROGRAM = """
import sys
from multiprocessing import get_context
from multiprocessing.connection import Listener
from infra.process.held_folder import hold_sockets

def listen():
    Listener(family="AF_UNIX")

hold_sockets()
listening = Listener(family="AF_UNIX")
loader = get_context("fork").Process(target=listen)
loader.start()
loader.join()
print(loader.exitcode, flush=True)
sys.stdin.read()
"""
SWEEP = "from infra.process.held_folder import SOCKETS, remove_left; remove_left(SOCKETS)"


@pytest.mark.parametrize("killed", [False, True])
def test_sockets_of_multiprocessing_go_with_their_process(killed: bool, tmp_path: Path) -> None:
    """A process that was killed left a folder `pymp-…` for good."""
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "0\n"
        (folder,) = tmp_path.iterdir()
        subprocess.run([sys.executable, "-c", SWEEP], env=env, check=True)
        assert list(folder.glob("listener-*")), "no folder goes while its process lives"
        if killed:
            process.kill()
        process.stdin.close()
        process.wait()
    assert list(tmp_path.iterdir()) == ([folder] if killed else [])
    subprocess.run([sys.executable, "-c", SWEEP], env=env, check=True)
    assert not list(tmp_path.iterdir())
