"""Fitness of a machine for training: checks of its arithmetic, memory and disks, in about a second."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

import numpy as np
import psutil

_SIZE = 256
_TRIES = 3
"""Tries of each exercise. The fastest counts: other work on a machine can only slow one down."""
_SLOW = 10.0
_EXERCISES = {"gflops": ("computes", "GFLOP/s"), "memory_gb_per_s": ("copies memory at", "GB/s")}
_MEMORY_BYTES = 64 * 2**20
_FREE_SHARE = 0.02
_DISK_BYTES = 4 * 2**20
_GPU_S = 120.0
# Whole numbers below 2^24 are exact in fp32, so that each product must be right to the last bit, in any order of sums.
_ON_GPUS = """
import torch
assert torch.cuda.is_available(), "torch finds no GPU"
for number in range(torch.cuda.device_count()):
    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = (torch.randint(-8, 9, (1024, 1024), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    with torch.cuda.device(number):
        product = (a.float().cuda() @ b.float().cuda()).cpu()
        assert torch.equal(product, (a.double() @ b.double()).float()), f"GPU {number} multiplies wrongly"
        free, total = torch.cuda.mem_get_info()
        assert free > 0.5 * total, f"GPU {number} has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
"""


def examine(folders: Sequence[Path], *, gpus: bool) -> tuple[list[str], dict[str, float]]:
    """Return the problems of this machine, one sentence each, and the speeds of its exercises.

    Args:
        folders: those that a training writes to.
        gpus: True if the machine has GPUs, which must work too.
    """
    checks: list[tuple[str, Callable[[], dict[str, float]]]] = [("arithmetic", _multiply), ("memory", _remember)]
    checks += [(f"disk of {folder}", lambda folder=folder: _write(folder)) for folder in folders]  # type: ignore[misc]
    if gpus:
        checks.append(("GPUs", _use_gpus))
    problems: list[str] = []
    figures: dict[str, float] = {}
    for name, check in checks:
        try:
            figures |= check()
        except Exception as error:  # any failure, in any library, is a finding
            problems.append(f"{name}: {str(error).strip() or type(error).__name__}")
    return problems, figures


def slow_machines(figures: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Return the machines that are so slow that others would wait for them, with a reason each.

    Args:
        figures: what `examine` measured on each of the machines that will train together, by name.
    """
    slow: dict[str, str] = {}
    for name, (does, unit) in _EXERCISES.items():
        speeds = {machine: measured[name] for machine, measured in figures.items() if name in measured}
        best = max(speeds, key=lambda machine: speeds[machine], default="")
        for machine, speed in speeds.items():
            if speed * _SLOW < speeds[best]:
                reason = f"it {does} {speed:.2g} {unit}, where {best} does {speeds[best]:.2g}"
                slow[machine] = "; ".join(filter(None, [slow.get(machine), reason]))
    return slow


def _multiply() -> dict[str, float]:
    random = np.random.default_rng(0)
    a, b = (random.integers(-8, 9, (_SIZE, _SIZE)) for _ in range(2))
    left, right = a.astype(np.float32), b.astype(np.float32)
    products = [_timed(lambda: left @ right) for _ in range(_TRIES)]
    right_one = a @ b
    if not all(np.array_equal(product, right_one) for product, _ in products):
        raise ArithmeticError("a product of matrices came out wrong")
    return {"gflops": 2 * _SIZE**3 / min(seconds for _, seconds in products) / 1e9}


def _timed(exercise: Callable[[], np.ndarray]) -> tuple[np.ndarray, float]:
    started = time.perf_counter()
    result = exercise()
    return result, max(time.perf_counter() - started, 1e-9)


def _remember() -> dict[str, float]:
    memory = psutil.virtual_memory()
    if memory.available < _FREE_SHARE * memory.total:
        raise MemoryError(f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB are free")
    pattern = np.random.default_rng(1).integers(0, 256, _MEMORY_BYTES, np.uint8)
    fastest = math.inf
    for _ in range(_TRIES):
        copied, seconds = _timed(pattern.copy)
        if not np.array_equal(copied, pattern):
            raise MemoryError("what was written into memory came back as something else")
        fastest = min(fastest, seconds)
    return {"free_gib": memory.available / 2**30, "memory_gb_per_s": _MEMORY_BYTES / fastest / 1e9}


def _write(folder: Path) -> dict[str, float]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".check-{uuid4().hex}"
    data = os.urandom(_DISK_BYTES)
    try:
        started = time.perf_counter()
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - started
        if path.read_bytes() != data:
            raise OSError("what was written came back as something else")
    finally:
        path.unlink(missing_ok=True)
    return {f"mb_per_s:{folder}": _DISK_BYTES / max(seconds, 1e-9) / 1e6}


def _use_gpus() -> dict[str, float]:
    answer = subprocess.run([sys.executable, "-c", _ON_GPUS], capture_output=True, text=True, timeout=_GPU_S)
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or [f"exit {answer.returncode}"]
        raise RuntimeError(lines[-1])
    return {}
