"""The stage's side of a cluster in a process of its own, with ranks that import nothing heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.programs.command import REPOSITORY

# "Batches" of 0.1 s, each of which waits for the other rank as an all-reduce does, and is written down as a checkpoint.
RANK = """
import os, sys, time
from pathlib import Path
from infra.launch.heartbeat import Heartbeat
from infra.process.lifetime import die_with_parent
die_with_parent()
rank, folder = os.environ["RANK"], Path(sys.argv[1])
start = len(list(folder.glob(f"start.*.{rank}")))
(folder / f"start.{start}.{rank}").write_text(f"{os.getpid()} {os.getpgrp()}")
heart = Heartbeat(int(rank))
print("here", rank, os.environ["WORLD_SIZE"], os.environ["NODE_RANK"], flush=True)
def stuck_here():
    time.sleep(600)
for batch in range(len(list(folder.glob("done.*"))), int(sys.argv[2])):
    heart.beat(batch, "forward pass")
    ACTION
    heart.beat(batch, "backward pass")
    (folder / f"met.{start}.{batch}.{rank}").touch()
    while not (folder / f"met.{start}.{batch}.{1 - int(rank)}").exists():
        time.sleep(0.01)
    (folder / f"done.{batch}").touch()
    heart.beat(batch, "between batches")
    time.sleep(0.1)
heart.beat(0, "not watched")
"""
_STAGE = """
import json, os, signal, sys
from pathlib import Path
from infra.errors import StageError
from infra.launch.cluster import run_on_cluster
from infra.launch.config import LaunchConfig
from infra.launch.ranks import own_process_group
own_process_group()
program, folder, batches, settings = sys.argv[1:]
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
launch = LaunchConfig(nodes=2, threads=1, **json.loads(settings))
command = [sys.executable, "-c", program, folder, batches]
done = lambda: len(list(Path(folder).glob("done.*")))
say = lambda name, message: print(f"{name}: {message}", flush=True)
try:
    print(run_on_cluster(command, launch, Path(folder, "work"), "pretrain", lambda: bool(told), say, os.environ, done))
except StageError as error:
    print(f"{error.problems[0].code}: {error}")
"""


def on_cluster(
    folder: Path, batches: int, action: str = "pass", *, environment: Mapping[str, str] | None = None, **settings: Any
) -> subprocess.Popen[str]:
    """Starts two nodes of one rank each that do so many batches; `action` runs in each, and knows rank, start, batch.

    SIGTERM to it cancels. What it says comes to stdout, what ranks and nodes print to stderr.
    """
    program = RANK.replace("    ACTION", textwrap.indent(textwrap.dedent(action), "    "))
    (folder / "work").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", _STAGE, program, str(folder), str(batches), json.dumps(settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})},
    )


def rank_pids(folder: Path) -> list[int]:
    """The processes of all ranks that ever started."""
    return [int(text.split()[0]) for path in folder.glob("start.*") if (text := path.read_text())]
