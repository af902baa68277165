"""What tests fork is gone with them."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from infra.servers.state import make_servers_folder
from tests.support.programs.command import environment
from tests.support.programs.processes import gone, wait_until

WORKER = """
import sys, tests.support.programs.forked
# The command imports the rest itself, if it needs any.
tests.support.programs.forked._COMMAND = ["tests.support.programs.forked"]
from tests.support.programs.command import start
command = start("up", "--root", sys.argv[1])
assert isinstance(command, tests.support.programs.forked.ForkedCommand)
print(command.pid, flush=True)
command.communicate()
"""


def test_a_forked_command_dies_with_the_test_worker_that_is_killed(tmp_path: Path) -> None:
    lock = make_servers_folder(tmp_path) / "lock"
    arguments = [sys.executable, "-c", WORKER, str(tmp_path)]
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # so that the command waits for as long as it lives
        with subprocess.Popen(arguments, env=environment(), stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            command = psutil.Process(int(worker.stdout.readline()))
            try:
                wait_until(lambda: any(file.path == str(lock) for file in command.open_files()))
                worker.kill()
                wait_until(lambda: gone(command), timeout_s=60)
            finally:
                with suppress(psutil.NoSuchProcess):
                    command.kill()
