"""Removes the benchmarks' test items from the training text. Two passes, each partition by partition: the search for
items, and the writing of the text that is kept.

python -m corpus.decontaminate.stage --config x.yaml --input documents=DIR --input benchmark_text=DIR --out DIR
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from corpus.decontaminate.config import DecontaminateConfig
from corpus.decontaminate.index import make_index
from corpus.decontaminate.items import read_items
from corpus.decontaminate.report import not_searched, write_contamination
from corpus.decontaminate.write import HITS, RULE, FindItems, FoundPart, WriteClean
from corpus.documents.dropped import SCHEMA as DROPPED
from corpus.documents.dropped import tell_of_vanished, warning
from corpus.documents.parts import concatenate, document_parts
from corpus.documents.passes import Passes, write_json
from corpus.documents.selection import link_selections
from corpus.documents.sources import SourceCounts, read_sources, write_sources
from infra.errors import stage_error
from infra.run import Result, Run


def decontaminate(config: DecontaminateConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Write documents/ and text/ (see `corpus.documents.selection`) and sources.json; aux/dropped.parquet,
    aux/hits.parquet (which item shows where), aux/contamination.json (by task, with samples) and aux/counts.json.

    A document that is cut keeps its id and group. Memory holds the items' n-grams, and grows with nothing else.

    Args:
        inputs: documents; benchmark_text, with items.jsonl.

    Raises StageError `nothing_left` if every document goes.
    """
    # First pass over the text: find n-grams of test items. Those that too many documents share count as common.
    items = read_items(inputs["benchmark_text"])
    index, owners = make_index(items, config)
    passes = Passes(run, document_parts(inputs["documents"]))
    file = run.work_dir / "index.npz"
    np.savez(file, **index._asdict(), **owners._asdict())
    passes.over_all("find", FindItems(file))
    hit_files = [folder / "hits.npy" for folder in passes.folders("find")]
    common = run.work_dir / "common.npy"
    np.save(common, _common(hit_files, owners.begins.size - 1, config.max_document_hits))
    # Second pass: drop or cut the documents with items.
    write = WriteClean(config, tuple(items), file, common)
    written = passes.over(
        "write", write, [FoundPart(part, hits) for part, hits in zip(passes.parts, hit_files, strict=True)]
    )

    # The artifact: the text that is left, by links, and its sources.
    folders = passes.folders("write")
    counts = SourceCounts.sum(summary["counts"] for summary in written)
    total = sum(passes.rows)
    if not counts.documents.total():
        message = f"no document is left of {total:,}: each contains a test item of the benchmarks"
        raise stage_error(
            "nothing_left", "decontaminate", message, "check that the training text is not a benchmark file"
        )
    link_selections(folders, out_dir)
    given = read_sources(inputs["documents"])
    write_sources(out_dir, given, counts)
    # Records: what was dropped, which items are where, and sources that vanished.
    aux = out_dir / "aux"
    concatenate((folder / "dropped.parquet" for folder in folders), aux / "dropped.parquet", DROPPED)
    concatenate((folder / "hits.parquet" for folder in folders), aux / "hits.parquet", HITS)
    vanished = tell_of_vanished("decontaminate", given, counts, aux / "dropped.parquet", run)
    hit = sum((Counter(summary["items"]) for summary in written), Counter[str]())
    holding = sum((Counter(summary["tasks"]) for summary in written), Counter[str]())
    tasks = write_contamination(aux, items, owners, {int(number): times for number, times in hit.items()}, holding)
    # Figures and headline.
    dropped, cut = (sum(summary[name] for summary in written) for name in ("dropped", "cut"))
    report = {
        "read": total,
        "kept": counts.documents.total(),
        "kept_bytes": counts.bytes.total(),
        "dropped": {RULE: dropped},
        "cut": cut,
        "cuts": sum(summary["cuts"] for summary in written),
        "items": len(items),
        "items_hit": sum(task["items_hit"] for task in tasks.values()),
        **({"vanished": vanished} if vanished else {}),
    }
    write_json(aux / "counts.json", report)
    figures = {
        "documents": report["kept"],
        "text_bytes": report["kept_bytes"],
        "dropped": dropped,
        "cut": cut,
        "items": report["items"],
        "items_hit": report["items_hit"],
    }
    changed = f"{dropped:,} dropped" + (f", {cut:,} cut" if cut else "")
    headline = f"{report['items_hit']:,} of {report['items']:,} test items found in the text; {changed} of {total:,}"
    headline += not_searched(tasks) + warning(vanished)
    return Result(figures, headline)


def _common(hit_files: Sequence[Path], hashes: int, most: int | None) -> np.ndarray:
    """Return a mask of the hashes that occur in more than `most` documents."""
    documents = np.zeros(hashes, np.int64)
    for hits in hit_files if most is not None else ():
        grams = np.unique(np.load(hits)[:, :2], axis=0)[:, 1]
        documents += np.bincount(grams, minlength=hashes)
    return documents > (most or 0)


if __name__ == "__main__":
    from infra.alone import main

    main(decontaminate, DecontaminateConfig)
