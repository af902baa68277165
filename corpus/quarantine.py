"""Records that cannot be read: put aside with file, line and reason, up to a share; never lost, never silent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from infra.errors import stage_error


@dataclass(frozen=True)
class Rejected:
    """A record that cannot be read.

    line: its line or, in a Parquet file or JSON list, its row, from 1; 0 stands for the whole file.
    """

    file: str
    line: int
    reason: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class Quarantine:
    """Counts what is read and what is put aside of each source, and writes the latter to a JSON Lines file."""

    def __init__(self, path: Path, max_share: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.total = 0
        self._path = path
        self._max_share = max_share
        self._file = path.open("w", encoding="utf8")
        self._first: Rejected | None = None
        self._in_source = 0

    def __enter__(self) -> Quarantine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def start_source(self, key: str) -> None:
        self._key, self._first, self._in_source = key, None, 0

    def add(self, rejected: Rejected) -> None:
        self.total += 1
        self._in_source += 1
        self._first = self._first or rejected
        line = {"source": self._key, "file": rejected.file, "line": rejected.line, "reason": rejected.reason}
        self._file.write(json.dumps(line) + "\n")

    def finish_source(self, read: int) -> int:
        """How many records of the source were put aside, after `read` good ones.

        Raises StageError `too_much_quarantined` naming the first bad file:line where their share is over the limit, and
        `empty_source` where there was nothing to read at all.
        """
        if read == 0 and (self._first is None or self._first.reason == EMPTY):
            place = self._first.place if self._first else self._key
            raise stage_error(
                "empty_source", place, f"there is nothing to read here ({self._key})", "give it some text"
            )
        if self._first is not None and self._in_source > self._max_share * (read + self._in_source):
            total = read + self._in_source
            raise stage_error(
                "too_much_quarantined",
                self._first.place,
                f"{self._first.reason}; {self._in_source:,} of {total:,} records of {self._key} cannot be read "
                f"({self._in_source / total:.2%}), allowed are {self._max_share:.2%}",
                f"mend the file, or raise {self._key.split('.')[0]}.max_quarantine_share",
            )
        return self._in_source


EMPTY = "the file is empty"
