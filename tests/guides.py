"""The commands in our own pages."""

from __future__ import annotations

import re


def bash_lines(text: str) -> list[str]:
    """The commands in a page's `bash` blocks, each with its comment; `console` blocks are for other machines."""
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]
