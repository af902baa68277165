"""The plan against steps that an H200 took (benchmarks/bench_gpu.py; benchmarks/RESULTS.md, "On a GPU")."""

from __future__ import annotations

from typing import Any

import pytest

from infra.launch.config import LaunchConfig
from training.config import PretrainConfig
from training.planner.architecture import of_preset
from training.planner.devices import DEVICES
from training.planner.memory import FRAGMENTED
from training.planner.stages import needs

LENGTH, VOCABULARY, BATCHES = 2048, 50_304, 100


@pytest.mark.parametrize(
    ("preset", "sequences", "microbatch", "launch", "seconds", "gigabytes"),
    [
        ("gpt-1.3b", 64, 16, {}, 2.095, 80.5),
        ("tinyllama-1.1b", 64, 16, {}, 1.846, 69.1),
        ("tinyllama-1.1b", 64, 16, {"precision": "fp8"}, 1.562, 53.2),  # the time is fitted
        ("llama-2-7b", 16, 4, {"recompute": "full"}, 3.122, 117.4),
    ],
)
def test_steps_of_an_h200_are_planned(
    preset: str, sequences: int, microbatch: int, launch: dict[str, Any], seconds: float, gigabytes: float
) -> None:
    config = PretrainConfig.model_validate(
        {
            "model": {"preset": preset, "positions": LENGTH, "vocab_multiple": 128},
            "duration": f"{BATCHES} batches",
            "global_batch_tokens": sequences * LENGTH,
        }
    )
    how = LaunchConfig.model_validate({"microbatch": microbatch, "compile": "on", "trainer": "native", **launch})
    told = needs(config, of_preset(preset, VOCABULARY), LENGTH, how, DEVICES["h200"], None)
    assert told.hours is not None
    assert told.hours * 3600 / BATCHES == pytest.approx(seconds, rel=0.05)
    # What tensors took; the plan has more for what the allocator cannot use.
    assert told.memory_gb / (1 + FRAGMENTED) == pytest.approx(gigabytes, rel=0.015)
