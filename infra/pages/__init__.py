"""The one style sheet of all pages: reports, validations, judging, plans, comparisons, chat."""

from __future__ import annotations

from pathlib import Path

STYLE_SHEET = Path(__file__).parent / "style.css"


def style() -> str:
    """Return the style sheet, for a page that loads no other file."""
    return STYLE_SHEET.read_text(encoding="utf-8")
