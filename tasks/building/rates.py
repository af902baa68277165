"""Rates of the device that a stage uses: watts, price per hour, overhead and emissions, see `infra.ledger.energy`."""

from __future__ import annotations

import os
from typing import Any

from infra.launch.config import LaunchConfig
from infra.ledger.energy import KG_PER_KWH, OVERHEAD, USD_PER_THREAD, WATTS_PER_THREAD
from tasks.processes.warm_start import uses_gpu
from tasks.stage import Stage
from training.core.devices import DEVICES, Device, gpu_of_this_machine


def rates_of(launch: LaunchConfig, stage: Stage) -> dict[str, Any]:
    """Return the rates of one device of a stage: {"device", "watts", "usd_per_hour", "overhead", "kg_per_kwh"}.

    A training's device is the GPU of a rank, or the CPU threads that it has; that of any other stage is the GPU that it
    uses, or this machine's CPU. What `launch.cost` gives takes precedence. A GPU that is unknown has no watts and no
    price here, and so no cost.
    """
    cost = launch.cost
    if launch.device != "cpu" and (uses_gpu(stage.name) or (stage.trains and launch.device == "gpu")):
        gpu = _gpu(launch)
        rates = {"device": gpu.name, "watts": gpu.power_w, "usd_per_hour": gpu.hourly} if gpu else {"device": "gpu"}
    else:
        threads = len(os.sched_getaffinity(0))
        if stage.trains:
            threads = launch.threads or max(1, threads // launch.processes)
        rates = {
            "device": f"{threads} CPU threads",
            "watts": threads * WATTS_PER_THREAD,
            "usd_per_hour": threads * USD_PER_THREAD,
        }
    given = cost.model_dump(exclude_none=True)
    return {**rates, "overhead": OVERHEAD, "kg_per_kwh": KG_PER_KWH, **given}


def _gpu(launch: LaunchConfig) -> Device | None:
    """Return the GPU that `launch.hardware` names, else this machine's; None if it is not known."""
    return DEVICES.get(launch.hardware) if launch.hardware else gpu_of_this_machine()
