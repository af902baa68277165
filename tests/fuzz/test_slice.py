"""A slice of `make fuzz` for each run of the tests, and the proof that it can fail."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from infra.errors import stage_error
from tests.fuzz.harness import Target, run_target
from tests.fuzz.targets import TARGETS

SLICE_S = 12.0
"""For all targets together; a machine that is busy gets less done, and at least ten inputs of each."""
INPUTS = 40
DEAR = ("command", "config-check", "store-files", "http-serve", "http-damaged-store", "read-warc")
CHEAP = tuple(name for name in TARGETS if name not in DEAR)
"""The others import much, or run whole commands."""


def test_a_slice_of_all_inputs_is_read_or_refused(tmp_path: Path) -> None:
    seed, end = int(time.time() // 86_400), time.monotonic() + SLICE_S
    failures: dict[str, Any] = {}
    total = 0
    for number, name in enumerate(CHEAP):
        state = run_target(TARGETS[name], 10, seed, tmp_path / name)
        share_s = (end - time.monotonic()) / (len(CHEAP) - number)
        state = run_target(TARGETS[name], INPUTS, seed, tmp_path / name, until_s=time.monotonic() + share_s)
        total += state.inputs
        if state.failures:
            kept = sorted((tmp_path / name / "failures").glob("*.txt"))
            failures[name] = [path.read_text(errors="replace")[:2_000] for path in kept]
    assert not failures, f"seed {seed}: {failures}"
    assert total >= 100


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_more_inputs(name: str, tmp_path: Path) -> None:
    """Risk: an input from outside ends a command with a traceback, hangs it, fills the memory, or vanishes."""
    state = run_target(TARGETS[name], 2_000, 1, tmp_path, until_s=time.monotonic() + 120)
    kept = [path.read_text(errors="replace")[:2_000] for path in sorted((tmp_path / "failures").glob("*.txt"))]
    assert not state.failures, kept


def _read(text: str, _: Path) -> None:
    if "a" in text and "b" in text:
        raise KeyError(text)
    if "c" in text:
        raise stage_error("bad", "file", "it has a c")


def test_a_failure_is_made_small_and_kept_and_counted_once_by_kind(tmp_path: Path) -> None:
    target = Target("x", lambda: st.text("abcdef", max_size=30), _read)
    state = run_target(target, 300, 0, tmp_path)
    assert state.inputs == 300 and 0 < state.refused < 300
    [(kind, count)] = state.failures.items()
    assert kind.startswith("KeyError tests/fuzz/test_slice.py") and count > 1
    [kept] = (tmp_path / "failures").glob("*.txt")
    assert "'ab'" in kept.read_text() or "'ba'" in kept.read_text(), "the smallest text with both"
    # Another call goes on where this one ended.
    assert run_target(target, 300, 0, tmp_path).inputs == 300
