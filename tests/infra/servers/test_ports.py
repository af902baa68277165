from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra.errors import StageError
from infra.servers.ports import HOST, any_free_port, holder, reserved_port


@pytest.fixture
def taken():
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_an_asked_for_port_in_use_is_refused_naming_who_holds_it(taken: int) -> None:
    with pytest.raises(StageError) as caught, reserved_port(taken, asked_for=True):
        pass
    [problem] = caught.value.problems
    assert problem.code == "port_in_use"
    assert f"port {taken} is in use by pid {os.getpid()}" in problem.message
    # By its command too, whatever started the tests.
    assert psutil.Process().cmdline()[0] in problem.message


def test_without_a_wish_the_next_free_port_is_taken(taken: int) -> None:
    with reserved_port(taken) as port:
        assert port > taken
        assert holder(taken).startswith(f"pid {os.getpid()}")


def test_two_that_start_together_get_two_ports_whatever_their_temporary_folders(tmp_path: Path) -> None:
    start = any_free_port()
    program = f"from infra.servers.ports import *\nwith reserved_port({start}) as port: print(port)"
    with reserved_port(start) as first, reserved_port(start) as second:
        other = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, check=True
        )
        assert len({first, second, int(other.stdout)}) == 3
    assert not list(tmp_path.iterdir())
