"""The folder of this node alone: what killed trainings left there goes, whatever goes by itself meanwhile."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from training.data import node_storage


def test_a_training_begins_while_others_of_its_machine_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / f"{socket.gethostname()}-{number}" for number in range(3)]
    for folder in folders:
        folder.mkdir()

    def remove(path: Path, ignore_errors: bool) -> None:
        """Removing one takes so long that all others are gone by then."""
        for folder in folders:
            removed(folder, ignore_errors=True)

    removed = shutil.rmtree
    monkeypatch.setattr(node_storage.shutil, "rmtree", remove)
    made, lock = node_storage._make_folder(tmp_path)
    lock.close()
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [made]
