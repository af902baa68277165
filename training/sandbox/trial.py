"""Trial of a sandbox from inside: tries what foreign code must not do (see `training.sandbox.runner.find`).

It runs as an answer's code does, and nothing of this project is imported here.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from typing import Any

_NEWUSER = 0x10000000


def main(question: dict[str, Any], answer: int) -> None:
    """Write `held` into `answer`, or what the sandbox failed to prevent."""
    os.write(answer, (_weakness(question) or "held").encode())


def _connects(port: int) -> bool:
    """Return True if a connection to a port of this machine succeeds; in a sandbox that holds it is refused."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True


def _weakness(question: dict[str, Any]) -> str:
    processes = [name for name in os.listdir("/proc") if name.isdigit()]
    if len(processes) > 3:
        return f"it shows {len(processes)} processes"
    if os.path.exists(question["secret"]):
        return f"it shows the file {question['secret']}"
    if _connects(question["port"]):
        return "it connects to servers of this machine"
    if ctypes.CDLL(None).unshare(_NEWUSER) == 0:
        return "it allows code to make namespaces"
    for path, size in question["folders"]:
        folder = os.statvfs(path)
        if folder.f_blocks * folder.f_frsize > size:
            return f"{path} has no bound"
        if not os.access(path, os.W_OK):
            return f"{path} cannot be written to"
    for path in ("/", "/dev", "/usr/lib"):
        if os.access(path, os.W_OK):
            return f"{path} can be written to"
    return _unbounded(question["processes"])


def _unbounded(most: int) -> str:
    children = []
    try:
        for _ in range(most + 8):
            if (child := os.fork()) == 0:
                time.sleep(60)
                os._exit(0)
            children.append(child)
    except OSError:
        return ""
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
    return "it does not bound the number of processes"
