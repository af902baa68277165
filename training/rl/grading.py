"""Processes that grade answers in parallel: reward functions and unit tests, one answer at a time, each with a time
limit.

python -m training.rl.grading    serves the process that started it: reads a line of JSON for each answer, writes one
                                 back
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from infra.errors import Problem, StageError, stage_error
from infra.io.json import parse_own_json
from infra.process.lifetime import PARENT_FD, serve_parent, signal_group
from infra.project import PROJECT
from training.rl.reward_functions import KEY, Answered, RewardFunction, call, reward_function
from training.sandbox.runner import Kind, SandboxChoice, find
from training.sandbox.unit_tests import TIMEOUT_S, passes

UNIT_TESTS = "unit tests"
IMPORT_S = 120.0
"""Seconds that the import of a function's module may take; they are not counted to any answer."""
GRACE_S = 30.0
"""Seconds added to the time limit of unit tests, which the process enforces itself."""
DEATHS = 3
"""Processes that may be killed at the same answer before its function is named: one that takes all memory has each of
them killed, and a single death by a signal may come from outside."""
SLOW_S = 60.0
"""Seconds after which a function that is called in this process is reported, once per call."""


class Graders:
    """Grader of answers: this process, or `processes` others, which start at the first answer and end with `close`,
    with this process, or when one of them takes longer than `timeout_s` seconds for an answer. on_slow: gets the name
    and message of an event where a function in this process takes long.

    The reward does not depend on the number of processes, since those processes grade each answer separately; without
    them, functions are called in this process with all answers at once. Unit tests run in a sandbox (`launch.sandbox`)
    either way; functions are the user's and run with the user's rights.
    """

    def __init__(
        self,
        processes: int = 0,
        timeout_s: float = TIMEOUT_S,
        sandbox: SandboxChoice = "auto",
        on_slow: Callable[[str, str], None] = lambda name, message: None,
    ) -> None:
        self._count = processes
        self._on_slow = on_slow
        self._timeout_s = timeout_s
        self._wanted = sandbox
        self._graders: list[_Grader] = []
        self._functions: dict[str, RewardFunction] = {}

    def functions(self, path: str, answered: Sequence[Answered]) -> list[float]:
        """Return the function's reward of each answer, nan where it abstains. Raises StageError as `call` does, and in
        other processes where it ends its process or takes too long."""
        if self._count:
            return self._shared_out(path, answered)
        if path not in self._functions:
            self._functions[path] = reward_function(path)
        with self._reported_if_slow(path, len(answered)):
            return call(path, self._functions[path], answered)

    @contextmanager
    def _reported_if_slow(self, path: str, count: int) -> Iterator[None]:
        """Report a function that works longer than `SLOW_S` in this process, which has no time limit."""
        message = (
            f"the reward function {path} has worked on {count} answers for over {SLOW_S:g} s; "
            "rlhf.reward_processes gives it a time limit for each answer (rlhf.reward_timeout_s)"
        )
        timer = threading.Timer(SLOW_S, self._on_slow, ("slow_reward_function", message))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def tests(self, answers: Sequence[str], references: Sequence[str]) -> list[float]:
        """Return 1 for each answer that passes the tests in its reference, else 0. Raises StageError where no sandbox
        is available."""
        questions = [Answered("", answer, reference) for answer, reference in zip(answers, references, strict=True)]
        if self._count:
            return self._shared_out(UNIT_TESTS, questions)
        return [
            float(passes(question.answer, question.response, self.sandbox, self._timeout_s)) for question in questions
        ]

    @property
    def sandbox(self) -> Kind:
        """The sandbox of unit tests. Raises StageError where this machine has none."""
        return find(self._wanted)

    def close(self) -> None:
        """End the processes and all that they started in their process groups."""
        for grader in self._graders:
            grader.end()
        self._graders = []

    def _shared_out(self, path: str, questions: Sequence[Answered]) -> list[float]:
        """Give each answer to the process that is free first."""
        rewards = [math.nan] * len(questions)
        waiting = deque(range(len(questions)))
        deaths: Counter[int] = Counter()
        try:
            with selectors.DefaultSelector() as selector:
                for grader in self._ready(min(self._count, len(questions))):
                    selector.register(grader.output, selectors.EVENT_READ, grader)
                    self._give(grader, path, questions, waiting)
                while busy := [grader for grader in self._graders if grader.answer is not None]:
                    first = min(grader.deadline for grader in busy)
                    for key, _ in selector.select(max(0.0, first - time.monotonic())):
                        grader = key.data
                        for message in grader.hear():
                            if "imported" in message:
                                grader.allow(self._timeout_s)
                                continue
                            if message["problems"]:
                                raise StageError(*(Problem(**problem) for problem in message["problems"]))
                            rewards[grader.answer] = message["reward"]
                            grader.answer = None
                            self._give(grader, path, questions, waiting)
                    self._stop_late(busy, path, questions)
                    for grader in busy:
                        if grader.answer is None or not grader.is_gone:
                            continue
                        self._check_death(grader, path, questions, deaths)
                        selector.unregister(grader.output)
                        grader.end()
                        waiting.appendleft(grader.answer)
                        successor = _Grader()
                        self._graders[self._graders.index(grader)] = successor
                        selector.register(successor.output, selectors.EVENT_READ, successor)
                        self._give(successor, path, questions, waiting)
        except BaseException:
            self.close()  # also one that is still at an answer
            raise
        return rewards

    def _ready(self, count: int) -> list[_Grader]:
        for grader in [grader for grader in self._graders if grader.process.poll() is not None]:
            grader.end()
            self._graders.remove(grader)
        self._graders += [_Grader() for _ in range(count - len(self._graders))]
        return self._graders[:count]

    def _give(self, grader: _Grader, path: str, questions: Sequence[Answered], waiting: deque[int]) -> None:
        if waiting:
            grader.answer = waiting.popleft()
            grader.allow(self._timeout_s + GRACE_S if path == UNIT_TESTS else IMPORT_S)
            question = {"path": path, "answered": questions[grader.answer], "timeout_s": self._timeout_s}
            if path == UNIT_TESTS:
                question["sandbox"] = self.sandbox
            grader.send(question)

    def _stop_late(self, busy: Sequence[_Grader], path: str, questions: Sequence[Answered]) -> None:
        where = f"{KEY}.{path}"
        for grader in busy:
            if grader.answer is not None and not grader.is_gone and time.monotonic() > grader.deadline:
                answer = repr(questions[grader.answer].answer[:80])
                message = f"it gave no reward for the answer {answer} within {grader.allowed_s:g} s"
                raise stage_error(
                    "reward_function_hangs", where, message, "make it return, or raise rlhf.reward_timeout_s"
                )

    def _check_death(self, grader: _Grader, path: str, questions: Sequence[Answered], deaths: Counter[int]) -> None:
        """Raise StageError if a process that is gone exited by itself, or is one of too many that were killed at the
        same answer."""
        assert grader.answer is not None
        code = grader.process.wait()
        deaths[grader.answer] += 1
        if code < 0 and deaths[grader.answer] < DEATHS:
            return
        how = f"{signal.Signals(-code).name}, {DEATHS} times" if code < 0 else f"code {code}"
        answer = repr(questions[grader.answer].answer[:80])
        message = f"the process that graded the answer {answer} ended with {how}"
        raise stage_error("reward_function_failed", f"{KEY}.{path}", message, "correct the function")


