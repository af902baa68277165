"""Compression of the held-out text of each source by tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corpus.documents.parts import is_heldout, read_documents
from corpus.documents.sources import source_name

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLE_BYTES = 1_000_000
BATCH = 256


@dataclass
class Compression:
    """Counts of a text and of its tokens. words: parts between white space, as fertility is usually measured."""

    documents: int = 0
    bytes: int = 0
    words: int = 0
    tokens: int = 0
    unknown: int = 0

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / max(1, self.tokens)

    @property
    def fertility(self) -> float:
        return self.tokens / max(1, self.words)

    @property
    def unknown_share(self) -> float:
        return self.unknown / max(1, self.tokens)

    def as_json(self) -> dict[str, float]:
        derived = {name: round(getattr(self, name), 6) for name in ("bytes_per_token", "fertility", "unknown_share")}
        return {**asdict(self), **derived}

    def __add__(self, other: Compression) -> Compression:
        own_values, other_values = asdict(self), asdict(other)
        return Compression(**{name: own_values[name] + other_values[name] for name in own_values})


def heldout_sample(documents: Path, heldout_share: float) -> dict[str, list[str]]:
    """Return the first held-out texts of each source, about 1 MB of each, so that memorised words favour no
    tokenizer."""
    texts: dict[str, list[str]] = {}
    sampled_bytes: dict[str, int] = {}
    for document in read_documents(documents):
        source = source_name(document.source)
        if sampled_bytes.get(source, 0) < SAMPLE_BYTES and is_heldout(document.group, heldout_share):
            texts.setdefault(source, []).append(document.text)
            sampled_bytes[source] = sampled_bytes.get(source, 0) + len(document.text)
    return dict(sorted(texts.items()))


def compression(tokenizer: Tokenizer, unknown_id: int | None, texts: list[str]) -> Compression:
    totals = Compression(
        len(texts), sum(len(text.encode()) for text in texts), sum(len(text.split()) for text in texts)
    )
    for start in range(0, len(texts), BATCH):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + BATCH], add_special_tokens=False):
            totals.tokens += len(encoding.ids)
            totals.unknown += encoding.ids.count(unknown_id) if unknown_id is not None else 0
    return totals


def report(tokenizers: Mapping[str, Tokenizer], sample: Mapping[str, list[str]]) -> dict[str, Any]:
    """Label → {"vocab_size", "all": …, "sources": {source: …}}, each with what `Compression` has."""
    from corpus.tokens.encode import unknown_id

    document = {}
    for label, tokenizer in tokenizers.items():
        unknown = unknown_id(tokenizer)
        by_source = {source: compression(tokenizer, unknown, texts) for source, texts in sample.items()}
        document[label] = {
            "vocab_size": tokenizer.get_vocab_size(),
            "all": sum(by_source.values(), Compression()).as_json(),
            "sources": {source: result.as_json() for source, result in by_source.items()},
        }
    return document
