"""Comparison of the installed packages with requirements.lock."""

from __future__ import annotations

import re
from importlib import metadata

from infra.errors import Problem
from infra.project import PROJECT

_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+) *\\?$", re.MULTILINE)
_SHOWN = 5
_OF_CUDA = re.compile(r"nvidia-|cuda-|triton$")
_FIX = "reinstall from the lock: remove .venv and run make .venv/.installed"


def differing_packages() -> list[str]:
    """Return each package that is missing or differs in version from requirements.lock, such as `torch 2.11.0 (lock:
    2.15.0)`.

    Packages that the lock has for some systems only are left out, and with a CPU-only torch also CUDA's libraries. The
    list is empty without a lock.
    """
    lock = PROJECT / "requirements.lock"
    if not lock.is_file():
        return []
    installed = {
        _name(distribution.metadata["Name"] or ""): distribution.version for distribution in metadata.distributions()
    }
    without_cuda = installed.get("torch", "").endswith("+cpu")
    differing = []
    for name, version in _PINNED.findall(lock.read_text(encoding="utf8")):
        installed_version = installed.get(_name(name))
        if installed_version is None and without_cuda and _OF_CUDA.match(_name(name)):
            continue
        # A build of the same version for a device has a local part: 2.15.0+cpu.
        if installed_version is None or installed_version.partition("+")[0] != version.partition("+")[0]:
            differing.append(f"{name} {installed_version or 'is missing'} (lock: {version})")
    return differing


def lock_problem(code: str, where: str, message: str = "") -> Problem | None:
    """Return the problem of an environment that differs from the lock, None for one that does not.

    Args:
        code: of the problem.
        where: a dotted key or stage, or empty.
        message: the consequence.
    """
    if not (packages := differing_packages()):
        return None
    suffix = f" and {len(packages) - _SHOWN:,} more" if len(packages) > _SHOWN else ""
    text = f"{len(packages):,} installed packages differ from requirements.lock: {', '.join(packages[:_SHOWN])}{suffix}"
    return Problem(code, where, f"{message}; {text}" if message else text, _FIX)


def _name(name: str) -> str:
    """Return the normalized name of a package, as in an index."""
    return re.sub(r"[-_.]+", "-", name).lower()
