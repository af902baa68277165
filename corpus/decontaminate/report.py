"""Contamination by task, with samples: aux/contamination.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from corpus.decontaminate.index import Owners
from corpus.decontaminate.items import Item
from corpus.documents.passes import write_json

SAMPLES_OF_A_TASK = 5


def write_contamination(
    aux: Path, items: Sequence[Item], owners: Owners, hit: Mapping[int, int], documents: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """Write contamination.json next to hits.parquet and return the counts of each task.

    Args:
        owners: of the index that was searched for.
        hit: number of times that each item was found, by its number.
        documents: number of documents or pairs in which an item of each task was found.
    """
    searched = np.zeros(len(items), np.bool_)
    searched[owners.items] = True
    hit_of, missing_of = (
        Counter(items[number].task for number in numbers) for numbers in (hit, np.flatnonzero(~searched).tolist())
    )
    tasks = {
        task: {
            "items": count,
            "items_hit": hit_of[task],
            "documents_hit": documents.get(task, 0),
            # All that these consist of is a template of the task, or nothing.
            **({"items_not_searched": missing_of[task]} if missing_of[task] else {}),
        }
        for task, count in sorted(Counter(item.task for item in items).items())
    }
    write_json(aux / "contamination.json", {"tasks": tasks, "samples": _samples(aux / "hits.parquet", items)})
    return tasks


def _samples(hits: Path, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Some hits of each task, with the item's text next to the document's."""
    texts = {(item.task, item.item): item.texts[0] for item in items}
    taken: Counter[str] = Counter()
    samples = []
    with pq.ParquetFile(hits) as file:
        for batch in file.iter_batches(1000):
            for row in batch.to_pylist():
                if taken[row["task"]] < SAMPLES_OF_A_TASK:
                    taken[row["task"]] += 1
                    samples.append({**row, "item_text": texts[row["task"], row["item"]]})
    return samples


def not_searched(tasks: Mapping[str, Mapping[str, int]]) -> str:
    """An addition to a headline; "" where all items were searched for."""
    count = sum(task.get("items_not_searched", 0) for task in tasks.values())
    return f"; {count:,} items have no text of their own to search for" if count else ""
