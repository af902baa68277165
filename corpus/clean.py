"""Drops duplicates and texts that break a quality rule, and keeps count of why.

python -m corpus.clean --config clean.yaml --input documents=DIR --out DIR
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from corpus.config import CleanConfig
from corpus.documents import Document, DocumentWriter, count_documents, read_documents
from corpus.rules import Rule, broken_rule, rules_of
from infra.errors import stage_error
from infra.run import Result, Run

EXACT = Rule("drop_exact_duplicates", "Lee et al., 2022", lambda measured: 1, high=0)
DROPPED = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "source", "rule", "paper")),
        *((name, pa.float64()) for name in ("value", "low", "high")),
        ("text", pa.string()),
    ]
)
BATCH = 500


def clean(config: CleanConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Writes documents/part-*.parquet, and aux/dropped.parquet with the rule that each dropped text broke, the value
    measured and its limits; aux/counts.json counts them by rule.

    Memory grows by one number a document, for the exact duplicates.
    Raises StageError `nothing_left`, naming the rule that took most, if no document is kept.
    """
    total = count_documents(inputs["documents"])
    rules = rules_of(config)
    seen: set[int] = set()
    counts: Counter[str] = Counter()
    (out_dir / "aux").mkdir(parents=True, exist_ok=True)
    with (
        DocumentWriter(out_dir / "documents") as writer,
        pq.ParquetWriter(out_dir / "aux" / "dropped.parquet", DROPPED, compression="zstd") as dropped,
    ):
        rows: list[dict[str, object]] = []
        for number, document in enumerate(read_documents(inputs["documents"]), 1):
            broken = _broken(document, config, rules, seen)
            if broken is None:
                writer.write(document)
            else:
                counts[broken[0].name] += 1
                rows.append(_row(document, *broken))
            if len(rows) == BATCH:
                dropped.write_table(pa.Table.from_pylist(rows, DROPPED))
                rows = []
            if number % BATCH == 0:
                run.stop_if_cancelled()
                run.progress(number, total, "documents", f"{sum(counts.values()):,} dropped")
        dropped.write_table(pa.Table.from_pylist(rows, DROPPED))
    if not writer.documents:
        _explain_emptiness(counts, total, rules)
    names = ([EXACT.name] if config.drop_exact_duplicates else []) + [rule.name for rule in rules]
    by_rule = {name: counts[name] for name in names}
    report = {"read": total, "kept": writer.documents, "dropped": by_rule, "kept_bytes": writer.text_bytes}
    (out_dir / "aux" / "counts.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf8")
    run.progress(total, total, "documents", f"{total - writer.documents:,} dropped")
    figures = {
        "documents": writer.documents,
        "text_bytes": writer.text_bytes,
        "dropped": total - writer.documents,
        **{f"dropped_{name}": count for name, count in by_rule.items()},
    }
    return Result(figures, f"kept {writer.documents:,} of {total:,} documents, {writer.text_bytes / 1e6:.1f} MB")


def _broken(document: Document, config: CleanConfig, rules: list[Rule], seen: set[int]) -> tuple[Rule, float] | None:
    if config.drop_exact_duplicates:
        number = int(document.id, 16)
        if number in seen:
            return EXACT, 1
        seen.add(number)
    return broken_rule(document.text, rules)


def _row(document: Document, rule: Rule, value: float) -> dict[str, object]:
    return {
        "id": document.id,
        "source": document.source,
        "rule": rule.name,
        "paper": rule.paper,
        "value": float(value),
        "low": rule.low,
        "high": rule.high,
        "text": document.text,
    }


def _explain_emptiness(counts: Counter[str], total: int, rules: list[Rule]) -> None:
    name, count = counts.most_common(1)[0]
    rule = next((str(rule) for rule in rules if rule.name == name), name)
    raise stage_error(
        "nothing_left",
        f"clean.{name}",
        f"no document is left of {total:,}; the rule {rule} took most of them: {count:,}",
        "loosen it, or set it to null",
    )


if __name__ == "__main__":
    from infra.alone import main

    main(clean, CleanConfig)
