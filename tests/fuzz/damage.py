"""Strategies that damage valid inputs: their structure, their words, their bytes and their encoding. Most inputs stay
valid enough to be read deeply; each choice that is left out by Hypothesis makes the input more usual.
"""

from __future__ import annotations

import bz2
import copy
import csv
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy, composite


class Raw:
    """A value that stands for text of JSON or YAML which Python's writers do not write."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __deepcopy__(self, memo: object) -> Raw:
        return self

    def __repr__(self) -> str:
        return f"Raw({self.text[:60]!r})"


class Again(str):
    """A key that may be in an object twice."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


RAW = tuple(
    map(
        Raw,
        (
            "NaN", "Infinity", "-Infinity", "1e999", "-0", "-0.0", "1e-400", "01", "+1", "1.", ".5", "0x10", "1_000",
            "1" * 400, "1" * 5_000, "9" * 19, "18446744073709551616", "-9223372036854775809", "1e400",
            '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\\ud83d\\ude00"', '"\\x41"', "'single'", '"open', "tru",
            "undefined", "", "[" * 120 + "]" * 120, "[" * 3_000 + "]" * 3_000, '{"a":' * 1_500 + "1" + "}" * 1_500,
            "[" * 50_000, "{}{}", "[,]", "[1,]", '{"a":1,}', "{1:2}", "// note", "/* note */ 1", '"a\nb"', '"a\tb"',
            "null null", "\u2028", "\ufeff1", "nul\0l",
        ),
    )
)  # fmt: skip
TEXTS = (
    "", " ", "\n", "\t", "\0", "a", "A b", "é", "e\u0301", "\ufeff", "\ufffd", "\u200b", "\u2028", "\u202e", "\x85",
    "\x1b[2J", "\ud800", "\udfff\ud800", "😀", "𝔘", "ﷺ" * 3, "İ", "ß", "\r", "\r\n", "a\0b", "../../etc/passwd", "/",
    "~",
    "-", "--", "-1", "1", "1.5", "1e5", "nan", "inf", "none", "null", "true", "yes", "[]", "{}", "{{ a }}", "{% x %}",
    "{",
    "%s", "%(a)s", "$HOME", "${x}", "a.b", "a..b", ".", "..", "a/b", "a\\b", "http://", "s3://", "s3://b/k", "file:///",
    "x" * 300, "x" * 70_000, "\n" * 5_000, "é" * 5_000, "(" * 2_000, "a" * 50 + "!", "a=b", "1,2", "'", '"', "`", "<b>",
    "<!--", "<script>", "&amp;", "&#xD800;", "&#99999999;", "\\", "\\ud800", "#", "//", "2026-02-31", "9999-99-99",
    "１２", "²", "٣", "0" * 5_000, "\x7f", "\uffff", "\U0010ffff",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 7, 10, 100, 255, 256, 1_000, 65_536, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64,
    -(2**63) - 1, 10**30, 10**400, 0.0, -0.0, 0.5, 1.5, 1e-9, 1e-320, 1e300, -1e300, float("nan"), float("inf"),
    float("-inf"), 0.1 + 0.2,
)  # fmt: skip


@composite
def texts(draw: DrawFn) -> str:
    """A text of a list of odd ones, or of any characters, halves of surrogate pairs too."""
    if draw(st.booleans()):
        return draw(st.sampled_from(TEXTS))
    return draw(st.text(st.characters(exclude_categories=()), max_size=12))


def numbers() -> SearchStrategy[int | float]:
    return st.sampled_from(NUMBERS) | st.integers() | st.floats()


def wild(raw: Sequence[Any] = RAW) -> SearchStrategy[Any]:
    """A value of any type."""
    return st.one_of(
        st.sampled_from((None, True, False, 0, 1, -1, 0.5, "", "x", [], {}, [None], {"": None}, ["x"], [[]], [{}])),
        texts(),
        numbers(),
        st.sampled_from(tuple(raw)),
        st.lists(st.sampled_from((None, 0, "x", [], {}, 1.5, True)), max_size=3),
        st.dictionaries(
            st.sampled_from(("", "a", "role", "content", "x")), st.sampled_from((None, 0, "x", [])), max_size=3
        ),
    )


