"""Runs a target on many inputs: each must be read, put aside with a reason, or refused by a StemmaError, in at
most ten seconds and within a bound of memory. A failing input is made as small as it can be, and kept.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import HypothesisException
from hypothesis.strategies import SearchStrategy

from infra.errors import StemmaError

REPOSITORY = Path(__file__).resolve().parents[2]
HANG_S = 10.0
"""Processor time that one input may take: how long it takes depends on how busy the machine is."""
WAIT_S = 60.0
"""Time that one input may take, with what it waits for."""
DEAD_S = 90
"""After it, a call that does not return to Python ends its process."""
SMALLER_S = 20.0
"""Time for making a failing input smaller."""
MEMORY_MB = 500
"""Memory that one input may take, beyond what the process has: of inputs of a few kilobytes."""
ADDRESS_SPACE_MB = 24_000
BATCH = 100
LONGEST_MESSAGE = 20_000


class Violation(AssertionError):
    """An input that was neither read, put aside, nor refused."""


class Hang(BaseException):
    """An input that took longer than `HANG_S` or `WAIT_S`."""


@dataclass(frozen=True)
class Target:
    """Something that reads inputs from outside.

    inputs: makes the strategy of its inputs. check: reads one in an empty folder. It may raise StemmaError, which is
    a refusal, and nothing else; what it returns is not looked at.
    """

    name: str
    inputs: Callable[[], SearchStrategy[Any]]
    check: Callable[[Any, Path], object]


@dataclass
class State:
    """Progress of a target; kept on the disk after each batch, so that the next call goes on from there."""

    inputs: int = 0
    refused: int = 0
    batches: int = 0
    seconds: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)
    """Inputs by the kind of their failure."""


def kind_of(error: BaseException) -> str:
    """Name the kind of a failure: its type, and the location in our code."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(str(REPOSITORY)) and "/.venv" not in frame.filename
    ]
    local_frames = [frame for frame in frames if "/tests/" not in frame.filename] or frames
    location = (
        f"{Path(local_frames[-1].filename).relative_to(REPOSITORY)}:{local_frames[-1].name}" if local_frames else "?"
    )
    words = str(error).split(":")[0][:60] if isinstance(error, Violation) else ""
    return f"{type(error).__name__} {words or location}".strip()


@contextmanager
def watched(factor: float = 1) -> Iterator[None]:
    """Raise Hang in the main thread after `HANG_S` of its processor time, or `WAIT_S`, times `factor`."""

    def hang(number: int, _: FrameType | None) -> None:
        limit_s = WAIT_S if number == signal.SIGALRM else HANG_S
        raise Hang(f"no end after {limit_s:.0f} s")

    timers = ((signal.SIGALRM, signal.ITIMER_REAL, WAIT_S), (signal.SIGPROF, signal.ITIMER_PROF, HANG_S))
    before = [signal.signal(number, hang) for number, _, _ in timers]
    for _, timer, limit_s in timers:
        signal.setitimer(timer, factor * limit_s)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def _resident_mb(word: str) -> float:
    with open("/proc/self/status", "rb") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(word.encode())) / 1024


def _forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


class Examiner:
    """Gives inputs to a target and records how each failed."""

    def __init__(self, target: Target, folder: Path) -> None:
        self._target, self._folder = target, folder
        self.refused = 0
        self._is_warm = False
        """The first input pays for imports, and what a target makes once."""
        folder.mkdir(parents=True, exist_ok=True)
        self._current = os.open(folder / "current.pickle", os.O_RDWR | os.O_CREAT, 0o600)

    def failure(self, value: Any) -> tuple[str, str]:
        """The kind of an input's failure and its traceback; ("", "") where it is fine."""
        content = pickle.dumps(value)
        os.ftruncate(self._current, 0)
        os.pwrite(self._current, content, 0)
        before = _resident_mb("VmRSS")
        _forget_peak()
        is_warm, self._is_warm = self._is_warm, True
        factor = 1 if is_warm else 10
        faulthandler.dump_traceback_later(factor * DEAD_S, exit=True)
        try:
            with watched(factor):
                self._target.check(value, self._folder / "input")
        except StemmaError as error:
            self.refused += 1
            if not error.problems or any(len(str(problem)) > LONGEST_MESSAGE for problem in error.problems):
                return "Violation unbounded message", str(error)[:500]
            codes = {problem.code for problem in error.problems}
            if "crashed" in codes:
                return f"crashed {str(error)[:80]}", str(error)
            try:
                str(error).encode()
            except UnicodeEncodeError:
                return "Violation half a surrogate pair in a message", repr(str(error))[:500]
        except (Exception, Hang) as error:
            return kind_of(error), "".join(traceback.format_exception(error))[-6_000:]
        finally:
            faulthandler.cancel_dump_traceback_later()
        if (grown := _resident_mb("VmHWM") - before) > MEMORY_MB and is_warm:
            return "Violation memory", f"{grown:,.0f} MB for an input of {len(content):,} bytes"
        return "", ""

    def close(self) -> None:
        os.close(self._current)


