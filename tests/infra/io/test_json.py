"""JSON from outside of the store: one error for all that is wrong with it, which names file and line."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.errors import StageError
from infra.io.json import BadJson, parse_json, parse_own_json, read_json, read_own_json, read_own_json_lines

REPOSITORY = Path(__file__).parents[3]
DEEP = b"[" * 100_000
BROKEN = {
    "nothing": (b"", "Expecting value"),
    "cut short": (b'{"a": [1,', "Expecting value"),
    "no key": (b"{1: 2}", "Expecting property name"),
    "two values": (b"{} {}", "Extra data"),
    "deep": (DEEP, "nested too deep"),
    "a long integer": (b'{"a": ' + b"1" * 5000 + b"}", "more than 4,300 digits"),
    "Latin-1": ('{"a": "é"}'.encode("latin-1"), "not UTF-8"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    "NUL": (b'{"a": "\0"}', "Invalid control character"),
}
FOREIGN = {
    "NaN": (b"[NaN]", "NaN is not a JSON value"),
    "infinity": (b"[-Infinity]", "-Infinity is not a JSON value"),
    "a large float": (b"[1e999]", "too large"),
    "half a pair": (b'{"a": {"b": ["\\ud800"]}}', "half of a surrogate pair"),
    "half a pair in a key": (b'{"\\uDFff": 1}', "half of a surrogate pair"),
    "rather deep": (b"[" * 101 + b"]" * 101, "nested more than 100 deep"),
}


@pytest.mark.parametrize(("text", "reason"), [*BROKEN.values(), *FOREIGN.values()], ids=[*BROKEN, *FOREIGN])
def test_what_is_wrong_is_one_error_that_names_the_file(text: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "foreign.json"
    path.write_bytes(text)
    with pytest.raises(BadJson, match=reason) as raised:
        read_json(path, expected="an object of names")
    (problem,) = raised.value.problems
    assert problem.path.partition(":")[0] == str(path)
    assert problem.message.startswith("expected an object of names: ")
    assert isinstance(raised.value, StageError) and isinstance(raised.value, ValueError)
    assert pickle.loads(pickle.dumps(raised.value)).problems == raised.value.problems


@pytest.mark.parametrize(("text", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_damaged_file_of_ours_is_one_error_too(text: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_bytes(text)
    if text.startswith(b"\xff\xfe"):
        assert read_own_json(path) == {"a": 1}  # json reads what json could have written
        return
    with pytest.raises(BadJson, match=reason):
        read_own_json(path)


@pytest.mark.parametrize("value", [math.inf, {"a": ["\ud800"]}])
def test_what_json_wrote_is_read_again(value: Any) -> None:
    assert parse_own_json(json.dumps(value)) == value


def test_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n{"a": ')
    rows = read_own_json_lines(path)
    assert [next(rows), next(rows)] == [{"a": 1}, {"a": 2}]
    with pytest.raises(BadJson) as raised:
        next(rows)
    assert raised.value.problems[0].path == f"{path}:4"
    with pytest.raises(BadJson) as raised:
        parse_json('{\n"a": 1,\n}', "a.json")
    assert raised.value.problems[0].path == "a.json:3"


def test_what_is_right_is_read_as_json_reads_it() -> None:
    value = {"é": ["😀", "\u2028", -1.5e-7, 10**400, True, None, {}], "": "\0"}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), "\ufeff" + json.dumps(value)):
        assert parse_json(text) == parse_json(text.encode()) == value
    wide = [[{"a": [1]}]] * 1000
    assert parse_json(json.dumps(wide)) == wide


def test_what_a_caller_asks_for_is_let_through() -> None:
    assert parse_json("[NaN, 1e999]", nan=True)[1] == math.inf
    assert parse_json('["\\ud800"]', surrogates=True) == ["\ud800"]
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(BadJson, match="the key 'a' occurs twice"):
        parse_json('{"b": {"a": 1, "a": 2}}', unique_keys=True)


@pytest.mark.parametrize("call", ["json.load(file)", "json.loads(text)", "orjson.loads(text)", "yaml.safe_load(text)"])
def test_lint_forbids_other_parsers(call: str) -> None:
    code = f"import {call.partition('.')[0]}\n\n{call}\n"
    command = [Path(sys.executable).with_name("ruff"), "check", "--select", "TID251", "--stdin-filename"]
    found = subprocess.run([*command, "corpus/new.py", "-"], input=code, text=True, capture_output=True, cwd=REPOSITORY)
    assert found.returncode == 1 and "TID251" in found.stdout
