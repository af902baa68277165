"""Hardware of a stage: device, precision and threads, from `launch:`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from infra.errors import StageError, stage_error
from infra.launch.config import LaunchConfig
from infra.launch.devices.gpus import DriverAnswer, ask_driver, describe, gpu_problems, has_gpu
from training.core import ranks
from training.core.devices import peak_of
from training.core.links import try_links

_PROBE_SIZE = 1024
_PROBE_S = 0.3


@dataclass(frozen=True)
class Hardware:
    """One device of one process.

    bf16: True if forward passes run under bf16 autocast; weights and optimizer state stay in fp32.
    fp16: the same for fp16, with a dynamic loss scale.
    attention: the requested attention kernel.
    share_prompts: True if a common prefix of sequences is computed once.
    """

    device: torch.device
    bf16: bool
    attention: str = "auto"
    fp16: bool = False
    share_prompts: bool = True

    @property
    def compute(self) -> torch.dtype:
        """Dtype of matrix products."""
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, self.compute, enabled=self.compute != torch.float32)

    def loader_workers(self, launch: LaunchConfig) -> int:
        """Number of processes that prefetch data: `launch.loader_workers`, or its default for this device."""
        if launch.loader_workers is not None:
            return launch.loader_workers
        return 2 if self.device.type == "cuda" else 0

    def peak_flops(self) -> float | None:
        """Peak FLOP/s of the device: from the data sheet for a GPU (bf16), measured with matrix products for a CPU."""
        if self.device.type == "cpu":
            return _measured_peak(self.compute)
        return peak_of(torch.cuda.get_device_name(self.device))


@cache
def _measured_peak(dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of many matrix products with all threads of this process."""
    matrix = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype)
    best = math.inf
    stop = time.perf_counter() + _PROBE_S
    while (began := time.perf_counter()) < stop:
        torch.mm(matrix, matrix)
        best = min(best, time.perf_counter() - began)
    return 2 * _PROBE_SIZE**3 / best


def _nobody_hears(_name: str, _message: str) -> None:
    pass


def prepare(
    launch: LaunchConfig, *, shares_examples: bool = False, say: Callable[[str, str], None] = _nobody_hears
) -> Hardware:
    """Choose device and precision, set the CPU threads of this process, join the other ranks, and test the network
    between nodes.

    shares_examples: True if the stage supports `launch.tensor_parallel`, `context_parallel`, `pipeline_parallel` and
        `expert_parallel`; in other stages every rank has a part of a batch and the whole model.
    say: receives the findings on the first rank (name of an event, message).

    Raises StageError for a GPU that is missing, or that the installed torch cannot use.
    """
    ranks.share_examples(*(launch.shares_of_examples if shares_examples else (1, 1, 1)))
    ranks.share_experts(launch.expert_parallel if shares_examples else 1)
    device = _device(launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.threads is not None:
        torch.set_num_threads(launch.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    if ranks.world_size() > 1 or launch.offload:
        ranks.join(device)
        try_links(device, say)
    precision = precision_of(launch, device)
    shares = launch.share_prompts == "on" or (launch.share_prompts == "auto" and device.type == "cpu")
    return Hardware(device, precision == "bf16", launch.attention, precision == "fp16", shares)


def _device(launch: LaunchConfig) -> torch.device:
    """Return the device of this rank. A GPU that torch cannot use is an error even if none was requested: a training
    intended for it would take weeks on the CPU."""
    if launch.device == "cpu":
        return torch.device("cpu")
    requires_gpu = launch.device == "gpu"
    if not has_gpu() and not torch.cuda.is_available():
        if requires_gpu:
            raise stage_error(
                "no_gpu", "launch.device", "expected a CUDA GPU, found none", "set launch.device to auto or cpu"
            )
        return torch.device("cpu")
    answer = describe(free=False)
    if problems := gpu_problems(answer, DriverAnswer() if answer.usable else ask_driver(), requested=requires_gpu):
        raise StageError(*problems)
    return torch.device("cuda", ranks.local_rank()) if answer.usable else torch.device("cpu")


def precision_of(launch: LaunchConfig, device: torch.device) -> Literal["bf16", "fp16", "fp32"]:
    """Return the precision of a training on a device: bf16 if none is requested and the device supports it. With `fp8`
    this is the precision of everything that is not in FP8."""
    if launch.precision == "auto" or launch.precision == "fp8":
        return "bf16" if native_bf16(device) else "fp32"
    return launch.precision


def native_bf16(device: torch.device) -> bool:
    """Return True if the device supports bf16 natively: elsewhere bf16 products are 100 times slower than fp32's."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
