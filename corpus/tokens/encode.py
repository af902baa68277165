"""Documents to token ids, by the `tokenizers` package or, with the same ids, many times faster from a table."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from corpus.tokens.chat_template import END_OF_TEXT
from corpus.tokens.cuts import kinds
from corpus.tokens.cutting import Cutting, cutting_of, without_space_in_front
from infra.errors import stage_error
from infra.io.json import BadJson, parse_own_json, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from corpus.tokens.chunks import ChunkTable

DOCUMENT_ENDS = (END_OF_TEXT, "<|end_of_text|>")
"""Tokens that end a document in whatever tokenizer has them: ours, GPT-2's, Qwen's; Llama 3's."""

Ids = NDArray[np.uint32]
Lengths = NDArray[np.int64]


class Encoder(Protocol):
    """Encodes documents, each closed by the token that ends documents."""

    def encode(self, texts: pa.StringArray) -> tuple[Ids, Lengths]:
        """The ids of all texts, one after the other, and how many each has."""
        ...


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of an artifact, to be used on one thread; special tokens that a text spells are ordinary text."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@dataclass(frozen=True)
class Bounds:
    """The tokens around each document.

    end: the token that closes a document, and its id. opening: the id of the token that a document begins with; None
    for tokenizers whose models read the end of the document before in its place.
    """

    end: str
    closing: int
    opening: int | None = None


def bounds_of(tokenizer: Tokenizer, folder: Path, end: str | None = None, begin: str | None = None) -> Bounds:
    """Return the tokens around each document.

    Args:
        tokenizer: of `load_tokenizer`.
        folder: its folder, with tokenizer_config.json.
        end: the token that closes a document. None: the first of `DOCUMENT_ENDS` that there is, else the tokenizer's
            eos_token. Chat models may have the end of an answer as that, and have read documents with the others.
        begin: the token that a document begins with, "" for none. None: the tokenizer's bos_token if it is put in front
            of every text, by its post-processor or `add_bos_token`, as the model was then trained.

    Raises:
        StageError: `no_end_of_text` for a tokenizer without any of them, or without those that are named.
    """
    roles = _roles(folder)
    ends = (end,) if end else (*DOCUMENT_ENDS, roles.get("eos_token"))
    candidates = {token: number for token in ends if token and (number := tokenizer.token_to_id(token)) is not None}
    if not candidates:
        expectation = f"the token {end}" if end else f"{END_OF_TEXT}, or an eos_token that the vocabulary has,"
        raise stage_error(
            "no_end_of_text",
            str(folder),
            f"expected {expectation} to end documents with",
            "set shard.end_of_text to a token of tokenizer.json",
        )
    name, closing = next(iter(candidates.items()))
    opening = None
    if begin is None:
        bos = roles.get("bos_token")
        opening = tokenizer.token_to_id(bos) if bos else None
        if opening is not None and not _puts_in_front(tokenizer, opening, roles.get("add_bos_token")):
            opening = None
    elif begin:
        opening = tokenizer.token_to_id(begin)
        if opening is None:
            raise stage_error(
                "no_end_of_text",
                str(folder),
                f"expected the token {begin} to begin documents with",
                "set shard.begin_of_text to a token of tokenizer.json",
            )
    return Bounds(name, closing, None if opening == closing else opening)


def _roles(folder: Path) -> dict[str, Any]:
    """bos_token, eos_token and add_bos_token, as far as a tokenizer's folder names them."""
    roles: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path := folder / name).is_file():
            try:
                settings = read_json(path)
            except BadJson as error:
                raise stage_error("bad_tokenizer", str(path), str(error)) from None
            for key in ("bos_token", "eos_token", "add_bos_token"):
                value = settings.get(key) if isinstance(settings, dict) else None
                value = value.get("content") if isinstance(value, dict) else value
                roles |= {} if value is None else {key: value}
    return roles


def _puts_in_front(tokenizer: Tokenizer, opening: int, stated: bool | None) -> bool:
    if isinstance(stated, bool):
        return stated
    return bool(tokenizer.encode("a", add_special_tokens=True).ids[:1] == [opening])


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """The id that stands for what the vocabulary lacks, where the model has one."""
    model = parse_own_json(tokenizer.to_str())["model"]
    if isinstance(model.get("unk_id"), int):
        return int(model["unk_id"])
    return tokenizer.token_to_id(model["unk_token"]) if model.get("unk_token") else None


def encoder_of(tokenizer: Tokenizer, closing: int, opening: int | None = None) -> Encoder:
    """The fastest encoder that gives exactly the tokenizer's ids."""
    if opening is not None:
        return WithOpening(encoder_of(tokenizer, closing), opening)
    plain, cutting = PlainEncoder(tokenizer, closing), cutting_of(tokenizer)
    if cutting is None:
        return plain
    table = TableEncoder(plain, cutting)
    return PartlyPlain(table, plain, cutting.added) if cutting.added else table


