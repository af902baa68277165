"""Speed, MFU and time left from a clock and a token count; whether compiling pays."""

from __future__ import annotations

import pytest
import torch

from infra.launch.config import LaunchConfig
from training.core.hardware import Hardware
from training.trainer.compiling import wants_compile
from training.trainer.metrics import Throughput, clock_time

CPU = Hardware(torch.device("cpu"), bf16=False)


def _after(seconds: list[float], *, batches: int = 100, peak: float | None = 4000.0) -> Throughput:
    """Batches of 10 tokens, done at these seconds, of a model of 6 FLOPs a token."""
    times = iter(seconds)
    throughput = Throughput(batches, 6.0, peak, clock=lambda: next(times))
    for batch in range(1, len(seconds) + 1):
        throughput.mark(batch, 10 * batch)
    return throughput


def test_speed_leaves_the_first_batch_out() -> None:
    throughput = _after([50.0, 51.0, 52.0, 53.0])
    values = throughput.values()
    assert throughput.mean() == values["train/tokens_per_s"] == pytest.approx(10)
    assert values["train/time_left_s"] == pytest.approx(96)
    assert values["train/mfu"] == throughput.mfu(10) == pytest.approx(60 / 4000)
    assert values["train/memory_gb"] > 0.01


def test_what_is_told_live_follows_the_last_seconds() -> None:
    slow_then_fast = [float(second) for second in range(0, 100, 10)] + [90.0 + second for second in range(1, 41)]
    throughput = _after(slow_then_fast)
    assert throughput.values()["train/tokens_per_s"] == pytest.approx(10)
    assert throughput.left_s() == pytest.approx(50)
    assert throughput.mean() == pytest.approx(490 / 130)


def test_nothing_is_claimed_that_is_not_known() -> None:
    assert set(_after([1.0]).values()) == {"train/memory_gb"}
    assert _after([1.0]).mean() == 0
    assert "train/mfu" not in _after([1.0, 2.0], peak=None).values()


def test_the_peak_of_a_cpu_is_what_its_matrix_products_reach() -> None:
    peak = CPU.peak_flops()
    assert peak == CPU.peak_flops()  # measured once
    assert peak is not None and 1e9 < peak < 1e15


@pytest.mark.parametrize(("seconds", "text"), [(49.6, "50 s"), (720, "12 min"), (12_000, "3 h 20 min")])
def test_time_left_reads_as_people_say_it(seconds: float, text: str) -> None:
    assert clock_time(seconds) == text


def test_only_a_long_run_is_compiled() -> None:
    launch = LaunchConfig(device="cpu")
    assert not wants_compile(launch, CPU, flops=1e13)
    assert wants_compile(launch, CPU, flops=1e18)
    assert not wants_compile(LaunchConfig(compile="off"), CPU, flops=1e18)
    assert wants_compile(LaunchConfig(compile="on"), CPU, flops=1.0)
