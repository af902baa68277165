"""Speed and memory of finding and cutting repeated passages, on real text.

    python benchmarks/corpus/bench_substrings.py [--mb 60] [--dictionary-mb 2]

Processor time of one worker, from the documents of ../shared/data in Parquet to the selection without repeats, pass by
pass. For comparison, a dictionary of all windows, the plainest exact way, on less text, since it holds them in memory.
--mb above the 60 MB that there are: the texts again, a third of the words of each replaced.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.corpus.bench_memory import perturbed
from benchmarks.corpus.planted import real_texts
from corpus.dedupe.config import Substrings
from corpus.dedupe.substrings import cut_substrings
from corpus.documents.parts import DocumentWriter, document_parts, make_document
from infra.launch.config import LaunchConfig
from infra.run import Run


def write(folder: Path, texts: Sequence[str], total_bytes: int) -> int:
    size = 0
    more = perturbed(list(texts), max(0, total_bytes - sum(len(text.encode()) for text in texts)))
    with DocumentWriter(folder / "documents") as writer:
        for text in itertools.chain(texts, more):
            if size >= total_bytes:
                break
            writer.write(make_document(text, "shared/data"))
            size += len(text.encode())
    return size


def windows_in_a_dictionary(texts: Sequence[str], window: int) -> int:
    """Return the number of windows that occurred before, in another text or without overlap."""
    first: dict[bytes, int] = {}
    offset = repeated = 0
    for text in texts:
        data = text.encode()
        for start in range(len(data) - window + 1):
            repeated += first.setdefault(data[start : start + window], offset + start) + window <= offset + start
        offset += len(data)
    return repeated


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mb", type=float, default=60)
    parser.add_argument("--dictionary-mb", type=float, default=2)
    options = parser.parse_args()
    texts = real_texts()
    with tempfile.TemporaryDirectory(prefix="corpus-substrings-") as name:
        folder = Path(name)
        write(folder / "few", texts[:50], 1_000_000)
        run = Run(folder / "work-few", LaunchConfig(workers=1))
        cut_substrings(Substrings(), True, 17, document_parts(folder / "few"), run)  # compiles
        size = write(folder / "all", texts, int(options.mb * 1e6))
        run = Run(folder / "work", LaunchConfig(workers=1))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        started = time.process_time(), time.perf_counter()
        report = cut_substrings(Substrings(), True, 17, document_parts(folder / "all"), run).report
        core, wall = time.process_time() - started[0], time.perf_counter() - started[1]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        disk = sum(path.stat().st_size for path in run.work_dir.rglob("*") if path.is_file())
    print(f"{size / 1e6:,.1f} MB: {size / 1e6 / core:.2f} MB/s a core ({wall:.1f} s)")
    print(f"{report['passages']:,} passages, {report['bytes_cut'] / 1e6:.2f} MB cut, {report['dropped']:,} dropped")
    print(f"peak {peak:,.0f} MB, {before:,.0f} MB before; {disk / size:.2f} bytes of disk per byte of text")
    sizes = itertools.accumulate(len(text.encode()) for text in texts)
    chosen = [text for text, end in zip(texts, sizes, strict=True) if end < options.dictionary_mb * 1e6]
    started_at = time.process_time()
    repeated = windows_in_a_dictionary(chosen, Substrings().min_bytes)
    core = time.process_time() - started_at
    size = sum(len(text.encode()) for text in chosen)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    speed = f"{size / 1e6:,.1f} MB: {size / 1e6 / core:.2f} MB/s"
    print(f"dictionary of windows: {speed}, {repeated:,} repeats; peak {peak:,.0f} MB")


if __name__ == "__main__":
    main()
