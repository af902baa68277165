"""A compiled function is never older than what it was compiled from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
INNER = "from infra.native import kernel\nSTEP = {step}\n@kernel\ndef inner(x):\n    return x + STEP\n"
OUTER = "from infra.native import kernel\nfrom inner import inner\n@kernel\ndef outer(x):\n    return inner(x) * 10\n"
ASK = "from outer import outer\nprint(outer(1), sum(outer.stats.cache_hits.values()))"


def ask(folder: Path) -> list[int]:
    """What outer(1) gives in a process of its own, and how often it was found on disk."""
    found = subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=folder,
        # Python's own cache tells files of one size apart by the second alone.
        env={"PYTHONPATH": f"{folder}:{PROJECT}", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    return [int(number) for number in found.stdout.split()]


def test_a_change_in_another_file_compiles_anew_and_none_does_not(tmp_path):
    (tmp_path / "inner.py").write_text(INNER.format(step=1))
    (tmp_path / "outer.py").write_text(OUTER)
    assert ask(tmp_path) == [20, 0]
    assert ask(tmp_path) == [20, 1]
    (tmp_path / "inner.py").write_text(INNER.format(step=2))
    assert ask(tmp_path) == [30, 0]


@pytest.mark.long
def test_a_change_further_down_in_the_file_compiles_anew_too(tmp_path):
    """The risk: what is compiled is known by the lines up to its own."""
    later = "from infra.native import kernel\n@kernel\ndef outer(x):\n    return inner(x) * 10\n"
    later += "@kernel\ndef inner(x):\n    return x + {step}\n"
    for step in (1, 2):
        (tmp_path / "outer.py").write_text(later.format(step=step))
        assert ask(tmp_path) == [10 + 10 * step, 0]
