"""The first pass over the text: a hash of each document, and its MinHash signature by bands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from corpus.dedupe.bands import Bands, choose_bands
from corpus.dedupe.config import DedupeConfig, NearDuplicates
from corpus.dedupe.kernels import SET_LIMIT, hash_texts, shingle_texts, sign_texts
from corpus.documents.marks import mark_tables
from corpus.documents.selection import read_table
from corpus.documents.sources import source_numbers
from corpus.documents.words import Bytes, text_buffers
from infra.process.partitions import Summary

EXACT, BANDS, LENGTHS, IDS, NAMES = "exact.npy", "bands.npy", "lengths.npy", "ids.npy", "names.npy"
SHINGLES, SIZES = "shingles.npy", "sizes.npy"


@dataclass(frozen=True)
class SignDocuments:
    """Writes of one part, for N documents: exact.npy (N,), lengths.npy (N,) in bytes, ids.npy (N,), names.npy (N,),
    numbers of source names, and bands.npy (bands, N)."""

    config: DedupeConfig

    def __call__(self, part: Path, out: Path) -> Summary:
        table = read_table(part, ["id", "text", "source"])
        data, begins = text_buffers(table["text"])
        names, numbers = source_numbers(table["source"])
        salt = np.uint64(0) if self.config.across_sources else _hashes(names)[numbers]
        exact = np.empty(len(table), np.uint64)
        hash_texts(data, begins, exact)
        np.save(out / EXACT, exact ^ salt)
        np.save(out / LENGTHS, np.diff(begins))
        np.save(out / IDS, np.array(table["id"].to_pylist(), dtype=bytes))
        np.save(out / NAMES, numbers)
        if near := self.config.near:
            bands = choose_bands(near.threshold, near.min_recall, near.max_hashes)
            assert bands is not None
            signed = np.empty((bands.bands, len(table)), np.uint64)
            factors, shifts = hash_functions(bands, self.config.seed)
            sign_texts(data, begins, mark_tables(), near.marks, near.ngram, factors, shifts, signed)
            np.save(out / BANDS, signed ^ salt)
        return {"documents": len(table), "bytes": int(begins[-1] - begins[0]), "names": names}


@dataclass(frozen=True)
class PartOfMarks:
    """A part with its share of the marks of all documents: marks[first:first + rows]."""

    part: Path
    marks: Path
    first: int


@dataclass(frozen=True)
class WriteShingles:
    """Writes the sets of shingles of the marked documents of one part, ascending, one after the other."""

    near: NearDuplicates

    def __call__(self, item: PartOfMarks, out: Path) -> Summary:
        texts = read_table(item.part, ["text"])["text"]
        marks = np.load(item.marks, mmap_mode="r")[item.first : item.first + len(texts)]
        chosen = np.flatnonzero(marks)
        data, begins = text_buffers(texts)
        found = sets_of_shingles(data, begins, chosen, self.near.ngram, self.near.marks)
        places = (found >> np.uint64(32)).astype(np.int64)
        sizes = np.bincount(places, minlength=chosen.size)
        rank = np.arange(found.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        np.save(out / SHINGLES, found[rank < SET_LIMIT].astype(np.uint32))
        np.save(out / SIZES, np.minimum(sizes, SET_LIMIT))
        return {"documents": len(texts), "bytes": int(np.diff(begins)[chosen].sum())}


def sets_of_shingles(
    data: Bytes, begins: NDArray[np.int64], chosen: NDArray[np.int64], ngram: int, marks: bool
) -> NDArray[np.uint64]:
    """The shingles of the chosen texts, see `shingle_texts`, ascending and each once."""
    found = shingle_texts(data, begins, mark_tables(), marks, ngram, chosen)
    # np.unique has used a hash table since numpy 2.3, which takes 50 times as long for a million shingles.
    found.sort()
    is_first = np.ones(found.size, np.bool_)
    is_first[1:] = found[1:] != found[:-1]
    unique: NDArray[np.uint64] = found[is_first]
    return unique


def hash_functions(bands: Bands, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors and shifts of the permutations x → factor · x + shift mod 2^32, (bands · rows,) each."""
    generator = np.random.default_rng(seed)
    count = bands.bands * bands.rows
    odd = generator.integers(0, 1 << 31, count, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return odd, generator.integers(0, 1 << 32, count, dtype=np.uint32)


def _hashes(names: Sequence[str]) -> np.ndarray:
    return np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in names], np.uint64)
