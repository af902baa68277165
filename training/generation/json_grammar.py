"""Grammars of JSON: every text that is one value of a JSON schema, character by character.

A grammar's state is a set of stacks of symbols that are still to be written, the next one last. White space is bounded,
so that a model cannot write it without end, and so are numbers: a value is written in some of its forms, not in all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

DEEPEST = 400
"""Symbols of a stack; a value that needs more, such as a list in a list in a list, is not begun."""
MOST_VALUES = 1_000
"""Alternatives of `enum` in a schema, and items that `minItems` and `maxItems` count."""
MOST_SYMBOLS = 20_000
DIGITS, INDENTATION = 15, 24
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator",
     "$schema", "$id", "$comment", "$defs", "definitions")
)  # fmt: skip
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": set(), "number": set(), "integer": set(), "boolean": set(), "null": set(),
}  # fmt: skip
_HEX = "[0-9a-fA-F]"
_ESCAPE = rf'\\(?:["\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}))'
"""An escape sequence; halves of surrogate pairs are no text."""
_UNFINISHED = rf"\\(?:u(?:[0-9a-ce-fA-CE-F]{_HEX}{{0,2}}|[dD](?:[0-7]{_HEX}?)?)?)?"
_INSIDE = re.compile(rf'((?:[^"\\\x00-\x1f]|{_ESCAPE})*)({_UNFINISHED}\Z)?')


class Unsupported(ValueError):
    """A schema, or a keyword of one, that no grammar is made of."""


class GrammarRule:
    """A choice of sequences of symbols."""

    def __init__(self, *alternatives: Sequence[Symbol]) -> None:
        self.alternatives: tuple[Sequence[Symbol], ...] = alternatives


@dataclass(frozen=True)
class InString:
    """The rest of a string and its closing quote. escape: the beginning of an escape sequence."""

    escape: str = ""


Symbol = str | frozenset[str] | InString | GrammarRule
"""A text, one character of several, the rest of a string, or a choice."""
Stack = tuple[Symbol, ...]
State = frozenset[Stack]


class Grammar:
    """States of a text, from its first character to its last."""

    def __init__(self, root: Symbol) -> None:
        self.begin: State = frozenset(_expanded((root,)))
        self.next = lru_cache(maxsize=50_000)(_next)

    def advance(self, state: State, text: str) -> State:
        """Return the state after further text, an empty one where no value continues so."""
        for letter in text:
            state = frozenset(stack for before in state for stack in self.next(before, letter))
        return state


def inside_string(escape: str, text: str) -> tuple[str | None, str | None]:
    """Return where a text leads from within a string: to an unfinished escape sequence (often an empty one) and no
    rest, or behind the closing quote with the rest of the text; None and None if a string cannot contain the text."""
    text = escape + text
    inside = _INSIDE.match(text)
    assert inside is not None
    if inside.end() == len(text):
        return inside[2] or "", None
    return (None, text[inside.end() + 1 :]) if text[inside.end()] == '"' else (None, None)


def _next(stack: Stack, letter: str) -> tuple[Stack, ...]:
    if not stack:
        return ()
    *_, symbol = stack
    rest = stack[:-1]
    if isinstance(symbol, InString):
        escape, after = inside_string(symbol.escape, letter)
        return (
            *(((*rest, InString(escape)),) if escape is not None else ()),
            *(_expanded(rest) if after == "" else ()),
        )
    if isinstance(symbol, str):
        if symbol[0] != letter:
            return ()
        return _expanded((*rest, symbol[1:]) if len(symbol) > 1 else rest)
    assert isinstance(symbol, frozenset)
    return _expanded(rest) if letter in symbol else ()


def _expanded(stack: Stack) -> tuple[Stack, ...]:
    """Return the stacks, each with a symbol for a character on top or empty, that a stack stands for."""
    expanded: dict[Stack, None] = {}
    open_stacks = [stack]
    seen: set[Stack] = set()
    while open_stacks:
        stack = open_stacks.pop()
        if stack and isinstance(rule := stack[-1], GrammarRule):
            if len(stack) < DEEPEST and stack not in seen:
                seen.add(stack)  # a schema may refer to itself and to nothing else
                open_stacks += [(*stack[:-1], *reversed(alternative)) for alternative in rule.alternatives]
        else:
            expanded[stack] = None
    return tuple(expanded)


def _repeated(symbol: Symbol, most: int) -> GrammarRule:
    rule = GrammarRule(())
    for _ in range(most):
        rule = GrammarRule((), (symbol, rule))
    return rule


_DIGIT = frozenset("0123456789")
_INTEGER = GrammarRule(("0",), (frozenset("123456789"), _repeated(_DIGIT, DIGITS - 1)))
_SIGNED = GrammarRule((_INTEGER,), ("-", _INTEGER))
_FRACTION = GrammarRule((), (".", _DIGIT, _repeated(_DIGIT, DIGITS - 1)))
_EXPONENT = GrammarRule((), (frozenset("eE"), GrammarRule((), (frozenset("+-"),)), _DIGIT, GrammarRule((), (_DIGIT,))))
_SPACE = GrammarRule((), (" ",), ("\n", _repeated(" ", INDENTATION)))
_COLON = GrammarRule((":",), (": ",))
_STRING = GrammarRule(('"', InString()))
_SIMPLE: dict[str, GrammarRule] = {
    "string": _STRING,
    "number": GrammarRule((_SIGNED, _FRACTION, _EXPONENT)),
    "integer": _SIGNED,
    "boolean": GrammarRule(("true",), ("false",)),
    "null": GrammarRule(("null",)),
}


def _list_of(item: Symbol) -> GrammarRule:
    more = GrammarRule()
    more.alternatives = ((_SPACE, "]"), (",", _SPACE, item, more))
    return GrammarRule(("[", _SPACE, "]"), ("[", _SPACE, item, more))


def _object_of(value: Symbol) -> GrammarRule:
    more = GrammarRule()
    more.alternatives = ((_SPACE, "}"), (",", _SPACE, _STRING, _COLON, value, more))
    return GrammarRule(("{", _SPACE, "}"), ("{", _SPACE, _STRING, _COLON, value, more))


ANY_VALUE = GrammarRule()
ANY_OBJECT = _object_of(ANY_VALUE)
ANY_VALUE.alternatives = tuple(
    (symbol,)
    for name, symbol in (*_SIMPLE.items(), ("object", ANY_OBJECT), ("array", _list_of(ANY_VALUE)))
    if name != "integer"
)


def json_grammar(schema: Mapping[str, Any] | None = None) -> Grammar:
    """Return the grammar of a schema's values, of any object without a schema.

    Raises:
        Unsupported: naming the keyword and its place.
    """
    value = ANY_OBJECT if schema is None else _Schema(schema).value(schema, "")
    if not Grammar(value).begin:
        raise Unsupported("schema: expected a value, but it only refers to itself")
    return Grammar(GrammarRule((_SPACE, value)))


def call_grammar(
    functions: Mapping[str, Mapping[str, Any]], strict: Iterable[str], key: str, before: str, after: str
) -> Grammar:
    """Return the grammar of one call of a function, `{"name": …, KEY: …}`.

    Args:
        functions: Schemas of the arguments by name.
        strict: Functions whose whole schema is kept; of others the keywords that grammars have.
        key: Of the arguments.
        before: Text before the call.
        after: Text behind it.

    Raises:
        Unsupported: naming the keyword and its place.
    """
    strict = set(strict)
    calls: list[Sequence[Symbol]] = []
    for name, schema in functions.items():
        arguments: Symbol = ANY_OBJECT
        if schema:
            elsewhere = {"$ref", "anyOf", "oneOf", "allOf"} & set(schema)
            typed = schema if elsewhere else {"type": "object", **schema}
            arguments = _Schema(schema, is_strict=name in strict).value(typed, "")
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
        calls.append((before + head, arguments, "}" + after))
    return Grammar(GrammarRule(*calls))


class _Schema:
    """Symbols of the values of a schema and its parts.

    Args:
        root: The whole schema, in which `$ref` points.
        is_strict: False leaves keywords out that grammars do not have.
    """

    def __init__(self, root: Mapping[str, Any], *, is_strict: bool = True) -> None:
        self._root, self._is_strict = root, is_strict
        self._references: dict[str, GrammarRule] = {}
        self._size = self._values = 0

    def value(self, schema: Any, path: str) -> Symbol:
        """Return the symbol of the values of a part of the schema. path: of the part, for messages."""
        self._size += 1
        if self._size > MOST_SYMBOLS:
            raise Unsupported(f"{path or 'schema'}: expected a schema of at most {MOST_SYMBOLS:,} parts")
        if schema is True:
            return ANY_VALUE
        if not isinstance(schema, Mapping):
            raise Unsupported(f"{path or 'schema'}: expected a schema, an object or true")
        keys = set(schema) - _ANNOTATIONS
        for name, reader in (
            ("$ref", self._reference), ("const", self._constant), ("enum", self._constants), ("anyOf", self._any),
            ("oneOf", self._exactly_one), ("allOf", self._all),
        ):  # fmt: skip
            if name in keys:
                self._refuse(keys - {name} - ({"type"} if name in ("const", "enum") else set()), path, name)
                return reader(schema, path)
        types = schema.get("type")
        if types is None:
            types = next((name for name, known in _OF_TYPE.items() if known & keys), None)
            if types is None:
                self._refuse(keys, path)
                return ANY_VALUE
        types = [types] if isinstance(types, str) else types
        if (
            not isinstance(types, list)
            or not types
            or not all(isinstance(name, str) and name in _OF_TYPE for name in types)
        ):
            raise Unsupported(f"{_at(path, 'type')}: expected one or more of {', '.join(_OF_TYPE)}")
        self._refuse(keys - {"type"} - set().union(*(_OF_TYPE[name] for name in types)), path)
        readers = {"object": self._object, "array": self._array}
        return GrammarRule(*((readers[name](schema, path) if name in readers else _SIMPLE[name],) for name in types))

    def _refuse(self, keys: set[str], path: str, neighbour: str = "") -> None:
        if keys and self._is_strict:
            where = f" beside {neighbour}" if neighbour else ""
            raise Unsupported(f"{_at(path, min(keys))}: this keyword is not supported{where}")

    def _reference(self, schema: Mapping[str, Any], path: str) -> Symbol:
        name = schema["$ref"]
        if name not in self._references:
            target: Any = self._root
            parts = str(name).split("/")
            for part in parts[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                target = target.get(part) if isinstance(target, Mapping) else None
            if parts[0] != "#" or target is None:
                raise Unsupported(f"{_at(path, '$ref')}: nothing in this schema is {name}")
            self._references[name] = rule = GrammarRule()
            rule.alternatives = ((self.value(target, str(name)),),)
        return self._references[name]

    def _constant(self, schema: Mapping[str, Any], path: str) -> Symbol:
        return self._literals([schema["const"]], schema, _at(path, "const"))

    def _constants(self, schema: Mapping[str, Any], path: str) -> Symbol:
        values = schema["enum"]
        if not isinstance(values, list):
            raise Unsupported(f"{_at(path, 'enum')}: expected a list")
        return self._literals(values, schema, _at(path, "enum"))

    def _literals(self, values: Sequence[Any], schema: Mapping[str, Any], path: str) -> Symbol:
        types = _named_types(schema)
        allowed = [value for value in values if not types or types & _types_of(value)]
        self._values += len(allowed)
        if not allowed or self._values > MOST_VALUES:
            raise Unsupported(f"{path}: expected 1 to {MOST_VALUES:,} values of the schema's type")
        # Escaped too: a vocabulary may have some letters in parts alone.
        texts = {json.dumps(value, ensure_ascii=escapes) for value in allowed for escapes in (False, True)}
        return GrammarRule(*((text,) for text in sorted(texts)))

    def _any(self, schema: Mapping[str, Any], path: str, name: str = "anyOf") -> Symbol:
        parts = schema[name]
        if not isinstance(parts, list) or not parts:
            raise Unsupported(f"{_at(path, name)}: expected a list of schemas")
        return GrammarRule(*((self.value(part, f"{_at(path, name)}.{number}"),) for number, part in enumerate(parts)))

    def _exactly_one(self, schema: Mapping[str, Any], path: str) -> Symbol:
        parts = schema["oneOf"] if isinstance(schema["oneOf"], list) else []
        resolved = [self._resolved(part) for part in parts]
        if self._is_strict and not all(
            _exclude_each_other(part, other) for number, part in enumerate(resolved) for other in resolved[:number]
        ):
            raise Unsupported(
                f"{_at(path, 'oneOf')}: alternatives that differ by their type, or by a constant of a required "
                "property, were expected; anyOf has no such condition"
            )
        return self._any(schema, path, "oneOf")

    def _all(self, schema: Mapping[str, Any], path: str) -> Symbol:
        parts = schema["allOf"]
        if not isinstance(parts, list) or len(parts) != 1:
            raise Unsupported(f"{_at(path, 'allOf')}: this keyword is supported with one schema alone")
        return self.value(parts[0], f"{_at(path, 'allOf')}.0")

    def _resolved(self, schema: Any) -> Any:
        for _ in range(8):
            if not isinstance(schema, Mapping) or not str(schema.get("$ref", "")).startswith("#/"):
                break
            target: Any = self._root
            for part in schema["$ref"].split("/")[1:]:
                target = target.get(part) if isinstance(target, Mapping) else None
            schema = target
        return schema

    def _object(self, schema: Mapping[str, Any], path: str) -> Symbol:
        properties, required = dict(schema.get("properties", {})), schema.get("required", [])
        further = schema.get("additionalProperties", True)
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise Unsupported(f"{_at(path, 'required')}: expected a list of names")
        for name in required:
            if name not in properties:
                if further is False:
                    raise Unsupported(f"{_at(path, 'required')}: {name} is not among the properties")
                properties[name] = further
        if not properties:
            if further is False:
                return GrammarRule(("{", _SPACE, "}"))
            return _object_of(self.value(further, _at(path, "additionalProperties")))
        # From the last property to the first: the rest of the object after a property, and before any.
        rest = begin = GrammarRule((_SPACE, "}"))
        for name, part in reversed(properties.items()):
            names = {json.dumps(name, ensure_ascii=escapes) for escapes in (False, True)}
            key = GrammarRule(*((text,) for text in sorted(names)))
            pair = (_SPACE, key, _COLON, self.value(part, f"{_at(path, 'properties')}.{name}"), rest)
            optional = () if name in required else (True,)
            begin = GrammarRule(pair, *((begin,) for _ in optional))
            rest = GrammarRule((",", *pair), *((rest,) for _ in optional))
        return GrammarRule(("{", begin))

    def _array(self, schema: Mapping[str, Any], path: str) -> Symbol:
        first, item = schema.get("prefixItems", []), schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        counts = [least, *([] if most is None else [most])]
        if not isinstance(first, list) or any(
            type(count) is not int or not 0 <= count <= MOST_VALUES for count in counts
        ):
            raise Unsupported(
                f"{path or 'schema'}: a list in prefixItems, and at most {MOST_VALUES:,} in minItems and maxItems, "
                "were expected"
            )
        items = [self.value(part, f"{_at(path, 'prefixItems')}.{number}") for number, part in enumerate(first)]
        if item is False:
            most = min(len(items), len(items) if most is None else most)
            further: Symbol = ANY_VALUE
        else:
            further = self.value(item, _at(path, "items"))
        if most is not None and most < least:
            raise Unsupported(f"{_at(path, 'maxItems')}: expected at least minItems")
        end = GrammarRule((_SPACE, "]"))
        # The rest of the list after each number of items, from the most that are distinguished down to none.
        distinguished = max(least, len(items)) if most is None else most
        rest = end
        if most is None:
            rest = GrammarRule()
            rest.alternatives = ((_SPACE, "]"), (",", _SPACE, further, rest))
        for number in range(distinguished - 1, -1, -1):
            value = items[number] if number < len(items) else further
            step = (_SPACE, value, rest) if number == 0 else (",", _SPACE, value, rest)
            rest = GrammarRule(step, *(((_SPACE, "]"),) if number >= least else ()))
        if distinguished == 0 and most is None:
            rest = GrammarRule((_SPACE, "]"), (_SPACE, further, rest))
        return GrammarRule(("[", rest))


def _at(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _types_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if value is None:
        return {"null"}
    if isinstance(value, int | float):
        return {"number", *(("integer",) if float(value).is_integer() else ())}
    return {"string"} if isinstance(value, str) else {"object"} if isinstance(value, Mapping) else {"array"}


def _exclude_each_other(schema: Any, other: Any) -> bool:
    """Return True if no value is one of both schemas, as far as their types and constants say."""
    if not isinstance(schema, Mapping) or not isinstance(other, Mapping):
        return False
    constants, others = _constants_of(schema), _constants_of(other)
    if constants is not None and others is not None:
        return not any(value in others for value in constants)
    types, other_types = _named_types(schema), _named_types(other)
    if types and other_types and not types & other_types:
        return True
    for name in set(schema.get("required", ())) & set(other.get("required", ())):
        values, other_values = (part.get("properties", {}).get(name) for part in (schema, other))
        if (
            isinstance(values, Mapping)
            and isinstance(other_values, Mapping)
            and _exclude_each_other(values, other_values)
        ):
            return True
    return False


def _constants_of(schema: Mapping[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _named_types(schema: Mapping[str, Any]) -> set[str]:
    types = schema.get("type", ())
    names = {types} if isinstance(types, str) else set(types)
    return names | ({"integer"} if "number" in names else set())
