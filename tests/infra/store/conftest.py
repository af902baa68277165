"""A store, and a way to fill it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.store.roots import root_folder
from infra.store.store import Store
from tests.support.artifacts import Make, make_artifact
from tests.support.services.object_store import bucket as make_bucket
from tests.support.services.postgres import postgres

URL = "s3://models/lab"
Host = Callable[[str], Store]


@pytest.fixture(scope="session")
def database() -> Iterator[str]:
    """The URL of a PostgreSQL that tests of leases share: each has a store of its own in it."""
    with postgres() as url:
        yield url


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def make(store: Store) -> Make:
    return lambda stage, files, **facts: make_artifact(store, stage, files, **facts)


@pytest.fixture
def bucket(s3_port: int, proxy: Any) -> Iterator[Any]:
    with make_bucket(s3_port, "models") as client:
        yield client


@pytest.fixture
def host(bucket: Any, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """`host("a")`: the root as another machine sees it, with a cache of its own."""
    monkeypatch.setenv("STEMMA_DATABASE_URL", database)

    def open_root(name: str) -> Store:
        monkeypatch.setenv("STEMMA_CACHE", str(tmp_path / name))
        return Store(root_folder(URL))

    return open_root
