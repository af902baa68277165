"""A compiled function is never older than what it was compiled from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
INNER = "from infra.native import kernel\nSTEP = {step}\n@kernel\ndef inner(x):\n    return x + STEP\n"
OUTER = "from infra.native import kernel\nfrom inner import inner\n@kernel\ndef outer(x):\n    return inner(x) * 10\n"
ASK = "from outer import outer\nprint(outer(1), sum(outer.stats.cache_hits.values()))"


def ask(folder: Path) -> list[int]:
    """What outer(1) gives in a process of its own, and how often it was found on disk."""
    found = subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{PROJECT}"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    return [int(number) for number in found.stdout.split()]


def test_what_is_defined_later_could_change_unseen_and_is_refused(tmp_path):
    (tmp_path / "late.py").write_text(
        "from infra.native import kernel\n@kernel\ndef outer(x):\n    return inner(abs(x))\n"
        "@kernel\ndef inner(x):\n    return x\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", "import late"],
        env={"PYTHONPATH": f"{tmp_path}:{PROJECT}"},
        capture_output=True,
        text=True,
    )
    assert "NameError: outer needs inner, which must be defined above it" in found.stderr


def test_a_change_in_another_file_compiles_anew_and_none_does_not(tmp_path):
    (tmp_path / "inner.py").write_text(INNER.format(step=1))
    (tmp_path / "outer.py").write_text(OUTER)
    assert ask(tmp_path) == [20, 0]
    assert ask(tmp_path) == [20, 1]
    (tmp_path / "inner.py").write_text(INNER.format(step=2))
    assert ask(tmp_path) == [30, 0]
