"""Passages that occurred before are cut out of documents, and documents of which too little is left are dropped.

A window of `min_bytes` bytes is a repeat if the same bytes occur before it, in an earlier text or earlier in its own,
without overlapping it. The bytes of all repeats are cut out, at the boundaries of words. A suffix array of the corpus
gives the same windows, but needs nine bytes of memory per byte of text; here, memory holds a partition.

1. Each part writes its text, and the hashes of the anchors of its windows (`corpus.dedupe.substring_kernels`), one for
   some fifty bytes. Equal windows have equal anchors, so windows whose anchor occurs once in the corpus are no repeats.
2. Each part writes 128-bit hashes of the other windows, sorted; those of all parts are merged in slices.
3. Each part compares its repeats with the bytes that they repeat, and cuts them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from corpus.dedupe.config import Substrings
from corpus.dedupe.substring_kernels import (
    Positions,
    Rolling,
    Scan,
    are_equal,
    find_anchors,
    find_runs,
    hash_windows,
    order_of_hashes,
    point_back,
    repeated_spans,
    trim_spans,
)
from corpus.documents.cuts import Cut, without
from corpus.documents.dropped import dropped_rows
from corpus.documents.passes import Passes
from corpus.documents.selection import read_table, write_selection
from corpus.documents.sources import SourceCounts, count_table, source_numbers
from corpus.documents.words import Bytes, Hashes, character_table, text_buffers
from infra.errors import stage_error
from infra.process.partitions import Summary
from infra.run import Run

RULE, PAPER = "substring", "Lee et al., 2022"
SAMPLES, SAMPLE_CHARACTERS = 20, 600
"""Passages that are reported, the longest first."""
ROWS_AT_ONCE = 4_000_000
"""Hashes that are sorted at a time, some 200 MB with what sorting needs."""


@dataclass(frozen=True)
class CutText:
    """Result of cutting: folders of `write_selection` with their dropped.parquet, what is left by source, and the
    report."""

    folders: list[Path]
    counts: SourceCounts
    report: dict[str, Any]


def cut_substrings(config: Substrings, across_sources: bool, seed: int, parts: Sequence[Path], run: Run) -> CutText:
    """Cut repeats out of the documents of some parts. Raises StageError `hashes_collide`."""
    passes = Passes(run, parts)
    scanner = Scanner(config.min_bytes, across_sources, seed)
    anchors = [summary["anchors"] for summary in passes.over_all("anchors", WriteAnchors(scanner))]
    repeated = run.work_dir / "repeated_anchors.bin"
    mark_repeated_anchors(passes.folders("anchors"), anchors, repeated, run)
    firsts = _offsets(anchors)
    items = [
        ScannedPart(number, part, folder, repeated, first, count)
        for number, (part, folder, first, count) in enumerate(
            zip(passes.parts, passes.folders("anchors"), firsts, anchors, strict=True)
        )
    ]
    groups = [summary["groups"] for summary in passes.over("windows", WriteWindows(scanner), items)]
    earlier = run.work_dir / "earlier_windows.bin"
    point_to_earlier_parts(passes.folders("windows"), groups, earlier, run)
    texts = tuple(passes.folders("anchors"))
    items_to_cut = [
        RepeatedPart(number, part, folder, earlier, first, count)
        for number, (part, folder, first, count) in enumerate(
            zip(passes.parts, passes.folders("windows"), _offsets(groups), groups, strict=True)
        )
    ]
    written = passes.over("substrings", WriteCut(config, texts), items_to_cut)
    counts = SourceCounts.sum(summary["counts"] for summary in written)
    totals = ("passages", "bytes_cut", "changed", "dropped")
    report = {
        "min_bytes": config.min_bytes,
        **{name: sum(summary[name] for summary in written) for name in totals},
        "samples": _samples(written, passes),
    }
    return CutText(passes.folders("substrings"), counts, report)


@dataclass(frozen=True)
class Scanner:
    """Scans parts for windows of `window` bytes; those of different sources differ unless `across_sources`."""

    window: int
    across_sources: bool
    seed: int

    @property
    def rolling(self) -> Rolling:
        return Rolling.of_seed(self.seed)

    def scan(self, part: Path) -> Scan:
        """The texts of a part, of which the first begins at 0."""
        table = read_table(part, ["text", "source"])
        data, begins = text_buffers(table["text"])
        salts = np.zeros(len(table), np.uint64)
        if not self.across_sources:
            names, numbers = source_numbers(table["source"])
            salts = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in names], np.uint64)[numbers]
        return Scan(data[begins[0] : begins[-1]], begins - begins[0], salts, self.window, self.window // 2)


@dataclass(frozen=True)
class WriteAnchors:
    """Writes the text of a part, text.bin; the hashes of its anchors, ascending, with the number of each; and ends.bin,
    where the windows of each anchor end."""

    scanner: Scanner

    def __call__(self, part: Path, out: Path) -> Summary:
        scan = self.scanner.scan(part)
        scan.data.tofile(out / "text.bin")
        room = np.empty(scan.data.size, np.uint64), np.empty(scan.data.size, np.int64)
        count = find_anchors(scan, self.scanner.rolling, *room)
        hashes, ends = room[0][:count], room[1][:count]
        order = order_of_hashes(hashes, hashes)
        hashes[order].tofile(out / "hashes.bin")
        order.astype(np.int32).tofile(out / "numbers.bin")
        ends.astype(np.int32).tofile(out / "ends.bin")
        return {"anchors": hashes.size, "documents": scan.salts.size, "bytes": scan.data.size}


@dataclass(frozen=True)
class ScannedPart:
    """A part with the folder of its anchors, and which of these are repeated: `count` flags from `first` on in a
    file."""

    number: int
    part: Path
    anchors: Path
    repeated: Path
    first: int
    count: int


@dataclass(frozen=True)
class WriteWindows:
    """Writes the windows of repeated anchors, one group for equal ones, by ascending hashes: first.bin and second.bin,
    the hashes (G,); sizes.bin (G,), the windows of each group; leading.bin (G,), the start of its first; and
    starts.bin, the starts of all windows."""

    scanner: Scanner

    def __call__(self, item: ScannedPart, out: Path) -> Summary:
        scan = self.scanner.scan(item.part)
        repeated = _slice(item.repeated, np.bool_, item.first, item.count)
        ends = np.fromfile(item.anchors / "ends.bin", np.int32).astype(np.int64)
        windows = _count_windows(scan, ends, repeated)
        turns = _slice_count(windows)
        groups = 0
        names = ("first", "second", "sizes", "leading", "starts")
        files = {name: (out / f"{name}.bin").open("wb") for name in names}
        try:
            for turn in range(turns):
                low, high = (turn << 64) // turns, (turn + 1 << 64) // turns - 1
                first, second = np.empty(windows, np.uint64), np.empty(windows, np.uint64)
                starts = np.empty(windows, np.int32)
                bounds = np.uint64(low), np.uint64(high)
                count = hash_windows(scan, self.scanner.rolling, ends, repeated, *bounds, first, second, starts)
                first, second, starts = first[:count], second[:count], starts[:count]
                order = order_of_hashes(first, second, turns.bit_length() - 1)
                first, second, starts = first[order], second[order], starts[order]
                heads = np.flatnonzero(_is_first(first, second))
                sizes = np.diff(np.append(heads, count)).astype(np.int32)
                written: tuple[np.ndarray, ...] = (first[heads], second[heads], sizes, starts[heads], starts)
                for name, array in zip(names, written, strict=True):
                    array.tofile(files[name])
                groups += heads.size
        finally:
            for file in files.values():
                file.close()
        return {"groups": groups, "documents": scan.salts.size, "bytes": scan.data.size}


def _count_windows(scan: Scan, ends: Positions, repeated: NDArray[np.bool_]) -> int:
    begins = np.concatenate([[0], ends[:-1]])
    texts = np.searchsorted(scan.begins, ends - 1, side="right") - 1
    return int((ends - np.maximum(begins, scan.begins[texts]))[repeated].sum())


def _is_first(first: Hashes, second: Hashes) -> NDArray[np.bool_]:
    """Return a mask of those that differ from the one before, of hashes in order."""
    fresh = np.ones(first.size, np.bool_)
    fresh[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return fresh


@dataclass(frozen=True)
class RepeatedPart:
    """A part with the folder of its windows, and the first equal window in an earlier part of each group: `count`
    numbers from `first` on in a file, -1 for none."""

    number: int
    part: Path
    windows: Path
    earlier: Path
    first: int
    count: int


@dataclass(frozen=True)
class WriteCut:
    """Writes which documents of a part are left without their repeats, and dropped.parquet.

    texts: the folder of each part's text.bin.
    """

    config: Substrings
    texts: tuple[Path, ...]

    def __call__(self, item: RepeatedPart, out: Path) -> Summary:
        table = read_table(item.part, ["id", "text", "source"])
        data, begins = text_buffers(table["text"])
        data, begins = data[begins[0] : begins[-1]], begins - begins[0]
        pointers = np.full(data.size, -1, np.int64)
        starts, sizes = (np.fromfile(item.windows / f"{name}.bin", np.int32) for name in ("starts", "sizes"))
        earlier = _slice(item.earlier, np.int64, item.first, item.count)
        point_back(starts, sizes, earlier, item.number, self.config.min_bytes, pointers)
        starts, targets, lengths = find_runs(pointers)
        lengths += self.config.min_bytes - 1
        self._compare(data, starts, targets, lengths)
        texts, lows, highs, runs = repeated_spans(begins, starts, lengths)
        glues = np.zeros(texts.size, np.bool_)
        trim_spans(data, begins, texts, lows, highs, character_table(), glues)
        is_cut = lows < highs
        texts, lows, highs, runs, glues = (array[is_cut] for array in (texts, lows, highs, runs, glues))
        cuts: dict[int, list[Cut]] = {}
        within = (lows - begins[texts]).tolist(), (highs - begins[texts]).tolist()
        for text, low, high, glue in zip(texts.tolist(), *within, glues.tolist(), strict=True):
            cuts.setdefault(text, []).append(Cut(low, high, " " if glue else ""))
        left = without(table, cuts)
        changed = np.zeros(len(table), np.bool_)
        changed[texts] = True
        lengths_left = pc.utf8_length(pc.utf8_trim_whitespace(left["text"])).to_numpy()
        is_dropped = changed & (lengths_left < self.config.min_characters)
        kept_cuts = {text: some for text, some in cuts.items() if not is_dropped[text]}
        write_selection(item.part, np.flatnonzero(~is_dropped), out, kept_cuts)
        rows = int(is_dropped.sum())
        lost = table.filter(pa.array(is_dropped))
        least = self.config.min_characters
        reasons = dropped_rows(lost, [RULE] * rows, [PAPER] * rows, lengths_left[is_dropped], low=least)
        pq.write_table(reasons, out / "dropped.parquet", compression="zstd")
        return {
            "counts": count_table(left, ~is_dropped).as_json(),
            "documents": len(table),
            "bytes": data.size,
            "passages": texts.size,
            "bytes_cut": int((highs - lows).sum()),
            "changed": len(kept_cuts),
            "dropped": rows,
            "samples": [
                {
                    "bytes": int(highs[span] - lows[span]),
                    "text": _beginning(data[lows[span] : highs[span]]),
                    "id": table["id"][texts[span]].as_py(),
                    "source": table["source"][texts[span]].as_py(),
                    "original": int(targets[runs[span]]),
                }
                for span in np.argsort(lows - highs, kind="stable")[:SAMPLES].tolist()
            ],
        }

    def _compare(self, data: Bytes, starts: Positions, targets: Positions, lengths: Positions) -> None:
        """Compare repeats with what they repeat, byte by byte. Raises StageError `hashes_collide`."""
        parts = targets >> 32
        for number in np.unique(parts).tolist():
            here = parts == number
            other = np.memmap(self.texts[number] / "text.bin", np.uint8, "r").view(np.ndarray)
            if not are_equal(data, starts[here], other, targets[here] & 0xFFFFFFFF, lengths[here]):
                message = "different passages have equal hashes of 128 bits, so repeats are uncertain"
                raise stage_error("hashes_collide", "dedupe.substrings", message, "set dedupe.seed to another number")


def mark_repeated_anchors(folders: Sequence[Path], counts: Sequence[int], file: Path, run: Run) -> None:
    """Write a flag per anchor of all parts, in their order: True if its hash occurs twice."""
    flags = _new_file(file, np.bool_, sum(counts))
    offsets, shift = _offsets(counts), _slice_count(sum(counts)).bit_length() - 1
    for pieces in _slices(folders, "hashes", sum(counts), run):
        hashes = np.concatenate([piece.read(np.uint64, "hashes") for piece in pieces])
        numbers = np.concatenate([piece.read(np.int32, "numbers") + offsets[piece.part] for piece in pieces])
        order = order_of_hashes(hashes, hashes, shift)
        ordered = hashes[order]
        same = ordered[1:] == ordered[:-1]
        flags[numbers[order[1:][same]]] = True
        flags[numbers[order[:-1][same]]] = True


def point_to_earlier_parts(folders: Sequence[Path], counts: Sequence[int], file: Path, run: Run) -> None:
    """Write a number per group of equal windows of all parts, in their order: of the first equal window in an earlier
    part, part << 32 | start, or -1."""
    earlier = _new_file(file, np.int64, sum(counts))
    offsets, shift = _offsets(counts), _slice_count(sum(counts)).bit_length() - 1
    for pieces in _slices(folders, "first", sum(counts), run):
        first, second = (
            np.concatenate([piece.read(np.uint64, name) for piece in pieces]) for name in ("first", "second")
        )
        groups = np.concatenate([np.arange(piece.low, piece.high) + offsets[piece.part] for piece in pieces])
        positions = np.concatenate(
            [piece.read(np.int32, "leading").astype(np.int64) | np.int64(piece.part) << 32 for piece in pieces]
        )
        # Parts are in order, so of equal hashes the one of the first part comes first.
        order = order_of_hashes(first, second, shift)
        fresh = _is_first(first[order], second[order])
        heads = np.flatnonzero(fresh)
        firsts = positions[order[np.repeat(heads, np.diff(np.append(heads, order.size)))]]
        earlier[groups[order]] = np.where(fresh, -1, firsts)


@dataclass(frozen=True)
class Piece:
    """Rows `low` to `high` of the files of a part."""

    folder: Path
    part: int
    low: int
    high: int

    def read(self, kind: type[np.generic], name: str) -> np.ndarray:
        return _slice(self.folder / f"{name}.bin", kind, self.low, self.high - self.low)


def _slices(folders: Sequence[Path], name: str, rows: int, run: Run) -> Iterator[list[Piece]]:
    """Divide the rows of all parts, each sorted by the hashes `name`, into slices of equal hashes of some ROWS_AT_ONCE
    rows."""
    slices = _slice_count(rows)
    edges = np.array([(number << 64) // slices for number in range(1, slices)], np.uint64)
    cuts = []
    for folder in folders:
        file = folder / f"{name}.bin"
        size = file.stat().st_size // 8
        hashes = np.memmap(file, np.uint64, "r") if size else np.zeros(0, np.uint64)
        cuts.append([0, *np.searchsorted(hashes, edges).tolist(), size])
    for number in range(slices):
        run.stop_if_cancelled()
        yield [Piece(folder, part, *cuts[part][number : number + 2]) for part, folder in enumerate(folders)]


def _slice_count(rows: int) -> int:
    """Return the number of slices, a power of two, that have at most some ROWS_AT_ONCE rows each."""
    return 1 << (max(1, -(-rows // ROWS_AT_ONCE)) - 1).bit_length()


def _offsets(counts: Sequence[int]) -> list[int]:
    return (np.cumsum([0, *counts])[:-1]).tolist()


def _slice(file: Path, kind: type[np.generic], first: int, count: int) -> np.ndarray:
    return np.fromfile(file, kind, count, offset=first * np.dtype(kind).itemsize)


def _new_file(file: Path, kind: type[np.generic], rows: int) -> np.ndarray:
    """An array of zeros in a new file, which is not held in memory."""
    return np.memmap(file, kind, "w+", shape=(max(1, rows),))


def _beginning(data: Bytes) -> str:
    text = data[: 4 * SAMPLE_CHARACTERS].tobytes().decode(errors="ignore")
    return text[:SAMPLE_CHARACTERS]


def _samples(written: Sequence[Summary], passes: Passes) -> list[dict[str, Any]]:
    """The longest passages that were cut, each with the document that keeps it."""
    samples: list[Mapping[str, Any]] = [sample for summary in written for sample in summary["samples"]]
    samples = sorted(samples, key=lambda sample: -sample["bytes"])[:SAMPLES]
    rows = []
    for sample in samples:
        part = passes.parts[sample["original"] >> 32]
        table = read_table(part, ["id", "text", "source"])
        begins = text_buffers(table["text"])[1]
        row = int(np.searchsorted(begins - begins[0], sample["original"] & 0xFFFFFFFF, side="right")) - 1
        rows.append({**sample, "original": table["id"][row].as_py(), "original_source": table["source"][row].as_py()})
    return rows
