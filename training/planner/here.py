"""The device of the machine at hand, as the planner knows devices."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

from infra.launch.config import LaunchConfig
from training.planner.devices import Device, device_called
from training.planner.stages import this_machine

_PROBE_SIZE, _PROBE_S = 512, 0.1
_GPU = Path("/proc/driver/nvidia/gpus")


def device_at_hand(launch: LaunchConfig) -> Device:
    """The GPU of this machine, if it is known, else its CPU."""
    if launch.device != "cpu" and _GPU.is_dir():
        for place in _GPU.iterdir():
            text = (place / "information").read_text(encoding="utf8", errors="replace")
            model = next((line.partition(":")[2] for line in text.splitlines() if line.startswith("Model")), "")
            if found := device_called(model.strip()):
                return found
    return cpu()


@cache
def cpu() -> Device:
    """This machine's CPU, by one product of matrices."""
    import numpy as np
    import psutil

    matrix = np.ones((_PROBE_SIZE, _PROBE_SIZE), np.float32)
    best, stop = float("inf"), time.perf_counter() + _PROBE_S
    while (began := time.perf_counter()) < stop:
        matrix @ matrix
        best = min(best, time.perf_counter() - began)
    return this_machine(psutil.virtual_memory().total, 2 * _PROBE_SIZE**3 / best)
