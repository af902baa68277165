"""IFEval with lm-eval's own checkers, offline: what they import is installed, what nltk would fetch is on the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.programs.command import REPOSITORY

DATA = REPOSITORY.parent / "shared" / "data" / "ifeval"
GPT_4 = "input_response_data_gpt4_20231107_145030.jsonl"
PAPER = {
    "prompt_level_strict_acc": 0.7689,
    "inst_level_strict_acc": 0.8357,
    "prompt_level_loose_acc": 0.7930,
    "inst_level_loose_acc": 0.8537,
}
"""GPT-4's figures (Zhou et al. 2023, table 3), over 541 prompts; the copy of its answers has 540."""


def test_the_sentence_splitter_is_nltks_own_and_needs_no_network(tmp_path: Path, monkeypatch) -> None:
    """Of the abbreviations that it learnt from the Wall Street Journal, and of words that begin sentences; also where
    nothing can be kept in the user's cache."""
    import nltk.data

    from evaluation.mirror import checker_data

    (tmp_path / "file").write_text("")
    for home in (tmp_path / "home", tmp_path / "file" / "home"):
        folder = checker_data.nltk_data(home)
        assert folder.is_relative_to(home) == (home.parent == tmp_path)
        monkeypatch.setattr(nltk.data, "path", [str(folder)])
        # As lm-eval's checkers load it.
        splitter = nltk.data.load("nltk:tokenizers/punkt/english.pickle")
        assert len(splitter._params.ortho_context) == 20366 and len(splitter._params.abbrev_types) == 156
        text = "Mr. Vinken is chairman of Elsevier N.V., the Dutch publisher. He met the board in Calif. on Nov. 29."
        first, second = splitter.tokenize(text)
        assert first.endswith("publisher.") and second.startswith("He met"), (first, second)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no {DATA}")
def test_the_checkers_give_gpt_4_the_figures_of_the_paper(tmp_path: Path) -> None:
    """But for the prompt that this copy lacks, an answer that lm-eval's checkers judge otherwise, and two prompts that
    ask for signs, in place of which they count a letter at random. The rest is the same each time, though langdetect
    draws at random too."""
    from evaluation.harness.named_tasks import load_named
    from evaluation.harness.tasks import own_cache, quiet
    from evaluation.mirror_writer import mirror_task

    done = mirror_task("ifeval", DATA, tmp_path / "mirror")
    assert done.splits == {"train": 540} and done.put_aside == 0, "a task that takes no shots scores all its rows"
    with quiet(), own_cache(tmp_path / "cache"):
        (task,) = load_named(["ifeval"], tmp_path / "mirror")
    answers = {}
    for line in (DATA / GPT_4).read_text(encoding="utf8").splitlines():
        row = json.loads(line)
        answers[row["prompt"]] = row["response"]
    rows = [task.process_results(doc, [answers[doc["prompt"]]]) for doc in task.eval_docs]
    for metric, combine in task.aggregation().items():
        assert combine([row[metric] for row in rows]) == pytest.approx(PAPER[metric], abs=0.006), metric
    odd = [doc for doc in task.eval_docs if "language:response_language" in doc["instruction_id_list"]]
    again = [task.process_results(doc, [answers[doc["prompt"]]]) for doc in odd]
    assert len(odd) > 20 and again == [row for row, doc in zip(rows, task.eval_docs, strict=True) if doc in odd]
