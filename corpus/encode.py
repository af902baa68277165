"""Documents to token ids, by the `tokenizers` package or, with the same ids, many times faster from a table."""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from corpus.chat_template import END_OF_TEXT
from infra.errors import stage_error

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from corpus.pretokens import Table

Ids = NDArray[np.uint32]
Lengths = NDArray[np.int64]


class Encoder(Protocol):
    """Encodes documents, each closed by <|endoftext|>."""

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


def end_of_text(tokenizer: Tokenizer, folder: Path) -> int:
    """The id that closes a document. Raises StageError `no_end_of_text`."""
    found = tokenizer.token_to_id(END_OF_TEXT)
    if found is None:
        raise stage_error("no_end_of_text", str(folder), f"expected the token {END_OF_TEXT} in it")
    return int(found)


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """The id that stands for what the vocabulary lacks, where the model has one."""
    model = json.loads(tokenizer.to_str())["model"]
    if isinstance(model.get("unk_id"), int):
        return int(model["unk_id"])
    return tokenizer.token_to_id(model["unk_token"]) if model.get("unk_token") else None


def encoder_of(tokenizer: Tokenizer, closing: int) -> Encoder:
    """The fastest encoder that gives exactly the tokenizer's ids."""
    return TableEncoder(tokenizer, closing) if splits_like_gpt2(tokenizer) else PlainEncoder(tokenizer, closing)


def splits_like_gpt2(tokenizer: Tokenizer) -> bool:
    """Whether nothing but GPT-2's pre-tokens decides what ids a text gets: true of every tokenizer trained here."""
    parts: dict[str, Any] = json.loads(tokenizer.to_str())
    before = parts["pre_tokenizer"] or {}
    return (
        parts["normalizer"] is None
        and before.get("type") == "ByteLevel"
        and not before["add_prefix_space"]
        and before["use_regex"]
        and not parts["model"].get("dropout")
        and all(token["special"] for token in parts["added_tokens"])
    )


class PlainEncoder:
    """`encode_batch_fast` of the tokenizers package."""

    def __init__(self, tokenizer: Tokenizer, closing: int) -> None:
        self._tokenizer = tokenizer
        self._closing = closing

    def encode(self, texts: pa.StringArray) -> tuple[Ids, Lengths]:
        ids = array("I")
        ends = []
        for encoding in self._tokenizer.encode_batch_fast(texts.to_pylist(), add_special_tokens=False):
            ids.extend(encoding.ids)
            ids.append(self._closing)
            ends.append(len(ids))
        return np.frombuffer(ids, np.uint32), np.diff(ends, prepend=0)


class TableEncoder:
    """Looks pre-tokens up in a table; those that are not in it yet go through the tokenizer, once.

    The table has some 50 MB and is emptied when it is full. Classes of characters (letter, number, space, other) are
    asked of the tokenizer's own pre-tokeniser when a character is first met, so that its version of Unicode holds.
    """

    def __init__(self, tokenizer: Tokenizer, closing: int, table: Table | None = None) -> None:
        from corpus.pretokens import Table

        self._tokenizer = tokenizer
        self._closing = closing
        self._classes = np.zeros(0x110000, np.uint8)
        self._table = table or Table()
        self._id_ends = np.zeros(self._table.size + 1, np.int64)
        self._ids = np.empty(1 << 20, np.uint32)
        self._plain = PlainEncoder(tokenizer, closing)
        self._meet("".join(map(chr, range(128))))

    def encode(self, texts: pa.StringArray) -> tuple[Ids, Lengths]:
        pieces = []
        done = 0
        while done < len(texts):
            ids, lengths = self._encode_some(texts[done:])
            if not len(lengths):
                # One document with more pre-tokens than the table holds.
                ids, lengths = self._plain.encode(texts[done : done + 1])
            pieces.append((ids, lengths))
            done += len(lengths)
        if not pieces:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        return np.concatenate([ids for ids, _ in pieces]), np.concatenate([lengths for _, lengths in pieces])

    def _encode_some(self, texts: pa.StringArray) -> tuple[Ids, Lengths]:
        """As many of the first texts as the table has room for."""
        from corpus.pretokens import DONE, FULL, UNKNOWN_CHARACTER, find, gather

        text, offsets = _utf8(texts)
        table = self._table
        known = table.entries
        found = np.empty(int(offsets[-1] - offsets[0]), np.int32)
        counts = np.zeros(len(texts), np.int64)
        done, used, reason = 0, 0, DONE
        while done < len(texts):
            arrays = (table.slots, table.ends, table.words, table.state, found[used:], counts)
            reason, done = find(text, offsets, done, self._classes, *arrays)
            used = int(counts[:done].sum())
            if reason == UNKNOWN_CHARACTER:
                self._meet(texts[done].as_py())
            elif reason == FULL:
                break
        self._learn(known)
        counts = counts[:done]
        sizes = self._id_ends[1:] - self._id_ends[:-1]
        out = np.empty(int(sizes[found[:used]].sum()) + done, np.uint32)
        lengths = np.empty(done, np.int64)
        gather(found, counts, self._id_ends, self._ids, self._closing, out, lengths)
        if reason == FULL:
            table.clear()
        return out, lengths

    def _learn(self, known: int) -> None:
        """Has the tokenizer encode the pre-tokens that are new in the table."""
        if self._table.entries == known:
            return
        encodings = self._tokenizer.encode_batch_fast(self._table.added_since(known), add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        ends = self._id_ends[known] + np.cumsum([len(some) for some in ids])
        if ends[-1] > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(max(len(self._ids), ends[-1]), np.uint32)])
        self._id_ends[known + 1 : known + 1 + len(ends)] = ends
        self._ids[self._id_ends[known] : ends[-1]] = [token for some in ids for token in some]

    def _meet(self, text: str) -> None:
        """Finds the classes of a text's characters."""
        for character in set(text):
            if not self._classes[ord(character)]:
                self._classes[ord(character)] = self._class_of(character)

    def _class_of(self, character: str) -> int:
        from corpus.pretokens import LETTER, NUMBER, OTHER, SPACE

        for neighbour, kind in (("a", LETTER), ("1", NUMBER), ("!", OTHER)):
            if len(self._tokenizer.pre_tokenizer.pre_tokenize_str(neighbour + character + neighbour)) == 1:
                return kind
        return SPACE


def _utf8(texts: pa.StringArray) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes of an Arrow column and where each text begins in them, without a copy of the bytes."""
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    return np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8), ends
