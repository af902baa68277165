"""A benchmark whose contender dies says why, and ends with an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs.command import REPOSITORY, environment

RACE = """
import sys
from pathlib import Path
from benchmarks.training.bench_train import Contender
contender = Contender("(a) plain loop", "(a) plain loop", False, sys.argv[1], Path(sys.argv[2]))
"""
SILENT = """
import subprocess, sys, tempfile
from benchmarks.training.bench_train import Contender
contender = Contender.__new__(Contender)
contender.title, contender._said = "(x)", tempfile.NamedTemporaryFile()
program = "import sys; sys.stderr.write('out of memory'); sys.exit(7)"
contender._process = subprocess.Popen(
    [sys.executable, "-c", program],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=contender._said, text=True,
)
contender._process.wait()
getattr(contender, sys.argv[1])()
"""


def ended(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=REPOSITORY, env=environment(), capture_output=True, text=True
    )


def test_a_contender_that_dies_at_its_start_says_why(tmp_path: Path) -> None:
    done = ended(RACE, "A", str(tmp_path))  # its tokens are not there
    assert done.returncode == 1
    assert "(a) plain loop ended with exit code 1" in done.stderr
    assert "A.npy" in done.stderr


@pytest.mark.parametrize("then", ["window", "profile"])
def test_one_that_dies_between_two_windows_says_why_and_is_not_waited_for(then: str) -> None:
    done = ended(SILENT, then)
    assert done.returncode == 1
    assert "(x) ended with exit code 7" in done.stderr
    assert "out of memory" in done.stderr
