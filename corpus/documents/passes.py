"""Passes over a documents artifact, partition by partition, for stages that go through it more than once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from infra.process.partitions import Summary, map_partitions, partition_folder
from infra.run import Run


class Passes:
    """Passes over the parts of a documents artifact.

    parts: those that have documents. rows: the documents of each. firsts: the number, in the whole corpus, of the
    first document of each.
    """

    def __init__(self, run: Run, parts: Sequence[Path]) -> None:
        self.run = run
        filled = [(part, rows) for part in parts if (rows := pq.read_metadata(part).num_rows)]
        self.parts = [part for part, _ in filled]
        self.rows = [rows for _, rows in filled]
        self.firsts = [0, *accumulate(self.rows)][:-1]

    def over_all(self, step: str, function: Any) -> list[Summary]:
        return self.over(step, function, self.parts)

    def over(self, step: str, function: Any, items: Sequence[Any]) -> list[Summary]:
        return map_partitions(self.run, step, function, items, unit="documents", sizes=self.rows)

    def folders(self, step: str) -> list[Path]:
        return [partition_folder(self.run, step, index) for index in range(len(self.parts))]

    def joined(self, step: str, name: str) -> np.ndarray:
        return np.concatenate([np.load(folder / name) for folder in self.folders(step)])


def write_json(file: Path, value: Any) -> None:
    """Write JSON for people and pages: indented, in UTF-8."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf8")
