"""Two or more runs or models over each other: which is better and how sure, figures, settings, curves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from evaluation.pages.comparison import comparison_sections, conclusion
from flows.compare.compare import compare
from flows.compare.compared import find as find_compared
from flows.dashboard.reading import address_of, find
from infra.errors import ConfigError, Problem
from infra.store.store import Store

_RUN = re.compile(r"\d{8}-\d{6}-[0-9a-f-]+")
MOST = 6


def compare_page(store: Store, texts: Sequence[str]) -> dict[str, Any]:
    """Return the values of the page of a comparison. Raises ConfigError for what cannot be compared."""
    if not 2 <= len(texts) <= MOST:
        raise ConfigError(Problem("bad_comparison", "compare", f"2 to {MOST} runs or models were expected: ?a=…&b=…"))
    sides = [text if _RUN.fullmatch(text) else address_of(*find(store, text)) for text in texts]
    compared = find_compared(store, sides)
    document = compare(compared)
    names = [_short(side.name) for side in compared]
    names = names if len(set(names)) == len(set(sides)) else [side.name for side in compared]
    built = [{name: step.artifact for name, step in side.steps.items() if step.artifact} for side in compared]
    pages = [f"/{'run' if side.kind == 'run' else 'model'}/{side.name}" for side in compared]
    return {
        "conclusions": [conclusion(document, index, names) for index in range(1, len(names))],
        "sides": list(zip(names, pages, [side.summary for side in compared], strict=True)),
        "warnings": [f"{warning['path']}: {warning['message']}" for warning in document["warnings"]],
        "sections": [section for section in comparison_sections(document, names, built) if section],
    }


def _short(name: str) -> str:
    """Return a run's id without its random end, an artifact's address with the first digits of its fingerprint."""
    return name[:15] if _RUN.fullmatch(name) else name[: name.find("/") + 9]
