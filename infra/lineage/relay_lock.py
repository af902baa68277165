"""One relay a store: the lock that it holds, and the list of those who want it to stay."""

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

    The lock file says whose it is, so that others can ask without touching the lock.
    """

    def __init__(self, root: Path | str) -> None:
        folder = lineage_folder(root)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / "relay.lock", "a+")  # noqa: SIM115

    def acquire(self) -> bool:
        """True if we hold the lock now."""
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
    """The process of the relay that works now, if any."""
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
    """Asks the relay to stay while this process lives."""
    folder = lineage_folder(root) / "senders"
    folder.mkdir(parents=True, exist_ok=True)
    hidden = folder / f".{os.getpid()}"
    hidden.write_text(json.dumps(this_process()))
    hidden.replace(folder / str(os.getpid()))


def anyone_registered(root: Path | str) -> bool:
    """True while a process of this machine that registered still lives; forgets those that are gone."""
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
    """True for a process of this machine that lives; of another machine's nothing can be said, so False."""
    since = (process["started"], process.get("ticks", 0), process.get("boot", ""))
    return process["host"] == os.uname().nodename and same_process(process["pid"], *since)
