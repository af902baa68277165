"""English chunks that split otherwise than by punctuation: contractions, abbreviations, emoticons."""

from __future__ import annotations

from pathlib import Path

_FILE = Path(__file__).parent / "data" / "english_exceptions.txt"


def english_exceptions() -> dict[str, tuple[str, ...]]:
    """Chunk → its words. They are those of spaCy's English tokenizer; a test holds them to it."""
    lines = [line.split("\t") for line in _FILE.read_text(encoding="utf8").splitlines() if not line.startswith("#")]
    exceptions: dict[str, tuple[str, ...]] = {}
    for kind, *fields in lines:
        if kind == "contraction":
            exceptions |= _contractions(*map(str.split, fields))
    for kind, *fields in lines:
        for item in fields[0].split():
            if kind == "ordinary":
                exceptions.pop(item, None)
            elif kind == "split":
                exceptions[item.replace("|", "")] = tuple(item.split("|"))
            elif kind == "whole":
                exceptions[item] = (item,)
    for hour in range(1, 13):
        for half in ("am", "a.m.", "pm", "p.m."):
            exceptions[f"{hour}{half}"] = (str(hour), half)
    curly = {chunk.replace("'", "’"): tuple(w.replace("'", "’") for w in words) for chunk, words in exceptions.items()}
    return exceptions | curly


def _contractions(stems: list[str], endings: list[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for stem in (*stems, *map(str.title, stems)):
        for ending in endings:
            words = (stem, *ending.split("|"))
            bare = tuple(word.replace("'", "") for word in words)
            found |= {"".join(words): words, "".join(bare): bare}
    return found
