"""Search for duplicates: exact hashes and bands are sorted, and documents in one bucket are compared.

Memory holds some numbers per document and one band of hashes; sets of shingles are read from disk in pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from corpus.dedupe.kernels import Sets, compare_buckets, settle_chains
from corpus.dedupe.signatures import BANDS, EXACT, LENGTHS, SHINGLES, SIZES
from infra.run import Run

PIECE_SHINGLES = 50_000_000
"""Shingles that the buckets compared at a time may read, 200 MB."""
Indices = NDArray[np.int64]


@dataclass
class Duplicates:
    """Of each of N documents: the kept one that it duplicates, -1 for those that are kept themselves; how similar it is
    to it, 1 for exact duplicates; and whether it is an exact one."""

    originals: Indices
    similarities: NDArray[np.float32]
    exact: NDArray[np.bool_]

    @classmethod
    def none_of(cls, documents: int) -> Duplicates:
        return cls(np.full(documents, -1, np.int64), np.zeros(documents, np.float32), np.zeros(documents, np.bool_))

    def follow_exact(self) -> None:
        """Make a document that equals a dropped near duplicate a duplicate of the same original."""
        gone = np.flatnonzero(self.exact)
        gone = gone[self.originals[self.originals[gone]] >= 0]
        firsts = self.originals[gone]
        self.originals[gone], self.similarities[gone] = self.originals[firsts], self.similarities[firsts]
        self.exact[gone] = False


def order_of_preference(folders: Sequence[Path], keep: str) -> Indices:
    """The documents' numbers, those to keep first."""
    lengths = np.concatenate([np.load(folder / LENGTHS) for folder in folders])
    return np.argsort(-lengths, kind="stable") if keep == "longest" else np.arange(lengths.size)


def find_exact(folders: Sequence[Path], order: Indices, found: Duplicates) -> None:
    hashes = np.concatenate([np.load(folder / EXACT) for folder in folders])[order]
    members, buckets = buckets_of(hashes, np.arange(hashes.size))
    firsts = np.repeat(members[buckets[:-1]], np.diff(buckets))
    again = members != firsts
    found.originals[order[members[again]]] = order[firsts[again]]
    found.exact[:] = found.originals >= 0
    found.similarities[found.exact] = 1


def mark_candidates(folders: Sequence[Path], bands: int, found: Duplicates, run: Run) -> NDArray[np.bool_]:
    """Return a mask of the documents that share a bucket with another, except for those that are duplicates already."""
    left = np.flatnonzero(found.originals < 0)
    marks = np.zeros(found.originals.size, np.bool_)
    for band in range(bands):
        run.stop_if_cancelled()
        members, _ = buckets_of(_band(folders, band)[left], left)
        marks[members] = True
    return marks


def find_near(
    folders: Sequence[Path],
    bands: int,
    sets: SetFile,
    order: Indices,
    threshold: float,
    found: Duplicates,
    run: Run,
) -> None:
    """Compares documents that share a bucket, band after band; documents found to be duplicates are excluded from later
    bands.

    Where A is like B and B like C, but not A like C, B is dropped for A and C comes back; the buckets are then gone
    through again. It ends, since each time one more document, in the order of preference, is settled.
    """
    candidates = order[sets.marks[order]]  # (M,), those to keep first
    originals, similarities = np.full(candidates.size, -1, np.int64), np.zeros(candidates.size, np.float32)
    came_back = candidates.size
    while came_back:
        for band in range(bands):
            left = np.flatnonzero(originals < 0)
            members, buckets = buckets_of(_band(folders, band)[candidates[left]], left)
            for piece in _pieces(buckets, sets.sizes[candidates[members]]):
                run.stop_if_cancelled()
                compare_buckets(members, piece, sets.of(candidates), threshold, originals, similarities)
            run.progress(band + 1, bands, "bands", f"{int((originals >= 0).sum()):,} near duplicates")
        came_back = settle_chains(sets.of(candidates), threshold, originals, similarities)
    again = originals >= 0
    found.originals[candidates[again]] = candidates[originals[again]]
    found.similarities[candidates[again]] = similarities[again]
    found.follow_exact()


class SetFile:
    """The sets of shingles of the marked documents, all in one file."""

    def __init__(self, file: Path, folders: Sequence[Path], marks: NDArray[np.bool_]) -> None:
        self.marks = marks
        self.sizes = np.zeros(marks.size, np.int64)
        self.sizes[marks] = np.concatenate([np.load(folder / SIZES) for folder in folders])
        self._begins = np.cumsum(self.sizes) - self.sizes
        self._file = file
        with file.open("wb") as joined:
            for folder in folders:
                np.load(folder / SHINGLES, mmap_mode="r").tofile(joined)

    def of(self, documents: Indices) -> Sets:
        """Return their sets, with a new mapping: pages that were read for an earlier mapping are freed with it."""
        empty = self._file.stat().st_size == 0
        shingles = np.zeros(0, np.uint32) if empty else np.memmap(self._file, np.uint32, "r").view(np.ndarray)
        return Sets(shingles, self._begins[documents], self.sizes[documents])


def _band(folders: Sequence[Path], band: int) -> NDArray[np.uint64]:
    return np.concatenate([np.load(folder / BANDS, mmap_mode="r")[band] for folder in folders])


def buckets_of(hashes: NDArray[np.uint64], ids: Indices) -> tuple[Indices, Indices]:
    """The ids of those that share their hash with another, and where each bucket of them begins, with the end."""
    by_hash = np.argsort(hashes, kind="stable")
    ordered = hashes[by_hash]
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    sizes = np.diff(np.append(begins, ordered.size))
    shared = np.repeat(sizes > 1, sizes)
    return ids[by_hash[shared]], np.concatenate([[0], np.cumsum(sizes[sizes > 1])])


def _pieces(buckets: Indices, sizes: Indices) -> Iterator[Indices]:
    """The buckets in turns, so that the sets of a turn have some PIECE_SHINGLES; sizes: of the members' sets."""
    read = np.concatenate([[0], np.cumsum(sizes)])[buckets]
    cuts = np.flatnonzero(np.diff(read // PIECE_SHINGLES)) + 1
    for first, last in itertools.pairwise([0, *cuts.tolist(), buckets.size - 1]):
        yield buckets[first : last + 1]
