"""A store, and a way to fill it."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.store.store import Store
from tests.artifacts import Make, make_artifact


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def make(store: Store) -> Make:
    return lambda stage, files, **facts: make_artifact(store, stage, files, **facts)
