"""Samples sources up and down to the proportions that a model is to read them in.

Passes over the text, partition by partition: one that counts, then one for each epoch of the sources seen most often.

python -m corpus.mix.stage --config mix.yaml --input documents=DIR --out DIR
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from corpus.documents.parts import document_parts
from corpus.documents.passes import Passes, write_json
from corpus.documents.selection import link_selections
from corpus.documents.source_names import unknown_source
from corpus.documents.sources import SourceCounts, SourceFacts, read_sources, write_sources
from corpus.mix.config import MixConfig
from corpus.mix.sample import BINS, CountBins, Epoch, WriteSample, choose_dose
from infra.errors import StageError, stage_error
from infra.process.partitions import Summary, map_partitions, partition_folder
from infra.run import Result, Run


@dataclass(frozen=True)
class Available:
    """Bytes of text of a source on the two sides of the held-out split."""

    train: int
    heldout: int

    @property
    def all(self) -> int:
        return self.train + self.heldout

    def capacity(self, max_epochs: float) -> float:
        """Bytes that the source can give: held-out documents once, the others `max_epochs` times."""
        return self.train * max_epochs + self.heldout * min(1.0, max_epochs)

    def epochs_for(self, tokens: float) -> float:
        """Return the epochs of the training side for `tokens` bytes; the held-out one is seen at most once."""
        if tokens <= self.all or not self.train:
            return tokens / self.all if self.all else 0.0
        return (tokens - self.heldout) / self.train


def asked_shares(
    config: MixConfig, facts: Mapping[str, SourceFacts], available: Mapping[str, Available]
) -> dict[str, float]:
    """The requested share of each source in the mixture; the shares add up to 1.

    Raises StageError: `unknown_source` for a name that no source has; `bad_shares` if there is nothing to take.
    """
    source_names = [*dict.fromkeys([*facts, *available])]
    spoken_of = [(key, name) for key in ("shares", "weights") for name in getattr(config, key)]
    if problems := [
        problem for key, name in spoken_of for problem in unknown_source(f"mix.{key}.{name}", name, source_names)
    ]:
        raise StageError(*problems)
    weights = {name: config.weights.get(name, facts.get(name, SourceFacts()).weight) for name in available}
    natural = {name: weights[name] * available[name].all for name in available if name not in config.shares}
    fixed = {name: config.shares[name] for name in available if name in config.shares}
    remaining = 1 - sum(fixed.values())
    total = sum(natural.values())
    shares = fixed | {name: remaining * part / total if total else 0.0 for name, part in natural.items()}
    share_sum = sum(shares.values())
    if not share_sum:
        raise stage_error("bad_shares", "mix", "expected a share or weight above zero for a source that has text")
    return {name: shares[name] / share_sum for name in available}


def planned_bytes(
    config: MixConfig, shares: Mapping[str, float], available: Mapping[str, Available]
) -> dict[str, float]:
    """Bytes to take from each source. The amount beyond a source's epoch cap is taken from the others, in proportion to
    their shares; the sum falls short of the target only where all are at their cap."""
    target = target_bytes(config, sum(source.all for source in available.values()))
    planned = dict.fromkeys(available, 0.0)
    open_ = {name for name in available if shares[name] > 0}
    while open_:
        remaining = target - sum(planned[name] for name in available if name not in open_)
        share_sum = sum(shares[name] for name in open_)
        allotted = {name: remaining * shares[name] / share_sum for name in open_}
        full = {name for name in open_ if allotted[name] > available[name].capacity(config.max_epochs)}
        for name in open_:
            planned[name] = available[name].capacity(config.max_epochs) if name in full else allotted[name]
        if not full:
            break
        open_ -= full
    return planned


def target_bytes(config: MixConfig, available: float) -> float:
    if config.target_mb is not None:
        return config.target_mb * 1e6
    if config.target_tokens is not None:
        return config.target_tokens * config.bytes_per_token
    return available * (config.target_share or 1.0)


def mix(config: MixConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Write documents/ and text/ (see `corpus.documents.selection`) and sources.json; aux/mixture.json (what was
    asked for and what came out, by source) and aux/counts.json.

    A repeated document keeps its id and group and has in `metadata` the epoch that it belongs to, from 1 on; its first
    copy has none. Held-out documents are never repeated. Which documents are taken depends on their ids, the
    weights and the seed, not on their order. Memory does not grow with the text.
    Raises StageError: `unknown_source`, `bad_shares`; `nothing_left` if no document is taken.
    """
    facts = read_sources(inputs["documents"])
    passes = Passes(run, document_parts(inputs["documents"]))
    counted = passes.over_all("count", CountBins(config.heldout_share, config.seed))
    bins = _bins_by_source(passes.folders("count"), counted)
    available = {name: Available(*(int(side.sum()) for side in sides)) for name, sides in bins.items()}
    shares = asked_shares(config, facts, available)
    planned = planned_bytes(config, shares, available)
    doses = {name: choose_dose(available[name].epochs_for(planned[name]), bins[name]) for name in available}

    items = [
        Epoch(part, folder, tuple(summary["names"]), epoch)
        for epoch in range(max(dose.epochs for dose in doses.values()))
        for part, folder, summary in zip(passes.parts, passes.folders("count"), counted, strict=True)
        if any(epoch < doses[name].epochs for name in summary["names"])
    ]
    written = map_partitions(run, "write", WriteSample(doses), items)
    counts = SourceCounts.sum(summary["counts"] for summary in written)
    if not counts.documents.total():
        raise stage_error("nothing_left", "mix", "no document was selected", "raise the target or the weights")
    link_selections([partition_folder(run, "write", index) for index in range(len(items))], out_dir)
    write_sources(out_dir, facts, counts)
    rows = _rows(config, facts, available, shares, planned, counts)
    target = target_bytes(config, sum(source.all for source in available.values()))
    if sum(planned.values()) < 0.99 * target:
        short = f"{counts.bytes.total() / 1e6:.1f} of {target / 1e6:.1f} MB: every source is at mix.max_epochs"
        run.event("short_mixture", short)
    first = SourceCounts.sum(w["counts"] for w, item in zip(written, items, strict=True) if item.epoch == 0)
    total, once = sum(passes.rows), first.documents.total()
    repeated = counts.documents.total() - once
    report = {
        "read": total,
        "kept": counts.documents.total(),
        "kept_bytes": counts.bytes.total(),
        "dropped": {"sampled_out": total - once},
        "repeated": repeated,
    }
    write_json(out_dir / "aux" / "mixture.json", rows)
    write_json(out_dir / "aux" / "counts.json", report)
    figures = {
        "documents": counts.documents.total(),
        "text_bytes": counts.bytes.total(),
        "dropped": total - once,
        "repeated": repeated,
        **{f"share_{name}": row["share"] for name, row in rows.items()},
    }
    message = ", ".join(f"{name} {100 * row['share']:.1f} %" for name, row in rows.items())
    return Result(figures, f"{counts.bytes.total() / 1e6:.1f} MB: {message}")


