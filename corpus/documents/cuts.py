"""Bytes that are cut out of texts: described as places, applied to a table of documents, and joined in sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa


class Cut(NamedTuple):
    """Bytes `begin` to `end` of a text's UTF-8 are removed and replaced by `put`."""

    begin: int
    end: int
    put: str = ""


def without(documents: pa.Table, cuts: Mapping[int, Sequence[Cut]]) -> pa.Table:
    """Return the documents (N) without the cuts of some texts;

    Args:
        cuts: by place among the N.
    """
    from corpus.documents.words import text_buffers

    if not cuts:
        return documents
    data, begins = text_buffers(documents["text"])
    all_bytes = data.data
    sizes = np.diff(begins)
    pieces: list[bytes | memoryview] = []
    at = int(begins[0])
    for row in sorted(cuts):
        begin = int(begins[row])
        for cut in cuts[row]:
            put = cut.put.encode()
            pieces += [all_bytes[at : begin + cut.begin], put]
            sizes[row] += len(put) - (cut.end - cut.begin)
            at = begin + cut.end
    pieces.append(all_bytes[at : int(begins[-1])])
    buffers = [None, pa.py_buffer(np.concatenate([[0], np.cumsum(sizes)])), pa.py_buffer(b"".join(pieces))]
    texts = pa.Array.from_buffers(pa.large_string(), len(documents), buffers)
    return with_column(documents, "text", texts.cast(pa.string()))


def joined(first: Sequence[Cut], then: Sequence[Cut]) -> list[Cut]:
    """Cuts with the combined effect of `first`, and of `then` on the text that `first` leaves."""
    if not first or not then:
        return [*first, *then]
    left = _runs(first, [ByteRun(0, END)])
    cuts: list[Cut] = []
    at, put = 0, b""
    for run in _runs(then, left):
        if run.begin == run.end:
            put += run.put
        elif run.begin == at and not put:
            at = run.end
        else:
            cuts.append(Cut(at, run.begin, put.decode()))
            at, put = run.end, b""
    return cuts


END = 1 << 62
"""Beyond the end of every text."""


@dataclass(frozen=True)
class ByteRun:
    """Bytes of a text that stay, or, where those are none, bytes that are put in."""

    begin: int
    end: int
    put: bytes = b""

    def __len__(self) -> int:
        return self.end - self.begin + len(self.put)

    def between(self, begin: int, end: int) -> ByteRun:
        if self.put:
            return ByteRun(0, 0, self.put[begin:end])
        return ByteRun(self.begin + begin, min(self.begin + end, self.end))


def _runs(cuts: Sequence[Cut], text: Sequence[ByteRun]) -> list[ByteRun]:
    """Apply cuts to a text that consists of runs, the last of which extends to END, and return the remaining runs."""
    left: list[ByteRun] = []
    kept_from = 0
    for cut in [*cuts, Cut(END, END)]:
        offset = 0
        for run in text:
            begin, end = max(kept_from - offset, 0), min(cut.begin - offset, len(run))
            if begin < end:
                left.append(run.between(begin, end))
            offset += len(run)
        if cut.put:
            left.append(ByteRun(0, 0, cut.put.encode()))
        kept_from = cut.end
    return left


def with_column(documents: pa.Table, column: str, values: pa.Array) -> pa.Table:
    return documents.set_column(documents.schema.get_field_index(column), column, values)
