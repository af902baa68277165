"""The points of metrics in a journal's lines, to compare a training that was broken with one that was not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CLOCKED = {"train/tokens_per_s", "train/time_left_s", "train/tflops", "train/mfu", "train/memory_gb",
           "rlhf/generated_tokens_per_s", "rlhf/generating_share", "rlhf/trainer_idle_share",
           "rlhf/sampler_idle_share", "rlhf/samplers_replaced", "rlhf/weights_handover_s"}  # fmt: skip
"""What a process measures of itself; a new one knows it from its second batch on."""


def points_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The (step, value) points of each metric in the order of steps, all of them, without those of `CLOCKED`."""
    points: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line["values"].items() if line.get("kind", "metric") == "metric" else ():
            if name not in CLOCKED:
                points.setdefault(name, []).append((line["step"], float(value)))
    return {name: sorted(found) for name, found in points.items()}
