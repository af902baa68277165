"""The layer between a run and its disk, clock and network (layer.c), compiled on this machine and ordered by a file."""

from __future__ import annotations

import errno
import mmap
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("layer.c")
_ORDERS = struct.Struct("<iiiiq1024s1024s1024s")
FULL, READ_ONLY, BROKEN = errno.ENOSPC, errno.EROFS, errno.EIO


def missing() -> str:
    """Return why there is no layer on this machine; empty if there can be one."""
    return "" if shutil.which("cc") else "no C compiler (cc) is installed, which builds the layer that fails"


class FaultLayer:
    """Orders for all processes that `variables` were given to. folder: whose files fail, and are noted."""

    def __init__(self, home: Path, folder: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._library = home / "layer.so"
        if not self._library.exists():
            unfinished = home / "layer.unfinished.so"
            command = ["cc", "-O2", "-shared", "-fPIC", "-w", "-o", str(unfinished), str(SOURCE), "-ldl"]
            subprocess.run(command, check=True, capture_output=True)
            unfinished.rename(self._library)
        self.folder, self.notes, self.graves = folder.absolute(), home / "notes", home / "graves"
        self.graves.mkdir(exist_ok=True)
        self._path = home / "orders"
        self._path.write_bytes(bytes(_ORDERS.size))
        with open(self._path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _ORDERS.size)
        self.order()

    @property
    def variables(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "STEMMA_DRILL_LAYER": str(self._path)}

    def order(
        self, error: int = 0, *, reads: bool = False, records: bool = False, cut: bool = False, clock_s: int = 0
    ) -> None:
        """Fail from now on as ordered, or work as usual.

        Args:
            error: the errno of each change below the folder.
            reads: reading fails with it too.
            records: note what a power loss would take.
            cut: no connection over IP works.
            clock_s: seconds by which the clock on the wall is wrong.
        """
        paths = (str(path).encode() for path in (self.folder, self.notes.absolute(), self.graves.absolute()))
        self._map[:] = _ORDERS.pack(error, reads, records, cut, clock_s, *paths)
