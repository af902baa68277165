"""A long life: a tiny pipeline again and again under `stemma up`, and whether anything grows.

python -m benchmarks.infra.soak OUT [--minutes 120] [--every 60] [--faked]

Starts the servers of a new store, runs a pipeline of two steps through the worker at fixed intervals, and records after
each run the memory, open files and threads of every service, and the sizes of databases, logs and folders. Runs are
forgotten after `--keep` newer ones, and the hourly housekeeping is due after every tenth run. Writes OUT/soak.json, and
prints a table: the medians of the second and of the last quarter of the time, and their difference per 100 runs. A
second call with the same OUT prints the table again.

With --faked the clock that servers and runs see jumps ahead to the next run, by the layer that the drill puts between
processes and their clock, so that days pass in the time that their runs take
(`--minutes 4320 --every 900 --faked`: three days).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import yaml

from flows.drill.layer import FaultLayer
from infra.servers.state import recorded

PROJECT = Path(__file__).resolve().parents[2]
STEMMA = [sys.executable, "-m", "cli.main"]
HOUSEKEEPING_EVERY = 10
"""Runs, in place of an hour."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds from the start of a run to the next")
    parser.add_argument("--keep", type=int, default=20, help="runs that are kept besides those that are needed")
    parser.add_argument("--keep-days", type=int, default=30, help="days after which a run is forgotten")
    parser.add_argument("--faked", action="store_true", help="the clock jumps to the next run")
    options = parser.parse_args()
    record = options.out / "soak.json"
    if not record.exists():
        options.out.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, float]] = []
        kept = ["--keep-runs", str(options.keep), "--keep-days", str(options.keep_days)]
        for row in soak(options.out, options.minutes * 60, options.every, kept, is_faked=options.faked):
            # After each run: a soak that is broken off has its rows.
            rows.append(row)
            record.write_text(json.dumps(rows, indent=1))
    print(table(json.loads(record.read_text())))


class Clock:
    """The time that servers and runs see."""

    def __init__(self, layer: FaultLayer | None) -> None:
        self._layer, self._ahead_s = layer, 0.0

    def now(self) -> float:
        return time.monotonic() + self._ahead_s

    def wait_until(self, moment: float) -> None:
        wait_s = max(0.0, moment - self.now())
        if self._layer is None:
            time.sleep(wait_s)
        else:
            self._ahead_s += int(wait_s)
            self._layer.order(clock_s=int(self._ahead_s))


def soak(
    out: Path, seconds: float, every_s: float, kept: list[str], *, is_faked: bool = False
) -> Iterator[dict[str, float]]:
    """Run the pipeline until the time is over; yield a row of sizes after each run. kept: options of `stemma up`."""
    root, config = out / "store", out / "config.yaml"
    (out / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"Document {number} of a few words."}) + "\n" for number in range(50))
    )
    sections = {
        "name": "soak",
        "ingest": {"read": [{"kind": "files", "paths": ["text.jsonl"]}]},
        "clean": {"gopher_quality": None, "gopher_repetition": None},
    }
    config.write_text(yaml.safe_dump(sections))
    layer = FaultLayer(out / "layer", root) if is_faked else None
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), **(layer.variables if layer else {})}
    clock = Clock(layer)

    def stemma(*words: str) -> None:
        command = [*STEMMA, *words, "--root", str(root)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: {done.stderr[-3000:]}")

    stemma("up", *kept)
    try:
        began = clock.now()
        for run in itertools.count():
            start = clock.now()
            if start - began >= seconds:
                break
            # Every tenth run has something to build, as a pipeline whose data grows.
            stemma("run", str(config), "--set", f"clean.min_characters={1 + run // 10}")
            if run % HOUSEKEEPING_EVERY == HOUSEKEEPING_EVERY - 1:
                stemma("gc", "--yes")
                (root / ".state" / "tidied").unlink(missing_ok=True)
            yield {"seconds": clock.now() - began, "run, s": clock.now() - start, **sizes(root)}
            clock.wait_until(start + every_s)
    finally:
        stemma("down")


def sizes(root: Path) -> dict[str, float]:
    """Return memory in MB, files and threads of each service, and MB on the disk."""
    row: dict[str, float] = {}
    for name, service in recorded(root).items():
        family = psutil.Process(service.pid)
        processes = [family, *family.children(recursive=True)]
        row[f"{name}, MB"] = sum(process.memory_info().rss for process in processes) / 1e6
        row[f"{name}, files"] = sum(process.num_fds() for process in processes)
        row[f"{name}, threads"] = sum(process.num_threads() for process in processes)
    for title, folder in {
        "prefect": "servers/prefect",
        "mlflow": "mlflow",
        "lineage": "lineage",
        "runs": "runs",
    }.items():
        row[f"{title} on disk, MB"] = _bytes(root / folder) / 1e6
    row["logs, MB"] = sum(path.stat().st_size for path in root.glob("*/*.log*")) / 1e6
    row["runs, folders"] = len(list((root / "runs").iterdir()))
    row["store, MB"] = _bytes(root) / 1e6
    row["shared memory, files"] = len(list(Path("/dev/shm").iterdir()))
    return row


def _bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size
        except FileNotFoundError:  # a temporary file
            continue
    return total


def table(rows: list[dict[str, float]]) -> str:
    """Return the medians of the second and the last quarter of the runs, and their difference per 100 runs."""
    quarter = max(1, len(rows) // 4)
    lines = [f"{len(rows)} runs in {rows[-1]['seconds'] / 60:.0f} minutes", ""]
    lines += ["| | second quarter | last quarter | per 100 runs |", "|---|---:|---:|---:|"]
    for name in rows[-1]:
        if name == "seconds":
            continue
        early, late = (
            statistics.median(row[name] for row in part if name in row)
            for part in (rows[quarter : 2 * quarter], rows[-quarter:])
        )
        lines.append(f"| {name} | {early:.4g} | {late:.4g} | {(late - early) / (2 * quarter) * 100:+.3g} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
