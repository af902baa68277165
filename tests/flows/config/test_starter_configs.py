"""The configs that start from an open model, with a tiny one in its place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.commands import stemma
from tests.support.open_models import save_model, tokenizer_of
from tests.support.programs.command import REPOSITORY, Answer

STARTERS = {
    "lora": ["sft.duration=2 batches", "sft.global_batch_examples=8", "sft.max_length=128", "sft.answers_limit=4"],
    "dpo": ["dpo.duration=2 batches", "dpo.global_batch_pairs=8", "dpo.max_length=128", "dpo.heldout_prompts=2"],
    "continue": [
        "shards.sequence_length=64",
        "continued.duration=2 batches",
        "continued.global_batch_tokens=512",
        "ingest.read.0={kind: docstrings, packages: [numpy], limit_mb: 0.3}",
    ],
}
SHORT = {
    "lora": ["instructions.read.0={kind: docstrings, packages: [numpy], limit: 60}", "sft.heldout_limit=4"],
    "dpo": ["preferences.read.0={kind: docstrings, packages: [numpy], limit: 60}", "dpo.heldout_limit=4"],
    "continue": [],
}


@pytest.fixture(scope="session")
def open_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("open") / "base", tokenizer_of("qwen"))


def words_for(name: str, model: Path, settings: list[str]) -> list[str]:
    options = [word for setting in [f"base_model.path={model}", *settings] for word in ("--set", setting)]
    return [str(REPOSITORY / "configs" / "open-model" / f"{name}.yaml"), *options]


@pytest.mark.parametrize("name", STARTERS)
def test_a_starter_config_passes_its_check_with_a_model(name: str, open_model: Path, tmp_path: Path) -> None:
    words = ["check", *words_for(name, open_model, STARTERS[name]), "--root", str(tmp_path), "--json"]
    checked = CliRunner().invoke(stemma, words)
    document = json.loads(checked.stdout)
    assert checked.exit_code == 0, document["errors"]
    steps = {row["stage"] for row in document["stages"]}
    assert {"lora": "sft", "dpo": "dpo", "continue": "continued"}[name] in steps and "pretrain" not in steps


@pytest.mark.long
@pytest.mark.parametrize("name", STARTERS)
def test_a_starter_config_runs_to_its_end(
    name: str, open_model: Path, run: Callable[..., Answer], tmp_path: Path
) -> None:
    """Risk: a config that is accepted, and fails after the data is prepared."""
    answer = run("run", *words_for(name, open_model, [*STARTERS[name], *SHORT[name]]), "--root", tmp_path / "store")
    assert answer.code == 0, answer.document["errors"]
    assert set(answer.statuses().values()) == {"built"}


def test_init_for_an_open_model_writes_what_check_accepts(
    open_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "library" / "old").mkdir(parents=True)
    book = "".join(f"Once upon a time, on day {day}.\n\n" for day in range(3000))
    (tmp_path / "library" / "old" / "book.txt").write_text(book)
    (tmp_path / "library" / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"Sentence {number}. " * 50}) + "\n" for number in range(9))
    )
    questions = [f"Question {number}" for number in range(12)]
    rows = (json.dumps({"question": text, "answer": "b"}) + "\n" for text in questions)
    (tmp_path / "ask.jsonl").write_text("".join(rows))
    rows = (json.dumps({"prompt": text, "chosen": "b", "rejected": "c"}) + "\n" for text in questions)
    (tmp_path / "best.jsonl").write_text("".join(rows))

    def init(*words: str) -> str:
        wrote = CliRunner().invoke(stemma, ["init", *words, "--model", str(open_model)])
        assert wrote.exit_code == 0, wrote.stderr
        return wrote.stdout

    assert "next: stemma check pairs.yaml" in init("best.jsonl", "--to", "pairs.yaml")
    assert "inputs: {model: base_model, preferences: preferences}" in (tmp_path / "pairs.yaml").read_text()
    init("library", "ask.jsonl", "best.jsonl", "--to", "all.yaml")
    text = (tmp_path / "all.yaml").read_text()
    assert sorted(re.findall(r"name: (library\S*),", text)) in (
        ["library", "library-txt"],
        ["library", "library-jsonl"],
    )
    for name in ("pairs", "all"):
        checked = CliRunner().invoke(stemma, ["check", f"{name}.yaml", "--root", str(tmp_path / "store"), "--json"])
        document = json.loads(checked.stdout)
        assert checked.exit_code == 0, document["errors"]
        steps = {row["stage"] for row in document["stages"]}
        assert {"dpo"} <= steps and ({"continued", "tuned"} <= steps) is (name == "all")
    refused = CliRunner().invoke(stemma, ["init", "best.jsonl", "--model", "library", "--to", "x.yaml"])
    assert refused.exit_code == 2 and "expected a Hugging Face model folder" in refused.stderr
