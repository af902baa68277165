"""What the planner takes this machine and its stages for."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.launch.config import LaunchConfig
from training.config import RlhfConfig
from training.core.devices import Device
from training.planner.architecture import Architecture
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
