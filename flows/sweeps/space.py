"""The space of a sweep: the values of a config key, or the range that they are drawn from."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from infra.config import as_json
from infra.errors import ConfigError, Problem
from infra.io.yaml import BadYaml, read_plain

_RANGE = re.compile(r"(?P<low>[^,\[\]{}]+?)\.\.(?P<high>[^,\[\]{}@]+)(?P<log>@log)?")
EXAMPLE = "such as pretrain.optimizer.learning_rate=1e-4,3e-4 or =1e-4..1e-2@log"


@dataclass(frozen=True)
class Choices:
    """Values, each tried in a grid; drawn from with equal chances otherwise."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Range:
    """Numbers between two ends, both included. whole: integers alone. log: even in the logarithm."""

    low: float
    high: float
    log: bool
    whole: bool


Space = Mapping[str, Choices | Range]


def read_space(texts: tuple[str, ...]) -> Space:
    """The values by dotted key, from `KEY=1,2,3` and `KEY=LOW..HIGH[@log]`. Raises ConfigError with all mistakes."""
    space: dict[str, Choices | Range] = {}
    problems = []
    for text in texts:
        key, equals, values = text.partition("=")
        try:
            if not (key and equals and values):
                raise ValueError(f"expected KEY=VALUES, {EXAMPLE}")
            if key in space:
                raise ValueError("the key is given twice")
            space[key] = _values(values)
        except ValueError as error:
            problems.append(Problem("bad_key", f"--key {text}", str(error)))
    if problems:
        raise ConfigError(*problems)
    return space


def _values(text: str) -> Choices | Range:
    if match := _RANGE.fullmatch(text):
        low, high = (_plain(match[end]) for end in ("low", "high"))
        if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high)) or low >= high:
            raise ValueError(f"expected two numbers, the lower one first, {EXAMPLE}")
        if match["log"] and low <= 0:
            raise ValueError("a @log range must begin above zero")
        return Range(low, high, bool(match["log"]), isinstance(low, int) and isinstance(high, int))
    found = _plain(f"[{text}]")
    texts = [json.dumps(value, sort_keys=True) for value in found]
    if twice := next((one for one in texts if texts.count(one) > 1), None):
        raise ValueError(f"the value {twice} is given twice")
    return Choices(tuple(found))


def _plain(text: str) -> Any:
    """A value in YAML; 1e-4 is a number, which YAML 1.1 takes for a text."""
    try:
        value = read_plain(text)
    except BadYaml as error:
        raise ValueError(f"{text!r} is not valid YAML: {error}") from None
    return _numbers(value)


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    read = as_json(value) if isinstance(value, str) else value
    return value if isinstance(read, bool) else read


def grid(space: Space) -> Iterator[dict[str, Any]]:
    """Every combination of the values, the last key's fastest. Ranges are represented by their ends, for checks."""
    values = [one.values if isinstance(one, Choices) else (one.low, one.high) for one in space.values()]
    for combination in itertools.product(*values):
        yield dict(zip(space, combination, strict=True))


def settings_text(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as `--set` takes them."""
    return {key: json.dumps(value) for key, value in settings.items()}


def described(settings: Mapping[str, Any]) -> str:
    """`learning_rate=0.0003 warmup=0`: keys by their last part, if those parts are distinct."""
    last = [key.rpartition(".")[2] for key in settings]
    names = last if len(set(last)) == len(last) else list(settings)
    shown = [value if isinstance(value, str) else json.dumps(value) for value in settings.values()]
    return " ".join(f"{name}={value}" for name, value in zip(names, shown, strict=True)) or "unchanged"


def read_ablation(text: str) -> tuple[str, dict[str, Any]]:
    """`NAME: KEY=VALUE KEY=VALUE` as (name, settings); a value with spaces in quotes. Raises ConfigError."""
    name, colon, rest = text.partition(":")
    try:
        pairs = [word.partition("=") for word in shlex.split(rest)]
        if not (name.strip() and colon and pairs and all(key and equals for key, equals, _ in pairs)):
            raise ValueError("expected NAME: KEY=VALUE …, such as 'no clipping: pretrain.optimizer.gradient_clip=1e9'")
        keys = [key for key, _, _ in pairs]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise ValueError(f"the key {twice} is given twice")
        return name.strip(), {key: _plain(value) for key, _, value in pairs}
    except ValueError as error:
        raise ConfigError(Problem("bad_ablation", f"--ablate {text}", str(error))) from None
