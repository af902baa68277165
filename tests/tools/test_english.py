"""The check of the project's English: what it finds, what it leaves alone, and its ceilings."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tools import english
from tools.english import Rules, check_file, compare

GOOD = '''"""Return the documents of a shard; docs/corpus.md describes them."""
import click

QUERY = "so many"


def read(kept_ids: list[int]) -> None:
    """Return the documents.

    Args:
        kept_ids: ids (N,) of the documents to keep.
    """
    # Read again: the file may have been replaced.
    raise ValueError(f"{len(kept_ids)} documents are missing from the shard: expected 3")  # 5 documents per second


option = click.option("--limit", help="Maximum number of documents")
'''
BAD = '''"""What a shard contains."""
import click


def looked_at(found: list[int]) -> None:
    """Whether it is read anew."""
    # Nobody told it; it runs at 5 tokens a second
    for _one in found:
        raise ValueError(f"{_one} documents lie there: the file is taken as it is")


option = click.option("--limit", help="How many documents")
'''


def check(folder: Path, name: str, text: str) -> list[tuple[int, str, str]]:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf8")
    return [(found.line, found.kind, found.word) for found in check_file(name, Rules(), folder)]


def test_plain_english_has_no_violations(tmp_path: Path) -> None:
    assert check(tmp_path, "corpus/good.py", GOOD) == []


def test_each_rule_finds_its_word_where_it_stands(tmp_path: Path) -> None:
    assert sorted(check(tmp_path, "corpus/bad.py", BAD)) == sorted(
        [
            (1, "prose", "What …"),
            (5, "names", "looked_at"),
            (5, "names", "found"),
            (6, "prose", "Whether …"),
            (6, "prose", "anew"),
            (7, "prose", "Nobody"),
            (7, "prose", "told"),
            (7, "prose", "tokens a second"),
            (8, "names", "_one"),
            (9, "prose", "as it is"),
            (12, "prose", "How …"),
        ]
    )


def test_strings_of_tests_are_left_alone_and_their_comments_are_not(tmp_path: Path) -> None:
    words = [word for _, kind, word in check(tmp_path, "tests/bad.py", BAD) if kind == "prose"]
    assert "as it is" not in words and "Nobody" in words


def test_markdown_is_checked_outside_of_code(tmp_path: Path) -> None:
    text = "# Page\n\n```bash\nnobody\n```\n\nSee `anew` and [this](anew.md).\nNobody reads it.\n"
    assert check(tmp_path, "docs/page.md", text) == [(8, "prose", "Nobody")]


def test_an_exception_covers_its_words_in_its_files_alone(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    exception = '\n[[exceptions]]\npath = "corpus/"\nwords = ["nobody"]\nreason = "a quotation"\n'
    rules.write_text(english.RULES.read_text(encoding="utf8") + exception, encoding="utf8")
    for folder in ("corpus", "flows"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "code.py").write_text("# nobody is here anew\n", encoding="utf8")
    words = {
        folder: [violation.word for violation in check_file(f"{folder}/code.py", Rules(rules), tmp_path)]
        for folder in ("corpus", "flows")
    }
    assert words == {"corpus": ["anew"], "flows": ["anew", "nobody"]} or words == {
        "corpus": ["anew"],
        "flows": ["nobody", "anew"],
    }


def test_counts_can_only_fall() -> None:
    ceilings = {"cli: prose": 2, "cli: names": 1, "flows: names": 1}
    assert compare(Counter({"cli: prose": 3, "cli: names": 1, "infra: names": 1}), ceilings) == (
        ["cli: prose", "infra: names"],
        ["flows: names"],
    )


@pytest.mark.parametrize(("ceiling", "code"), [(10**6, 1), (0, 1)])
def test_the_command_fails_above_and_below_a_ceiling_and_lowers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ceiling: int, code: int
) -> None:
    (tmp_path / "ceilings.json").write_text(json.dumps({"code.py: names": ceiling}), encoding="utf8")
    (tmp_path / "code.py").write_text("found = 1\n", encoding="utf8")
    monkeypatch.setattr(english, "CEILINGS", tmp_path / "ceilings.json")
    monkeypatch.setattr(english, "checked_paths", lambda: ["code.py"])
    monkeypatch.setattr(
        english, "check_files", lambda paths, rules: [v for path in paths for v in check_file(path, rules, tmp_path)]
    )
    assert english.main([]) == code
    printed = capsys.readouterr().out
    if ceiling:
        assert "fewer than the ceiling" in printed and "--lower" in printed
        assert english.main(["--lower"]) == 0
        assert json.loads((tmp_path / "ceilings.json").read_text(encoding="utf8")) == {"code.py: names": 1}
        assert english.main([]) == 0
    else:
        assert "code.py:1: 'found': write" in printed
        assert english.main(["--lower"]) == 1, "a ceiling is never raised"
