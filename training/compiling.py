"""Whether torch.compile pays for itself in a run of known length.

The answer follows from config, model and device alone and never from a clock: a run that is continued compiles what it
compiled before, and its weights stay the same to the bit.
"""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import torch

from infra.launch.config import LaunchConfig
from training.hardware import Hardware

# What an uncompiled step reaches, in FLOP/s: per core with AMX, per GPU. The first is measured (benchmarks/RESULTS.md,
# training), the second a cautious guess.
_UNCOMPILED_FLOPS = {"cpu": 2e11, "cuda": 1.5e14}
# Share of an uncompiled step that compiling saves, and seconds that it costs: measured at 4 and 8 layers on 2 cores.
_SAVED = 0.3
_COST_S, _COST_S_PER_LAYER = 10.0, 3.0
# The gain must be this many times the cost.
_MARGIN = 2.0


def wants_compile(launch: LaunchConfig, hardware: Hardware, layers: int, flops: float) -> bool:
    """`launch.compile`, where auto compiles a training of `flops` in all if that saves twice the time that it costs.

    Models sharded by FSDP are not compiled: two ranks that did so gave no answer within minutes.
    """
    if launch.compile != "auto":
        return launch.compile == "on"
    if launch.sharding == "fsdp" or (hardware.device.type == "cpu" and not _has_compiler()):
        return False
    rate = _UNCOMPILED_FLOPS[hardware.device.type] * launch.ranks
    if hardware.device.type == "cpu":
        rate *= torch.get_num_threads()
    return _SAVED * flops / rate > _MARGIN * (_COST_S + _COST_S_PER_LAYER * layers)


def _has_compiler() -> bool:
    """What TorchInductor needs on a CPU: a C++ compiler and Python's headers."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return headers.exists() and any(map(shutil.which, ("g++", "clang++")))
