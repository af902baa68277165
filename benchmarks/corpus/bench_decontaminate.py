"""How fast test items are found in training text, and how many of those planted, against lm-eval's own Janitor.

python benchmarks/corpus/bench_decontaminate.py [--mb 20]

Both look for 13-grams of the items of four benchmarks in ../shared/data, of which 500 are planted in the text, one in
two in capitals and without punctuation; one core, from text to the list of documents that hold an item. Only items of
at least 13 words are planted: Janitor does not look for others. About a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyarrow.parquet as pq

from benchmarks.corpus.planted import SHARED, real_texts
from corpus.decontaminate.config import DecontaminateConfig
from corpus.decontaminate.items import read_items, words_of
from corpus.decontaminate.stage import decontaminate
from corpus.documents.parts import DocumentWriter, make_document
from evaluation.benchmark_text import benchmark_text
from evaluation.config import BenchmarkTask, BenchmarkTextConfig
from infra.launch.config import LaunchConfig
from infra.run import Run

TASKS = ("arc_easy", "openbook_qa", "piqa", "boolq")
NGRAM = 13


def test_items(folder: Path) -> list[str]:
    files = {name: next((SHARED / "llm_foundry_eval").rglob(f"{name}*.jsonl")) for name in TASKS}
    tasks = [BenchmarkTask(name=name, kind="multiple_choice", path=str(file)) for name, file in files.items()]
    folder.mkdir()
    benchmark_text(BenchmarkTextConfig(tasks=tuple(tasks)), {}, folder, Run(folder / "work"))
    return [text for item in read_items(folder) for text in item.texts]


def planted(texts: list[str], items: list[str]) -> set[int]:
    """Puts 500 of the items into texts; returns which."""
    generator = random.Random(17)
    places = generator.sample(range(len(texts)), 500)
    long = [item for item in items if words_of(item).number >= NGRAM]
    for number, (place, item) in enumerate(zip(places, generator.sample(long, 500), strict=True)):
        changed = re.sub(r"[^\w\s]", "", item).upper() if number % 2 else item
        half = len(texts[place]) // 2
        texts[place] = f"{texts[place][:half]} {changed} {texts[place][half:]}"
    return set(places)


def ours(texts: list[str], folder: Path) -> tuple[set[int], float]:
    """The stage; a first run on a few documents compiles it."""
    seconds = 0.0
    for name, some in (("few", texts[:20]), ("all", texts)):
        documents, out = folder / f"in-{name}", folder / f"out-{name}"
        with DocumentWriter(documents / "documents") as writer:
            for number, text in enumerate(some):
                writer.write(make_document(text, "shared/data")._replace(id=f"{number:016x}"))
        out.mkdir()
        inputs = {"documents": documents, "benchmark_text": folder / "items"}
        begun = time.process_time()
        decontaminate(DecontaminateConfig(), inputs, out, Run(folder / f"work-{name}", LaunchConfig(workers=1)))
        seconds = time.process_time() - begun
    dropped = pq.read_table(folder / "out-all" / "aux" / "dropped.parquet", columns=["id"])["id"].to_pylist()
    return {int(identity, 16) for identity in dropped}, seconds


def janitor(texts: list[str], items: list[str]) -> tuple[set[int], float]:
    # It prints at its import, and for each text, that its module in C++ is not installed.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from lm_eval.decontamination.janitor import Janitor

        begun = time.process_time()
        peer = Janitor(ngram_n=NGRAM)
        for item in items:
            peer.register_contaminant(item)
        hit = {number for number, text in enumerate(texts) if peer.clean(text) != [text]}
        return hit, time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mb", type=float, default=20)
    options = parser.parse_args()
    texts, size = [], 0
    for text in real_texts(without="llm_foundry_eval"):
        if size < options.mb * 1e6:
            texts.append(text)
            size += len(text.encode())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        items = test_items(folder / "items")
        places = planted(texts, items)
        print(f"{len(texts):,} documents, {size / 1e6:.1f} MB, {len(items):,} items, {len(places)} of them planted")
        for tool, (hit, seconds) in (("ours", ours(texts, folder)), ("Janitor", janitor(texts, items))):
            found = len(hit & places)
            print(f"{tool:<8} {size / 1e6 / seconds:8.2f} MB/s a core, {found} of {len(places)} planted items found")


if __name__ == "__main__":
    main()
