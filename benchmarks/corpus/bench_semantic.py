"""Recall of semantic_dedupe on real text with planted paraphrases, beside what dedupe's MinHash finds of them.

python benchmarks/corpus/bench_semantic.py --model DIR [--documents 1500] [--planted 60]

The text is that of ../shared/data/web_demo, with pieces of the other folders. Planted are paraphrases written by hand
(benchmarks/corpus/paraphrases.json), and copies of random documents with their sentences in another order, without
every third sentence, or without every fourth word. A drop that is none of these is listed by its similarity, to be
read.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.corpus.planted import SHARED, real_texts
from corpus.dedupe.config import DedupeConfig
from corpus.dedupe.stage import dedupe
from corpus.documents.parts import DocumentWriter, document_parts, make_document, read_documents
from corpus.documents.passes import Passes
from corpus.semantic.clusters import find_clusters, find_duplicates
from corpus.semantic.config import SemanticDedupeConfig
from corpus.semantic.embeddings import EmbeddingFile, embed_documents
from corpus.semantic.stage import in_order
from infra.launch.config import LaunchConfig
from infra.run import Run

PARAPHRASES = Path(__file__).parent / "paraphrases.json"
THRESHOLDS = (0.8, 0.85, 0.9, 0.95, 0.99)
RUN = LaunchConfig(device="cpu", workers=1)


def planted(documents: int, copies: int) -> tuple[list[str], dict[int, tuple[str, int]]]:
    """Texts, and of each planted item its kind and the number of its original."""
    generator = random.Random(17)
    texts = real_texts(SHARED / "web_demo")
    others = real_texts(without="web_demo")
    texts += generator.sample(others, max(0, documents - len(texts)))
    plants: dict[int, tuple[str, int]] = {}

    def plant(kind: str, original: int, text: str) -> None:
        plants[len(texts)] = (kind, original)
        texts.append(text)

    for beginning, text in json.loads(PARAPHRASES.read_text(encoding="utf8")).items():
        [original] = [number for number, item in enumerate(texts) if item.startswith(beginning)]
        plant("paraphrase by hand", original, text)
    long = [number for number, text in enumerate(texts) if len(_sentences(text)) >= 6]
    for kind in ("sentences in another order", "a third of the sentences left out", "a quarter of the words left out"):
        for original in generator.sample(long, copies):
            sentences, words = _sentences(texts[original]), texts[original].split()
            if kind.startswith("sentences"):
                plant(kind, original, " ".join(generator.sample(sentences, len(sentences))))
            elif kind.startswith("a third"):
                plant(kind, original, " ".join(item for number, item in enumerate(sentences) if number % 3))
            else:
                plant(kind, original, " ".join(word for number, word in enumerate(words) if number % 4))
    return texts, plants


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def semantic_pairs(file: EmbeddingFile, config: SemanticDedupeConfig) -> dict[int, tuple[int, float]]:
    """Dropped document → (the item that stays, similarity)."""
    pairs: dict[int, tuple[int, float]] = {}
    clusters = find_clusters(file, config, lambda: None)
    for members in clusters.members():
        ordered = in_order(members, clusters.similarities, config.keep)
        originals, similarities = find_duplicates(file, ordered, config.threshold, lambda: None)
        rows = zip(ordered.tolist(), originals.tolist(), similarities.tolist(), strict=True)
        pairs |= {document: (original, value) for document, original, value in rows if original >= 0}
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder of an encoder; without item nothing is measured")
    parser.add_argument("--documents", type=int, default=1500)
    parser.add_argument("--planted", type=int, default=60)
    parser.add_argument("--show", type=int, default=12, help="drops that were not planted, to be read")
    options = parser.parse_args()
    if not options.model:
        parser.exit(0, "no encoder to measure: name the folder of item by --model\n")
    texts, plants = planted(options.documents, options.planted)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with DocumentWriter(folder / "in" / "documents") as writer:
            for number, text in enumerate(texts):
                writer.write(make_document(text, f"all/{number}")._replace(id=f"{number:016x}"))
        run = Run(folder / "work", RUN)
        started, cpu = time.monotonic(), time.process_time()
        config = SemanticDedupeConfig(model=options.model)
        file, cut = embed_documents(config, Passes(run, document_parts(folder / "in")))
        seconds, cpu = time.monotonic() - started, time.process_time() - cpu
        size = sum(len(text.encode()) for text in texts)
        speed = f"embedded in {seconds:.0f} s, {cpu:.0f} s of processors"
        print(f"{len(texts)} documents, {size / 1e6:.1f} MB, {speed}; {cut} cut")
        (folder / "out").mkdir()
        dedupe(DedupeConfig(), {"documents": folder / "in"}, folder / "out", Run(folder / "near", RUN))
        left = {int(document.id, 16) for document in read_documents(folder / "out")}
        kinds = sorted({kind for kind, _ in plants.values()})
        print("found of", {kind: sum(item == kind for item, _ in plants.values()) for kind in kinds})
        row = {kind: sum(item == kind and number not in left for number, (item, _) in plants.items()) for kind in kinds}
        print("dedupe", row, "others", sum(number not in left for number in range(len(texts)) if number not in plants))
        for threshold in THRESHOLDS:
            pairs = semantic_pairs(file, config.model_copy(update={"threshold": threshold}))
            of = {number: {number, pairs.get(number, (number, 0.0))[0]} for number in range(len(texts))}
            row = dict.fromkeys(kinds, 0)
            for copy, (kind, original) in plants.items():
                row[kind] += bool(of[copy] & of[original])
            expected = {frozenset((copy, original)) for copy, (_, original) in plants.items()}
            roots = {copy: original for copy, (_, original) in plants.items()}
            others = {
                document: (original, value)
                for document, (original, value) in pairs.items()
                if frozenset((document, original)) not in expected
                and roots.get(document, document) != roots.get(original, original)
            }
            print(threshold, row, "others", len(others))
            if threshold == 0.9:
                shown = sorted(others.items(), key=lambda item: item[1][1])
                step = max(1, len(shown) // options.show)
                for document, (original, value) in shown[::step]:
                    print(f"  {value:.3f}\n    {texts[document][:150]!r}\n    {texts[original][:150]!r}")
        exact = np.fromfile(file.path, np.float32).reshape(file.rows, file.width)
        every = int((np.triu(exact @ exact.T, 1) >= 0.9).sum())
        print(f"pairs of similarity 0.9 or more: {every}")


if __name__ == "__main__":
    main()
