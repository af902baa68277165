"""Functions that reward answers, by their import path: found, called, and held to give a number for each answer."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from infra.errors import stage_error
from training.config.functions import FIX

RewardFunction = Callable[[Sequence[str], Sequence[str], Sequence[str]], Sequence[float]]
"""(prompts, answers, responses of the instructions file, "" where there is none) → a reward of each answer."""

KEY = "rlhf.reward_functions"


class Answered(NamedTuple):
    """An answer with its prompt and the response beside that in the instructions."""

    prompt: str
    answer: str
    response: str


def reward_function(path: str) -> RewardFunction:
    """The function behind `package.module:name`. Raises StageError where there is none."""
    module, _, name = path.partition(":")
    where = f"{KEY}.{path}"
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise stage_error("no_such_function", where, f"expected a function: {error}", FIX) from error
    if not callable(found):
        raise stage_error("no_such_function", where, f"expected a function, not {type(found).__name__}", FIX)
    function: RewardFunction = found
    return function


def call(path: str, function: RewardFunction, answered: Sequence[Answered]) -> list[float]:
    """Its rewards. Raises StageError where it raises, gives too few, or one that is no finite number, with the
    answer."""
    where = f"{KEY}.{path}"
    prompts, answers, responses = map(list, zip(*answered, strict=True)) if answered else ([], [], [])
    try:
        given = list(function(prompts, answers, responses))
    except Exception as error:
        kind = type(error).__name__
        raise stage_error("reward_function_failed", where, f"it raised {kind}: {error}", "mend the function") from error
    if len(given) != len(answers):
        message = f"expected a reward for each of {len(answers)} answers, it gave {len(given)}"
        raise stage_error("reward_function_failed", where, message, "mend the function")
    for value, answer in zip(given, answers, strict=True):
        if not isinstance(value, int | float) or not math.isfinite(value):
            message = f"expected a finite number, it gave {value!r} for the answer {answer[:80]!r}"
            raise stage_error("reward_not_finite", where, message, "have it give a number for every answer")
    return [float(value) for value in given]
