"""A disk that fills up while a stage writes: said so, nothing half-written, and the next run goes on."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.store.layout import MANIFEST
from tests.command import Answer, environment, finish, start, write_config
from tests.pipelines import short_config
from tests.processes import running_stage, wait_until

SIZE_MB = 256
"""More than a stage wants to see free before it starts."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(place)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to mount a small disk here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all that is left."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 65536)
        except OSError as error:
            assert error.errno == errno.ENOSPC
    return filler


def half_written(store: Path) -> list[Path]:
    """Folders at the place of artifacts that are none."""
    stages = [path for path in store.iterdir() if path.is_dir() and path.name in ("ingest", "validate", "clean")]
    return [folder for stage in stages for folder in stage.iterdir() if not (folder / MANIFEST).is_file()]


@pytest.mark.cluster
def test_a_full_disk_fails_cleanly_and_the_next_run_goes_on(
    small_disk: Path, tmp_path: Path, run: Callable[..., Answer], cold_env: dict[str, str]
) -> None:
    store = small_disk / "store"
    config = write_config(tmp_path / "config.yaml", short_config(tmp_path))
    process = start("run", config, "--root", store, "--set", "launch.retries=0", env=environment(**cold_env))
    wait_until(lambda: running_stage(store, "ingest"))
    filler = fill(small_disk)
    answer = finish(process)
    assert answer.code == 1, answer.document
    assert "disk_full" in {error["code"] for error in answer.document["errors"]}, answer.document["errors"]
    assert "free" in str(answer.document["errors"])
    assert not half_written(store)

    before = run("run", config, "--root", store)
    assert (before.code, before.document["errors"][0]["code"]) == (1, "disk_full")
    filler.unlink()
    again = run("run", config, "--root", store)
    assert again.code == 0, again.document["errors"]
    assert not half_written(store)
    assert run("verify", "tokenizer", "--ancestry", "--root", store).code == 0
