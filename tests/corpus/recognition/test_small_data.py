"""`stemma init` on a few files: whatever their number and form, its config has a held-out side in every stage, or it
states what is too little."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from cli.commands import stemma
from corpus.clean import clean
from corpus.dedupe.stage import dedupe
from corpus.documents.parts import is_heldout, make_document
from corpus.ingest import ingest
from corpus.instructions import instructions
from corpus.preferences import preferences
from corpus.shard import shard
from corpus.tokenizer import tokenizer
from flows.config.pipeline_config import PipelineConfig
from flows.config.read import load

FILES = sorted(Path(click.__file__).parent.glob("*.py"), key=lambda file: file.stat().st_size)
"""The source files of click, of 1 to 100 kB; the smallest first."""
TOPICS = ("mill", "ferry", "museum", "garden", "bridge", "harbour", "school", "market", "station", "library")


def note(number: int, sentences: int) -> str:
    """A text of other words than those of other numbers."""
    topic, other = TOPICS[number % 10], TOPICS[(number * 7 + 3) % 10]
    lines = (
        f"On day {number * 31 + each} the keeper of the {topic} wrote {number + each} lines about the {other}, and "
        f"the visitors of the {TOPICS[(number + each) % 10]} read them with care."
        for each in range(sentences)
    )
    return "\n\n".join(lines) + "\n"


def init(*data: str) -> Result:
    return CliRunner().invoke(stemma, ["init", *data])


def made() -> PipelineConfig:
    return load(Path("pipeline.yaml"))


def code_files(count: int) -> None:
    """The `count` files of a middle size, as a folder."""
    middle = [file for file in FILES if file.stat().st_size > 2500][:count]
    assert len(middle) == count
    Path("data").mkdir()
    for file in middle:
        shutil.copy(file, "data")


def notes(count: int, sentences: int) -> None:
    Path("data").mkdir()
    for number in range(count):
        Path("data", f"{number}.{'md' if number % 2 else 'txt'}").write_text(note(number, sentences))


def records(count: int, sentences: int) -> None:
    Path("data").mkdir()
    rows = (json.dumps({"text": note(number, sentences)}) + "\n" for number in range(count))
    Path("data", "rows.jsonl").write_text("".join(rows))


@pytest.mark.parametrize(
    ("written", "count", "size"),
    [
        (code_files, 10, ()),
        (code_files, 1, ()),
        (notes, 2, (24,)),
        (notes, 20, (3,)),
        (records, 5, (12,)),
        (records, 1, (60,)),
        (records, 30, (3,)),
    ],
)
def test_a_few_documents_of_any_form_reach_shards(
    written: Callable[..., None],
    count: int,
    size: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[..., Path],
) -> None:
    monkeypatch.chdir(tmp_path)
    written(count, *size)
    initialised = init("data")
    assert initialised.exit_code == 0, initialised.stderr
    config = made()
    assert config.ingest and config.clean and config.dedupe and config.tokenizer and config.shard and config.pretrain
    kept = build(dedupe, config.dedupe, documents=build(clean, config.clean, documents=build(ingest, config.ingest)))
    trained = build(tokenizer, config.tokenizer, documents=kept)
    meta = json.loads((build(shard, config.shard, documents=kept, tokenizer=trained) / "meta.json").read_text())
    assert meta["validation_sequences"] >= 1
    assert meta["train_tokens"] >= config.pretrain.global_batch_tokens
    assert meta["validation_tokens"] <= meta["train_tokens"]


@pytest.mark.parametrize("count", [2, 5, 12])
def test_a_few_pairs_have_both_sides_and_share_the_split_of_the_documents(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[..., Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    notes(20, 4)
    questions = [f"Who wrote about the {TOPICS[number % 10]} on day {number * 31}?" for number in range(count)]
    chats, judged = Path("chats.jsonl"), Path("judged.jsonl")
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": note(number, 1)}]}
        for number, text in enumerate(questions)
    ]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"prompt": text, "chosen": note(n, 1), "rejected": "I do not know."} for n, text in enumerate(questions)]
    judged.write_text("".join(json.dumps(row) + "\n" for row in rows))
    initialised = init("data", "chats.jsonl", "judged.jsonl")
    assert initialised.exit_code == 0, initialised.stderr
    config = made()
    assert config.instructions and config.preferences and config.shard
    assert config.instructions.heldout_share == config.preferences.heldout_share == config.shard.heldout_share
    for function, section in ((instructions, config.instructions), (preferences, config.preferences)):
        built = build(function, section)
        sides = [len((built / name).read_text().splitlines()) for name in ("train.jsonl", "heldout.jsonl")]
        assert sides[0] >= sides[1] >= 1
        assert f"min_rows: {max(1, sides[0] // 2)}" in Path("pipeline.yaml").read_text()


def test_enough_documents_keep_the_default_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    records(400, 3)
    assert init("data").exit_code == 0
    written = Path("pipeline.yaml").read_text()
    assert "heldout_share" not in written and "min_rows" not in written


def test_check_names_documents_of_which_none_is_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained = (text for text in map(note, range(40), repeat(6)) if not is_heldout(make_document(text, "").id, 0.05))
    Path("rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in islice(trained, 12)))
    config = "name: few\ningest: {read: [{kind: files, paths: [rows.jsonl]}]}\ntokenizer: {vocab_size: 300}\nshard:\n"
    Path("few.yaml").write_text(config)
    checked = CliRunner().invoke(stemma, ["check", "few.yaml", "--root", "store"])
    assert checked.exit_code == 0, checked.stderr
    assert "heldout_share 0.05 holds out none of its 12 documents" in checked.stdout
    with Path("rows.jsonl").open("a") as file:
        file.writelines(json.dumps({"text": note(number, 6)}) + "\n" for number in range(40, 100))
    assert "holds out none" not in CliRunner().invoke(stemma, ["check", "few.yaml", "--root", "store"]).stdout


def test_too_little_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notes(1, 3)
    refused = init("data")
    assert refused.exit_code == 2 and "too little text to train on one part and to hold out another" in refused.stderr
    assert "documents after cleaning: 1 of 1" in refused.stderr and "add text" in refused.stderr
    Path("data", "more.txt").write_text(note(5, 60))
    rows = [{"instruction": "Who wrote?", "output": note(number, 1)} for number in range(8)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused = init("data", "pairs.jsonl")
    assert refused.exit_code == 2 and "8 different pairs" in refused.stderr and "different prompts" in refused.stderr
    assert not Path("pipeline.yaml").exists()
