"""How fast text becomes shards, against the bare tokenizers package on the same cores.

python benchmarks/bench_corpus_tokenize.py [--mb 30] [--vocabulary 32000] [--sequence-length 2048] [--rounds 3]

Text of ../shared/data, one thread, all ways in turn, medians of the rounds. `bare` is `encode_batch_fast` on texts
that lie in memory, its ids never looked at; `table` has an empty table of pre-tokens, `table, warm` has seen the text
before; `stage` is all of it: Parquet in, MDS shards with hashes out; `stage, package` is the same for a tokenizer that
the table does not fit. The ids of all ways are compared. About two minutes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pyarrow as pa

from corpus.config import ShardConfig, TokenizerConfig
from corpus.documents import DocumentWriter, document_parts, make_document
from corpus.encode import Encoder, PlainEncoder, encoder_of, load_tokenizer
from corpus.packing import Form, in_order, slices_of, write_shards
from corpus.shard import shard
from corpus.tokenise import encode_part, joined_index
from corpus.tokenizer import tokenizer
from infra.launch.config import LaunchConfig
from infra.run import Run

BATCH = 512
CUT = 5000
ONE_WORKER = LaunchConfig(workers=1)


def texts_of(folder: Path) -> Iterator[str]:
    """The text of every data set that is text or has a field `text`, books cut into pieces."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".txt":
            text = path.read_text(encoding="utf8", errors="replace")
            yield from (text[at : at + CUT] for at in range(0, len(text), CUT))
        elif path.name.endswith((".jsonl", ".jsonl.gz")):
            with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf8") as lines:
                for record in map(json.loads, lines):
                    if isinstance(record.get("text"), str):
                        yield record["text"]


def take(texts: Iterator[str], mb: float) -> list[str]:
    taken, size = [], 0
    for text in texts:
        taken.append(text.encode(errors="replace").decode())
        size += len(taken[-1].encode())
        if size >= mb * 1e6:
            break
    return taken


def write(texts: list[str], folder: Path) -> Path:
    with DocumentWriter(folder / "documents") as writer:
        for text in texts:
            writer.write(make_document(text, "shared/data"))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--mb", type=float, default=30)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if not options.data.is_dir():
        sys.exit(f"no such folder: {options.data}; give one with --data")
    texts = take(texts_of(options.data), options.mb)
    size = sum(len(text.encode()) for text in texts)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = {"documents": write(texts, folder / "all"), "tokenizer": folder / "tokenizer"}
        inputs["tokenizer"].mkdir()
        tokenizer(TokenizerConfig(vocab_size=options.vocabulary), inputs, inputs["tokenizer"], Run(folder / "work"))
        ways, encoded = ways_of(texts, inputs, ShardConfig(sequence_length=options.sequence_length), folder)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, function in ways.items():
                begun = time.perf_counter()
                function()
                seconds[way].append(time.perf_counter() - begun)
        same = all(np.array_equal(encoded[way], encoded["package with ids"]) for way in encoded)
    median = {way: statistics.median(found) for way, found in seconds.items()}
    tokens = len(encoded["table"])
    print(f"{len(texts):,} documents, {size / 1e6:.1f} MB, {tokens:,} tokens, one thread; same ids: {same}")
    print(f"{'':20} {'MB/s':>8} {'M tokens/s':>11} {'of bare':>8}")
    for way, found in median.items():
        print(f"{way:20} {size / 1e6 / found:8.2f} {tokens / 1e6 / found:11.2f} {median['bare'] / found:8.2f}")


def ways_of(
    texts: list[str], inputs: dict[str, Path], config: ShardConfig, folder: Path
) -> tuple[dict[str, Callable[[], object]], dict[str, np.ndarray]]:
    """The ways by name, and the ids that they leave behind as they run."""
    model = load_tokenizer(inputs["tokenizer"])
    column = pa.array(texts, pa.string())
    warm = encoder_of(model, 0)
    encoded: dict[str, np.ndarray] = {}
    count = 0

    def bare() -> None:
        for at in range(0, len(texts), BATCH):
            model.encode_batch_fast(texts[at : at + BATCH], add_special_tokens=False)

    def with_encoder(way: str, encoder: Encoder) -> None:
        encoded[way] = np.concatenate(
            [encoder.encode(column[at : at + BATCH])[0] for at in range(0, len(texts), BATCH)]
        )

    def stage() -> None:
        nonlocal count
        count += 1
        out = folder / f"shards-{count}"
        out.mkdir()
        shard(config, inputs, out, Run(folder / f"work-{count}", ONE_WORKER))

    def stage_without_table() -> None:
        """The stage for a tokenizer that no table fits: the same steps with the package's encoder."""
        nonlocal count
        count += 1
        work = folder / f"plain-{count}"
        form = Form(work, "uint16", config.sequence_length, None, config.hashes)
        summaries = []
        partitions = [work / f"{number:05}" for number in range(len(document_parts(inputs["documents"])))]
        for part, partition in zip(document_parts(inputs["documents"]), partitions, strict=True):
            partition.mkdir(parents=True)
            summaries.append(encode_part(PlainEncoder(model, 0), "uint16", config.heldout_share, part, partition))
        index = in_order(joined_index(partitions, summaries)[0])
        np.save(work / "order.npy", index)
        write_shards(form, slices_of(work / "order.npy", index, config.sequence_length, 1 << 14), work / "shards")

    with_encoder("table, warm", warm)
    return {
        "bare": bare,
        "package with ids": lambda: with_encoder("package with ids", PlainEncoder(model, 0)),
        "stage, package": stage_without_table,
        "table": lambda: with_encoder("table", encoder_of(model, 0)),
        "table, warm": lambda: with_encoder("table, warm", warm),
        "stage": stage,
    }, encoded


if __name__ == "__main__":
    main()
