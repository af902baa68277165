"""Samples of GPUs become metrics of a stage: with stand-ins for NVML and nvidia-smi, and the driver of this machine if
it has one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from infra.launch.config import LaunchConfig
from infra.launch.devices import gpu_usage
from infra.launch.devices.gpu_usage import open_reader, sampled, visible
from infra.launch.devices.gpus import has_gpu
from infra.run import Run, open_journal, read_journal

SMI = """#!/bin/sh
echo "0, GPU-aaaa, 93, 40000, 540.25, 61"
echo "1, GPU-bbbb, [N/A], 8, [Not Supported], 35"
"""


class StandIn(ModuleType):
    """NVML's answers for two GPUs, of which the second does not report its power."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    class Answer:
        def __init__(self, **values: int) -> None:
            self.__dict__ |= values

    def nvmlInit(self) -> None: ...  # noqa: N802 - NVML's name

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - NVML's name
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802 - NVML's name
        return number

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:  # noqa: N802 - NVML's name
        return b"GPU-" + b"ab"[handle : handle + 1] * 4

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Answer:  # noqa: N802 - NVML's name
        return self.Answer(gpu=93 - handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Answer:  # noqa: N802 - NVML's name
        return self.Answer(used=61_500_000_000)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802 - NVML's name
        if handle:
            raise self.NVMLError("not supported")
        return 540_250

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802 - NVML's name
        return 61


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def put_nvidia_smi(folder: Path, text: str) -> None:
    (folder / "nvidia-smi").write_text(text)
    (folder / "nvidia-smi").chmod(0o755)


def test_nvml_is_asked_first_and_what_it_does_not_know_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_nvidia_smi(tmp_path, "#!/bin/sh\nexit 9\n")
    monkeypatch.setitem(sys.modules, "pynvml", StandIn("pynvml"))
    reader = open_reader()
    assert reader is not None
    first, second = reader()
    assert first.uuid == "GPU-aaaa" and second.uuid == "GPU-bbbb"
    assert first.figures == {"utilisation_percent": 93, "memory_gb": 61.5, "power_w": 540.25, "temperature_c": 61}
    assert second.figures == {"utilisation_percent": 92, "memory_gb": 61.5, "temperature_c": 61}


def test_without_nvml_nvidia_smi_answers(tmp_path: Path) -> None:
    put_nvidia_smi(tmp_path, SMI)
    reader = open_reader()
    assert reader is not None
    first, second = reader()
    assert first.figures == pytest.approx(
        {"utilisation_percent": 93, "memory_gb": 41.943, "power_w": 540.25, "temperature_c": 61}, rel=1e-4
    )
    assert second.figures == pytest.approx({"memory_gb": 0.008389, "temperature_c": 35}, rel=1e-3)
    assert [sample.index for sample in visible(reader(), "1")] == [1]
    assert [sample.index for sample in visible(reader(), "GPU-aa")] == [0]
    assert not visible(reader(), "-1") and not visible(reader(), "")


@pytest.mark.parametrize("smi", ["", "#!/bin/sh\necho broken >&2; exit 9\n"])
def test_a_machine_without_gpus_has_no_samples_and_no_noise(
    smi: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if smi:
        put_nvidia_smi(tmp_path, smi)
    threads = threading.active_count()
    with (
        open_journal(tmp_path / "journal.jsonl") as journal,
        sampled(Run(tmp_path / "work", journal=journal), LaunchConfig()),
    ):
        assert threading.active_count() == threads
    assert not read_journal(tmp_path / "journal.jsonl")
    assert capfd.readouterr() == ("", "")


def test_samples_are_metrics_at_the_step_that_training_has_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", StandIn("pynvml"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(gpu_usage, "EVERY_S", 0.001)
    recorded = threading.Event()

    class Watched(Run):
        def metrics(self, values, step=None):  # type: ignore[no-untyped-def]
            super().metrics(values, step)
            if step == 7 and "gpu/0/power_w" in values:
                recorded.set()

    with open_journal(tmp_path / "journal.jsonl") as journal:
        run = Watched(tmp_path / "work", journal=journal)
        with sampled(run, LaunchConfig()):
            run.metric("train/loss", 3.0, 7)
            assert recorded.wait(60)
    lines = [line for line in read_journal(tmp_path / "journal.jsonl") if "gpu/0/power_w" in line["values"]]
    assert lines[-1]["step"] == 7 and lines[-1]["values"]["gpu/0/memory_gb"] == 61.5
    assert not any("gpu/1" in name for line in lines for name in line["values"]), "hidden from the stage"


def test_a_stage_on_the_cpu_is_not_sampled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", StandIn("pynvml"))
    with (
        open_journal(tmp_path / "journal.jsonl") as journal,
        sampled(Run(tmp_path / "work", journal=journal), LaunchConfig(device="cpu")),
    ):
        pass
    assert not read_journal(tmp_path / "journal.jsonl")


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="this machine has no GPU")
def test_the_driver_of_this_machine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    reader = open_reader()
    assert reader is not None
    expected = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines()
    samples = reader()
    assert len(samples) == len(expected), json.dumps([sample.figures for sample in samples])
    assert all(sample.figures["memory_gb"] >= 0 and sample.figures["temperature_c"] > 0 for sample in samples)
