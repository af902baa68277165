"""Tiny pipelines for tests: real text, real stages, as little of each as still works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SENTENCES = (
    "The quiet river of the north bends twice before it reaches the old mill and the fields that belong to it.",
    "A careful reader will have noticed that the second letter was written with another pen, and in haste.",
    "They kept the records of the parish in a chest with three locks, and each of the keys had its own keeper.",
    "When the lamp went out, nobody in the room could say with certainty which of the two had spoken first.",
    "It is one thing to copy a text, and another to understand what the copyist of the text had in mind.",
)


def data_config(folder: Path, documents: int = 60) -> dict[str, Any]:
    """Text from one JSON Lines file to a tokenizer; writes the file if it is not there.

    Its first document is too short to survive cleaning.
    """
    source = folder / "text.jsonl"
    if not source.exists():
        lines = ['{"text": "Too short to keep."}']
        for number in range(documents):
            body = " ".join(SENTENCES[(number + turn) % len(SENTENCES)] for turn in range(4))
            lines.append(f'{{"text": "Chapter {number} of the chronicle. {body}"}}')
        source.write_text("\n".join(lines) + "\n", encoding="utf8")
    return {
        "name": "chronicle",
        "ingest": {"read": [{"kind": "files", "paths": [str(source)]}]},
        "validate": {"documents": {"min_language_like_share": 0.5}},
        "clean": {},
        "tokenizer": {"vocab_size": 400},
    }
