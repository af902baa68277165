"""`launch:`, the only part of a config that speaks of machines. None of it bears on identity."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from infra.config import Config


class LaunchConfig(Config):
    processes: int = Field(1, ge=1)
    """Training processes a node, one a device."""
    nodes: int = Field(1, ge=1)
    """Machines that train together."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto takes a GPU where there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto is bf16 where the device computes in it natively, else fp32."""
    microbatch: int | Literal["auto"] = "auto"
    """Sequences a device computes at once; gradients accumulate to the global batch."""
    threads: int | None = Field(None, ge=1)
    """CPU threads a process; by default the machine's cores shared out among the processes."""
    stages_at_once: int = Field(2, ge=1)
    """Stages of one pipeline that may run side by side where the DAG allows it."""
