"""How fast files are hashed for the store, against one thread of hashlib and against reading alone.

python benchmarks/infra/bench_hashing.py [--gigabytes 1]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from infra.io.hashing import HashBook


def rate(what: str, work: Callable[[], object], size: int) -> float:
    begun = time.perf_counter()
    work()
    found = size / (time.perf_counter() - begun) / 1e6
    print(f"  {what:<34} {found:8.0f} MB/s")
    return found


def read(paths: list[Path]) -> None:
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 22):
                pass


def one_thread(paths: list[Path]) -> None:
    for path in paths:
        with open(path, "rb") as file:
            hashlib.file_digest(file, "sha256").hexdigest()


def main(gigabytes: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.bin" for number in range(16)]
        each = int(gigabytes * 1e9 / len(paths))
        block = os.urandom(1 << 20)
        for path in paths:
            with open(path, "wb") as file:
                for _ in range(each >> 20):
                    file.write(block)
        size = sum(path.stat().st_size for path in paths)
        book = HashBook(Path(folder) / "hashes.sqlite")
        print(f"{size / 1e9:.2f} GB in {len(paths)} files, from the page cache, {os.cpu_count()} cores")
        rate("reading alone", lambda: read(paths), size)
        alone = rate("hashlib, one thread", lambda: one_thread(paths), size)
        ours = rate("hash book, first time", lambda: book.sha256(paths), size)
        rate("hash book, files unchanged", lambda: book.sha256(paths), size)
        print(f"  hash book / one thread: {ours / alone:.2f} (limit: {os.cpu_count()} cores)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    main(parser.parse_args().gigabytes)
