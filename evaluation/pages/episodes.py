"""Transcripts of episodes in an environment: those of the model before and after, side by side, with filters.

The lines are those of aux/episodes.jsonl (`training.rl.environments.heldout`). The page needs no script: a filter is a
radio button, whose style hides the other episodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from evaluation.pages.parts import TEMPLATES
from evaluation.pages.words import fixed
from infra.pages import style

_SIDES = {"sft": "before", "rlhf": "after"}
_FILTERS = {
    "all": "all",
    "better": "more reward after",
    "worse": "less reward after",
    "rewarded-before": "rewarded before",
    "rewarded-after": "rewarded after",
    "unrewarded-after": "no reward after",
    "rejected": "rewarded after, but rejected",
    "failed": "with failures of the environment",
}
Line = Mapping[str, Any]


def episodes_page(lines: Sequence[Line], title: str) -> str:
    """Return the page of these episodes; everything in it that models or environments wrote is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    shown = [{**as_sample(line, _SIDES), "classes": classes(line)} for line in lines]
    filters = [
        {"name": name, "label": label, "count": sum(name in ("all", *row["classes"]) for row in shown)}
        for name, label in _FILTERS.items()
    ]
    lead = (
        f"{len(lines):,} held-out tasks, not selected, each with one episode of the model before and one of the model "
        "after. An episode is rejected where the environment's second rule, the rule of its prompt or the judge finds "
        "it wrong: its reward then points to a gap in the environment."
    )
    page = environment.get_template("episodes.html.j2").render(
        title=title, lead=lead, filters=filters, episodes=shown, css=Markup(style())
    )
    return page + "\n"


def classes(line: Line) -> list[str]:
    """Return the filters under which a line is shown."""
    before, after = (line["episodes"][side] for side in _SIDES)
    holds = {
        "better": after["reward"] > before["reward"],
        "worse": after["reward"] < before["reward"],
        "rewarded-before": before["reward"] > 0,
        "rewarded-after": after["reward"] > 0,
        "unrewarded-after": after["reward"] <= 0,
        "rejected": is_rejected(after),
        "failed": bool(before["failures"] or after["failures"]),
    }
    return [name for name, is_so in holds.items() if is_so]


def is_rejected(episode: Line) -> bool:
    """Return True for a rewarded episode that a second rule or the judge rejects."""
    return episode["reward"] > 0 and bool(episode["rejected_by"])


def as_sample(line: Line, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return a line in the form of the report's answers side by side.

    Args:
        labels: of the sides, by their names in figures.
    """
    answers = [
        {
            "model": side,
            "label": label,
            "text": transcript(episode["messages"]),
            "score": f"reward {fixed(float(episode['reward']))}, {turns(episode['turns'])}, {episode['ended']}",
            "mark": f"✗ rejected by: {', '.join(episode['rejected_by'])}" if is_rejected(episode) else "",
        }
        for side, label in labels.items()
        for episode in [line["episodes"][side]]
    ]
    return {"prompt": line["prompt"], "reference": line.get("reference", ""), "answers": answers}


def turns(count: int) -> str:
    return f"{count} turn{'s' * (count != 1)}"


def transcript(messages: Sequence[Line]) -> str:
    """Return the messages of an episode after its opening, as text."""
    start = next((number for number, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    lines = []
    for message in messages[start:]:
        name = "policy" if message["role"] == "assistant" else message["role"]
        if message["content"] or not message.get("tool_calls"):
            lines.append(f"{name}: {message['content']}")
        for call in message.get("tool_calls", ()):
            arguments = call["arguments"] if isinstance(call["arguments"], str) else json.dumps(call["arguments"])
            lines.append(f"{name} calls {call['name']}({arguments})")
    return "\n".join(lines)
