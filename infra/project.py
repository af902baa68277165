"""The project's own folder, where the code, the configs and, by default, the store are; and who runs it."""

from __future__ import annotations

import getpass
import hashlib
import os
import subprocess
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def python_path(value: str | None = None) -> str:
    """PYTHONPATH for processes that this one starts: the project, and the places of this process, absolute.

    Python resolves a relative place, and an empty one, in the working directory of each process: a process that is
    started elsewhere would not find what its starter finds.

    Args:
        value: PYTHONPATH to extend; by default that of this process.
    """
    given = os.environ.get("PYTHONPATH", "") if value is None else value
    places = [os.path.abspath(place) for place in given.split(os.pathsep)] if given else []
    return os.pathsep.join(dict.fromkeys([str(PROJECT), *places]))


def default_root() -> Path:
    """Where artifacts go unless --root says otherwise: STEMMA_ROOT, else .stemma/ in the project. Of a URL its cache,
    and raises what `infra.store.roots.root_folder` raises."""
    from infra.store.roots import root_folder

    return root_folder(os.environ.get("STEMMA_ROOT") or PROJECT / ".stemma")


def root_of(text: str) -> Path:
    """The folder of a root that a flow was given, the default where it was given none."""
    from infra.store.roots import root_folder

    return root_folder(text) if text else default_root()


def user_name() -> str:
    """The user's name, or `uid 1234` where a container's user has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def name_user() -> None:
    """Gives a user without a name one in the environment, for torch and others that ask for it and stop at an error."""
    if user_name() == f"uid {os.getuid()}":
        os.environ["LOGNAME"] = f"uid-{os.getuid()}"


@cache
def code_state() -> dict[str, str | bool]:
    """The commit of the project's code and whether the tree differs from it; an empty commit outside of git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(PROJECT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(commit and git("status", "--porcelain", "--untracked-files=no"))}
    except FileNotFoundError:
        return {"commit": "", "dirty": False}


@cache
def lock_hash() -> str:
    """SHA-256 of requirements.lock, empty if the code was installed without it."""
    lock = PROJECT / "requirements.lock"
    return hashlib.sha256(lock.read_bytes()).hexdigest() if lock.exists() else ""
