"""SIGTERM and SIGINT at any moment before a run begins: one document that says cancelled, and 130."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pipelines import data_config
from tests.support.programs.command import REPOSITORY, environment, finish, start_new, write_config
from tests.support.programs.processes import wait_until


def listens(process: subprocess.Popen[str]) -> bool:
    """Whether the process, if it still is one, has a handler for SIGTERM."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def says_that_it_runs(process: subprocess.Popen[str]) -> bool:
    """Waits for the line that comes before a private server is started."""
    assert process.stderr is not None
    return "running chronicle in this process" in process.stderr.readline()


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        (listens, signal.SIGTERM),
        (says_that_it_runs, signal.SIGINT),
        pytest.param(listens, signal.SIGINT, marks=pytest.mark.long),
        pytest.param(says_that_it_runs, signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_an_interrupt_before_the_flow_begins_is_answered(tmp_path: Path, number: signal.Signals, moment) -> None:  # type: ignore[no-untyped-def]
    variables = environment()
    variables.pop("PREFECT_API_URL", None)
    config = write_config(tmp_path / "config.yaml", data_config(tmp_path))
    process = start_new("run", config, "--root", tmp_path / "store", env=variables)
    wait_until(lambda: moment(process) or process.poll() is not None)
    process.send_signal(number)
    answer = finish(process)
    assert (answer.code, answer.document["status"]) == (130, "cancelled"), answer.stderr
    assert [error["code"] for error in answer.document["errors"]] == ["cancelled"]
    assert "Traceback" not in answer.stderr


def test_an_interrupt_where_nothing_can_be_raised_is_noted_and_not_printed() -> None:
    program = (
        "import os, signal, weakref; from infra.process import interrupts\n"
        "class Thing: pass\n"
        "def gone(_, number=signal.SIGTERM): os.kill(os.getpid(), number); [None for _ in range(1000)]\n"
        "interrupts.listen(); thing = Thing(); watched = weakref.ref(thing, gone); del thing\n"
        "print(interrupts.interrupt_received.is_set())\n"
        "thing = Thing(); watched = weakref.ref(thing, lambda _: 1 / 0); del thing\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert said.stdout == "True\n"
    assert "Interrupted" not in said.stderr and "ZeroDivisionError" in said.stderr
