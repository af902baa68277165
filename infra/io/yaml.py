"""YAML as people write it in configs: plain values only, words stay words, and nothing in a file breaks the reader."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infra.errors import quoted

LONGEST_BYTES = 10_000_000
DEEPEST = 100
MOST_VALUES = 1_000_000
LARGEST = 2**63 - 1
"""Largest whole number: no table or array takes a larger one, and floats made of a much larger one overflow."""


class BadYaml(ValueError):
    """Text that is no YAML of ours. `line` counts from 1; 0 where none is known."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG = "tag:yaml.org,2002:"
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError)
"""Exceptions that PyYAML raises for text that its scanner or a constructor does not expect."""


class _Loader(yaml.SafeLoader):
    """Values are null, booleans, numbers, texts, lists and mappings with texts or numbers for keys.

    Unlike YAML 1.1, as YAML 1.2 does: on, off, yes and no are words (a country, a switch), 1:30 is a text and no
    number, 2026-02-31 too, and 010 is not 8. Where a key wants a boolean, `yes` is still one: validation sees to that.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        try:
            if self.depth > DEEPEST:
                mark = self.peek_event().start_mark
                raise yaml.MarkedYAMLError(problem=f"nested more than {DEEPEST} deep", problem_mark=mark)
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """PyYAML's constructors take it for granted that what a tag announces follows: `!!bool maybe`, `!!map text`."""
        try:
            return super().construct_object(node, deep)
        except _UNREADABLE:
            kind = node.tag.removeprefix(_TAG)
            actual = quoted(node.value) if isinstance(node, yaml.ScalarNode) else "a list or mapping"
            raise yaml.MarkedYAMLError(
                problem=f"expected !!{kind}, found {actual}", problem_mark=node.start_mark
            ) from None


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Refuse a duplicate key in one mapping, which YAML would resolve silently."""
    if not isinstance(node, yaml.MappingNode):
        raise TypeError
    first_lines: dict[Any, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == f"{_TAG}merge":
            continue
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(
                problem="expected text as a key; {{ … }} must be in quotes", problem_mark=key_node.start_mark
            )
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if key in first_lines:
            raise yaml.MarkedYAMLError(
                problem=f"the key {quoted(key)} occurs twice, first in line {first_lines[key]}",
                problem_mark=key_node.start_mark,
            )
        first_lines[key] = line
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    text = str(loader.construct_scalar(node)).replace("_", "")
    try:
        if node.tag.endswith(":int"):
            if abs(number := int(text, 0)) > LARGEST:
                raise OverflowError
            return number
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    except (ValueError, OverflowError) as error:
        is_too_large = isinstance(error, OverflowError) or text.lstrip("+-").isdecimal()
        fault = f"is larger than {LARGEST:,}" if is_too_large else "is not a number"
        raise yaml.MarkedYAMLError(problem=f"{quoted(text, 40)} {fault}", problem_mark=node.start_mark) from None


_KEPT = ("null", "bool", "str", "seq")
_Loader.yaml_constructors = {f"{_TAG}{kind}": yaml.SafeLoader.yaml_constructors[f"{_TAG}{kind}"] for kind in _KEPT}
_Loader.yaml_constructors |= {
    None: yaml.SafeLoader.yaml_constructors[None],  # reports an unknown tag
    f"{_TAG}map": _mapping,
    f"{_TAG}int": _number,
    f"{_TAG}float": _number,
}
_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][\d_]*)|0x[\da-fA-F_]+|0o[0-7_]+|0b[01_]+", "-+0123456789"),
    # As in YAML 1.1 a number without a point is no float: 12e4567 may be a commit. Keys that want one read 1e-5 so.
    (
        "float",
        r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", r"<<", "<"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
):
    _firsts = [*_first.replace("\0", ""), *([""] if "\0" in _first else [])]
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(rf"(?:{_pattern})\Z"), _firsts)


@dataclass(frozen=True)
class Function:
    """Return the Python function that lm-eval's tag `!function` names."""

    name: str


class _TaggedLoader(_Loader):
    """Reads null for values with a tag that is not YAML's own, but lm-eval's `!function`."""


_TaggedLoader.yaml_constructors = {
    **_Loader.yaml_constructors,
    "!function": lambda loader, node: Function(str(node.value)),
    None: lambda loader, node: None,
}


def read_plain(text: str, *, tags: bool = False) -> Any:
    """Return the value of YAML text, trusted or not.

    Args:
        text: one YAML document.
        tags: read null for a value with a tag that is not YAML's own, and `Function` for `!function`, rather than
            refuse it.

    Raises:
        BadYaml: for anything else than plain values.
    """
    line = 0
    try:
        loader = (_TaggedLoader if tags else _Loader)(text)
        try:
            value = loader.get_single_data()
        except (*_UNREADABLE, RecursionError):
            line = loader.get_mark().line + 1
            raise
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise BadYaml(
            str(error.problem or error.context), error.problem_mark.line + 1 if error.problem_mark else 0
        ) from None
    except yaml.YAMLError as error:
        raise BadYaml(str(error).splitlines()[0]) from None
    except RecursionError:
        raise BadYaml("nested too deep", line) from None
    except _UNREADABLE as error:
        raise BadYaml(f"a value that cannot be read: {error}", line) from None
    check_size(value)
    return _without_aliases(value)


def _without_aliases(value: Any) -> Any:
    """Return the value without aliases: each becomes a separate object, so that setting a key (`--set`) changes no
    other."""
    if isinstance(value, dict):
        return {key: _without_aliases(item) for key, item in value.items()}
    return [_without_aliases(item) for item in value] if isinstance(value, list) else value


def check_size(value: Any) -> None:
    """Check that what was read from YAML is finite. Aliases cost nothing where they stand, and all of it where a value
    is written out: `*a` may hold itself, or a thousand times a thousand others. Raises BadYaml."""
    stack = [iter([(value, 0)])]
    count = 0
    while stack:
        entry = next(stack[-1], None)
        if entry is None:
            stack.pop()
            continue
        item, depth = entry
        count += 1
        if depth > DEEPEST:
            raise BadYaml(f"nested more than {DEEPEST} deep")
        if count > MOST_VALUES:
            raise BadYaml(f"more than {MOST_VALUES:,} values, aliases written out")
        texts = [item, *item] if isinstance(item, dict) else [item]
        if any(isinstance(text, str) and not text.isascii() and _SURROGATE.search(text) for text in texts):
            raise BadYaml("half of a surrogate pair, which is not text")
        if isinstance(item, dict | list):
            inner = item.values() if isinstance(item, dict) else item
            stack.append(iter([(child, depth + 1) for child in inner]))


def read_text(path: Path) -> str:
    """The text of a config, suite or the like. Raises OSError, UnicodeDecodeError, or BadYaml for what is no such file:
    a device or a pipe could be read for ever."""
    info = path.stat()
    if stat.S_ISDIR(info.st_mode):
        raise BadYaml("expected a file, but this is a folder")
    if not stat.S_ISREG(info.st_mode):
        raise BadYaml("expected a file, but this is a device, a pipe or a socket")
    if info.st_size > LONGEST_BYTES:
        message = (
            f"expected a file of at most {LONGEST_BYTES / 1e6:.0f} MB, but this one has {info.st_size / 1e6:,.0f} MB"
        )
        raise BadYaml(message)
    return path.read_text(encoding="utf8")
