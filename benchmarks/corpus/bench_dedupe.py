"""How fast near duplicates are found, and how many of them, against datatrove and rensa, on real text.

python benchmarks/corpus/bench_dedupe.py [--mb 60] [--copies 2000] [--only ours,rensa,datatrove]

Every tool reads the same 36,000 documents of ../shared/data with 2,000 edited copies among them, on one core, from
Parquet or its own input to the list of documents that go. Recall: of the pairs with an exact Jaccard similarity of word
5-grams of at least 0.8, those of which not both stay. Precision: of the documents that go, those that are in such a
pair. About three minutes, most of them datatrove's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.corpus.planted import Truth, all_pairs, planted, real_texts, words_of
from corpus.dedupe.config import DedupeConfig
from corpus.dedupe.stage import dedupe
from corpus.documents.parts import DocumentWriter, document_parts, make_document
from corpus.documents.selection import read_table
from infra.launch.config import LaunchConfig
from infra.run import Run

THRESHOLD = 0.8
HASHES = 128


def ours(texts: list[str], folder: Path) -> Callable[[], set[int]]:
    """The stage dedupe; a first run on a few documents compiles it."""
    inputs = {}
    for name, some in (("few", texts[:50]), ("all", texts)):
        inputs[name] = folder / f"ours-{name}"
        with DocumentWriter(inputs[name] / "documents") as writer:
            for number, text in enumerate(some):
                writer.write(make_document(text, "shared/data")._replace(id=f"{number:016x}"))

    def run(name: str = "all") -> set[int]:
        out = folder / f"deduped-{name}"
        out.mkdir()
        dedupe(DedupeConfig(), {"documents": inputs[name]}, out, Run(folder / f"work-{name}", LaunchConfig(workers=1)))
        kept = (identity for part in document_parts(out) for identity in read_table(part, ["id"])["id"].to_pylist())
        return set(range(len(texts))) - {int(identity, 16) for identity in kept}

    run("few")
    return run


def rensa(texts: list[str], folder: Path) -> Callable[[], set[int]]:
    """Shingles in Python, signatures in Rust, each text asked of the index before it goes in, as its README does; a
    candidate is a duplicate if the signatures agree to the threshold."""
    from rensa import RMinHash, RMinHashLSH

    def run() -> set[int]:
        index = RMinHashLSH(threshold=THRESHOLD, num_perm=HASHES, num_bands=16)
        kept: dict[int, RMinHash] = {}
        gone = set()
        for number, text in enumerate(texts):
            words = words_of(text)
            signature = RMinHash(num_perm=HASHES, seed=42)
            signature.update([" ".join(words[i : i + 5]) for i in range(max(1, len(words) - 4))])
            if any(signature.jaccard(kept[other]) >= THRESHOLD for other in index.query(signature)):
                gone.add(number)
            else:
                index.insert(number, signature)
                kept[number] = signature
        return gone

    return run


def datatrove(texts: list[str], folder: Path) -> Callable[[], set[int]]:
    """Its four stages with their defaults, one task each."""
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )

    def run() -> set[int]:
        documents = [Document(text=text, id=str(number)) for number, text in enumerate(texts)]
        stages = [str(folder / f"datatrove-{stage}") for stage in ("signatures", "buckets", "removed")]
        pipelines = [
            [documents, MinhashDedupSignature(stages[0])],
            [MinhashDedupBuckets(stages[0], stages[1])],
            [MinhashDedupCluster(stages[1], stages[2])],
            [documents, MinhashDedupFilter(stages[2])],
        ]
        for number, pipeline in enumerate(pipelines):
            tasks = 14 if number == 1 else 1
            executor = LocalPipelineExecutor(
                pipeline, tasks=tasks, workers=1, logging_dir=str(folder / f"logs-{number}"), skip_completed=False
            )
            with contextlib.redirect_stderr(io.StringIO()):
                executor.run()
        removed = folder / "datatrove-removed" / "000000.remove"
        return set(np.fromfile(removed, np.uint32).tolist()) if removed.exists() else set()

    return run


TOOLS = {"ours": ours, "rensa": rensa, "datatrove": datatrove}


def judged(gone: set[int], truth: Truth, pairs: list[tuple[int, int]], count: int) -> str:
    alike = {tuple(pair) for pair in truth.pairs.tolist()}
    asked = [pair for pair in pairs if tuple(sorted(pair)) in alike]
    right = truth.partnered(count)
    recall = np.mean([first in gone or second in gone for first, second in asked])
    of_all = np.mean([first in gone or second in gone for first, second in alike])
    precision = np.mean([right[number] for number in gone]) if gone else float("nan")
    return f"recall {recall:.4f} of planted, {of_all:.4f} of all pairs; precision {precision:.4f}; {len(gone):,} go"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mb", type=float, help="megabytes of text; all by default")
    parser.add_argument("--copies", type=int, default=2000)
    parser.add_argument("--only", default=",".join(TOOLS))
    options = parser.parse_args()
    texts, pairs = planted(real_texts(), options.copies)
    if options.mb:
        sizes = np.cumsum([len(text.encode()) for text in texts])
        texts = texts[: int(np.searchsorted(sizes, options.mb * 1e6))]
        pairs = [pair for pair in pairs if max(pair) < len(texts)]
    size = sum(len(text.encode()) for text in texts)
    truth = all_pairs(texts, THRESHOLD)
    print(f"{len(texts):,} documents, {size / 1e6:.1f} MB, {len(truth.pairs):,} pairs of at least {THRESHOLD}")
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            run = TOOLS[name](texts, Path(folder))
            begun = time.process_time(), time.perf_counter()
            gone = run()
            core, wall = time.process_time() - begun[0], time.perf_counter() - begun[1]
        speed = f"{size / 1e6 / core:8.2f} MB/s a core ({wall:.1f} s)"
        print(f"{name:<10} {speed}  {judged(gone, truth, pairs, len(texts))}")


if __name__ == "__main__":
    main()
