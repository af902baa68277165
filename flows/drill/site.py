"""The scratch store of a drill: commands in it, and all of its processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flows.drill.layer import FaultLayer
from flows.drill.watch import MARK, Watch, marked, wait_for
from infra.io.json import parse_own_json
from infra.project import python_path
from infra.store.left_memory import MEMORY

ORPHANS_GONE_S = 20.0
"""Seconds in which processes that lost their parent must have ended."""
COMMAND_S = 600.0


@dataclass
class Command:
    """A command that was started, and its output."""

    process: subprocess.Popen[bytes]
    output: Path
    messages: Path

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def document(self) -> dict[str, Any] | None:
        try:
            content = parse_own_json(self.output.read_bytes())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def stderr(self) -> str:
        return self.messages.read_text(encoding="utf8", errors="replace")


class Site:
    """A store in `folder`, with a folder for temporary files and a mark on each of its processes."""

    def __init__(
        self,
        folder: Path,
        config: Path,
        settings: Sequence[str],
        layer: FaultLayer | None = None,
        servers: bool = False,
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.root, self.temporary, self._said = folder / "store", folder / "tmp", folder / "said"
        for made in (self.temporary, self._said):
            made.mkdir(parents=True)
        self.mark, self.layer, self.servers = f"{os.getpid()}-{folder.name}", layer, servers
        self.config = [str(config), *(word for pair in settings for word in ("--set", pair))]
        self.watch = Watch(self.root)
        self.memory_before = {path.name for path in MEMORY.iterdir()} if MEMORY.is_dir() else set()
        self.pids: set[int] = set()
        self._number = 0
        self.run: Command | None = None
        self.others: list[Command] = []

    def environment(self, *, layered: bool = True) -> dict[str, str]:
        layer = self.layer.variables if self.layer and layered else {}
        return {
            **os.environ,
            **layer,
            "PYTHONPATH": python_path(),
            "TMPDIR": str(self.temporary),
            MARK: self.mark,
        }

    def start(self, *words: str, layered: bool = True) -> Command:
        self._number += 1
        output, messages = (self._said / f"{self._number:03}.{kind}" for kind in ("json", "err"))
        with open(output, "wb") as out, open(messages, "wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "cli.main", *words, "--root", str(self.root), "--json"],
                env=self.environment(layered=layered),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        return Command(process, output, messages)

    def ask(self, *words: str) -> dict[str, Any] | None:
        """The document of a command that ends by itself."""
        command = self.start(*words, layered=False)
        with suppress(subprocess.TimeoutExpired):
            command.process.wait(COMMAND_S)
        if command.code is None:
            command.process.kill()
        return command.document()

    def start_run(self) -> Command:
        if self.servers:
            self.ask("up")
        for progress in self.watch.stages.values():
            progress.status = "waiting" if progress.status == "running" else progress.status
        self.run = self.start("run", *self.config)
        return self.run

    def look(self) -> None:
        """Read the journals, and remember the processes, which may leave something."""
        self.watch.look()
        if self.run and self.run.code is None:
            with suppress(psutil.Error):
                family = psutil.Process(self.run.process.pid)
                self.pids |= {family.pid, *(child.pid for child in family.children(recursive=True))}

    def orphans(self) -> list[str]:
        """The processes that outlive a run that has ended: neither the relay nor services of `up`."""
        left: list[psutil.Process] = []

        def have_ended() -> bool:
            left[:] = [process for process in marked(self.mark) if not self._may_stay(process)]
            return not left

        wait_for(have_ended, ORPHANS_GONE_S)
        names = []
        for process in left:
            with suppress(psutil.Error):
                names.append(f"{process.pid} {' '.join(process.cmdline())[-80:]}")
        return names

    def _may_stay(self, process: psutil.Process) -> bool:
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            return True
        return self.servers or "infra.lineage.relay" in command

    def relay_ended(self) -> bool:
        return not any("infra.lineage.relay" in " ".join(_words(process)) for process in marked(self.mark))

    def kill_everything(self) -> None:
        """Kill all processes of the drill, as a power loss does."""
        while everyone := marked(self.mark):
            for process in everyone:
                with suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            time.sleep(0.05)
        if self.run:
            self.run.process.wait()

    def left_files(self) -> list[str]:
        """The temporary files that are left, except torch's cache of kernels.

        A process that imports torch makes the folder of that cache for later ones, and keeps it. The import server has
        its own temporary files; only a stage that starts without it, because it was killed, does so here.
        """
        names = (path.name for path in self.temporary.iterdir())
        return sorted(name for name in names if not name.startswith("torchinductor_"))


def _words(process: psutil.Process) -> list[str]:
    try:
        words: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return words
