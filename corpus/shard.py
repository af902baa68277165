"""Tokenises documents and packs them into MDS shards, training and validation apart.

python -m corpus.shard --config shard.yaml --input documents=DIR --input tokenizer=DIR --out DIR
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from corpus.config import ShardConfig
from corpus.documents.parts import document_parts
from corpus.tokens.canaries import draw_canaries, plant, write_canaries
from corpus.tokens.chat_template import END_OF_TEXT
from corpus.tokens.encode import bounds_of, load_tokenizer, unknown_id
from corpus.tokens.packing import Form, PackingSide, Slice, by_source, in_order, slices_of, write_shards
from corpus.tokens.tokenise import Index, Names, joined_index, tokenise
from infra.errors import stage_error
from infra.io.files import link_or_copy
from infra.io.json import read_own_json
from infra.process.partitions import map_partitions, partition_folder
from infra.process.workers import import_once
from infra.run import Result, Run

STEP = "tokenise"
SIDES = ("train", "validation")
# A worker needs some seconds to import streaming, in which it could have packed one or two shards.
SHARDS_AN_ITEM = 4
INDEX_ROWS = 100_000
INDEX_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("side", pa.string()),
        ("source", pa.string()),
        ("language", pa.string()),
        ("tokens", pa.uint32()),
        ("bytes", pa.uint32()),
    ]
)


def shard(config: ShardConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Write train/ and validation/ as MDS folders, index.parquet and meta.json.

    Each sample has `tokens` (T,), uint16 or uint32 by the size of the vocabulary; `starts`, uint32: the positions in it
    at which the text of a document begins, the first always 0, so that attention can be kept within documents; and
    `sources`, uint16: the number, in meta.json, of the source of the document at each start. Every document ends with
    <|endoftext|> or the token that the tokenizer has for it, and begins with its bos_token where it puts one in front
    of every text (`bounds_of`); the tokens after the last full sequence of a side are left out and counted in
    meta.json. Special tokens that a text happens to spell are encoded as ordinary text. index.parquet has one row per
    document, in the order of the shards. With `config.by_source` the training side holds one source after the other: no
    sequence and no shard file is of two, each source drops its tokens after its own last full sequence, and meta.json
    has the numbers of its sequences. With `config.canaries` canaries.json names what was planted.
    Memory grows by about 100 bytes per document. Raises StageError: `too_little_text` where a side has no full
    sequence; `no_end_of_text` for a tokenizer without it.
    """
    import_once("streaming")  # with all that it imports it takes 0.7 GB
    folder = inputs["tokenizer"]
    tokenizer = load_tokenizer(folder)
    bounds = bounds_of(tokenizer, folder, config.end_of_text, config.begin_of_text)
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    form = Form(
        run.work_dir / STEP,
        "uint16" if vocab_size <= 1 << 16 else "uint32",
        config.sequence_length,
        config.compression,
        config.hashes,
        0 if bounds.opening is None else 1,
    )
    facts = {
        "vocab_size": vocab_size,
        "sequence_length": config.sequence_length,
        "token_dtype": form.dtype,
        "end_of_text_id": bounds.closing,
        "unknown_id": unknown_id(tokenizer),
        "heldout_share": config.heldout_share,
    }
    # Only where they are not those of this project's tokenizers, whose shards keep their digest.
    if bounds.end != END_OF_TEXT:
        facts["end_of_text"] = bounds.end
    if bounds.opening is not None:
        facts["begin_of_text_id"] = bounds.opening
    parts = document_parts(inputs["documents"])
    if config.canaries:
        canaries = draw_canaries(config.canaries, config.canary_seed)
        parts = [*parts, *plant(canaries, config.heldout_share, run.work_dir / "canaries")]
        write_canaries(canaries, out_dir)
    function = partial(
        tokenise, str(folder), config.end_of_text, config.begin_of_text, form.dtype, config.heldout_share
    )
    rows = [pq.read_metadata(part).num_rows for part in parts]
    summaries = map_partitions(run, STEP, function, parts, unit="documents", sizes=rows)
    index, names = joined_index([partition_folder(run, STEP, number) for number in range(len(parts))], summaries)
    index = in_order(index)
    if config.by_source:
        index = by_source(index)
    # Order each side, or each source of it, and cut it into slices of whole sequences.
    sides: dict[str, PackingSide] = {}
    positions: dict[int, dict[str, int]] = {}
    for name in SIDES:
        side = index[index["heldout"] == (name == "validation")]
        apart = config.by_source and name == "train"
        numbers = range(len(names.sources)) if apart else [None]
        slices: list[Slice] = []
        stretches = []
        for number in numbers:
            documents = side if number is None else side[side["source"] == number]
            order = run.work_dir / (f"order-{name}.npy" if number is None else f"order-{name}-{number}.npy")
            np.save(order, documents)
            own_slices = slices_of(order, documents, config.sequence_length, _shard_sequences(config, form.dtype))
            count = sum(item.sequences for item in own_slices)
            if number is not None:
                positions[number] = {"first_sequence": sum(item.sequences for item in slices), "sequences": count}
            stretches.append((documents, count))
            slices += own_slices
        sides[name] = PackingSide(stretches, form, tokenizer)
        if not slices:
            heldout = f"raise heldout_share ({config.heldout_share}) in all stages, " if name == "validation" else ""
            raise stage_error(
                "too_little_text",
                "shard.sequence_length",
                f"the {name} side has {len(side):,} documents with {int(side['tokens'].sum()):,} tokens, expected at "
                f"least one sequence of {config.sequence_length:,}",
                f"provide more text, {heldout}or shorten the sequences",
            )
        _write_side(name, slices, form, out_dir, run)
    # The index of documents, and meta.json, which describes the shards to their readers.
    _write_index(out_dir / "index.parquet", index, names)
    meta = _meta(facts, sides, names, positions)
    (out_dir / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf8")
    figures = ("train_tokens", "validation_tokens", "train_bytes", "validation_bytes", "documents")
    headline = f"{meta['train_tokens']:,} training tokens, {meta['validation_tokens']:,} for validation"
    return Result({name: float(meta[name]) for name in figures}, headline)


def _shard_sequences(config: ShardConfig, dtype: str) -> int:
    return max(1, int(config.shard_mb * 2**20) // (config.sequence_length * np.dtype(dtype).itemsize))


def _write_side(name: str, slices: list[Slice], form: Form, out_dir: Path, run: Run) -> None:
    """Write the shards of a side, each by itself, and join their indexes."""
    step = f"pack-{name}"
    items = [slices[at : at + SHARDS_AN_ITEM] for at in range(0, len(slices), SHARDS_AN_ITEM)]
    sizes = [sum(piece.sequences for piece in item) for item in items]
    map_partitions(run, step, partial(write_shards, form), items, unit="sequences", sizes=sizes)
    (out_dir / name).mkdir()
    shards = []
    for number in range(len(slices)):
        folder = partition_folder(run, step, number // SHARDS_AN_ITEM) / str(number % SHARDS_AN_ITEM)
        [entry] = read_own_json(folder / "index.json")["shards"]
        for file in (entry["raw_data"], entry["zip_data"]):
            if file is None:
                continue
            written, file["basename"] = folder / file["basename"], file["basename"].replace("00000", f"{number:05}")
            if written.exists():
                link_or_copy(written, out_dir / name / file["basename"])
        shards.append(entry)
    index = json.dumps({"version": 2, "shards": shards}, sort_keys=True)
    (out_dir / name / "index.json").write_text(index + "\n", encoding="utf8")


def _write_index(path: Path, index: Index, names: Names) -> None:
    with pq.ParquetWriter(path, INDEX_SCHEMA, compression="zstd") as file:
        for begin in range(0, len(index), INDEX_ROWS):
            rows = index[begin : begin + INDEX_ROWS]
            columns = {
                "id": [f"{number:016x}" for number in rows["id"].tolist()],
                "side": [SIDES[int(heldout)] for heldout in rows["heldout"].tolist()],
                "source": [names.sources[number] for number in rows["source"].tolist()],
                "language": [names.languages[number] for number in rows["language"].tolist()],
                "tokens": rows["tokens"],
                "bytes": rows["bytes"],
            }
            file.write_table(pa.table(columns, schema=INDEX_SCHEMA))


def _meta(
    facts: Mapping[str, Any], sides: Mapping[str, PackingSide], names: Names, positions: Mapping[int, Mapping[str, int]]
) -> dict[str, Any]:
    """Return the content of meta.json.

    Args:
        facts: keys that describe the artifact's form.
        sides: the sides of the split by name.
        names: sources and languages by number.
        positions: training sequences of each source that is packed apart, by the source's number.
    """
    meta = {**facts, "documents": sum(side.documents for side in sides.values())}
    for name, side in sides.items():
        for key in ("tokens", "bytes", "sequences", "documents", "left_out_tokens"):
            meta[f"{name}_{key}"] = getattr(side, key)
    meta["sources"] = {
        source: {"id": number, **{name: side.of_source(number) for name, side in sides.items()}}
        for number, source in enumerate(names.sources)
    }
    for number, position in positions.items():
        meta["sources"][names.sources[number]]["train"] |= position
    return meta


if __name__ == "__main__":
    from infra.alone import main

    main(shard, ShardConfig)
