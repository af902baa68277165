"""Rates of a device: its power, its price and the emissions of its energy.

The power of an NVIDIA GPU is measured: the driver counts the millijoules of each GPU since it was loaded (NVML, since
Volta), and the difference is recorded as a training goes. Everything else is an estimate, and is named so:

- a GPU without such a counter: its maximum power, from training/core/devices.py;
- a CPU: WATTS_PER_THREAD for each hardware thread that the stage may use;
- prices: the geometric mean of the lowest and highest rent in training/core/devices.py; for a CPU USD_PER_THREAD;
- the host's share and the data centre's: OVERHEAD; emissions per kilowatt-hour: KG_PER_KWH.

`launch.cost` in a config overrides each of these.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any

WATTS_PER_THREAD = 3.5
"""W of a hardware thread at full load: the mean of AWS's servers in Cloud Carbon Footprint's coefficients (2023)."""
USD_PER_THREAD = 0.045
"""USD per hour of a hardware thread: on-demand lists of AWS m7i (0.050), Azure Dv5 (0.048), Google n2 (0.049) and e2
(0.034) in 2024."""
OVERHEAD = 1.21
"""Power of host and data centre per watt of the device: 1.1 for the host's share (Patterson et al. 2021, table 4: 330 W
for each V100 of 300 W) and 1.1 for a data centre's PUE there."""
KG_PER_KWH = 0.48
"""kg CO2 equivalent per kWh: the world's mean of 2023 (Ember, Global Electricity Review 2024)."""


class GpuEnergy:
    """Energy of one GPU as its driver counts it. Not every driver has such a counter."""

    def __init__(self, uuid: str) -> None:
        """Open the GPU's counter.

        Args:
            uuid: of the GPU, such as GPU-8c5b…; numbers of devices differ between CUDA and the driver.
        """
        self._library = _library()
        self._handle = ctypes.c_void_p()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if self._library is not None and self._library.nvmlDeviceGetHandleByUUID(
            name.encode(), ctypes.byref(self._handle)
        ):
            self._library = None

    def joules(self) -> float | None:
        """Joules since the driver was loaded; None if it does not count them."""
        if self._library is None:
            return None
        millijoules = ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules)):
            return None
        return millijoules.value / 1000


@cache
def _library() -> Any:
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() == 0 and library.nvmlDeviceGetTotalEnergyConsumption is not None:
            return library
    return None
