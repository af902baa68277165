"""The two passes of decontaminate over a part: where test items show, and what is written because of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from corpus.decontaminate.config import DecontaminateConfig
from corpus.decontaminate.items import Index, Item, Owners
from corpus.decontaminate.kernels import find_items, make_filter
from corpus.documents import SCHEMA, write_part
from corpus.dropped import dropped_rows
from corpus.sources import count_table
from corpus.words import character_table, text_buffers
from infra.partitions import Summary

RULE, PAPER = "test_item", "GPT-3, Brown et al., 2020, appendix C"
HITS = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "source", "task", "item", "text")),
        *((name, pa.int64()) for name in ("begin", "end")),
    ]
)
"""aux/hits.parquet: an item that shows in a document. text: what stands there with its surroundings; begin, end: of
the first of the n-grams that show it, in bytes of the document's UTF-8."""
ITEMS_OF_A_DOCUMENT = 10
AROUND_BYTES = 120


@dataclass(frozen=True)
class FindItems:
    """Writes hits.npy, see `find_items`."""

    index: Path

    def __call__(self, part: Path, out: Path) -> Summary:
        texts = pq.read_table(part, columns=["text"])["text"]
        data, begins = text_buffers(texts)
        with np.load(self.index) as arrays:
            index = Index(arrays["lengths"], arrays["grams"], arrays["alone"], int(arrays["longest_alone"]))
        hits = find_items(
            data,
            begins,
            character_table(),
            index.lengths,
            index.grams,
            make_filter(index.grams),
            index.alone,
            make_filter(index.alone),
            index.longest_alone,
        )
        np.save(out / "hits.npy", hits)
        return {"documents": len(texts), "bytes": int(begins[-1] - begins[0])}


@dataclass(frozen=True)
class FoundPart:
    """A part with its hits."""

    part: Path
    hits: Path


@dataclass(frozen=True)
class WriteClean:
    """Writes of one part documents/, dropped.parquet and hits.parquet. common: a file of flags, one for each hash, of
    those that count as no hit."""

    config: DecontaminateConfig
    items: tuple[Item, ...]
    index: Path
    common: Path

    def __call__(self, item: FoundPart, out: Path) -> Summary:
        table = pq.read_table(item.part, columns=SCHEMA.names)
        with np.load(self.index) as arrays:
            owners = Owners(arrays["begins"], arrays["items"])
        hits = np.load(item.hits)
        hits = hits[~np.load(self.common)[hits[:, 1]]]
        texts = table["text"].take(pa.array(np.unique(hits[:, 0]))).to_pylist()
        changed: dict[int, str] = {}
        rows: list[dict[str, Any]] = []
        by_item, by_task, cuts = Counter[str](), Counter[str](), 0
        gone, values = [], []
        for text, (number, mine) in zip(texts, _by_text(hits), strict=True):
            shown = _items_shown(mine, owners)
            by_item.update(map(str, shown))
            by_task.update({self.items[one].task for one in shown})
            document = {"id": table["id"][number].as_py(), "source": table["source"][number].as_py()}
            for one, (begin, end) in list(shown.items())[:ITEMS_OF_A_DOCUMENT]:
                found = self.items[one]
                where = {"task": found.task, "item": found.item, "text": _around(text, begin, end)}
                rows.append({**document, **where, "begin": begin, "end": end})
            left, count = cut_out(text, mine[:, 2:].tolist(), self.config) if self.config.action == "cut" else ("", 0)
            if left:
                changed[number] = left
                cuts += count
            else:
                gone.append(number)
                values.append(len(shown))
        kept = np.ones(len(table), bool)
        kept[gone] = False
        stays = _with_texts(table, changed).filter(pa.array(kept))
        write_part(stays, out)
        lost = table.take(pa.array(gone, pa.int64()))
        reasons = dropped_rows(lost, [RULE] * len(gone), [PAPER] * len(gone), np.array(values, float), high=0)
        pq.write_table(reasons, out / "dropped.parquet", compression="zstd")
        pq.write_table(pa.Table.from_pylist(rows, HITS), out / "hits.parquet", compression="zstd")
        return {
            "counts": count_table(stays).as_json(),
            "documents": len(table),
            "bytes": table["text"].nbytes,
            "dropped": len(gone),
            "cut": len(changed),
            "cuts": cuts,
            "items": by_item,
            "tasks": by_task,
        }


def _by_text(hits: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    numbers, begins = np.unique(hits[:, 0], return_index=True)
    yield from zip(numbers.tolist(), np.split(hits, begins[1:]), strict=False)


def _items_shown(hits: NDArray[np.int64], owners: Owners) -> dict[int, tuple[int, int]]:
    """The items that show in a text, with the first place of each."""
    shown: dict[int, tuple[int, int]] = {}
    for _, gram, begin, end in hits[np.argsort(hits[:, 2], kind="stable")].tolist():
        for item in owners.of(gram).tolist():
            shown.setdefault(item, (begin, end))
    return shown


def _around(text: str, begin: int, end: int) -> str:
    return text.encode()[max(0, begin - AROUND_BYTES) : end + AROUND_BYTES].decode(errors="ignore")


def _with_texts(table: pa.Table, changed: dict[int, str]) -> pa.Table:
    if not changed:
        return table
    texts = table["text"].to_pylist()
    for number, text in changed.items():
        texts[number] = text
    return table.set_column(table.schema.get_field_index("text"), "text", pa.array(texts, pa.string()))


def cut_out(text: str, hits: Iterable[tuple[int, int]], config: DecontaminateConfig) -> tuple[str, int]:
    """What is left of a text, its pieces joined by blank lines, and how many cuts it took; "" if there were too many.

    hits: first byte and end of each, in the text's UTF-8.
    """
    data = text.encode()
    cuts: list[tuple[int, int]] = []
    for first, end in sorted(hits):
        begin = len(data[:first].decode(errors="ignore"))
        low = max(0, begin - config.context_characters)
        high = begin + len(data[first:end].decode(errors="ignore")) + config.context_characters
        if cuts and low <= cuts[-1][1]:
            cuts[-1] = (cuts[-1][0], max(high, cuts[-1][1]))
        else:
            cuts.append((low, high))
    if len(cuts) > config.max_cuts:
        return "", len(cuts)
    edges = [0, *(edge for cut in cuts for edge in cut), len(text)]
    pieces = (text[begin:end].strip() for begin, end in zip(edges[::2], edges[1::2], strict=True))
    return "\n\n".join(piece for piece in pieces if len(piece) >= config.min_piece_characters), len(cuts)
