"""A stage on the command line, without the pipeline around it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.command import REPOSITORY


def test_a_forgotten_input_is_named(tmp_path: Path) -> None:
    stage = [sys.executable, "-m", "corpus.dedupe.stage"]
    command = [*stage, "--out", str(tmp_path / "out"), "--input", f"text={tmp_path}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "expected one named documents, got text (add --input documents=DIR)" in done.stderr
    assert "Traceback" not in done.stderr
