"""What the planner takes this machine and its stages for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.launch.config import LaunchConfig
from training.config import PretrainConfig, RewardModelConfig, RlhfConfig, SftConfig, TrainerConfig
from training.core.devices import Device
from training.planner.architecture import Architecture, of_preset
from training.planner.hardware import here
from training.planner.stages import needs, this_machine


def test_what_is_timed_beside_another_training_does_not_make_the_machine_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    def flops(timed: float) -> float:
        here.cpu.cache_clear()
        monkeypatch.setattr(here, "_probe", lambda: timed)
        return here.cpu().flops("fp32")

    try:
        assert [flops(timed) for timed in (2e10, 8e10, 1e9)] == [2e10, 8e10, 8e10]
        (tmp_path / ".cache" / "stemma" / "cpu.json").write_text('{"half a fi')
        assert [flops(timed) for timed in (1e9, 5e8)] == [1e9, 1e9]
    finally:
        here.cpu.cache_clear()


def test_answers_that_share_a_prompt_are_planned_with_it_once() -> None:
    config = RlhfConfig(
        rollout_prompts=64, minibatch_answers=64, answers_per_prompt=8, max_prompt_tokens=96, answer_max_tokens=32
    )
    arch = Architecture("small", 4, 256, 4, 4, 64, mlp_width=704, vocabulary=4096)

    def hours(share: str, device: Device) -> float:
        launch = LaunchConfig(share_prompts=share)  # type: ignore[arg-type]
        found = needs(config, arch, 128, launch, device, None).hours
        assert found is not None
        return found

    machine = this_machine(16e9, 1e11)
    assert hours("auto", machine) == hours("on", machine)
    assert hours("on", machine) == pytest.approx(hours("off", machine) * (32 + 96 / 8) / 128)


_QUICKSTART_RLOO: dict[str, Any] = {
    "rollout_prompts": 256, "minibatch_answers": 64, "answers_per_prompt": 8, "max_prompt_tokens": 96,
    "answer_max_tokens": 32, "text_coef": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("section", "length", "gigabytes"),
    [
        # Peaks of whole processes, of three builds each (benchmarks/log/planner.md).
        (PretrainConfig(global_batch_tokens=2048), 256, 1.2),
        (SftConfig(global_batch_examples=32), 160, 2.2),
        (RewardModelConfig(global_batch_pairs=32), 160, 3.0),
        (RlhfConfig(**_QUICKSTART_RLOO), 128, 4.3),
    ],
    ids=["pretrain", "sft", "reward_model", "rlhf"],
)
def test_a_process_on_a_cpu_is_planned_with_its_libraries(
    section: TrainerConfig, length: int, gigabytes: float
) -> None:
    """Within a fifth of the quickstart's."""
    arch = of_preset("qwen3-4m", 4096).with_size(tied=False)
    needed = needs(section, arch, length, LaunchConfig(), this_machine(24e9, 1e11), None)
    assert needed.memory_gb == pytest.approx(gigabytes, rel=0.2)
    assert needed.tensors_gb < needed.memory_gb / 2
