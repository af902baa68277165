"""Messages on their way to MLflow: a folder with one file each, in the order they were sent."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.io.json import read_own_json
from infra.lineage.messages import Message
from infra.lineage.relay_lock import lineage_folder, this_process
from infra.secrets import Hider

TEXT_FIELDS = ("config", "tags", "headline", "error", "description")
"""Fields of messages that people read in MLflow, without secrets; the others are digests, paths and figures."""

_lock = threading.Lock()
_last_ns = 0
_sequence = itertools.count()


@dataclass(frozen=True)
class Envelope:
    """One message in its file. sender: the process that sent it, in the form of `relay_lock.this_process`."""

    path: Path
    content: dict[str, Any]
    sender: dict[str, Any]


class Outbox:
    """Folder in which any process leaves messages for MLflow without waiting.

    A message is written under a hidden name and then renamed, so a reader sees it whole or not at all, on a network
    file system too; it stays until it is delivered. Names sort in the order of sending.
    """

    def __init__(self, root: Path | str) -> None:
        self.folder = lineage_folder(root) / "outbox"

    def send(self, message: Message) -> None:
        """Store a message for the relay; this writes a small file, takes about 0.1 ms, and needs no server."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content, hider = message.to_json(), Hider()
        content |= {key: hider.hide_in(content[key]) for key in TEXT_FIELDS if key in content}
        text = json.dumps({"message": content, "sender": this_process()})
        name = f"{_next_time_ns():020d}-{os.getpid()}-{next(_sequence)}.json"
        hidden = self.folder / f".{name}"
        hidden.write_text(text)
        hidden.rename(self.folder / name)

    def pending(self) -> int:
        """Return the number of waiting messages."""
        return len(self.paths())

    def counts(self) -> dict[str, int]:
        """Return the number of waiting messages, and the number set aside as undeliverable."""
        return {"waiting": self.pending(), "failed": len(list((self.folder.parent / "failed").glob("*.json")))}

    def paths(self) -> list[Path]:
        """Return the files of all waiting messages, oldest first."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return [self.folder / name for name in sorted(names) if not name.startswith(".")]

    def read(self, path: Path) -> Envelope:
        """Raise ValueError for a file that is no message."""
        content = read_own_json(path)
        return Envelope(path, content["message"], content["sender"])


def _next_time_ns() -> int:
    """Return the current time, and always a later one than before in this process, even if the clock is set back."""
    global _last_ns
    with _lock:
        _last_ns = max(time.time_ns(), _last_ns + 1)
        return _last_ns
