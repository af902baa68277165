"""Reads the metric lines that a stage writes (the format of infra/run.py), from where it was read last."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]")


@dataclass(frozen=True)
class Line:
    """The figures of one line. time: seconds since the epoch; end: the offset in bytes behind the line.

    rewound_to: for a line that takes back, where what is undone begins (see infra/run.py).
    """

    time: float
    step: int
    values: dict[str, float]
    end: int
    rewound_to: int | None = None


def read_lines(path: Path, offset: int = 0) -> Iterator[Line]:
    """The whole lines behind `offset`; a line that is still being written waits for the next call.

    Lines that are no metrics (progress, events) come as a Line without values, so that they count as read. Raises
    FileNotFoundError.
    """
    return _read(path, offset, "metric")


def undone_lines(path: Path, rewind: Line) -> Iterator[Line]:
    """The lines that `rewind`, a line of the same file, took back; others come without values."""
    assert rewind.rewound_to is not None
    for line in _read(path, rewind.rewound_to, "undone"):
        if line.end >= rewind.end:
            return
        yield line


def _read(path: Path, offset: int, kind: str) -> Iterator[Line]:
    with open(path, "rb") as file:
        file.seek(offset)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            offset += len(raw)
            yield _parse(raw, offset, kind)


def _parse(raw: bytes, end: int, kind: str) -> Line:
    try:
        line = json.loads(raw)
        if line.get("kind") == "rewind":
            return Line(0.0, 0, {}, end, int(line["place"]))
        if line.get("kind", "metric") != kind:
            return Line(0.0, 0, {}, end)
        figures = "values" if kind == "metric" else kind
        values = {NOT_IN_A_NAME.sub("_", name)[:250]: float(value) for name, value in line[figures].items()}
        return Line(float(line["time"]), int(line["step"] or 0), values, end)
    except (ValueError, KeyError, TypeError, AttributeError):
        # Torn by a crash of its writer, which went on with a new line.
        return Line(0.0, 0, {}, end)
