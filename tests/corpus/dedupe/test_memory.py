"""Memory does not grow with the corpus: a small form of benchmarks/corpus/bench_memory.py."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pipelines import SENTENCES
from tests.support.programs.command import REPOSITORY, environment

pytestmark = pytest.mark.slow

MEGABYTES = (40, 160)
# The larger corpus has 120 MB more; what is held of it is a few partitions' worth.
GROWTH_MB = 60

PROGRAM = """
import sys
from pathlib import Path
from corpus.cleaning.config import CleanConfig
from corpus.config import IngestConfig
from corpus.{stage} import {stage}
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.programs.memory import own_peak_mb
source, out = map(Path, sys.argv[1:])
out.mkdir()
{stage}({config}, {inputs}, out, Run(out.with_suffix(".work"), LaunchConfig(workers=1)))
print(own_peak_mb())
"""


def peak_mb(stage: str, config: str, inputs: str, source: Path, out: Path) -> float:
    program = PROGRAM.format(stage=stage, config=config, inputs=inputs)
    command = [sys.executable, "-c", program, source, out]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, cwd=REPOSITORY)
    return float(done.stdout)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("corpora")
    rng = random.Random(17)
    words = " ".join(SENTENCES).split()
    blocks = [" ".join(rng.choices(words, k=3_000)) for _ in range(200)]
    paths = []
    for size in MEGABYTES:
        paths.append(folder / f"{size}.jsonl")
        with paths[-1].open("w") as file:
            written = 0
            while written < size * 1e6:
                written += file.write(json.dumps({"text": f"{written} {rng.choice(blocks)}"}) + "\n")
    return paths


def first_parts(artifact: Path, count: int, out: Path) -> Path:
    (out / "documents").mkdir(parents=True)
    for part in sorted((artifact / "documents").iterdir())[:count]:
        os.link(part, out / "documents" / part.name)
    return out


READ = "IngestConfig(read=[{'kind': 'files', 'paths': [str(source)]}])"


def test_reading_holds_a_partition_at_a_time(corpora, tmp_path):
    small, large = (peak_mb("ingest", READ, "{}", path, tmp_path / path.stem) for path in corpora)
    assert large < small + GROWTH_MB


@pytest.mark.long
def test_cleaning_holds_a_partition_at_a_time(corpora, tmp_path):
    peak_mb("ingest", READ, "{}", corpora[1], tmp_path / "all")
    few, many = (first_parts(tmp_path / "all", count, tmp_path / f"first-{count}") for count in (1, 4))
    clean = "CleanConfig(gopher_quality=None, gopher_repetition=None)"
    inputs = "{'documents': source}"
    small, large = (peak_mb("clean", clean, inputs, parts, tmp_path / f"clean-{parts.name}") for parts in (few, many))
    assert large < small + GROWTH_MB
