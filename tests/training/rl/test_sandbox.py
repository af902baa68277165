"""The sandbox of code that models write, against code that attacks it."""

from __future__ import annotations

import fcntl
import io
import json
import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infra.errors import StageError
from infra.run import Run
from tests.support.programs.processes import wait_until
from training.rl.grading import Graders
from training.rl.verify import Rule, announce_sandbox
from training.sandbox import runner as sandbox
from training.sandbox.runner import PROCESSES, Kind, find
from training.sandbox.unit_tests import passes

TESTS = "assert done()"
DONE = "\ndef done(): return True\n"


@pytest.fixture(params=["bubblewrap", "namespaces"])
def kind(request: pytest.FixtureRequest) -> Kind:
    try:
        return find(request.param)
    except StageError as error:
        pytest.skip(str(error))


@pytest.fixture
def server() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


REACHES = {
    "processes": "assert len([n for n in os.listdir('/proc') if n.isdigit()]) > 4",
    "the parent": "os.kill({parent}, 0)",
    "a server of this machine": "socket.create_connection(('127.0.0.1', {port}), timeout=2)",
    "a file of the user": "assert open({secret!r}).read() == 'mine'",
    "the environment of the parent": "assert b'verysecret' in open('/proc/{parent}/environ', 'rb').read()",
    "its program": "open({program!r}, 'r+').close()",
    "temporary files of this machine": "open({temporary!r}, 'w').close()",
    "sockets of a virtual machine's host": "socket.socket(40, socket.SOCK_STREAM)",
    "memory that no limit counts": "os.memfd_create('x')",
    "namespaces": "assert libc.unshare(0x10000000) == 0",
}
"""What code reaches without a sandbox."""