def run_batch(target: Target, count: int, number: int, state: State, folder: Path, examiner: Examiner) -> None:
    """Run `count` inputs of the batch with this number; the first new kind of failure ends it, once it is minimised."""
    minimal: list[tuple[Any, str]] = []
    chosen, until = "", math.inf
    done = 0

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
    )
    @given(target.inputs())
    def examine(value: Any) -> None:
        nonlocal chosen, done, until
        if time.monotonic() > until:
            return
        kind, text = examiner.failure(value)
        if not chosen:
            done += 1
        if kind and not chosen:
            state.failures[kind] = state.failures.get(kind, 0) + 1
            if state.failures[kind] == 1 and kind.startswith(("Hang", "Violation memory")):
                keep(folder, kind, value, text)  # unchanged: to make it smaller takes too long
            elif state.failures[kind] == 1:
                chosen, until = kind, time.monotonic() + SMALLER_S
        if kind and kind == chosen:
            minimal[:] = [(value, text)]
            raise Violation(kind)

    refused = examiner.refused
    try:
        examine()
    except Violation:
        assert minimal, "a violation is raised with the input that caused it"
    except (HypothesisException, BaseExceptionGroup):
        if not chosen:
            raise
    if chosen:
        # What was refused while it was minimised is no separate input.
        examiner.refused = refused
        keep(folder, chosen, *minimal[0])
    state.inputs += done


def keep(folder: Path, kind: str, value: Any, text: str) -> None:
    """Keep an input that failed, as a pickle and as text, under its kind."""
    name = "".join(letter if letter.isalnum() else "-" for letter in kind)[:100]
    failures = folder / "failures"
    failures.mkdir(exist_ok=True)
    (failures / f"{name}.pickle").write_bytes(pickle.dumps(value))
    shown = repr(value)
    (failures / f"{name}.txt").write_text(f"{kind}\n\n{shown[:5_000]}\n\n{text}\n", errors="backslashreplace")


def read_state(folder: Path) -> State:
    path = folder / "state.json"
    return State(**json.loads(path.read_text())) if path.exists() else State()


def write_state(folder: Path, state: State) -> None:
    hidden = folder / ".state.json"
    hidden.write_text(json.dumps(asdict(state), indent=1))
    hidden.rename(folder / "state.json")


def run_target(target: Target, inputs: int, base: int, folder: Path, *, until_s: float = float("inf")) -> State:
    """Run a target until it had `inputs` inputs, or until this moment of `time.monotonic`.

    Args:
        base: the seed of all. The batches of a target are numbered from `base` × 1,000,000.
        folder: keeps its state and the inputs that failed; another call goes on from there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state, examiner = read_state(folder), Examiner(target, folder)
    try:
        while state.inputs < inputs and time.monotonic() < until_s:
            began, count, before = time.monotonic(), min(BATCH, inputs - state.inputs), state.inputs
            number = base * 1_000_000 + state.batches
            state.batches += 1
            write_state(folder, state)  # what ends this process is not tried again
            examiner.refused = 0
            run_batch(target, count, number, state, folder, examiner)
            state.refused += examiner.refused
            state.seconds += time.monotonic() - began
            write_state(folder, state)
            if state.inputs == before:
                break
    finally:
        examiner.close()
    return state


def run_alone(target: Target, inputs: int, base: int, folder: Path, until_s: float) -> None:
    """The same as the work of a process, whose memory is bounded."""
    bound = ADDRESS_SPACE_MB << 20
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    sys.setrecursionlimit(1_000)
    run_target(target, inputs, base, folder, until_s=until_s)