def locations_in(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values within a value."""
    yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from locations_in(inner, (*at, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from locations_in(inner, (*at, number))


def _get(value: Any, at: Sequence[Any]) -> Any:
    for key in at:
        value = value[key]
    return value


_EDITS = ("replace", "remove", "twice", "rename", "swap", "wrap", "number", "text", "add")


@composite
def edited(draw: DrawFn, values: Sequence[Any], most: int = 4, raw: Sequence[Any] = RAW) -> Any:
    """One of these values of lists and dicts, with up to `most` edits of its structure."""
    value = [copy.deepcopy(draw(st.sampled_from(values)))]
    for _ in range(draw(st.integers(0, most))):
        paths = list(locations_in(value))[1:]
        if not paths:
            break
        at = paths[draw(st.integers(0, len(paths) - 1))]
        parent, key = _get(value, at[:-1]), at[-1]
        old = parent[key]
        match draw(st.sampled_from(_EDITS)):
            case "replace":
                parent[key] = draw(wild(raw))
            case "remove":
                if len(at) > 1:
                    del parent[key]
            case "twice" if isinstance(parent, dict):
                parent[Again(key)] = draw(st.just(copy.deepcopy(old)) | wild(raw))
            case "twice":
                if len(at) > 1:
                    parent.insert(key, copy.deepcopy(old))
            case "rename" if isinstance(parent, dict):
                del parent[key]
                parent[draw(st.sampled_from(("", *map(str, parent), "a", "x.y")) | texts())] = old
            case "swap":
                parent[key] = copy.deepcopy(_get(value, paths[draw(st.integers(0, len(paths) - 1))]))
            case "wrap":
                parent[key] = draw(
                    st.sampled_from(([old], {"a": old}, [[old]], {key: old} if isinstance(key, str) else [old]))
                )
            case "number":
                parent[key] = draw(numbers())
            case "text":
                text = old if isinstance(old, str) else "x"
                cut = draw(st.integers(0, len(text)))
                parent[key] = text[:cut] + draw(texts()) + text[cut:]
            case "add" if isinstance(old, dict):
                old[draw(texts())] = draw(wild(raw))
            case "add" if isinstance(old, list):
                old.append(draw(wild(raw)))
            case _:
                parent[key] = draw(wild(raw))
    return value[0]


def as_json(value: Any, *, is_ascii: bool = True, indent: str = "") -> str:
    """JSON with the texts of `Raw` unchanged."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Mapping):
        items = [
            f"{json.dumps(str(key), ensure_ascii=is_ascii)}: {as_json(item, is_ascii=is_ascii)}"
            for key, item in value.items()
        ]
        return "{" + (indent or "") + f", {indent}".join(items) + (indent or "") + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_json(item, is_ascii=is_ascii) for item in value) + "]"
    return json.dumps(value, ensure_ascii=is_ascii)


def encoded(text: str) -> bytes:
    """UTF-8, with halves of surrogate pairs as they would be."""
    return text.encode("utf8", "surrogatepass")


TOKENS = (
    b"\0", b"\0" * 64, b"\xff", b"\xfe", b"\xef\xbb\xbf", b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\x80",
    b"\xf4\x90\x80\x80",
    b"\xe9", b"\x80", b"\r", b"\r\n", b"\n", b"\n\n", b"\t", b" ", b"\"", b"'", b",", b";", b":", b"[", b"]", b"{",
    b"}", b"<", b">",
    b"&", b"\\", b"\x1b", b"\x0c", b"\x85", b"--", b"---\n", b"#", b"%", b"0", b"-", b"e", b"\x1f\x8b", b"BZh",
    b"PK\x03\x04",
    b"PAR1", b"%PDF", b"\x28\xb5\x2f\xfd", b"\xe2\x80\xa8", b"=", b"*", b"@", b"$", b"\xc3", b"\\u", b"&#0;", b"]]>",
    b"\x00\x01",
)  # fmt: skip
_BYTE_EDITS = ("token", "cut", "flip", "drop", "repeat", "only", "fill")


