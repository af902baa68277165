"""The two passes of mix over a part: what there is of each source, and which of it is written, how often."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from corpus.documents import SCHEMA, is_heldout, write_part
from corpus.sources import count_table, source_numbers
from infra.partitions import Summary

BINS = 4096
"""Documents fall into so many bins by a hash of their id; a part of a source is taken as its first bins."""


@dataclass(frozen=True)
class CountBins:
    """Counts the bytes of each source by side of the split and bin: bins.npy (names, 2, BINS), held-out side last."""

    heldout_share: float
    seed: int

    def __call__(self, part: Path, out: Path) -> Summary:
        table = pq.read_table(part, columns=["id", "text", "source", "group"])
        names, numbers = source_numbers(table["source"])
        sizes = pc.binary_length(table["text"]).to_numpy()
        counts = np.zeros((len(names), 2, BINS), np.int64)
        side = heldout_flags(table["group"], self.heldout_share).astype(np.int64)
        np.add.at(counts, (numbers, side, bins_of(table["id"], self.seed)), sizes)
        np.save(out / "bins.npy", counts)
        return {"names": names, "documents": len(table), "bytes": int(sizes.sum())}


@dataclass(frozen=True)
class Dose:
    """How much is written of a source: its whole training side `whole` times, those of its documents below bin `bins`
    once more; of the held-out side the documents below bin `heldout_bins`, once."""

    whole: int
    bins: int
    heldout_bins: int

    @property
    def epochs(self) -> int:
        """The epochs in which any of it is written."""
        return max(self.whole + (self.bins > 0), int(self.heldout_bins > 0))


@dataclass(frozen=True)
class Epoch:
    """A part, and the how-many-th time it is gone through, from 0."""

    part: Path
    epoch: int


@dataclass(frozen=True)
class WriteSample:
    """Writes the documents of one part that belong to one epoch. From the second on `metadata` says which."""

    doses: Mapping[str, Dose]
    heldout_share: float
    seed: int

    def __call__(self, item: Epoch, out: Path) -> Summary:
        table = pq.read_table(item.part, columns=SCHEMA.names)
        names, numbers = source_numbers(table["source"])
        doses = [self.doses[name] for name in names]
        train = np.array([BINS if item.epoch < d.whole else d.bins if item.epoch == d.whole else 0 for d in doses])
        heldout = np.array([dose.heldout_bins if item.epoch == 0 else 0 for dose in doses])
        limits = np.where(heldout_flags(table["group"], self.heldout_share), heldout[numbers], train[numbers])
        taken = table.filter(pa.array(bins_of(table["id"], self.seed) < limits))
        if item.epoch:
            metadata = [with_epoch(text, item.epoch) for text in taken["metadata"].to_pylist()]
            place = taken.schema.get_field_index("metadata")
            taken = taken.set_column(place, "metadata", pa.array(metadata, pa.string()))
        write_part(taken, out)
        return {"counts": count_table(taken).as_json(), "bytes": table["text"].nbytes}


def choose_dose(epochs: float, bins: NDArray[np.int64]) -> Dose:
    """The dose of a source that is to be seen `epochs` times; bins: its bytes, (2, BINS)."""
    epochs = round(epochs, 9)
    whole = int(epochs)
    train, heldout = bins
    return Dose(whole, _first_bins(train, epochs - whole), BINS if whole else _first_bins(heldout, epochs))


def _first_bins(bins: NDArray[np.int64], share: float) -> int:
    """How many first bins hold most nearly this share of all bytes."""
    sums = np.concatenate([[0], np.cumsum(bins)])
    return int(np.abs(sums - share * sums[-1]).argmin())


def bins_of(ids: pa.ChunkedArray, seed: int) -> NDArray[np.int64]:
    """The bin of each document (N,), from nothing but its id and the seed."""
    return np.array([xxhash.xxh3_64_intdigest(one, seed) % BINS for one in ids.to_pylist()], np.int64)


def heldout_flags(groups: pa.ChunkedArray, share: float) -> NDArray[np.bool_]:
    return np.array([is_heldout(group, share) for group in groups.to_pylist()], np.bool_)


def with_epoch(metadata: str, epoch: int) -> str:
    """A document's metadata with the number of its repetition."""
    return json.dumps({**json.loads(metadata or "{}"), "epoch": epoch}, ensure_ascii=False)
