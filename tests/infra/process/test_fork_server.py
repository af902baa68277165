"""A forked process is what a new one would be, and none outlives those whom it works for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.process.forked import ForkServer, NotForkedError, Process
from infra.process.lifetime import PARENT_FD
from tests.support.programs.command import REPOSITORY, environment
from tests.support.programs.processes import gone, wait_until

PROGRAM = """
import json, logging, os, random, signal, sys, threading, time
from pathlib import Path
import numpy, psutil
from infra.process.lifetime import die_with_parent

STREAM = logging.StreamHandler()

def main(task, *rest):
    die_with_parent()
    if task == "state":
        left_out = ("STEMMA_PARENT_FD", "_")
        print(json.dumps({
            "session": os.getsid(0) == os.getpid() == os.getpgrp(),
            "cwd": os.getcwd(),
            "argv": sys.argv[1:],
            "path": sys.path,
            "environment": {k: v for k, v in os.environ.items() if k not in left_out},
            "signals": {n.name: str(signal.getsignal(n)) for n in map(signal.Signals, (1, 2, 10, 13, 15, 17))},
            "masked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "stdin": os.read(0, 1).decode(),
            "files": sorted(os.readlink(f"/proc/self/fd/{n}") for n in "012"),
            "open": len(os.listdir("/proc/self/fd")),
            "threads": [thread.name for thread in threading.enumerate()],
            "streams": [sys.stdout.write_through, sys.stdout.encoding, sys.stderr.errors],
            "children": len(psutil.Process().children()),
        }))
    elif task == "random":
        print(json.dumps([random.random(), numpy.random.rand(), numpy.dot(numpy.ones((300, 300)), 1).sum()]))
    elif task == "end":
        if rest[0] == "raise":
            raise ValueError("on purpose")
        if rest[0] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return int(rest[0])
    elif task == "secret":
        STREAM.stream.write(os.environ["DB_PASSWORD"])
    elif task == "wait":
        Path(rest[0]).touch()
        time.sleep(600)
    return 0

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
"""


class Forks:
    """Starts processes of PROGRAM from one server, and keeps what they print in `out`."""

    def __init__(self, folder: Path, stack: ExitStack, **variables: str) -> None:
        self.folder = folder
        (folder / "program.py").write_text(PROGRAM)
        path = os.pathsep.join([str(folder), str(REPOSITORY)])
        self.environment = environment(PYTHONPATH=path, PYTHONUNBUFFERED="1", OMP_NUM_THREADS="2", **variables)
        self.environment.pop(PARENT_FD, None)
        self.server = ForkServer(self.environment)
        stack.callback(self.server.close)
        self.read_end, self.write_end = os.pipe()
        stack.callback(os.close, self.read_end)
        stack.callback(os.close, self.write_end)
        self.out = folder / "out"

    def start(self, *argv: str, modules: tuple[str, ...] = (), stop: Callable[[], bool] = lambda: False) -> Process:
        with open(self.out, "wb") as output:
            return self.server.start(
                ["program", *modules], ["program", *argv], self.folder, output.fileno(), self.read_end, stop
            )

    def says(self, *argv: str) -> Any:
        assert self.start(*argv).wait() == 0, self.out.read_text()
        return json.loads(self.out.read_text())


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def forks(tmp_path: Path, stack: ExitStack) -> Forks:
    return Forks(tmp_path, stack)


def test_a_forked_process_is_what_a_new_one_would_be(forks: Forks) -> None:
    with open(forks.out, "wb") as output:
        subprocess.run(
            [sys.executable, "-m", "program", "state"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=[forks.read_end],
            cwd=forks.folder,
            env={**forks.environment, PARENT_FD: str(forks.read_end)},
            check=True,
        )
    new = json.loads(forks.out.read_text())
    other = forks.start("wait", str(forks.folder / "begun"))
    wait_until((forks.folder / "begun").exists)
    assert forks.says("state") == new, "beside another, too"
    os.kill(other.pid, signal.SIGTERM)
    assert other.wait() == -signal.SIGTERM
    one, two = forks.says("random"), forks.says("random")
    assert one[0] != two[0] and one[1] != two[1]
    assert one[2] == two[2] == 90_000


def test_how_it_ended_is_told_as_of_a_child(forks: Forks) -> None:
    assert forks.start("end", "0").wait() == 0
    assert forks.start("end", "7").wait() == 7
    assert forks.start("end", "kill").wait() == -signal.SIGKILL
    assert forks.start("end", "raise").wait() == 1
    assert "on purpose" in forks.out.read_text()


def test_what_imports_leave_in_the_temporary_folder_goes_with_the_server(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    forks = Forks(tmp_path, stack, TMPDIR=str(temporary))
    killed = forks.start("end", "kill", modules=("torch.distributed.nn.jit.instantiator",))
    assert killed.wait() == -signal.SIGKILL
    left = list(temporary.iterdir())
    stack.close()
    assert not list(temporary.iterdir())
    if not left:
        pytest.skip("this torch writes no file as it is imported")


def test_a_killed_server_leaves_its_children_alone_and_forks_no_more(forks: Forks) -> None:
    child = forks.start("wait", str(forks.folder / "begun"))
    wait_until((forks.folder / "begun").exists)
    os.kill(forks.server.pid, signal.SIGKILL)
    wait_until(lambda: gone(psutil.Process(forks.server.pid)))
    with pytest.raises(NotForkedError, match="has ended"):
        forks.start("end", "0")
    assert child.poll() is None
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


OWNER = """
import os, sys
from pathlib import Path
from infra.process.forked import ForkServer
server = ForkServer({**os.environ})
read_end, write_end = os.pipe()
begun = Path(sys.argv[1], "begun")
child = server.start(["program"], ["program", "wait", str(begun)], Path(sys.argv[1]), 2, read_end, lambda: False)
print(server.pid, child.pid, flush=True)
child.wait()
"""


def test_a_killed_owner_leaves_neither_server_nor_child(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, env=environment(PYTHONPATH=path), stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        started = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        wait_until((tmp_path / "begun").exists)
        assert len(started) == 2 and not any(map(gone, started))
        owner.kill()
        wait_until(lambda: all(map(gone, started)), timeout_s=60)


def test_a_server_that_imports_ends_with_its_owner_too(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import pathlib, time\npathlib.Path(__file__).with_name('begun').touch()\ntime.sleep(600)\n"
    )
    code = """
        import os, time
        from infra.process.forked import ForkServer
        server = ForkServer({**os.environ})
        server.expect(["endless"])
        print(server.pid, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    with subprocess.Popen(command, env=environment(PYTHONPATH=path), stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        server = psutil.Process(int(owner.stdout.readline()))
        wait_until((tmp_path / "begun").exists)
        assert not gone(server)
        owner.kill()
        wait_until(lambda: gone(server), timeout_s=60)


def test_nothing_is_forked_beside_a_thread(forks: Forks) -> None:
    (forks.folder / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"
    )
    assert forks.start("end", "0").wait() == 0
    with pytest.raises(NotForkedError, match="threads of a library are alive"):
        forks.start("end", "0", modules=("threaded",))


def test_code_that_has_changed_since_is_not_run_from_memory(forks: Forks) -> None:
    assert forks.start("end", "0").wait() == 0
    (forks.folder / "program.py").write_text(PROGRAM + "\n# another\n")
    with pytest.raises(NotForkedError, match="program has changed"):
        forks.start("end", "0")


def test_what_acts_at_the_start_of_each_process_is_heeded(tmp_path: Path, stack: ExitStack) -> None:
    (tmp_path / "sitecustomize.py").write_text("")
    with pytest.raises(NotForkedError, match="sitecustomize"):
        Forks(tmp_path, stack).start("end", "0")
    (tmp_path / "sitecustomize.py").write_text("FORK_SAFE = True")
    assert Forks(tmp_path, stack).start("end", "0").wait() == 0


def test_a_start_can_be_given_up_while_the_server_imports(forks: Forks) -> None:
    (forks.folder / "slow.py").write_text("import time; time.sleep(600)")
    with pytest.raises(NotForkedError, match="cancelled"):
        forks.start("end", "0", modules=("slow",), stop=lambda: True)


def test_a_stream_kept_by_a_library_at_its_import_hides_secrets(tmp_path: Path, stack: ExitStack) -> None:
    forks = Forks(tmp_path, stack, DB_PASSWORD="tell-nobody-this")
    assert forks.start("secret").wait() == 0
    assert forks.out.read_text() == "•••"