@composite
def damaged(draw: DrawFn, content: bytes, most: int = 2, tokens: Sequence[bytes] = TOKENS) -> bytes:
    """The content with up to `most` edits of its bytes."""
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, len(content)))
        match draw(st.sampled_from(_BYTE_EDITS)):
            case "token":
                content = content[:at] + draw(st.sampled_from(tokens)) + content[at:]
            case "cut":
                content = content[:at]
            case "flip" if content:
                at = min(at, len(content) - 1)
                content = content[:at] + bytes([content[at] ^ (1 << draw(st.integers(0, 7)))]) + content[at + 1 :]
            case "drop":
                content = content[:at] + content[at + draw(st.integers(1, 40)) :]
            case "repeat":
                size = draw(st.integers(1, 60))
                content = content[:at] + content[at : at + size] * draw(st.integers(2, 40)) + content[at + size :]
            case "only":
                content = content[at:]
            case "fill":
                size = draw(st.integers(1, 40))
                content = content[:at] + draw(st.binary(min_size=size, max_size=size)) + content[at + size :]
    return content


ENCODINGS = (
    "utf-8",
    "utf-8-sig",
    "utf-16",
    "utf-16-le",
    "utf-16-be",
    "utf-32",
    "latin-1",
    "cp1252",
    "cp037",
    "shift_jis",
    "utf-7",
)


@composite
def recoded(draw: DrawFn, content: bytes) -> bytes:
    """The content in another encoding, where it can be in it."""
    if draw(st.integers(0, 5)):
        return content
    encoding = draw(st.sampled_from(ENCODINGS))
    return content.decode("utf8", "replace").encode(encoding, "replace")


