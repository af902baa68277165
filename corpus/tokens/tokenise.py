"""Documents tokenised part by part: their ids in one file, and a row of numbers about each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus.documents.parts import is_heldout
from corpus.documents.selection import read_batches
from corpus.documents.sources import source_name
from corpus.tokens.encode import Encoder, bounds_of, encoder_of, load_tokenizer

BATCH_ROWS = 512
TOKENS = "tokens.bin"
INDEX_FILE = "index.npy"

# One document, tokenised: its id as a number, tokens with those around it, UTF-8 bytes, side, numbers of its source and
# language, and where its tokens lie: in the file of which partition, from which token on.
INDEX = np.dtype(
    [
        ("id", "<u8"),
        ("tokens", "<u4"),
        ("bytes", "<u4"),
        ("heldout", "?"),
        ("source", "<u2"),
        ("language", "<u2"),
        ("partition", "<u4"),
        ("at", "<u8"),
    ]
)
Index = NDArray[np.void]


@lru_cache(maxsize=1)
def encoder_in(folder: str, end: str | None = None, begin: str | None = None) -> Encoder:
    """The encoder of a tokenizer's folder, made once.

    Args:
        end, begin: as of `bounds_of`.
    """
    tokenizer = load_tokenizer(Path(folder))
    bounds = bounds_of(tokenizer, Path(folder), end, begin)
    return encoder_of(tokenizer, bounds.closing, bounds.opening)


def tokenise(
    folder: str, end: str | None, begin: str | None, dtype: str, heldout_share: float, part: Path, out: Path
) -> dict[str, Any]:
    """Run `encode_part` with the encoder of a tokenizer's folder, which each process makes once."""
    return encode_part(encoder_in(folder, end, begin), dtype, heldout_share, part, out)


def encode_part(encoder: Encoder, dtype: str, heldout_share: float, part: Path, out: Path) -> dict[str, Any]:
    """Tokenise one Parquet part into tokens.bin and index.npy; names of sources and languages go by the summary."""
    sources: dict[str, int] = {}
    languages: dict[str, int] = {}
    pieces, offset = [], 0
    with (out / TOKENS).open("wb") as file:
        for batch in read_batches(part, BATCH_ROWS, ["id", "text", "source", "group", "language"]):
            texts = batch.column("text")
            ids, lengths = encoder.encode(texts)
            file.write(ids.astype(dtype).tobytes())
            piece = np.zeros(len(batch), INDEX)
            piece["id"] = [int(name, 16) for name in batch.column("id").to_pylist()]
            piece["tokens"] = lengths
            piece["bytes"] = np.diff(np.frombuffer(texts.buffers()[1], np.int32)[texts.offset :][: len(texts) + 1])
            piece["heldout"] = [is_heldout(group, heldout_share) for group in batch.column("group").to_pylist()]
            piece["source"] = _numbers(map(source_name, batch.column("source").to_pylist()), sources)
            piece["language"] = _numbers(batch.column("language").to_pylist(), languages)
            piece["at"] = offset + np.cumsum(lengths) - lengths
            offset += len(ids)
            pieces.append(piece)
    index = np.concatenate(pieces) if pieces else np.zeros(0, INDEX)
    np.save(out / INDEX_FILE, index)
    return {"sources": list(sources), "languages": list(languages), "bytes": int(index["bytes"].sum(dtype=np.int64))}


def _numbers(names: Iterable[str], numbers: dict[str, int]) -> list[int]:
    return [numbers.setdefault(name, len(numbers)) for name in names]


@dataclass(frozen=True)
class Names:
    """Sources and languages by number, in the order of their names."""

    sources: list[str]
    languages: list[str]


def joined_index(folders: Sequence[Path], summaries: Sequence[Mapping[str, Any]]) -> tuple[Index, Names]:
    """The rows of all partitions, and what their numbers of sources and languages stand for."""
    names = Names(
        *(sorted({name for summary in summaries for name in summary[key]}) for key in ("sources", "languages"))
    )
    pieces = []
    for number, (folder, summary) in enumerate(zip(folders, summaries, strict=True)):
        piece = np.load(folder / INDEX_FILE)
        piece["partition"] = number
        for column, all_names in (("source", names.sources), ("language", names.languages)):
            renumbered = np.array([all_names.index(name) for name in summary[f"{column}s"]], np.uint16)
            piece[column] = renumbered[piece[column]] if len(renumbered) else piece[column]
        pieces.append(piece)
    return np.concatenate(pieces), names
