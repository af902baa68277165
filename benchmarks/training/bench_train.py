"""Tokens a second of pretraining against a plain PyTorch loop, transformers' Trainer and bare Composer.

python benchmarks/training/bench_train.py [--models A B] [--rounds 5] [--only ours "(a)"] [--profile]

About 8 minutes on 2 quiet cores. Every contender has a process of its own and is warm before the first round; in each
round each trains one window of steps while the others wait. The medians over the rounds are compared. Told besides are
tokens a second of CPU time and of the fastest quarter of single steps (its slowest one): on a machine that others use,
who only ever make a step slower, they say more.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.training.train_setting import SETTINGS, write, write_tokenizer
from infra.process.tail import tail
from tasks.processes.environment import KEEP_MEMORY
from training.core.hardware import native_bf16

PROJECT = Path(__file__).resolve().parents[2]

LINES_OF_THE_DEAD = 30

# Name in the table, name of the contender, whether glibc keeps freed memory as our launcher has it.
CONTENDERS = [
    ("ours", "ours", True),
    ("ours, attention within documents", "ours, attention within documents", True),
    ("ours, by the native loop", "ours, by the native loop", True),
    ("(a) plain loop", "(a) plain loop", True),
    ("(b) transformers Trainer", "(b) transformers Trainer", False),
    ("(b) with our allocator settings", "(b) transformers Trainer", True),
    ("(c) bare Composer", "(c) bare Composer", False),
    ("(c) with our allocator settings", "(c) bare Composer", True),
]
PROFILED = ("ours, attention within documents", "(a) plain loop")


class Contender:
    """A process that trains one window for each line that it is sent."""

    def __init__(self, title: str, name: str, keeps_memory: bool, which: str, folder: Path) -> None:
        self.title = title
        self.speeds: list[float] = []
        self.cpu_speeds: list[float] = []
        self.step_speeds: list[float] = []
        self.peak_mb = 0
        environment = os.environ | {
            "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(PROJECT),
        }
        environment.pop("GLIBC_TUNABLES", None)
        if keeps_memory:
            environment["GLIBC_TUNABLES"] = KEEP_MEMORY
        # A file: nobody reads it before the end, and a full pipe would stop the contender.
        self._said = tempfile.NamedTemporaryFile(prefix="contender-", suffix=".log")  # noqa: SIM115 - close() closes it
        self._process = subprocess.Popen(
            [sys.executable, str(PROJECT / "benchmarks/training/train_contenders.py"), name, which, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment,
            cwd=folder,
        )
        (self.first_steps_s,) = self._hear("ready")

    def window(self) -> None:
        self._say("go")
        speed, cpu_speed, *step_speeds = self._hear("speed")
        self.speeds.append(speed)
        self.cpu_speeds.append(cpu_speed)
        self.step_speeds += step_speeds

    def figures(self) -> list[float]:
        """Tokens a second: of the median window by the clock and by CPU time, and of the fastest quarter of steps."""
        middle = [statistics.median(speeds) for speeds in (self.speeds, self.cpu_speeds)]
        return [*middle, statistics.quantiles(self.step_speeds, n=4)[2]]

    def profile(self) -> str:
        """A table of where the time of one window goes."""
        self._say("profile")
        self._hear("speed")
        assert self._process.stdout is not None
        lines = []
        for line in self._process.stdout:
            if line == "\n":
                return "".join(lines)
            lines.append(line)
        raise self._dead()

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._dead() from None

    def _hear(self, word: str) -> list[float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word + " "):
                return [float(number) for number in line.split()[1:]]
        raise self._dead()

    def _dead(self) -> SystemExit:
        """What ends the benchmark, with exit code 1: how the contender ended, and the end of what it said."""
        code = self._process.wait()
        said = "\n".join(f"  {line}" for line in tail(Path(self._said.name), LINES_OF_THE_DEAD)) or "  it said nothing"
        return SystemExit(f"{self.title} ended with exit code {code}:\n{said}")

    def close(self) -> None:
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf8")
        if peak := re.search(r"VmHWM:\s*(\d+) kB", status):  # none of one that has ended
            self.peak_mb = int(peak[1]) // 1000
        self._process.kill()
        self._process.wait()
        self._said.close()


def race(which: str, rounds: int, only: list[str], folder: Path) -> None:
    setting = SETTINGS[which]
    contenders: list[Contender] = []
    titles = {title for title, *_ in CONTENDERS}
    try:
        for title, name, keeps_memory in CONTENDERS:
            if title not in only and not title.startswith(tuple(set(only) - titles)):
                continue
            contenders.append(Contender(title, name, keeps_memory, which, folder))
            print(f"  {title} is warm", file=sys.stderr, flush=True)
        for _ in range(rounds):
            for contender in contenders:
                contender.window()
    finally:
        for contender in contenders:
            contender.close()
    precision = "bf16" if native_bf16(torch.device("cpu")) else "fp32, since this CPU does not compute bf16 natively"
    print(f"\n{which}: Llama, width {setting.width}, {setting.layers} layers, sequence {setting.length}, batch "
          f"{setting.batch}, {precision}; medians of {rounds} windows of {setting.window} steps\n")  # fmt: skip
    print("| contender | tokens/s | slowest, fastest | ours / it | tokens/CPU s | ours / it | fastest quarter of steps "
          "| ours / it | first 3 steps, s | peak memory, MB |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    for one in contenders:
        (wall, *others), (ratio, *ratios) = (
            one.figures(),
            [ours / its for ours, its in zip(contenders[0].figures(), one.figures(), strict=True)],
        )
        besides = " | ".join(f"{speed:,.0f} | {times:.2f}" for speed, times in zip(others, ratios, strict=True))
        print(f"| {one.title} | {wall:,.0f} | {min(one.speeds):,.0f}, {max(one.speeds):,.0f} | {ratio:.2f} | {besides} "
              f"| {one.first_steps_s:.0f} | {one.peak_mb:,} |", flush=True)  # fmt: skip


def profile(which: str, folder: Path) -> None:
    for title, name, keeps_memory in CONTENDERS:
        if title not in PROFILED:
            continue
        contender = Contender(title, name, keeps_memory, which, folder)
        try:
            contender.window()
            print(f"\n{which}, {title}\n\n{contender.profile()}", flush=True)
        finally:
            contender.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=["ours", "("], help="contenders' names, or beginnings of them")
    parser.add_argument("--profile", action="store_true", help="instead, where the time of one of our steps goes")
    arguments = parser.parse_args()
    # Ended by a signal too it ends its contenders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as place:
        write_tokenizer(Path(place) / "tokenizer")
        for which in arguments.models:
            write(SETTINGS[which], Path(place))
            if arguments.profile:
                profile(which, Path(place))
            else:
                race(which, arguments.rounds, arguments.only, Path(place))
