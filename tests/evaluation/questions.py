"""Questions that tests put into a mirror."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ARC = [
    {"query": f"Question: What is {n} plus one?", "choices": [str(n + 1), str(n + 2), "none", "a door"], "gold": n % 4}
    for n in range(24)
]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
