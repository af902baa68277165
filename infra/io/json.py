"""JSON: the one place that parses it, so that no input can end a command with a traceback.

`json.loads` raises RecursionError for deep nesting, ValueError (not JSONDecodeError) for an integer of over 4,300
digits, and UnicodeDecodeError for bytes that are not UTF-8. It accepts NaN, 1e999 and half of a surrogate pair, which
fail later and elsewhere. `make lint` therefore forbids it everywhere else.

`read_json` and `parse_json` are for files from outside of the store. `read_own_json` and `parse_own_json` are for what
this program, or Python's `json` in a library, has written: they accept what that writes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from infra.errors import Problem, StageError

DEEPEST = 100
"""Nesting that every later reader, writer and comparison can follow, whatever the stack holds by then."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class BadJson(StageError, ValueError):
    """Text that is not the JSON that was expected. Its problem names the file and, where known, the line; `str` is the
    reason alone, for callers with their own error code."""

    def __str__(self) -> str:
        return self.problems[0].message


def parse_json(
    text: str | bytes,
    location: Path | str = "",
    line: int = 0,
    *,
    expected: str = "JSON",
    nan: bool = False,
    surrogates: bool = False,
    unique_keys: bool = False,
) -> Any:
    """Return the value of JSON from outside of the store.

    Args:
        text: JSON; bytes are UTF-8. A byte order mark in front is skipped.
        location: file, URL or the like that an error names.
        line: line of `location` that `text` is, from 1; 0 if `text` is all of it.
        expected: noun phrase for the error message.
        nan: accept NaN and infinity, which configs of some models hold.
        surrogates: accept halves of surrogate pairs, for a caller that repairs them.
        unique_keys: refuse an object with the same key twice, of which JSON keeps the last.

    Raises:
        BadJson: for anything but one value of finite numbers and whole texts, nested at most `DEEPEST` deep.
    """
    try:
        decoded = str(text, "utf8") if isinstance(text, bytes) else text
        decoded = decoded.removeprefix("\ufeff")
        value = _decoder(nan, unique_keys).decode(decoded)
        _check(value, decoded, surrogates)
    except (ValueError, RecursionError) as error:
        _refuse(error, location, line, expected)
    return value


def read_json(path: Path, *, expected: str = "JSON", nan: bool = False, unique_keys: bool = False) -> Any:
    """Return the value of a JSON file from outside of the store: see `parse_json`. Raises OSError too."""
    return parse_json(path.read_bytes(), path, expected=expected, nan=nan, unique_keys=unique_keys)


def parse_own_json(text: str | bytes, location: Path | str = "", line: int = 0) -> Any:
    """Return the value of JSON that Python's `json` wrote. Raises BadJson, for what is cut short or damaged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(error, location, line, "JSON")
    except TypeError:  # the cell of a table that holds no text
        _refuse(ValueError(f"{type(text).__name__} is not text"), location, line, "JSON")


def read_own_json_lines(path: Path) -> Iterator[Any]:
    """Yield the value of each line that is not blank of a file that Python's `json` wrote. Raises BadJson, OSError."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.isspace():
                yield parse_own_json(line, path, number)


def read_own_json(path: Path) -> Any:
    """Return the value of a JSON file that Python's `json` wrote. Raises BadJson and OSError."""
    return parse_own_json(path.read_bytes(), path)


def write_json_lines(path: Path, values: Iterable[Any]) -> None:
    """Write each value as a line of JSON, and create the folder of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf8") as file:
        file.writelines(json.dumps(value, ensure_ascii=False) + "\n" for value in values)


def _refuse(error: ValueError | RecursionError, source: Path | str, line: int, expected: str) -> NoReturn:
    if isinstance(error, json.JSONDecodeError):
        line = line or error.lineno
        reason = f"{error.msg} (column {error.colno})"
    elif isinstance(error, RecursionError):
        reason = "nested too deep"
    elif isinstance(error, UnicodeDecodeError):
        reason = f"not {error.encoding.upper()}: byte {error.start:,} is 0x{error.object[error.start]:02x}"
    elif "integer string conversion" in str(error):
        reason = "a number has more than 4,300 digits"
    else:
        reason = str(error)
    location = f"{source}:{line}" if source and line else str(source)
    raise BadJson(Problem("bad_json", location, f"expected {expected}: {reason}")) from None


@cache
def _decoder(nan: bool, unique_keys: bool) -> json.JSONDecoder:
    return json.JSONDecoder(
        parse_constant=None if nan else _no_constant,
        parse_float=None if nan else _finite,
        object_pairs_hook=_unique if unique_keys else None,
    )


def _check(value: Any, text: str, surrogates: bool) -> None:
    """Raise ValueError for half a surrogate pair, and for deep nesting. Values are looked at only where the text gives
    cause, since that takes longer than the parsing."""
    halves = not surrogates and _may_hold_halves(text)
    if not halves and text.count("[") + text.count("{") <= DEEPEST:
        return
    depth, level = 0, [value]
    while level:
        if depth == DEEPEST and any(isinstance(item, dict | list) for item in level):
            raise ValueError(f"nested more than {DEEPEST} deep")
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += [*item, *item.values()]
            elif isinstance(item, list):
                inner += item
            elif halves and isinstance(item, str) and _SURROGATE.search(item):
                raise ValueError("half of a surrogate pair, which is not text")
        depth, level = depth + 1, inner


def _may_hold_halves(text: str) -> bool:
    if "\\u" in text and _ESCAPED_SURROGATE.search(text):
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:40]} is too large for a number")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated[:80]!r} occurs twice")
    return value
