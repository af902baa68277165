"""A run reads its config once, and builds its graph once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COUNTING = """
import json, sys, threading
from collections import Counter

counted = {"_fill_sections": "validated", "_build": "graph built", "contradictions": "checked"}
counts = Counter()

def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_name in counted and "/flows/config/" in code.co_filename:
        counts[counted[code.co_name]] += 1

sys.setprofile(note)
threading.setprofile(note)
from cli.commands import run

try:
    run()
except SystemExit as end:
    assert not end.code
sys.setprofile(None)
print(json.dumps(counts), file=sys.stderr)
"""


@pytest.mark.slow
def test_a_run_validates_its_config_and_builds_its_graph_once(data_pipeline: Path, env: dict[str, str]) -> None:
    command = [sys.executable, "-c", COUNTING, "run", str(data_pipeline / "config.yaml")]
    done = subprocess.run(
        [*command, "--root", str(data_pipeline / "store"), "--json"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {row["status"] for row in json.loads(done.stdout)["stages"]} == {"reused"}
    assert json.loads(done.stderr.splitlines()[-1]) == {"validated": 1, "graph built": 1, "checked": 1}
