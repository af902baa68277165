"""Failure classes as YAML files of templated tests (CheckList, Ribeiro et al. 2020), and the cases drawn from them.

A class names what a model may fail at. Its tests are of three kinds: `minimum_functionality` asks something that has
one right answer, `invariance` changes a prompt in a way that must not change the answer, `direction` changes it so that
one answer must become likelier or less likely.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from infra.config import Config
from infra.errors import Problem, StageError, stage_error
from infra.io.templates import TemplateFault, fill
from infra.io.yaml import BadYaml, read_plain, read_text

Kind = Literal["minimum_functionality", "invariance", "direction"]
DRAWS_A_CASE = 50
"""Fillings tried per requested case: some are excluded by `where`, some render to the same text."""
FILLED_AT_ONCE = 64


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
    def _has_required_fields(self) -> Self:
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
    """A kind of failure of a model, and the tests that show it."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    about: str
    """In a sentence, what the model has to be able to do."""
    fill: dict[str, Numbers | tuple[Any, ...]] = Field(default_factory=dict)
    """Values for each name in the templates: a list, or `{numbers: [1, 9]}`."""
    tests: tuple[TemplatedTest, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Case:
    """One filled template.

    choices: the possible answers; `choices[answer]` is the right one for minimum_functionality, and the one that the
    change affects for direction. changed: None for minimum_functionality. expect: for direction, `more` or `less`.
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
    """Read a failure class. Raises StageError `bad_failure_class` naming the file and every key that is wrong in it."""
    try:
        return FailureClass.model_validate(read_plain(read_text(path)))
    except ValidationError as error:
        problems = [
            Problem("bad_failure_class", f"{path}: {'.'.join(map(str, detail['loc']))}", detail["msg"])
            for detail in error.errors()
        ]
        raise StageError(*problems) from error
    except (OSError, UnicodeDecodeError, BadYaml) as error:
        line = f":{error.line}" if isinstance(error, BadYaml) and error.line else ""
        message = f"expected a YAML file of a failure class: {str(error).splitlines()[0]}"
        raise stage_error("bad_failure_class", f"{path}{line}", message) from error


def draw_cases(failure_class: FailureClass, count: int, seed: int, limit: int | None = None) -> list[Case]:
    """Return up to `count` distinct cases of each test; the same seed gives the same cases.

    Args:
        limit: maximum for the class: the first of each test, then the second of each.

    Raises StageError `bad_failure_class` naming the test whose template cannot be filled, never fulfils `where`, or
    takes too much memory or time: templates are rendered in a process with bounds (`infra.io.templates`).
    """
    drawn = [_draw(failure_class, test, count, seed) for test in failure_class.tests]
    turns = sorted((turn, number) for number, cases in enumerate(drawn) for turn in range(len(cases)))
    kept = Counter(number for _, number in turns[:limit])
    return [case for number, cases in enumerate(drawn) for case in cases[: kept[number]]]


def _draw(failure_class: FailureClass, test: TemplatedTest, count: int, seed: int) -> list[Case]:
    drawn = random.Random(f"{seed} {failure_class.name} {test.name}")
    location = f"{failure_class.name}: {test.name}"
    cases: dict[Case, None] = {}
    try:
        for begin in range(0, DRAWS_A_CASE * count, FILLED_AT_ONCE):
            fillings = [
                {name: _one_of(values, drawn) for name, values in failure_class.fill.items()}
                for _ in range(min(FILLED_AT_ONCE, DRAWS_A_CASE * count - begin))
            ]
            for case in _filled(failure_class.name, test, fillings):
                cases.setdefault(case)
                if len(cases) == count:  # later fillings may be invalid and are not examined
                    return list(cases)
    except TemplateFault as error:
        raise stage_error("bad_failure_class", location, f"the template cannot be filled: {error}") from error
    if not cases:
        raise StageError(Problem("bad_failure_class", location, f"no filling satisfies `where: {test.where}`"))
    return list(cases)


def _one_of(values: Numbers | Sequence[Any], drawn: random.Random) -> Any:
    return drawn.randint(*values.numbers) if isinstance(values, Numbers) else drawn.choice(values)


def _filled(failure_class: str, test: TemplatedTest, fillings: Sequence[Mapping[str, Any]]) -> Iterator[Case]:
    """Yield the cases of the fillings that fulfil `where`. Raises TemplateFault."""
    answers = (test.right, *test.wrong) if test.right is not None else test.choices
    changed = (test.changed,) if test.changed is not None else ()
    answer = test.choices.index(test.answer) if test.right is None and test.answer is not None else 0
    for texts in fill(test.where or None, (test.prompt, *changed, *answers), fillings):
        if texts is None:
            continue
        choices = tuple(texts[1 + len(changed) :])
        if len(set(choices)) != len(choices):
            raise TemplateFault(f"two of the answers are the same: {list(choices)}")
        after = texts[1] if changed else None
        yield Case(failure_class, test.name, test.kind, texts[0], after, choices, answer, test.expect)
