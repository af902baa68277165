"""Races our clean (quality rules and personal data) against datatrove's filters and PII formatter, on one core each.

python benchmarks/corpus/bench_clean.py [--mb 50] [--data ../shared/data]
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

SOURCES = {
    "web_demo/c4_demo.jsonl": "text",
    "spamassassin_email/emails.jsonl.gz": "text",
    "readability_html/pages_raw.jsonl": "text",
    "python_peps/peps.jsonl.gz": "text",
    "hh_rlhf/test.jsonl.gz": "chosen",
    "gsm8k/train.jsonl": "answer",
    "lambada/lambada_test.jsonl": "text",
    "nltk_gutenberg/*.txt": "",
    "nltk_webtext/*.txt": "",
    "wikitext2/*.txt": "",
    "web_demo/*.txt": "",
}
PIECE = 4000
BATCH = 1_000_000


def read(data: Path) -> Iterator[str]:
    """The documents of the sets; of plain text pieces of 4,000 characters, cut at line ends."""
    for pattern, field in SOURCES.items():
        for path in sorted(data.glob(pattern)):
            content = path.read_bytes()
            text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf8", "replace")
            lines = [line + "\n" for line in text.split("\n")]
            if field:
                yield from (json.loads(line)[field] for line in lines if line.strip())
                continue
            piece = ""
            for line in lines:
                piece += line
                if len(piece) > PIECE:
                    yield piece
                    piece = ""
            yield piece or " "


def theirs() -> Callable[[list[str]], list[str | None]]:
    """datatrove's chain as in its FineWeb example: what is left of each text, None for a dropped one."""
    from datatrove.data import Document
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )
    from datatrove.pipeline.formatters import PIIFormatter

    filters = [
        GopherQualityFilter(),
        GopherRepetitionFilter(),
        C4QualityFilter(filter_no_terminal_punct=False),
        FineWebQualityFilter(),
    ]
    formatter = PIIFormatter(email_replacement="email@example.com", ip_replacement="192.0.2.1")

    def run(texts: list[str]) -> list[str | None]:
        left: list[str | None] = []
        for text in texts:
            document = Document(text=text, id="")
            kept = all(each.filter(document) is True for each in filters)
            left.append(formatter.format(document.text) if kept else None)
        return left

    return run


def ours() -> Callable[[list[str]], list[str | None]]:
    """Our steps with the same rules; of personal data all kinds, where datatrove looks for e-mail and IPv4 only."""
    from corpus.cleaning.config import CleanConfig
    from corpus.cleaning.rules import Broken
    from corpus.cleaning.steps import steps_of
    from corpus.documents.parts import Document

    config = CleanConfig(min_characters=None, max_characters=None, c4={"line_ends": ()}, fineweb={})
    steps = steps_of(config, None)

    def run(texts: list[str]) -> list[str | None]:
        left: list[str | None] = []
        for batch in batches(texts):
            standing = list(enumerate(Document("", text, "", "") for text in batch))
            found: list[str | None] = [None] * len(batch)
            for step in steps:
                outcomes = step([document for _, document in standing])
                standing = [
                    (index, outcome)
                    for (index, _), outcome in zip(standing, outcomes, strict=True)
                    if not isinstance(outcome, Broken)
                ]
            for index, document in standing:
                found[index] = document.text
            left += found
        return left

    return run


def batches(texts: list[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip())
    parser.add_argument("--mb", type=float, default=50, help="megabytes of text to take, an even sample; 50: all")
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[3] / "shared" / "data")
    options = parser.parse_args()
    everything = list(read(options.data))
    random.Random(17).shuffle(everything)
    texts: list[str] = []
    size = 0.0
    for text in everything:
        if size < options.mb:
            texts.append(text)
            size += len(text.encode()) / 1e6
    started = time.process_time()
    we = ours()
    we(texts[:1])
    prepared = time.process_time() - started
    they = theirs()
    they(texts[:1])
    rows: dict[str, tuple[float, list[str | None]]] = {}
    for name, chain in (("datatrove 0.9", they), ("Stemma, cold", we), ("Stemma, warm", we)):
        started = time.process_time()
        left = chain(texts)
        rows[name] = (time.process_time() - started, left)
    print(f"{len(texts):,} documents, {size:.1f} MB; ours was ready after {prepared:.1f} s of CPU")
    base, reference = rows["datatrove 0.9"]
    for name, (seconds, left) in rows.items():
        kept = sum(text is not None for text in left)
        print(f"{name:14} {size / seconds:7.2f} MB/s a core  {base / seconds:6.1f} x   {kept:,} kept")
    left = rows["Stemma, cold"][1]
    same = sum((one is None) == (other is None) for one, other in zip(reference, left, strict=True))
    both = [(one, other) for one, other in zip(reference, left, strict=True) if one is not None and other is not None]
    equal = sum(one == other for one, other in both)
    print(
        f"kept or dropped alike: {same:,} of {len(texts):,}; of {len(both):,} kept by both {equal:,} have the same text"
    )
    print("(texts differ where ours also masked phone numbers and secrets, or left a longer dotted number alone)")


if __name__ == "__main__":
    main()
