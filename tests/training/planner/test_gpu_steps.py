"""The plan against steps that an H200 and an H100 took (benchmarks/training/bench_gpu.py; benchmarks/RESULTS.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.launch.config import LaunchConfig
from training.config import PretrainConfig
from training.core.devices import DEVICES
from training.planner.architecture import of_preset
from training.planner.memory import FRAGMENTED
from training.planner.stages import needs, of_model

LENGTH, VOCABULARY, BATCHES = 2048, 50_304, 100
CONFIGS = Path(__file__).parents[3] / "configs"


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


def test_the_pretraining_of_small_yaml_is_planned_as_it_ran_on_an_h100() -> None:
    config = PretrainConfig.model_validate(yaml.safe_load((CONFIGS / "small.yaml").read_text())["pretrain"])
    arch = of_model(config.model, 16_384)
    assert arch is not None
    told = needs(config, arch, 1024, LaunchConfig(compile="on"), DEVICES["h100"], None)
    assert told.microbatch == 128
    assert told.hours is not None
    # So small a model waits for kernels to start and for Muon, which the plan does not know.
    assert told.hours * 3600 / 7629 == pytest.approx(0.167, rel=0.2)
    assert told.memory_gb / (1 + FRAGMENTED) == pytest.approx(33.7, rel=0.03)
