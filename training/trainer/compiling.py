"""Decide if torch.compile pays for itself in a run of known length, and give its compiler paths that it can handle.

The decision depends only on config, model and device, never on a clock: a continued run compiles the same modules as
before, and its weights are identical to the bit.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import stat
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch._inductor import cpp_builder
from torch._inductor.runtime.cache_dir_utils import cache_dir

from infra.launch.config import LaunchConfig
from training.core.hardware import Hardware

# FLOP/s of an uncompiled step: per core with AMX, per GPU. Measured on 2 cores and on an H200, like all the constants
# below (benchmarks/RESULTS.md).
_UNCOMPILED_FLOPS = {"cpu": 2e11, "cuda": 1.1e14}
# Share of an uncompiled step that compilation saves, and seconds that it costs: layers of one kind are compiled once.
_SAVED = 0.4
_COST_S = {"cpu": 35.0, "cuda": 15.0}
NO_PLAIN_PATHS = (
    "training continues uncompiled, and slower: the path of the Python environment or of TORCHINDUCTOR_CACHE_DIR has "
    "a space or another character that TorchInductor does not quote, and there is no temporary folder to put a link to "
    "it; set TMPDIR to a folder without such characters, or install into one"
)
_READ_AT_IMPORT = {"_HEADER_DIR", "_HEADER_LOCK_DIR"}
"""Paths among the temporary files that torch 2.15 determines when it is imported."""
# The gain must be this many times the cost.
_MARGIN = 2.0


def wants_compile(launch: LaunchConfig, hardware: Hardware, flops: float) -> bool:
    """Resolve `launch.compile`: auto compiles a training of `flops` in total if that saves twice the time it costs.

    On a GPU auto excludes models with sharded weights, since compiling them there is untested.
    """
    if launch.compile != "auto":
        return launch.compile == "on"
    on_cpu = hardware.device.type == "cpu"
    in_groups = max(*launch.shares_of_examples, launch.expert_parallel) > 1
    if in_groups or (launch.shards_weights and not on_cpu) or (on_cpu and not _has_compiler()):
        return False
    rate = _UNCOMPILED_FLOPS[hardware.device.type] * launch.ranks
    if on_cpu:
        rate *= torch.get_num_threads()
    return _SAVED * flops / rate > _MARGIN * _COST_S[hardware.device.type]


def plain_compiler_paths() -> bool:
    """Make TorchInductor pass only paths without quotes to its C++ compiler; return False if that is impossible.

    torch 2.7 joins the command without quotes and splits it again as a shell would: with an environment at
    `/home/ada/my models/.venv`, or a cache or TMPDIR in such a folder, g++ gets `models/.venv/…` as an argument. This
    function replaces such folders by links next to the temporary files. The links have the same names in every run, so
    compiled code is found again.
    """
    cache, given = _plain(cache_dir()), tempfile.gettempdir()
    temporary = _plain(given)
    if cache is None or temporary is None or None in map(_plain, _compiler_folders()):
        return False
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    os.environ["TMPDIR"] = tempfile.tempdir = temporary  # where newer versions of torch precompile headers
    if codecache := sys.modules.get("torch._inductor.codecache"):
        for name in _READ_AT_IMPORT & vars(codecache).keys():
            setattr(codecache, name, getattr(codecache, name).replace(given, temporary))
    cpp_builder.BuildOptionsBase.get_include_dirs = _plain_include_dirs  # type: ignore[method-assign]
    cpp_builder.BuildOptionsBase.get_libraries_dirs = _plain_libraries_dirs  # type: ignore[method-assign]
    return True


_include_dirs = cpp_builder.BuildOptionsBase.get_include_dirs
_libraries_dirs = cpp_builder.BuildOptionsBase.get_libraries_dirs


def _plain_include_dirs(self: cpp_builder.BuildOptionsBase) -> list[str]:
    return [_plain(folder) or folder for folder in _include_dirs(self)]


def _plain_libraries_dirs(self: cpp_builder.BuildOptionsBase) -> list[str]:
    return [_plain(folder) or folder for folder in _libraries_dirs(self)]


def _compiler_folders() -> list[str]:
    """Folders that occur in the command lines: headers and libraries of torch and Python."""
    options = cpp_builder.CppTorchOptions()
    return [*_include_dirs(options), *_libraries_dirs(options)]


def _plain(folder: str) -> str | None:
    """Return a name of the folder that needs no quotes, None if there is no place for one."""
    if shlex.quote(folder) == folder:
        return folder
    for parent in (tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp", "/dev/shm"):
        names = Path(parent) / f"stemma-{os.getuid()}-paths"
        if parent and shlex.quote(str(names)) == str(names) and _is_private(names):
            link = names / hashlib.sha256(folder.encode()).hexdigest()[:16]
            if not link.is_symlink():
                hidden = link.with_name(f".{link.name}.{os.getpid()}")
                hidden.symlink_to(folder)
                hidden.replace(link)
            return str(link)
    return None


def _is_private(folder: Path) -> bool:
    """Create a folder in which no other user can create links; return False if another user owns it or this fails."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _has_compiler() -> bool:
    """Return True if TorchInductor finds what it needs on a CPU: a C++ compiler and Python's headers."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return headers.exists() and any(map(shutil.which, ("g++", "clang++")))
