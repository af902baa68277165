"""Drops texts that break a rule, changes others, and records the reasons.

python -m corpus.clean --config clean.yaml --input documents=DIR --out DIR
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq

from corpus.cleaning.config import CleanConfig
from corpus.cleaning.partition import CHANGED, clean_partition, merge_samples
from corpus.cleaning.rules import CleaningRule
from corpus.cleaning.steps import steps_of
from corpus.documents.dropped import SCHEMA as DROPPED
from corpus.documents.dropped import tell_of_vanished, warning
from corpus.documents.parts import concatenate, document_parts, link_parts, read_documents
from corpus.documents.passes import write_json
from corpus.documents.source_names import unknown_source
from corpus.documents.sources import SourceCounts, read_sources, write_sources
from infra.errors import StageError, stage_error
from infra.process.partitions import map_partitions, partition_folder
from infra.run import Result, Run


def clean(config: CleanConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Write documents/part-*.parquet and sources.json, a partition at a time.

    aux/dropped.parquet has every dropped text with its rule, the value measured and its limits, aux/changed.parquet the
    ids of those that were changed; aux/counts.json counts by rule, aux/samples.json shows some of each kind.
    Raises StageError: `unknown_source` for a name that no source of the documents has; `nothing_left`, naming the rule
    that took most, if no document is kept.
    """
    # Rules: those of the config, and a classifier of quality if it learns one.
    given = read_sources(inputs["documents"])
    _check_sources(config, given)
    parts = document_parts(inputs["documents"])
    classifier, learned = _learn(config, inputs["documents"], run)
    # Here, so that native code is compiled once and not by every worker.
    rules = [rule for step in steps_of(config, classifier) for rule in step.rules]
    # Clean each part in a worker.
    sizes = [pq.read_metadata(part).num_rows for part in parts]
    summaries = [
        dict(summary)
        for summary in map_partitions(
            run,
            "clean",
            partial(clean_partition, config=config, classifier=classifier),
            parts,
            unit="documents",
            sizes=sizes,
        )
    ]
    folders = [partition_folder(run, "clean", index) for index in range(len(parts))]
    # Sum the counts of all parts; a text of which nothing is left is an error.
    total, documents, size = (sum(summary[key] for summary in summaries) for key in ("read", "documents", "bytes"))
    dropped: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for summary in summaries:
        dropped.update(summary["dropped"])
        counts.update(summary["counts"])
    if not documents:
        _explain_emptiness(dropped, total, rules)
    # The artifact: the kept documents, by links, and what was dropped and changed.
    link_parts(folders, out_dir)
    if classifier:
        shutil.copytree(classifier, out_dir / "classifier")
    kept = SourceCounts.sum(summary["sources"] for summary in summaries)
    write_sources(out_dir, given, kept)
    concatenate([folder / "dropped.parquet" for folder in folders], out_dir / "aux" / "dropped.parquet", DROPPED)
    concatenate([folder / "changed.parquet" for folder in folders], out_dir / "aux" / "changed.parquet", CHANGED)
    vanished = tell_of_vanished("clean", given, kept, out_dir / "aux" / "dropped.parquet", run)
    # Figures and report.
    changed = sum(summary["changed"] for summary in summaries)
    by_rule = {rule.name: dropped[rule.name] for rule in rules}
    figures = {"documents": documents, "text_bytes": size, "dropped": dropped.total(), "changed": changed}
    report = {
        "read": total,
        "kept": documents,
        "kept_bytes": size,
        "dropped": by_rule,
        "changed": changed,
        "counts": dict(sorted(counts.items())),
        **({"classifier": learned} if learned else {}),
        **({"vanished": vanished} if vanished else {}),
        "rules": {rule.name: {"paper": rule.paper, "limit": str(rule)} for rule in rules},
    }
    write_json(out_dir / "aux" / "counts.json", report)
    write_json(out_dir / "aux" / "samples.json", merge_samples(summaries))
    headline = f"kept {documents:,} of {total:,} documents, {size / 1e6:.1f} MB{warning(vanished)}"
    return Result(figures | learned | {f"dropped_{name}": count for name, count in by_rule.items()}, headline)


def _check_sources(config: CleanConfig, known: Collection[str]) -> None:
    """Raise StageError for sources that the config names and that do not exist, if any are known."""
    requested: dict[str, Collection[str]] = {}
    if config.language:
        requested["language.keep_by_source"] = config.language.keep_by_source
    if config.classifier:
        requested["classifier.apply_to"] = config.classifier.apply_to or ()
    problems = [
        problem
        for key, names in requested.items()
        for name in names
        for problem in unknown_source(f"clean.{key}", name, known)
    ]
    if known and problems:
        raise StageError(*problems)


def _learn(config: CleanConfig, documents: Path, run: Run) -> tuple[Path | None, dict[str, float]]:
    """The folder of the trained quality classifier, with what was measured of it."""
    if config.classifier is None:
        return None, {}
    from corpus.cleaning.classifier import train_classifier

    folder = run.work_dir / "classifier"
    figures = train_classifier(config.classifier, read_documents(documents), folder)
    accuracy = figures["classifier_heldout_accuracy"]
    run.event("classifier", f"the quality classifier is right on {accuracy:.1%} of the held-out documents", **figures)
    return folder, figures


def _explain_emptiness(dropped: Counter[str], total: int, rules: list[CleaningRule]) -> None:
    name, count = dropped.most_common(1)[0]
    rule = next(rule for rule in rules if rule.name == name)
    took = "all of them" if count == total else f"{count:,}"
    others = ", ".join(f"{other} {number:,}" for other, number in dropped.most_common(4)[1:])
    raise stage_error(
        "nothing_left",
        f"clean.{name}",
        f"no document is left of {total:,}; the rule {rule} took {took}" + (f"; then {others}" if others else ""),
        "relax it, or set it to null",
    )


if __name__ == "__main__":
    from infra.alone import main

    main(clean, CleanConfig)
