"""A dedupe stage with one worker that is interrupted and goes on, and with two workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corpus.dedupe.config import DedupeConfig
from corpus.dedupe.stage import dedupe
from infra.errors import Cancelled
from infra.launch.config import LaunchConfig
from infra.run import Run


def check_same_bytes(
    folder: Path, documents: Path, config: DedupeConfig, step: str, payload: Callable[[Path], Any]
) -> None:
    """Assert that both give the same bytes. step: the work folder of the step in whose second part one is interrupted;
    parts that were done are not done again, and nothing is left in the output."""
    made = []
    for workers in (1, 2):
        out, work = folder / f"out-{workers}", folder / f"work-{workers}"
        out.mkdir()
        run, part = Run(work, LaunchConfig(workers=workers)), work / step / "00001"
        if workers == 1:
            with pytest.raises(Cancelled):
                dedupe(config, {"documents": documents}, out, Run(work, run.launch, is_cancelled=part.exists))
            before = part.stat().st_ctime_ns
            assert not list(out.iterdir())
        dedupe(config, {"documents": documents}, out, run)
        made.append(payload(out))
        if workers == 1:
            assert part.stat().st_ctime_ns == before
    assert made[0] == made[1]
