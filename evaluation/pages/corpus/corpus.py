"""The artifacts of a corpus chain, read for its report."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from evaluation.results.artifacts import Artifact, read_artifacts

CHAIN = ("ingest", "clean", "dedupe", "classify", "generate", "decontaminate", "mix")
WORDS = {
    "ingest": "read",
    "clean": "after cleaning",
    "dedupe": "without duplicates",
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
        found = self.artifacts.get(id)
        return (found.read_json(name) if found else None) or {}

    @cached_property
    def chain(self) -> list[str]:
        """Stages that produce documents, in order."""
        return [id for id in CHAIN if id in self.artifacts]

    def sources(self, id: str) -> dict[str, dict[str, Any]]:
        """Return the records of each source in a stage's artifact: licence, language, weight, documents, bytes."""
        found: dict[str, dict[str, Any]] = self.json(id, "sources.json")
        return found

    def totals(self, id: str) -> tuple[int, int]:
        """Return the documents and bytes of text that a stage leaves."""
        sources = self.sources(id).values()
        return sum(one["documents"] for one in sources), sum(one["bytes"] for one in sources)

    def dropped(self, id: str) -> dict[str, int]:
        """Return rule → number of documents that a stage dropped by it."""
        found: dict[str, int] = self.json(id, "aux/counts.json").get("dropped", {})
        return found

    @cached_property
    def languages(self) -> dict[str, float]:
        """Language code → share of the documents, the largest first; without a language profile, the languages that the
        sources declare."""
        id = next((id for id in ("validate_clean", "validate") if self.json(id, "aux/profile.json")), "")
        found: dict[str, float] = dict(self.json(id, "aux/profile.json").get("language", {})) if id else {}
        if not found and self.chain:
            for one in self.sources(self.chain[-1]).values():
                found[one["language"]] = found.get(one["language"], 0) + one["documents"]
        total = sum(found.values()) or 1
        return {code: found[code] / total for code in sorted(found, key=lambda code: -found[code]) if code}

    @cached_property
    def facts(self) -> dict[str, dict[str, float]]:
        """Distribution → class → count, against which the next report shows its drift."""
        found = {
            "documents dropped by rule": {
                f"{id}: {rule}": float(count) for id in self.chain for rule, count in self.dropped(id).items() if count
            },
            "documents left by stage": {id: float(self.totals(id)[0]) for id in self.chain},
        }
        for id, when in (("validate", "as read"), ("validate_clean", "at the end"), ("validate_shards", "in shards")):
            for name, counts in self.json(id, "aux/profile.json").items():
                found[f"{name}, {when}"] = counts
        return {name: counts for name, counts in found.items() if counts}
