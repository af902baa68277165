"""Any exception as a failure that a user can read: a code, what failed, what to do."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from traceback import format_exception

from infra.errors import Problem, StageError, StemmaError, disk_failure
from infra.installed import lock_problem
from infra.secrets import hide
from infra.store.store import disk_error

_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_REFUSED_BY_SQLITE = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}

# torch's own classes by name, so that a process that has not imported torch need not.
_DEVICE_MEMORY = {"OutOfMemoryError"}
_COLLECTIVE = {"DistBackendError", "DistNetworkError", "DistStoreError"}

_COLLECTIVE_TEXT = re.compile(
    r"NCCL (error|communicator was aborted)|nccl(UnhandledCuda|System|Internal|Remote)Error"
    r"|Watchdog caught collective operation timeout|Timed out waiting \d+ms for (send|recv)"
    r"|gloo.*(Connection (closed|reset) by peer|Broken pipe)|Gloo connectFullMesh failed",
    re.IGNORECASE | re.DOTALL,
)
_MISUSE_OF_COLLECTIVE = re.compile(r"nccl(InvalidUsage|InvalidArgument)", re.IGNORECASE)

_DEVICE_TEXT = re.compile(
    r"CUDA error|HIP error|CUDA driver error|CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"
    r"|CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)|fallen off the bus|GPU is lost|uncorrectable ECC",
    re.IGNORECASE,
)
# What the program asked for, not what the device did: an index out of range, a kernel that was not built for it.
_MISUSE_OF_DEVICE = re.compile(
    r"device-side assert|invalid (argument|configuration argument|device ordinal|device function|value|resource handle)"
    r"|no kernel image|no CUDA-capable device|not supported|driver version is insufficient|out of memory|PTX",
    re.IGNORECASE,
)
# The message of an exit with a code is left out: the worker ended by itself.
_LOADER_TEXT = re.compile(
    r"DataLoader worker \(pid(\(s\))? [\d, ]+\) (is killed by signal|exited unexpectedly(?! with))"
)
_HOST_MEMORY_TEXT = re.compile(r"DefaultCPUAllocator: can't allocate memory|Cannot allocate memory", re.IGNORECASE)


def failure_of(
    error: BaseException, where: str, root: Path, traceback: str = "--debug shows the traceback"
) -> StemmaError:
    """The error to report: the error itself if a message was written for it, else one that names it.

    where: the stage, or what else failed, for errors that name no place. root: the store's folder, or a part of it.
        traceback: where the user finds it.
    """
    if isinstance(error, StemmaError):
        return error
    if isinstance(error, OSError | sqlite3.OperationalError):
        disk = disk_error(error, where, root)
        if isinstance(disk, StemmaError):
            return disk
    if (failed := disk_failure(error, str(root))) is not None:
        return failed
    reason = _refusal(error)
    if reason is not None:
        path = str(getattr(error, "filename", None) or root)
        message = f"{where} has no permission to read or write it: {reason}"
        return StageError(Problem("not_permitted", path, message, f"let user {os.geteuid()} write under {root}"))
    if fault := _machine_fault(error, where):
        return StageError(fault)
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, ImportError) and (problem := lock_problem("not_installed", where, line)):
        return StageError(problem)
    return StageError(Problem("crashed", where, line, traceback))


def _refusal(error: BaseException) -> str | None:
    """Reason for which a file, or a database of the store, was refused, as on a disk that is read-only by now; None for
    other errors."""
    if isinstance(error, OSError) and error.errno in _REFUSED:
        return error.strerror
    is_refused = getattr(error, "sqlite_errorcode", 0) & 0xFF in _REFUSED_BY_SQLITE
    return str(error) if is_refused else None


def _machine_fault(error: BaseException, where: str) -> Problem | None:
    """The fault of a machine, as far as the exception that a library raised reports it; None for anything else."""
    for cause in _chain(error):
        names = {kind.__name__ for kind in type(cause).__mro__}
        line = f"{type(cause).__name__}: {cause}".splitlines()[0]
        log = f"stemma logs {where}"
        if names & _DEVICE_MEMORY or (isinstance(cause, RuntimeError) and "CUDA error: out of memory" in str(cause)):
            fix = "lower launch.microbatch, or set launch.recompute: full or launch.sharding: fsdp"
            return Problem("device_out_of_memory", where, line, f"{fix}; {log}")
        if isinstance(cause, MemoryError) or (
            isinstance(cause, RuntimeError | OSError) and _HOST_MEMORY_TEXT.search(str(cause))
        ):
            fix = "lower launch.microbatch, set launch.stages_at_once: 1, or use a larger machine"
            return Problem("out_of_memory", where, f"the machine ran out of memory: {line}", f"{fix}; {log}")
        if not isinstance(cause, RuntimeError):
            continue
        text = str(cause)
        lost_ranks = names & _COLLECTIVE or _COLLECTIVE_TEXT.search(text)
        if lost_ranks and not _MISUSE_OF_COLLECTIVE.search(text):
            return Problem("ranks_disconnected", where, f"ranks lost each other: {line}", f"run again; {log}")
        if _LOADER_TEXT.search(text):
            return Problem("killed", where, f"a process that loads its data was killed: {line}", f"run again; {log}")
        if _DEVICE_TEXT.search(text) and not _MISUSE_OF_DEVICE.search(text):
            fix = "run again; if it happens again, inspect the device (nvidia-smi -q, dmesg)"
            return Problem("device_fault", where, f"the device failed: {line}", f"{fix}; {log}")
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that it was raised from."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def traceback_of(error: BaseException) -> str:
    """The traceback of an exception, without the secrets that it may quote."""
    return hide("".join(format_exception(error)))
