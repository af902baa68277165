"""A real Slurm of a few nodes on this machine, from the system's packages; needs root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from infra.servers.ports import any_free_port
from tests.support.programs.processes import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "sinfo")


@contextmanager
def slurm(count: int = 2) -> Iterator[dict[str, str]]:
    """The variables under which Slurm's commands reach the cluster, which is gone after the block. Skips where there is
    no Slurm, or where we may not start one."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"Slurm is not on this machine: {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons are started by root")
    folder = Path(tempfile.mkdtemp(prefix="stemma-slurm-"))
    folder.chmod(0o755)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        _munge(folder / "munge", stack)
        env = {"SLURM_CONF": str(_configured(folder, count))}
        _daemon(["slurmctld", "-D", "-f", env["SLURM_CONF"]], folder / "ctl.log", stack)
        for node in _names(count):
            _daemon(["slurmd", "-D", "-N", node, "-f", env["SLURM_CONF"]], folder / f"{node}.log", stack)
        wait_until(lambda: _states(env) == count * ["idle"], timeout_s=60)
        yield env


def _munge(folder: Path, stack: ExitStack) -> None:
    """munge refuses folders and keys that others can write."""
    folder.mkdir(mode=0o755)
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    names = [f"--{name}={folder / name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    _daemon(["munged", "--foreground", "--force", f"--key-file={key}", *names], folder / "out.log", stack)
    wait_until(lambda: (folder / "socket").exists(), timeout_s=30)


def _names(count: int) -> list[str]:
    return [f"n{number}" for number in range(1, count + 1)]


def _configured(folder: Path, count: int) -> Path:
    host = socket.gethostname()
    ports = [any_free_port() for _ in range(1 + count)]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2"
        for name, port in zip(_names(count), ports[1:], strict=True)
    )
    path = folder / "slurm.conf"
    path.write_text(
        f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder / "munge" / "socket"}
StateSaveLocation={folder / "state"}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctl.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
KillWait=10
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
{nodes}
PartitionName=main Nodes={",".join(_names(count))} Default=YES State=UP
"""
    )
    (folder / "state").mkdir()
    return path


def _daemon(command: list[str], log: Path, stack: ExitStack) -> None:
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)

    def end() -> None:
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)


def _states(env: dict[str, str]) -> list[str]:
    told = subprocess.run(["sinfo", "-N", "-h", "-o", "%T"], env={**os.environ, **env}, capture_output=True, text=True)
    return told.stdout.split()
