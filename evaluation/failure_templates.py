"""Failure classes as YAML files of templated tests (CheckList, Ribeiro et al. 2020), and the cases drawn from them.

A class names what a model may fail at. Its tests are of three kinds: `minimum_functionality` asks something that has
one right answer, `invariance` changes a prompt in a way that must not change the answer, `direction` changes it so that
one answer must become likelier or less likely.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import Field, ValidationError, model_validator

from infra.config import Config
from infra.errors import Problem, StageError
from infra.yaml import BadYaml, read_plain, read_text

Kind = Literal["minimum_functionality", "invariance", "direction"]
DRAWS_A_CASE = 50
"""Fillings that are tried for each case that is wanted: some are excluded by `where`, some render to the same text."""

_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


class Numbers(Config):
    """Whole numbers to fill in."""

    numbers: tuple[int, int]
    """The first and the last."""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if self.numbers[0] > self.numbers[1]:
            raise ValueError(f"the first number is above the last: {list(self.numbers)}")
        return self


class TemplatedTest(Config):
    """One template with what must hold of its answers. All texts are Jinja templates over the names in `fill`."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    kind: Kind
    prompt: str
    right: str | None = None
    """minimum_functionality: the right answer."""
    wrong: tuple[str, ...] = ()
    """minimum_functionality: answers of which none may be as likely."""
    changed: str | None = None
    """invariance and direction: the prompt after the change."""
    choices: tuple[str, ...] = ()
    """invariance and direction: the possible answers."""
    answer: str | None = None
    """direction: which of `choices` the change is about."""
    expect: Literal["more", "less"] | None = None
    """direction: whether the answer's share of the choices' likelihood must rise or fall."""
    where: str | None = None
    """A Jinja expression that a filling must fulfil, e.g. `a != b`."""

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> Self:
        if self.kind == "minimum_functionality":
            if self.right is None or not self.wrong:
                raise ValueError("a test of minimum_functionality needs `right` and `wrong`")
            return self
        if self.changed is None or len(self.choices) < 2:
            raise ValueError(f"a test of {self.kind} needs `changed` and at least two `choices`")
        if self.kind == "direction" and (self.expect is None or self.answer not in self.choices):
            raise ValueError("a test of direction needs `expect` and an `answer` that is one of `choices`")
        return self


class FailureClass(Config):
    """What a model may fail at, and the tests that show it."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    about: str
    """In a sentence, what the model has to be able to do."""
    fill: dict[str, Numbers | tuple[Any, ...]] = Field(default_factory=dict)
    """What stands for each name in the templates: a list of values, or `{numbers: [1, 9]}`."""
    tests: tuple[TemplatedTest, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Case:
    """One filled template.

    choices: the possible answers; of minimum_functionality the right one is `choices[answer]`, of direction the one
    that the change is about. changed: None for minimum_functionality. expect: of direction, `more` or `less`.
    """

    failure_class: str
    test: str
    kind: Kind
    prompt: str
    changed: str | None
    choices: tuple[str, ...]
    answer: int
    expect: str | None


def read_failure_class(path: Path) -> FailureClass:
    """Raises StageError `bad_failure_class` naming the file and every key that is wrong in it."""
    try:
        return FailureClass.model_validate(read_plain(read_text(path)))
    except ValidationError as error:
        problems = [
            Problem("bad_failure_class", f"{path}: {'.'.join(map(str, one['loc']))}", one["msg"])
            for one in error.errors()
        ]
        raise StageError(*problems) from error
    except (OSError, UnicodeDecodeError, BadYaml) as error:
        where = f"{path}:{error.line}" if isinstance(error, BadYaml) and error.line else str(path)
        message = f"expected a YAML file of a failure class: {error}"
        raise StageError(Problem("bad_failure_class", where, message)) from error


def draw_cases(failure_class: FailureClass, count: int, seed: int, limit: int | None = None) -> list[Case]:
    """Up to `count` different cases of each test; the same under the same seed.

    limit: at most so many of the class: the first of each test, then the second of each. Raises StageError
    `bad_failure_class` naming the test whose template cannot be filled, or is never.
    """
    drawn = [_draw(failure_class, test, count, seed) for test in failure_class.tests]
    turns = sorted((turn, number) for number, cases in enumerate(drawn) for turn in range(len(cases)))
    kept = Counter(number for _, number in turns[:limit])
    return [case for number, cases in enumerate(drawn) for case in cases[: kept[number]]]


def _draw(failure_class: FailureClass, test: TemplatedTest, count: int, seed: int) -> list[Case]:
    drawn = random.Random(f"{seed} {failure_class.name} {test.name}")
    where = f"{failure_class.name}: {test.name}"
    found: dict[Case, None] = {}
    try:
        fits = _TEMPLATES.compile_expression(test.where, undefined_to_none=False) if test.where else None
        for _ in range(DRAWS_A_CASE * count):
            filling = {name: _one_of(values, drawn) for name, values in failure_class.fill.items()}
            if fits is None or fits(**filling):
                found.setdefault(_filled(failure_class.name, test, filling))
            if len(found) == count:
                break
    except (TemplateError, TypeError, ValueError, ArithmeticError, IndexError, KeyError) as error:
        raise StageError(Problem("bad_failure_class", where, f"the template cannot be filled: {error}")) from error
    if not found:
        raise StageError(Problem("bad_failure_class", where, f"no filling fulfils `where: {test.where}`"))
    return list(found)


def _one_of(values: Numbers | Sequence[Any], drawn: random.Random) -> Any:
    return drawn.randint(*values.numbers) if isinstance(values, Numbers) else drawn.choice(values)


def _filled(failure_class: str, test: TemplatedTest, filling: Mapping[str, Any]) -> Case:
    def text(template: str) -> str:
        return _compiled(template).render(filling)

    if test.right is not None:
        choices, answer = (text(test.right), *map(text, test.wrong)), 0
    else:
        choices = tuple(map(text, test.choices))
        answer = test.choices.index(test.answer) if test.answer is not None else 0
    if len(set(choices)) != len(choices):
        raise ValueError(f"two of the answers are the same: {list(choices)}")
    changed = text(test.changed) if test.changed is not None else None
    return Case(failure_class, test.name, test.kind, text(test.prompt), changed, choices, answer, test.expect)


@lru_cache(maxsize=256)
def _compiled(template: str) -> Template:
    return _TEMPLATES.from_string(template)


def in_words(number: int) -> str:
    """`twenty-one` for 21, `minus two` for -2. Raises ValueError beyond 99."""
    if number < 0:
        return f"minus {in_words(-number)}"
    if number > 99:
        raise ValueError(f"numbers are written in words up to 99, not {number}")
    if number < 20:
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")


_TEMPLATES = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True)
_TEMPLATES.filters["words"] = in_words
