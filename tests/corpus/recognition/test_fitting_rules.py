"""`stemma init` tries the cleaning rules on the user's documents, and turns off those that would drop many of them: on
real text that is no prose (descriptions of installed packages) and on real prose (their licences)."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.commands import stemma
from corpus.clean import clean
from corpus.documents.parts import read_documents
from corpus.ingest import ingest
from corpus.recognition.fitting_rules import fitting_rules
from flows.config.read import load

TEXTS = 25


def descriptions() -> list[str]:
    texts = (package.read_text("METADATA") or "" for package in distributions())
    return [text for text in texts if 1000 < len(text) < 20_000][:TEXTS]


def licences() -> list[str]:
    texts: dict[str, str] = {}
    for package in distributions():
        for file in package.files or ():
            path = Path(str(package.locate_file(file)))
            if file.name.startswith(("LICENSE", "LICENCE")) and file.suffix in ("", ".txt") and path.is_file():
                text = path.read_text(encoding="utf-8", errors="replace")
                texts.setdefault(text[:2000], text)
    return [text for text in texts.values() if 500 < len(text) < 5000][:TEXTS]


def test_init_turns_off_the_rules_that_would_drop_many_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[..., Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = descriptions()
    Path("packages").mkdir()
    for number, text in enumerate(texts):
        Path("packages", f"{number}.rst").write_text(text, encoding="utf8")
    initialised = CliRunner().invoke(stemma, ["init", "packages"])
    assert initialised.exit_code == 0, initialised.stderr
    assert "gopher_quality.min_alphabetic_word_share (at least 0.8): " in initialised.stdout
    written = Path("pipeline.yaml").read_text()
    off = re.search(r"min_alphabetic_word_share: null # 0\.8 would drop (\d+)%", written)
    assert off and int(off[1]) > 50, written

    config = load(Path("pipeline.yaml"))
    assert config.ingest and config.clean
    kept = build(clean, config.clean, documents=build(ingest, config.ingest))
    assert len(list(read_documents(kept))) >= 0.65 * len(texts)


def test_rules_stay_where_they_drop_little_and_for_a_source_that_they_would_drop_alone() -> None:
    prose = licences()
    rules = fitting_rules([prose])
    assert not rules.left_out and not rules.keys and rules.dropped < 0.2
    notes = [f"Note {number}: buy bread" for number in range(20)]
    with_notes = fitting_rules([[*prose, *prose, *prose, *prose], notes])
    names = [left.rule.name for left in with_notes.left_out]
    assert {"min_characters", "gopher_quality.min_words"} <= set(names)
    assert with_notes.keys["min_characters"] is None and with_notes.keys["gopher_quality"]["min_words"] is None
