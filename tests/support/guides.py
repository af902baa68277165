"""The commands in our own pages."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"


def guides() -> list[Path]:
    """The pages of docs/ that are written by hand."""
    made = (DOCS / "_build", DOCS / "reference" / "generated")
    return [path for path in sorted(DOCS.rglob("*.md")) if not any(path.is_relative_to(folder) for folder in made)]


def bash_lines(text: str) -> list[str]:
    """The commands in a page's `bash` blocks, each with its comment; `console` blocks are for other machines."""
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def stage_package() -> dict[str, str]:
    """The files of the package in docs/stages.md, by their paths, and an empty `__init__.py`."""
    page = (REPOSITORY / "docs" / "stages.md").read_text(encoding="utf8")
    part = page.partition("<!-- package:begin -->")[2].partition("<!-- package:end -->")[0]
    files = dict(re.findall(r"\*\*([\w/.]+)\*\*[^\n]*\n\n```\w+\n(.*?)```", part, flags=re.DOTALL))
    assert len(files) == 3, sorted(files)
    return {**files, "longest_documents/__init__.py": ""}
