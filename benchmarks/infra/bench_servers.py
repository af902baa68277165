"""Processor time of our own processes: of an idle `stemma up`, and beside a training of the quickstart's size.

python benchmarks/infra/bench_servers.py [--seconds 120]

Starts the servers of a new store on free ports, waits until they are through with their start, and reads the processor
time of each process from /proc over the given time. Then it runs the quickstart's pretraining, followed in a terminal
as a person would, and reads the same while it trains. Processor time depends little on what else the machine does. The
training's own processes are listed, and are not part of the sum.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from infra.io.yaml import read_plain  # noqa: E402
from infra.run import read_journal  # noqa: E402
from infra.servers.ports import any_free_port  # noqa: E402
from infra.servers.state import recorded  # noqa: E402

TRAINING = "the training itself"
FOLLOWER = "`stemma run`, following"
RUN = "the run's own process"
STAGE_PROGRAM = "tasks.processes.child"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KEPT = ("seed", "clean", "tokenizer", "shard", "pretrain")
"""Sections of the quickstart that a pretraining needs, besides `ingest`."""


@dataclass(frozen=True)
class Seen:
    """A process at one moment. seconds: of processor time since its start."""

    parent: int
    seconds: float
    command: str


def processes() -> dict[int, Seen]:
    """Return all processes of this machine."""
    table = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            command = Path(f"/proc/{name}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # it has ended
        table[int(name)] = Seen(int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S, command)
    return table


def owner(pid: int, table: Mapping[int, Seen], services: Mapping[int, str], follower: int) -> str | None:
    """Return the part of the system that a process belongs to; None for a process that is not ours.

    The worker forks a run from its own fork server, and the run forks its stages from other servers.
    """
    if pid == follower:
        return FOLLOWER
    depth, ancestor = 0, pid
    while ancestor in table and ancestor not in services:
        if STAGE_PROGRAM in table[ancestor].command:
            return TRAINING
        ancestor, depth = table[ancestor].parent, depth + 1
    if ancestor not in services:
        return None
    if services[ancestor] != "worker" or depth < 2:
        return services[ancestor]
    return RUN if depth < 4 else TRAINING


def measure(seconds: float, root: Path, follower: int = 0) -> dict[str, float]:
    """Return the share of one core that each part of the system used, in per cent."""
    services = {service.pid: service.name for service in recorded(root).values()}
    before, started_at = processes(), time.monotonic()
    time.sleep(seconds)
    after, passed = processes(), time.monotonic() - started_at
    shares: defaultdict[str, float] = defaultdict(float)
    for pid, process in after.items():
        name = owner(pid, after, services, follower)
        if name is not None:
            spent = process.seconds - (before[pid].seconds if pid in before else 0.0)
            shares[name] += 100 * spent / passed
    return dict(shares)


def write_config(folder: Path) -> Path:
    """Write the quickstart's pretraining, on less text and long enough to be measured; return its path."""
    quickstart = read_plain((PROJECT / "configs" / "quickstart.yaml").read_text())
    config = {name: quickstart[name] for name in KEPT}
    config["name"] = "servers"
    config["ingest"] = {"read": [{"kind": "docstrings", "limit_mb": 2}]}
    config["pretrain"]["duration"] = "20000 batches"
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    return path


def follow_in_terminal(command: list[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command whose output is a terminal that a person could watch."""
    terminal, its_end = pty.openpty()
    process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=its_end, stderr=its_end)
    os.close(its_end)

    def read() -> None:
        try:
            while os.read(terminal, 65536):
                pass
        except OSError:
            os.close(terminal)

    threading.Thread(target=read, daemon=True).start()
    return process


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    while not condition():
        if process.poll() is not None:
            sys.exit("the run ended before it trained")
        time.sleep(1)


def batches(root: Path) -> float:
    """Return the number of batches that the training has done."""
    journals = list(root.glob("runs/*/journal.jsonl"))
    lines = read_journal(journals[0]) if journals else []
    return max(
        (line["done"] for line in lines if line["kind"] == "progress" and line["stage"] == "pretrain"), default=0
    )


def main(seconds: float, settle_s: float, from_batch: int) -> None:
    environ = {**os.environ, "PYTHONPATH": str(PROJECT), "TERM": "xterm", "COLUMNS": "120"}
    stemma = [sys.executable, "-m", "cli.main"]
    with tempfile.TemporaryDirectory(prefix="bench-servers-") as folder:
        root = Path(folder) / "store"
        ports = ["--prefect-port", str(any_free_port()), "--mlflow-port", str(any_free_port())]
        subprocess.run([*stemma, "up", "--root", str(root), *ports], env=environ, check=True, capture_output=True)
        try:
            time.sleep(settle_s)
            idle = measure(seconds, root)
            config = write_config(Path(folder))
            follower = follow_in_terminal([*stemma, "run", str(config), "--root", str(root)], environ)
            try:
                wait_for(lambda: batches(root) >= from_batch, follower)
                first, started_at = batches(root), time.monotonic()
                training = measure(seconds, root, follower.pid)
                rate = (batches(root) - first) / (time.monotonic() - started_at)
            finally:
                follower.terminate()
                follower.wait()
        finally:
            subprocess.run([*stemma, "down", "--root", str(root)], env=environ, check=True, capture_output=True)
    report(idle, training, rate, seconds)


def report(idle: Mapping[str, float], training: Mapping[str, float], rate: float, seconds: float) -> None:
    print(f"Per cent of one core over {seconds:g} s; load {os.getloadavg()[0]:.1f}, {rate:.2f} batches per second\n")
    print("| process | idle | beside a training |\n|---|---:|---:|")
    names = sorted((set(idle) | set(training)) - {TRAINING}, key=lambda name: -training.get(name, 0.0))
    for name in names:
        print(f"| {name} | {idle.get(name, 0.0):.2f} | {training.get(name, 0.0):.2f} |")
    sums = [sum(shares.get(name, 0.0) for name in names) for shares in (idle, training)]
    print(f"| **all of ours** | **{sums[0]:.2f}** | **{sums[1]:.2f}** |")
    print(f"| {TRAINING} | | {training.get(TRAINING, 0.0):.1f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120, help="length of each of the two measurements")
    parser.add_argument("--settle", type=float, default=30, help="seconds between the start and the first measurement")
    parser.add_argument("--from-batch", type=int, default=30, help="batch of the training at which to begin")
    options = parser.parse_args()
    main(options.seconds, options.settle, options.from_batch)
