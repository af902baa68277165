"""Names that no file system takes, and values of any length: one short line, and the exit code of bad usage."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.errors import Problem, bounded, quoted
from tests.support.programs.command import stemma

LONG = "n" * 300


@pytest.mark.parametrize(
    "arguments",
    [("init", "data.jsonl", "--to", f"{LONG}.yaml"), ("init", LONG), ("adopt", "clean", LONG), ("verify", LONG)],
    ids=" ".join,
)
def test_a_name_of_300_characters_is_bad_usage(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "some words"}\n')
    paths = [str(tmp_path / one) if LONG in one or one == "data.jsonl" else one for one in arguments]
    answer = stemma(*paths, cwd=tmp_path)
    [error] = answer.document["errors"]
    assert (answer.code, answer.document["status"], error["code"]) == (2, "invalid", "name_too_long")
    assert "255 bytes" in error["message"] and error["fix"]


def test_a_value_of_10_000_characters_is_quoted_in_part(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("name: c\n")
    answer = stemma("check", tmp_path / "c.yaml", "--set", f"pretrain.seed={'x ' * 5000}", cwd=tmp_path)
    [error] = answer.document["errors"]
    assert answer.code == 2 and len(error["message"]) < 400 and "9,999 characters" in error["message"]


def test_every_message_is_bounded() -> None:
    problem = Problem("bad_value", "a" * 10_000, "expected less, got " + "b" * 10_000, "words " * 10_000)
    assert len(str(problem)) < 4_500
    assert problem.message == f"expected less, got {'b' * 200}… (10,000 characters)"
    assert bounded("some words") == "some words"
    assert quoted("b" * 10_000) == f"'{'b' * 200}'… (10,000 characters)"
    assert quoted(10**5_000) == "a number of over 4,300 digits"
