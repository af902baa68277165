"""The data of a pipeline as its page shows it: sources, funnel and tokens, a search, and the way of one document."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from corpus.documents.parts import document_parts, is_heldout
from corpus.documents.selection import read_batches
from evaluation.pages.corpus import text_sections, token_sections
from evaluation.pages.corpus.corpus import Corpus
from evaluation.pages.parts import Section
from evaluation.results.stage_order import DOCUMENTS
from flows.dashboard.reading import address_of, find, is_model
from infra.store.ancestry import AncestryMember, ancestry, artifact_member, descent
from infra.store.store import Store

COLUMNS = ("id", "text", "source", "group")
PATIENCE_S = 5.0
"""Longest search of one request."""
HITS, SNIPPET, SHOWN_CHARACTERS, BATCH = 30, 160, 6000, 2048


@dataclass(frozen=True)
class Hit:
    """A document with the text around the first occurrence of the searched words."""

    id: str
    source: str
    before: str
    match: str
    after: str


@dataclass
class DataStep:
    """A stage on the way of a document. verdict: kept, dropped, or not here. text: as the stage leaves it."""

    stage: str
    verdict: str
    reason: str = ""
    text: str = ""
    original: dict[str, str] = field(default_factory=dict)


def data_sets(store: Store) -> list[dict[str, Any]]:
    """Return the last artifact of each corpus, newest first: its address, pipeline, and what came out."""
    rows = []
    read = {
        (reference.stage, reference.digest)
        for _, manifest in store.manifests()
        for reference in manifest.inputs.values()
    }
    for stage in ("shard", *reversed(DOCUMENTS)):
        for folder, manifest in store.manifests(stage) if stage in store.stages() else ():
            is_last = stage == "shard" or (manifest.stage, manifest.digest) not in read
            if is_last and "." not in folder.name:
                headline = str(manifest.result.get("headline", ""))
                rows.append(
                    {
                        "address": address_of(folder, manifest),
                        "step": manifest.step or stage,
                        "pipeline": manifest.pipeline,
                        "finished": manifest.finished,
                        "headline": headline,
                    }
                )
    return sorted(rows, key=lambda row: row["finished"], reverse=True)


def data_page(store: Store, text: str, query: str, document: str) -> dict[str, Any]:
    """Return the values of the page of a corpus.

    Args:
        text: the last artifact of the corpus, as addresses name it.
        query: words to search in the documents as they were read; "" for none.
        document: id of a document whose way is shown; "" for none.

    Raises ConfigError for a text that names no artifact.
    """
    folder, manifest = find(store, text)
    start = artifact_member(store, folder, manifest)
    members = {m.manifest.stage: m for m in reversed(ancestry(store, [(folder, manifest)]).artifacts) if m.manifest}
    descendants = [m for m in descent(store, start).artifacts[1:] if m.manifest and m.folder]
    for member in descendants:  # validations read what they judge
        if member.manifest and member.manifest.makes == "verdict":
            members.setdefault(member.manifest.step or member.manifest.stage, member)
    folders = {
        stage: store.glance(member.manifest, member.folder)
        for stage, member in members.items()
        if member.manifest and member.folder
    }
    chain = [(stage, folders[stage]) for stage in DOCUMENTS if stage in folders]
    values: dict[str, Any] = {
        "address": address_of(folder, manifest),
        "manifest": manifest,
        "report": next((a for a in map(_corpus_report, descendants) if a), ""),
        "models": [(m.id, m.manifest) for m in descendants if m.manifest and is_model(m.manifest) and "." not in m.id],
        "query": query,
        "document": document,
        "hits": [],
        "note": "",
        "more": False,
        "way": [],
        "sections": [],
    }
    if document:
        values["way"] = way(chain, members.get("shard"), document)
    elif query and chain:
        values["hits"], values["note"] = search(chain[0][1], query)
        values["more"] = len(values["hits"]) == HITS
    else:
        values["sections"] = [section for section in _sections(Corpus(folders)) if section]
    return values


def _sections(corpus: Corpus) -> Iterator[Section]:
    if corpus.chain:
        yield text_sections.sources(corpus)
        yield text_sections.funnel(corpus)
        yield text_sections.rules(corpus)
        yield text_sections.duplicates(corpus)
        yield text_sections.duplicates(corpus, "semantic_dedupe")
        yield text_sections.contamination(corpus)
        yield token_sections.mixture(corpus)
    yield token_sections.tokenizer(corpus)
    yield token_sections.shards(corpus)


def _corpus_report(member: AncestryMember) -> str:
    page = "aux/corpus_report.html"
    if member.manifest and page in {file.path for file in member.manifest.files} and "." not in member.id:
        return f"{member.id}/{page}"
    return ""


def search(artifact: Path, query: str) -> tuple[list[Hit], str]:
    """Return the first documents of an artifact that contain a text, in any case, and a note on what was searched."""
    hits: list[Hit] = []
    deadline, searched = time.monotonic() + PATIENCE_S, 0
    for part in document_parts(artifact):
        for batch in read_batches(part, BATCH, ["id", "source", "text"]):
            matches = batch.filter(pc.match_substring(batch["text"], query, ignore_case=True))
            searched += len(batch)
            hits += [_hit(row, query) for row in matches.slice(0, HITS - len(hits)).to_pylist()]
            if len(hits) >= HITS:
                return hits, f"in the first {searched:,} documents as they were read"
            if time.monotonic() > deadline:
                return hits, f"in the first {searched:,} documents; the search stopped after {PATIENCE_S:.0f} s"
    return hits, f"in all {searched:,} documents as they were read"


def _hit(row: dict[str, str], query: str) -> Hit:
    at = max(0, row["text"].lower().find(query.lower()))
    end = at + len(query)
    text = row["text"]
    return Hit(row["id"], row["source"], text[max(0, at - SNIPPET) : at], text[at:end], text[end : end + SNIPPET])


def way(chain: list[tuple[str, Path]], shard: AncestryMember | None, document: str) -> list[DataStep]:
    """Return what each stage did with a document: kept, changed, or dropped and why, with the one it repeats."""
    steps: list[DataStep] = []
    row: dict[str, str] | None = None
    for stage, folder in chain:
        dropped = _dropped(folder, document)
        now = _document(folder, document, row["source"] if row else "")
        if dropped:
            steps.append(DataStep(stage, "dropped", _reason(dropped), row["text"] if row else dropped["text"]))
            original = _original(folder, document)
            if original:
                kept = _document(folder, original["original"], "")
                steps[-1].original = {
                    "id": original["original"],
                    "source": original["original_source"],
                    "similarity": f"{original['similarity']:.2f}" if original["similarity"] is not None else "",
                    "text": (kept or {}).get("text", "")[:SHOWN_CHARACTERS],
                }
            break
        if now is None:
            if row is not None:
                steps.append(
                    DataStep(
                        stage,
                        "not found",
                        "it is neither among the documents that the stage kept nor among those that it dropped",
                    )
                )
            break
        is_changed = row is not None and now["text"] != row["text"]
        shown = now["text"][:SHOWN_CHARACTERS] if row is None or is_changed else ""
        steps.append(DataStep(stage, "changed" if is_changed else "kept", "", shown))
        row = now
    else:
        if row is not None and shard is not None and shard.manifest is not None:
            share = float(shard.manifest.config["heldout_share"])
            side = "held out: no model was trained on it" if is_heldout(row["group"], share) else "for training"
            steps.append(DataStep("shard", "kept", side))
    return steps


def _reason(row: dict[str, Any]) -> str:
    low, high, value = row["low"], row["high"], row["value"]
    bounds = [f"at least {low:g}"] * (low is not None and low > float("-inf"))
    bounds += [f"at most {high:g}"] * (high is not None and high < float("inf"))
    measured = f": {value:.3g}" if value is not None and value == value else ""
    needed = f", {' and '.join(bounds)} is allowed" if bounds else ""
    paper = f" ({row['paper']})" if row["paper"] else ""
    return f"{str(row['rule']).replace('_', ' ')}{measured}{needed}{paper}"


def _dropped(folder: Path, document: str) -> dict[str, Any] | None:
    return _row(folder / "aux" / "dropped.parquet", document)


def _original(folder: Path, document: str) -> dict[str, Any] | None:
    return _row(folder / "aux" / "duplicates.parquet", document)


def _row(path: Path, document: str) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(BATCH):
            rows: list[dict[str, Any]] = batch.filter(pc.equal(batch["id"], document)).to_pylist()
            if rows:
                return rows[0]
    return None


def _document(folder: Path, document: str, source: str) -> dict[str, str] | None:
    """Return a document of an artifact, by its id or, if its text was changed, by where it was read."""
    for part in document_parts(folder):
        for batch in read_batches(part, BATCH, list(COLUMNS)):
            matches = pc.equal(batch["id"], document)
            if source:
                matches = pc.or_(matches, pc.equal(batch["source"], source))
            rows: list[dict[str, str]] = pa.Table.from_batches([batch]).filter(matches).to_pylist()
            if rows:
                return rows[0]
    return None
