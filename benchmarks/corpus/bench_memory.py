"""Peak resident memory of the corpus stages over real text repeated and perturbed, stage by stage.

    python benchmarks/corpus/bench_memory.py --gb 2 --data ../shared/data

Runs the real command and adds up the resident memory of each stage's processes ten times a second (pages that processes
share count once for each). Real text is what JSON Lines and text files below --data hold; each copy of a document gets
its words shuffled here and there, so that none is an exact or near duplicate.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml

PROJECT = Path(__file__).resolve().parents[2]
FILE_BYTES = 200_000_000
SAMPLE_S = 0.1
FORK_SERVER = "infra.process.fork_server"
T = TypeVar("T")


def real_texts(data: Path) -> list[str]:
    texts = []
    for path in sorted(data.rglob("*")):
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
                rows = (json.loads(line) for line in lines)
                texts += [row["text"] for row in rows if isinstance(row.get("text"), str) and len(row["text"]) > 500]
        elif path.suffix == ".txt" and path.stat().st_size > 100_000:
            words = path.read_text(errors="replace").split(" ")
            texts += [" ".join(words[start : start + 500]) for start in range(0, len(words), 500)]
    return texts


def perturbed(texts: list[str], total_bytes: int) -> Iterator[str]:
    """Texts until they have so many bytes; a third of the words of each is replaced by words of another."""
    rng = random.Random(17)
    made = 0
    while made < total_bytes:
        for text in texts:
            words, others = text.split(" "), rng.choice(texts).split(" ")
            for _ in range(len(words) // 3):
                words[rng.randrange(len(words))] = rng.choice(others)
            changed = " ".join(words)
            made += len(changed.encode())
            yield changed
            if made >= total_bytes:
                return


def write_corpus(folder: Path, texts: list[str], total_bytes: int) -> list[str]:
    paths: list[str] = []
    room, file = 0, None
    for text in perturbed(texts, total_bytes):
        line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
        if room < len(line):
            if file:
                file.close()
            paths.append(str(folder / f"{len(paths):03}.jsonl"))
            file, room = open(paths[-1], "wb"), FILE_BYTES  # noqa: SIM115 - closed when it is full
        assert file is not None
        file.write(line)
        room -= len(line)
    if file:
        file.close()
    return paths


def peaks(config: Path, root: Path) -> tuple[dict[str, float], dict[str, float]]:
    """(peak resident MB by stage, seconds by stage) of one run of the command."""
    command = [sys.executable, "-m", "cli.main", "run", str(config), "--root", str(root)]
    process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.DEVNULL)
    found: dict[str, float] = defaultdict(float)
    seen: dict[str, list[float]] = defaultdict(list)
    while process.poll() is None:
        for stage, size in resident(process.pid).items():
            found[stage] = max(found[stage], size / 1e6)
            seen[stage].append(time.monotonic())
        time.sleep(SAMPLE_S)
    if process.returncode:
        sys.exit(f"the run failed with exit code {process.returncode}")
    return found, {stage: times[-1] - times[0] for stage, times in seen.items()}


def resident(pid: int) -> dict[str, int]:
    """Resident bytes of each stage that runs now: its processes, which work in its folder, and the server that they
    were forked from; what they share counts once (PSS)."""
    families: dict[str, set[psutil.Process]] = defaultdict(set)
    for process in _unless_ended(lambda: psutil.Process(pid).children(recursive=True), []):
        parts = Path(_unless_ended(process.cwd, "")).parts
        if ".work" in parts[:-1]:
            parent = _unless_ended(process.parent, None)
            is_forked = parent is not None and FORK_SERVER in _unless_ended(parent.cmdline, [])
            families[parts[parts.index(".work") + 1]] |= {process, parent} if parent and is_forked else {process}
    return {
        stage: sum(_unless_ended(partial(_pss, member), 0) for member in family) for stage, family in families.items()
    }


def _pss(process: psutil.Process) -> int:
    return int(process.memory_full_info().pss)


def _unless_ended(ask: Callable[[], Any], otherwise: T) -> Any | T:
    try:
        return ask()
    except psutil.Error:
        return otherwise


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=0.2)
    parser.add_argument("--data", type=Path, default=PROJECT.parent / "shared" / "data")
    parser.add_argument("--stages", default="ingest,clean,dedupe,tokenizer,shard")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="corpus-memory-"))
    try:
        paths = write_corpus(folder, real_texts(options.data), int(options.gb * 1e9))
        sections: dict[str, object] = {
            "ingest": {"read": [{"kind": "files", "paths": paths}]},
            "clean": {},
            "dedupe": {},
            "tokenizer": {"vocab_size": 4096, "train_mb": 20},
            "shard": {"sequence_length": 1024, "compression": "zstd"},
        }
        chosen = {name: sections[name] for name in options.stages.split(",")}
        config = folder / "memory.yaml"
        config.write_text(yaml.safe_dump({"name": "memory", **chosen}))
        found, seconds = peaks(config, folder / "store")
        print(f"{'stage':<12}{'peak MB':>10}{'s':>8}{'MB/s':>8}")
        for stage, size in found.items():
            rate = options.gb * 1000 / seconds[stage] if seconds[stage] else 0
            print(f"{stage:<12}{size:>10,.0f}{seconds[stage]:>8.0f}{rate:>8.1f}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
