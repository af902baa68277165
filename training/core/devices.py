"""Accelerators as data: performance, power and price of each, with sources."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from infra.errors import ConfigError, Problem

GIB = 2**30
_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, eq=False)
class Device:
    """One accelerator.

    peak: dense FLOP/s by precision. memory_gib: as sold. bandwidth: memory bandwidth in bytes/s.
    link, network: bytes/s from one device to others in its node, and in other nodes, in one direction.
    node: devices per node. power_w: maximum power. price: rent in USD per hour, low and high. bought: purchase price.
    matmul: share of the peak that large matrix products reach.
    part: substring of the driver's name for it. sources: sources of these figures. capability: CUDA compute
    capability; None for a device without CUDA.
    """

    name: str
    title: str
    peak: dict[str, float] = field(repr=False)
    memory_gib: float
    bandwidth: float
    link: float
    network: float
    node: int
    power_w: float
    price: tuple[float, float]
    bought: float
    matmul: float
    sources: str
    part: str = ""
    capability: tuple[int, int] | None = None

    @property
    def memory(self) -> float:
        """Bytes that a training can use: the driver, CUDA's context and NCCL's buffers keep about 1.5 GiB."""
        return (self.memory_gib - 1.5) * GIB

    @property
    def hourly(self) -> float:
        """Rent in USD per hour: the geometric mean of low and high."""
        return (self.price[0] * self.price[1]) ** 0.5

    def flops(self, precision: str) -> float:
        """Peak FLOP/s; for a precision that the device lacks (bf16 on a V100), of fp16, else of fp32."""
        return self.peak.get(precision) or self.peak.get("fp16") or self.peak["fp32"]


def _of(*devices: Device) -> dict[str, Device]:
    return {device.name: device for device in devices}


# `matmul` of A100 and H100: fitted to llm-foundry's table, see training/planner/hardware/kernels.py; of the others the
# measured ceilings that "Machine Learning Engineering" lists (Bekman 2023-2026, "Maximum achievable matmul FLOPS"), or
# as the comment states. Rents: on-demand lists of 2022 to 2025, the lowest and the highest that is named.
DEVICES = _of(
    Device(
        "v100", "NVIDIA V100 SXM2 32 GB", {"fp32": 15.7e12, "fp16": 125e12}, 32, 0.9e12, 150e9, 6.25e9, 8, 300,
        (0.55, 3.06), 10_000, 0.62,
        "NVIDIA V100 data sheet (2020); rent: Lambda 0.55, AWS p3.16xlarge 24.48 / 8; matmul: Megatron-LM V1 reaches "
        "62.4 of 125 TFLOP/s in training", "V100", (7, 0),
    ),
    Device(
        "a100-40", "NVIDIA A100 SXM4 40 GB", {"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12},
        40, 1.555e12, 300e9, 12.5e9, 8, 400, (1.23, 4.10), 12_500, 0.85,
        "NVIDIA A100 data sheet (2021); rent: 1,400 to 4,600 USD for 6 days of 8 (Mosaic LLMs, Part 1), AWS p4d "
        "32.77 / 8; network: 800 Gbit/s a node (Mosaic LLMs, Part 1)", "A100-SXM4-40GB", (8, 0),
    ),
    Device(
        "a100-80", "NVIDIA A100 SXM4 80 GB", {"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12},
        80, 2.039e12, 300e9, 25e9, 8, 400, (1.79, 5.12), 15_000, 0.85,
        "NVIDIA A100 data sheet (2021); rent: Lambda 1.79, AWS p4de 40.97 / 8; bought: 15,000 (lecture on OPT); "
        "network: 1,600 Gbit/s a node (llm-foundry)", "A100", (8, 0),
    ),
    Device(
        "h100", "NVIDIA H100 SXM5 80 GB",
        {"fp32": 67e12, "tf32": 495e12, "fp16": 989e12, "bf16": 989e12, "fp8": 1979e12},
        80, 3.35e12, 450e9, 50e9, 8, 700, (1.99, 12.29), 30_000, 0.62,
        "NVIDIA H100 data sheet (2023); rent: 1.99 (RunPod, 2025), AWS p5.48xlarge 98.32 / 8 (2023)", "H100", (9, 0),
    ),
    Device(
        "h200", "NVIDIA H200 SXM 141 GB",
        {"fp32": 67e12, "tf32": 495e12, "fp16": 989e12, "bf16": 989e12, "fp8": 1979e12},
        141, 4.8e12, 450e9, 50e9, 8, 700, (2.5, 10.6), 32_000, 0.70,
        "NVIDIA H200 data sheet (2024); rent: 2.5 (marketplaces, 2025), AWS p5e 84.80 / 8; matmul: products of "
        "benchmarks/training/bench_kernels.py reach 674 to 720 TFLOP/s",
        "H200", (9, 0),
    ),
    Device(
        "b200", "NVIDIA B200 SXM 180 GB",
        {"fp32": 80e12, "tf32": 1125e12, "fp16": 2250e12, "bf16": 2250e12, "fp8": 4500e12},
        180, 7.7e12, 900e9, 50e9, 8, 1000, (2.99, 14.2), 40_000, 0.60,
        "NVIDIA DGX B200 data sheet (2024); bandwidth as the driver reports it (pytorch/ao, pull request 4002); rent: "
        "2.99 (marketplaces, 2025), AWS p6 113.93 / 8; matmul: not measured in print in training, taken near H100's",
        "B200", (10, 0),
    ),
    Device(
        "l40s", "NVIDIA L40S 48 GB", {"fp32": 91.6e12, "tf32": 183e12, "fp16": 362e12, "bf16": 362e12, "fp8": 733e12},
        48, 0.864e12, 32e9, 12.5e9, 8, 350, (0.79, 2.25), 8_000, 0.60,
        "NVIDIA L40S data sheet (2023); rent: RunPod 0.79, AWS g6e 2.25", "L40S", (8, 9),
    ),
    Device(
        "a10g", "NVIDIA A10G 24 GB", {"fp32": 31.5e12, "tf32": 35e12, "fp16": 70e12, "bf16": 70e12}, 24, 0.6e12, 16e9,
        6.25e9, 8, 300, (0.75, 2.04), 3_000, 0.80,
        "NVIDIA A10G data sheet (AWS g5, 2021); rent: AWS g5.xlarge to g5.48xlarge", "A10G", (8, 6),
    ),
    Device(
        "tpu-v3", "Google TPU v3", {"fp32": 15e12, "bf16": 123e12}, 32, 0.9e12, 82e9, 82e9, 1024, 262, (0.88, 2.2),
        8_000, 0.80, "Google Cloud TPU documentation; power: Jouppi et al. 2023, table 4; bought: not sold, a guess",
    ),
    Device(
        "tpu-v4", "Google TPU v4", {"fp32": 34e12, "bf16": 275e12}, 32, 1.228e12, 150e9, 150e9, 4096, 192,
        (0.97, 3.22), 8_000, 0.80, "Jouppi et al. 2023, tables 3 and 4; Google Cloud list; bought: not sold, a guess",
    ),
)  # fmt: skip


def find_device(name: str) -> Device:
    """Return the device with a name such as a100-40. Raises ConfigError `unknown_hardware` with the closest match."""
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    near = get_close_matches(name.lower(), DEVICES, n=1, cutoff=0.4)
    nearest = f"did you mean {near[0]}? " if near else ""
    known = ", ".join(DEVICES)
    raise ConfigError(
        Problem(
            "unknown_hardware",
            "--gpu",
            f"expected one of {known}, not {name!r}",
            f"{nearest}to add another device, add an entry with its data-sheet figures in training/core/devices.py",
        )
    )


def device_called(driver_name: str) -> Device | None:
    """Return the device with this name in its driver; None if it is unknown."""
    matching = [device for device in DEVICES.values() if device.part and device.part in driver_name]
    return max(matching, key=lambda device: len(device.part)) if matching else None


def gpu_of_this_machine() -> Device | None:
    """Return the first known GPU of this machine, by the names that its driver reports in /proc; None without one."""
    with suppress(OSError):
        for gpu in sorted(_DRIVER_FOLDER.iterdir()) if _DRIVER_FOLDER.is_dir() else ():
            text = (gpu / "information").read_text(encoding="utf8", errors="replace")
            model = next((line.partition(":")[2] for line in text.splitlines() if line.startswith("Model")), "")
            if device := device_called(model.strip()):
                return device
    return None


def peak_of(driver_name: str) -> float | None:
    """Dense bf16 peak in FLOP/s of the GPU with this name in its driver; None if it is unknown."""
    device = device_called(driver_name)
    return device.peak.get("bf16") if device else None
