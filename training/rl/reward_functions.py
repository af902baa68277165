"""Functions that reward answers, given by import path: import, call, and a check that each answer gets a number."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from infra.errors import stage_error
from training.config.alignment.functions import FIX

RewardFunction = Callable[[Sequence[str], Sequence[str], Sequence[str]], Iterable[float | None]]
"""(prompts, answers, responses of the instructions file, "" where there is none) → a reward for each answer, None where
the function abstains."""

KEY = "rlhf.reward_functions"
LONGEST_SHOWN = 80


class Answered(NamedTuple):
    """An answer with its prompt and the prompt's response in the instructions."""

    prompt: str
    answer: str
    response: str


def reward_function(path: str) -> RewardFunction:
    """Import the function `package.module:name`. Raises StageError where there is none."""
    module, _, name = path.partition(":")
    where = f"{KEY}.{path}"
    try:
        attribute = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise stage_error("no_such_function", where, f"expected a function: {error}", FIX) from error
    except (Exception, SystemExit) as error:
        message = f"expected a function: importing {module} raised {type(error).__name__}: {error}"
        raise stage_error("no_such_function", where, message, FIX) from error
    if not callable(attribute):
        raise stage_error("no_such_function", where, f"expected a function, not {type(attribute).__name__}", FIX)
    function: RewardFunction = attribute
    return function


def call(path: str, function: RewardFunction, answered: Sequence[Answered]) -> list[float]:
    """Return the function's rewards, nan where it abstains with None. Raises StageError where it raises or exits,
    returns anything but a reward for each answer, or gives a reward that is not a finite number, with that answer."""
    where = f"{KEY}.{path}"
    prompts, answers, responses = map(list, zip(*answered, strict=True)) if answered else ([], [], [])
    try:
        returned = function(prompts, answers, responses)
        given = _each(returned)
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        raise stage_error(
            "reward_function_failed", where, f"it raised {kind}: {error}", "correct the function"
        ) from error
    if given is None:
        message = f"expected a list with a reward for each of {len(answers)} answers, it returned {_shown(returned)}"
        fix = "define it without async" if inspect.iscoroutine(returned) else "correct the function"
        raise stage_error("reward_function_failed", where, message, fix)
    if len(given) != len(answers):
        message = f"expected a reward for each of {len(answers)} answers, it gave {len(given)}"
        raise stage_error("reward_function_failed", where, message, "correct the function")
    rewards = []
    for value, answer in zip(given, answers, strict=True):
        reward = math.nan if value is None else _number(value)
        if reward is None:
            message = f"expected a finite number or None, it gave {_shown(value)} for the answer {answer[:80]!r}"
            raise stage_error("reward_not_finite", where, message, "make it return a number or None for every answer")
        rewards.append(reward)
    return rewards


def _each(returned: object) -> list[object] | None:
    """Return the items of a function's result: a list, array, tensor, generator or the like; None for anything else.
    Raises what a generator raises."""
    if inspect.iscoroutine(returned):
        returned.close()  # it will never be awaited
        return None
    if isinstance(returned, str | bytes | Mapping):
        return None
    try:
        items = iter(returned)  # type: ignore[call-overload]
    except TypeError:  # also of an array or tensor without dimensions
        return None
    return list(items)


def _number(value: object) -> float | None:
    """Convert a finite number of Python, numpy or torch to a float; return None for anything else."""
    # Neither library is imported here: a function may need none, and each process that grades would wait for them.
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1:
        value = value.item()
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
