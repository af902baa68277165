"""The device of the current machine, in the planner's terms."""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from infra.io.json import read_own_json
from infra.launch.config import LaunchConfig
from training.core.devices import Device, gpu_of_this_machine
from training.planner.stages import this_machine

_PROBE_SIZE, _PROBE_S = 512, 0.1


def device_at_hand(launch: LaunchConfig) -> Device:
    """The GPU of this machine, if it is known, else its CPU."""
    return (gpu_of_this_machine() if launch.device != "cpu" else None) or cpu()


@cache
def cpu() -> Device:
    """Return this machine's CPU, measured by one matrix product: the fastest one ever timed on it.

    Stages may train concurrently, and a measurement next to another training takes many times as long. The best one is
    therefore kept in ~/.cache/stemma, for each kind of CPU and number of threads.
    """
    import psutil

    flops, kept = _probe(), Path("~/.cache/stemma/cpu.json")
    key = f"{_model()}, {len(os.sched_getaffinity(0))} cores, {_threads()} threads"
    best: dict[str, float] = {}
    # Without a home, or with a damaged file, the result is only less accurate.
    with suppress(OSError, RuntimeError, ValueError, TypeError, AttributeError):
        best = {name: float(speed) for name, speed in read_own_json(kept.expanduser()).items()}
    if flops > best.get(key, 0.0):
        with suppress(OSError, RuntimeError):
            _write(kept.expanduser(), json.dumps({**best, key: flops}, indent=1))
    return this_machine(psutil.virtual_memory().total, max(flops, best.get(key, 0.0)))


def _probe() -> float:
    """FLOP/s of a matrix product in fp32, the best within a tenth of a second.

    On a busy machine a product waits for cores. What counts is the time that this thread has worked on its share: other
    work takes cores from this product, not from a training that has the machine to itself. The whole process's time
    does not serve: for threads that run on other cores Linux gives it as of their last tick, milliseconds ago.
    """
    import numpy as np

    matrix = np.ones((_PROBE_SIZE, _PROBE_SIZE), np.float32)
    best, stop = float("inf"), time.perf_counter() + _PROBE_S
    while time.perf_counter() < stop:
        began = time.thread_time()
        matrix @ matrix
        best = min(best, max(1e-9, time.thread_time() - began))
    return 2 * _PROBE_SIZE**3 / best


def _threads() -> int:
    """Return the number of threads of a matrix product."""
    cores, asked = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(asked)) if asked.isdigit() and int(asked) else cores


def _model() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf8", errors="replace") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "CPU")
    return "CPU"


def _write(path: Path, text: str) -> None:
    """Write a file atomically: concurrent readers get the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".cpu-", delete=False, encoding="utf8") as file:
        file.write(text)
    os.replace(file.name, path)
