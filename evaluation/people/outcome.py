"""Outcome of judgements: agreement of annotators, preferred models, and pairs and answers to train on."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from corpus.readers.encodings import whole_characters
from evaluation.people.agreement import krippendorff_alpha
from evaluation.people.judgements import Judgement, Judgements
from evaluation.people.pairs import PREFERENCES, TIES, Export
from evaluation.people.win_rates import Contest, strengths, win_rates
from evaluation.statistics.clustered import clustered_share, number_clusters

INSTRUCTIONS, JUDGED, ASIDE, SUMMARY = "instructions.jsonl", "judgements.jsonl", "quarantine.jsonl", "summary.json"
_WON = {"a": 1.0, "b": 0.0, "tie": 0.5, "neither": 0.5}


@dataclass(frozen=True)
class FeedbackOutcome:
    """preferences: {"prompt", "chosen", "rejected", "votes", "annotators"}, one for each pair where a majority prefers
    one answer. ties: the same for pairs with equal votes for both; kept separately, because readers that ignore the
    votes would take them for preferences. instructions: {"prompt", "response", "annotator"}, the corrected answers.
    judged: every judgement with its prompt's models. summary: figures, as in `stemma feedback import --json`."""

    preferences: list[dict[str, Any]]
    ties: list[dict[str, Any]]
    instructions: list[dict[str, Any]]
    judged: list[dict[str, Any]]
    aside: list[dict[str, Any]]
    summary: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write all files, each whole; those of an earlier import are replaced."""
        lines = {PREFERENCES: self.preferences, TIES: self.ties, INSTRUCTIONS: self.instructions}
        lines |= {JUDGED: self.judged, ASIDE: self.aside}
        replace_files(folder, lines, {SUMMARY: json.dumps(self.summary, indent=1) + "\n"})


def replace_files(folder: Path, lines: Mapping[str, Iterable[Any]], texts: Mapping[str, str]) -> None:
    """Write files of JSON lines and of text, each whole, in place of earlier ones."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {
        name: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in entries) for name, entries in lines.items()
    }
    for name, text in {**rows, **texts}.items():
        unfinished = folder / f".{name}.unfinished"
        # A row that is set aside may hold half of a surrogate pair, which JSON can escape.
        unfinished.write_text(whole_characters(text), encoding="utf8")
        os.replace(unfinished, folder / name)


def outcome(export: Export, found: Judgements) -> FeedbackOutcome:
    """Aggregate the judgements."""
    by_pair: dict[str, list[Judgement]] = {}
    for judgement in found.used:
        by_pair.setdefault(judgement.item, []).append(judgement)
    rows = [row for pair, judgements in by_pair.items() if (row := _preference(export, pair, judgements))]
    ties = [row for row in rows if row["votes"][0] == row["votes"][1]]
    preferences = [row for row in rows if row not in ties]
    contests = [
        Contest(
            *export.given_by[pair],
            sum(_WON[judgement.choice] for judgement in judgements) / len(judgements),
            export.pairs[pair].prompt,
        )
        for pair, judgements in by_pair.items()
    ]
    decided = [judgement for judgement in found.used if judgement.choice in ("a", "b")]
    # Judgements of one annotator share a habit.
    annotators = number_clusters(judgement.annotator for judgement in decided)
    left_share = clustered_share([judgement.choice == judgement.left for judgement in decided], annotators)
    alpha = krippendorff_alpha([[judgement.choice for judgement in judgements] for judgements in by_pair.values()])
    summary = {
        "export": export.id,
        "pairs": len(export.pairs),
        "judged_pairs": len(by_pair),
        "judgements": len(found.used),
        "quarantined": len(found.aside),
        "skipped": found.skipped,
        "choices": dict(Counter(judgement.choice for judgement in found.used)),
        "annotators": {name: len(rows) for name, rows in _by_annotator(found.used).items()},
        "agreement": alpha.as_json() if alpha else None,
        "left_preferred": left_share.as_json() if decided else None,
        "win_rates": [
            {"model": first, "over": second, **interval.as_json(), "pairs": count}
            for (first, second), (interval, count) in win_rates(contests).items()
        ],
        "strengths": [{"model": name, **strength.as_json(1)} for name, strength in strengths(contests).items()],
        "preferences": len(preferences),
        "ties": len(ties),
        "corrections": sum(bool(judgement.correction) for judgement in found.used),
        "models": dict(export.models),
    }
    return FeedbackOutcome(
        preferences,
        ties,
        [
            {
                "prompt": export.pairs[judgement.item].prompt,
                "response": judgement.correction,
                "annotator": judgement.annotator,
            }
            for judgement in found.used
            if judgement.correction
        ],
        [
            {
                "pair": (fields := asdict(judgement)).pop("item"),
                **fields,
                "models": list(export.given_by[judgement.item]),
            }
            for judgement in found.used
        ],
        [asdict(entry) for entry in found.aside],
        summary,
    )


def _preference(export: Export, id: str, judgements: Iterable[Judgement]) -> dict[str, Any] | None:
    """Return the pair with the majority's answer as the chosen one, either answer if the votes are equal; None if no
    judgement votes for an answer, or if an answer is empty. A judgement that both are equally good gives half a vote to
    each; a judgement that neither can be used gives none."""
    judgements = list(judgements)
    counts = Counter(judgement.choice for judgement in judgements)
    votes = {choice: counts[choice] + counts["tie"] / 2 for choice in ("a", "b")}
    pair = export.pairs[id]
    if not any(votes.values()) or not pair.a.strip() or not pair.b.strip():
        return None
    chosen, rejected = ("a", "b") if votes["a"] >= votes["b"] else ("b", "a")
    text = {"a": pair.a, "b": pair.b}
    return {
        "prompt": pair.prompt,
        "chosen": text[chosen],
        "rejected": text[rejected],
        "votes": [votes[chosen], votes[rejected]],
        "annotators": sorted(judgement.annotator for judgement in judgements),
    }


def _by_annotator(used: Iterable[Judgement]) -> dict[str, list[Judgement]]:
    judgements: dict[str, list[Judgement]] = {}
    for judgement in used:
        judgements.setdefault(judgement.annotator, []).append(judgement)
    return judgements
