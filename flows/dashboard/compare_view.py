"""Two or more runs or models over each other: which is better and how sure, figures, settings, curves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from evaluation.pages.comparison import compared_curves, comparison_sections, conclusion
from evaluation.results.artifacts import Artifact
from flows.compare.compare import compare
from flows.compare.compared import Compared
from flows.compare.compared import find as find_compared
from flows.dashboard.reading import address_of, find
from infra.errors import ConfigError, Problem
from infra.store.store import Store

_RUN = re.compile(r"\d{8}-\d{6}-[0-9a-f-]+")
MOST = 6


def compare_page(store: Store, texts: Sequence[str]) -> dict[str, Any]:
    """Return the values of the page of a comparison. Raises ConfigError for what cannot be compared."""
    compared, names, built = _sides(store, texts)
    document = compare(compared)
    pages = [f"/{'run' if side.kind == 'run' else 'model'}/{side.name}" for side in compared]
    return {
        "conclusions": [conclusion(document, index, names) for index in range(1, len(names))],
        "sides": list(zip(names, pages, [side.summary for side in compared], strict=True)),
        "warnings": [f"{warning['path']}: {warning['message']}" for warning in document["warnings"]],
        # The warnings are at the head of the page.
        "sections": [section for section in comparison_sections({**document, "warnings": []}, names, built) if section],
    }


def compared_chart(store: Store, texts: Sequence[str], title: str, batches: tuple[float, float]) -> Markup | None:
    """Return one chart of a comparison between two batches; None if it has none of that title. Raises ConfigError."""
    compared, names, built = _sides(store, texts)
    figures = compared_curves(compare(compared), names, built, batches)
    return next((figure.svg for figure in figures if figure.title == title), None)


def _sides(store: Store, texts: Sequence[str]) -> tuple[list[Compared], list[str], list[dict[str, Artifact]]]:
    """Return what is compared, short names, and the finished steps of each."""
    if not 2 <= len(texts) <= MOST:
        raise ConfigError(Problem("bad_comparison", "compare", f"expected 2 to {MOST} runs or models: ?a=…&b=…"))
    sides = [text if _RUN.fullmatch(text) else address_of(*find(store, text)) for text in texts]
    compared = find_compared(store, sides)
    names = [_short(side.name) for side in compared]
    names = names if len(set(names)) == len(set(sides)) else [side.name for side in compared]
    return (
        compared,
        names,
        [{name: step.artifact for name, step in side.steps.items() if step.artifact} for side in compared],
    )


def _short(name: str) -> str:
    """Return a run's id without its random end, an artifact's address with the first digits of its fingerprint."""
    return name[:15] if _RUN.fullmatch(name) else name[: name.find("/") + 9]
