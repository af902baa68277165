"""Check that the installed torch can use the GPUs of this machine; if not, report the reason and what to install.

A wheel without kernels for the device, or a driver that is older than the wheel's CUDA, fails at the first matrix
product, after everything that precedes the training. This module compares the device's compute capability with the
list that torch was built for, and explains torch's answer by the driver's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from infra.errors import Problem
from infra.io.json import parse_own_json

DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""The oldest Linux driver of each CUDA ("CUDA Toolkit Release Notes", table of minor version compatibility)."""
FIRST_CUDA = {
    (7, 0): "9.0", (7, 2): "9.2", (7, 5): "10.0", (8, 0): "11.0", (8, 6): "11.1", (8, 7): "11.4", (8, 9): "11.8",
    (9, 0): "11.8", (10, 0): "12.8", (10, 3): "12.9", (11, 0): "13.0", (12, 0): "12.8", (12, 1): "12.9",
}  # fmt: skip
"""The first CUDA whose compiler knows a compute capability (release notes of each)."""
LAST_CUDA = {(5, 0): 12, (5, 2): 12, (6, 0): 12, (6, 1): 12, (7, 0): 12, (7, 2): 12}
"""The last major version of CUDA that compiles for Maxwell, Pascal and Volta: 13.0 dropped them."""

_NVIDIA = ("/dev/nvidiactl", "/dev/nvidia0")
_DEVICES = (*_NVIDIA, "/dev/kfd", "/dev/dxg")
_HIDES_ALL = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES with which users ask for the CPU."""
_ASK_S = 120.0
_IN_USE = 0.9
"""Share of a GPU's memory. If less than this is free, another process uses the rest: CUDA itself takes less."""
_MIB = 2**20
_ON_CPU = "or set launch.device to cpu"
_PROGRAM = "import json; from infra.launch.devices import gpus; print(json.dumps(gpus.describe().as_json()))"
_PART = re.compile(r"^nvidia-(?P<part>[a-z0-9-]+)-cu(?P<major>\d+)$")
_LIBRARY = re.compile(r"/lib(?:cudart|cublas|cublasLt|cudnn|cufft|curand|cusparse|cusolver|nccl|nvrtc)\.so[.\d]*$")


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it.

    Attributes:
        name: as the driver gives it.
        capability: its compute capability, (9, 0) for sm_90.
        memory: bytes in all.
        free: bytes that are free now; None if that was not asked for, or if another process holds the GPU exclusively.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    free: int | None = None


@dataclass(frozen=True)
class TorchAnswer:
    """The installed torch and the GPUs that it sees.

    Attributes:
        torch: its version.
        cuda: the CUDA that it was built for; None for a CPU-only build.
        architectures: those that it has kernels for, such as `sm_90`, and `compute_90` for code that the driver
            compiles.
        usable: True if it can open a GPU.
        message: the last warning that it gave while it looked for GPUs.
        gpus: those that it sees, in its order.
        other_libraries: CUDA's libraries that were loaded in place of those that torch came with.
    """

    torch: str
    cuda: str | None
    architectures: tuple[str, ...]
    usable: bool
    message: str = ""
    gpus: tuple[Gpu, ...] = ()
    other_libraries: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class DriverAnswer:
    """Answer of nvidia-smi.

    Attributes:
        version: of the driver; empty if nvidia-smi is not installed or does not reach it.
        message: its error.
        processes: those that hold memory on the GPUs, such as `pid 4711 (python): 30.1 GiB`.
        present: True if this machine has an NVIDIA GPU; /dev/kfd and /dev/dxg also exist without one.
    """

    version: str = ""
    message: str = ""
    processes: tuple[str, ...] = ()
    present: bool = False


def has_gpu() -> bool:
    """Return True if this machine has a GPU device file; no library that would open the GPU is used."""
    return any(map(os.path.exists, _DEVICES))


def describe(free: bool = True) -> TorchAnswer:
    """Return what the torch of this process sees.

    Args:
        free: True asks for free memory, which opens every GPU.
    """
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()  # get_arch_list is empty without a usable GPU
    gpus = []
    for number in range(torch.cuda.device_count() if usable else 0):
        properties = torch.cuda.get_device_properties(number)
        gpus.append(
            Gpu(
                properties.name,
                (properties.major, properties.minor),
                properties.total_memory,
                _free(number) if free else None,
            )
        )
    return TorchAnswer(
        torch.__version__,
        torch.version.cuda,
        tuple((flags or "").split()),
        usable,
        " ".join(str(caught[-1].message).split()) if caught else "",
        tuple(gpus),
        tuple(replaced_libraries(_mapped(), Path(torch.__file__).parents[1])),
    )


