"""Single stages for a benchmark, each made once for good, and what several seeds of one come to."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from infra.config import StageConfig
from infra.launch.config import LaunchConfig
from infra.run import Run

Figures = dict[str, float]


class Stages:
    """Artifacts by name in one folder, each with its figures in figures.json; what is there already is taken as it is.

    only_finished: nothing is made.
    """

    def __init__(self, out: Path, launch: LaunchConfig, only_finished: bool = False) -> None:
        self._out, self._launch, self._only_finished = out, launch, only_finished

    def made(
        self, name: str, function: Callable[..., Any], config: StageConfig, inputs: Mapping[str, Path] | None = None
    ) -> Path:
        """The artifact of one stage, whose seconds are one of its figures."""
        out = self._out / name
        if (out / "figures.json").exists() or self._only_finished:
            return out
        out.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with (self._out / f"{name}.jsonl").open("w", encoding="utf8") as journal:
            result = function(config, inputs or {}, out, Run(self._out / "work" / name, self._launch, journal=journal))
        figures = {**result.figures, "seconds": time.monotonic() - began}
        print(f"{name}: {result.headline} ({figures['seconds']:.0f} s)", file=sys.stderr, flush=True)
        (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf8")
        return out

    def figures_of(self, name: str) -> Figures:
        """Figures of an artifact."""
        figures: Figures = json.loads((self._out / name / "figures.json").read_text(encoding="utf8"))
        return figures

    def figures(self, kind: str, seeds: Iterable[int]) -> list[Figures]:
        """Those of `kind_seed` for each seed that has been through."""
        files = [self._out / f"{kind}_{seed}" / "figures.json" for seed in seeds]
        return [json.loads(file.read_text(encoding="utf8")) for file in files if file.exists()]


def spread(values: list[float]) -> str:
    """Mean and standard deviation, to three and two digits."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3g} ± {deviation:.2g}"
