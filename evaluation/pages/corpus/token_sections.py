"""Sections on the mixture, the tokenizer, the shards, and the drift of all of them since the last report."""

from __future__ import annotations

from corpus.validation.drift import Drift
from evaluation.pages.charts import Bar, bar_chart
from evaluation.pages.corpus.corpus import Corpus
from evaluation.pages.parts import Figure, Section, Table
from evaluation.pages.words import fixed, percent, size


def mixture(corpus: Corpus) -> Section:
    rows = corpus.json("mix", "aux/mixture.json")
    if not rows:
        return Section("mixture", "Mixture")
    drawn = [
        (name, [Bar(row["asked_share"], "base", "requested"), Bar(row["share"], "train", "actual")])
        for name, row in rows.items()
    ]
    table = [
        [
            name,
            f"{row['weight']:g}",
            percent(row["natural_share"]),
            percent(row["asked_share"]),
            percent(row["share"]),
            fixed(row["epochs"]),
            size(row["bytes"]),
        ]
        for name, row in rows.items()
    ]
    columns = ["source", "weight", "share of the text", "requested", "actual", "epochs", "text"]
    figure = Figure(
        "Requested and actual",
        bar_chart("Requested and actual", drawn, value_format=percent, width=900),
        "Shares of the mixture's bytes. Where the actual share is smaller, the cap on epochs limited it.",
        "",
        [("requested", "base"), ("actual", "train")],
        wide=True,
    )
    return Section("mixture", "Mixture", "", [figure], [Table("", columns, table, numeric=(1, 2, 3, 4, 5, 6))])


def tokenizer(corpus: Corpus) -> Section:
    compression = corpus.json("tokenizer", "aux/compression.json")
    if not compression:
        return Section("tokenizer", "Tokenizer")
    styles = ("train", "base", "sft", "rlhf", "validation")
    names = list(compression)
    sources = list(compression[names[0]]["sources"])
    drawn = [
        (
            source,
            [
                Bar(compression[name]["sources"][source]["bytes_per_token"], styles[i % 5], name)
                for i, name in enumerate(names)
            ],
        )
        for source in sources
    ]
    rows = []
    for name in names:
        for source, statistics in (("all", compression[name]["all"]), *compression[name]["sources"].items()):
            cells = [f"{compression[name]['vocab_size']:,}", source, fixed(statistics["bytes_per_token"])]
            rows.append([name, *cells, fixed(statistics["fertility"]), percent(statistics["unknown_share"], 2)])
    figure = Figure(
        "Bytes per token",
        bar_chart("Bytes per token", drawn, value_format=fixed, width=900),
        "On held-out documents, up to 1 MB of each source. With more bytes per token, longer texts fit.",
        "",
        [(name, styles[i % 5]) for i, name in enumerate(names)],
        wide=True,
    )
    columns = ["tokenizer", "entries", "source", "bytes per token", "tokens per word", "unknown"]
    return Section(
        "tokenizer", "Tokenizer", "", [figure], [Table("", columns, rows, folded=len(rows) > 12, numeric=(1, 3, 4, 5))]
    )


def shards(corpus: Corpus) -> Section:
    meta = corpus.json("shard", "meta.json")
    if not meta:
        return Section("shards", "Shards")
    rows = [
        [side, *(f"{meta[f'{side}_{key}']:,}" for key in ("documents", "sequences", "tokens", "left_out_tokens"))]
        for side in ("train", "validation")
    ]
    lead = (
        f"Sequences of {meta['sequence_length']:,} tokens ({meta['token_dtype']}) of {meta['vocab_size']:,} entries, "
        f"{percent(meta['heldout_share'])} of the documents held out by their hash, in an order that mixes all sources."
    )
    by_source = [
        [
            name,
            *(f"{source[side]['tokens']:,}" for side in ("train", "validation")),
            percent(source["train"]["tokens"] / meta["train_tokens"]),
        ]
        for name, source in meta["sources"].items()
    ]
    tables = [
        Table("", ["side", "documents", "sequences", "tokens", "tokens left out"], rows, numeric=(1, 2, 3, 4)),
        Table("Tokens by source", ["source", "to train on", "validation", "of training"], by_source, numeric=(1, 2, 3)),
    ]
    return Section("shards", "Shards", lead, tables=tables)


def drifted(drifts: list[Drift]) -> Section:
    rows = [
        [
            drift.name,
            drift.words,
            fixed(drift.psi, 3),
            fixed(drift.jensen_shannon, 3),
            drift.moved[0],
            percent(drift.moved[1]),
            percent(drift.moved[2]),
        ]
        for drift in drifts
    ]
    if not rows:
        return Section("drift", "Drift", "There is no earlier report of this pipeline to compare with.")
    columns = ["distribution", "change", "PSI", "Jensen-Shannon, bits", "what moved most", "was", "is"]
    note = "PSI: population stability index; under 0.1 no notable change, over 0.25 a large one (Siddiqi, 2006)."
    return Section(
        "drift",
        "Drift",
        "Against the last report of this pipeline.",
        tables=[Table("", columns, rows, note, numeric=(2, 3, 5, 6))],
    )
