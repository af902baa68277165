"""Scores documents by a classifier, and keeps those above a score, or the best share of them.

python -m corpus.classification.stage --config classify.yaml --input documents=DIR --out DIR
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from corpus.classification.config import ClassifyConfig
from corpus.classification.scorer import SequenceScorer
from corpus.documents.dropped import SCHEMA as DROPPED
from corpus.documents.dropped import TEXT_CHARACTERS, tell_of_vanished, warning
from corpus.documents.parts import Document, DocumentWriter, document_parts, read_part
from corpus.documents.passes import write_json
from corpus.documents.source_names import unknown_source
from corpus.documents.sources import SourceCounts, read_sources, source_name, write_sources
from infra.errors import StageError, stage_error
from infra.io.json import BadJson, parse_json
from infra.process.pace import Pace
from infra.run import Result, Run

AT_ONCE = 256
"""Documents after which progress is reported and a cancellation is seen."""
_BINS = 20
_SAMPLES = 10


def classify(config: ClassifyConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Writes documents/ with the score of each in its metadata, under `scores`, and sources.json; aux/dropped.parquet,
    aux/scores.json (distribution by source, with the best and worst documents) and aux/counts.json.

    The scores of a part are kept once they are whole, so that a build that was interrupted goes on there.
    Raises StageError: as `SequenceScorer`; `unknown_source`; `nothing_left` if no document stays.
    """
    parts = document_parts(inputs["documents"])
    given = read_sources(inputs["documents"])
    scorer = SequenceScorer(config, run.launch.device)
    folder = run.work_dir / "scores"
    folder.mkdir(exist_ok=True)
    with Pace(run, "documents", sum(pq.read_metadata(part).num_rows for part in parts)) as pace:
        scores = [_scores_of(part, folder / f"{part.stem}.npy", config, scorer, pace, run) for part in parts]
    every = np.concatenate(scores)
    limit = _limit(config, every[~np.isnan(every)])
    known = given.keys() or {source_name(one.source) for part in parts for one in read_part(part)}
    key = "classify.from_sources"
    if problems := [one for name in config.from_sources or () for one in unknown_source(key, name, known)]:
        raise StageError(*problems)
    kept, dropped, seen = SourceCounts(), Counter[str](), _Distribution(config.name)
    rule = "top_share" if config.top_share is not None else "min_score"
    (out_dir / "aux").mkdir(parents=True, exist_ok=True)
    with (
        DocumentWriter(out_dir / "documents") as writer,
        pq.ParquetWriter(out_dir / "aux" / "dropped.parquet", DROPPED, compression="zstd") as table,
    ):
        for part, values in zip(parts, scores, strict=True):
            run.stop_if_cancelled()
            rows = []
            for document, value in zip(read_part(part), values.tolist(), strict=True):
                is_scored = not math.isnan(value)
                if is_scored:
                    seen.add(document, value)
                if is_scored and value < limit:
                    dropped[rule] += 1
                    rows.append(_dropped(document, rule, value, limit, config))
                    continue
                one = _with_score(document, config.name, value) if is_scored else document
                writer.write(one)
                kept.add(one)
            table.write_table(pa.Table.from_pylist(rows, DROPPED))
    if not writer.documents:
        message = f"no document is left of {every.size:,}; their scores are {every.min():.4g} to {every.max():.4g}"
        raise stage_error("nothing_left", f"classify.{rule}", message, "lower it, or set top_share")
    write_sources(out_dir, given, kept)
    vanished = tell_of_vanished("classify", given, kept, out_dir / "aux" / "dropped.parquet", run)
    scored = int((~np.isnan(every)).sum())
    report = {
        "read": every.size,
        "kept": writer.documents,
        "kept_bytes": writer.text_bytes,
        "dropped": dict(dropped),
        "scored": scored,
        **({"vanished": vanished} if vanished else {}),
    }
    if math.isfinite(limit):
        report["rules"] = {rule: {"paper": "FineWeb-Edu, Penedo et al., 2024", "limit": f"{rule} (at least {limit:g})"}}
    write_json(out_dir / "aux" / "counts.json", report)
    write_json(out_dir / "aux" / "scores.json", seen.as_json(limit))
    figures = {
        "documents": writer.documents,
        "text_bytes": writer.text_bytes,
        "dropped": dropped.total(),
        "scored": scored,
        "mean_score": float(np.nanmean(every)) if scored else 0.0,
        **({"least_score": limit} if math.isfinite(limit) else {}),
    }
    headline = f"kept {writer.documents:,} of {every.size:,} documents"
    headline += f" by {config.name} of at least {limit:.4g}" if math.isfinite(limit) else f", scored by {config.name}"
    return Result(figures, headline + warning(vanished))


