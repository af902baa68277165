"""Seconds from the decision to start a stage's process to the first line of its function: a new process, or a fork.

python benchmarks/infra/bench_warm_start.py [--rounds 5] [STAGE…]

Alternates the two for each stage in one run. A process has come to the first line when it has imported what the stage
imports, and says the time on the system's monotonic clock. Then what each fork server holds in memory: `private` would
be free without it, the rest it shares with others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import psutil

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from infra.launch.config import LaunchConfig  # noqa: E402
from infra.process.forked import ForkServer  # noqa: E402
from tasks.processes.environment import stage_environment  # noqa: E402
from tasks.processes.warm_start import modules_of  # noqa: E402
from tasks.stages import STAGES  # noqa: E402

KINDS = ("ingest", "clean", "validate", "shard", "pretrain", "sft", "benchmarks", "safety", "report")
PROGRAM = """
import importlib, sys, time
import tasks.processes.child

def main(*modules):
    for name in modules:
        importlib.import_module(name)
    print(time.monotonic(), flush=True)
    return 0

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
"""


def new_process(folder: Path, stage: str, environment: dict[str, str]) -> float:
    begun = time.monotonic()
    command = [sys.executable, "-m", "first_line", *modules_of(stage, LaunchConfig())]
    said = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout
    return float(said.split()[-1]) - begun


def forked(folder: Path, stage: str, server: ForkServer) -> float:
    read_end, write_end = os.pipe()
    with open(folder / "said", "w+b") as said:
        begun = time.monotonic()
        argv = ["first_line", *modules_of(stage, LaunchConfig())]
        process = server.start(["first_line", *argv[1:]], argv, folder, said.fileno(), read_end, lambda: False)
        assert process.wait() == 0
        said.seek(0)
        moment = float(said.read().split()[-1])
    os.close(read_end)
    os.close(write_end)
    return moment - begun


def race(stages: list[str], rounds: int) -> None:
    versions = {name: metadata.version(name) for name in ("torch", "mosaicml", "mosaicml-streaming", "transformers")}
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, {versions}, medians of {rounds}, seconds")
    print(f"{'stage':<12}{'new process':>24}{'fork':>22}{'ratio':>8}   first fork, imports included")
    servers: dict[str, ForkServer] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "first_line.py").write_text(PROGRAM)
        for stage in stages:
            environment = stage_environment(LaunchConfig(), STAGES[stage].makes_weights)
            environment["PYTHONPATH"] = os.pathsep.join([name, environment["PYTHONPATH"]])
            package = STAGES[stage].function.partition(".")[0]
            if package not in servers:
                servers[package] = ForkServer(environment)
            server = servers[package]
            first = forked(folder, stage, server)
            times: dict[str, list[float]] = {"new": [], "fork": []}
            for _ in range(rounds):
                times["new"].append(new_process(folder, stage, environment))
                times["fork"].append(forked(folder, stage, server))
            ratio = statistics.median(times["new"]) / statistics.median(times["fork"])
            print(
                f"{stage:<12}{_told(times['new']):>24}{_told(times['fork']):>22}{ratio:>8.0f}   {first:.2f}", flush=True
            )
    print("\nwhat the servers hold, MB")
    for package, server in servers.items():
        memory = psutil.Process(server.pid).memory_full_info()
        print(f"{package:<12}{memory.rss / 1e6:8.0f}, private {memory.uss / 1e6:.0f}")
        server.close()


def _told(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}–{max(values):.3f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("stages", nargs="*", default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    race(options.stages, options.rounds)
