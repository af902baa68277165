"""The process inside a sandbox that confines and watches the one in which foreign code runs.

    python -I -S -B process.py KIND PROGRAM

`training.sandbox.runner` starts this file by its path and defines KIND. stdin holds a question (marshalled); the file
PROGRAM defines `main(question, answer)`, where `answer` is the descriptor of a pipe, and runs in the confined process.
Only the standard library is imported, and of it only what takes a few milliseconds.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import select
import sys
from typing import Any, NoReturn

WATCH_MS = 20
"""Milliseconds between two checks of the memory and the files of all processes together."""
_SIGKILL = 9
_UID = 0x7000_0000
"""The first of the user ids that code gets where root started it: above the ids in use on any machine."""

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_CLONE_NEW = _NEWNS | 0x2000000 | _NEWUTS | _NEWIPC | _NEWUSER | _NEWPID | _NEWNET
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE, _DETACH = 1, 2, 4, 32, 4096, 16384, 1 << 18, 2
_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _CAPBSET_DROP, _NO_NEW_PRIVS = 1, 4, 22, 24, 38

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    kind, program = sys.argv[1:]
    with open(program, encoding="utf8") as file:
        source = file.read()
    question = marshal.load(sys.stdin.buffer)
    answer = os.dup(1)
    _libc.prctl(_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if kind != "bubblewrap" and os.getppid() != question["parent"]:
        return  # the parent ended before the line above
    if kind == "namespaces":
        _enter(question)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    # Otherwise code of the same user could write into this process. Its own process can be inspected again.
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    child = os.fork()
    if child == 0:
        _libc.prctl(_PDEATHSIG, _SIGKILL, 0, 0, 0)
        _confine(question, kind != "none")
        sys.path += question["packages"]
        sys.argv = ["answer"]
        scope: dict[str, Any] = {"__name__": "program"}
        exec(compile(source, program, "exec"), scope)
        scope["main"](question, answer)
        os._exit(0)
    os.close(answer)
    if kind == "none":
        os.waitpid(child, 0)
    else:
        _watch(child, question)
    os._exit(0)


def _enter(question: dict[str, Any]) -> None:
    """Return in the first process of namespaces with their own root; this one ends with it."""
    uid, gid = os.geteuid(), os.getegid()
    spaces = _NEWNS | _NEWPID | _NEWIPC | _NEWUTS | (0 if question["network"] else _NEWNET)
    # Root needs no namespace of users, and gives the code another user instead.
    if uid != 0 or _libc.unshare(spaces) != 0:
        _check(_libc.unshare(_NEWUSER | spaces), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    alive, holding = os.pipe()
    child = os.fork()
    if child != 0:
        os.waitpid(child, 0)
        os._exit(0)
    os.close(holding)
    _libc.prctl(_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if select.select([alive], [], [], 0)[0]:
        os._exit(0)  # the other ended before the line above
    os.close(alive)
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, "size=1m,nr_inodes=1k,mode=755")
    os.mkdir("/tmp/old")
    _check(_libc.pivot_root(b"/tmp", b"/tmp/old"), "pivot_root")
    os.chdir("/")
    os.mkdir("/dev")
    for name in question["devices"]:
        _bind(f"/old/dev/{name}", f"/dev/{name}")
    limits = f"nr_inodes={question['files'] + 1},mode=1777"
    for path, size in question["folders"]:
        os.mkdir(path)
        _mount("tmpfs", path, "tmpfs", _NOSUID | _NODEV, f"size={size},{limits}")
    # After the folders: an environment may be in one of them.
    for path in question["readable"]:
        _bind(f"/old{path}", path)
        _read_only(path)
    for path, target in question["links"]:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    os.mkdir("/proc")
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV | 8)
    _check(_libc.umount2(b"/old", _DETACH), "umount")
    os.rmdir("/old")
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.chdir("/tmp")


def _bind(source: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, _BIND | _REC)


def _read_only(path: str) -> None:
    """Make all mounts at and below the path read-only: mount_setattr, which has this number on all processors."""
    attributes = (ctypes.c_uint64 * 4)(_RDONLY | _NOSUID | _NODEV, 0, 0, 0)
    code = _libc.syscall(ctypes.c_long(442), -100, path.encode(), 0x8000, ctypes.byref(attributes), ctypes.c_size_t(32))
    _check(code, f"mount_setattr {path}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind, data)]
    _check(_libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _check(code: int, what: str) -> None:
    if code != 0:
        _give_up(f"{what}: {os.strerror(ctypes.get_errno())}")


def _give_up(why: str) -> NoReturn:
    os.write(2, f"{why}\n".encode())
    os._exit(1)


def _confine(question: dict[str, Any], in_sandbox: bool) -> None:
    """Remove the privileges and resources that foreign code must not have from this process."""
    limits = [
        (resource.RLIMIT_AS, question["memory"]),
        (resource.RLIMIT_FSIZE, question["file_bytes"]),
        (resource.RLIMIT_CPU, question["cpu_s"]),
        (resource.RLIMIT_CORE, 0),
    ]
    if in_sandbox:
        limits += [(resource.RLIMIT_NPROC, question["processes"]), (resource.RLIMIT_NOFILE, question["descriptors"])]
        for capability in range(64):
            _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
        if os.geteuid() == 0:
            # Limits of processes do not apply to root, so this becomes a user that owns nothing.
            number = _UID + question["user"]
            try:
                os.setgroups([])
                os.setresgid(number, number, number)
                os.setresuid(number, number, number)
            except OSError:
                _give_up("root could not switch to another user")
    for limit, most in limits:
        resource.setrlimit(limit, (most, most))
    _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)
    _check(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if in_sandbox:
        header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        _check(_libc.capset(ctypes.byref(header), ctypes.byref(none)), "capset")
        _forbid_calls(question["calls"])


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _forbid_calls(calls: dict[str, Any]) -> None:
    """Refuse system calls that no answer needs and that affect more than this sandbox: seccomp-bpf.

    Args:
        calls: of this processor: its `architecture`, the numbers that are `refused`, and those of `clone`, `clone3`
            and `socket`, which are refused in part.
    """
    load, equal, above, bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    refuse, unknown, allow, kill = 0x50000 | 1, 0x50000 | 38, 0x7FFF0000, 0x80000000
    number, architecture, first = 0, 4, 16  # offsets in the record that a filter reads
    unix, ipv4, ipv6 = 1, 2, 10
    program = [
        (load, 0, 0, architecture),
        (equal, 1, 0, calls["architecture"]),
        (give, 0, 0, kill),
        (load, 0, 0, number),
        (above, 0, 1, 0x40000000),  # x32, whose numbers are others
        (give, 0, 0, refuse),
        *(line for call in calls["refused"] for line in ((equal, 0, 1, call), (give, 0, 0, refuse))),
        (equal, 0, 1, calls["clone3"]),  # a filter cannot read its flags; libraries fall back to clone
        (give, 0, 0, unknown),
        (equal, 0, 4, calls["clone"]),
        (load, 0, 0, first),
        (bits, 0, 1, _CLONE_NEW),
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
        (equal, 0, 5, calls["socket"]),
        (load, 0, 0, first),
        (equal, 3, 0, unix),
        (equal, 2, 0, ipv4),
        (equal, 1, 0, ipv6),
        (give, 0, 0, refuse),  # such as those of virtual machines, which no namespace separates
        (give, 0, 0, allow),
    ]
    data = b"".join(
        code.to_bytes(2, sys.byteorder) + bytes((yes, no)) + value.to_bytes(4, sys.byteorder)
        for code, yes, no, value in program
    )
    _check(_libc.prctl(_SET_SECCOMP, 2, ctypes.byref(_Filter(len(program), data)), 0, 0), "seccomp")


def _watch(child: int, question: dict[str, Any]) -> None:
    """Return when the child ended, or when all processes together exceed a limit; the remaining ones end with this
    process, which is the first of its namespace or, with bubblewrap, the one for which the first waits."""
    ended = select.poll()
    ended.register(os.pidfd_open(child), select.POLLIN)
    while not ended.poll(WATCH_MS):
        if _memory(question["memory"]) > question["memory"]:
            return
        for path, _ in question["folders"]:
            folder = os.statvfs(path)
            if folder.f_files - folder.f_ffree > question["files"]:
                return
        while os.waitpid(-1, os.WNOHANG)[0] not in (0, child):  # orphans
            pass


def _memory(most: int) -> int:
    """Return the bytes that the processes of this namespace use; shared memory counts once if the sum is above the
    limit."""
    numbers = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    used = sum(
        _of(f"/proc/{name}/statm", lambda text: int(text.split()[1]) * resource.getpagesize()) for name in numbers
    )
    if used <= most:
        return used
    return sum(
        _of(f"/proc/{name}/smaps_rollup", lambda text: 1024 * int(text.partition("\nPss:")[2].split()[0]))
        or _of(f"/proc/{name}/statm", lambda text: int(text.split()[1]) * resource.getpagesize())
        for name in numbers
    )


def _of(path: str, read: Any) -> int:
    try:
        with open(path) as file:
            return int(read(file.read()))
    except (OSError, IndexError, ValueError):
        return 0  # ended, or not to be read


if __name__ == "__main__":
    main()
