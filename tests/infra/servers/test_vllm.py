"""The server process of vLLM: how it is started and ended, and what is said where it fails. The programs here are small
ones of our own; tests/training/serving/test_vllm.py asks a real vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.errors import Cancelled, StageError
from infra.launch.launchers import VllmConfig
from infra.process.lifetime import started_at
from infra.servers.vllm import Vllm, program_of, program_problem, vllm_command
from tests.support.programs.processes import wait_until

SLEEPS = "import time\ntime.sleep(600)\n"
# A server that says its socket is ready, and answers no question.
MUTE = """
import socket, sys, time
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[sys.argv.index("--uds") + 1])
listening.listen()
first, _ = listening.accept()
first.recv(4096)
first.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
time.sleep(600)
"""


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """Makes a program of a Python text, which first writes its process number, its arguments and environment."""

    def make(text: str) -> str:
        path = tmp_path / "vllm"
        noted = f"json.dump([os.getpid(), sys.argv, dict(os.environ)], open({str(tmp_path / 'noted')!r}, 'w'))"
        path.write_text(f"#!{sys.executable}\nimport json, os, sys\n{noted}\n{text}")
        path.chmod(0o755)
        return str(path)

    return make


def _noted(tmp_path: Path) -> tuple[int, list[str], dict[str, str]]:
    pid, arguments, environment = json.loads((tmp_path / "noted").read_text())
    return pid, arguments, environment


def _has_noted(tmp_path: Path) -> bool:
    """True once the program has written all of its note."""
    note = tmp_path / "noted"
    return note.exists() and note.read_text().endswith("]")


def _start(program: str, folder: Path, **settings: object) -> StageError:
    with pytest.raises(StageError) as raised:
        Vllm(
            VllmConfig.model_validate({"program": program, **settings}), folder, folder / "log", ["--dtype", "float32"]
        )
    return raised.value


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("print('loading')\nsys.exit('ValueError: Head size 20 is not supported')", "vllm_failed", "Head size 20"),
        ("sys.exit('torch.OutOfMemoryError: CUDA out of memory')", "vllm_out_of_memory", "launch.vllm.gpus"),
        ("os.kill(os.getpid(), 9)", "vllm_out_of_memory", "ended with SIGKILL"),
        ("pass", "vllm_failed", "its log is empty"),
    ],
)
def test_a_server_that_dies_at_once_is_told_with_its_last_words(
    program: Callable[[str], str], tmp_path: Path, text: str, code: str, said: str
) -> None:
    (problem,) = _start(program(text), tmp_path).problems
    assert problem.code == code and said in str(problem) and str(tmp_path / "log") in problem.fix


def test_one_that_never_answers_is_ended(program: Callable[[str], str], tmp_path: Path) -> None:
    for text, limit in ((SLEEPS, "start_s"), (MUTE, "silent_s")):
        (problem,) = _start(program(text), tmp_path, **{limit: 3.0}).problems
        assert problem.code == "vllm_silent" and f"raise launch.vllm.{limit}" in problem.fix
        assert started_at(_noted(tmp_path)[0]) is None


def test_a_cancelled_run_waits_for_no_server(program: Callable[[str], str], tmp_path: Path) -> None:
    config = VllmConfig(program=program(SLEEPS))
    with pytest.raises(Cancelled):
        Vllm(config, tmp_path, tmp_path / "log", stop=lambda: _has_noted(tmp_path))
    assert started_at(_noted(tmp_path)[0]) is None


def test_it_is_reached_by_this_user_alone_and_takes_itself_for_no_rank(
    program: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "MASTER_PORT": "1", "PYTHONPATH": "/ours", "STEMMA_AUTH": "a:b"}.items():
        monkeypatch.setenv(name, value)
    look = "import stat\nplace = os.path.dirname(sys.argv[sys.argv.index('--uds') + 1])\n"
    error = _start(program(f"{look}sys.exit(f'mode {{stat.S_IMODE(os.stat(place).st_mode):o}}')"), tmp_path, gpus="6,7")
    assert "mode 700" in str(error)
    _, arguments, environment = _noted(tmp_path)
    assert arguments[1:3] == ["serve", str(tmp_path)] and "--port" not in arguments and "float32" in arguments
    assert not {"RANK", "MASTER_PORT", "PYTHONPATH", "STEMMA_AUTH", "STEMMA_PARENT_FD"} & environment.keys()
    assert environment["CUDA_VISIBLE_DEVICES"] == "6,7" and environment["VLLM_NO_USAGE_STATS"] == "1"
    assert not Path(arguments[arguments.index("--uds") + 1]).parent.exists()


def test_it_ends_when_whoever_started_it_is_killed(program: Callable[[str], str], tmp_path: Path) -> None:
    text = (
        "import sys\nfrom pathlib import Path\nfrom infra.launch.launchers import VllmConfig\n"
        "from infra.servers.vllm import Vllm\n"
        "Vllm(VllmConfig(program=sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[2]) / 'log')\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", text, program(SLEEPS), str(tmp_path)])
    wait_until(lambda: _has_noted(tmp_path))
    server, arguments, _ = _noted(tmp_path)
    place = Path(arguments[arguments.index("--uds") + 1]).parent
    assert started_at(server) is not None and place.exists()
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    wait_until(lambda: started_at(server) is None and not place.exists())
    assert started_at(server) is None and not place.exists()


def test_a_program_that_cannot_be_started_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "vllm"
    for wrong, said in ((str(path), "an existing program"), ("no-such-vllm", "not on the PATH")):
        problem = program_problem(VllmConfig(program=wrong))
        assert problem and problem.path == "launch.vllm.program" and said in problem.message
    path.write_text("#!/bin/sh\n")
    problem = program_problem(VllmConfig(program=str(path)))
    assert problem and "can be executed" in problem.message
    path.chmod(0o755)
    assert program_problem(VllmConfig(program=str(path))) is None
    monkeypatch.setenv("STEMMA_VLLM", str(path))
    assert program_of(VllmConfig()) == str(path)


def test_one_model_is_served_and_to_no_foreign_pages(tmp_path: Path) -> None:
    command = vllm_command("vllm", tmp_path, "sft/12", "--port", "8000")
    assert command[:3] == ["vllm", "serve", str(tmp_path)] and command[-2:] == ["--port", "8000"]
    assert command[command.index("--allowed-origins") + 1] == "[]"
