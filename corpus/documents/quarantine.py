"""Records that cannot be read: put aside with file, line and reason, up to a share; never lost, never silent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from infra.errors import stage_error

EMPTY = "the file is empty"


@dataclass(frozen=True)
class Rejected:
    """A record that cannot be read.

    line: its line or, in a Parquet file, a JSON list or an archive, its row, from 1; 0 means the whole file. reason:
    the fault; the part before a colon is its kind.
    """

    file: str
    line: int
    reason: str
    is_skipped: bool = False
    """True if a setting leaves it out and it is no fault of the data: counted separately."""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    @property
    def kind(self) -> str:
        return self.reason.partition(":")[0]

    def as_line(self, **more: Any) -> str:
        return json.dumps({**more, "file": self.file, "line": self.line, "reason": self.reason}) + "\n"


class Tally:
    """Counts of the records that were put aside by kind of reason, with an example; adds up over partitions."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, Rejected] = {}
        self.skipped: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.counts.total()

    def add(self, rejected: Rejected) -> None:
        if rejected.is_skipped:
            self.skipped[rejected.kind] += 1
            return
        self.counts[rejected.kind] += 1
        self.examples.setdefault(rejected.kind, rejected)

    def as_json(self) -> dict[str, Any]:
        examples = {kind: [item.file, item.line, item.reason] for kind, item in self.examples.items()}
        return {"counts": dict(self.counts), "examples": examples, "skipped": dict(self.skipped)}

    @classmethod
    def sum(cls, parts: Iterable[Mapping[str, Any]]) -> Tally:
        total = cls()
        for part in parts:
            total.counts.update(part["counts"])
            total.skipped.update(part["skipped"])
            for kind, example in part["examples"].items():
                total.examples.setdefault(kind, Rejected(*example))
        return total

    def check(self, read: int, max_share: float, key: str) -> None:
        """Check a complete source with `read` good records.

        Args:
            key: its dotted config key.

        Raises StageError `too_much_quarantined` with the most frequent reason and an example where the share of what
        was put aside is over the limit, and `empty_source` where there was nothing to read at all.
        """
        if read == 0 and not self.counts and self.skipped:
            kinds = ", ".join(f"{count:,} with {kind}" for kind, count in self.skipped.most_common())
            raise stage_error("empty_source", key, f"every record was skipped: {kinds}", f"set {key}.error_pages: read")
        if read == 0 and set(self.counts) <= {EMPTY}:
            location = self.examples[EMPTY].place if self.counts else key
            raise stage_error("empty_source", location, f"there is nothing to read here ({key})", "provide some text")
        total = read + self.total
        if self.total <= max_share * total:
            return
        kind, count = self.counts.most_common(1)[0]
        example = self.examples[kind]
        raise stage_error(
            "too_much_quarantined",
            example.place,
            f"{self.total:,} of {total:,} records of {key} cannot be read ({self.total / total:.2%}), allowed are "
            f"{max_share:.2%}; most of them, {count:,}, like this one: {example.reason}",
            f"correct the files, or raise {key.split('.')[0]}.max_quarantine_share",
        )


class Quarantine:
    """Writes the records that are put aside from each source to a JSON Lines file, and counts them."""

    def __init__(self, path: Path, max_share: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.total = 0
        self._max_share = max_share
        self._file = path.open("w", encoding="utf8")
        self._tally = Tally()

    def __enter__(self) -> Quarantine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def start_source(self, key: str) -> None:
        self._key, self._tally = key, Tally()

    def add(self, rejected: Rejected) -> None:
        self.total += 1
        self._tally.add(rejected)
        self._file.write(rejected.as_line(source=self._key))

    def finish_source(self, read: int) -> int:
        """Return the number of records of the source that were put aside, after `read` good ones. Raises StageError as
        `Tally.check`."""
        self._tally.check(read, self._max_share, self._key)
        return self._tally.total
