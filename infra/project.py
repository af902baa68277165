"""The project's folder, which contains the code, the configs and, by default, the store; and the user who runs it."""

from __future__ import annotations

import getpass
import hashlib
import os
import subprocess
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
BUILT_FROM = "built_from.json"
"""In a wheel: the commit that it was built from."""


def python_path(value: str | None = None) -> str:
    """Return PYTHONPATH for processes that this one starts: the project, and the entries of this process, absolute.

    Python resolves a relative or empty entry in the working directory of each process: a process that is started
    elsewhere would not find the same modules as its parent.

    Args:
        value: PYTHONPATH to extend; by default that of this process.
    """
    search_path = os.environ.get("PYTHONPATH", "") if value is None else value
    entries = [os.path.abspath(entry) for entry in search_path.split(os.pathsep)] if search_path else []
    return os.pathsep.join(dict.fromkeys([str(PROJECT), *entries]))


def default_root() -> Path:
    """Return the folder of artifacts without --root: STEMMA_ROOT, else .stemma/ in the project.

    For a URL this is its cache. Raises the errors of `infra.store.roots.root_folder`.
    """
    from infra.store.roots import root_folder

    return root_folder(os.environ.get("STEMMA_ROOT") or PROJECT / ".stemma")


def root_of(text: str) -> Path:
    """Return the folder of a flow's root, the default if the flow was given none."""
    from infra.store.roots import root_folder

    return root_folder(text) if text else default_root()


def user_name() -> str:
    """Return the user's name, or `uid 1234` if a container's user has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def name_user() -> None:
    """Give a user without a name one in the environment, for torch and other libraries that fail without it."""
    if user_name() == f"uid {os.getuid()}":
        os.environ["LOGNAME"] = f"uid-{os.getuid()}"


@cache
def code_state() -> dict[str, str | bool]:
    """Return the commit of the project's code and whether the tree differs from it; an empty commit outside of git.

    For a wheel, those of the tree that it was built from: the folder that it is installed in may belong to another
    repository.
    """
    if (PROJECT / BUILT_FROM).is_file():
        from infra.io.json import read_own_json

        recorded: dict[str, str | bool] = read_own_json(PROJECT / BUILT_FROM)
        return recorded

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
    """Return the SHA-256 of requirements.lock, empty if the code was installed without it."""
    lock = PROJECT / "requirements.lock"
    return hashlib.sha256(lock.read_bytes()).hexdigest() if lock.exists() else ""
