"""Seconds that hiding secrets takes for a megabyte: source code and guides, a log of tests, and one line of JSON.

python benchmarks/infra/bench_hiding.py [LOG]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from infra.project import PROJECT
from infra.secrets import Hider

MEGABYTE = 1_000_000


def main() -> None:
    files = [*sorted((PROJECT / "infra").rglob("*.py")), *sorted((PROJECT / "docs").rglob("*.md"))]
    prose = "".join(path.read_text(encoding="utf8") for path in files)[:MEGABYTE]
    texts = {"code and guides": prose, "one line of JSON": json.dumps({"text": prose})[:MEGABYTE]}
    if len(sys.argv) > 1:
        log = Path(sys.argv[1]).read_text(encoding="utf8", errors="replace")
        texts["a log"] = (log * (1 + MEGABYTE // len(log)))[:MEGABYTE]
    hider = Hider({"A_TOKEN": "hunter-22-correct"})
    for name, text in texts.items():
        seconds = []
        for _ in range(5):
            begun = time.process_time()
            hider.hide(text)
            seconds.append(time.process_time() - begun)
        print(f"{name}: {min(seconds):.2f} s of processor time a megabyte, {len(text.splitlines()):,} lines")


if __name__ == "__main__":
    main()