class WithOpening:
    """Another encoder, with a token in front of each document."""

    def __init__(self, encoder: Encoder, opening: int) -> None:
        self._encoder = encoder
        self._opening = opening

    def encode(self, texts: pa.StringArray) -> tuple[Ids, Lengths]:
        ids, lengths = self._encoder.encode(texts)
        return np.insert(ids, np.cumsum(lengths) - lengths, np.uint32(self._opening)), lengths + 1


class PlainEncoder:
    """`encode_batch_fast` of the tokenizers package."""

    def __init__(self, tokenizer: Tokenizer, closing: int) -> None:
        self.tokenizer = tokenizer
        self.closing = closing

    def encode(self, texts: pa.StringArray) -> tuple[Ids, Lengths]:
        ids = array("I")
        ends = []
        for encoding in self.tokenizer.encode_batch_fast(texts.to_pylist(), add_special_tokens=False):
            ids.extend(encoding.ids)
            ids.append(self.closing)
            ends.append(len(ids))
        return np.frombuffer(ids, np.uint32), np.diff(ends, prepend=0)


class PartlyPlain:
    """The table, but the package for documents with a word that was added to the vocabulary, and is never split."""

    def __init__(self, table: TableEncoder, plain: PlainEncoder, added: Sequence[str]) -> None:
        self._table = table
        self._plain = plain
        self._added = "|".join(map(re.escape, added))

    def encode(self, texts: pa.StringArray) -> tuple[Ids, Lengths]:
        has_added = np.array(pc.match_substring_regex(texts, self._added))
        starts = [0, *(np.flatnonzero(np.diff(has_added)) + 1), len(texts)]
        pieces = [
            (self._plain if has_added[begin] else self._table).encode(texts[begin:end])
            for begin, end in pairwise(starts)
            if begin < end
        ]
        return _joined(pieces)


class TableEncoder:
    """Looks chunks of text up in a table; those that are not in it yet go through the tokenizer, once.

    The table has some 50 MB and is emptied when it is full.
    """

    def __init__(self, plain: PlainEncoder, cutting: Cutting, table: ChunkTable | None = None) -> None:
        from corpus.tokens.chunks import ChunkTable

        self._plain = plain
        self._cutting = cutting
        self._tokenizer = without_space_in_front(plain.tokenizer) if cutting.space_in_front else plain.tokenizer
        self._table = table or ChunkTable()
        self._id_ends = np.zeros(self._table.size + 1, np.int64)
        self._ids = np.empty(1 << 20, np.uint32)

    def encode(self, texts: pa.StringArray) -> tuple[Ids, Lengths]:
        pieces = []
        done = 0
        all_texts = texts
        if self._cutting.space_in_front:
            texts = pc.if_else(pc.equal(pc.binary_length(texts), 0), texts, pc.binary_join_element_wise(" ", texts, ""))
        while done < len(texts):
            ids, lengths = self._encode_some(texts[done:])
            if not len(lengths):
                # One document with more chunks than the table holds.
                ids, lengths = self._plain.encode(all_texts[done : done + 1])
            pieces.append((ids, lengths))
            done += len(lengths)
        return _joined(pieces)

    def _encode_some(self, texts: pa.StringArray) -> tuple[Ids, Lengths]:
        """Encode as many of the first texts as the table has room for."""
        from corpus.tokens.chunks import find, gather

        text, offsets = _utf8(texts)
        table = self._table
        known_entries = table.entries
        chunk_entries = np.empty(int(offsets[-1] - offsets[0]), np.int32)
        counts = np.zeros(len(texts), np.int64)
        arrays = (table.slots, table.ends, table.words, table.state, chunk_entries, counts)
        done = find(text, offsets, kinds(), self._cutting.cuts, *arrays)
        self._learn(known_entries)
        counts = counts[:done]
        sizes = self._id_ends[1:] - self._id_ends[:-1]
        out = np.empty(int(sizes[chunk_entries[: counts.sum()]].sum()) + done, np.uint32)
        lengths = np.empty(done, np.int64)
        gather(chunk_entries, counts, self._id_ends, self._ids, self._plain.closing, out, lengths)
        if done < len(texts):
            table.clear()
        return out, lengths

    def _learn(self, known_entries: int) -> None:
        """Let the tokenizer encode the chunks that are new in the table."""
        if self._table.entries == known_entries:
            return
        encodings = self._tokenizer.encode_batch_fast(self._table.added_since(known_entries), add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        ends = self._id_ends[known_entries] + np.cumsum([len(token_ids) for token_ids in ids])
        if ends[-1] > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(max(len(self._ids), ends[-1]), np.uint32)])
        self._id_ends[known_entries + 1 : known_entries + 1 + len(ends)] = ends
        self._ids[self._id_ends[known_entries] : ends[-1]] = [token for token_ids in ids for token in token_ids]


def _joined(pieces: Sequence[tuple[Ids, Lengths]]) -> tuple[Ids, Lengths]:
    if not pieces:
        return np.empty(0, np.uint32), np.empty(0, np.int64)
    return np.concatenate([ids for ids, _ in pieces]), np.concatenate([lengths for _, lengths in pieces])


def _utf8(texts: pa.StringArray) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes of an Arrow column and where each text begins in them, without a copy of the bytes."""
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    return np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8), ends