def ask_torch() -> TorchAnswer | None:
    """Return what torch sees, asked in a separate process, since looking opens the GPUs and loads CUDA.

    None if torch cannot be imported, which is reported where torch is needed.
    """
    answer = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True,
        text=True,
        timeout=_ASK_S,
        cwd=Path(__file__).parents[3],
        check=False,
    )
    if answer.returncode:
        return None
    report = parse_own_json(answer.stdout.splitlines()[-1])
    gpus = tuple(Gpu(gpu["name"], tuple(gpu["capability"]), gpu["memory"], gpu["free"]) for gpu in report["gpus"])
    lists = {name: tuple(report[name]) for name in ("architectures", "other_libraries")}
    return TorchAnswer(**{**report, **lists, "gpus": gpus})


def ask_driver() -> DriverAnswer:
    """Return nvidia-smi's report on the driver and on the processes that use its GPUs."""
    present = any(map(os.path.exists, _NVIDIA))
    try:
        versions = _smi("--query-gpu=driver_version")
        if versions.returncode:
            message = " ".join((versions.stdout + versions.stderr).split())
            message = message or f"nvidia-smi ended with exit code {versions.returncode}"
            return DriverAnswer(message=message, present=present)
        processes = _smi("--query-compute-apps=pid,process_name,used_memory").stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return DriverAnswer(message="" if isinstance(error, FileNotFoundError) else str(error), present=present)
    version = next(iter(versions.stdout.split()), "")
    return DriverAnswer(version, "", tuple(_processes(processes)), present or bool(version))


def gpu_problems(answer: TorchAnswer, driver: DriverAnswer, *, requested: bool) -> list[Problem]:
    """Return the reasons why torch cannot use the GPUs of this machine.

    Args:
        requested: True if the config asks for a GPU (`launch.device: gpu`). Otherwise a CPU-only build of torch and
            GPUs that CUDA_VISIBLE_DEVICES hides count as a choice.
    """
    key = "launch.device"
    problems = list(_two_cudas(key))
    if answer.other_libraries:
        message = f"{', '.join(answer.other_libraries)} replaced the libraries that torch was installed with"
        problems.append(
            Problem("other_cuda", key, message, "take the other CUDA's folders out of LD_LIBRARY_PATH and LD_PRELOAD")
        )
    if answer.cuda is None:
        if requested and not answer.usable:  # one for ROCm has no CUDA and is usable
            message = f"expected a torch with CUDA, but the installed torch {answer.torch} is a CPU-only build"
            problems.append(Problem("torch_without_cuda", key, message, f"install a build for CUDA, {_ON_CPU}"))
        return problems
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDES_ALL
    if not answer.usable and (requested or (driver.present and not is_hidden)):
        problems.append(_unusable(answer, driver, key))
    for number, gpu in enumerate(answer.gpus):
        if not supports(answer.architectures, gpu.capability):
            message = (
                f"GPU {number}, {gpu.name}, has compute capability {_dotted(gpu.capability)}; the installed torch "
                f"{answer.torch} for CUDA {answer.cuda} has kernels for {', '.join(answer.architectures)} only"
            )
            fix = f"install a torch for {needed_cuda(gpu.capability)}, {_ON_CPU}"
            problems.append(Problem("gpu_not_supported", key, message, fix))
    return problems


def memory_problems(gpus: Sequence[Gpu], driver: DriverAnswer, needed: float, stage: str) -> list[Problem]:
    """Return a problem for each GPU of a stage that another process has filled.

    Args:
        gpus: those that the stage will use.
        needed: bytes on each, as planned.
        stage: its dotted key.

    A GPU that is too small even when no process uses it is no problem here: plans are off by a few percent.
    """
    problems = []
    for number, gpu in enumerate(gpus):
        if gpu.free is None:
            message = f"GPU {number}, {gpu.name}, cannot be opened: another process may hold it exclusively"
        elif gpu.free < min(needed, _IN_USE * gpu.memory):
            message = (
                f"needs about {_gib(needed)} GiB on each GPU, and GPU {number}, {gpu.name}, has {_gib(gpu.free)} of "
                f"{_gib(gpu.memory)} GiB free"
            )
        else:
            continue
        holders = f"; in use: {', '.join(driver.processes)}" if driver.processes else ""
        fix = "wait for the other processes or end them, choose other GPUs by CUDA_VISIBLE_DEVICES"
        problems.append(Problem("gpu_in_use", stage, f"{message}{holders}", f"{fix}, {_ON_CPU}"))
    return problems


def supports(architectures: Iterable[str], capability: tuple[int, int]) -> bool:
    """Return True if a list of architectures has kernels for a device.

    `sm_86` runs on 8.6 and on later minor versions of 8; `sm_90a` on 9.0 alone; `sm_100f` on 10.0 and later minor
    versions; `compute_86` is compiled by the driver for everything from 8.6 on ("CUDA C++ Programming Guide", binary
    and PTX compatibility).
    """
    for architecture in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if match is None:
            continue
        kind, major, minor, variant = match[1], int(match[2]), int(match[3]), match[4]
        if (major, minor) == capability:
            return True
        if variant == "a":
            continue
        if kind == "compute" and not variant and (major, minor) <= capability:
            return True
        if major == capability[0] and minor <= capability[1]:
            return True
    return False


