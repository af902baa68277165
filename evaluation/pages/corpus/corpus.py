"""The artifacts of a corpus chain, read for its report."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from evaluation.results.artifacts import Artifact, read_artifacts
from evaluation.results.stage_order import DOCUMENTS

WORDS = {
    "ingest": "read",
    "clean": "after cleaning",
    "dedupe": "without duplicates",
    "semantic_dedupe": "without those that say the same",
    "classify": "by the classifier",
    "generate": "with generated ones",
    "decontaminate": "without test items",
    "mix": "mixed",
}


class Corpus:
    """Every finished stage of the chain by id; any of them may be missing."""

    def __init__(self, inputs: Mapping[str, Path]) -> None:
        self.artifacts: dict[str, Artifact] = read_artifacts(inputs)

    def json(self, id: str, name: str) -> Any:
        """Return a JSON file of a stage's artifact; an empty mapping if there is none."""
        artifact = self.artifacts.get(id)
        return (artifact.read_json(name) if artifact else None) or {}

    @cached_property
    def chain(self) -> list[str]:
        """Stages that produce documents, in order."""
        return [id for id in DOCUMENTS if id in self.artifacts]

    def sources(self, id: str) -> dict[str, dict[str, Any]]:
        """Return the records of each source in a stage's artifact: licence, language, weight, documents, bytes."""
        sources: dict[str, dict[str, Any]] = self.json(id, "sources.json")
        return sources

    def totals(self, id: str) -> tuple[int, int]:
        """Return the documents and bytes of text that a stage leaves."""
        sources = self.sources(id).values()
        return sum(source["documents"] for source in sources), sum(source["bytes"] for source in sources)

    def dropped(self, id: str) -> dict[str, int]:
        """Return rule → number of documents that a stage dropped by it."""
        dropped: dict[str, int] = self.json(id, "aux/counts.json").get("dropped", {})
        return dropped

    @cached_property
    def languages(self) -> dict[str, float]:
        """Language code → share of the documents, the largest first; without a language profile, the languages that the
        sources declare."""
        id = next((id for id in ("validate_clean", "validate") if self.json(id, "aux/profile.json")), "")
        shares: dict[str, float] = dict(self.json(id, "aux/profile.json").get("language", {})) if id else {}
        if not shares and self.chain:
            for source in self.sources(self.chain[-1]).values():
                shares[source["language"]] = shares.get(source["language"], 0) + source["documents"]
        total = sum(shares.values()) or 1
        return {code: shares[code] / total for code in sorted(shares, key=lambda code: -shares[code]) if code}

    @cached_property
    def facts(self) -> dict[str, dict[str, float]]:
        """Distribution → class → count, against which the next report shows its drift."""
        facts = {
            "documents dropped by rule": {
                f"{id}: {rule}": float(count) for id in self.chain for rule, count in self.dropped(id).items() if count
            },
            "documents left by stage": {id: float(self.totals(id)[0]) for id in self.chain},
        }
        for id, when in (("validate", "as read"), ("validate_clean", "at the end"), ("validate_shards", "in shards")):
            for name, counts in self.json(id, "aux/profile.json").items():
                facts[f"{name}, {when}"] = counts
        return {name: counts for name, counts in facts.items() if counts}
