"""The two passes of decontaminate over a part: the search for test items, and the writing of the remaining text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from corpus.decontaminate.config import DecontaminateConfig
from corpus.decontaminate.index import Owners
from corpus.decontaminate.items import Item
from corpus.decontaminate.kernels import GramIndex, Searcher
from corpus.documents.cuts import Cut, without
from corpus.documents.dropped import dropped_rows
from corpus.documents.selection import read_table, write_selection
from corpus.documents.sources import count_table
from infra.process.partitions import Summary

RULE, PAPER = "test_item", "GPT-3, Brown et al., 2020, appendix C"
HITS = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "source", "task", "item", "text")),
        *((name, pa.int64()) for name in ("begin", "end")),
    ]
)
"""aux/hits.parquet: an item found in a document. text: the passage there with its surroundings; begin, end: of the
first of the n-grams that show it, in bytes of the document's UTF-8."""
ITEMS_OF_A_DOCUMENT = 10
AROUND_BYTES = 120


@dataclass(frozen=True)
class FindItems:
    """Writes hits.npy, see `corpus.decontaminate.kernels.find_items`."""

    index: Path

    def __call__(self, part: Path, out: Path) -> Summary:
        texts = read_table(part, ["text"])["text"]
        with np.load(self.index) as arrays:
            fields = {name: arrays[name] for name in GramIndex._fields}
        counts = {name: int(fields[name]) for name in ("ngram", "longest_alone", "longest_question")}
        hits = Searcher(GramIndex(**{**fields, **counts}))(texts)
        np.save(out / "hits.npy", hits)
        return {"documents": len(texts), "bytes": texts.nbytes}


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
        table = read_table(item.part, ["id", "text", "source"])
        with np.load(self.index) as arrays:
            owners = Owners(arrays["begins"], arrays["items"])
        hits = np.load(item.hits)
        hits = hits[~np.load(self.common)[hits[:, 1]]]
        texts = table["text"].take(pa.array(np.unique(hits[:, 0]))).to_pylist()
        changed: dict[int, list[Cut]] = {}
        rows: list[dict[str, Any]] = []
        by_item, by_task, cuts = Counter[str](), Counter[str](), 0
        dropped, values = [], []
        for text, (number, own_hits) in zip(texts, by_text(hits), strict=True):
            shown = items_shown(own_hits, owners)
            by_item.update(map(str, shown))
            by_task.update({self.items[index].task for index in shown})
            rows += rows_of_hits(table["id"][number].as_py(), table["source"][number].as_py(), text, shown, self.items)
            spans = places_to_cut(text, own_hits[:, 2:].tolist(), self.config) if self.config.action == "cut" else []
            left = cuts_between(text, kept_pieces(text, spans, self.config.min_piece_characters)) if spans else []
            if left:
                changed[number] = left
                cuts += len(spans)
            else:
                dropped.append(number)
                values.append(len(shown))
        kept = np.ones(len(table), bool)
        kept[dropped] = False
        write_selection(item.part, np.flatnonzero(kept), out, changed)
        lost = table.take(pa.array(dropped, pa.int64()))
        reasons = dropped_rows(lost, [RULE] * len(dropped), [PAPER] * len(dropped), np.array(values, float), high=0)
        pq.write_table(reasons, out / "dropped.parquet", compression="zstd")
        pq.write_table(pa.Table.from_pylist(rows, HITS), out / "hits.parquet", compression="zstd")
        return {
            "counts": count_table(without(table, changed), kept).as_json(),
            "documents": len(table),
            "bytes": table["text"].nbytes,
            "dropped": len(dropped),
            "cut": len(changed),
            "cuts": cuts,
            "items": by_item,
            "tasks": by_task,
        }


def rows_of_hits(
    document: str, source: str, text: str, shown: Mapping[int, tuple[int, int]], items: Sequence[Item]
) -> list[dict[str, Any]]:
    """Rows of hits.parquet for the items that show in a document."""
    return [
        {
            "id": document,
            "source": source,
            "task": items[number].task,
            "item": items[number].item,
            "text": _around(text, begin, end),
            "begin": begin,
            "end": end,
        }
        for number, (begin, end) in list(shown.items())[:ITEMS_OF_A_DOCUMENT]
    ]


def by_text(hits: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The number of each text that has hits, with its hits."""
    numbers, begins = np.unique(hits[:, 0], return_index=True)
    yield from zip(numbers.tolist(), np.split(hits, begins[1:]), strict=False)


def items_shown(hits: NDArray[np.int64], owners: Owners) -> dict[int, tuple[int, int]]:
    """The items that show in a text, with the first place of each."""
    shown: dict[int, tuple[int, int]] = {}
    for _, gram, begin, end in hits[np.argsort(hits[:, 2], kind="stable")].tolist():
        for item in owners.of(gram).tolist():
            shown.setdefault(item, (begin, end))
    return shown


def _around(text: str, begin: int, end: int) -> str:
    return text.encode()[max(0, begin - AROUND_BYTES) : end + AROUND_BYTES].decode(errors="ignore")


def places_to_cut(text: str, hits: Iterable[tuple[int, int]], config: DecontaminateConfig) -> list[tuple[int, int]]:
    """First character and end of what is to go from a text, with the context around it; none if there are too many.

    Args:
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
    return cuts if len(cuts) <= config.max_cuts else []


def kept_pieces(text: str, spans: Sequence[tuple[int, int]], least: int) -> list[tuple[int, int]]:
    """First character and end of what stays between the places, without the white space around it; pieces of fewer
    than `least` characters go."""
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    pieces = []
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        begin += len(text[begin:end]) - len(text[begin:end].lstrip())
        piece = text[begin:end].rstrip()
        if len(piece) >= least:
            pieces.append((begin, begin + len(piece)))
    return pieces


def cuts_between(text: str, pieces: Sequence[tuple[int, int]]) -> list[Cut]:
    """The cuts, in bytes, that leave of a text these pieces, joined by blank lines; none for no pieces."""
    if not pieces:
        return []
    edges = [0, *(edge for piece in pieces for edge in piece), len(text)]
    ends = list(accumulate(len(text[begin:end].encode()) for begin, end in pairwise([0, *edges])))
    cuts = [Cut(*between) for between in zip(ends[::2], ends[1::2], strict=True)]
    inner = [cut._replace(put="\n\n") for cut in cuts[1:-1]]
    return [cut for cut in (cuts[0], *inner, cuts[-1]) if cut.begin < cut.end or cut.put]