@pytest.mark.parametrize("reached", REACHES)
def test_code_reaches_nothing_outside_its_sandbox(
    reached: str, kind: Kind, server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(Path(sandbox.__file__).with_name("unit_tests_process.py").read_text())
    monkeypatch.setattr("training.sandbox.unit_tests._PROGRAM", program)
    (tmp_path / "secret").write_text("mine")
    temporary = tmp_path / "temporary"
    code = f"import ctypes, os, socket\nlibc = ctypes.CDLL(None)\n{REACHES[reached]}\n{DONE}".format(
        parent=os.getpid(), port=server, secret=str(tmp_path / "secret"), program=str(program), temporary=str(temporary)
    )
    if "environ" in code:
        monkeypatch.setenv("MY_TOKEN", "verysecret")
        code = code.replace(f"/proc/{os.getpid()}", "/proc/self")  # a process that could hand it on
        assert not passes(code, TESTS, "none") and not passes(code, TESTS, kind)
        return
    if reached != "sockets of a virtual machine's host" or os.path.exists("/dev/vsock"):
        assert passes(code, TESTS, "none")
    assert not passes(code, TESTS, kind)


BOUNDED = {
    "processes": f"""
import time
count = 0
try:
    while count < {4 * PROCESSES}:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except OSError:
    pass
assert 8 < count < {PROCESSES}
""",
    **{
        f"files in {folder}": f"""
written = 0
try:
    for number in range(8):
        with open(f'{folder}/{{number}}', 'wb', buffering=0) as file:
            for _ in range(32): written += file.write(bytes(2**20))
except OSError:
    pass
assert 2**25 < written <= 2**26
"""
        for folder in ("/tmp", "/dev/shm")
    },
    "all other folders": """
for folder in ('/', '/dev', '/usr/lib', '/proc', '/etc', os.path.dirname(os.__file__)):
    try:
        open(folder + '/x', 'w').close()
    except OSError:
        continue
    raise AssertionError(folder)
""",
    "other processes of the sandbox": """
import ctypes
libc = ctypes.CDLL(None)
assert libc.ptrace(16, 1, 0, 0) == -1 and libc.ptrace(16, os.getppid(), 0, 0) == -1
assert not os.access(f'/proc/{os.getppid()}/mem', os.W_OK)
""",
    "privileges": """
import re
status = open('/proc/self/status').read()
assert not any(int(value, 16) for value in re.findall(r'Cap(?:Inh|Prm|Eff|Bnd|Amb):\\s*(\\w+)', status)), status
assert 'NoNewPrivs:\\t1' in status and 'Seccomp:\\t2' in status and not os.path.exists('/etc/shadow')
""",
}


@pytest.mark.parametrize("bounded", BOUNDED)
def test_what_code_may_do_is_bounded(bounded: str, kind: Kind) -> None:
    assert passes(f"import os\n{BOUNDED[bounded]}\n{DONE}", TESTS, kind)


KILLED = {
    "memory of many processes": """
read_end, write_end = os.pipe()
for _ in range(12):
    if os.fork() == 0:
        held = bytearray(os.urandom(2**20)) * 200
        os.write(write_end, b'.')
        __import__('time').sleep(60)
for _ in range(12): os.read(read_end, 1)
__import__('time').sleep(1)
""",
    "many empty files": "for number in range(50_000): open(f'/tmp/{number}', 'w').close()\n__import__('time').sleep(1)",
    "a flood of results": """
for descriptor in range(3, 64):
    try:
        while True: os.write(descriptor, bytes(2**16))
    except OSError:
        pass
""",
    "a closed pipe": "os.closerange(3, 128)",
    "its own end": "print('passed'); os._exit(0)",
    "other words": """
for descriptor in range(3, 64):
    try:
        os.write(descriptor, b'passed')
    except OSError:
        pass
os._exit(0)
""",
    "a compiler that forgives": "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None\nassert 0",
}


@pytest.mark.parametrize("killed", KILLED)
def test_code_that_takes_too_much_or_forges_its_result_is_wrong(killed: str, kind: Kind) -> None:
    timeout_s = 3.0 if killed == "a flood of results" else 30.0
    assert not passes(f"import os\n{KILLED[killed]}\n{DONE}", TESTS, kind, timeout_s)


@pytest.mark.parametrize("ends", ["", "\nwhile True: pass"])
def test_all_that_code_starts_ends_with_it(ends: str, kind: Kind) -> None:
    """The process leaves its session, its group and its parent, and keeps no pipe."""
    name = f"stemma{os.getpid()}"
    code = f"""
import ctypes, os, signal, time
libc = ctypes.CDLL(None)
read_end, write_end = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
    libc.prctl(1, 0, 0, 0, 0)
    libc.prctl(15, b'{name}', 0, 0, 0)
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_IGN)
    os.write(write_end, b'started')
    os.closerange(0, 128)
    while True: time.sleep(60)
assert os.read(read_end, 7) == b'started'
{DONE}{ends}"""
    assert passes(code, TESTS, kind, timeout_s=3.0) is not ends.startswith("\n")
    wait_until(lambda: not [one for one in psutil.process_iter(["name"]) if one.info["name"] == name], 20)


def test_without_a_sandbox_too_a_group_of_processes_ends_with_its_answer(tmp_path: Path) -> None:
    """The code starts a process, which holds a lock on a file for as long as it lives."""
    path = tmp_path / "lock"
    path.touch()
    code = (
        f"import fcntl, os, time\nfile = open({str(path)!r}, 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
        f"os.write(file.fileno(), b'locked')\nos.fork()\nwhile True: time.sleep(9)\n{DONE}"
    )
    assert not passes(code, TESTS, "none", timeout_s=4.0)
    assert path.read_text() == "locked"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits for any process that still holds it


def test_packages_can_be_imported_and_this_project_not(kind: Kind) -> None:
    assert passes(f"import numpy, subprocess, sys{DONE}", "import numpy\nassert numpy.ones(3).sum() == 3", kind)
    assert passes(
        f"import subprocess, sys{DONE}", "assert subprocess.run([sys.executable, '-c', '']).returncode == 0", kind
    )
    assert not passes(f"import training{DONE}", TESTS, kind)


def test_a_machine_without_a_sandbox_is_refused_by_the_key_that_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.weakness.cache_clear()
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    rules, journal = [Rule("tests", TESTS)], io.StringIO()
    try:
        with pytest.raises(StageError, match="set none to run") as caught:
            Graders().tests([DONE], [TESTS])
        assert [(problem.code, problem.path) for problem in caught.value.problems] == [("no_sandbox", "launch.sandbox")]
        with pytest.raises(StageError, match=r"bubblewrap: .*; namespaces: "):
            announce_sandbox(rules, Graders(), Run(Path("."), journal=journal))
        assert Graders(sandbox="none").tests([DONE], [TESTS]) == [1.0]
    finally:
        sandbox.weakness.cache_clear()
    announce_sandbox(rules, Graders(sandbox="none"), Run(Path("."), journal=journal))
    announce_sandbox([Rule("exact", "x"), None], Graders(), Run(Path("."), journal=journal))
    (event,) = map(json.loads, journal.getvalue().splitlines())
    assert (event["name"], event["sandbox"]) == ("sandbox", "none") and "without a sandbox" in event["message"]


def test_bubblewrap_is_looked_for_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sandbox.weakness.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        with pytest.raises(StageError, match="there is no bwrap on the PATH"):
            find("bubblewrap")
        (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: no permission to make namespaces' >&2; exit 1\n")
        (tmp_path / "bwrap").chmod(0o755)
        sandbox.weakness.cache_clear()
        with pytest.raises(StageError, match="no permission to make namespaces"):
            find("bubblewrap")
    finally:
        sandbox.weakness.cache_clear()