def _scores_of(
    part: Path, file: Path, config: ClassifyConfig, scorer: SequenceScorer, pace: Pace, run: Run
) -> NDArray[np.float64]:
    """The scores (N,) of a part; NaN for documents of other sources, which are not scored."""
    rows = pq.read_metadata(part).num_rows
    if file.exists() and (found := np.load(file)).size == rows:
        pace.add(rows)
        return found
    scores = np.full(rows, np.nan)
    places: list[int] = []
    texts: list[str] = []
    for place, document in enumerate(read_part(part)):
        if config.from_sources is None or source_name(document.source) in config.from_sources:
            places.append(place)
            texts.append(document.text)
        if len(texts) == AT_ONCE or place == rows - 1:
            scores[places] = scorer(texts)
            pace.add(len(texts), sum(map(len, texts)))
            places, texts = [], []
            run.stop_if_cancelled()
    fresh = file.with_suffix(".fresh.npy")
    np.save(fresh, scores)
    fresh.replace(file)
    return scores


def _limit(config: ClassifyConfig, scores: NDArray[np.float64]) -> float:
    """The least score that stays; -inf where all do."""
    if config.min_score is not None:
        return config.min_score
    if config.top_share is None or not scores.size:
        return -math.inf
    keep = max(1, round(config.top_share * scores.size))
    return float(np.partition(scores, scores.size - keep)[scores.size - keep])


def _with_score(document: Document, name: str, value: float) -> Document:
    try:
        metadata = parse_json(document.metadata) if document.metadata else {}
    except BadJson:
        metadata = {}
    metadata = metadata if isinstance(metadata, dict) else {}
    before = metadata.get("scores")
    scores = {**(before if isinstance(before, dict) else {}), name: round(value, 6)}
    return document._replace(metadata=json.dumps({**metadata, "scores": scores}, ensure_ascii=False))


def _dropped(document: Document, rule: str, value: float, limit: float, config: ClassifyConfig) -> dict[str, object]:
    return {
        "id": document.id,
        "source": document.source,
        "rule": rule,
        "paper": Path(config.model).name,
        "value": value,
        "low": limit,
        "high": math.inf,
        "text": document.text[:TEXT_CHARACTERS],
    }


class _Distribution:
    """Scores by source, and the documents with the best and the worst."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._values: dict[str, list[float]] = {}
        self._best: list[tuple[float, str, str, str]] = []
        self._worst: list[tuple[float, str, str, str]] = []

    def add(self, document: Document, value: float) -> None:
        self._values.setdefault(source_name(document.source), []).append(value)
        row = (value, document.id, document.source, document.text[:400])
        self._best = sorted([*self._best, row], reverse=True)[:_SAMPLES]
        self._worst = sorted([*self._worst, row])[:_SAMPLES]

    def as_json(self, limit: float) -> dict[str, object]:
        every = np.array([value for values in self._values.values() for value in values])
        edges = np.histogram_bin_edges(every, _BINS) if every.size else np.zeros(0)

        def histogram(values: Sequence[float]) -> list[int]:
            return np.histogram(values, edges)[0].tolist() if edges.size else []

        def samples(rows: Iterable[tuple[float, str, str, str]]) -> list[dict[str, object]]:
            return [{"score": row[0], "id": row[1], "source": row[2], "text": row[3]} for row in rows]

        return {
            "name": self._name,
            "least": limit if math.isfinite(limit) else None,
            "edges": edges.tolist(),
            "sources": {
                name: {"documents": len(values), "mean": float(np.mean(values)), "histogram": histogram(values)}
                for name, values in sorted(self._values.items())
            },
            "best": samples(self._best),
            "worst": samples(self._worst),
        }


if __name__ == "__main__":
    from infra.alone import main

    main(classify, ClassifyConfig)
