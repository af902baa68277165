"""Measured and planned step time and memory of a training, written to the artifact's aux/."""

from __future__ import annotations

import json
import resource
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from infra.launch.config import LaunchConfig
from training.config import RlhfConfig, TrainerConfig
from training.config.alignment import NO_REWARD_MODELS
from training.core.devices import DEVICES, Device, device_called
from training.core.plan import Plan
from training.planner.architecture import of_transformers
from training.planner.hardware.here import cpu
from training.planner.stages import needs

PLANNED = "aux/planned.json"
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class MemoryWatch:
    """Peak memory of a training from now on: on a GPU of this rank's tensors, on a CPU of its process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError):  # not allowed everywhere
            _CLEAR.write_text("5")  # the peak counts from now

    def peak(self) -> int:
        """Return the peak of memory, in bytes."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return _resident("VmHWM")


def _resident(name: str) -> int:
    """Return the bytes in a line of the process's status; without such a file, its peak memory."""
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def planned(
    config: TrainerConfig,
    model: nn.Module,
    plan: Plan,
    launch: LaunchConfig,
    device: torch.device,
    inputs: Collection[str] = (),
) -> dict[str, Any] | None:
    """Return the estimate of `stemma check` for this training on the current machine: {"device", "devices", "step_s",
    "step_s_low", "step_s_high", "memory_gb", "memory_limit_gb", "microbatch", "batches"}.

    None for a device or a model that the planner does not know.

    Args:
        inputs: inputs of the stage, by name; reward models and judge are assumed to be as large as the model.
    """
    hardware = _device(launch, device)
    network = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if hardware is None or network is None:
        return None
    arch = of_transformers(network.config.to_dict(), getattr(network.config, "vocab_size", None))
    if arch is None:
        return None
    length, tokens = _length(config, plan.batch_tokens // plan.batch_size), plan.epoch_batches * plan.batch_tokens
    scorers = [arch.parameters for name in inputs if name == "judge" or name not in NO_REWARD_MODELS]
    needed = needs(config, arch, length, launch, hardware, tokens, scorers)
    if needed.hours is None or needed.hours_low is None or needed.hours_high is None:
        return None
    return {
        "device": needed.device,
        "devices": needed.devices,
        "batches": plan.batches,
        "step_s": needed.hours * 3600 / plan.batches,
        "step_s_low": needed.hours_low * 3600 / plan.batches,
        "step_s_high": needed.hours_high * 3600 / plan.batches,
        "memory_gb": needed.memory_gb,
        "memory_limit_gb": needed.memory_limit_gb,
        "microbatch": needed.microbatch,
    }


def write_measured(
    out_dir: Path, expected: Mapping[str, Any], step_s: float, memory_bytes: int, microbatch: int
) -> None:
    """Write aux/planned.json: {"planned": result of `planned`, "measured": {"step_s", "memory_gb", "microbatch"}}.

    Args:
        step_s: mean of all steps of this process but its first, with evaluation and checkpoints; 0 if it did no
            other.
    """
    path = out_dir / PLANNED
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = {"step_s": step_s, "memory_gb": memory_bytes / 1e9, "microbatch": microbatch}
    path.write_text(json.dumps({"planned": expected, "measured": measured}, indent=1) + "\n", encoding="utf8")


def _device(launch: LaunchConfig, device: torch.device) -> Device | None:
    if device.type == "cuda":
        return device_called(torch.cuda.get_device_name(device)) or DEVICES.get(launch.hardware or "")
    return cpu()


def _length(config: TrainerConfig, packed: int) -> int:
    """Tokens of a sequence, as `stemma check` has them."""
    if isinstance(config, RlhfConfig):
        return config.max_prompt_tokens + config.answer_max_tokens
    return int(getattr(config, "max_length", packed))
