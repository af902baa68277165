"""Code with unit tests: the policy writes a program, reads what the tests say, and corrects it.

The code of each answer runs in a separate sandbox (`training.sandbox`), which this process starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.rl.environments.protocol import Environment, Reply, Task, ToolCall
from training.sandbox.unit_tests import code_in, passes


class Code(Environment):
    """The reward is 1 where the last program passes all assertions of the task, else 0.

    The task is a prompt whose response is assertions, as for the rule `tests`. The first `shown` lines that begin with
    `assert` are shown where they fail; the others stay hidden. The second rule rejects programs with `__eq__`: an
    object that equals everything passes all assertions.

    Args:
        sandbox: kind of sandbox, given by the stage.
        timeout_s: seconds that the tests of a program may take.
        shown: number of assertions that the policy may read.
    """

    runs_code = True

    def __init__(self, sandbox: Any = "none", timeout_s: float = 5.0, shown: int = 1) -> None:
        self._sandbox, self._timeout_s, self._shown = sandbox, timeout_s, shown
        self._assertions: list[str] = []
        self._tests = ""
        self._passed = False
        self._last = ""

    def reset(self, task: Task, seed: int) -> str:
        if "prompt" not in task:
            raise ValueError("the environment code needs prompts with assertions as tasks: leave environment.tasks out")
        self._tests = str(task["response"])
        self._assertions = [line for line in self._tests.splitlines() if line.startswith("assert")]
        self._passed = False
        return str(task["prompt"])

    def step(self, text: str, calls: Sequence[ToolCall]) -> Reply:
        self._last = text
        self._passed = passes(text, self._tests, self._sandbox, self._timeout_s)
        if self._passed:
            return Reply(done=True)
        failed = [line for line in self._assertions[: self._shown] if not self._holds(text, line)]
        message = "\n".join(["These tests fail:", *failed]) if failed else "Hidden tests fail."
        return Reply([{"role": "user", "content": f"{message}\nCorrect the program."}])

    def _holds(self, text: str, assertion: str) -> bool:
        return passes(code_in(text), assertion, self._sandbox, self._timeout_s)

    def reward(self) -> float:
        return float(self._passed)

    def accepts(self) -> bool:
        return "__eq__" not in self._last
