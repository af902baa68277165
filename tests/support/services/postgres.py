"""A real PostgreSQL server for tests: from the system's package, as a user without rights, on loopback."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from infra.servers.ports import HOST, any_free_port
from tests.support.services.namespaces import Network

PASSWORD = "pg-secret-7f3a9c"
ACCOUNTS = ("postgres", "nobody")


@contextmanager
def postgres(name: str = "stemma", encoding: str = "UTF8", on: tuple[Network, str] | None = None) -> Iterator[str]:
    """`postgresql://stemma:PASSWORD@127.0.0.1:port/<name>`, its cluster gone after the block. Skips where there is no
    PostgreSQL on this machine.

    on: a network and the host of it that the server runs on, at its address there; all of the network reach it.
    """
    host, there = (on[1], on[0].command(on[1])) if on else (HOST, [])
    tools = _tools()
    if tools is None:
        pytest.skip("PostgreSQL is not on this machine")
    port = any_free_port()
    folder = Path(tempfile.mkdtemp(prefix="stemma-pg-"))
    secret = folder / "password"
    secret.write_text(PASSWORD)
    user = _account()
    if user:
        shutil.chown(folder, user)
        shutil.chown(secret, user)
    data = folder / "data"

    def do(*command: str) -> None:
        words = [*there, "runuser", "-u", user, "--", *command] if there and user else [*there, *command]
        as_user = None if there else user  # only root gets onto another host
        subprocess.run(words, check=True, capture_output=True, user=as_user, cwd=folder, env=_environ(folder))

    options = f"-c listen_addresses={host} -c port={port} -c unix_socket_directories={folder} -c fsync=off"
    try:
        do(
            f"{tools}/initdb",
            "-D",
            str(data),
            "-U",
            "stemma",
            "-E",
            encoding,
            "-A",
            "scram-sha-256",
            f"--pwfile={secret}",
        )
        if on:
            with (data / "pg_hba.conf").open("a") as access:
                access.write("host all all samenet scram-sha-256\n")
        do(f"{tools}/pg_ctl", "-D", str(data), "-w", "-o", options, "-l", str(folder / "log"), "start")
        # Not by its URL: command lines are seen by everyone on the machine.
        command = ["psql", "-h", host, "-p", str(port), "-U", "stemma", "-qc", f"CREATE DATABASE {name}", "postgres"]
        subprocess.run([*there, *command], env=os.environ | {"PGPASSWORD": PASSWORD}, check=True, capture_output=True)
        yield f"postgresql://stemma:{PASSWORD}@{host}:{port}/{name}"
    finally:
        if data.exists():
            with suppress(subprocess.CalledProcessError):
                do(f"{tools}/pg_ctl", "-D", str(data), "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)


def _tools() -> Path | None:
    """The newest of Debian's folders, which are not on the PATH, or the PATH's."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"), key=lambda path: float(path.parts[-3]))
    on_path = shutil.which("pg_ctl")
    return found[-1].parent if found else Path(on_path).resolve().parent if on_path else None


def _account() -> str | None:
    """PostgreSQL does not run as root."""
    if os.getuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ACCOUNTS if name in known)


def _environ(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": str(folder)}
