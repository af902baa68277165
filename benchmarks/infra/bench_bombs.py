"""Peak memory of reading files that hold far more than their size on disk, each in a process of its own.

python -m benchmarks.infra.bench_bombs FOLDER    # of any checkout that is on PYTHONPATH
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import resource
import subprocess
import sys
from pathlib import Path

TEMPLATE = (
    "name: mine\nabout: Counts.\ntests:\n  - name: next\n    kind: minimum_functionality\n"
    "    prompt: \"{{ 'a'*3000000000 }}\"\n    right: ' a'\n    wrong: [' b']\n"
)
READERS = ("instructions", "preferences", "mirror", "template")


def write(folder: Path) -> None:
    """Write a line of 1 GB, 11 million rows, and a template of 3 GB, all of a few MB."""
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / "line.jsonl.gz", "wb", compresslevel=1) as file:
        file.write(b'{"prompt": "')
        for _ in range(1000):
            file.write(b"a" * 1_000_000)
        file.write(b'", "response": "b", "chosen": "a", "rejected": "b"}\n')
    with gzip.open(folder / "test.jsonl.gz", "wb") as file:
        for _ in range(1100):
            file.write(b'{"question": "q", "choices": ["a", "b"], "answer": 1}\n' * 10_000)
    (folder / "mine.yaml").write_text(TEMPLATE)


def read(reader: str, folder: Path) -> None:
    """Read one of the files as its stage does, and print the peak of memory with what came of it."""
    outcome = "read"
    resource.setrlimit(resource.RLIMIT_AS, (14_000_000_000,) * 2)
    try:
        if reader in ("instructions", "preferences"):
            import corpus.config
            from infra.run import Run

            config = getattr(corpus.config, f"{reader.title()}Config")
            stage = getattr(importlib.import_module(f"corpus.{reader}"), reader)
            (out := folder / f"out-{reader}").mkdir(exist_ok=True)
            source = {"kind": "files", "paths": [str(folder / "line.jsonl.gz")]}
            stage(config(read=[source]), {}, out, Run(folder / "work"))
        elif reader == "mirror":
            from evaluation.mirror.rows import read_rows

            read_rows(folder / "test.jsonl.gz")
        else:
            from evaluation.failures.templates import draw_cases, read_failure_class

            draw_cases(read_failure_class(folder / "mine.yaml"), 1, 17)
    except Exception as error:
        outcome = f"{type(error).__name__}: {str(error)[:100]}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    with contextlib.suppress(ImportError):
        from infra.io import templates

        templates.end()
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    print(f"{reader}: peak {peak:.2f} GB, of a child {child:.2f} GB; {outcome}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        read(sys.argv[2], Path(sys.argv[1]))
    else:
        write(Path(sys.argv[1]))
        for name in READERS:
            subprocess.run([sys.executable, __file__, sys.argv[1], name], check=True)
