"""The rows that expectations look at, one table for each kind of data, with the columns derived for them."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from corpus.cleaning.languages.characters import without_format
from corpus.cleaning.languages.known import has_sentences, is_unspaced, letters_in
from corpus.config import DataKind
from corpus.documents.parts import count_documents, read_documents
from corpus.documents.sources import read_sources, source_name
from corpus.readers.config import RULE
from corpus.tokens.remote import location_of
from infra.errors import stage_error
from infra.io.json import parse_own_json, read_own_json, read_own_json_lines

if TYPE_CHECKING:
    from pandas import DataFrame


def kind_of(data: Path) -> DataKind:
    """Detect the kind of data in an artifact from its files. Raises StageError `unknown_data`."""
    if (data / "documents").is_dir():
        return "documents"
    if (data / "meta.json").is_file():
        return "shards"
    path = data / "train.jsonl"
    if not path.is_file() or not (data / "heldout.jsonl").is_file():
        raise stage_error(
            "unknown_data", str(data), "expected documents/, shards, or train.jsonl and heldout.jsonl in this folder"
        )
    with path.open(encoding="utf8") as lines:
        return "preferences" if "chosen" in parse_own_json(next(lines, "{}")) else "instructions"


def load_rows(kind: DataKind, data: Path, max_rows: int) -> tuple[DataFrame, int]:
    """The rows of a kind of data, and how many there are in all; of more than `max_rows` an even sample."""
    if kind in ("documents", "clean"):
        return _documents(data, max_rows)
    return _shards(data, max_rows) if kind == "shards" else _pairs(kind, data, max_rows)


def _documents(data: Path, max_rows: int) -> tuple[DataFrame, int]:
    import pandas as pd

    total = count_documents(data)
    columns = ["id", "text", "source", "language"]
    documents = (d for d in read_documents(data) if _is_sampled(d.id, max_rows, total))
    rows = pd.DataFrame(((d.id, d.text, source_name(d.source), d.language) for d in documents), columns=columns)
    texts = rows["text"].fillna("")
    declared = {name: facts.language for name, facts in read_sources(data).items()}
    asked = rows["source"].map(lambda source: declared.get(source, ""))
    return rows.assign(
        rows=total,
        language_like=texts.map(is_language_like),
        cleanly_decoded=~texts.str.contains("\ufffd", regex=False),
        copies=rows.groupby("id")["id"].transform("size"),
        language_as_declared=(rows["language"] == asked) | (rows["language"] == "") | (asked == ""),
        source_share=rows.groupby("source")["id"].transform("size") / max(1, len(rows)),
    ), total


def _pairs(kind: str, data: Path, max_rows: int) -> tuple[DataFrame, int]:
    import pandas as pd

    sides: dict[str, list[dict[str, Any]]] = {}
    for name in ("train", "heldout"):
        sides[name] = list(read_own_json_lines(data / f"{name}.jsonl"))
    pairs = [*sides["train"], *sides["heldout"]]
    columns = ["id", "source", "prompt", *(["chosen", "rejected"] if kind == "preferences" else ["response", "verify"])]
    sampled = [pair for pair in pairs if _is_sampled(pair["id"], max_rows, len(pairs))]
    # An answer may be calls of functions without a text.
    calls = [json.dumps(pair.get("tool_calls", [])) if pair.get("tool_calls") else "" for pair in sampled]
    texts = [
        {**pair, "response": pair["response"] or call} if call else pair
        for pair, call in zip(sampled, calls, strict=True)
    ]
    rows = pd.DataFrame(texts, columns=columns)
    rows = rows.assign(train_rows=len(sides["train"]), heldout_rows=len(sides["heldout"]))
    if kind == "instructions":
        is_known = rows["verify"].astype(str).str.fullmatch(RULE) & (rows["response"].str.strip() != "")
        return rows.assign(
            prompt_differs=rows["prompt"].str.strip() != rows["response"].str.strip(),
            answer_like=rows["response"].map(is_answer_like) | pd.Series(calls, dtype=object).astype(bool),
            verifiable=rows["verify"].isna() | is_known,
        ), len(pairs)
    ratio = (rows["chosen"].str.len().mean() or 1.0) / (rows["rejected"].str.len().mean() or 1.0)
    return rows.assign(
        chosen_differs=rows["chosen"].str.strip() != rows["rejected"].str.strip(),
        length_ratio=max(ratio, 1 / ratio),
    ), len(pairs)


def _shards(data: Path, max_rows: int) -> tuple[DataFrame, int]:
    """A row a sequence; facts about documents and sources, which hold of all sequences, stand in every row."""
    import pandas as pd
    import pyarrow.parquet as pq

    if location_of(data / "train"):
        raise stage_error(
            "remote_shards", str(data), "shards on S3 cannot be validated", "validate them before the upload"
        )
    meta = read_own_json(data / "meta.json")
    total = meta["train_sequences"] + meta["validation_sequences"]
    every = -(-total // max_rows)
    found = []
    for side in ("train", "validation"):
        place = 0
        for shard in read_own_json(data / side / "index.json")["shards"]:
            with _shard_reader(data / side, shard) as reader:
                for at in range(-place % every, shard["samples"], every):
                    found.append({"side": side, "sequence": place + at, **_sequence(reader[at], meta)})
            place += shard["samples"]
    index = pq.read_table(data / "index.parquet", columns=["id", "side"])
    copies = Counter(index.column("id").to_pylist())
    sides = Counter(name for name, _ in set(zip(*(column.to_pylist() for column in index.columns), strict=True)))
    train = [one["train"] for one in meta["sources"].values() if one["train"]["tokens"]]
    ratios = [one["bytes"] / one["tokens"] for one in train]
    return pd.DataFrame(found).assign(
        train_tokens=meta["train_tokens"],
        validation_tokens=meta["validation_tokens"],
        most_copies=max(copies.values(), default=0),
        most_sides=max(sides.values(), default=0),
        min_bytes_per_token=min(ratios, default=0.0),
        max_bytes_per_token=max(ratios, default=0.0),
    ), total


@contextmanager
def _shard_reader(folder: Path, shard: dict[str, Any]) -> Iterator[Any]:
    """Reads the samples of one MDS shard, which is unpacked into a temporary file if it is compressed."""
    from streaming.base.compression import decompress
    from streaming.base.format import reader_from_json

    if not shard["zip_data"]:
        yield reader_from_json(str(folder), None, shard)
        return
    with tempfile.TemporaryDirectory() as unpacked:
        content = decompress(shard["compression"], (folder / shard["zip_data"]["basename"]).read_bytes())
        (Path(unpacked) / shard["raw_data"]["basename"]).write_bytes(content)
        yield reader_from_json(unpacked, None, shard)


def _sequence(sample: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    tokens, starts = sample["tokens"], sample["starts"]
    # With a token that begins documents, the text begins behind it.
    ends = np.flatnonzero(tokens == meta["end_of_text_id"]) + (2 if "begin_of_text_id" in meta else 1)
    expected = np.union1d([0], ends[ends < len(tokens)])
    unknown = 0 if meta["unknown_id"] is None else int((tokens == meta["unknown_id"]).sum())
    return {
        "smallest_id": int(tokens.min()),
        "largest_id": int(tokens.max()),
        "tokens": len(tokens),
        "documents": len(starts),
        "unknown_share": unknown / max(1, len(tokens)),
        "ids_in_range": bool(tokens.max() < meta["vocab_size"]),
        "full_length": len(tokens) == meta["sequence_length"],
        "starts_right": np.array_equal(starts, expected) and len(sample["sources"]) == len(starts),
    }


def _is_sampled(identity: str, max_rows: int, total: int) -> bool:
    return total <= max_rows or int(identity, 16) < max_rows / total * 2**64


def is_language_like(text: str) -> bool:
    """At least 40 % letters among the characters that are not space, and words of 2 to 15 characters on average; in
    scripts that put no space between words, sentences that marks or spaces end. Format characters count as none."""
    visible = without_format(text)
    words = visible.split()
    characters = sum(map(len, words))
    if not characters or letters_in(visible) < 0.4 * characters:
        return False
    # Zero-width spaces between words are as good as spaces.
    return has_sentences(text) if is_unspaced(visible) else 2 <= characters / len(words) <= 15


def is_answer_like(text: str) -> bool:
    """At least a third letters, or a digit anywhere: "42" is an answer."""
    text = without_format(text)
    return any(map(str.isdigit, text)) or sum(map(str.isalpha, text)) >= max(1, len(text) / 3)
