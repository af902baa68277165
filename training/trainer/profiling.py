"""Profile a few steps (`launch.profile`): a Chrome trace, a table by operator, memory over time.

Profiled steps compute the same results but take longer.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from infra.io.json import read_own_json
from training.core.callbacks import Callback
from training.core.train_state import TrainState

WAIT = 2
"""Batches of the process before the profile starts: they warm up and compile."""
TRACE, TABLE, SUMMARY = "profile_trace.json.gz", "profile_operators.txt", "profile.json"
FILES = (TRACE, TABLE, SUMMARY)
_ROWS = 60
_POINTS = 2000
_COMMUNICATION = ("nccl", "c10d::", "gloo:")


class Profiler(Callback):
    """Profile `steps` batches after the first WAIT ones, and write FILES to the folder."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder = folder
        self._steps = steps
        self._seen = 0
        self._profile: Any = None

    def batch_start(self, state: TrainState) -> None:
        if self._seen == WAIT:
            activities = [ProfilerActivity.CPU]
            if state.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, profile_memory=True)
            self._profile.start()
        self._seen += 1

    def batch_end(self, state: TrainState) -> None:
        if self._seen == WAIT + self._steps:
            self._stop(state)

    def fit_end(self, state: TrainState) -> None:
        self._stop(state)

    def _stop(self, state: TrainState) -> None:
        if self._profile is None:
            return
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        on_gpu = state.device.type == "cuda"
        trace = self._folder / "trace.json"
        self._profile.export_chrome_trace(str(trace))
        averages = self._profile.key_averages()
        by = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        (self._folder / TABLE).write_text(averages.table(sort_by=by, row_limit=_ROWS), encoding="utf8")
        memory = memory_over_time(read_own_json(trace)["traceEvents"], on_gpu)
        steps = min(self._seen, WAIT + self._steps) - WAIT
        summary = {"steps": steps, **operators(averages, on_gpu), "memory": memory}
        (self._folder / SUMMARY).write_text(json.dumps(summary, indent=1), encoding="utf8")
        with open(trace, "rb") as plain, gzip.open(self._folder / TRACE, "wb", compresslevel=4) as packed:
            shutil.copyfileobj(plain, packed)
        trace.unlink()
        self._profile = None


def operators(averages: Sequence[Any], on_gpu: bool) -> dict[str, Any]:
    """{"total_ms", "communication_share", "operators": [{"name", "calls", "self_ms", "share", "memory_mb"}]}, sorted by
    the operators' self time on the device."""
    rows = [
        {
            "name": average.key,
            "calls": int(average.count),
            "self_ms": (average.self_device_time_total if on_gpu else average.self_cpu_time_total) / 1e3,
            "memory_mb": (average.self_device_memory_usage if on_gpu else average.self_cpu_memory_usage) / 1e6,
        }
        for average in averages
    ]
    total = sum(row["self_ms"] for row in rows) or 1.0
    rows = sorted(({**row, "share": row["self_ms"] / total} for row in rows), key=lambda row: -row["self_ms"])
    communication = sum(row["share"] for row in rows if any(part in row["name"] for part in _COMMUNICATION))
    return {"total_ms": total, "communication_share": communication, "operators": rows[:_ROWS]}


def memory_over_time(events: Sequence[dict[str, Any]], on_gpu: bool) -> list[tuple[float, float]]:
    """Return (milliseconds since the first event, change in MB held by tensors since the beginning) from a Chrome
    trace: at most _POINTS of them, each the highest of equally many neighbours."""
    device = 1 if on_gpu else 0
    changes = sorted(
        (float(event["ts"]), int(event["args"]["Bytes"]))
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == device
    )
    if not changes:
        return []
    points, held = [], 0
    for at, more in changes:
        held += more
        points.append(((at - changes[0][0]) / 1e3, held / 1e6))
    width = -(-len(points) // _POINTS)
    groups = (points[start : start + width] for start in range(0, len(points), width))
    return [max(group, key=lambda point: point[1]) for group in groups]


def leave(folder: Path, out_dir: Path) -> None:
    """Copy the profile to the artifact's aux/."""
    for name in FILES:
        if (folder / name).exists():
            (out_dir / "aux").mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, out_dir / "aux" / name)
