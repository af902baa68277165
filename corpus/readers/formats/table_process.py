"""Rows of Parquet and Arrow files, read in a process that may die: a damaged file crashes pyarrow, or fills the memory.

It is started at the first such file and serves its starter until that ends. What it sends has been checked in full, so
that the starter can make Python values of it.
"""

from __future__ import annotations

import atexit
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO, Any

import pyarrow as pa

from corpus.documents.quarantine import Rejected
from corpus.readers.formats.table_batches import Bad, Rows, TableSource, read_table, row_group_bytes
from corpus.readers.record import Record
from infra.errors import StageError, stage_error
from infra.io.sources import Place

MEMORY_BYTES = 1_000_000_000
"""Memory that reading a file may take besides eight times the largest document: a batch or page with its compressed
form."""
_LENGTH = struct.Struct("<q")


def read_rows(table: TableSource) -> Iterator[Record | Rejected]:
    """The rows of a Parquet or Arrow file; those of which no Python values can be made are put aside.

    Raises StageError: `missing_source`, `corrupt_file`, `too_big`, `wrong_field` naming the existing columns.
    """
    for item in table_rows(table):
        if isinstance(item, Bad):
            yield Rejected(str(table.file), item.row, item.reason)
            continue
        try:
            values = item.batch.to_pylist()
        except Exception:  # of some value: no UTF-8, a date past 9999, … Reading the rows finds it.
            values = None
        for number in range(item.batch.num_rows):
            row = item.first + number + 1
            try:
                value = values[number] if values is not None else _value_of(item.batch.slice(number, 1))
            except Exception as error:
                yield Rejected(str(table.file), row, f"not readable: {error}")
            else:
                yield Record(table.file, row, value)


def _value_of(batch: Any) -> dict[str, Any]:
    [value] = batch.to_pylist()
    return dict(value)


def table_rows(table: TableSource) -> Iterator[Rows | Bad]:
    """The rows of a file as `read_table` gives them, out of the other process, as record batches.

    Raises StageError: what `read_table` raises; `corrupt_file` where that process dies of the file, `killed` where
    something else ended it.
    """
    done = 0
    try:
        for item in _ask(read_table, table, table.max_bytes):
            if isinstance(item, Bad):
                done = max(done, item.row)
                yield item
            else:
                done = item.end
                yield item._replace(batch=pa.ipc.open_stream(item.batch).read_next_batch())
    except _DiedError as died:
        raise _crash_error(died.code, table.file, f"after row {done:,}") from None


def group_bytes(file: Place) -> list[int]:
    """Return the result of `row_group_bytes` from the other process. Raises StageError as `table_rows` does."""
    try:
        [sizes] = _ask(_sizes, file, 0)
    except _DiedError as died:
        raise _crash_error(died.code, file, "at its end, where it lists its row groups") from None
    return list(sizes)


def _sizes(file: Place) -> Iterator[list[int]]:
    yield row_group_bytes(file)


_process: subprocess.Popen[bytes] | None = None
_environment: dict[str, str] = {}


class _DiedError(Exception):
    def __init__(self, code: int) -> None:
        self.code = code


def _ask(function: Callable[[Any], Iterator[Any]], argument: Any, max_bytes: int) -> Iterator[Any]:
    """Yield the items of `function(argument)` in the other process. Raises its errors as StageError, and _DiedError."""
    process = _started()
    assert process.stdin is not None and process.stdout is not None
    is_over = False
    try:
        with suppress(BrokenPipeError):  # its answer reports the error
            _send(process.stdin, (function, argument, max_bytes))
        while (message := _receive(process.stdout)) is not None:
            kind, item = message
            is_over = kind != "item"
            if kind == "end":
                return
            if kind == "error":
                raise StageError(*item)
            yield item
        raise _DiedError(process.wait())
    finally:
        if not is_over:
            # It died, or who asked has gone away in the middle of the answer.
            _end()


def _crash_error(code: int, file: Place, location: str) -> StageError:
    if code == -signal.SIGKILL:
        return stage_error(
            "killed",
            str(file),
            "the process that read it was killed; usually because the machine ran out of memory",
            "fewer workers need less",
        )
    cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return stage_error(
        "corrupt_file", str(file), f"reading it crashed {location} ({cause}): the file is damaged", "download it again"
    )


def _started() -> subprocess.Popen[bytes]:
    global _process, _environment
    # Credentials and servers of object stores are in the environment, and may change in the life of a long process.
    environment = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "STEMMA_"))}
    if _process is None or _process.poll() is not None or _environment != environment:
        _end()
        _environment = environment
        _process = subprocess.Popen(
            [sys.executable, "-m", "corpus.readers.formats.table_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(_end)
    return _process


def _end() -> None:
    global _process
    if _process is not None:
        _process.kill()
        _process.communicate()
        _process = None


def _send(pipe: IO[bytes], message: Any) -> None:
    content = pickle.dumps(message, protocol=5)
    pipe.write(_LENGTH.pack(len(content)))
    pipe.write(content)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    """The next message; None where the other end is gone."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    content = pipe.read(length)
    return pickle.loads(content) if len(content) == length else None


def _serve() -> None:
    """Answer its starter until that closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=1 << 20)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Other allocators keep or reserve more than they use, and the limit counts that too.
    pa.set_memory_pool(pa.system_memory_pool())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used_bytes = _data_bytes()
    while (question := _receive(questions)) is not None:
        function, argument, max_bytes = question
        _limit_memory(used_bytes + MEMORY_BYTES + 8 * max_bytes)
        try:
            for item in function(argument):
                _send(answers, ("item", item))
            _send(answers, ("end", None))
        except StageError as error:
            _send(answers, ("error", error.problems))


def _data_bytes() -> int:
    """Memory that this process has for itself."""
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmData"))


def _limit_memory(limit: int) -> None:
    """Limit this process to `limit` bytes of memory; above them pyarrow raises MemoryError."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    if hard_limit == resource.RLIM_INFINITY or limit < hard_limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))


if __name__ == "__main__":
    _serve()
