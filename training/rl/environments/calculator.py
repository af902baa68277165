"""Arithmetic with a calculator: the policy writes an expression, reads its value, and answers with a number."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from training.rl.environments.protocol import Task, ToolEnvironment, tool

_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LARGEST = 10**30
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_PHRASES = ("What is {}?", "Compute {}.", "{} = ?", "How much is {}?")


class Calculator(ToolEnvironment):
    """The reward is 1 where the last number of the answer is the expected one, else 0.

    The task is a prompt with a response that ends with a number; or a number, from which an exercise is made. The
    second rule rejects a right answer unless the calculator returned its value last.

    Args:
        digits: most digits of an operand.
        operators: that exercises draw from.
        operands: of an exercise.
    """

    def __init__(self, digits: int = 3, operators: str = "+-*", operands: int = 2) -> None:
        super().__init__()
        self._digits, self._operators, self._operands = digits, operators, operands
        self._expected = 0.0
        self._last: float | None = None

    def reset(self, task: Task, seed: int) -> str:
        if "prompt" in task:
            expected = _last_number(str(task["response"]))
            if expected is None:
                raise ValueError(f"the response of the prompt {task['prompt'][:60]!r} has no number")
            self._expected = expected
            return str(task["prompt"])
        draw = random.Random(seed)
        numbers = [str(draw.randrange(10**self._digits)) for _ in range(self._operands)]
        expression = numbers[0] + "".join(draw.choice(self._operators) + number for number in numbers[1:])
        self._expected = float(evaluate(expression))
        return draw.choice(_PHRASES).format(expression)

    @tool
    def calculator(self, expression: str) -> str:
        """Return the value of an arithmetic expression of numbers, + - * / // % and parentheses."""
        value = evaluate(expression)
        self._last = float(value)
        return str(value)

    def reward(self) -> float:
        number = _last_number(self.answer or "")
        return float(number is not None and abs(number - self._expected) <= 1e-6 * max(1.0, abs(self._expected)))

    def accepts(self) -> bool:
        return self._last is not None and abs(self._last - self._expected) <= 1e-6 * max(1.0, abs(self._expected))


def evaluate(expression: str) -> int | float:
    """Return the value of an arithmetic expression. Raises ValueError for anything else, and ZeroDivisionError."""
    if len(expression) > 200:
        raise ValueError("the expression is longer than 200 characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an arithmetic expression") from None
    return _value(tree.body)


def _value(node: ast.expr) -> int | float:
    value: int | float
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("not an arithmetic expression")
    if abs(value) > _LARGEST:
        raise ValueError("the value is too large")
    return value


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
