"""Eight real sets of ../shared/data, e-mails and raw pages among them, to validated shards with a corpus report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.programs.command import REPOSITORY, Answer

CONFIG = REPOSITORY / "tests" / "corpus" / "real_corpus.yaml"


@pytest.mark.long
def test_real_text_goes_to_shards_with_a_report(run: Callable[..., Answer], shared_data: Path, tmp_path: Path) -> None:
    answer = run("run", CONFIG, "--root", tmp_path / "store")
    assert answer.code == 0, (answer.document["errors"], answer.stderr)
    paths = {stage: Path(row["path"]) for stage, row in answer.rows().items()}
    meta = json.loads((paths["shard"] / "meta.json").read_text())
    assert set(meta["sources"]) == {"books", "wikitext", "wikipedia", "c4", "peps", "forums", "emails", "pages"}
    assert all(one["train"]["tokens"] for one in meta["sources"].values())
    page = (paths["corpus_report"] / "aux" / "corpus_report.html").read_text()
    assert all(f">{name}</td>" in page for name in meta["sources"]) and page.count("<svg") >= 8
    assert f"{meta['train_tokens']:,}" in page
