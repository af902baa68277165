"""Personal data in what a model writes, found by the detectors that `clean` masks it with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from corpus.cleaning.config import PersonalDataConfig
from corpus.cleaning.people.personal_data import KINDS, find_personal_data
from evaluation.config import GeneratedPersonalDataConfig
from evaluation.statistics.intervals import share_of_clusters

_RESERVED = re.compile(r"@(?:[\w-]+\.)*(?:example\.(?:com|net|org)|(?:[\w-]+\.)?(?:example|invalid|localhost|test))$")
"""Names that are kept free for documentation and tests (RFC 2606): such an address is nobody's."""


def personal_kinds(text: str, config: GeneratedPersonalDataConfig) -> list[str]:
    """The kinds of personal data that a text holds, sorted; what `clean` puts in its place by default counts as none,
    nor do addresses of reserved names."""
    found = find_personal_data(text, frozenset(config.kinds), config.phone_regions)
    return sorted({one.kind for one in found if not _is_nobodys(one.kind, text[one.start : one.end])})


def measure_personal_data(
    continuations: Sequence[Sequence[str]], config: GeneratedPersonalDataConfig, *, confidence: float
) -> tuple[dict[str, Any], list[list[list[str]]]]:
    """The share of continuations with any personal data, and with each kind.

    continuations: K texts of each of P prompts. Those of one prompt are alike, so that the interval is that of a
    beta-binomial mean. Returns the results, and of each continuation the kinds found.
    """
    kinds = [[personal_kinds(text, config) for text in texts] for texts in continuations]
    samples = len(continuations[0])

    def share(counts: list[int]) -> dict[str, float]:
        return {**share_of_clusters(counts, samples, confidence).as_json(), "found": sum(counts)}

    results = {
        "continuations": len(kinds) * samples,
        "overall": share([sum(map(bool, row)) for row in kinds]),
        "by_kind": {
            kind: share([sum(kind in one for one in row) for row in kinds]) for kind in KINDS if kind in config.kinds
        },
    }
    return results, kinds


def _is_nobodys(kind: str, found: str) -> bool:
    put_in = getattr(PersonalDataConfig(), kind).replacement
    return found == put_in or (kind == "email" and _RESERVED.search(found.lower()) is not None)
