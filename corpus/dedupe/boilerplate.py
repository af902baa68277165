"""Lines or paragraphs that occur in many documents are cut out of all of them.

Two passes: each part writes the hashes of its units, divided by their first bits into as many files as there is memory
for one of; then the units that occurred in too many documents are cut out of each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from corpus.dedupe.config import Boilerplate
from corpus.documents.cuts import Cut, without
from corpus.documents.dropped import dropped_rows
from corpus.documents.passes import Passes
from corpus.documents.selection import read_table, write_selection
from corpus.documents.words import Bytes, Hashes, mix64, text_buffers
from infra.native import kernel
from infra.process.partitions import Summary

RULE, PAPER = "boilerplate", "CCNet, Wenzek et al., 2020"
BUCKETS = 64
SAMPLES = 20
"""Cut units that are reported, those in most documents first."""


class Common(NamedTuple):
    """Units that occur in too many documents: their hashes (C,), ascending, and the number of documents of each."""

    hashes: Hashes
    documents: NDArray[np.int64]

    def most_frequent(self) -> list[int]:
        most = np.argsort(-self.documents, kind="stable")[:SAMPLES]
        return [int(unit) for unit in self.hashes[most]]


def cut_boilerplate(config: Boilerplate, passes: Passes) -> tuple[list[Path], dict[str, Any]]:
    """Return the parts without their boilerplate, except for those of which nothing is left, and the report of it."""
    passes.over_all("units", HashUnits(config))
    common = _common(config, passes.folders("units"))
    file = passes.run.work_dir / "boilerplate.npz"
    np.savez(file, **common._asdict())
    written = passes.over_all("boilerplate", WriteWithout(config, file))
    samples = {unit: text for summary in written for unit, text in summary["samples"].items()}
    documents = dict(zip(common.hashes.tolist(), common.documents.tolist(), strict=True))
    totals = ("units", "unit_bytes", "changed", "dropped")
    message = {
        **{name: sum(summary[name] for summary in written) for name in totals},
        "samples": [{"text": samples[str(u)], "documents": documents[u]} for u in common.most_frequent()],
    }
    parts = [folder / "documents" / "part-00000.parquet" for folder in passes.folders("boilerplate")]
    return [part for part in parts if pq.read_metadata(part).num_rows], message


@dataclass(frozen=True)
class HashUnits:
    """Writes the hashes of a part's units, each once a document: NN.npy by their first bits, ascending."""

    config: Boilerplate

    def __call__(self, part: Path, out: Path) -> Summary:
        texts = read_table(part, ["text"])["text"]
        data, begins = text_buffers(texts)
        units, owners, _ = find_units(data, begins, self.config.unit == "paragraph", self.config.min_characters)
        order = np.lexsort((owners, units))
        units, owners = units[order], owners[order]
        fresh = np.ones(units.size, bool)
        fresh[1:] = (units[1:] != units[:-1]) | (owners[1:] != owners[:-1])
        units = units[fresh]
        cuts = np.searchsorted(units, np.arange(1, BUCKETS, dtype=np.uint64) * np.uint64((1 << 64) // BUCKETS))
        for number, some in enumerate(np.split(units, cuts)):
            np.save(out / f"{number:02}.npy", some)
        return {"documents": len(texts), "bytes": int(begins[-1] - begins[0])}


@dataclass(frozen=True)
class WriteWithout:
    """Writes which documents of a part are left without the common units, and dropped.parquet with those of which
    nothing else was left."""

    config: Boilerplate
    common: Path

    def __call__(self, part: Path, out: Path) -> Summary:
        table = read_table(part, ["id", "text", "source"])
        with np.load(self.common) as arrays:
            common = Common(arrays["hashes"], arrays["documents"])
        data, begins = text_buffers(table["text"])
        units, owners, places = find_units(data, begins, self.config.unit == "paragraph", self.config.min_characters)
        known = np.isin(units, common.hashes)
        cuts: dict[int, list[Cut]] = {}
        within = places[known] - begins[owners[known], None]
        for owner, (begin, end) in zip(owners[known].tolist(), within.tolist(), strict=True):
            cuts.setdefault(owner, []).append(Cut(begin, end))
        left = pc.not_equal(pc.utf8_trim_whitespace(without(table, cuts)["text"]), "")
        write_selection(part, np.flatnonzero(left), out, cuts)
        lost = table.filter(pc.invert(left))
        ones = np.ones(len(lost))
        rows = dropped_rows(lost, [RULE] * len(lost), [PAPER] * len(lost), ones, high=0)
        pq.write_table(rows, out / "dropped.parquet", compression="zstd")
        shown: dict[int, str] = {}
        for unit, (begin, end) in zip(units[known].tolist(), places[known].tolist(), strict=True):
            shown.setdefault(unit, data[begin:end].tobytes().decode().strip())
        return {
            "documents": len(table),
            "bytes": int(begins[-1] - begins[0]),
            "units": int(known.sum()),
            "unit_bytes": int(np.diff(places[known], axis=1).sum()),
            "changed": int(np.unique(owners[known]).size),
            "dropped": len(lost),
            "samples": {str(unit): shown[unit] for unit in common.most_frequent() if unit in shown},
        }


@kernel
def find_units(
    data: Bytes, begins: NDArray[np.int64], paragraphs: bool, min_bytes: int
) -> tuple[Hashes, NDArray[np.int64], NDArray[np.int64]]:
    """The lines or paragraphs of at least `min_bytes` without the space around them: the hash of each (U,), the text
    that it belongs to (U,), and its first byte and end with the line break (U, 2)."""
    breaks = begins.size
    for byte in data[begins[0] : begins[-1]]:
        breaks += byte == 10
    hashes, owners = np.empty(breaks, np.uint64), np.empty(breaks, np.int64)
    places = np.empty((breaks, 2), np.int64)
    count = 0
    for text in range(begins.size - 1):
        begin, end = begins[text], begins[text + 1]
        while begin < end:
            at = begin
            value, size, gap, ended = np.uint64(0xCBF29CE484222325), 0, 0, False
            while at < end and not ended:
                byte = data[at]
                at += 1
                if byte == 10:
                    # A paragraph goes on up to a second line break with nothing but space before it.
                    blank = at
                    while blank < end and (data[blank] == 32 or data[blank] == 9 or data[blank] == 13):
                        blank += 1
                    if not paragraphs:
                        ended = True
                    elif blank < end and data[blank] == 10:
                        ended = True
                        at = blank + 1
                if byte == 32 or 9 <= byte <= 13:
                    gap = 1 if size else 0
                else:
                    if gap:
                        value = (value ^ np.uint64(32)) * np.uint64(0x100000001B3)
                    value = (value ^ np.uint64(byte)) * np.uint64(0x100000001B3)
                    size += 1 + gap
                    gap = 0
            if size >= min_bytes:
                hashes[count], owners[count] = mix64(value), text
                places[count, 0], places[count, 1] = begin, at
                count += 1
            begin = at
    return hashes[:count], owners[:count], places[:count]


def _common(config: Boilerplate, folders: Sequence[Path]) -> Common:
    """The units of more than `max_documents` documents; holds one bucket of all parts at a time."""
    hashes, documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for bucket in range(BUCKETS):
        units = np.concatenate([np.load(folder / f"{bucket:02}.npy") for folder in folders])
        found, counts = np.unique(units, return_counts=True)
        many = counts > config.max_documents
        hashes.append(found[many])
        documents.append(counts[many])
    return Common(np.concatenate(hashes), np.concatenate(documents))
