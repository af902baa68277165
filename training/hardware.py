"""What a stage computes on: device, precision and threads, from `launch:`."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from infra.errors import stage_error
from infra.launch.config import LaunchConfig

# Dense bf16 peak of one device in FLOP/s, from the makers' data sheets.
_PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "L40S": 362e12, "A10G": 70e12}


@dataclass(frozen=True)
class Hardware:
    """One device of one process.

    bf16: whether forward passes run under bf16 autocast; weights and optimizer state stay in fp32.
    """

    device: torch.device
    bf16: bool

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    @property
    def peak_flops(self) -> float | None:
        """Peak bf16 FLOP/s where it is known."""
        if self.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.device)
        return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def prepare(launch: LaunchConfig) -> Hardware:
    """Picks device and precision and sets the CPU threads of this process.

    Raises StageError for a GPU that is not there and for more than one process.
    """
    if launch.processes * launch.nodes > 1:
        raise stage_error(
            "not_supported",
            "launch.processes",
            f"training runs in one process so far, not {launch.processes} on {launch.nodes} nodes",
            "set launch.processes and launch.nodes to 1",
        )
    gpu = torch.cuda.is_available()
    if launch.device == "gpu" and not gpu:
        raise stage_error(
            "no_gpu", "launch.device", "expected a CUDA GPU, found none", "set launch.device to auto or cpu"
        )
    device = torch.device("cuda" if gpu and launch.device != "cpu" else "cpu")
    if launch.threads is not None:
        torch.set_num_threads(launch.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    return Hardware(device, launch.precision == "bf16" or (launch.precision == "auto" and _native_bf16(device)))


def _native_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