def needed_cuda(capability: tuple[int, int]) -> str:
    """Return a description of the versions of CUDA that compile for a compute capability."""
    if capability in LAST_CUDA:
        first = f"{FIRST_CUDA[capability]} to " if capability in FIRST_CUDA else ""
        return f"CUDA {first}{LAST_CUDA[capability]}.x"
    supported = [candidate for candidate in FIRST_CUDA if candidate <= capability]
    if not supported:
        return "an earlier CUDA, which no torch of today is built for"
    return f"CUDA {FIRST_CUDA[max(supported)]} or later"


def compiles_for(cuda: str, capability: tuple[int, int]) -> bool:
    """Return True if a version of CUDA compiles for a compute capability.

    Only the build of torch itself lists the architectures that it has kernels for, see `supports`.
    """
    supported = [candidate for candidate in FIRST_CUDA if candidate <= capability]
    if capability in LAST_CUDA and _number(cuda)[0] > LAST_CUDA[capability]:
        return False
    return bool(supported) and _number(cuda) >= _number(FIRST_CUDA[max(supported)])


def installed_cuda() -> tuple[str, str | None]:
    """Return the versions of the installed torch and of the CUDA that it is built for, without importing it.

    The first is empty without torch; the second is None without torch or for a build without CUDA.
    """
    try:
        distribution = metadata.distribution("torch")
        text = Path(str(distribution.locate_file("torch/version.py"))).read_text(encoding="utf8")
    except (metadata.PackageNotFoundError, OSError):
        return "", None
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)", text, re.MULTILINE)
    return distribution.version, match and match[1]


def replaced_libraries(mapped: Iterable[str], packages: Path) -> Iterator[str]:
    """Yield the loaded CUDA libraries that the wheels installed with torch also contain, in another place.

    Args:
        mapped: paths of the files that the process has loaded.
        packages: folder of the installed packages. If they contain no CUDA libraries, torch was built for the
            system's.
    """
    packaged_names = {path.name for path in packages.glob("nvidia/*/lib/lib*.so*")}
    for path in sorted({path for path in mapped if _LIBRARY.search(path)}):
        if Path(path).name in packaged_names and not Path(path).is_relative_to(packages):
            yield path


def _unusable(answer: TorchAnswer, driver: DriverAnswer, key: str) -> Problem:
    assert answer.cuda is not None
    major = int(answer.cuda.partition(".")[0])
    oldest = DRIVERS.get(major)
    if oldest and driver.version and _number(driver.version) < _number(oldest):
        return Problem(
            "driver_too_old",
            key,
            f"the driver is {driver.version}; the installed torch {answer.torch} for CUDA {answer.cuda} needs "
            f"{oldest} or later",
            f"install a newer driver, or a torch that is built for an earlier CUDA, {_ON_CPU}",
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not driver.message:
        message = f"torch sees no GPU, with CUDA_VISIBLE_DEVICES={hidden!r}"
        return Problem("no_gpu", key, message, f"set it to the GPUs to use, {_ON_CPU}")
    reason = driver.message or answer.message or "torch reports no reason"
    return Problem(
        "gpu_unusable",
        key,
        f"this machine has a GPU that the installed torch {answer.torch} for CUDA {answer.cuda} cannot open: {reason}",
        f"check that nvidia-smi works here (and that a container was started with its GPUs), {_ON_CPU}",
    )


def _two_cudas(key: str) -> Iterator[Problem]:
    """Yield a problem if packages of two versions of CUDA write the same files.

    The package that was installed last has overwritten the files of the other.
    """
    majors: dict[str, set[str]] = defaultdict(set)
    for distribution in metadata.distributions():
        if match := _PART.match((distribution.metadata["Name"] or "").lower()):
            majors[match["part"]].add(match["major"])
    if duplicated := {part: sorted(versions) for part, versions in majors.items() if len(versions) > 1}:
        names = [f"nvidia-{part}-cu{version}" for part, versions in sorted(duplicated.items()) for version in versions]
        message = f"packages of two versions of CUDA overwrite each other's files: {', '.join(names)}"
        yield Problem("two_cudas", key, message, "remove the environment and reinstall it from the lock")


def _smi(query: str) -> subprocess.CompletedProcess[str]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)


def _processes(text: str) -> Iterator[str]:
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and parts[0].isdigit():
            memory = f": {int(parts[2]) * _MIB / 2**30:.1f} GiB" if parts[2].isdigit() else ""
            yield f"pid {parts[0]} ({Path(parts[1]).name}){memory}"


def _free(number: int) -> int | None:
    import torch

    try:
        return int(torch.cuda.mem_get_info(number)[0])
    except RuntimeError:  # in exclusive mode, by another process
        return None


def _mapped() -> Iterator[str]:
    try:
        text = Path("/proc/self/maps").read_text(encoding="utf8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6:
            yield fields[5]


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"
