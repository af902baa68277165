"""Races the chain from a JSON Lines file to clean text, each there once and without test items, against datatrove's.

python benchmarks/corpus/bench_chain.py [--mb 50] [--copies 1000] [--data ../shared/data]

The text is that of bench_clean.py with edited copies and test items planted in it. The rules are those of
datatrove's FineWeb example on both sides: Gopher quality and repetition, C4 (lines need no full stop), FineWeb, near
duplicates by MinHash of word 5-grams, 13-grams of test items, e-mail and IP addresses masked. Ours masks other personal
data too, drops exact duplicates, and keeps what it drops in aux/. One core each.

Processor time is that of the process and its children. Disk is what all files take that were written on the way, a file
with two names once; datatrove writes text as its example does, after the filters and at the end, in gzip.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.corpus import bench_decontaminate
from benchmarks.corpus.bench_clean import read
from benchmarks.corpus.planted import planted
from corpus.clean import clean
from corpus.cleaning.config import CleanConfig
from corpus.config import IngestConfig
from corpus.decontaminate.config import DecontaminateConfig
from corpus.decontaminate.stage import decontaminate
from corpus.dedupe.config import DedupeConfig
from corpus.dedupe.stage import dedupe
from corpus.documents.parts import read_documents
from corpus.ingest import ingest
from infra.launch.config import LaunchConfig
from infra.run import Run

NGRAM = 13
Steps = Iterator[str]
"""The name of each step, once it is done."""


def ours(source: Path, items: Path, out: Path) -> Steps:
    def build(function: Callable[..., Any], config: Any, **inputs: Path) -> str:
        name = function.__name__
        (out / name).mkdir(parents=True)
        function(config, inputs, out / name, Run(out / f"{name}.work", LaunchConfig(workers=1)))
        return name

    rules = CleanConfig(min_characters=None, max_characters=None, c4={"line_ends": ()}, fineweb={})
    yield build(ingest, IngestConfig(read=[{"kind": "files", "paths": [str(source)]}]))
    yield build(clean, rules, documents=out / "ingest")
    yield build(dedupe, DedupeConfig(), documents=out / "clean")
    inputs = {"documents": out / "dedupe", "benchmark_text": items}
    yield build(decontaminate, DecontaminateConfig(ngram=NGRAM), **inputs)


def datatrove(source: Path, items: Path, out: Path) -> Steps:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )
    from datatrove.pipeline.formatters import PIIFormatter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    folders = {name: str(out / name) for name in ("filtered", "signatures", "buckets", "removed", "index", "final")}
    with contextlib.redirect_stderr(io.StringIO()):
        decont = NGramsDecontFilter(folders["index"], NGramsDecontConfig(n_grams=NGRAM))
    write_index(decont, items, out / "index")
    pipelines: dict[str, list[Any]] = {
        "filters": [
            JsonlReader(str(source.parent), glob_pattern=source.name),
            GopherRepetitionFilter(),
            GopherQualityFilter(),
            C4QualityFilter(filter_no_terminal_punct=False),
            FineWebQualityFilter(),
            JsonlWriter(folders["filtered"]),
        ],
        "signatures": [JsonlReader(folders["filtered"]), MinhashDedupSignature(folders["signatures"])],
        "buckets": [MinhashDedupBuckets(folders["signatures"], folders["buckets"])],
        "cluster": [MinhashDedupCluster(folders["buckets"], folders["removed"])],
        "last": [
            JsonlReader(folders["filtered"]),
            MinhashDedupFilter(folders["removed"]),
            decont,
            PIIFormatter(email_replacement="email@example.com", ip_replacement="192.0.2.1"),
            JsonlWriter(folders["final"]),
        ],
    }
    for name, pipeline in pipelines.items():
        tasks = 14 if name == "buckets" else 1
        executor = LocalPipelineExecutor(
            pipeline, tasks=tasks, workers=1, logging_dir=str(out.parent / f"logs-{out.name}-{name}")
        )
        with contextlib.redirect_stderr(io.StringIO()):
            executor.run()
        yield name


def write_index(decont: Any, items: Path, folder: Path) -> None:
    """What its indexer writes, which itself needs lighteval and one of its tasks."""
    from datatrove.utils.text import ngrams, simplify_text

    texts = [text for line in (items / "items.jsonl").open() for text in json.loads(line)["texts"]]
    tokens = (decont.tokenizer.word_tokenize(simplify_text(text, decont.config.norm_config)) for text in texts)
    hashes = {decont.hash_func(" ".join(gram)) for some in tokens for gram in ngrams(some, NGRAM)}
    folder.mkdir(parents=True)
    np.array(list(hashes), decont.config.hash_config.np_descr).tofile(folder / "items.index.hashes")


def texts_left(out: Path) -> set[str]:
    if (out / "final").is_dir():
        import gzip

        return {json.loads(line)["text"] for file in (out / "final").iterdir() for line in gzip.open(file, "rt")}
    return {document.text for document in read_documents(out / "decontaminate")}


def disk_mb(folder: Path) -> tuple[float, float]:
    """Of all files, and of those of them that hold documents."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    documents = [path for path in paths if path.parent.name in ("documents", "text") or path.name.endswith(".jsonl.gz")]
    return _mb(paths), _mb(documents)


