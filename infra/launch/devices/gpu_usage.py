"""Samples of how each GPU of this machine is used: utilisation, memory, power, temperature.

NVML answers where `pynvml` (the package `nvidia-ml-py`) is installed, else `nvidia-smi` where it is on PATH. Neither
opens a CUDA context. A machine without both has no samples, and nothing is logged about it.

The samples become metrics of the stage that runs, such as `gpu/0/utilisation_percent`, at the step that the stage has
reached.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from infra.launch.config import LaunchConfig
from infra.run import Run

EVERY_S = 5.0
PREFIX = "gpu"
"""First part of the names of these metrics; the second is the number of the GPU."""
FIGURES = ("utilisation_percent", "memory_gb", "power_w", "temperature_c")
_SMI_S = 20.0
_QUERY = "index,uuid,utilization.gpu,memory.used,power.draw,temperature.gpu"


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one moment; what its driver does not report is missing.

    index: number of the GPU on this machine, whatever CUDA_VISIBLE_DEVICES hides. figures: by names of FIGURES; memory
    in units of 10**9 bytes.
    """

    index: int
    uuid: str
    figures: Mapping[str, float]


Reader = Callable[[], list[GpuSample]]


def open_reader() -> Reader | None:
    """Return a function that samples all GPUs of this machine; None if neither NVML nor nvidia-smi answers."""
    for opened in (_nvml, _smi):
        reader = opened()
        if reader is not None:
            return reader
    return None


def visible(samples: list[GpuSample], devices: str | None) -> list[GpuSample]:
    """Return the samples of those GPUs that CUDA_VISIBLE_DEVICES lets a process use.

    Args:
        devices: its value: numbers, or beginnings of UUIDs; None if it is not set. MIG devices select no GPU.
    """
    if devices is None:
        return samples
    names = [name.strip() for name in devices.split(",") if name.strip()]
    return [s for s in samples if any(name == str(s.index) or s.uuid.startswith(name) for name in names)]


def as_metrics(samples: list[GpuSample]) -> dict[str, float]:
    return {f"{PREFIX}/{sample.index}/{name}": value for sample in samples for name, value in sample.figures.items()}


@contextmanager
def sampled(run: Run, launch: LaunchConfig) -> Iterator[None]:
    """Record the use of the visible GPUs as metrics of `run` until the block ends, from a thread.

    A driver that stops to answer ends the sampling and nothing else.
    """
    reader = open_reader() if launch.device != "cpu" else None
    if reader is None:
        yield
        return
    ended = threading.Event()

    def sample() -> None:
        with suppress(Exception):
            while True:
                values = as_metrics(visible(reader(), os.environ.get("CUDA_VISIBLE_DEVICES")))
                if not values:
                    return
                run.metrics(values, run.step)
                if ended.wait(EVERY_S):
                    return

    thread = threading.Thread(target=sample, name="gpu-usage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_SMI_S)


def _nvml() -> Reader | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package that nvidia-ml-py replaced announces its own end
        try:
            nvml: Any = importlib.import_module("pynvml")
            nvml.nvmlInit()
            handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
            uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        except Exception:
            return None
    queries: dict[str, Callable[[Any], float]] = {
        "utilisation_percent": lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_gb": lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).used / 1e9,
        "power_w": lambda handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "temperature_c": lambda handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    }

    def read() -> list[GpuSample]:
        samples = []
        for index, (handle, uuid) in enumerate(zip(handles, uuids, strict=True)):
            figures = {}
            for name, query in queries.items():
                with suppress(nvml.NVMLError):  # e.g. power of a laptop's GPU, utilisation under MIG
                    figures[name] = float(query(handle))
            if figures:
                samples.append(GpuSample(index, uuid, figures))
        return samples

    return read if handles else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _smi() -> Reader | None:
    with suppress(OSError, subprocess.SubprocessError):
        if _read_smi():
            return _read_smi
    return None


def _read_smi() -> list[GpuSample]:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=False)
    samples = []
    for line in answer.stdout.splitlines() if answer.returncode == 0 else ():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 2 + len(FIGURES) or not fields[0].isdigit():
            continue
        figures = {}
        for name, field in zip(FIGURES, fields[2:], strict=True):
            with suppress(ValueError):  # [N/A], [Not Supported]
                figures[name] = float(field) * (2**20 / 1e9 if name == "memory_gb" else 1.0)
        samples.append(GpuSample(int(fields[0]), fields[1], figures))
    return samples
