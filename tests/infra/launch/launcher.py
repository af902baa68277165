"""The launcher of ranks in a process of its own, with ranks that import nothing heavy."""

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

_RANK = """
import os, sys, time
from pathlib import Path
from infra.process.lifetime import die_with_parent
die_with_parent()
rank = os.environ["RANK"]
Path(sys.argv[1], rank).write_text(str(os.getpid()))
print("here", rank, os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], flush=True)
"""
_LAUNCHER = """
import json, sys
from pathlib import Path
from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.launch.ranks import own_process_group
from infra.launch.training import run_ranks
own_process_group()
launch = LaunchConfig(processes=2, **json.loads(sys.argv[3]))
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
try:
    stop = Path(sys.argv[2], "stop").exists
    print(run_ranks(command, launch, Path(sys.argv[2], "work"), stop, lambda *told: print(told[1])))
except StageError as error:
    print(error)
"""


def launch(
    folder: Path, program: str, *, environment: Mapping[str, str] | None = None, **settings: Any
) -> subprocess.Popen[str]:
    """Starts two ranks that write their process numbers to `folder`, say where they are, and run `program`.

    They are told to stop once there is a file `stop` in the folder.
    """
    return subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, _RANK + textwrap.dedent(program), str(folder), json.dumps(settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **(environment or {})},
    )