PACKERS = {
    ".gz": lambda content: gzip.compress(content, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: _zstd(content),
}


def _zstd(content: bytes) -> bytes:
    import pyarrow as pa

    return bytes(pa.compress(content, "zstd", asbytes=True))


@composite
def packed(draw: DrawFn, content: bytes) -> tuple[bytes, str]:
    """The content, seldom compressed, and the suffix of that; what is compressed may be damaged."""
    if draw(st.integers(0, 7)):
        return content, ""
    suffix = draw(st.sampled_from(sorted(PACKERS)))
    return draw(damaged(PACKERS[suffix](content), 1)), draw(st.sampled_from((suffix, suffix, suffix, "")))


@composite
def json_files(draw: DrawFn, values: Sequence[Any], most: int = 4) -> bytes:
    """A file of one JSON value."""
    text = as_json(draw(edited(values, most)), is_ascii=draw(st.booleans()))
    return draw(damaged(draw(recoded(encoded(text))), 1))


@composite
def line_files(draw: DrawFn, rows: Sequence[Any], most: int = 4) -> bytes:
    """A file of JSON values in lines; seldom one list, or objects over several lines."""
    values = draw(st.lists(edited(rows, most), min_size=1, max_size=4))
    is_ascii = draw(st.booleans())
    match draw(st.sampled_from(("lines", "lines", "lines", "list", "objects"))):
        case "list":
            text = as_json(values, is_ascii=is_ascii)
        case "objects":
            text = "".join(as_json(value, is_ascii=is_ascii, indent="\n") + "\n" for value in values)
        case _:
            end = draw(st.sampled_from(("\n", "\n", "\r\n", "\n\n")))
            text = "".join(as_json(value, is_ascii=is_ascii) + end for value in values)
    return draw(damaged(draw(recoded(encoded(text))), 1))


YAML_RAW = (
    *RAW,
    *map(
        Raw,
        (
            "!!bool maybe", "!!map x", "!!seq x", "!!int x", "!!float x", "!!timestamp x", "!!binary '%'", "!!null [1]",
            "!!python/object/apply:os.getcwd []", '"\\U00110000"', "*unknown", "&a [*a]", "2026-02-31", "!!set {a}",
            "!own x",
            "<<: 3", "{<<: [1]}", "=", "!!str {a: b}", "{[a]: b}", "{{a: b}: c}", "1:30", "0o17", "0b1", ".nan",
            ".inf", "on",
            "yes", "~", "|\n  a", ">-\n  b", "? a", "- - -", "@a", "`a`", "%a", "12e4567", "1e5", "1_0", "--- a", "...",
            "&a a", "!!omap [a: 1]", "from sweep s", "\x07", "\ttab",
        ),
    ),
)  # fmt: skip


def as_yaml(value: Any, depth: int = 0) -> str:
    """YAML in blocks, with the texts of `Raw` unchanged."""
    pad = "  " * depth
    if isinstance(value, Mapping) and value:
        lines = [f"{pad}{_key(key)}:{_within(item, depth)}" for key, item in value.items()]
        return "\n".join(lines)
    if isinstance(value, list | tuple) and value:
        return "\n".join(f"{pad}-{_within(item, depth)}" for item in value)
    return as_json(value)


def _within(item: Any, depth: int) -> str:
    if isinstance(item, Mapping | list | tuple) and item and depth < 60:
        return "\n" + as_yaml(item, depth + 1)
    return f" {as_json(item)}"


def _key(key: object) -> str:
    text = str(key)
    return text if text.replace("_", "").isalnum() and text.isascii() else json.dumps(text)


@composite
def yaml_files(draw: DrawFn, values: Sequence[Any], most: int = 4) -> bytes:
    """A file of one YAML mapping."""
    value = draw(edited(values, most, YAML_RAW))
    text = as_yaml(value) if draw(st.integers(0, 3)) else as_json(value)
    return draw(damaged(draw(recoded(encoded(text + "\n"))), 1))


@composite
def tables(draw: DrawFn, rows: Sequence[Sequence[str]], delimiters: str = ",;\t|") -> bytes:
    """A file of delimited fields."""
    edited_rows = [list(map(str, row)) for row in rows]
    for _ in range(draw(st.integers(0, 4))):
        row = edited_rows[draw(st.integers(0, len(edited_rows) - 1))]
        at = draw(st.integers(0, len(row)))
        match draw(st.sampled_from(("set", "add", "remove", "row", "copy", "empty"))):
            case "set" if at < len(row):
                row[at] = draw(texts())
            case "add":
                row.insert(at, draw(texts()))
            case "remove":
                del row[at:]
            case "row":
                edited_rows.insert(at % (len(edited_rows) + 1), draw(st.lists(texts(), max_size=5)))
            case "copy":
                edited_rows.append(list(row))
            case "empty":
                row.clear()
    delimiter = draw(st.sampled_from(delimiters))
    quoting = draw(st.sampled_from((csv.QUOTE_MINIMAL, csv.QUOTE_ALL)))
    end = draw(st.sampled_from(("\n", "\r\n", "\r")))
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter, lineterminator=end, quoting=quoting, escapechar="\\").writerows(edited_rows)
    return draw(damaged(draw(recoded(encoded(file.getvalue()))), 2))


@composite
def byte_files(draw: DrawFn, contents: Sequence[bytes], most: int = 4, tokens: Sequence[bytes] = TOKENS) -> bytes:
    """One of these contents, damaged, seldom in another encoding or joined with another."""
    content = draw(st.sampled_from(contents))
    if not draw(st.integers(0, 5)):
        content += draw(st.sampled_from(contents))
    return draw(damaged(draw(recoded(content)), most, tokens))


@composite
def archives(draw: DrawFn, members: Mapping[str, bytes], tokens: Sequence[bytes] = TOKENS) -> bytes:
    """A ZIP archive whose members are damaged before they are packed."""
    file = io.BytesIO()
    names = list(members)
    hit = draw(st.sampled_from(names))
    with zipfile.ZipFile(file, "w", draw(st.sampled_from((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED)))) as archive:
        for name in names:
            content = members[name]
            if name == hit:
                match draw(st.sampled_from(("damage", "damage", "damage", "remove", "rename", "twice"))):
                    case "damage":
                        content = draw(damaged(draw(recoded(content)), 4, tokens))
                    case "remove":
                        continue
                    case "rename":
                        name = draw(st.sampled_from(("../a", "/a", "a", name.upper(), f"x/{name}")))
                    case "twice":
                        archive.writestr(name, content)
            archive.writestr(zipfile.ZipInfo(name), content)
    return draw(damaged(file.getvalue(), 1)) if not draw(st.integers(0, 3)) else file.getvalue()