def _mb(paths: list[Path]) -> float:
    stats = [path.stat() for path in paths]
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values()) / 1e6


def processor_s() -> float:
    return sum(os.times()[:4])


def race(name: str, steps: Steps, out: Path, size: float) -> tuple[float, set[str]]:
    begun, started = processor_s(), time.perf_counter()
    last, before = begun, (0.0, 0.0)
    for step in steps:
        now, taken = processor_s(), disk_mb(out)
        every, documents = (one - other for one, other in zip(taken, before, strict=True))
        print(f"  {step:<14} {now - last:8.2f} s  {every:6.1f} MB written, of documents {documents:.1f} MB", flush=True)
        last, before = processor_s(), taken
    seconds, wall = last - begun, time.perf_counter() - started
    print(f"{name}: {size / seconds:.2f} MB/s a core, {seconds:.1f} s of processor time in {wall:.0f} s")
    print(f"{name}: {before[0]:.1f} MB written, of documents {before[1]:.1f} MB", flush=True)
    return seconds, texts_left(out)


def text_of(options: argparse.Namespace, items: list[str]) -> list[str]:
    everything = list(read(options.data))
    random.Random(17).shuffle(everything)
    texts, _ = planted(everything, options.copies)
    bench_decontaminate.planted(texts, items)
    sizes = np.cumsum([len(text.encode()) for text in texts])
    return texts[: int(np.searchsorted(sizes, options.mb * 1e6)) + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mb", type=float, default=50, help="megabytes of text to take; 50: all")
    parser.add_argument("--copies", type=int, default=1000, help="edited copies that are planted")
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[3] / "shared" / "data")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as silence:
        folder = Path(name)
        texts = text_of(options, bench_decontaminate.test_items(folder / "items"))
        size = sum(len(text.encode()) for text in texts) / 1e6
        for file, some in (("few", texts[:300]), ("all", texts)):
            lines = (json.dumps({"text": text, "id": str(number)}) + "\n" for number, text in enumerate(some))
            (folder / f"{file}.jsonl").write_text("".join(lines))
        print(f"{len(texts):,} documents, {size:.1f} MB")
        with contextlib.redirect_stdout(silence):  # compiles ours, loads the models of theirs
            for chain in (ours, datatrove):
                list(chain(folder / "few.jsonl", folder / "items", folder / f"few-{chain.__name__}"))
        results = {}
        for chain in (ours, datatrove):
            out = folder / f"all-{chain.__name__}"
            results[chain.__name__] = race(
                chain.__name__, chain(folder / "all.jsonl", folder / "items", out), out, size
            )
        (fast, left), (slow, theirs) = results["ours"], results["datatrove"]
        print(f"{slow / fast:.1f} times as fast")
        print(f"kept: ours {len(left):,}, theirs {len(theirs):,}, the same text in both {len(left & theirs):,}")


if __name__ == "__main__":
    main()
