"""The two passes of mix over a part: the amount of each source, and the documents that are written, with their number
of copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from corpus.documents.parts import is_heldout
from corpus.documents.selection import read_table, write_selection
from corpus.documents.sources import count_by_source, source_numbers
from infra.process.partitions import Summary

BINS = 4096
"""Documents fall into this number of bins by a hash of their id; a part of a source is taken as its first bins."""


DOCUMENTS = "documents.npy"
DOCUMENT = np.dtype([("source", "<i4"), ("bin", "<i4"), ("heldout", "?"), ("bytes", "<i8")])
"""Facts about a document for the second pass: the number of its source in its part, and its bytes of text."""


@dataclass(frozen=True)
class CountBins:
    """Counts the bytes of each source by side of the split and bin: bins.npy (names, 2, BINS), held-out side last. What
    it found of each document is kept in documents.npy (N,)."""

    heldout_share: float
    seed: int

    def __call__(self, part: Path, out: Path) -> Summary:
        table = read_table(part, ["id", "text", "source", "group"])
        names, numbers = source_numbers(table["source"])
        documents = np.zeros(len(table), DOCUMENT)
        documents["source"] = numbers
        documents["heldout"] = heldout_flags(table["group"], self.heldout_share)
        documents["bin"] = bins_of(table["id"], self.seed)
        documents["bytes"] = pc.binary_length(table["text"]).to_numpy()
        counts = np.zeros((len(names), 2, BINS), np.int64)
        np.add.at(counts, (numbers, documents["heldout"].astype(np.int64), documents["bin"]), documents["bytes"])
        np.save(out / "bins.npy", counts)
        np.save(out / DOCUMENTS, documents)
        return {"names": names, "documents": len(table), "bytes": int(documents["bytes"].sum())}


@dataclass(frozen=True)
class Dose:
    """Amount of a source to write: its whole training side `whole` times, those of its documents below bin `bins` once
    more; of the held-out side the documents below bin `heldout_bins`, once."""

    full_epochs: int
    bins: int
    heldout_bins: int

    @property
    def epochs(self) -> int:
        """The epochs in which any of it is written."""
        return max(self.full_epochs + (self.bins > 0), int(self.heldout_bins > 0))


@dataclass(frozen=True)
class Epoch:
    """A part, its counts, and the number of the pass over it, from 0."""

    part: Path
    counted: Path
    names: tuple[str, ...]
    epoch: int


@dataclass(frozen=True)
class WriteSample:
    """Writes which documents of one part belong to one epoch."""

    doses: Mapping[str, Dose]

    def __call__(self, item: Epoch, out: Path) -> Summary:
        documents = np.load(item.counted / DOCUMENTS)
        doses = [self.doses[name] for name in item.names]
        train = np.array(
            [BINS if item.epoch < d.full_epochs else d.bins if item.epoch == d.full_epochs else 0 for d in doses]
        )
        heldout = np.array([dose.heldout_bins if item.epoch == 0 else 0 for dose in doses])
        source = documents["source"]
        rows = np.flatnonzero(documents["bin"] < np.where(documents["heldout"], heldout[source], train[source]))
        write_selection(item.part, rows, out, epoch=item.epoch)
        selected = documents[rows]
        counts = count_by_source(item.names, selected["source"], selected["bytes"])
        return {"counts": counts.as_json(), "bytes": int(selected["bytes"].sum())}


def choose_dose(epochs: float, bins: NDArray[np.int64]) -> Dose:
    """The dose of a source that is to be seen `epochs` times;

    Args:
        bins: its bytes, (2, BINS).
    """
    epochs = round(epochs, 9)
    whole_epochs = int(epochs)
    train, heldout = bins
    return Dose(
        whole_epochs, _first_bins(train, epochs - whole_epochs), BINS if whole_epochs else _first_bins(heldout, epochs)
    )


def _first_bins(bins: NDArray[np.int64], share: float) -> int:
    """Return the number of first bins whose share of all bytes is nearest to this one."""
    sums = np.concatenate([[0], np.cumsum(bins)])
    return int(np.abs(sums - share * sums[-1]).argmin())


def bins_of(ids: pa.ChunkedArray, seed: int) -> NDArray[np.int64]:
    """The bin of each document (N,), from nothing but its id and the seed."""
    return np.array(
        [xxhash.xxh3_64_intdigest(document_id.encode(), seed) % BINS for document_id in ids.to_pylist()], np.int64
    )


def heldout_flags(groups: pa.ChunkedArray, share: float) -> NDArray[np.bool_]:
    return np.array([is_heldout(group, share) for group in groups.to_pylist()], np.bool_)
