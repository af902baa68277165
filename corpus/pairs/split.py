"""Pairs written in two parts, for training and held out: none twice, none with a test item of the benchmarks, and no
prompt with a near duplicate on the other side."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from corpus.config import NearPrompts
from corpus.decontaminate.config import MatchConfig
from corpus.decontaminate.pairs import PairFilter
from corpus.dedupe.config import NearDuplicates
from corpus.dedupe.kernels import Sets, join_alike, sign_sets
from corpus.dedupe.minhash import choose_bands
from corpus.dedupe.search import buckets_of
from corpus.dedupe.signatures import hash_functions, sets_of_shingles
from corpus.documents.parts import is_heldout
from corpus.documents.quarantine import Quarantine, Rejected
from corpus.documents.words import text_buffers
from corpus.pairs.files import Pair
from corpus.readers.selected import note_left_out
from infra.errors import stage_error
from infra.run import Run

BATCH = 500


class PairsConfig(Protocol):
    """Settings of a stage that makes pairs."""

    @property
    def heldout_share(self) -> float: ...
    @property
    def near_prompts(self) -> NearPrompts | None: ...
    @property
    def decontaminate(self) -> MatchConfig | None: ...
    @property
    def max_quarantine_share(self) -> float: ...


def write_pairs(
    config: PairsConfig,
    section: str,
    sources: Mapping[str, Any],
    read: Callable[[Any, str], Iterator[Pair | Rejected]],
    inputs: Mapping[str, Path],
    out_dir: Path,
    run: Run,
) -> tuple[dict[str, float], str]:
    """Read pairs of sources, which are given by their dotted keys.

    Writes train.jsonl, heldout.jsonl, aux/quarantine.jsonl and aux/counts.json, and with the input benchmark_text
    the report of `corpus.decontaminate.pairs.PairFilter`; returns the counts as figures, and a headline.

    A pair that occurred before is left out and counted as a duplicate. Where a rule can verify answers, the sources lie
    mixed in heldout.jsonl, since what is measured is the first of the file; otherwise they follow one another.
    Raises StageError `too_few_pairs` if either side is empty, besides what the readers raise.
    """
    aux = out_dir / "aux"
    aux.mkdir(parents=True, exist_ok=True)
    matching, items = config.decontaminate, inputs.get("benchmark_text")
    test_items = PairFilter(matching, items, aux) if matching and items else None
    skipped = note_left_out(list(sources.values()), section, run)
    rows: list[dict[str, Any]] = []
    seen_ids: set[str] = set()
    spooled = run.work_dir / "pairs.jsonl"
    with (
        Quarantine(aux / "quarantine.jsonl", config.max_quarantine_share) as quarantine,
        Spool(spooled, config) as spool,
    ):
        for index, (key, source) in enumerate(sources.items()):
            quarantine.start_source(key)
            read_here, duplicates, dropped = 0, 0, 0
            batch: list[Pair] = []
            for item in read(source, key):
                if isinstance(item, Rejected):
                    quarantine.add(item)
                    continue
                read_here += 1
                if item.id in seen_ids:
                    duplicates += 1
                    continue
                seen_ids.add(item.id)
                batch.append(item)
                if len(batch) == BATCH:
                    dropped += spool.add(index, batch, test_items)
                    batch = []
                    run.stop_if_cancelled()
                    run.progress(len(seen_ids), None, "pairs")
            dropped += spool.add(index, batch, test_items)
            quarantined = quarantine.finish_source(read_here)
            row = {"source": key, "read": read_here, "duplicates": duplicates, "quarantined": quarantined}
            row |= {"skipped_files": skipped[index]} if skipped[index] else {}
            rows.append({**row, "dropped": dropped} if test_items else row)
    written = spool.write(out_dir)
    contamination, message = test_items.finish() if test_items else ({}, "")
    left_out = {"near_heldout": written["near_heldout"], "near_train": written["near_train"]}
    sides = {"train": written["train"], "heldout": written["heldout"]}
    counts = {**sides, **(left_out if config.near_prompts else {}), "sources": rows}
    (aux / "counts.json").write_text(json.dumps(counts, indent=1) + "\n", encoding="utf8")
    if not all(sides.values()):
        lost = {
            "near a prompt of the other side": sum(left_out.values()),
            "with a test item": contamination.get("dropped", 0),
        }
        listing = "".join(f", {count:,} left out {reason}" for reason, count in lost.items() if count)
        raise stage_error(
            "too_few_pairs",
            section,
            f"expected pairs on both sides of the split, found {sides['train']:,} for training and "
            f"{sides['heldout']:,} held out{listing}",
            f"provide more pairs, or raise {section}.heldout_share ({config.heldout_share}) in all stages",
        )
    run.progress(len(seen_ids), len(seen_ids), "pairs")
    figures = {
        "train_pairs": sides["train"],
        "heldout_pairs": sides["heldout"],
        "duplicates": sum(row["duplicates"] for row in rows),
        "quarantined": quarantine.total,
        **({"near_duplicates": sum(left_out.values())} if config.near_prompts else {}),
        **contamination,
    }
    return figures, f"{sides['train']:,} pairs, {sides['heldout']:,} held out{message}"


class Spool:
    """Pairs in a file until the groups of near-duplicate prompts are known."""

    def __init__(self, path: Path, config: PairsConfig) -> None:
        self._path, self._share = path, config.heldout_share
        self._near = PromptGroups(config.near_prompts) if config.near_prompts else None
        self._numbers: dict[bytes, int] = {}
        self._heldout: list[bool] = []
        self._compared: list[bytes] = []
        self._group_of, self._source_of = array("q"), array("q")
        self._is_verifiable = False

    def __enter__(self) -> Spool:
        self._file = self._path.open("w", encoding="utf8")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, source: int, pairs: Sequence[Pair], test_items: PairFilter | None) -> int:
        """Add pairs of a source, without those that hold a test item; return how many do."""
        kept = test_items.clean(pairs) if test_items and pairs else [True] * len(pairs)
        new: list[str] = []
        for pair, stays in zip(pairs, kept, strict=True):
            if not stays:
                continue
            self._file.write(pair.as_line())
            self._is_verifiable |= pair.verify is not None
            # Names of groups may be as long as the text: their hashes are held.
            key = f"{pair.group}\0{pair.compared}" if pair.compared else pair.group
            name = hashlib.sha256(key.encode()).digest()[:16]
            if name not in self._numbers:
                self._numbers[name] = len(self._numbers)
                self._heldout.append(is_heldout(pair.group, self._share))
                self._compared.append(hashlib.sha256(pair.compared.encode()).digest()[:16] if pair.compared else name)
                new.append(pair.compared or pair.group)
            self._group_of.append(self._numbers[name])
            self._source_of.append(source)
        if new and self._near is not None:
            self._near.add(new)
        return kept.count(False)

    def write(self, out_dir: Path) -> Counter[str]:
        """Write train.jsonl and heldout.jsonl, and count the pairs: `train`, `heldout`, and those left out because
        the near duplicates of their prompt are on the other side, `near_heldout` of training and `near_train` of those
        held out."""
        sides, crossing = self._sides()
        counts: Counter[str] = Counter()
        heldout_of: Counter[int] = Counter()
        with (
            self._path.open(encoding="utf8") as lines,
            (out_dir / "train.jsonl").open("w", encoding="utf8") as train,
            (out_dir / "heldout.jsonl").open("w", encoding="utf8") as heldout,
        ):
            for line, group, source in zip(lines, self._group_of, self._source_of, strict=True):
                if crossing[group]:
                    counts["near_train" if sides[group] else "near_heldout"] += 1
                    continue
                (heldout if sides[group] else train).write(line)
                counts["heldout" if sides[group] else "train"] += 1
                heldout_of[source] += bool(sides[group])
        if self._is_verifiable:
            _mix(out_dir / "heldout.jsonl", [count for _, count in sorted(heldout_of.items()) if count])
        self._path.unlink()
        return counts

    def _sides(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return masks (G,) of the exact groups that are held out, and of those not on the side of their near
        duplicates.

        No group changes its side for another one: its documents and the other stages' pairs are on that side too. The
        side of near duplicates is that of the group with the least hash among them, which later ones seldom replace.
        """
        sides = np.array(self._heldout, np.bool_)
        if not sides.size:
            return sides, np.zeros(0, np.bool_)
        hashes = np.array([int.from_bytes(name[:8], "big") for name in self._numbers], np.uint64)
        # Equal prompts of different groups are of one side too, also where all their n-grams are a template's.
        _, firsts, equal = np.unique(np.array(self._compared, "S16"), return_index=True, return_inverse=True)
        crossing = self._crossing(sides, hashes, firsts[equal])
        if self._near is not None:
            crossing |= self._crossing(sides, hashes, self._near.firsts())
        return sides, crossing

    @staticmethod
    def _crossing(sides: NDArray[np.bool_], hashes: NDArray[np.uint64], firsts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the groups (G,) not on the side of the group with the least hash among those of the same
        `firsts`."""
        order = np.lexsort((hashes, firsts))
        leads = np.ones(order.size, np.bool_)
        leads[1:] = firsts[order][1:] != firsts[order][:-1]
        side_of = np.zeros(sides.size, np.bool_)
        side_of[firsts[order[leads]]] = sides[order[leads]]
        return side_of[firsts] != sides


def _mix(path: Path, counts: Sequence[int]) -> None:
    """Mix the lines of the sources, which follow one another with these counts, so that every stretch has its share of
    each source; those of one source keep their order."""
    positions = [(index + 0.5) / count for count in counts for index in range(count)]
    with path.open(encoding="utf8") as file:
        lines = list(file)
    with path.open("w", encoding="utf8") as file:
        file.writelines(lines[number] for number in sorted(range(len(lines)), key=positions.__getitem__))


TEMPLATE_SHARE, TEMPLATE_PROMPTS = 0.01, 10
"""Word n-grams of more than this share of the prompts, and of more than this many, are a template's: prompts that have
nothing else in common are different prompts."""
_SEED = 17


class PromptGroups:
    """Prompts, each once, as sets of hashed word n-grams (Broder, 1997). Memory grows by some 8 bytes per word."""

    def __init__(self, config: NearDuplicates) -> None:
        self._config = config
        self._shingles = [np.zeros(0, np.uint32)]
        self._sizes = [np.zeros(0, np.int64)]

    def add(self, prompts: Sequence[str]) -> None:
        """Adds prompts after those that were added before."""
        data, begins = text_buffers(pa.chunked_array([pa.array(prompts, pa.large_string())]))
        numbers = np.arange(len(prompts))
        shingles = sets_of_shingles(data, begins, numbers, self._config.ngram, self._config.marks)
        self._shingles.append(shingles.astype(np.uint32))
        self._sizes.append(np.bincount((shingles >> np.uint64(32)).astype(np.int64), minlength=len(prompts)))

    def firsts(self) -> NDArray[np.int64]:
        """The first prompt of the group of each prompt, (N,). Two prompts are in one group if they are similar, or if a
        chain of similar prompts joins them."""
        sets = self._without_templates()
        bands = choose_bands(self._config.threshold, self._config.min_recall, self._config.max_hashes)
        assert bands is not None
        signed = np.empty((bands.bands, sets.sizes.size), np.uint64)
        sign_sets(sets, *hash_functions(bands, _SEED), signed)
        filled = np.flatnonzero(sets.sizes)
        parents = np.arange(sets.sizes.size)
        for band in signed:
            join_alike(*buckets_of(band[filled], filled), sets, self._config.threshold, parents)
        return parents

    def _without_templates(self) -> Sets:
        shingles, sizes = np.concatenate(self._shingles), np.concatenate(self._sizes)
        _, number, prompts = np.unique(shingles, return_inverse=True, return_counts=True)
        keep = prompts[number] <= max(TEMPLATE_PROMPTS, TEMPLATE_SHARE * sizes.size)
        owners = np.repeat(np.arange(sizes.size), sizes)[keep]
        kept = np.bincount(owners, minlength=sizes.size)
        return Sets(shingles[keep], np.cumsum(kept) - kept, kept)
