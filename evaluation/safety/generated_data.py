"""Personal data in a model's output, found by the detectors with which `clean` masks it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from corpus.cleaning.config import PersonalDataConfig
from corpus.cleaning.people.personal_data import KINDS, find_personal_data
from evaluation.config import GeneratedPersonalDataConfig
from evaluation.statistics.intervals import share_of_clusters

_RESERVED = re.compile(r"@(?:[\w-]+\.)*(?:example\.(?:com|net|org)|(?:[\w-]+\.)?(?:example|invalid|localhost|test))$")
"""Domain names reserved for documentation and tests (RFC 2606): such an address belongs to no one."""


def personal_kinds(text: str, config: GeneratedPersonalDataConfig) -> list[str]:
    """Return the kinds of personal data in a text, sorted; default replacements of `clean` and addresses with reserved
    names do not count."""
    matches = find_personal_data(text, frozenset(config.kinds), config.phone_regions)
    return sorted({match.kind for match in matches if not _is_placeholder(match.kind, text[match.start : match.end])})


def measure_personal_data(
    continuations: Sequence[Sequence[str]], config: GeneratedPersonalDataConfig, *, confidence: float
) -> tuple[dict[str, Any], list[list[list[str]]]]:
    """Measure the share of continuations with any personal data, and with each kind.

    Continuations of one prompt are similar, so the interval is that of a beta-binomial mean. Returns the results, and
    the kinds found in each continuation.

    Args:
        continuations: K texts of each of P prompts.
    """
    kinds = [[personal_kinds(text, config) for text in texts] for texts in continuations]
    samples = len(continuations[0])

    def share(counts: list[int]) -> dict[str, float]:
        return {**share_of_clusters(counts, samples, confidence).as_json(), "found": sum(counts)}

    results = {
        "continuations": len(kinds) * samples,
        "overall": share([sum(map(bool, row)) for row in kinds]),
        "by_kind": {
            kind: share([sum(kind in found_kinds for found_kinds in row) for row in kinds])
            for kind in KINDS
            if kind in config.kinds
        },
    }
    return results, kinds


def _is_placeholder(kind: str, text: str) -> bool:
    replacement = getattr(PersonalDataConfig(), kind).replacement
    return text == replacement or (kind == "email" and _RESERVED.search(text.lower()) is not None)
