"""A store, and a way to fill it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.store.store import Store
from tests.artifacts import Make, make_artifact
from tests.postgres import postgres


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
