from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.servers.services import down


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "a store"
    folder.mkdir()
    yield folder
    down(folder)


@pytest.fixture
def eventually() -> Callable[..., None]:
    def wait(condition: Callable[[], object], what: str, deadline_s: float = 120.0) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < deadline, f"never: {what}"
            time.sleep(0.05)

    return wait
