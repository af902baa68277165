"""The page on which people judge pairs of answers or mark documents: one file, offline, by keyboard."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from markupsafe import Markup

from evaluation.pages.parts import TEMPLATES
from evaluation.people.pairs import Export
from infra.pages import style

PAIR_CHOICES = {"tie": "as good as each other", "neither": "neither can be used"}
"""Choices in addition to the two answers themselves."""

INSTRUCTIONS = {
    "pair": "Read the prompt, then both answers, and choose the one that you would rather get: first that it is right "
    "and does what was asked, then that it is clear, then that it is short. Length alone is no merit. If both are as "
    "good, choose that; if neither is of any use, choose that. The page does not show which model wrote which answer.",
    "document": "Read the text and choose the label that fits it best. Judge the text itself, not its subject.",
}
"""Instruction for the person who judges, by kind of item."""


def judging_page(export: Export, title: str) -> str:
    """Return the page with the pairs and nothing about the models."""
    return render_judging(title, export.id, [asdict(pair) for pair in export.pairs.values()], "pair", PAIR_CHOICES)


def render_judging(
    title: str, export: str, items: Sequence[Mapping[str, Any]], kind: str, choices: Mapping[str, str]
) -> str:
    """Return the page; judgements stay in the browser until they are saved as a file.

    items: with `id` and `prompt`, the text that is shown; those of kind `pair` also have answers `a` and `b`, which are
    choices themselves. kind: the key of the item in a saved row. choices: by value, the words on their buttons.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    script = (TEMPLATES / "judge.js").read_text(encoding="utf8")
    data = {"export": export, "kind": kind, "items": items}
    page = environment.get_template("judge.html.j2").render(
        title=title,
        css=Markup(style()),
        instruction=INSTRUCTIONS.get(kind, INSTRUCTIONS["document"]),
        kind=kind,
        choices=choices,
        # Inside a script element only this could end it.
        data=Markup(json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")),
        script=Markup(script),
        script_hash=Markup(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
    )
    return page + "\n"
