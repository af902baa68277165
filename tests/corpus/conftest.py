"""A small real corpus, made once for all test workers and only read: docstrings of packages, through every stage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corpus.clean import clean
from corpus.cleaning.config import CleanConfig
from corpus.config import IngestConfig, ShardConfig, TokenizerConfig
from corpus.ingest import ingest
from corpus.shard import shard
from corpus.tokenizer import tokenizer
from infra.config import StageConfig
from infra.launch.config import LaunchConfig
from infra.run import Result, Run
from tests.conftest import built_once
from tests.support.pipelines import DOCSTRING_RULES

PACKAGES = ("click", "jinja2", "networkx")
SOURCE = {"kind": "docstrings", "packages": PACKAGES, "limit_mb": 0.6}

StageFunction = Callable[..., Result]


def build_stage(function: StageFunction, config: StageConfig, out: Path, **inputs: Path) -> Path:
    out.mkdir(parents=True)
    function(config, inputs, out, Run(out.parent / f"{out.name}.work", LaunchConfig(workers=1)))
    return out


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Path]:
    """build(stage function, config, **inputs) gives the folder of a fresh artifact."""
    count = 0

    def make(function: StageFunction, config: StageConfig, **inputs: Path) -> Path:
        nonlocal count
        count += 1
        return build_stage(function, config, tmp_path / f"artifact-{count}", **inputs)

    return make


@pytest.fixture(scope="session")
def documents(session_folder: Path) -> Path:
    folder = session_folder / "corpus-documents"
    with built_once(folder) as is_first:
        if is_first:
            ingested = build_stage(ingest, IngestConfig(read=[SOURCE]), folder / "ingest")
            build_stage(clean, CleanConfig(**DOCSTRING_RULES), folder / "clean", documents=ingested)
    return folder / "clean"


@pytest.fixture(scope="session")
def trained_tokenizer(session_folder: Path, documents: Path) -> Path:
    folder = session_folder / "corpus-tokenizer"
    with built_once(folder) as is_first:
        if is_first:
            build_stage(tokenizer, TokenizerConfig(vocab_size=600), folder / "tokenizer", documents=documents)
    return folder / "tokenizer"


@pytest.fixture(scope="session")
def shards(session_folder: Path, documents: Path, trained_tokenizer: Path) -> Path:
    folder, config = session_folder / "corpus-shards", ShardConfig(sequence_length=64)
    with built_once(folder) as is_first:
        if is_first:
            build_stage(shard, config, folder / "shards", documents=documents, tokenizer=trained_tokenizer)
    return folder / "shards"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], str]:
    """write(name, content) gives the path of a new file, in folders as named."""

    def make(name: str, content: str | bytes) -> str:
        path = tmp_path / "sources" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return make


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], str]:
    """The path of a real data set beside the checkout; the test is skipped where it is not there."""
    root = Path(__file__).resolve().parents[2].parent / "shared" / "data"

    def find(name: str) -> str:
        path = root / name
        if not path.exists():
            pytest.skip(f"the real data set {name} does not lie beside this checkout")
        return str(path)

    return find


def payload(artifact: Path) -> dict[str, str]:
    """SHA-256 of every file that counts: all but aux/."""
    return {
        str(path.relative_to(artifact)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(artifact.rglob("*"))
        if path.is_file() and path.relative_to(artifact).parts[0] != "aux"
    }


@pytest.fixture(name="payload", scope="session")
def payload_fixture() -> Callable[[Path], dict[str, str]]:
    return payload


@pytest.fixture(scope="session")
def lines_of() -> Callable[[Path], list[dict[str, Any]]]:
    def read(path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]

    return read