@dataclass(eq=False)
class _Grader:
    """A process that grades. answer: the index of the answer in progress, None while it is free; allowed_s, deadline
    (monotonic seconds): for this answer; is_gone: it has closed its pipe and sends no more answers."""

    answer: int | None = None
    allowed_s: float = math.inf
    deadline: float = math.inf
    is_gone: bool = False
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        folders = (*filter(None, sys.path), str(PROJECT))
        read_end, self._parent_pipe = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "training.rl.grading"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[read_end],
                env={**os.environ, PARENT_FD: str(read_end), "PYTHONPATH": os.pathsep.join(folders)},
                start_new_session=True,
            )
        finally:
            os.close(read_end)
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        self._heard = b""

    def send(self, question: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.is_gone = True

    def hear(self) -> Iterator[dict[str, Any]]:
        """Complete messages received so far."""
        data = os.read(self.output, 1 << 16)
        self.is_gone |= not data
        *lines, self._heard = (self._heard + data).split(b"\n")
        yield from map(parse_own_json, lines)

    def allow(self, seconds: float) -> None:
        self.allowed_s, self.deadline = seconds, time.monotonic() + seconds

    def end(self) -> None:
        """Kill it and the processes that it started, even during an answer."""
        signal_group(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._parent_pipe)
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()


def _serve() -> None:
    """Grade incoming answers until the parent process closes the pipe."""
    questions, answers = serve_parent()
    functions: dict[str, RewardFunction] = {}
    for line in questions:
        question = parse_own_json(line)
        path, answered = question["path"], Answered(*question["answered"])
        reply: dict[str, Any] = {"reward": math.nan, "problems": []}
        try:
            if path == UNIT_TESTS:
                reply["reward"] = float(passes(*answered[1:], question["sandbox"], question["timeout_s"]))
            else:
                if path not in functions:
                    functions[path] = reward_function(path)
                print(json.dumps({"imported": path}), file=answers, flush=True)
                (reply["reward"],) = call(path, functions[path], [answered])
        except StageError as error:
            reply["problems"] = [problem.as_json() for problem in error.problems]
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
