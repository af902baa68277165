"""GPUs that the installed torch cannot use are named before anything fails: with stand-ins for what torch and
nvidia-smi answer, and the torch of this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.launch.devices import gpus
from infra.launch.devices.gpus import (
    DriverAnswer,
    Gpu,
    TorchAnswer,
    ask_driver,
    gpu_problems,
    memory_problems,
    supports,
)
from training.core.hardware import prepare
from training.planner.plan import plan, request

GIB = 2**30
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 79 * GIB, 78 * GIB)
B200 = Gpu("NVIDIA B200", (10, 0), 179 * GIB, 178 * GIB)
OLD = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
TORCH = TorchAnswer("2.7.0+cu126", "12.6", OLD, True, gpus=(H100,))
DRIVER = DriverAnswer("570.86.15", present=True)


def codes(answer: TorchAnswer, driver: DriverAnswer = DRIVER, asked: bool = False) -> list[str]:
    return [problem.code for problem in gpu_problems(answer, driver, requested=asked)]


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ("sm_80 sm_86 sm_90", (8, 9), True),
        ("sm_80 sm_90", (8, 6), True),
        ("sm_86 sm_90", (8, 0), False),
        ("sm_80 sm_90", (7, 5), False),
        ("sm_80 sm_90", (10, 0), False),
        ("sm_80 sm_90 compute_90", (12, 0), True),
        ("compute_90", (8, 9), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("sm_100 sm_120", (12, 1), True),
        ("gfx90a", (9, 0), False),
    ],
)
def test_kernels_run_where_cuda_says_that_they_do(architectures: str, capability: tuple[int, int], runs: bool) -> None:
    assert supports(architectures.split(), capability) == runs


def test_a_gpu_without_kernels_is_named_with_what_the_wheel_has_and_what_to_install() -> None:
    assert not codes(TORCH)
    (problem,) = gpu_problems(replace(TORCH, gpus=(H100, B200)), DRIVER, requested=False)
    assert problem.code == "gpu_not_supported" and problem.path == "launch.device"
    assert problem.message.startswith(
        "GPU 1, NVIDIA B200, has compute capability 10.0; the installed torch 2.7.0+cu126"
    )
    assert "sm_90 only" in problem.message and "CUDA 12.8 or later" in problem.fix
    volta = Gpu("Tesla V100-SXM2-32GB", (7, 0), 32 * GIB)
    (problem,) = gpu_problems(
        replace(TORCH, cuda="13.2", architectures=("sm_75",), gpus=(volta,)), DRIVER, requested=True
    )
    assert "CUDA 9.0 to 12.x" in problem.fix


def test_a_torch_that_cannot_open_the_gpu_is_explained_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    closed = replace(TORCH, usable=False, gpus=(), cuda="13.2", message="The NVIDIA driver on your system is too old")
    (problem,) = gpu_problems(closed, DRIVER, requested=False)
    assert problem.code == "driver_too_old"
    assert "the driver is 570.86.15" in problem.message and "needs 580.65.06 or later" in problem.message
    mismatch = DriverAnswer(message="Failed to initialize NVML: Driver/library version mismatch", present=True)
    (problem,) = gpu_problems(closed, mismatch, requested=False)
    assert problem.code == "gpu_unusable" and problem.message.endswith("Driver/library version mismatch")
    newer = replace(DRIVER, version="580.95.05")
    assert codes(closed, newer) == ["gpu_unusable"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert codes(closed, newer) == ["no_gpu"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not codes(closed, newer), "by which people ask for the CPU"
    assert codes(closed, newer, asked=True) == ["no_gpu"]


def test_a_build_for_cpus_is_a_choice_unless_a_gpu_is_asked_for() -> None:
    built_for_cpus = replace(TORCH, torch="2.15.0+cpu", cuda=None, architectures=(), usable=False, gpus=())
    assert not codes(built_for_cpus)
    assert codes(built_for_cpus, asked=True) == ["torch_without_cuda"]
    for_rocm = replace(built_for_cpus, usable=True, gpus=(Gpu("AMD Instinct MI300X", (9, 4), 192 * GIB),))
    assert not codes(for_rocm, asked=True)
    without_nvidia = replace(TORCH, usable=False, gpus=())
    assert not codes(without_nvidia, DriverAnswer()), "/dev/dxg and /dev/kfd are there without a GPU of NVIDIA"


def test_a_gpu_that_another_process_fills_is_named_with_that_process() -> None:
    holder = replace(DRIVER, processes=("pid 4711 (python): 60.2 GiB",))
    assert not memory_problems((H100,), holder, 40 * GIB, "pretrain")
    full = replace(H100, free=12 * GIB)
    (problem,) = memory_problems((H100, full), holder, 40 * GIB, "pretrain")
    assert (problem.code, problem.path) == ("gpu_in_use", "pretrain")
    assert "needs about 40.0 GiB on each GPU, and GPU 1" in problem.message and "12.0 of 79.0 GiB" in problem.message
    assert problem.message.endswith("in use: pid 4711 (python): 60.2 GiB")
    assert not memory_problems((full,), holder, 8 * GIB, "pretrain")
    assert not memory_problems((H100,), DRIVER, 90 * GIB, "pretrain"), (
        "too small, but free: a plan misses by some percent"
    )
    (problem,) = memory_problems((replace(H100, free=None),), DRIVER, GIB, "sft")
    assert "another process may hold it exclusively" in problem.message


def test_libraries_of_another_cuda_and_packages_of_two_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "site-packages" / "nvidia" / "cublas" / "lib" / "libcublas.so.12"
    library.parent.mkdir(parents=True)
    library.touch()
    mapped = [str(library), "/usr/local/cuda-12.2/lib64/libcublas.so.12", "/usr/lib/libcuda.so.1", "[heap]"]
    packages = tmp_path / "site-packages"
    replaced = tuple(gpus.replaced_libraries(mapped, packages))
    assert replaced == ("/usr/local/cuda-12.2/lib64/libcublas.so.12",)
    assert not list(gpus.replaced_libraries(mapped, tmp_path / "none")), "torch was built for the system's"
    (problem,) = gpu_problems(replace(TORCH, other_libraries=replaced), DRIVER, requested=False)
    assert problem.code == "other_cuda" and "LD_LIBRARY_PATH" in problem.fix

    for name in ("nvidia_cudnn_cu12-9.5", "nvidia_cudnn_cu13-9.20", "nvidia_curand_cu12-10.3"):
        (packages / f"{name}.dist-info").mkdir()
        stem, version = name.split("-")
        text = f"Metadata-Version: 2.1\nName: {stem.replace('_', '-')}\nVersion: {version}\n"
        (packages / f"{name}.dist-info" / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(packages)
    (problem,) = gpu_problems(TORCH, DRIVER, requested=False)
    assert problem.code == "two_cudas"
    assert problem.message.endswith("nvidia-cudnn-cu12, nvidia-cudnn-cu13")


def test_nvidia_smi_is_asked_for_the_driver_and_what_uses_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_driver() == DriverAnswer()

    def answers(text: str) -> DriverAnswer:
        smi.write_text(f"#!/bin/sh\n{text}\n")
        smi.chmod(0o755)
        return ask_driver()

    driver = answers(
        'case "$1" in *driver*) echo 570.86.15; echo 570.86.15;; *) echo "4711, /opt/conda/bin/python, 61644";; esac'
    )
    assert driver == DriverAnswer("570.86.15", "", ("pid 4711 (python): 60.2 GiB",), True)
    driver = answers("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert (driver.version, driver.message) == ("", "Failed to initialize NVML: Driver/library version mismatch")
    assert answers("exit 9").message == "nvidia-smi ended with exit code 9"


def test_a_stage_refuses_a_gpu_that_torch_has_no_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.core.hardware.has_gpu", lambda: True)
    monkeypatch.setattr("training.core.hardware.describe", lambda free: replace(TORCH, gpus=(B200,)))
    for device in ("auto", "gpu"):
        with pytest.raises(StageError, match=r"has compute capability 10\.0"):
            prepare(LaunchConfig(device=device))
    assert prepare(LaunchConfig(device="cpu")).device == torch.device("cpu")


def test_torch_is_asked_in_a_process_of_its_own() -> None:
    answer = gpus.ask_torch()
    assert answer is not None and answer == gpus.describe()
    version, cuda = gpus.installed_cuda()
    assert answer.torch.partition("+")[0] == version.partition("+")[0] and answer.cuda == cuda


def test_a_plan_names_the_torch_that_its_hardware_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(gpu: str, cuda: str | None) -> str:
        monkeypatch.setattr("training.planner.plan.installed_cuda", lambda: ("2.7.0", cuda))
        lines = plan(request(preset="gpt-125m", tokens=1e9, gpu=gpu))["assumptions"]
        return next((text for text in lines if text.startswith("torch: ")), "")

    b200 = "torch: built for CUDA 12.8 or later (sm_100)"
    assert line("b200", "12.6") == f"{b200}; NOT installed: torch 2.7.0 for CUDA 12.6"
    assert line("b200", "13.2") == f"{b200}; installed: torch 2.7.0 for CUDA 13.2"
    assert line("h100", None) == "torch: built for CUDA 11.8 or later (sm_90); none for CUDA is installed here"
    assert "CUDA 9.0 to 12.x (sm_70); NOT installed" in line("v100", "13.2")
    assert not line("tpu-v4", "13.2")
