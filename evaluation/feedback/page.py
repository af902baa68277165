"""The page on which people judge pairs: one file, offline, by keyboard, blind."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict

from markupsafe import Markup

from evaluation.feedback.pairs import Export
from evaluation.page.parts import TEMPLATES


def judging_page(export: Export, title: str) -> str:
    """Holds the pairs and nothing of the models. What is judged stays in the browser until it is saved as a file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    script = (TEMPLATES / "judge.js").read_text(encoding="utf8")
    data = {"export": export.id, "pairs": [asdict(pair) for pair in export.pairs.values()]}
    page = environment.get_template("judge.html.j2").render(
        title=title,
        # Inside a script element only this could end it.
        data=Markup(json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")),
        script=Markup(script),
        script_hash=Markup(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
    )
    return page + "\n"
