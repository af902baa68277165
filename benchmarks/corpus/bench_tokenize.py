"""How fast text becomes shards, against the bare tokenizers package on the same cores.

python benchmarks/corpus/bench_tokenize.py [--mb 30] [--vocabulary 32000] [--sequence-length 2048] [--rounds 3]
    [--only ours "split as BERT" …]

Text of ../shared/data, one thread, all ways in turn, medians of the rounds. `bare` is `encode_batch_fast` on texts
that lie in memory, its ids never looked at; `package with ids` looks at them; `table` has an empty table of chunks;
`table, warm` has seen the text before; `stage` is all of it: Parquet in, MDS shards with hashes out, its table empty at
first. Besides the tokenizer that the pipeline trains, three that split text as well known ones do: GPT-4 and Llama 3,
BERT, SentencePiece; and one for which no table holds. The ids of all ways are compared. About five minutes.
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
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import pyarrow as pa
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from corpus.config import ShardConfig, TokenizerConfig
from corpus.documents.parts import DocumentWriter, make_document
from corpus.shard import shard
from corpus.tokenizer import tokenizer
from corpus.tokens import tokenise
from corpus.tokens.chat_template import END_OF_TEXT
from corpus.tokens.cutting import EXPRESSIONS
from corpus.tokens.encode import Encoder, PlainEncoder, encoder_of, load_tokenizer
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
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[3] / "shared" / "data")
    parser.add_argument("--mb", type=float, default=30)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=["ours", *OTHERS], default=["ours", *OTHERS])
    options = parser.parse_args()
    if not options.data.is_dir():
        sys.exit(f"no such folder: {options.data}; give one with --data")
    texts = take(texts_of(options.data), options.mb)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = write(texts, folder / "documents")
        for kind in options.only:
            inputs = {"documents": documents, "tokenizer": folder / kind / "tokenizer"}
            inputs["tokenizer"].mkdir(parents=True)
            if kind == "ours":
                config = TokenizerConfig(vocab_size=options.vocabulary)
                tokenizer(config, inputs, inputs["tokenizer"], Run(folder / kind / "work"))
            else:
                train(OTHERS[kind](), options.vocabulary, texts).save(str(inputs["tokenizer"] / "tokenizer.json"))
            compare(kind, texts, inputs, ShardConfig(sequence_length=options.sequence_length), options.rounds)


def gpt_4() -> Tokenizer:
    model = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(EXPRESSIONS["gpt-4, llama 3"]), "isolated")
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return model


def bert() -> Tokenizer:
    model = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    model.normalizer = normalizers.BertNormalizer()
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return model


def sentencepiece() -> Tokenizer:
    model = Tokenizer(models.BPE(unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    return model


def words() -> Tokenizer:
    model = Tokenizer(models.BPE(unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return model


OTHERS: dict[str, Callable[[], Tokenizer]] = {
    "split as GPT-4 and Llama 3": gpt_4,
    "split as BERT": bert,
    "split as SentencePiece": sentencepiece,
    "no table, words and signs apart": words,
}


def train(model: Tokenizer, vocabulary: int, texts: list[str]) -> Tokenizer:
    """Trains on a tenth of the texts."""
    wordpiece = isinstance(model.model, models.WordPiece)
    unknown = getattr(model.model, "unk_token", None)
    trainer = (trainers.WordPieceTrainer if wordpiece else trainers.BpeTrainer)(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, *([unknown] if unknown else [])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        limit_alphabet=2000,
        show_progress=False,
    )
    model.train_from_iterator(texts[::10], trainer)
    return model


def compare(kind: str, texts: list[str], inputs: dict[str, Path], config: ShardConfig, rounds: int) -> None:
    ways, encoded = ways_of(texts, inputs, config)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, function in ways.items():
            begun = time.perf_counter()
            function()
            seconds[way].append(time.perf_counter() - begun)
    same = all(np.array_equal(ids, encoded["package with ids"]) for ids in encoded.values())
    median = {way: statistics.median(found) for way, found in seconds.items()}
    tokens, size = len(encoded["table"]), sum(len(text.encode()) for text in texts)
    print(f"\n{kind}: {len(texts):,} documents, {size / 1e6:.1f} MB, {tokens:,} tokens, one thread; same ids: {same}")
    print(f"{'':20} {'MB/s':>8} {'M tokens/s':>11} {'of bare':>8}")
    for way, found in median.items():
        print(f"{way:20} {size / 1e6 / found:8.2f} {tokens / 1e6 / found:11.2f} {median['bare'] / found:8.2f}")


def ways_of(
    texts: list[str], inputs: dict[str, Path], config: ShardConfig
) -> tuple[dict[str, Callable[[], object]], dict[str, np.ndarray]]:
    """The ways by name, and the ids that they leave behind as they run."""
    model = load_tokenizer(inputs["tokenizer"])
    folder = inputs["tokenizer"].parent
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
        tokenise.encoder_in.cache_clear()
        shard(config, inputs, out, Run(folder / f"work-{count}", ONE_WORKER))

    with_encoder("table, warm", warm)
    return {
        "bare": bare,
        "package with ids": lambda: with_encoder("package with ids", PlainEncoder(model, 0)),
        "table": lambda: with_encoder("table", encoder_of(model, 0)),
        "table, warm": lambda: with_encoder("table, warm", warm),
        "stage": stage,
    }, encoded


if __name__ == "__main__":
    main()
