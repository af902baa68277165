"""One relay per store: the lock that it holds, and the list of processes that need it."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from infra.io.json import read_own_json
from infra.process.lifetime import start_ticks, started_at, this_boot
from infra.servers.state import same_process


def lineage_folder(root: Path | str) -> Path:
    return Path(root).absolute() / "lineage"


class RelayLock:
    """Held by the relay of a store for as long as it lives; the system lets go of it when the process dies.

    The lock file names its holder, so that others can ask without touching the lock.
    """

    def __init__(self, root: Path | str) -> None:
        folder = lineage_folder(root)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / "relay.lock", "a+")  # noqa: SIM115

    def acquire(self) -> bool:
        """Try to take the lock; return True if we hold it now."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._file.truncate(0)
        self._file.write(json.dumps(this_process()))
        self._file.flush()
        return True

    def release(self) -> None:
        self._file.truncate(0)
        fcntl.flock(self._file, fcntl.LOCK_UN)


def relay_pid(root: Path | str) -> int | None:
    """Return the process id of the current relay, if any."""
    try:
        holder = read_own_json(lineage_folder(root) / "relay.lock")
    except (FileNotFoundError, ValueError):
        return None
    return holder["pid"] if process_lives(holder) else None


def problem_path(root: Path | str) -> Path:
    return lineage_folder(root) / "problem.json"


def lineage_problem(root: Path | str) -> dict[str, str] | None:
    """Why the relay gave up (an `infra.errors.Problem`); None while all is well, as far as anybody tried."""
    try:
        problem: dict[str, str] = read_own_json(problem_path(root))
    except (FileNotFoundError, ValueError):
        return None
    return problem


def register(root: Path | str) -> None:
    """Ask the relay to stay while this process lives."""
    folder = lineage_folder(root) / "senders"
    folder.mkdir(parents=True, exist_ok=True)
    hidden = folder / f".{os.getpid()}"
    hidden.write_text(json.dumps(this_process()))
    hidden.replace(folder / str(os.getpid()))


def anyone_registered(root: Path | str) -> bool:
    """Return True while a registered process of this machine still lives; remove those that are gone."""
    folder = lineage_folder(root) / "senders"
    if not folder.is_dir():
        return False
    for path in [path for path in folder.iterdir() if not path.name.startswith(".")]:
        try:
            lives = process_lives(read_own_json(path))
        except FileNotFoundError:
            continue
        except (ValueError, LookupError, TypeError):
            lives = False  # a power cut left it empty, and took its process with it
        if lives:
            return True
        path.unlink(missing_ok=True)
    return False


def this_process() -> dict[str, Any]:
    pid = os.getpid()
    since = {"started": started_at(pid), "ticks": start_ticks(pid), "boot": this_boot()}
    return {"host": os.uname().nodename, "pid": pid, **since}


def process_lives(process: dict[str, Any]) -> bool:
    """Return True for a living process of this machine; False for another machine's, whose state is unknown."""
    since = (process["started"], process.get("ticks", 0), process.get("boot", ""))
    return process["host"] == os.uname().nodename and same_process(process["pid"], *since)
