"""Folders of the repository stay small enough to be read at a glance: at most 15 Python files in each."""

import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath

from tests.support.programs.command import REPOSITORY

MOST_FILES = 15


def crowded(paths: Iterable[str]) -> dict[str, int]:
    """Return the folders with more Python files than allowed, and how many these are."""
    sizes = Counter(str(PurePosixPath(path).parent) for path in paths if path.endswith(".py"))
    return {folder: count for folder, count in sorted(sizes.items()) if count > MOST_FILES}


def test_no_folder_holds_more_than_fifteen_files() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert len(listed.stdout.split()) > 500, "the repository is what is listed"
    assert not (folders := crowded(listed.stdout.split())), f"split by idea into packages: {folders}"


def test_a_crowded_folder_is_named() -> None:
    files = [f"corpus/room/file_{number}.py" for number in range(MOST_FILES)]
    assert not crowded([*files, "corpus/room/inner/file.py", "corpus/room/data.json"])
    assert crowded([*files, "corpus/room/__init__.py"]) == {"corpus/room": MOST_FILES + 1}
