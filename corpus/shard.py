"""Tokenises documents and packs them into MDS shards, training and validation apart.

python -m corpus.shard --config shard.yaml --input documents=DIR --input tokenizer=DIR --out DIR
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from corpus.chat_template import END_OF_TEXT
from corpus.config import ShardConfig
from corpus.documents import Document, count_documents, read_documents
from corpus.split import is_heldout
from infra.errors import stage_error
from infra.run import Result, Run

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_DOCUMENTS = 256


def shard(config: ShardConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Writes train/ and validation/ as MDS folders and meta.json.

    Each sample has `tokens` (T,), uint16 or uint32 by the size of the vocabulary, and `starts`, uint32: the positions
    in it at which a document begins, the first always 0, so that attention can be kept within documents. Every document
    ends with <|endoftext|>; the tokens after the last full sequence of a side are left out and counted in meta.json.
    Special tokens that a text happens to spell are encoded as ordinary text.
    Raises StageError: `too_little_text` where a side has no full sequence; `no_end_of_text` for a tokenizer without it.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = str(config.workers > 1).lower()
    os.environ["RAYON_NUM_THREADS"] = str(config.workers)
    from streaming import MDSWriter
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(inputs["tokenizer"] / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    if end_of_text is None:
        raise stage_error("no_end_of_text", str(inputs["tokenizer"]), f"expected the token {END_OF_TEXT} in it")
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    columns = {"tokens": f"ndarray:{dtype.__name__}:{config.sequence_length}", "starts": "ndarray:uint32"}

    with ExitStack() as stack:
        sides = {}
        for name in ("train", "validation"):
            writer = MDSWriter(
                out=str(out_dir / name),
                columns=columns,
                size_limit=int(config.shard_mb * 2**20),
                compression=config.compression,
            )
            sides[name] = Packer(stack.enter_context(writer), config.sequence_length, dtype)
        _tokenise(inputs["documents"], tokenizer, end_of_text, sides, config, run)
        for name, side in sides.items():
            if side.sequences == 0:
                raise stage_error(
                    "too_little_text",
                    "shard.sequence_length",
                    f"the {name} side has {side.documents:,} documents with {len(side.rest):,} tokens, expected at "
                    f"least one sequence of {config.sequence_length:,}",
                    "give it more text, or shorten the sequences",
                )
    meta = _meta(sides, tokenizer, config, vocab_size, end_of_text, dtype.__name__)
    (out_dir / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf8")
    names = ("train_tokens", "validation_tokens", "train_bytes", "validation_bytes", "documents")
    headline = f"{meta['train_tokens']:,} training tokens, {meta['validation_tokens']:,} for validation"
    return Result({name: float(meta[name]) for name in names}, headline)


@dataclass
class Packer:
    """Joins the tokens of documents and cuts them into sequences of `length`, which go to the writer."""

    writer: Any
    length: int
    dtype: type[np.generic]
    rest: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    documents: int = 0
    text_bytes: int = 0
    sequences: int = 0

    def add(self, document: Document, tokens: list[int]) -> None:
        self.documents += 1
        self.text_bytes += len(document.text.encode())
        self.starts.append(len(self.rest))
        self.rest += tokens
        end = len(self.rest) - len(self.rest) % self.length
        for begin in range(0, end, self.length):
            self._write(begin)
        if end:
            self.rest = self.rest[end:]
            self.starts = [start - end for start in self.starts if start >= end]

    def _write(self, begin: int) -> None:
        starts = {0, *(start - begin for start in self.starts if begin <= start < begin + self.length)}
        self.writer.write(
            {
                "tokens": np.array(self.rest[begin : begin + self.length], self.dtype),
                "starts": np.array(sorted(starts), np.uint32),
            }
        )
        self.sequences += 1


def _tokenise(
    documents: Path,
    tokenizer: Tokenizer,
    end_of_text: int,
    sides: Mapping[str, Packer],
    config: ShardConfig,
    run: Run,
) -> None:
    total, done = count_documents(documents), 0
    for batch in _batches(read_documents(documents)):
        encodings = tokenizer.encode_batch_fast([document.text for document in batch], add_special_tokens=False)
        for document, encoding in zip(batch, encodings, strict=True):
            side = "validation" if is_heldout(document.group, config.heldout_share) else "train"
            sides[side].add(document, [*encoding.ids, end_of_text])
        done += len(batch)
        run.stop_if_cancelled()
        run.progress(done, total, "documents")


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    iterator = iter(documents)
    while batch := list(islice(iterator, BATCH_DOCUMENTS)):
        yield batch


def _meta(
    sides: Mapping[str, Packer],
    tokenizer: Tokenizer,
    config: ShardConfig,
    vocab_size: int,
    end_of_text: int,
    dtype: str,
) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "vocab_size": vocab_size,
        "sequence_length": config.sequence_length,
        "token_dtype": dtype,
        "end_of_text_id": end_of_text,
        "heldout_share": config.heldout_share,
        "documents": sum(side.documents for side in sides.values()),
    }
    for name, side in sides.items():
        # Bits per byte divides by the bytes that the written tokens stand for, so those of the rest are taken off.
        rest_bytes = len(tokenizer.decode(side.rest, skip_special_tokens=True).encode())
        meta |= {
            f"{name}_tokens": side.sequences * side.length,
            f"{name}_bytes": side.text_bytes - rest_bytes,
            f"{name}_sequences": side.sequences,
            f"{name}_documents": side.documents,
            f"{name}_left_out_tokens": len(side.rest),
        }
    return meta


if __name__ == "__main__":
    from infra.alone import main

    main(shard, ShardConfig)