def _bins_by_source(folders: Sequence[Path], counted: Sequence[Summary]) -> dict[str, np.ndarray]:
    """Return by source name the bytes (2, BINS) by side of the split and bin, in the order of the names."""
    bins = {
        name: np.zeros((2, BINS), np.int64) for name in sorted({n for summary in counted for n in summary["names"]})
    }
    for folder, summary in zip(folders, counted, strict=True):
        for name, counts in zip(summary["names"], np.load(folder / "bins.npy"), strict=True):
            bins[name] += counts
    return bins


def _rows(
    config: MixConfig,
    facts: Mapping[str, SourceFacts],
    available: Mapping[str, Available],
    shares: Mapping[str, float],
    planned: Mapping[str, float],
    counts: SourceCounts,
) -> dict[str, dict[str, Any]]:
    """Return by source name the requested amount, the amount planned within the epoch cap, and the result."""
    total = max(1, counts.bytes.total())
    return {
        name: {
            "weight": config.weights.get(name, facts.get(name, SourceFacts()).weight),
            "available_bytes": source.all,
            "natural_share": source.all / max(1, sum(other_source.all for other_source in available.values())),
            "asked_share": shares[name],
            "planned_bytes": round(planned[name]),
            "bytes": counts.bytes[name],
            "documents": counts.documents[name],
            "share": counts.bytes[name] / total,
            "epochs": counts.bytes[name] / source.all if source.all else 0.0,
        }
        for name, source in available.items()
    }


if __name__ == "__main__":
    from infra.alone import main

    main(mix, MixConfig)
